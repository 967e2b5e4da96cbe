"""`python3 -m bench.watcher`: measure a pass beside asking alone; print the ratios."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench import machine
from bench.measuring import CODE, measure
from bench.program import positive, show, told
from bench.watcher import report
from bench.watcher.results import Plan, Results
from lab.debian import host_release
from lab.machine import Machine
from lab.node import boot_node
from lab.packages import build_packages
from lab.progress import step
from lab.repository import publish
from lab.signals import run_program
from lab.tree import TREE
from lab.xen_node import boot_xen_node
from lab.xen_packages import install

_ROUNDS, _QUICK_ROUNDS = 16, 3
_INSTANCES, _SOME = 200, 20
_DOMAINS = 20


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="bench watcher",
        description="Measure a pass of the watcher beside asking what instances do.",
    )
    parser.add_argument("--rounds", type=positive, help=f"how many ({_ROUNDS})")
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK_ROUNDS} rounds")
    parser.add_argument(
        "--xen", action="store_true", help=f"instead: {_DOMAINS} domains of an emulated Xen's"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every number")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    """Make a node, measure in it, and print."""
    rounds = options.rounds or (_QUICK_ROUNDS if options.quick else _ROUNDS)
    domains = _DOMAINS if options.xen else 0
    plan = Plan(rounds=rounds, instances=_INSTANCES, some=_SOME, domains=domains)
    with _xen_node() if options.xen else _node() as node:
        node.put(TREE / "bench", f"{CODE}/bench")
        results = Results.from_json(measure(node, "bench.watcher.rounds", plan))
        system = node.shell('. /etc/os-release; echo "$PRETTY_NAME"; systemctl --version').split(
            "\n"
        )
    here = machine.describe()
    print(f"{here.processor}, {here.cores} cores, {here.memory_mib} MiB, Linux {here.kernel}")
    print(f"{system[0]}, {system[1]}; {plan.rounds} rounds")
    show(list(report.tables(results, plan)), options.json, here=here, plan=plan, results=results)


@contextmanager
def _node() -> Iterator[Machine]:
    packages = build_packages()
    with boot_node(host_release(), name="bench") as node:
        with step("installing Brine in a node"):
            publish(node, packages)
            node.run(["apt-get", "install", "--yes", "--quiet=2", "brine-watcher"], timeout_s=300)
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


def main(arguments: Sequence[str]) -> int:
    """Run for a person."""
    return told(lambda: run(parse(arguments)))


if __name__ == "__main__":
    run_program(main)
