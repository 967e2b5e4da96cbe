"""What a pass of the watcher costs, beside asking alone."""

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from bench.harness import (
    Row,
    Table,
    brine_node,
    measure_in_node,
    node_parser,
    report,
    rounds_in_node,
    system_of,
)
from lab.debian import host_release
from lab.machine import Machine
from lab.packages import build_packages
from lab.progress import step
from lab.xen_node import boot_xen_node
from lab.xen_packages import install

LIMIT = 1.5
"""A pass, beside asking alone."""

_INSTANCES, _SOME = 200, 20
_DOMAINS = 20

PASS = "brine watcher run"
LIST = "brine instance list"
SHOW = "systemctl show, of all instances' units"
XL = "xl list -v"

_UNITS = "brine-instance@*.service"
_PROPERTIES = "Id,ActiveState,SubState,MainPID,Result,ExecMainStatus,InvocationID"
COMMANDS: Mapping[str, Sequence[str]] = {
    SHOW: ["systemctl", "show", "--", _UNITS],
    "the same, of what Brine wants to know": [
        *("systemctl", "show", f"--property={_PROPERTIES}", "--", _UNITS)
    ],
    LIST: LIST.split(),
    PASS: PASS.split(),
}


class Scene(StrEnum):
    """What the instances do, none of which anything is to be done about."""

    RUNNING = "all run"
    SOME = "20 run"
    DOWN = "none runs"
    XEN = "domains of an emulated Xen's"


@dataclass(frozen=True)
class Plan:
    """What to measure, how much."""

    rounds: int
    instances: int = _INSTANCES
    some: int = _SOME  # that run where not all do
    domains: int = 0  # of Xen's, and nothing else


Results = dict[str, dict[str, list[float]]]
"""All samples, in seconds, in the order of the rounds: by scene, and by what was run."""


def tables(results: Results, plan: Plan) -> Iterator[Table]:
    """All that was measured."""
    for scene in Scene:
        if scene in results:
            count = f"{plan.domains} " if scene is Scene.XEN else f"{plan.instances} instances, "
            # Where few run systemctl has hardly anything to ask for.
            targets = 1 if scene in (Scene.SOME, Scene.DOWN) else 2
            yield Table.of_times(f"{count}{scene}", _rows(results[scene], targets))


def _rows(samples: Mapping[str, Sequence[float]], targets: int) -> Iterator[Row]:
    """One command a row.

    :param targets: how many ratios of a pass, from the last on, the target is for.
    """
    # Both are asked on Xen.
    show_s = sum(statistics.median(samples[name]) for name in (SHOW, XL) if name in samples)
    show, list_ = Row.of_times("to show", [show_s]), Row.of_times(LIST, samples[LIST])
    for name, seconds in samples.items():
        row = Row.of_times(name, seconds)
        if name in (LIST, PASS):
            row = row.beside(show, "show").beside(list_, "list")
        yield row.at_most(LIMIT, last=targets) if name == PASS else row


def run(options: argparse.Namespace) -> bool:
    """Measure and print."""
    plan = Plan(rounds_in_node(options), domains=_DOMAINS if options.xen else 0)
    with _xen_node() if options.xen else _node() as node:
        results = measure_in_node(node, "watcher_node", plan)
        heads = [f"{system_of(node)}; {plan.rounds} rounds"]
    report(heads, list(tables(results, plan)), options.json, plan=plan, results=results)
    return True


@contextmanager
def _node() -> Iterator[Machine]:
    with brine_node("brine-watcher") as node:
        node.run(["systemctl", "disable", "--now", "brine-watcher.timer"])
        node.shell("truncate --size=1M /var/lib/bench.img; ip link add br0 type bridge")
        yield node


@contextmanager
def _xen_node() -> Iterator[Machine]:
    packages = build_packages()
    release = host_release()
    with boot_xen_node(release) as node:
        with step("installing Brine in a Xen node"):
            install(node, release, packages)
        yield node


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = node_parser("watcher", "Measure a pass of the watcher beside asking what instances do.")
    help_ = f"instead: {_DOMAINS} domains of an emulated Xen's"
    found.add_argument("--xen", action="store_true", help=help_)
    return found
