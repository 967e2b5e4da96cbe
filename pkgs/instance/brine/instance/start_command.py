"""``brine instance start``, which loads less than the other verbs."""

from __future__ import annotations

import argparse
import signal
import sys

from brine.common.errors import BrineError, UsageError, tell_error, warn
from brine.instance.messages import log_to_journal
from brine.instance.observe import look
from brine.instance.start import Started, StillStartingError, start_all, start_instance
from brine.instance.status import Oper


def start(arguments: argparse.Namespace) -> int:
    """``brine instance start``"""
    name = arguments.name
    if name is None and not arguments.all:
        raise UsageError("which instance?", hint="give its name, or --all")
    if name is not None and arguments.all:
        raise UsageError("--all, or that one?", hint="give a name, or --all")
    log_to_journal("brine")
    if arguments.all:
        return _start_all()
    try:
        done = start_instance(name, warn=lambda aside: warn(f"{name}: {aside}"))
    except KeyboardInterrupt:
        return interrupted(name, runs="runs")
    words = {
        Started.STARTED: f"started: {name}",
        Started.NOTED: f"noted: {name} runs already, and should from now on",
        Started.UNCHANGED: f"unchanged: {name} runs",
    }
    print(words[done])
    return 0


def _start_all() -> int:
    from brine.instance.settings import load_settings  # with it a reader of TOML

    failed = False
    for name, error in start_all(parallel=load_settings().parallel_starts):
        if error is None:
            print(f"started: {name}", flush=True)
        elif isinstance(error, StillStartingError):
            warn(str(error))
        else:
            failed = True
            tell_error(error)
    return 1 if failed else 0


def interrupted(name: str, *, runs: str) -> int:
    """Say what holds of an instance that somebody does not wait for any more.

    :param runs: what to say of it if it runs.
    """
    try:
        seen = look(name)
    except BrineError:
        return 128 + signal.SIGINT  # it has no spec, say
    words = runs if seen.state.oper is Oper.RUNNING else f"is {seen.state.oper}"
    text = f"interrupted: {name} {words}; its admin_state is {seen.spec.admin_state}"
    print(text, file=sys.stderr)
    return 128 + signal.SIGINT
