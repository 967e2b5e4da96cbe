"""``brine config cpu-baseline``: the processor that several nodes can give a guest."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from brine.cluster.cpu_baseline import Baseline, BaselineError, baseline, nodes_of
from brine.common.cli import print_json
from brine.common.errors import printable
from brine.config.schema import ConfigError, parse_json

_LONGEST_INPUT = 256 * 1024 * 1024  # bytes; the answer of a node has a hundred thousand


def print_baseline(arguments: argparse.Namespace) -> int:
    """Print the baseline of the nodes of a file."""
    found = baseline(nodes_of(_input(arguments.file)))
    if arguments.json:
        print_json(found.to_json())
    else:
        print("\n".join(_lines(found)))
    return 0


def _input(name: str) -> Any:
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if name == "-" else open(name, "rb") as file:
            data = file.read(_LONGEST_INPUT + 1)
    except OSError as error:
        raise BaselineError(f"{name}: can't be read: {error.strerror}") from error
    if len(data) > _LONGEST_INPUT:
        raise BaselineError(f"{name}: is larger than {_LONGEST_INPUT} bytes")
    try:
        return parse_json(data, unique_keys=True)
    except ConfigError as error:
        raise BaselineError(f"{name}: {error}", hint=error.hint) from error


def _lines(found: Baseline) -> Iterator[str]:
    yield f"cpu_type: {found.cpu_type}"
    for node, flags in found.lacking.items():
        yield f"{printable(node)} lacks, and so will guests: {', '.join(flags)}"
    if found.nested:
        yield f"left out, as it is for virtual machines in guests: {', '.join(found.nested)}"
