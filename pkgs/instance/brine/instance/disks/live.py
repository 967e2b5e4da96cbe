"""What a running guest sees of the volumes of its disks."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from brine.common.qmp.wire import QmpClosedError
from brine.common.unix_socket import is_listening
from brine.hotplug.block_graph import device_of, grow_disk
from brine.hotplug.session import working_on
from brine.instance.observe import Oper, look
from brine.instance.store import InstanceError
from brine.storage.volumes import volume_in
from brine.vm.disk import Disk, Interface
from brine.vm.files import InstanceFiles


def show_growth(name: str, disks: Iterable[Disk]) -> bool:
    """Have the guest of an instance see the new size of disks; returns whether it does. QEMU grows
    an image in a file itself. A guest that has a disk on IDE sees its new size after a restart.

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
    return all(disk.interface != Interface.IDE for disk in disks)


def settle_vm(name: str) -> None:
    """Have interrupted work on an instance's QEMU be completed or undone, if it runs. So QEMU
    closes what it does not use, and a guest goes on that stood still for that work."""
    qmp = InstanceFiles(name).qmp
    if is_listening(qmp):
        with suppress(QmpClosedError), working_on(qmp):
            pass  # that is all: it comes before other work
