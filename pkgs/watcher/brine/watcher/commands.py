"""The verbs of ``brine watcher``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from typing import Any

from brine.common import paths
from brine.common.cli import table
from brine.common.errors import BrineError, UsageError
from brine.common.locks import LockedError, locked
from brine.instance import restart_counter, store
from brine.instance.intent import any_events, correct_events
from brine.watcher.decide import Action, Decision
from brine.watcher.passes import Instances, Pass, PassOutcome, take_ended, wait_cleared
from brine.watcher.record import (
    log_to_journal,
    parse_duration,
    pause,
    paused_until,
    resume,
    tell_action,
    tell_odd,
)
from brine.watcher.settings import WatcherSettings, load_settings

LOCK = paths.LOCK_DIR / "watcher.lock"
ODD = 3
"""Exit status: the pass is complete, and something needs an administrator's attention."""
BUSY = 4
"""Exit status: another pass is in progress."""

_CLEANUP_WAIT_S = 60.0
_CLEANUP = frozenset({Action.SET_DOWN, Action.CLEAN_UP})
_DONE = {
    Action.SET_DOWN: "set down",
    Action.CLEAN_UP: "cleaned up",
    Action.START: "started",
    Action.TRY: "started",
    Action.GIVE_UP: "given up",
    Action.FORGET: "earlier tries forgotten",
}
_FAILED = {
    Action.START: "did not start",
    Action.TRY: "did not start",
}
_WOULD = {
    Action.SET_DOWN: "would be set down",
    Action.CLEAN_UP: "would be cleaned up",
    Action.START: "would be started",
    Action.TRY: "would be started",
    Action.GIVE_UP: "would be given up",
    Action.FORGET: "earlier tries would be forgotten",
}


def run_pass(arguments: argparse.Namespace) -> int:
    """``brine watcher run``."""
    ended = None
    if arguments.ended:
        if arguments.dry_run:
            raise UsageError("--ended has no --dry-run", hint="brine watcher run --dry-run")
        ended = take_ended()
    until = paused_until(time.time())
    if until and not arguments.dry_run:
        return _say_paused(until, as_json=arguments.json)
    if until:
        print(f"brine: warning: paused until {_clock(until)}: nothing is done", file=sys.stderr)
    is_paused: Callable[[], bool] = lambda: paused_until(time.time()) is not None  # noqa: E731
    return _pass(arguments, frozenset(Action), is_paused, ended)


def clean_up(arguments: argparse.Namespace) -> int:
    """``brine watcher cleanup``."""
    return _pass(arguments, _CLEANUP, lambda: False)


def _pass(
    arguments: argparse.Namespace,
    only: frozenset[Action],
    is_paused: Callable[[], bool],
    ended: frozenset[str] | None = None,
) -> int:
    settings = load_settings()
    log_to_journal()
    with ExitStack() as stack:
        # A dry run needs no lock. Nor does a pass for an instance that has just ended: it must not
        # wait for the starts of another pass, and each instance has a lock of its own.
        if not arguments.dry_run and ended is None:
            try:
                # A caller that needs memory waits for the cleanup of another pass.
                stack.enter_context(_alone(_CLEANUP_WAIT_S if only == _CLEANUP else 0))
            except LockedError as error:
                print(f"brine: error: another pass is in progress: {error}", file=sys.stderr)
                return BUSY
        try:
            dry_run = arguments.dry_run
            found = _outcomes(settings, only, is_paused, ended, dry_run=dry_run)
            outcomes = _shown(found, arguments)
        except KeyboardInterrupt:
            text = "interrupted: nothing more is begun; what is starting goes on"
            print(f"brine: error: {text}", file=sys.stderr)
            raise
    return _status(outcomes)


def _outcomes(
    settings: WatcherSettings,
    only: frozenset[Action],
    is_paused: Callable[[], bool],
    ended: frozenset[str] | None,
    *,
    dry_run: bool,
) -> Iterable[PassOutcome]:

    if ended == frozenset():
        return
    if ended:
        wait_cleared(ended)
    # Starts come last, so that ends don't wait for them.
    timeout_s = settings.instance_timeout if ended is None else 0
    work = Pass(
        Instances(timeout_s=timeout_s, names=ended),
        settings.policy(),
        parallel=settings.parallel,
        clean_all=settings.manage == "all",
        dry_run=dry_run,
        only=only,
        told=tell_action,
        is_paused=is_paused,
    )
    said = ""
    if not dry_run:
        try:
            restart_counter.keep_only(frozenset(store.names()))
        except restart_counter.TriesError as error:
            said = str(error)
            yield PassOutcome("", Decision(why=said, is_odd=True), fault=error)
    for outcome in work.run():
        if outcome.fault and str(outcome.fault) == said:
            continue
        if not dry_run:
            tell_odd(outcome)
        yield outcome
    if not dry_run and ended is None and any_events():
        for fault in correct_events(store.load_all()):
            yield PassOutcome("", Decision(why=str(fault), is_odd=True), fault=fault)


