"""``brine config cpu-baseline``: the processor that several nodes can give a guest."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from brine.cluster.cpu_baseline import ANSWERS_HINT, Baseline, baseline, nodes_of
from brine.common.cli import print_json
from brine.common.errors import printable
from brine.config.schema import read_input

_LONGEST_INPUT = 256 * 1024 * 1024  # bytes; the answer of a node has a hundred thousand


def print_baseline(arguments: argparse.Namespace) -> int:
    """Print the baseline of the nodes of a file."""
    found = baseline(nodes_of(read_input(arguments.file, ANSWERS_HINT, most=_LONGEST_INPUT)))
    if arguments.json:
        print_json(found.to_json())
    else:
        print("\n".join(_lines(found)))
    return 0


def _lines(found: Baseline) -> Iterator[str]:
    yield f"cpu_type: {found.cpu_type}"
    for node, flags in found.lacking.items():
        yield f"{printable(node)} lacks, and so will guests: {', '.join(flags)}"
    if found.nested:
        yield f"left out, as it is for virtual machines in guests: {', '.join(found.nested)}"
