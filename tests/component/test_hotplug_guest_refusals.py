"""Guests that keep what is to be taken out: nothing is lost, and a later try works. Guests that are
plugged into again and again: nothing is left, not in QEMU, not on the node, not in us."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from component.hotplug_vm import MACHINES, Vm, nothing_left, start_vm
from lab.brine_command import brine_python
from lab.guest_devices import seen_disks, seen_nics, wait_gone, wait_nic
from lab.machine import Machine
from lab.traces import Traces

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="networks take root")

NIC = "0b5bcb4e-8f2c-4f2e-9ab6-6f7b1b0a3b0d"
MAC = "52:54:00:aa:00:01"
EMPTY = '{"nics": [], "disks": []}'
BRIEFLY = ["--timeout", "1"]


# The firmware waits for a key before it boots the guest, and knows of no removals.
DEAF = ["-boot", "menu=on,splash-time=65535"]


@pytest.fixture
def deaf(machine: Machine) -> Iterator[Vm]:
    """A VM that runs and does not listen, as one whose kernel hangs, or has no driver."""
    with start_vm(machine, "deaf", [*MACHINES["pc"], *DEAF]) as vm, nothing_left(vm):
        yield vm


def test_what_the_guest_keeps_stays_and_a_later_try_works(deaf: Vm, images: Path) -> None:
    image = images / "kept.img"
    image.write_bytes(bytes(1 << 20))
    nic = deaf.plug("nic", "--link", "br0", "--mac", MAC, "--uuid", NIC)
    disk = deaf.plug("disk", "--path", image)
    there = _devices(deaf)
    for noun, device in (("nic", nic), ("disk", disk)):
        said = deaf.refusal(noun, "remove", device, *BRIEFLY)
        assert f"{device}: refused by the guest: it did nothing within 1 s" in said
        assert "it is still plugged in" in said
        assert [one["device_id"] for one in deaf.listed(noun)] == [device]
    assert _devices(deaf) == there
    assert [(tap["state"], tap["link"]) for tap in deaf.taps()] == [("open", "br0")]
    # As the guest may still release it, it is not said to be there.
    nic_words = ("--link", "br0", "--mac", MAC, "--uuid", NIC)
    for words in (
        ("nic", "add", *nic_words),
        ("nic", "add", *nic_words, "--dry-run"),
        ("nic", "modify", NIC, "--link", "br0"),
        ("disk", "add", "--path", image),
    ):
        said = deaf.refusal(*words)
        assert "the guest was asked to release it, and may still do so" in said
        assert f"brine {words[0]} remove" in said
    # QEMU does at a reset what it was asked for.
    deaf.guest.reset()
    assert deaf.plug("nic", *nic_words) == nic
    assert deaf.plug("disk", "--path", image) == disk
    for noun, device in (("nic", nic), ("disk", disk)):
        deaf.refusal(noun, "remove", device, *BRIEFLY)
    deaf.guest.reset()
    for noun, device in (("nic", nic), ("disk", disk)):
        deaf.unplug(noun, device)
        assert deaf.listed(noun) == []


def test_what_the_guest_keeps_is_not_changed(deaf: Vm) -> None:
    device = deaf.plug("nic", "--link", "br0", "--mac", MAC, "--uuid", NIC)
    there = _devices(deaf)
    said = deaf.refusal("nic", "modify", device, "--link", "br1", *BRIEFLY)
    assert "refused by the guest" in said
    assert _devices(deaf) == there
    assert [(tap["state"], tap["link"]) for tap in deaf.taps()] == [("open", "br0")]
    said = deaf.refusal("nic", "add", "--link", "br0", "--mac", MAC, "--uuid", NIC)
    assert "the guest was asked to release it" in said
    # QEMU takes it out at the reset, and the next of us that changes something puts it back.
    deaf.guest.reset()
    deaf.plug("nic", "--link", "br0", "--mac", MAC, "--uuid", NIC)
    assert [one["mac"] for one in deaf.listed("nic")] == [MAC]
    assert [(tap["state"], tap["link"]) for tap in deaf.taps()] == [("open", "br0")]
    # So that it can be changed when the guest lets it.
    deaf.refusal("nic", "remove", device, *BRIEFLY)
    deaf.guest.reset()
    deaf.unplug("nic", device)


def _devices(vm: Vm) -> Traces:
    """The present devices. A removal that was begun stays on record, as it may yet end."""
    return replace(vm.traces(), records=frozenset())


@pytest.mark.parametrize("noun", ["nic", "disk"])
@pytest.mark.parametrize("full", ["/run/full", "/run/brine/operations"])
def test_a_full_disk_leaves_nothing_half_done(pc: Vm, images: Path, noun: str, full: str) -> None:
    """The lock of the runtime file, or that of the records of unfinished work."""
    image = images / "extra.img"
    image.write_bytes(bytes(1 << 20))
    what = ("--link", "br0", "--mac", MAC) if noun == "nic" else ("--path", image)
    machine = pc.machine
    machine.shell(f"mkdir -p {full}; mount -t tmpfs -o size=64k tmpfs {full}")
    try:
        runtime = Path("/run/full/web1.json")
        machine.shell(f"mkdir -p /run/full; echo '{EMPTY}' >{runtime}")
        machine.shell(f"cat /dev/zero >{full}/rest 2>/dev/null || :")
        before = pc.traces()
        said = pc.refusal(noun, "add", *what, "--runtime", runtime)
        assert "can't be written: No space left on device" in said
        assert pc.traces() == before
        assert json.loads(machine.read(runtime)) == json.loads(EMPTY)
        machine.shell(f"rm {full}/rest")
        device = pc.plug(noun, *what, "--runtime", runtime)
        assert device in machine.read(runtime)
        pc.unplug(noun, device, "--runtime", runtime)
    finally:
        machine.shell(f"umount {full}; rm -rf /run/full")


def test_a_vm_that_is_paused_keeps_its_devices(pc: Vm) -> None:
    device = pc.plug("nic", "--link", "br0", "--mac", MAC, "--uuid", NIC)
    wait_nic(pc.guest, MAC)
    pc.guest.qmp("stop")
    said = pc.refusal("nic", "remove", NIC, *BRIEFLY)
    assert f"{device}: refused by the guest: the VM does not run (paused)" in said
    assert [tap["state"] for tap in pc.taps()] == ["open"]
    pc.guest.qmp("cont")
    # It may have gone already: the guest was asked, and now it answers.
    pc.unplug("nic", NIC)
    wait_gone(pc.guest, MAC)
    assert pc.taps() == []


def test_a_device_may_be_plugged_in_before_the_guest_boots(machine: Machine) -> None:
    with start_vm(machine, "unborn", [*MACHINES["pc"], "-S"]) as booted:
        with nothing_left(booted) as vm:
            vm.plug("nic", "--link", "br0", "--mac", MAC)
            vm.guest.qmp("cont")
            vm.guest.wait_ready()
            assert MAC in seen_nics(vm.guest)
            vm.unplug("nic", MAC)
            wait_gone(vm.guest, MAC)


# Again and again.


# All in one process, as a program does that imports Brine. What it has open after the first round,
# such as what Python has loaded, it may keep.
SCRIPT = """
import json, os, sys
from brine.common.cli import main

