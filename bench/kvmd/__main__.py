"""`python3 -m bench.kvmd`: measure brine-kvmd beside Ganeti's daemon and print the ratios."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from bench import machine, packages, sandbox
from bench.errors import BenchError
from bench.kvmd import report
from bench.kvmd.daemons import TREE
from bench.kvmd.rounds import TOGETHER, WARM_UP, Plan, Round, allow_descriptors
from bench.program import positive

GANETI_PACKAGE = r"^ganeti-haskell-[0-9.]+$"
SMALLEST = TOGETHER + WARM_UP
BRINE, GANETI = "brine-kvmd", "ganeti-kvmd"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="bench kvmd",
        description="Measure brine-kvmd beside Ganeti's daemon (fetched, not installed).",
    )
    parser.add_argument(
        "--sizes", type=_sizes, default=[200, 1000, 5000], metavar="N,...", help="numbers of VMs"
    )
    parser.add_argument("--rounds", type=positive, help="rounds a size (3)")
    parser.add_argument("--samples", type=positive, help="VMs ended one by one in a round (500)")
    parser.add_argument("--idle", type=positive, metavar="SECONDS", help="idle time watched (10)")
    parser.add_argument("--quick", action="store_true", help="1 round, 100 samples, 5 s idle")
    parser.add_argument(
        "--only", choices=("brine", "ganeti"), help="run one daemon without the other"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write every round's numbers"
    )
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> bool:
    """Fetch the peer, measure, and print. False if brine-kvmd itself had trouble."""
    allow_descriptors(options.sizes)
    package = root = program = peer_version = ""
    if options.only != "brine":
        package = packages.newest(GANETI_PACKAGE)
        peer_version = packages.version(package)
        program = f"usr/lib/ganeti/{package.rpartition('-')[2]}/usr/sbin/ganeti-kvmd"
        print(f"bench: peer: {package} {peer_version}", file=sys.stderr)
        root = str(packages.unpacked(package, program))
    plan = Plan(
        sizes=options.sizes,
        rounds=options.rounds or (1 if options.quick else 3),
        samples=options.samples or (100 if options.quick else 500),
        bursts=3 if options.quick else 5,
        idle_s=options.idle or (5 if options.quick else 10),
        ganeti_root=root,
        ganeti_program=program,
        with_brine=options.only != "ganeti",
    )
    needs = [TREE, *([Path(root)] if root else [])]
    output = sandbox.run_module("bench.kvmd.rounds", [json.dumps(asdict(plan))], needs=needs)
    rounds = [Round(**fields) for fields in json.loads(output)]

    here = machine.describe()
    print(f"{here.processor}, {here.cores} cores, {here.memory_mib} MiB, Linux {here.kernel}")
    print(f"{here.system}, Python {here.python}; peer: {package or 'none'} {peer_version}".rstrip())
    priority = "real-time" if all(r.real_time for r in rounds) else "normal: do not compare"
    print(f"daemon and generator on a core each, priority {priority}")
    for size in options.sizes:
        print()
        print(report.table(rounds, size, BRINE, GANETI))
    if options.json:
        found = {
            "machine": asdict(here),
            "peer": {"package": package, "version": peer_version},
            "plan": asdict(plan),
            "rounds": [asdict(result) for result in rounds],
            "rows": {
                str(size): [asdict(row) for row in report.rows(rounds, size, BRINE, GANETI)]
                for size in options.sizes
            },
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return not any(r.trouble or r.missed or r.lost for r in rounds if r.daemon == BRINE)


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
        raise argparse.ArgumentTypeError(f"at least {SMALLEST} VMs, since {TOGETHER} end at once")
    return sizes


if __name__ == "__main__":
    sys.exit(main())
