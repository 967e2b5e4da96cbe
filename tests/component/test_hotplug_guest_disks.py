"""Disks plugged into real guests by `brine disk`, and what the guest has of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from component.hotplug_vm import Vm, nothing_left
from lab.command import run_command
from lab.guest_devices import wait_disk, wait_gone
from lab.qcow2 import make_qcow2

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="networks take root")

DISK = "11111111-2222-4333-8444-555555555555"
SERIAL = DISK[:20]
MIB = 1 << 20
SECTOR = 512


@pytest.fixture
def image(images: Path) -> Iterator[Path]:
    """Eight MiB, of which the second has a text at its beginning."""
    file = images / "data.img"
    with file.open("wb") as disk:
        disk.truncate(8 * MIB)
        disk.seek(MIB)
        disk.write(b"from the host\n")
    yield file
    file.unlink()


@pytest.fixture(scope="module")
def used_to_aio(booted_pc: Vm, images: Path) -> Vm:
    """A guest whose QEMU has the descriptors of each AIO mode: it keeps those of the first use."""
    file = images / "first.img"
    file.write_bytes(bytes(MIB))
    for aio in ("native", "io_uring"):
        booted_pc.plug("disk", "--path", file, "--uuid", DISK, "--aio", aio)
        wait_disk(booted_pc.guest, SERIAL)
        booted_pc.unplug("disk", DISK)
        wait_gone(booted_pc.guest, SERIAL)
    return booted_pc


@pytest.fixture
def pc_with_aio(used_to_aio: Vm) -> Iterator[Vm]:
    with nothing_left(used_to_aio) as vm:
        yield vm


@pytest.mark.parametrize("bus", ["pci", "scsi"])
def test_a_guest_reads_and_writes_a_disk(vm: Vm, image: Path, bus: str) -> None:
    device = vm.plug("disk", "--path", image, "--uuid", DISK, "--bus", bus)
    disk = wait_disk(vm.guest, SERIAL)
    assert disk.name.startswith("vd" if bus == "pci" else "sd")
    assert (disk.size_bytes, disk.read_only) == (8 * MIB, False)
    assert _read(vm, disk.name, MIB) == "from the host"
    _write(vm, disk.name, 2 * MIB, "from the guest")
    assert _bytes_at(image, 2 * MIB, 14) == b"from the guest"
    assert [(one["device_id"], one["serial"]) for one in vm.listed("disk")] == [(device, SERIAL)]

    assert vm.unplug("disk", DISK).startswith(f"unplugged: {device}")
    wait_gone(vm.guest, SERIAL)
    left = vm.traces()
    assert (left.fdsets, left.block_nodes) == ((), frozenset())
    assert str(image) not in dict(left.descriptors)


def test_a_block_device_is_plugged_in_as_one(pc: Vm, images: Path) -> None:
    image = images / "device.img"
    image.write_bytes(b"from the host\n".ljust(MIB, b"\0"))
    device = run_command(["losetup", "--find", "--show", image]).stdout.strip()
    try:
        plugged = pc.plug("disk", "--path", device, "--uuid", DISK)
        nodes = pc.guest.qmp("query-named-block-nodes")
        assert {node["node-name"]: node["drv"] for node in nodes}[plugged] == "host_device"
        name = wait_disk(pc.guest, SERIAL).name
        assert pc.guest.run(f"head -n 1 /dev/{name}") == "from the host\n"
        pc.guest.run(f"echo from the guest | dd of=/dev/{name} conv=fsync,sync 2>/dev/null")
        pc.unplug("disk", DISK)
        wait_gone(pc.guest, SERIAL)
    finally:
        run_command(["losetup", "--detach", device])
    assert image.read_bytes().startswith(b"from the guest\n")


def test_a_disk_that_is_read_only_can_not_be_written(pc: Vm, image: Path) -> None:
    os.chmod(image, 0o400)
    pc.plug("disk", "--path", image, "--uuid", DISK, "--read-only")
    disk = wait_disk(pc.guest, SERIAL)
    assert disk.read_only
    assert _read(pc, disk.name, MIB) == "from the host"
    said = pc.guest.run(f"dd if=/dev/zero of=/dev/{disk.name} bs=512 count=1 2>&1", check=False)
    assert "Operation not permitted" in said
    assert _bytes_at(image, 0, 4) == bytes(4)
    pc.unplug("disk", DISK)


def test_a_qcow2_image_keeps_what_the_guest_wrote(pc: Vm, images: Path) -> None:
    file = images / "data.qcow2"
    make_qcow2(file, 64 * MIB)
    for round_, text in enumerate(["first", "second"]):
        pc.plug("disk", "--path", file, "--uuid", DISK, "--format", "qcow2")
        disk = wait_disk(pc.guest, SERIAL)
        assert disk.size_bytes == 64 * MIB
        if round_:
            assert _read(pc, disk.name, 40 * MIB) == "first"
        _write(pc, disk.name, 40 * MIB, text)
        pc.unplug("disk", DISK)
        wait_gone(pc.guest, SERIAL)
    assert b"second" in file.read_bytes()
    assert file.stat().st_size < MIB


@pytest.mark.parametrize(
    ("cache", "aio", "direct", "no_flush", "writeback"),
    [
        ("none", "threads", True, False, True),
        ("none", "native", True, False, True),
        ("none", "io_uring", True, False, True),
        ("writeback", "threads", False, False, True),
        ("writethrough", "threads", False, False, False),
        ("directsync", "native", True, False, False),
        ("unsafe", "io_uring", False, True, True),
    ],
)
def test_cache_and_aio_are_as_asked_for(
    pc_with_aio: Vm,
    image: Path,
    cache: str,
    aio: str,
    *,
    direct: bool,
    no_flush: bool,
    writeback: bool,
) -> None:
    pc = pc_with_aio
    device = pc.plug("disk", "--path", image, "--uuid", DISK, "--cache", cache, "--aio", aio)
    (node,) = [
        node
        for node in pc.guest.qmp("query-named-block-nodes")
        if node["node-name"] == device and node["drv"] == "file"
    ]
    assert (node["cache"]["direct"], node["cache"]["no-flush"]) == (direct, no_flush)
    (block,) = pc.guest.qmp("query-block")
    assert block["inserted"]["cache"]["writeback"] is writeback
    disk = wait_disk(pc.guest, SERIAL)
    seen = pc.guest.run(f"cat /sys/block/{disk.name}/queue/write_cache").strip()
    assert seen == ("write back" if writeback else "write through")
    _write(pc, disk.name, 3 * MIB, f"{cache} and {aio}")
    assert _bytes_at(image, 3 * MIB, 4) == cache[:4].encode()
    pc.unplug("disk", DISK)


def test_disks_of_both_buses_are_kept_apart(pc: Vm, images: Path) -> None:
    serials = {"one": "pci", "two": "scsi", "three": "scsi", "four": "pci"}
    for serial, bus in serials.items():
        (images / serial).write_bytes(serial.encode().ljust(MIB))
        pc.plug("disk", "--path", images / serial, "--serial", serial, "--bus", bus)
    for serial in serials:
        assert _read(pc, wait_disk(pc.guest, serial).name, 0).strip() == serial
    pc.unplug("disk", "two")
    pc.unplug("disk", "one")
    for serial in ("two", "one"):
        wait_gone(pc.guest, serial)
    assert {disk["serial"] for disk in pc.listed("disk")} == {"three", "four"}
    # A LUN and a slot that became free are used again.
    pc.plug("disk", "--path", images / "two", "--serial", "two", "--bus", "scsi")
    assert _read(pc, wait_disk(pc.guest, "two").name, 0).strip() == "two"
    for serial in ("two", "three", "four"):
        pc.unplug("disk", serial)


def test_a_mounted_disk_is_taken_all_the_same(pc: Vm, image: Path) -> None:
    """virtio-blk has no way to say no: what the guest still does with it fails."""
    pc.plug("disk", "--path", image, "--uuid", DISK)
    name = wait_disk(pc.guest, SERIAL).name
    pc.guest.run(f"mke2fs -q /dev/{name} 2>/dev/null || mkfs.ext2 /dev/{name} >/dev/null")
    pc.guest.run(f"mkdir -p /mnt && mount -t ext4 /dev/{name} /mnt && echo kept >/mnt/file && sync")
    assert pc.unplug("disk", DISK).startswith("unplugged")
    wait_gone(pc.guest, SERIAL)
    said = pc.guest.run(
        "echo nowhere >/mnt/other && sync; cat /mnt/other 2>&1; umount /mnt", check=False
    )
    assert "kept" in image.read_bytes().decode(errors="replace")
    assert b"nowhere" not in image.read_bytes(), said


@pytest.mark.parametrize("bus", ["pci", "scsi"])
def test_a_disk_that_is_held_open_is_taken_all_the_same(pc: Vm, image: Path, bus: str) -> None:
    pc.plug("disk", "--path", image, "--uuid", DISK, "--bus", bus)
    name = wait_disk(pc.guest, SERIAL).name
    pc.guest.run(f"sleep 1000 </dev/{name} & echo $! >/holder")
    assert pc.unplug("disk", DISK).startswith("unplugged")
    wait_gone(pc.guest, SERIAL)
    pc.guest.run("kill $(cat /holder)")


def test_the_runtime_file_is_in_step(pc: Vm, image: Path, images: Path) -> None:
    runtime = images / "web.json"
    runtime.write_text('["qemu-system-x86_64", [], {"acpi": true}]')  # Ganeti's older form
    named = ("--runtime", runtime)
    pc.plug("disk", "--path", image, "--uuid", DISK, "--format", "raw", *named)
    (listed,) = pc.listed("disk")
    command, nics, parameters, disks = json.loads(runtime.read_text())
    assert (command, nics, parameters) == ("qemu-system-x86_64", [], {"acpi": True})
    ((disk, link, _),) = disks
    assert (disk["uuid"], disk["pci"], link) == (DISK, listed["slot"], str(image))
    pc.unplug("disk", DISK, *named)
    assert json.loads(runtime.read_text())[3] == []


def _read(vm: Vm, name: str, offset: int) -> str:
    """The line at an offset of the guest's disk."""
    command = f"dd if=/dev/{name} bs=512 skip={offset // SECTOR} count=1 2>/dev/null"
    return vm.guest.run(f"{command} | tr -d '\\000'").splitlines()[0]


def _write(vm: Vm, name: str, offset: int, text: str) -> None:
    """Have the guest write a line at an offset of its disk, and wait until it is there."""
    target = f"of=/dev/{name} bs=512 seek={offset // SECTOR} conv=fsync,sync"
    vm.guest.run(f"echo {text} | dd {target} 2>/dev/null")


def _bytes_at(file: Path, offset: int, size: int) -> bytes:
    with file.open("rb") as data:
        data.seek(offset)
        return data.read(size)
