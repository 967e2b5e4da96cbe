"""Tap interfaces: making, opening, keeping, finding and removing them.

A tap lives as long as a process has a descriptor of it, so it ends with its QEMU. A persistent tap
(:meth:`Tap.set_persistent`) stays, and a QEMU opens it by its name.

Source: ``Documentation/networking/tuntap.rst`` and ``include/uapi/linux/if_tun.h`` of Linux.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from brine.common.errors import BrineError, printable
from brine.vm.values import MOST_QUEUES, NAME_BYTES, is_interface_name

_TUN_DEVICE = Path("/dev/net/tun")
_VHOST_DEVICE = Path("/dev/vhost-net")

_TUNSETIFF, _TUNSETPERSIST = 0x400454CA, 0x400454CB
_TUNSETOWNER, _TUNSETGROUP = 0x400454CC, 0x400454CE
_IFF_TAP, _IFF_MULTI_QUEUE, _IFF_NO_PI = 0x0002, 0x0100, 0x1000
_IFF_VNET_HDR, _IFF_TUN_EXCL = 0x4000, 0x8000


class TapError(BrineError):
    """A tap that could not be made, opened or removed."""

    def __init__(self, name: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(f"tap {printable(name)}: {message}", hint=hint)


class TapExistsError(TapError):
    """An interface of that name exists."""


class TapBusyError(TapError):
    """A process has the tap open."""


@dataclass(frozen=True)
class Holder:
    """A process that has a tap open, and its command."""

    process: int
    command: str

    def __str__(self) -> str:
        return f"process {self.process} ({self.command})"


@dataclass
class Tap:
    """An open tap: the owner of its descriptors, until they are closed.

    :param name: of the interface.
    :param queues: a descriptor for each queue.
    :param vhost: a descriptor of ``/dev/vhost-net`` for each queue, or none.
    """

    name: str
    queues: tuple[int, ...]
    vhost: tuple[int, ...]

    def __enter__(self) -> Tap:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __str__(self) -> str:
        return self.name

    def close(self) -> None:
        """Close the descriptors. A tap that is not persistent ends with its last descriptor."""
        descriptors = (*self.queues, *self.vhost)
        self.queues = self.vhost = ()
        for descriptor in descriptors:
            os.close(descriptor)

    def set_persistent(self, persistent: bool) -> None:
        """Have the tap stay when its descriptors are closed, or end with them."""
        fcntl.ioctl(self.queues[0], _TUNSETPERSIST, int(persistent))


def check_name(name: str) -> None:
    """Refuse a name that no interface can have.

    :raises TapError: what is wrong with it.
    """
    size = len(os.fsencode(name))
    if not 0 < size <= NAME_BYTES:
        hint = "leave the name out, and it is made from the instance's and the NIC's"
        raise TapError(name or "''", f"a name has 1 to {NAME_BYTES} bytes, not {size}", hint=hint)
    if not is_interface_name(name):
        raise TapError(name, "not a name for an interface: it has a blank, '/', ':' or '%'")


def open_tap(
    name: str,
    *,
    queues: int = 1,
    vhost: bool = False,
    user: int | None = None,
    group: int | None = None,
    reuse: bool = False,
) -> Tap:
    """Make a tap and open it. It ends when the last of its descriptors is closed.

    Each descriptor is close-on-exec. QEMU takes them as ``fds`` and ``vhostfds`` of a ``netdev``.
    Each frame has a virtio header, by which checksums and segmentation can be offloaded.

    :param queues: how many; with more than one the guest's driver may use several processors.
    :param vhost: also open ``/dev/vhost-net``, once for each queue.
    :param user: id of a user who may also open it by its name, while it has a free queue. With
        neither user nor group, only this process's user and those with CAP_NET_ADMIN may, and not
        everybody, as is the kernel's default.
    :param group: the same for a group; with both, one must be that user and in that group.
    :param reuse: open an existing persistent tap, whose owner the caller has checked.
    :raises TapExistsError: if an interface of that name exists, with *reuse* one of another kind.
    :raises TapBusyError: with *reuse*, if a process has it open.
    :raises TapError: if it can't be made.
    """
    check_name(name)
    if not 1 <= queues <= MOST_QUEUES:
        raise TapError(name, f"there can be 1 to {MOST_QUEUES} queues, not {queues}")
    with ExitStack() as undo:

        def opened(device: Path) -> int:
            descriptor = _open(name, device)
            undo.callback(os.close, descriptor)
            return descriptor

        descriptors = [opened(_TUN_DEVICE) for _ in range(queues)]
        flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR | (_IFF_MULTI_QUEUE if queues > 1 else 0)
        # The first descriptor makes the tap, or opens the existing one; the others join it.
        _attach(name, descriptors[0], flags if reuse else flags | _IFF_TUN_EXCL)
        if not reuse:
            owner = owner_for(user, group)
            if owner is not None:
                fcntl.ioctl(descriptors[0], _TUNSETOWNER, owner)
            if group is not None:
                fcntl.ioctl(descriptors[0], _TUNSETGROUP, group)
        for descriptor in descriptors[1:]:
            _attach(name, descriptor, flags)
        vhosts = [opened(_VHOST_DEVICE) for _ in range(queues if vhost else 0)]
        undo.pop_all()
        return Tap(name, tuple(descriptors), tuple(vhosts))


def owner_for(user: int | None, group: int | None) -> int | None:
    """The id of a new tap's owner, for the *user* and *group* of :func:`open_tap`."""
    return os.geteuid() if user is None and group is None else user


