"""Plugging in and out, again and again, leaves nothing: not in QEMU, not on the node, not in us."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from component.hotplug_vm import Vm, nothing_left
from lab.brine_command import brine_python
from lab.guest_devices import seen_disks, seen_nics

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="networks take root")

ROUNDS = 50

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


def test_fifty_rounds_leave_nothing(booted_pc: Vm, booted_q35: Vm, images: Path) -> None:
    """NICs of one VM and disks of another, at the same time."""
    image = images / "round.img"
    image.write_bytes(bytes(1 << 20))

    def play(vm: Vm, noun: str) -> None:
        words = (noun, vm.socket, image, str(ROUNDS))
        done = brine_python(vm.machine, SCRIPT, *words, timeout_s=900)
        first, last = json.loads(done.stdout)
        assert last == first
        said = [line.partition(":")[0] for line in done.stderr.splitlines()]
        assert said == ["plugged in", "unplugged"] * ROUNDS

    with nothing_left(booted_pc), nothing_left(booted_q35), ThreadPoolExecutor() as pool:
        playing = [pool.submit(play, booted_pc, "nic"), pool.submit(play, booted_q35, "disk")]
        for each in playing:
            each.result()
    for vm in (booted_pc, booted_q35):
        assert (seen_nics(vm.guest), seen_disks(vm.guest)) == ({}, {})
