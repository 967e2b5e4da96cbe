"""`brine nic` and `brine disk` given what can't be, what is there already, and runtime files.

The VMs are real, and stand still before their first instruction.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from brine.common.qmp.client import QmpClient
from brine.common.qmp.wire import QmpTimeoutError
from component.hotplug_vm import CONTROL, MACHINES, SCSI, Vm, start_vm
from lab.brine_command import brine, prefix
from lab.command import CommandError
from lab.machine import Machine

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="networks take root")

UUID = "0b5bcb4e-8f2c-4f2e-9ab6-6f7b1b0a3b0d"
OTHER_UUID = "11111111-2222-4333-8444-555555555555"
MAC, OTHER_MAC = "52:54:00:aa:00:01", "52:54:00:aa:00:02"
BOOT_MACS = [f"52:54:00:bb:00:0{number}" for number in range(1, 4)]
EMPTY = '{"nics": [], "disks": []}'
BOOT_NICS = [
    *("-netdev", "user,id=n1", "-device", f"virtio-net-pci,netdev=n1,id=net1,mac={BOOT_MACS[0]}"),
    *("-netdev", "user,id=n2", "-device", f"e1000,netdev=n2,mac={BOOT_MACS[1]}"),
    *("-nic", f"user,model=virtio,mac={BOOT_MACS[2]}"),
]
NOWHERE = CONTROL / "nobody.qmp"


@pytest.fixture
def still(machine: Machine) -> Iterator[Vm]:
    """A VM that has not begun to run."""
    with start_vm(machine, "still", [*MACHINES["pc"], *SCSI, "-S"]) as vm:
        yield vm


@pytest.fixture
def runtime(images: Path) -> Path:
    """An empty runtime file."""
    file = images / "web1.json"
    file.write_text(EMPTY)
    return file


@pytest.fixture
def image(images: Path) -> Path:
    """An empty disk."""
    return new_image(images / "disk.img")


def new_image(path: Path) -> Path:
    with path.open("wb") as file:
        file.truncate(1 << 20)
    return path


def recorded(file: Path, kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(file.read_text())[kind]
    return found


def usage_error(machine: Machine, *args: str | Path) -> str:
    """The error of a command that must fail with status 2: one line, and perhaps a hint."""
    with pytest.raises(CommandError) as caught:
        brine(machine, *args)
    assert caught.value.returncode == 2, caught.value
    said: str = caught.value.stderr
    assert re.fullmatch(r"brine: error: .*\n(brine: hint: .*\n)?", said), said
    return said


def record_only(machine: Machine, runtime: Path, noun: str, verb: str, *args: str | Path) -> str:
    """Run a command that changes a runtime file alone."""
    options = ("--no-hotplug", "--qmp", NOWHERE, "--runtime", runtime)
    return brine(machine, noun, verb, *options, *args).stdout


@pytest.mark.parametrize("how", [(), ("--no-hotplug",)])
def test_what_can_be_no_disk_is_refused_at_once(
    still: Vm, images: Path, runtime: Path, how: tuple[str, ...]
) -> None:
    fifo = images / "fifo"
    fifo.unlink(missing_ok=True)
    os.mkfifo(fifo)
    said = still.refusal("disk", "add", "--path", fifo, "--runtime", runtime, *how)
    assert "neither a block device nor a file" in said
    assert runtime.read_text() == EMPTY
    if not how:  # at the next start it may be there
        assert "No such file" in still.refusal("disk", "add", "--path", images / "missing")


def test_a_disk_is_known_by_its_own_name_whatever_that_leads_to(
    machine: Machine, images: Path, runtime: Path
) -> None:
    volume, other = images / "web", images / "db"
    first, second = new_image(images / "dm-3"), new_image(images / "dm-5")
    uuids = []
    # The second time is after a reboot.
    for target, others in ((first, second), (second, first)):
        for link, leads_to in ((volume, target), (other, others)):
            link.unlink(missing_ok=True)
            link.symlink_to(leads_to.name)
        with start_vm(machine, "rebooted", [*MACHINES["pc"], "-S"]) as vm:
            vm.plug("disk", "--path", volume, "--runtime", runtime)
            uuids.append(vm.listed("disk")[0]["uuid"])
            vm.plug("disk", "--path", other, "--runtime", runtime)
            assert [one["path"] for one in recorded(runtime, "disks")] == [str(volume), str(other)]
    assert uuids[0] == uuids[1]


def test_the_uuid_of_a_recorded_disk_is_not_given_to_another(
    machine: Machine, still: Vm, images: Path, runtime: Path
) -> None:
    first, second = new_image(images / "first"), new_image(images / "second")
    record_only(machine, runtime, "disk", "add", "--path", first, "--uuid", UUID)
    before = runtime.read_text()
    for how in ((), ("--dry-run",), ("--no-hotplug",)):
        named = ("--uuid", UUID, "--runtime", runtime)
        said = still.refusal("disk", "add", "--path", second, *named, *how)
        assert f"disk {UUID} is {first} there, not {second}" in said
    assert runtime.read_text() == before
    assert still.listed("disk") == []


def test_what_the_vm_was_started_with_is_not_taken_for_unplugged(
    machine: Machine, images: Path, image: Path, runtime: Path
) -> None:
    options = [
        *MACHINES["pc"],
        *("-S", *BOOT_NICS),
        *("-drive", f"if=none,id=d1,format=raw,file={image}"),
        *("-device", "virtio-blk-pci,drive=d1,id=disk1,serial=boot"),
    ]
    runtime.write_text(
        json.dumps([["kvm"], [{"uuid": UUID, "mac": BOOT_MACS[0], "nicparams": {}}], {}])
    )
    before = runtime.read_text()
    said = "was there when the VM started, and can't be unplugged before its next start"
    with start_vm(machine, "boot", options) as vm:
        for reference in [*BOOT_MACS, "net1", BOOT_MACS[0].upper()]:
            assert said in vm.refusal("nic", "remove", reference), reference
        assert said in vm.refusal("nic", "modify", BOOT_MACS[0], "--link", "br1")
        assert said in vm.refusal("nic", "remove", UUID, "--runtime", runtime)
        for reference in ("boot", "disk1"):
            assert said in vm.refusal("disk", "remove", reference)
        # What is of another kind, was never there, or is not there any more.
        for gone in (MAC, OTHER_UUID, "nic-9fb0b0f9-pci-13"):
            assert vm.unplug("nic", gone) == f"unchanged: {gone} is not plugged in\n"
        for nobodys in ("net1", "never"):
            assert "no disk is known as" in usage_error(
                machine, "disk", "remove", nobodys, "--qmp", vm.socket
            )
    assert runtime.read_text() == before


def test_disks_that_the_runtime_file_has_from_the_start_stay(
    machine: Machine, still: Vm, image: Path, runtime: Path
) -> None:
    runtime.write_text(json.dumps({"nics": [], "disks": [{"uuid": UUID, "path": str(image)}]}))
    for reference in (UUID, UUID[:20]):
        said = still.refusal("disk", "remove", reference, "--runtime", runtime)
        assert "was there when the VM started" in said
        assert "--no-hotplug" in said
    said = record_only(machine, runtime, "disk", "remove", UUID[:20])
    assert said == f"recorded: disk {UUID} is not there at the next start\n"
    assert still.unplug("disk", UUID, "--runtime", runtime).startswith("unchanged: ")


def test_a_mac_address_stands_for_one_nic(machine: Machine) -> None:
    with start_vm(machine, "macs", [*MACHINES["pc"], "-S", *BOOT_NICS]) as vm:
        for mac in BOOT_MACS:
            said = vm.refusal("nic", "add", "--link", "br0", "--mac", mac)
            assert "is the MAC address of a NIC that was there when the VM started" in said
        device = vm.plug("nic", "--link", "br0", "--mac", MAC, "--uuid", UUID)
        # By its MAC alone it is the same one.
        assert vm.plug("nic", "--link", "br0", "--mac", MAC) == device
        said = vm.refusal("nic", "add", "--link", "br1", "--mac", MAC)
        assert f"error: {device}: " in said
        said = vm.refusal("nic", "add", "--link", "br0", "--mac", MAC, "--uuid", OTHER_UUID)
        assert f"{MAC} is the MAC address of {device} already" in said
        other = vm.plug("nic", "--link", "br0", "--mac", OTHER_MAC)
        for mac in (MAC, BOOT_MACS[1]):
            said = vm.refusal("nic", "modify", other, "--mac", mac, "--timeout", "1")
            assert f"{mac} is the MAC address of" in said
        assert [one["mac"] for one in vm.listed("nic")] == [MAC, OTHER_MAC]


def test_what_nobody_says_of_a_nic_is_as_it_is_there(still: Vm) -> None:
    device = still.plug("nic", "--link", "br0", "--mac", MAC, "--index", "0", "--tag", "db")
    (nic,) = still.listed("nic")
    for named in (("--mac", MAC), ("--uuid", nic["uuid"]), ("--mac", MAC, "--index", "0")):
        said = still.brine("nic", "add", "--link", "br0", *named)
        assert said.startswith(f"unchanged: {device}, ")
    said = still.refusal(
        "nic", "add", "--mac", MAC, "--link", "br1", "--queues", "2", "--tag", "web"
    )
    assert f"error: {device}: " in said
    assert ": link br0, queues 1, tags db\n" in said
    assert f"brine nic modify still {device} changes it" in said
    assert [one["mac"] for one in still.listed("nic")] == [MAC]


def test_a_nic_with_a_uuid_has_one_mac_address(machine: Machine, still: Vm, runtime: Path) -> None:
    named = ("--link", "br0", "--uuid", UUID)
    assert still.plug("nic", *named) == still.plug("nic", *named)
    said = record_only(machine, runtime, "nic", "add", *named)
    (entry,) = recorded(runtime, "nics")
    assert entry["mac"]
    assert record_only(machine, runtime, "nic", "add", *named) == f"unchanged{said[8:]}"


def test_a_disk_stands_for_one_by_its_path(still: Vm, images: Path, image: Path) -> None:
    device = still.plug("disk", "--path", image, "--uuid", UUID, "--serial", "data")
    said = still.brine("disk", "add", "--path", image)
    assert said.startswith(f"unchanged: {device}, ")
    link = images / "link.img"
    link.unlink(missing_ok=True)
    link.symlink_to(image)
    said = still.refusal("disk", "add", "--path", link)
    assert f"error: {device}: " in said
    assert f": path {image}\n" in said
    said = still.refusal("disk", "add", "--path", image, "--uuid", OTHER_UUID)
    assert f"error: {image}: " in said
    assert f"as {device}\n" in said
    (listed,) = still.listed("disk")
    assert listed["path"] == str(image)
    for path in (image, link):
        said = still.unplug("disk", str(path), "--dry-run")
        assert said.startswith(f"would be unplugged: {device}, ")
    said = still.unplug("disk", str(images / "none.img"))
    assert said.endswith("none.img is not plugged in\n")


def test_a_disk_of_the_interface_ide_is_not_plugged_in_too(
    still: Vm, image: Path, runtime: Path
) -> None:
    spec = {"disks": [{"path": str(image), "interface": "ide"}]}
    runtime.write_text(json.dumps({"spec": spec, "nics": [], "disks": []}))
    said = still.refusal("disk", "add", "--path", image, "--runtime", runtime)
    assert "the VM has it already, on the interface ide" in said
    said = still.refusal("disk", "remove", str(image), "--runtime", runtime)
    assert "was there when the VM started" in said


def test_a_disk_that_is_there_otherwise_is_refused(still: Vm, images: Path, image: Path) -> None:
    other = new_image(images / "other.img")
    added = ("--path", image, "--uuid", UUID, "--cache", "writeback")
    device = still.plug("disk", *added)
    assert still.plug("disk", *added) == device
    for options in (
        ("--path", other),
        ("--read-only",),
        ("--serial", "other"),
        ("--cache", "unsafe"),
        ("--bus", "scsi"),
    ):
        said = still.refusal("disk", "add", *added, *options)
        assert f"error: {device}: " in said
    assert [one["serial"] for one in still.listed("disk")] == [UUID[:20]]


def test_what_is_plugged_in_and_not_recorded_is_recorded(
    still: Vm, image: Path, runtime: Path
) -> None:
    named = ("--runtime", runtime)
    disk = still.plug("disk", "--path", image, "--bus", "scsi")
    nic = still.plug("nic", "--link", "br0", "--mac", MAC)
    for again in (("--dry-run",), ()):
        assert recorded(runtime, "disks") == recorded(runtime, "nics") == []
        still.plug("disk", "--path", image, "--bus", "scsi", *named, *again)
        still.plug("nic", "--link", "br0", "--mac", MAC, *named, *again)
    (entry,) = recorded(runtime, "disks")
    assert (entry["path"], entry["pci"], entry["bus"]) == (str(image), 0, "scsi0.0")
    assert (entry["hvinfo"]["id"], entry["hvinfo"]["driver"]) == (disk, "scsi-hd")
    (entry,) = recorded(runtime, "nics")
    assert (entry["mac"], entry["pci"], entry["hvinfo"]["id"]) == (MAC, 12, nic)


def test_a_runtime_file_keeps_its_owner_and_mode_and_a_link_to_it_stays(
    still: Vm, images: Path, runtime: Path
) -> None:
    os.chown(runtime, 65534, 1)
    runtime.chmod(0o640)
    link = images / "link.json"
    link.symlink_to(runtime.name)
    still.plug("nic", "--link", "br0", "--mac", MAC, "--runtime", link)
    assert link.is_symlink()
    status = runtime.stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (65534, 1, 0o640)
    assert [one["mac"] for one in recorded(runtime, "nics")] == [MAC]


def test_a_recorded_device_is_removed_by_whatever_it_is_known_by(
    machine: Machine, still: Vm, image: Path, runtime: Path
) -> None:
    named = ("--runtime", runtime)
    nic = still.plug("nic", "--link", "br0", "--mac", MAC, *named)
    disk = still.plug("disk", "--path", image, *named)
    (serial,) = [one["serial"] for one in still.listed("disk")]
    both = runtime.read_text()
    for references in ((nic, disk), (MAC, serial), (MAC, str(image))):
        runtime.write_text(both)
        for noun, reference in zip(("nic", "disk"), references, strict=True):
            assert record_only(machine, runtime, noun, "remove", reference).startswith("recorded: ")
            assert recorded(runtime, f"{noun}s") == []
            said = record_only(machine, runtime, noun, "remove", reference)
            assert said.startswith("unchanged: ")
    options = ("--no-hotplug", "--qmp", NOWHERE, *named)
    said = usage_error(machine, "disk", "remove", "never", *options)
    assert "no disk is known as never" in said


def test_a_recorded_nic_has_its_mac_alone(machine: Machine, runtime: Path) -> None:
    added = ("nic", "add", "--link", "br0", "--mac", MAC)
    record_only(machine, runtime, *added, "--uuid", UUID)
    assert record_only(machine, runtime, *added).startswith(f"unchanged: nic {UUID} ")
    with pytest.raises(CommandError, match=f"is the MAC address of NIC {UUID} there"):
        record_only(machine, runtime, *added, "--uuid", OTHER_UUID)


def test_names_with_odd_bytes(machine: Machine, images: Path, runtime: Path) -> None:
    odd = os.fsencode(images) + b"/odd\xff.qmp"
    command = [*prefix(machine), "nic", "add", "--no-hotplug", "--link", "br\xff", "--mac", MAC]
    words = [os.fsencode(word) for word in machine.command([*command, "--runtime", runtime])]
    done = subprocess.run([*words, b"--qmp", odd], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    (nic,) = recorded(runtime, "nics")
    assert os.fsencode(nic["instance"]) == b"odd\xff"


def test_a_socket_that_leads_to_itself_is_told(machine: Machine, images: Path) -> None:
    loop = images / "loop.qmp"
    loop.symlink_to(loop.name)
    for how in ((), ("--no-hotplug",)):
        with pytest.raises(CommandError) as caught:
            brine(machine, "nic", "add", "--link", "br0", "--qmp", loop, *how)
        assert caught.value.stderr.startswith("brine: error: ")


def test_a_second_client_of_a_monitor_waits_and_is_told_why(still: Vm) -> None:
    with QmpClient.connect(still.guest.qmp_socket) as first:
        with pytest.raises(QmpTimeoutError, match="no greeting within") as late:
            with QmpClient.connect(still.guest.qmp_socket, timeout_s=0.3):
                pass
        assert "one at a time" in (late.value.hint or "")
        assert first.execute("query-status")


# What two VMs would have.


@pytest.fixture
def pair(machine: Machine) -> Iterator[list[Vm]]:
    """Two VMs that have not begun to run, each with a runtime file as an instance's."""
    machine.shell("mount -t tmpfs tmpfs /var/lib; mkdir -p /var/lib/brine/runtime")
    try:
        with ExitStack() as stack:
            vms = []
            for name in ("web1", "web2"):
                machine.path(Path("/var/lib/brine/runtime", f"{name}.json")).write_text(EMPTY)
                options = [*MACHINES["pc"], "-S"]
                vms.append(stack.enter_context(start_vm(machine, name, options)))
            yield vms
    finally:
        machine.shell("umount /var/lib")


