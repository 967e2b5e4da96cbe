"""The verbs of ``brine events``."""

from __future__ import annotations

import argparse

from brine.common import paths
from brine.common.cli import print_json
from brine.common.errors import BrineError, tell_error
from brine.common.event_programs import event_programs, run_programs
from brine.common.node_event import event_kinds, trial_event
from brine.common.tables import print_table


def list_programs(arguments: argparse.Namespace) -> int:
    """``brine events list``: 1 if one of them is not run."""
    found = list(event_programs())
    kinds = sorted(kind.name for kind in event_kinds().values())
    if arguments.json:
        rows = [{"program": str(one.path), "fault": one.fault or None} for one in found]
        print_json({"programs": rows, "events": kinds})
    else:
        rows_of_table = [(str(one.path), one.fault or "-") for one in found]
        none = f"there is no program in {paths.EVENT_PROGRAMS_DIR}"
        print_table(("PROGRAM", "NOT RUN, AS"), rows_of_table, none=none)
    return 1 if any(one.fault for one in found) else 0


def try_programs(arguments: argparse.Namespace) -> int:
    """``brine events test``: run programs for an event that did not happen. 1 if one fails."""
    known = {one.path.name: one for one in event_programs()}
    wanted = arguments.program or list(known)
    faults = [BrineError(f"{one.path}: {one.fault}") for one in known.values() if one.fault]
    missing = [name for name in wanted if name not in known]
    if missing:
        text = f"there is no program {missing[0]} in {paths.EVENT_PROGRAMS_DIR}"
        raise BrineError(text, hint="brine events list")
    usable = [name for name in wanted if not known[name].fault]
    failed = run_programs(trial_event(), usable)
    for error in [*faults, *failed]:
        tell_error(error)
    bad = {error.program for error in failed}
    for name in usable:
        if name not in bad:
            print(f"done: {name}")
    return 1 if faults or failed else 0
