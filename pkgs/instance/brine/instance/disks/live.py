"""What a running guest sees of the volumes of its disks."""

from __future__ import annotations

from collections.abc import Iterable

from brine.hotplug.block_graph import device_of, grow_disk
from brine.hotplug.session import working_on
from brine.instance.observe import Oper, look
from brine.instance.store import InstanceError
from brine.storage.volumes import volume_in
from brine.vm.disk import Disk
from brine.vm.files import InstanceFiles


def show_growth(name: str, disks: Iterable[Disk]) -> bool:
    """Have the guest of an instance see the new size of disks; returns whether it runs, and has
    them. QEMU grows an image in a file itself.

    :raises BrineError: why it sees no new size; the next start has it.
    """
    disks = tuple(disks)
    seen = look(name)
    if not disks or seen.spec.is_xen() or seen.state.oper is not Oper.RUNNING:
        for disk in disks:
            if volume_in(disk.unit, disk.uuid).status().size < disk.size_mib << 20:
                text = f"{disk.path}: is in use, and has not grown yet"
                hint = f"stop it, then: brine disk grow {name} {disk.name or disk.uuid} SIZE"
                raise InstanceError(name, text, hint=hint)
        return False
    files = InstanceFiles(name)
    with working_on(files.qmp, runtime=files.runtime) as vm:
        for disk in disks:
            volume = volume_in(disk.unit, disk.uuid).status()
            size = max(volume.size, disk.size_mib << 20)
            grow_disk(vm.machine, device_of(vm.machine, disk.uuid), size)
    return True
