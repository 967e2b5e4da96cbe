"""What becomes of the block nodes of real guests' disks: growth, copies, overlays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from brine.common.qmp.client import QmpClient
from brine.hotplug.block_graph import grow_disk, size_of_disk
from brine.hotplug.errors import HotplugError
from brine.hotplug.qemu import Machine as Qemu
from component.hotplug_vm import Vm
from lab.brine_command import brine, brine_python, kill_at_once, prefix
from lab.command import run_command
from lab.guest_devices import seen_disks, wait_disk
from lab.qcow2 import make_qcow2
from lab.waiting import wait_for

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="networks take root")

DISK = "33333333-2222-4333-8444-555555555555"
SERIAL = DISK[:20]
MIB = 1 << 20

Json = dict[str, Any]


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


# Copies, overlays and merges, by the functions that instances' commands use.

_SCRIPT = """
import json, sys
from pathlib import Path
from brine.hotplug.disk_images import image_of, laying_over, merge_layer, mirror_disk
from brine.vm.disk import Disk
from brine.vm.spec import parse
qmp, *disks = Path(sys.argv[1]), *(parse(Disk, one, "/") for one in json.loads(sys.argv[2]))
"""
_MIRROR = "mirror_disk(qmp, disks[0], rate=int(sys.argv[3]), before_switch=lambda: print('same'))"
_LAY_OVER = """
half = len(disks) // 2
with laying_over(qmp, disks[:half], disks[half:]) as snapshot:
    was_running = snapshot.pause()
    snapshot.take()