@contextmanager
def _alone(timeout_s: float = 0) -> Iterator[None]:
    """Hold the lock of passes."""

    with ExitStack() as stack:
        try:
            paths.LOCK_DIR.mkdir(mode=0o755, parents=True, exist_ok=True)
            stack.enter_context(locked(LOCK, timeout_s=timeout_s))
        except PermissionError as error:
            raise BrineError(f"{LOCK}: {error.strerror}", hint="be root") from error
        yield


def _shown(outcomes: Iterable[PassOutcome], arguments: argparse.Namespace) -> list[PassOutcome]:
    """Report each result as it comes, and return all. If the output is closed, the work goes on."""
    found = []
    unheard: OSError | None = None
    for outcome in outcomes:
        found.append(outcome)
        try:
            if not unheard:
                _show(outcome, arguments)
        except OSError as error:
            unheard = error
    if unheard:
        raise unheard
    if arguments.json:
        print(json.dumps([_json(one, arguments.dry_run) for one in found if one.name], indent=2))
    elif not found:
        is_of_ended = getattr(arguments, "ended", False)
        print("no instance has ended by itself" if is_of_ended else "there are no instances")
    return found


def _show(outcome: PassOutcome, arguments: argparse.Namespace) -> None:
    if outcome.fault:
        print(f"brine: error: {outcome.fault}", file=sys.stderr, flush=True)
    if not arguments.json and outcome.name and (text := _line(outcome, arguments)):
        print(text, flush=True)


def _line(outcome: PassOutcome, arguments: argparse.Namespace) -> str:
    words = _WOULD if arguments.dry_run else _DONE
    if outcome.fault:
        words = words | _FAILED
    done = ", ".join(words[action] for action in outcome.actions)
    if not done:
        done = "left as it is"
        is_usual = outcome.decision.is_usual or not outcome.decision.why
        if is_usual and not (arguments.dry_run or arguments.verbose):
            return ""
    why = outcome.decision.why or (outcome.case.life if outcome.case else "")
    return f"{outcome.name}: {why}: {done}" if why else f"{outcome.name}: {done}"


def _json(outcome: PassOutcome, dry_run: bool) -> dict[str, Any]:
    return {
        "name": outcome.name,
        "state": outcome.case.life if outcome.case else None,
        "ended_by": outcome.case.end if outcome.case else None,
        "why": outcome.decision.why,
        "actions": list(outcome.actions),
        "dry_run": dry_run,
        "odd": outcome.decision.is_odd,
        "error": str(outcome.fault) if outcome.fault else None,
    }


def _status(outcomes: Iterable[PassOutcome]) -> int:
    found = list(outcomes)
    if any(one.fault for one in found):
        return 1
    return ODD if any(one.decision.is_odd for one in found) else 0


def pause_passes(arguments: argparse.Namespace) -> int:
    """``brine watcher pause``."""
    until = pause(parse_duration(arguments.time), time.time())
    print(f"paused until {_clock(until)}; brine watcher resume ends it")
    return 0


def resume_passes(arguments: argparse.Namespace) -> int:
    """``brine watcher resume``."""
    try:
        paused = paused_until(time.time()) is not None
    except BrineError:
        paused = True  # it can't be read, and goes
    resume()
    print("resumed" if paused else "unchanged: it was not paused")
    return 0


def print_status(arguments: argparse.Namespace) -> int:
    """``brine watcher status``."""
    until = paused_until(time.time())
    tries = restart_counter.load()
    if arguments.json:
        found = {
            "paused_until": until,
            "tries": {
                name: {"count": one.count, "last": one.last, "given_up": one.given_up}
                for name, one in tries.items()
            },
        }
        print(json.dumps(found, indent=2))
        return 0
    print(f"paused until {_clock(until)}" if until else "not paused")
    rows = [
        (name, str(one.count), _clock(one.last), "yes" if one.given_up else "no")
        for name, one in sorted(tries.items())
    ]
    if rows:
        print(*table([("NAME", "TRIES", "LAST", "GIVEN UP"), *rows]), sep="\n")
    return 0


def forget_instance(arguments: argparse.Namespace) -> int:
    """``brine watcher forget``."""
    known = restart_counter.forget(arguments.name)
    if not known and not store.spec_file_of(arguments.name).exists():
        raise BrineError(f"there is no instance {arguments.name!r}", hint="brine instance list")
    print(f"forgotten: {arguments.name}" if known else f"unchanged: {arguments.name} had no tries")
    return 0


def _say_paused(until: float, *, as_json: bool) -> int:
    if as_json:
        print("[]")
    print(f"paused until {_clock(until)}; brine watcher resume ends it", file=sys.stderr)
    return 0


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(sep=" ", timespec="seconds")