noun, qmp, image, rounds = sys.argv[1:]
MAC, DISK = "52:54:00:aa:00:01", "11111111-2222-4333-8444-555555555555"

def descriptors():
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sorted(os.readlink(link).split(":[")[0] for link in links if os.path.lexists(link))

def brine(verb, *arguments):
    assert main([noun, verb, "--qmp", qmp, *arguments]) == 0

found = []
sys.stdout = sys.stderr
for number in range(int(rounds)):
    if noun == "nic":
        brine("add", "--link", "br0", "--mac", MAC, "--queues", "2")
        brine("remove", MAC)
    else:
        brine("add", "--path", image, "--uuid", DISK)
        brine("remove", DISK)
    found.append(descriptors())
json.dump([found[0], found[-1]], sys.__stdout__)
"""


@pytest.mark.parametrize("rounds", [10, pytest.param(50, marks=pytest.mark.long)])
def test_many_rounds_leave_nothing(
    booted_pc: Vm, booted_q35: Vm, images: Path, rounds: int
) -> None:
    """NICs of one VM and disks of another, at the same time."""
    image = images / "round.img"
    image.write_bytes(bytes(1 << 20))

    def play(vm: Vm, noun: str) -> None:
        words = (noun, vm.socket, image, str(rounds))
        done = brine_python(vm.machine, SCRIPT, *words, timeout_s=900)
        first, last = json.loads(done.stdout)
        assert last == first
        said = [line.partition(":")[0] for line in done.stderr.splitlines()]
        assert said == ["plugged in", "unplugged"] * rounds

    with nothing_left(booted_pc), nothing_left(booted_q35), ThreadPoolExecutor() as pool:
        playing = [pool.submit(play, booted_pc, "nic"), pool.submit(play, booted_q35, "disk")]
        for each in playing:
            each.result()
    for vm in (booted_pc, booted_q35):
        assert (seen_nics(vm.guest), seen_disks(vm.guest)) == ({}, {})
