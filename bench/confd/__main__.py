"""`python3 -m bench.confd`: measure brine-confd beside Ganeti's daemon and print the ratios."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from bench import machine, sandbox
from bench.confd import report
from bench.confd.daemons import TREE
from bench.confd.questions import INSTANCES_A_NODE
from bench.confd.results import Plan, Round
from bench.errors import BenchError
from bench.program import positive
from lab import ganeti

SMALLEST = INSTANCES_A_NODE


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="bench confd",
        description="Measure brine-confd beside Ganeti's daemon (fetched, not installed).",
    )
    parser.add_argument(
        "--sizes", type=_sizes, default=[200, 20_000], metavar="N,...", help="numbers of instances"
    )
    parser.add_argument("--rounds", type=positive, help="rounds a size (3)")
    parser.add_argument(
        "--seconds", type=float, help="how long each request type is asked in a round (1)"
    )
    parser.add_argument("--quick", action="store_true", help="1 round, 0.5 s each")
    parser.add_argument(
        "--only", choices=("brine", "ganeti"), help="run one daemon without the other"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write every round's numbers"
    )
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> bool:
    """Fetch the peer, measure, and print. False if brine-confd itself had trouble."""
    peer = None
    if options.only != "brine":
        peer = ganeti.confd()
        print(f"bench: peer: {peer.package} {peer.version}", file=sys.stderr)
    plan = Plan(
        sizes=options.sizes,
        rounds=options.rounds or (1 if options.quick else 3),
        seconds=options.seconds or (0.5 if options.quick else 1.0),
        warm_up_s=0.3,
        replacements=3 if options.quick else 5,
        ganeti={key: str(value) for key, value in asdict(peer).items()} if peer else {},
        with_brine=options.only != "ganeti",
    )
    needs = [TREE, *([peer.root] if peer else [])]
    output = sandbox.run_module("bench.confd.rounds", [json.dumps(asdict(plan))], needs=needs)
    rounds = [Round.from_json(fields) for fields in json.loads(output)]

    here = machine.describe()
    print(f"{here.processor}, {here.cores} cores, {here.memory_mib} MiB, Linux {here.kernel}")
    which = f"{peer.package} {peer.version}" if peer else "none"
    print(f"{here.system}, Python {here.python}; peer: {which}")
    priority = "high" if all(result.favoured for result in rounds) else "normal: do not compare"
    print(f"daemon and generator on a core each, priority {priority}")
    tables = list(report.tables(rounds, options.sizes))
    for table in tables:
        print()
        print(table.text())
    print()
    for note in dict.fromkeys(report.notes(rounds, options.sizes)):
        print(note)
    if options.json:
        found = {
            "machine": asdict(here),
            "plan": asdict(plan),
            "rounds": [asdict(result) for result in rounds],
            "tables": [asdict(table) for table in tables],
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return all(report.is_right(result) for result in rounds if result.daemon != report.PEER)


def main() -> int:
    """Run for a person: one clear line when it can't be done."""
    try:
        return 0 if run(parse()) else 1
    except BenchError as error:
        print(f"bench: error: {error}\n  hint: {error.hint}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        return 130


def _sizes(text: str) -> list[int]:
    sizes = [positive(part) for part in text.replace("_", "").split(",")]
    if min(sizes) < SMALLEST:
        raise argparse.ArgumentTypeError(f"at least {SMALLEST} instances, which is one node's")
    return sizes


if __name__ == "__main__":
    sys.exit(main())
