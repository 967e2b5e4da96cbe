"""The clients of a VM's monitor: it serves one at a time, and does not say whom."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from brine.common.errors import BrineError
from brine.common.qmp.wire import QmpTimeoutError
from brine.hotplug.errors import HotplugError


def monitor_holders(qmp_path: Path) -> list[str]:
    """The processes, besides this one, that are connected to a socket, as far as this user may see.

    :param qmp_path: as QEMU was told it.
    :returns: such as ``process 123 (socat)``; those that only wait for their turn are among them.
    """
    inodes = _connected_to(qmp_path)
    return _owners(inodes) if inodes else []


def silence_of(qmp_path: Path, timeout_s: float) -> BrineError:
    """The error to tell of a monitor that did not speak for so long."""
    if holders := monitor_holders(qmp_path):
        return HotplugError(
            f"{qmp_path}: the monitor is in use, and was for {timeout_s:g} s: {', '.join(holders)}",
            hint="it serves one client at a time; have it let go, or use another socket",
        )
    # Whoever is in a network of his own, as the KVM daemon is, is not seen from here.
    if qmp_path.suffix == ".kvmd":
        hint = f"that is the KVM daemon's; tools use {qmp_path.with_suffix('.qmp').name} beside it"
    else:
        hint = "nobody is seen to have its monitor: see whether it hangs or is stopped"
    text = f"{qmp_path}: QEMU does not answer, and did not for {timeout_s:g} s"
    return QmpTimeoutError(text, hint=hint)


def _connected_to(path: Path) -> set[int]:
    """The inodes of clients' sockets. Source: :manpage:`sock_diag(7)`."""
    # Takes long to load, and only a monitor that is silent needs it.
    from pyroute2 import DiagSocket
    from pyroute2.netlink.diag import SS_ALL, UDIAG_SHOW_PEER, UDIAG_SHOW_VFS

    file = os.stat(path).st_ino
    with DiagSocket() as diag:
        diag.bind()
        show = UDIAG_SHOW_PEER | UDIAG_SHOW_VFS
        rows = list(diag.get_sock_stats(family=socket.AF_UNIX, states=SS_ALL, show=show))
    found = set()
    for row in rows:
        bound = row.get_attr("UNIX_DIAG_VFS")
        peer = row.get_attr("UNIX_DIAG_PEER")
        if peer and bound and bound["udiag_vfs_ino"] == file:
            found.add(peer)
    return found


def _owners(inodes: set[int]) -> list[str]:
    wanted = {f"socket:[{inode}]" for inode in inodes}
    found = []
    for process in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):
        if process == os.getpid():
            continue
        folder = Path(f"/proc/{process}")
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            if any(_target(link) in wanted for link in (folder / "fd").iterdir()):
                command = (folder / "comm").read_text().strip()
                found.append(f"process {process} ({command})")
    return found


def _target(link: Path) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(link)
    return ""
