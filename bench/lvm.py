"""LVM on a file: a loop device of this process's own, and a configuration that sees it alone."""

import contextlib
import fcntl
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from bench.harness import timed
from lab.errors import LabError

GROUP = "bench"
FOLDER = Path("/etc/lvm")
"""Where LVM has its configuration."""

# linux/loop.h and loop(4)
_LOOP_CTL_GET_FREE = 0x4C82
_LOOP_CONFIGURE = 0x4C0A
_LO_FLAGS_AUTOCLEAR = 4
_CONFIGURE = "=II52xI176x64x"  # struct loop_config
_LOOP_MAJOR = 7
_LOOP_CONTROL = (10, 237)
_TRIES = 20

_CONFIGURATION = """
activation {{ udev_sync=0 udev_rules=0 verify_udev_operations=0 monitoring=0 }}
backup {{ backup=0 archive=0 }}
devices {{ filter=[ "a|^{device}$|", "r|.*|" ] obtain_device_list_from_udev=0 }}
"""


@contextlib.contextmanager
def volume_group(file: Path, size: int) -> Iterator[None]:
    """The volume group `GROUP` on a new file of so many bytes, which LVM has for its only one."""
    with _loop_device(file, size) as device:
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / "lvm.conf").write_text(_CONFIGURATION.format(device=device), encoding="utf-8")
        timed(["lvm", "pvcreate", "--quiet", device], ["lvm", "vgcreate", "--quiet", GROUP, device])
        yield


@contextlib.contextmanager
def _loop_device(file: Path, size: int) -> Iterator[str]:
    """A loop device over a new file. The kernel detaches it when this process lets go of it."""
    file.touch()
    os.truncate(file, size)
    with contextlib.ExitStack() as stack:
        backing = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        stack.callback(os.close, backing)
        control = os.open(_special("/dev/loop-control", stat.S_IFCHR, *_LOOP_CONTROL), os.O_RDWR)
        stack.callback(os.close, control)
        for _ in range(_TRIES):
            number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
            device = _special(f"/dev/loop{number}", stat.S_IFBLK, _LOOP_MAJOR, number)
            descriptor = os.open(device, os.O_RDWR | os.O_CLOEXEC)
            try:
                given = struct.pack(_CONFIGURE, backing, 0, _LO_FLAGS_AUTOCLEAR)
                fcntl.ioctl(descriptor, _LOOP_CONFIGURE, given)
            except OSError:  # another process has taken it meanwhile
                os.close(descriptor)
                continue
            stack.callback(os.close, descriptor)
            yield device
            return
    raise LabError("no loop device is free", hint="losetup --list")


def _special(path: str, kind: int, major: int, minor: int) -> str:
    """A device's file. A node has none for the devices of its machine."""
    with contextlib.suppress(FileExistsError):
        os.mknod(path, kind | 0o600, os.makedev(major, minor))
    return path