print(was_running)
"""
_MERGE = "merge_layer(qmp, int(sys.argv[3]), disks[0])"


def images_python(vm: Vm, script: str, disks: list[dict[str, object]], *args: object) -> str:
    words = (str(vm.socket), json.dumps(disks), *map(str, args))
    return brine_python(vm.machine, _SCRIPT + script, *words).stdout


def plugged(vm: Vm, image: Path, uuid: str = DISK, bus: str = "pci") -> str:
    image.write_bytes(bytes(8 * MIB))
    return vm.plug("disk", "--path", image, "--uuid", uuid, "--bus", bus)


def entry(path: Path, uuid: str = DISK, backing: dict[str, object] | None = None) -> Json:
    image_format = "qcow2" if path.suffix == ".qcow2" else "raw"
    found = {"uuid": uuid, "path": str(path), "format": image_format, "unit": str(path.parent)}
    return {**found, **({"backing": backing} if backing else {})}


def below(one: Json) -> Json:
    return {key: one[key] for key in ("path", "format", "backing") if key in one}


def overlay(path: Path, of: Json) -> Json:
    words = ("-q", "-f", "qcow2", "-b", str(of["path"]), "-F", str(of["format"]))
    run_command(["qemu-img", "create", *words, path])
    return entry(path, str(of["uuid"]), below(of))


def nodes_of(vm: Vm, device: str) -> set[str]:
    found = vm.guest.qmp("query-named-block-nodes")
    return {one["node-name"] for one in found if one["node-name"].startswith(device)}


def write(vm: Vm, name: str, at_mib: int, text: str) -> None:
    vm.guest.run(f"echo {text} | dd of=/dev/{name} bs=1M seek={at_mib} conv=fsync 2>/dev/null")


def read(vm: Vm, name: str, at_mib: int) -> str:
    vm.guest.run("echo 3 >/proc/sys/vm/drop_caches")
    return vm.guest.run(f"dd if=/dev/{name} bs=1M skip={at_mib} count=1 2>/dev/null | head -n 1")


@pytest.mark.parametrize("bus", ["pci", "scsi"])
def test_a_disk_moves_to_another_image_under_a_writing_guest(
    vm: Vm, images: Path, bus: str
) -> None:
    device = plugged(vm, images / "old.raw", bus=bus)
    name = wait_disk(vm.guest, SERIAL).name
    write(vm, name, 1, "before")
    # A file that is renamed is never seen empty.
    writes = f"echo $i | dd of=/dev/{name} bs=1M seek=3 conv=fsync 2>/dev/null"
    notes = "echo $i >/written.new; mv /written.new /written"
    loop = f"i=0; while :; do i=$((i+1)); {writes}; {notes}; done"
    vm.guest.run(f"echo 0 >/written; ({loop}) & echo $! >/writer")
    make_qcow2(images / "new.qcow2", 8 * MIB)
    assert images_python(vm, _MIRROR, [entry(images / "new.qcow2")], 0) == "same\n"
    count = int(vm.guest.run("cat /written"))
    wait_for("writes", lambda: int(vm.guest.run("cat /written")) > count + 1)
    vm.guest.run("kill $(cat /writer); sync")
    assert read(vm, name, 1) == "before\n"
    assert int(read(vm, name, 3)) >= int(vm.guest.run("cat /written"))
    assert [one["path"] for one in vm.listed("disk")] == [str(images / "new.qcow2")]
    assert str(images / "old.raw") not in dict(vm.traces().descriptors)
    assert nodes_of(vm, device) == {f"{device}.1", f"{device}.1.f"}
    vm.unplug("disk", DISK)


def test_a_copy_whose_command_was_killed_is_cancelled_by_the_next(pc: Vm, images: Path) -> None:
    device = plugged(pc, images / "old.raw")
    name = wait_disk(pc.guest, SERIAL).name
    pc.guest.run(f"dd if=/dev/urandom of=/dev/{name} bs=1M count=8 conv=fsync 2>/dev/null")
    make_qcow2(images / "slow.qcow2", 8 * MIB)
    words = [sys.executable, "-P", "-c", _SCRIPT + _MIRROR, str(pc.socket)]
    words += [json.dumps([entry(images / "slow.qcow2")]), "65536"]
    path = next(one for one in prefix(pc.machine) if one.startswith("PYTHONPATH="))
    with subprocess.Popen(pc.machine.command(["env", path, *words])) as process:
        wait_for("job", lambda: pc.guest.qmp("query-jobs"))
        assert "is being copied" in pc.refusal("disk", "remove", DISK)
        kill_at_once(pc.machine, process)
    records = json.loads(brine(pc.machine, "operations", "list", "--json").stdout)
    assert [one["kind"] for one in records] == ["disk-images"]
    brine(pc.machine, "operations", "settle")
    assert pc.guest.qmp("query-jobs") == []
    assert nodes_of(pc, device) == {device}
    assert [one["path"] for one in pc.listed("disk")] == [str(images / "old.raw")]
    write(pc, name, 2, "after")
    assert read(pc, name, 2) == "after\n"
    pc.unplug("disk", DISK)


def test_overlays_of_several_disks_are_laid_and_merged(vm: Vm, images: Path) -> None:
    files, uuids = (images / "one.raw", images / "two.raw"), (DISK, DISK.replace("3", "4"))
    devices = [
        plugged(vm, file, uuid, bus)
        for file, uuid, bus in zip(files, uuids, ("pci", "scsi"), strict=True)
    ]
    names = [wait_disk(vm.guest, uuid[:20]).name for uuid in uuids]
    now = [entry(file, uuid) for file, uuid in zip(files, uuids, strict=True)]
    chains = [now]
    for step in ("first", "second"):
        for name in names:
            write(vm, name, 1, f"before-{step}")
        over = [
            overlay(file.with_suffix(f".{step}.qcow2"), one)
            for file, one in zip(files, chains[-1], strict=True)
        ]
        assert images_python(vm, _LAY_OVER, chains[-1] + over) == "True\n"
        chains.append(over)
    for name in names:
        write(vm, name, 1, "now")
    base = files[0].read_bytes()[MIB : MIB + 20]
    assert base.startswith(b"before-first\n")

    # The middle layer, then the top one.
    merged = {**chains[2][0], "backing": below(now[0])}
    images_python(vm, _MERGE, [merged], 1)
    # The header of the image above is for people's tools: QEMU itself has no paths.
    said = run_command(["qemu-img", "info", "-U", "--output=json", str(merged["path"])]).stdout
    assert json.loads(said)["backing-filename"] == str(files[0])
    assert files[0].read_bytes()[MIB : MIB + 20].startswith(b"before-second\n")
    assert read(vm, names[0], 1) == "now\n"
    images_python(vm, _MERGE, [now[0]], 0)
    assert read(vm, names[0], 1) == "now\n"
    write(vm, names[0], 1, "later")
    assert files[0].read_bytes()[MIB : MIB + 6] == b"later\n"
    paths = {one["device_id"]: one["path"] for one in vm.listed("disk")}
    assert paths == {devices[0]: str(files[0]), devices[1]: chains[2][1]["path"]}
    assert nodes_of(vm, devices[0]) == {devices[0]}
    for uuid in uuids:
        vm.unplug("disk", uuid)
