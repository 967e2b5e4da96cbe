"""Settings of one interface, below ``/proc/sys/net`` (``ip-sysctl.rst`` of Linux)."""

from __future__ import annotations

import errno
from pathlib import Path

from brine.common.errors import BrineError

_NET = Path("/proc/sys/net")


def set_interface(
    family: str, link: str, key: str, value: int, *, folder: str = "conf", required: bool = True
) -> None:
    """Set a key of an interface, e.g. ``net.ipv4.conf.LINK.forwarding``.

    :param family: ``ipv4`` or ``ipv6``.
    :param folder: ``conf``, or ``neigh``.
    :param required: False where a kernel without the key needs no setting.
    :raises BrineError: if it can't be set.
    """
    file = _NET / family / folder / link / key
    try:
        file.write_text(f"{value}\n")
    except OSError as error:
        if not required and error.errno == errno.ENOENT:
            return
        raise _error(file, error) from error


def get_interface(family: str, link: str, key: str) -> int:
    """The value of a key of an interface; ``all`` is that of the node as a whole.

    :raises BrineError: if it can't be read.
    """
    file = _NET / family / "conf" / link / key
    try:
        return int(file.read_text())
    except OSError as error:
        raise _error(file, error) from error


def _error(file: Path, error: OSError) -> BrineError:
    hint = None
    if error.errno == errno.ENOENT and not (_NET / "ipv6").exists():
        hint = "this node has no IPv6"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = "be root, where /proc/sys can be written"
    return BrineError(f"{file}: {error.strerror}", hint=hint)
