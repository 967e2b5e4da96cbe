"""What becomes of the block nodes of real guests' disks: growth, snapshots, mirrors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from brine.common.qmp.client import QmpClient
from brine.hotplug.block_graph import grow_disk, size_of_disk
from brine.hotplug.errors import HotplugError
from brine.hotplug.qemu import Machine as Qemu
from component.hotplug_vm import Vm
from lab.guest_devices import seen_disks, wait_disk
from lab.qcow2 import make_qcow2
from lab.waiting import wait_for

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="networks take root")

DISK = "33333333-2222-4333-8444-555555555555"
SERIAL = DISK[:20]
MIB = 1 << 20


@contextmanager
def qemu_of(vm: Vm) -> Iterator[Qemu]:
    with QmpClient.connect(vm.machine.path(vm.socket)) as qmp:
        yield Qemu(qmp)


@pytest.mark.parametrize("bus", ["pci", "scsi"])
@pytest.mark.parametrize("image_format", ["raw", "qcow2"])
def test_a_guest_sees_at_once_that_its_disk_has_grown(
    vm: Vm, images: Path, bus: str, image_format: str
) -> None:
    image = images / f"growing.{image_format}"
    make_qcow2(image, 8 * MIB) if image_format == "qcow2" else image.write_bytes(bytes(8 * MIB))
    words = ("--path", image, "--uuid", DISK, "--bus", bus, "--format", image_format)
    device = vm.plug("disk", *words)
    assert wait_disk(vm.guest, SERIAL).size_bytes == 8 * MIB
    with qemu_of(vm) as qemu:
        assert grow_disk(qemu, device, 24 * MIB)
        assert size_of_disk(qemu, device) == 24 * MIB
        assert not grow_disk(qemu, device, 24 * MIB)
        with pytest.raises(HotplugError, match="can't shrink"):
            grow_disk(qemu, device, 23 * MIB)
        assert size_of_disk(qemu, device) == 24 * MIB
        with pytest.raises(HotplugError, match="no such device"):
            grow_disk(qemu, device[:-1] + "99", 24 * MIB)
    wait_for("larger disk", lambda: seen_disks(vm.guest)[SERIAL].size_bytes == 24 * MIB)
    vm.guest.run(f"echo grown | dd of=/dev/{seen_disks(vm.guest)[SERIAL].name} seek=40000 2>&1")
    vm.unplug("disk", DISK)
    image.unlink()
