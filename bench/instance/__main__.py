"""`python3 -m bench.instance`: measure starts and lists beside libvirt's; print the ratios."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench import machine
from bench.instance import report
from bench.instance.hypervisor import hypervisor
from bench.instance.results import Plan, Results
from bench.libvirt_node import BRIDGE, GUEST, IMAGES
from bench.program import positive, show, told
from lab.signals import run_program

_ROUNDS, _QUICK_ROUNDS = 16, 3
_INSTANCES, _RUNNING = 500, 20
_SETTLE_S = 0.3


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="bench instance",
        description="Measure brine instance start and list beside virsh's.",
    )
    parser.add_argument("--rounds", type=positive, help=f"how many ({_ROUNDS})")
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK_ROUNDS} rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every number")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    """Make a node, measure in it, and print."""
    plan = Plan(
        rounds=options.rounds or (_QUICK_ROUNDS if options.quick else _ROUNDS),
        settle_s=_SETTLE_S,
        instances=_INSTANCES,
        running=_RUNNING,
        bridge=BRIDGE,
        guest=GUEST,
        images=IMAGES,
    )
    with hypervisor() as node:
        results = Results.from_json(node.measure("bench.instance.rounds", plan))
    here, has = machine.describe(), node.versions
    print(f"{here.processor}, {here.cores} cores, {here.memory_mib} MiB, Linux {here.kernel}")
    print(f"{has.system}, {has.python}, {has.libvirt}, {has.qemu}, emulated guests")
    print(f"{plan.rounds} rounds; of {plan.instances} instances {plan.running} run")
    tables = list(report.tables(results, plan.instances))
    show(tables, options.json, here=here, plan=plan, results=results)


def main(arguments: Sequence[str]) -> int:
    """Run for a person."""
    return told(lambda: run(parse(arguments)))


if __name__ == "__main__":
    run_program(main)
