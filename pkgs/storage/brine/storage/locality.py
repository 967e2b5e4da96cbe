"""Whether another node could have what is behind a disk: shared storage, or this node's own.

What is not known to be this node's own counts as shared.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from brine.common.errors import BrineError
from brine.common.files import text_of
from brine.common.mounts import mount_of, mounts_in
from brine.storage import lvm
from brine.vm.disk import Disk
from brine.vm.values import is_folder_unit

_LOCAL_FILE_SYSTEMS = frozenset(
    {
        *("bcachefs", "btrfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "jfs", "ntfs3", "overlay"),
        *("ramfs", "reiserfs", "tmpfs", "vfat", "xfs", "zfs"),
    }
)
_OWN_DEVICES = re.compile(r"(hd|mmcblk|pmem|ram|vd|xvd|zd|zram)[a-z0-9]+")
_MADE_OF_OTHERS = re.compile(r"(dm-|md|bcache)[0-9]+")
# Of the paths of SCSI devices in sysfs: iSCSI, Fibre Channel.
_OVER_A_NETWORK = re.compile(r"/(session[0-9]+|rport-[0-9:-]+)/")


class Storage:
    """The devices and mounts of this node, as the kernel tells them.

    :param sysfs: and *mounts*: where it does.
    """

    def __init__(
        self, sysfs: Path = Path("/sys"), mounts: Path = Path("/proc/self/mountinfo")
    ) -> None:
        self._sysfs = sysfs
        self._mounts = mounts_in(mounts.read_text(errors="replace"))

    def why_shared(self, disk: Disk) -> str | None:
        """Why another node could have a disk, in words; None if it could not. A disk that its guest
        only reads may be shared."""
        if disk.read_only:
            return None
        fault = self._fault(disk)
        return f"another node could have its disk {disk.path}: {fault}" if fault else None

    def _fault(self, disk: Disk) -> str | None:
        # Storage that does not answer is not touched.
        if not disk.path.startswith("/dev/") and (fault := self._fault_of_file(disk.path)):
            return fault
        try:
            path = os.path.realpath(disk.path, strict=True)
            status = os.stat(path)
        except OSError:
            return self._fault_of_missing(disk)
        if stat.S_ISBLK(status.st_mode):
            return self._fault_of_device(_number(status.st_rdev))
        return self._fault_of_file(path)

    def _fault_of_missing(self, disk: Disk) -> str | None:
        """Of a disk that is not there; its volume may only not be active."""
        if not disk.path.startswith("/dev/") or not disk.unit or is_folder_unit(disk.unit):
            return "it is not there"
        try:
            rows = lvm.report().physical
            devices = [row["pv_name"] for row in rows if row["vg_name"] == disk.unit]
            numbers = [_number(os.stat(one).st_rdev) for one in devices]
        except (BrineError, OSError, KeyError) as error:
            return str(error)
        faults = [self._fault_of_device(one) for one in numbers]
        return next((one for one in faults if one), None) if faults else "it is not there"

    def _fault_of_file(self, path: str) -> str | None:
        mount = mount_of(path, self._mounts)
        if mount is None or mount.kind not in _LOCAL_FILE_SYSTEMS:
            return f"it is on {mount.kind}" if mount else "its file system is not known"
        if not mount.device.startswith("0:"):
            return self._fault_of_device(mount.device)
        if mount.source.startswith("/dev/"):  # of btrfs
            try:
                return self._fault_of_device(_number(os.stat(mount.source).st_rdev))
            except OSError as error:
                return f"{mount.source}: {error.strerror}"
        return None

    def _fault_of_device(self, number: str, depth: int = 0) -> str | None:
        """Of a block device by its number, MAJOR:MINOR."""
        folder = Path(os.path.realpath(self._sysfs / "dev/block" / number))
        if (folder / "partition").exists():
            folder = folder.parent
        name = folder.name
        if not folder.is_dir() or depth > 16:
            return f"the device {number} is not known"
        if _OWN_DEVICES.fullmatch(name):
            return None
        if name.startswith("sd") and (folder / "device").exists():
            where = os.path.realpath(folder / "device")
            return f"{name} is reached over a network" if _OVER_A_NETWORK.search(where) else None
        if name.startswith("nvme"):
            return self._fault_of_nvme(folder)
        if name.startswith("loop"):
            behind = text_of(folder / "loop/backing_file")
            return self._fault_of_file(behind) if behind.startswith("/") else f"{name} has no file"
        if not _MADE_OF_OTHERS.fullmatch(name):
            return f"{name} is no disk of this node's own"
        if text_of(folder / "dm/uuid").startswith("mpath-"):
            return f"{name} is reached on several paths"
        slaves = sorted((folder / "slaves").glob("*"))
        numbers = [text_of(one / "dev") for one in slaves]
        faults = [self._fault_of_device(one, depth + 1) for one in numbers]
        return next((one for one in faults if one), None) if faults else f"{name} is of no device"

    def _fault_of_nvme(self, folder: Path) -> str | None:
        device = Path(os.path.realpath(folder / "device"))
        files = [device / "transport", *device.glob("nvme*/transport")]
        known = {text for one in files if (text := text_of(one))}
        return None if known == {"pcie"} else f"{folder.name} is reached over a network"


def _number(device: int) -> str:
    return f"{os.major(device)}:{os.minor(device)}"
