"""What the measuring processes have in common, which `measuring.measure` runs in a node."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from bench.errors import BenchError
from brine.common.errors import BrineError


def tell(text: str) -> None:
    """Say how far it is."""
    print(f"bench: {text}", file=sys.stderr)


def main(kind: type[Any], measure: Callable[[Any], Any]) -> int:
    """Measure what the plan says, the one argument; write the results; return the exit status.

    :param kind: of the plan, a dataclass; *measure* makes another one of it, the results.
    """
    plan = kind(**json.loads(sys.argv[1]))
    try:
        json.dump(asdict(measure(plan)), sys.stdout)
    except (BenchError, BrineError) as error:
        print(f"bench: error: {error}\n  hint: {error.hint}", file=sys.stderr)
        return 1
    return 0