def check_devices(name: str, *, vhost: bool) -> None:
    """Refuse what :func:`open_tap` could not open.

    :raises TapError: which device can't be opened.
    """
    for device in (_TUN_DEVICE, _VHOST_DEVICE) if vhost else (_TUN_DEVICE,):
        os.close(_open(name, device))


def _open(name: str, device: Path) -> int:
    try:
        return os.open(device, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        text, hint = f"{device}: {error.strerror}", None
        if error.errno in (errno.ENOENT, errno.ENODEV, errno.ENXIO):
            text = f"there is no {device}"
            hint = "load the kernel's module: modprobe tun"
            if device == _VHOST_DEVICE:
                hint = "load the kernel's module: modprobe vhost_net; or do without vhost"
        elif error.errno in (errno.EACCES, errno.EPERM):
            text, hint = f"{device}: not permitted", "be root"
        elif error.errno in (errno.EMFILE, errno.ENFILE):
            text = f"{device}: too many files are open"
            hint = "close some, or raise the limit (LimitNOFILE= of the unit)"
        raise TapError(name, text, hint=hint) from error


def _attach(name: str, descriptor: int, flags: int) -> None:
    try:
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", os.fsencode(name), flags))
    except OSError as error:
        show = f"see ip -d link show {name}"
        if error.errno == errno.EBUSY and flags & _IFF_TUN_EXCL:
            text = "there is an interface of that name already"
            hint = f"brine tap down {name} removes one of Brine's that no process has open"
            raise TapExistsError(name, text, hint=f"{show}; {hint}") from error
        if error.errno == errno.EBUSY:
            by = ", ".join(map(str, holders(name))) or "a process"
            raise TapBusyError(name, f"{by} has it open") from error
        if error.errno == errno.EINVAL:
            text = "there is an interface of that name, and it is no tap with such queues"
            raise TapExistsError(name, text, hint=show) from error
        if error.errno == errno.EPERM:
            text, hint = "not permitted", "be root; it takes CAP_NET_ADMIN"
            raise TapError(name, text, hint=hint) from error
        raise TapError(name, f"can't be opened: {error.strerror}") from error


def holders(name: str) -> list[Holder]:
    """The processes that have the tap open, as far as this user may see."""
    return held_taps().get(name, [])


def held_taps() -> dict[str, list[Holder]]:
    """All taps of this network namespace that processes have open, with these processes.

    A tap of the same name in another namespace is another one.
    """
    here = os.stat("/proc/self/ns/net")
    found: dict[str, list[Holder]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        # Processes end meanwhile, and not all can be read.
        with contextlib.suppress(OSError):
            names = set(_taps_of(folder))
            if names and os.path.samestat((folder / "ns/net").stat(), here):
                command = (folder / "comm").read_text(errors="replace").strip()
                for name in names:
                    found.setdefault(name, []).append(Holder(int(folder.name), command))
    return found


def _taps_of(folder: Path) -> Iterator[str]:
    for descriptor in os.scandir(folder / "fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(descriptor.path).endswith("/net/tun"):
                continue
            # proc(5): a descriptor of a tap has a line of its own in its fdinfo.
            information = (folder / "fdinfo" / descriptor.name).read_text(errors="surrogateescape")
            for line in information.splitlines():
                key, _, value = line.partition(":\t")
                if key == "iff" and value.strip():
                    yield value.strip()
