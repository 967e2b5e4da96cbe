"""`python3 -m bench.hotplug`: measure plugging beside libvirt and the floor; print the ratios."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench import machine
from bench.errors import BenchError
from bench.hotplug import report
from bench.hotplug.hypervisor import DOMAIN, QMP, hypervisor
from bench.hotplug.results import Plan, Results
from bench.libvirt_node import BRIDGE, IMAGES
from lab.errors import LabError
from lab.signals import run_program

_ROUNDS, _QUICK_ROUNDS = 16, 3
_SETTLE_S = 0.3


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="bench hotplug",
        description="Measure brine nic and brine disk beside libvirt and the bare QMP commands.",
    )
    parser.add_argument("--rounds", type=_positive, help=f"how many ({_ROUNDS})")
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK_ROUNDS} rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every number")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    """Make a node, measure in it, and print."""
    plan = Plan(
        rounds=options.rounds or (_QUICK_ROUNDS if options.quick else _ROUNDS),
        settle_s=_SETTLE_S,
        domain=DOMAIN,
        qmp=QMP,
        bridge=BRIDGE,
        folder=IMAGES,
    )
    with hypervisor() as node:
        results = Results.from_json(node.measure("bench.hotplug.rounds", plan))
    here = machine.describe()
    print(f"{here.processor}, {here.cores} cores, {here.memory_mib} MiB, Linux {here.kernel}")
    has = node.versions
    print(f"{has.system}, {has.python}, {has.libvirt}, {has.qemu}, emulated guest")
    print(f"{plan.rounds} rounds; one import of pyroute2: {report.import_s(results) * 1e3:.0f} ms")
    tables = list(report.tables(results))
    for table in tables:
        print()
        print(table.text())
    if options.json:
        found = {
            "machine": asdict(here),
            "plan": asdict(plan),
            "results": asdict(results),
            "tables": [asdict(table) for table in tables],
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Run for a person: one clear line when it can't be done."""
    try:
        run(parse(arguments))
    except BenchError as error:
        print(f"bench: error: {error}\n  hint: {error.hint}", file=sys.stderr)
        return 1
    except LabError as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return 1
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


if __name__ == "__main__":
    run_program(main)