def test_two_at_once_do_not_get_one_mac(pair: list[Vm]) -> None:
    def add(vm: Vm, mac: str) -> str:
        try:
            return vm.brine("nic", "add", "--link", "br0", "--mac", mac)
        except CommandError as error:
            return str(error.stderr)

    for number, mac in enumerate(BOOT_MACS, start=1):
        with ThreadPoolExecutor() as pool:
            said = sorted(pool.map(add, pair, [mac, mac]))
        assert f"brine: error: {mac} is the MAC address of web" in said[0]
        assert said[1].startswith("plugged in: ")
        assert sum(len(vm.taps()) for vm in pair) == number


def test_a_mac_of_another_that_runs_is_refused_by_every_way(pair: list[Vm]) -> None:
    first, second = pair
    first.plug("nic", "--link", "br0", "--mac", MAC)
    second.plug("nic", "--link", "br0", "--mac", OTHER_MAC)
    before = [(vm.traces(), vm.listed("nic")) for vm in pair]
    add = ("nic", "add", "--link", "br0", "--mac", MAC.upper())
    change = ("nic", "modify", OTHER_MAC, "--mac", MAC)
    for words in (add, change):
        for options in ((), ("--dry-run",), ("--no-hotplug",)):
            said = second.refusal(*words, *options)
            assert f"{MAC} is the MAC address of web1" in said
    assert [(vm.traces(), vm.listed("nic")) for vm in pair] == before


def test_a_disk_of_another_that_runs_is_refused_by_every_way(pair: list[Vm], image: Path) -> None:
    first, second = pair
    first.plug("disk", "--path", image)
    for options in ((), ("--dry-run",), ("--no-hotplug",)):
        said = second.refusal("disk", "add", "--path", image, *options)
        assert f"{image} is also a disk of web1" in said
