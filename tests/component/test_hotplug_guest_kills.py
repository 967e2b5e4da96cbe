"""`brine nic` and `brine disk` killed at every step, and then told the same again.

The guest and its QEMU are real. Between them and the command stands a proxy that knows which step
the command is at, and kills it: when it has sent something that QEMU does not get, or when QEMU has
done it and the command does not hear of it.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from component.hotplug_vm import CONTROL, MACHINES, Vm, nothing_left, start_vm
from lab.brine_command import kill_at_once, prefix
from lab.errors import LabError
from lab.guest_devices import wait_disk, wait_gone, wait_nic
from lab.machine import Machine
from lab.qmp_proxy import QmpProxy, Trap, When, qmp_proxy
from lab.traces import Traces, differences

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="networks take root")

NIC = "0b5bcb4e-8f2c-4f2e-9ab6-6f7b1b0a3b0d"
MAC = "52:54:00:aa:00:01"
DISK = "11111111-2222-4333-8444-555555555555"
SERIAL = DISK[:20]
SEED = 20
ROUNDS = 30

Command = tuple[str, ...]

ADD_NIC = ("nic", "add", "--link", "br0", "--mac", MAC, "--uuid", NIC)
ROUTED = ("--mode", "routed", "--ip", "203.0.113.10", "--ip", "2001:db8:0:2::10")
ADD_ROUTED = ("nic", "add", *ROUTED, "--mac", MAC, "--uuid", NIC)
MODIFY_NIC = ("nic", "modify", NIC, "--link", "br1")
REMOVE_NIC = ("nic", "remove", NIC)
ADD_DISK = ("disk", "add", "--path", "/disk", "--uuid", DISK)
REMOVE_DISK = ("disk", "remove", DISK)


@dataclass(frozen=True)
class Case:
    """A command, what must have been done before, and what undoes it."""

    command: Command
    before: tuple[Command, ...] = ()
    undo: tuple[Command, ...] = ()


CASES = {
    "add-nic": Case(ADD_NIC, undo=(REMOVE_NIC,)),
    "modify-nic": Case(MODIFY_NIC, before=(ADD_NIC,), undo=(REMOVE_NIC,)),
    "remove-nic": Case(REMOVE_NIC, before=(ADD_NIC,)),
    "add-disk": Case(ADD_DISK, undo=(REMOVE_DISK,)),
    "remove-disk": Case(REMOVE_DISK, before=(ADD_DISK,)),
}


@dataclass(frozen=True)
class State:
    """All that one can see of a VM's devices, from each side."""

    traces: Traces
    runtime: Any
    records: list[Any]
    network: frozenset[str]


