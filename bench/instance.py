"""Starting and listing instances, beside libvirt's commands and beside what can't be less."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import attrgetter
from pathlib import Path

from bench.harness import Row, Table, measure_in_node, node_parser, report, rounds_in_node
from bench.libvirt_node import libvirt_node

START_LIMIT = 0.1
LIST_LIMIT_MS = 500

QMP_FOLDER = Path("/run/bench")
LIBVIRTS_USER = "libvirt-qemu"
"""Whom libvirt has run QEMU."""

_OURS = ("brine-common", "brine-config", "brine-hotplug", "brine-kvmd", "brine-instance")
# libvirt's QEMU makes its sockets as its own user, and ours as a root without privileges.
_PREPARE = f"install --directory --mode=0777 {QMP_FOLDER}"


class Guest(StrEnum):
    """What is started."""

    PLAIN = "no disk, no NIC"
    USUAL = "a disk and a NIC"
    CONFINED = "the same, with a user and a root of its own"


class Way(StrEnum):
    """How it is started."""

    BRINE = "brine instance start"
    VIRSH = "virsh start"
    QEMU = "QEMU alone"


UNIT = "systemctl start, of a unit that sleeps"
PYTHONS = "the same, with three bare Pythons"

BRINE_LIST = "brine instance list"
BRINE_LIST_JSON = "brine instance list --json"
VIRSH_LIST = "virsh list --all"
PASS = "python3 -c pass"
USUAL_IMPORTS = "import argparse, json"
SYSTEMCTL_SHOW = "systemctl show, of all instances' units"
READ_SPECS = "import json; read and parse all specs"


@dataclass(frozen=True)
class Plan:
    """What to measure, how much."""

    rounds: int
    settle_s: float = 0.3  # in which the machine is left alone after something was stopped
    instances: int = 500  # for the lists
    running: int = 20  # of them


@dataclass(frozen=True)
class Start:
    """One start, in seconds since before the command was started."""

    exec_s: float  # until a process began to execute QEMU, or what a unit has in its stead
    answers_s: float  # until QEMU answered on a QMP socket; 0 where there is no QEMU
    returned_s: float  # until the command had ended; 0 where there is none

    def overhead_s(self) -> float:
        """The command without what QEMU itself took until it answered."""
        return self.returned_s - (self.answers_s - self.exec_s)


@dataclass
class Results:
    """All samples, in the order of the rounds: starts by :func:`series` or by the name of a floor,
    and lists, in seconds, by what was run."""

    starts: dict[str, list[Start]] = field(default_factory=dict)
    lists: dict[str, list[float]] = field(default_factory=dict)


_EXEC, _ANSWER, _END = map(attrgetter, ("exec_s", "answers_s", "returned_s"))


def series(guest: Guest, way: Way) -> str:
    """The name of what was measured."""
    return f"{guest}: {way}"


def tables(results: Results, instances: int) -> Iterator[Table]:
    """All that was measured."""
    yield Table.of_times("what a start can't be less than", _floors(results))
    for guest in Guest:
        yield Table.of_times(f"starting a guest, {guest}", _starts(results, guest))
    yield Table.of_times(f"listing {instances} instances", _lists(results))


def _floors(results: Results) -> Iterator[Row]:
    qemu = results.starts[series(Guest.PLAIN, Way.QEMU)]
    yield _row("QEMU alone, to its answer on QMP", _ANSWER, qemu)
    for name in (UNIT, PYTHONS):
        yield _row(f"{name}: to the exec", _EXEC, results.starts[name])
        yield _row("  the command's end", _END, results.starts[name])


def _starts(results: Results, guest: Guest) -> Iterator[Row]:
    # libvirt's guest has a user of its own, whether ours has one or not.
    peer = Guest.USUAL if guest is Guest.CONFINED else guest
    virsh = results.starts[series(peer, Way.VIRSH)]
    ours = results.starts[series(guest, Way.BRINE)]
    exec_ = _row("virsh start: to QEMU's exec", _EXEC, virsh)
    answers = _row("virsh start: to QEMU's answer on QMP", _ANSWER, virsh)
    returned = _row("virsh start: the command's end", _END, virsh)
    yield from (exec_, answers, returned)
    own = _row("brine instance start: to QEMU's exec", _EXEC, ours)
    yield own.beside(returned, "virsh start").at_most(START_LIMIT)
    yield replace(own, title="  the same").beside(exec_, "its way to the exec")
    yield _row("  to QEMU's answer on QMP", _ANSWER, ours).beside(answers, "its way there")
    yield _row("  the command's end", _END, ours).beside(returned, "virsh start")
    theirs = _row("virsh start, less QEMU's own", Start.overhead_s, virsh)
    yield theirs
    less = _row("brine instance start, less QEMU's own", Start.overhead_s, ours)
    yield less.beside(theirs, "virsh's")


def _lists(results: Results) -> Iterator[Row]:
    for name in (PASS, USUAL_IMPORTS, READ_SPECS):
        title = f"python3 -c '{name}'" if name == USUAL_IMPORTS else name
        yield Row.of_times(title, results.lists[name])
    show, virsh = (Row.of_times(name, results.lists[name]) for name in (SYSTEMCTL_SHOW, VIRSH_LIST))
    yield from (show, virsh)
    for name in (BRINE_LIST, BRINE_LIST_JSON):
        row = Row.of_times(name, results.lists[name])
        yield row.beside(virsh, "virsh list").within(LIST_LIMIT_MS)


def _row(title: str, value: Callable[[Start], float], starts: Sequence[Start]) -> Row:
    return Row.of_times(title, [value(start) for start in starts])


def run(options: argparse.Namespace) -> bool:
    """Measure and print."""
    plan = Plan(rounds_in_node(options))
    with libvirt_node(_OURS) as found:
        found.node.shell(_PREPARE)
        results = measure_in_node(found.node, "instance_node", plan)
    heads = [
        f"{found.versions}, emulated guests",
        f"{plan.rounds} rounds; of {plan.instances} instances {plan.running} run",
    ]
    found_tables = list(tables(results, plan.instances))
    report(heads, found_tables, options.json, plan=plan, results=results)
    return True


def parser() -> argparse.ArgumentParser:
    """The command line."""
    return node_parser("instance", "Measure brine instance start and list beside virsh's.")
