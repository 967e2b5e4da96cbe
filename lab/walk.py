"""The walk of a command through Brine's modules: which it enters, and how often it changes between
them. `python3 walk.py instance list` runs `brine instance list` so.

It needs nothing but Brine itself, so that it can be given to a node as text.
"""

from __future__ import annotations

import inspect
import json
import sys
from types import FrameType
from typing import Any

_BASE = frozenset({"common", "vm"})
"""The parts that every command stands on."""


class Walk:
    """What a command has entered, counted by :func:`sys.setprofile`."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.changes = 0

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """Note a call, if one module of Brine calls another one."""
        if event != "call" or not _is_function(frame) or (called := _module(frame)) is None:
            return
        caller, above = None, frame.f_back
        while above and (caller := _module(above)) is None:  # through Python's own library
            above = above.f_back
        if above and not _is_function(above):  # while a module is loaded
            return
        self.modules.add(called)
        self.changes += int(caller not in (None, called))

    def facts(self) -> dict[str, Any]:
        """The modules outside *common* and *vm*, and the changes between any two modules."""
        own = sorted(one for one in self.modules if one.split(".")[1] not in _BASE)
        return {"files": own, "changes_of_room": self.changes}


def _module(frame: FrameType) -> str | None:
    name = frame.f_globals.get("__name__", "")
    return name if name.startswith("brine.") else None


def _is_function(frame: FrameType) -> bool:
    """Whether a frame is a function's, and not the body of a module or a class."""
    return bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)


def main(arguments: list[str]) -> int:
    """Run a command of Brine's, and print its walk as the last line of standard error."""
    from brine.common.cli import main as brine  # as its program does, before anything is counted

    walk = Walk()
    sys.setprofile(walk.note)
    try:
        return brine(arguments)
    finally:
        sys.setprofile(None)
        print(json.dumps(walk.facts()), file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
