"""How people call a disk of an instance."""

from __future__ import annotations

from brine.instance.store import InstanceError
from brine.vm.address import DeviceKind, DeviceName, short_uuid
from brine.vm.disk import Disk
from brine.vm.spec import Spec
from brine.vm.values import tidy_path


def find_disk(spec: Spec, reference: str) -> Disk:
    """The disk of an instance with that name, UUID, path, serial or id in QEMU.

    :raises InstanceError: if it has none, or several.
    """
    found = [one for one in spec.disks if _is_known_as(one, reference)]
    if len(found) == 1:
        return found[0]
    known = ", ".join(one.name or one.uuid for one in spec.disks) or "none"
    text = f"has {'several disks' if found else 'no disk'} known as {reference}"
    raise InstanceError(spec.name, text, hint=f"its disks are: {known}")


def _is_known_as(disk: Disk, reference: str) -> bool:
    wanted = reference.lower()
    if wanted in (disk.name, disk.uuid, disk.guest_serial().lower()):
        return True
    if reference.startswith("/"):
        return tidy_path(reference) == disk.path
    device = DeviceName.parse(wanted)
    if device is None:
        return False
    return (device.kind, device.part) == (DeviceKind.DISK, short_uuid(disk.uuid))
