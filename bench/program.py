"""What the benchmarks' command lines have in common."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Protocol

from bench.errors import BenchError
from bench.machine import Machine
from lab.errors import LabError


class Table(Protocol):
    """A dataclass that can be shown on a terminal."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def text(self) -> str:
        """Its lines."""


def positive(text: str) -> int:
    """A type for how many."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def told(work: Callable[[], None]) -> int:
    """Run for a person: one clear line when it can't be done; returns the exit status."""
    try:
        work()
    except BenchError as error:
        print(f"bench: error: {error}\n  hint: {error.hint}", file=sys.stderr)
        return 1
    except LabError as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return 1
    return 0


def show(
    tables: Sequence[Table], file: Path | None, *, here: Machine, plan: Any, results: Any
) -> None:
    """Print tables, and write them and every number, as JSON, to a file if there is one.

    :param plan: what was to be measured, and *results* what was: dataclasses.
    """
    for table in tables:
        print()
        print(table.text())
    if file:
        found = {
            "machine": asdict(here),
            "plan": asdict(plan),
            "results": asdict(results),
            "tables": [asdict(table) for table in tables],
        }
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