@dataclass
class Target:
    """A VM behind a proxy, and its runtime file.

    :param steps: the commands that changed something in QEMU, the last time when all went well.
    """

    vm: Vm
    proxy: QmpProxy
    runtime: Path
    disk: Path
    steps: list[str] = field(default_factory=list)

    def run(self, command: Command, *, where: str = "") -> None:
        """Run a command undisturbed; it must be well."""
        process = self.start(command)
        assert process.wait(60) == 0, f"{where}: {' '.join(command)}: {self.output()}"

    def killed_at(self, command: Command, when: When, number: int) -> bool:
        """Run a command that is killed at a step; returns whether it got there."""
        started, struck = threading.Event(), threading.Event()

        def strike() -> None:
            assert started.wait(60)
            struck.set()
            kill_at_once(self.vm.machine, process)

        self.proxy.trap = Trap(when, number, strike)
        process = self.start(command)
        started.set()
        process.wait(60)
        self.proxy.trap = None
        return struck.is_set()

    def killed_after(self, command: Command, delay_s: float) -> bool:
        """Run a command that is killed so long after it has connected, if it still runs."""
        self.proxy.connected.clear()
        process = self.start(command)
        assert self.proxy.connected.wait(60)
        time.sleep(delay_s)
        if process.poll() is not None:
            return False
        kill_at_once(self.vm.machine, process)
        return True

    def start(self, command: Command) -> subprocess.Popen[bytes]:
        """Begin a command."""
        noun, verb, *rest = (str(self.disk) if word == "/disk" else word for word in command)
        words = [*prefix(self.vm.machine), noun, verb, "--qmp", str(self.vm.socket), *rest]
        words += ["--runtime", str(self.runtime)]
        with self.disk.with_name("output").open("wb") as output:
            return subprocess.Popen(
                self.vm.machine.command(words),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def output(self) -> str:
        """The output of the latest command."""
        return self.disk.with_name("output").read_text()

    def settle(self) -> None:
        """Wait until the guest has noticed what QEMU has."""
        devices = self.vm.traces().devices
        for kind, known_as in (("nic-", MAC), ("disk-", SERIAL)):
            if not any(device.startswith(kind) for device in devices):
                wait_gone(self.vm.guest, known_as)
            elif kind == "nic-":
                wait_nic(self.vm.guest, known_as)
            else:
                wait_disk(self.vm.guest, known_as)

    def state(self) -> State:
        """The present devices, once the guest has noticed."""
        self.settle()
        return State(
            self.vm.traces(),
            json.loads(self.runtime.read_text()),
            [_lasting(json.loads(file.read_text())) for file in sorted(self._records.glob("*"))],
            self._network(),
        )

    def _network(self) -> frozenset[str]:
        """Which interface is a port of which bridge, and what is routed."""
        links = json.loads(self.vm.machine.run(["ip", "-json", "link"]).stdout)
        ports = [f"{link['ifname']} of {link['master']}" for link in links if "master" in link]
        lines = self.vm.machine.shell(_ROUTES).replace(" linkdown", "").splitlines()
        # The kernel makes link-local ones when it gets to it.
        routes = [line for line in lines if "fe80" not in line and "ff00" not in line]
        return frozenset(ports + routes)

    @property
    def _records(self) -> Path:
        return self.vm.machine.path("/run/brine/taps")


_ROUTES = """
ip route show table all; ip -6 route show table all; ip rule; ip -6 rule
ip neighbour show proxy; ip -6 neighbour show proxy
"""


def _lasting(record: dict[str, Any]) -> dict[str, Any]:
    """A record without what is another in each run."""
    return {key: value for key, value in record.items() if key not in ("index", "since")}


class Rig:
    """Where the stories happen: a running guest, QEMU's socket of which only the proxy knows."""

    def __init__(self, machine: Machine, images: Path) -> None:
        self._machine = machine
        self._images = images
        self._running = ExitStack()
        self._target: Target | None = None

    def close(self) -> None:
        """End the guest."""
        self._target = None
        self._running.close()

    def play(self, story: Callable[[Target], None]) -> None:
        """Have a story happen that leaves nothing.

        QEMU 10.0 was once gone in the middle of one, and never again in thousands of plugs. Then,
        and only then, there is another guest and the story from its beginning, once.
        """
        first = self._ready()
        try:
            with nothing_left(first.vm):
                story(first)
        except (AssertionError, LabError) as error:
            if first.vm.guest.running():
                raise
            warnings.warn(f"QEMU is gone, and has another try: {error}", stacklevel=2)
            self.close()
            second = self._ready()
            with nothing_left(second.vm):
                story(second)

    def _ready(self) -> Target:
        """A guest with nothing plugged in."""
        runtime = self._images / "runtime.json"
        runtime.write_text('{"nics": [], "disks": []}')
        if self._target is None:
            disk = self._images / "disk.img"
            disk.write_bytes(bytes(1 << 20))
            vm = self._running.enter_context(start_vm(self._machine, "web", MACHINES["pc"]))
            front = CONTROL / "front/web.qmp"
            self._machine.path(front).parent.mkdir(exist_ok=True)
            sockets = self._machine.path(front), vm.guest.qmp_socket
            proxy = self._running.enter_context(qmp_proxy(*sockets))
            vm.guest.wait_ready()
            known = Vm(self._machine, vm.guest, socket=front)
            self._target = Target(known, proxy, runtime, disk)
        return self._target


@pytest.fixture(scope="module")
def rig(machine: Machine, images: Path) -> Iterator[Rig]:
    found = Rig(machine, images)
    yield found
    found.close()


def undisturbed(target: Target, case: Case) -> tuple[State, State, float]:
    """How things are before a case and after it, and how long it took."""
    for command in case.before:
        target.run(command)
    target.settle()
    start = time.monotonic()
    target.run(case.command)
    took_s = time.monotonic() - start
    target.steps = list(target.proxy.changes)
    after = target.state()
    for command in case.undo:
        target.run(command)
    return target.state(), after, took_s


@pytest.mark.parametrize("name", CASES)
def test_killed_at_any_step_the_same_command_again_ends_right(rig: Rig, name: str) -> None:
    rig.play(lambda target: killed_at_each_step(target, name))


def killed_at_each_step(target: Target, name: str) -> None:
    """A command killed before and after each of its steps, and given again."""
    case = CASES[name]
    clean, expected, _ = undisturbed(target, case)
    steps = list(enumerate(target.steps, 1))
    print(f"{name}: killed before and after each of {', '.join(target.steps)}")
    for when, (number, step) in itertools.product(When, steps):
        where = f"killed {when.value} {step}"
        for command in case.before:
            target.run(command)
        target.settle()
        assert target.killed_at(case.command, when, number), f"{where}: {target.output()}"
        target.run(case.command, where=where)
        assert differences(target.state(), expected) == {}, where
        for command in case.undo:
            target.run(command)
        assert differences(target.state(), clean) == {}, where


@pytest.mark.long
def test_killed_at_any_time_the_same_command_again_ends_right(rig: Rig) -> None:
    rig.play(killed_at_random)


def killed_at_random(target: Target) -> None:
    """Commands that are killed after some time, and given again."""
    dice = random.Random(SEED)
    cases = {**CASES, "add-routed": Case(ADD_ROUTED, undo=(REMOVE_NIC,))}
    known = {name: undisturbed(target, case) for name, case in cases.items()}
    for round_ in range(ROUNDS):
        name = dice.choice(list(cases))
        case = cases[name]
        clean, expected, took_s = known[name]
        for command in case.before:
            target.run(command)
        target.settle()
        delay_s = dice.uniform(0, took_s)
        was_killed = target.killed_after(case.command, delay_s)
        where = f"seed {SEED}, round {round_}: {name}, {delay_s:.3f} s, killed: {was_killed}"
        print(where)
        target.run(case.command, where=where)
        assert differences(target.state(), expected) == {}, where
        for command in case.undo:
            target.run(command)
        assert differences(target.state(), clean) == {}, where
