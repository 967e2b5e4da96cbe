"""The verbs of ``brine watcher``."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

from brine.common import paths
from brine.common.cli import length_of_time, print_done
from brine.common.errors import BrineError, UsageError
from brine.common.files import write_whole
from brine.common.locks import LockedError, locked
from brine.common.tables import print_table
from brine.common.times import iso_time, local_time
from brine.instance import store
from brine.instance.intent import any_events, correct_events
from brine.instance.observe import Observed
from brine.vm.spec import Spec
from brine.watcher import restart_counter
from brine.watcher.decide import STARTS, Action, end_of, life_of
from brine.watcher.messages import log_pass, tell_odd
from brine.watcher.pass_figures import PassResult, note_pass
from brine.watcher.passes import Instances, Pass, PassOutcome, take_ended, wait_cleared
from brine.watcher.restart_counter import LONGEST_PAUSE_S, paused_until
from brine.watcher.settings import load_settings
from brine.watcher.volume_watch import told_faults, watch_volumes

LOCK = paths.LOCK_DIR / "watcher.lock"
ODD = 3
"""Exit status: the pass is complete, and something needs an administrator's attention."""
BUSY = 4
"""Exit status: another pass is in progress."""

_CLEANUP_WAIT_S = 60.0
_CLEANUP = frozenset({Action.SET_DOWN, Action.CLEAN_UP})
# What is printed when it was done, and in a dry run.
_WORDS = {
    Action.SET_DOWN: ("set down", "would be set down"),
    Action.CLEAN_UP: ("cleaned up", "would be cleaned up"),
    Action.START: ("started", "would be started"),
    Action.TRY: ("started", "would be started"),
    Action.GIVE_UP: ("given up", "would be given up"),
    Action.FORGET: ("earlier tries forgotten", "earlier tries would be forgotten"),
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
        if arguments.json:
            print("[]")
        print(f"paused until {local_time(until)}; brine watcher resume ends it", file=sys.stderr)
        return 0
    if until:
        print(f"brine: warning: paused until {local_time(until)}: nothing is done", file=sys.stderr)
    return _pass(arguments, frozenset(Action), ended)


def clean_up(arguments: argparse.Namespace) -> int:
    """``brine watcher cleanup``."""
    return _pass(arguments, _CLEANUP, None)


def _pass(
    arguments: argparse.Namespace, only: frozenset[Action], ended: frozenset[str] | None
) -> int:
    log_pass()
    settings = load_settings()
    is_cleanup = only == _CLEANUP
    work = Pass(
        # Starts come last, so that ends don't wait for them.
        Instances(timeout_s=settings.instance_timeout if ended is None else 0, names=ended),
        settings,
        dry_run=arguments.dry_run,
        only=only,
        is_paused=lambda: not is_cleanup and paused_until(time.time()) is not None,
    )
    with ExitStack() as stack:
        # A dry run needs no lock. Nor does a pass for an instance that has just ended: it must not
        # wait for the starts of another pass, and each instance has a lock of its own.
        if not arguments.dry_run and ended is None:
            try:
                paths.LOCK_DIR.mkdir(mode=0o755, parents=True, exist_ok=True)
                # A caller that needs memory waits for the cleanup of another pass.
                timeout_s = _CLEANUP_WAIT_S if is_cleanup else 0
                stack.enter_context(locked(LOCK, timeout_s=timeout_s))
            except LockedError as error:
                print(f"brine: error: another pass is in progress: {error}", file=sys.stderr)
                return BUSY
            except PermissionError as error:
                raise BrineError(f"{LOCK}: {error.strerror}", hint="be root") from error
        begun_s = time.monotonic()
        try:
            outcomes = _shown(_outcomes(work, ended), arguments)
        except KeyboardInterrupt:
            text = "interrupted: nothing more is begun; starts in progress go on"
            print(f"brine: error: {text}", file=sys.stderr)
            raise
    result = _result(outcomes)
    if not arguments.dry_run and not is_cleanup:
        took_s = time.monotonic() - begun_s
        note_pass(outcomes, result, took_s=took_s, names=store.names() if ended is None else None)
    return {PassResult.OK: 0, PassResult.ODD: ODD, PassResult.FAILED: 1}[result]


def _result(outcomes: Iterable[PassOutcome]) -> PassResult:
    if any(one.fault for one in outcomes):
        return PassResult.FAILED
    return PassResult.ODD if any(one.decision.is_odd for one in outcomes) else PassResult.OK


def _outcomes(work: Pass, ended: frozenset[str] | None) -> Iterator[PassOutcome]:
    if ended == frozenset():
        return
    if ended:
        wait_cleared(ended)
    said = ""
    specs: list[Spec] = []
    are_all = True
    if not work.dry_run:
        try:
            _forget_undefined()
        except restart_counter.TriesError as error:
            said = str(error)
            yield PassOutcome.of_fault(error)
    for outcome in work.run():
        if outcome.fault and str(outcome.fault) == said:
            continue
        if outcome.seen and not work.dry_run:
            tell_odd(outcome.seen, outcome.decision, outcome.actions, outcome.fault)
        if isinstance(outcome.seen, Observed):
            specs.append(outcome.seen.spec)
        elif outcome.seen is None:
            are_all = False
        yield outcome
    if work.dry_run or ended is not None:
        return
    if any_events():
        for fault in correct_events(store.load_all()):
            yield PassOutcome.of_fault(fault)
    if work.only == frozenset(Action):
        yield from map(PassOutcome.of_fault, watch_volumes(specs, are_all=are_all))


def _forget_undefined() -> None:
    """Forget the tries of instances that no longer exist."""
    if restart_counter.FILE.exists():
        with restart_counter.changed() as record:
            for name in record.keys() - store.names():
                del record[name]


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
        print(json.dumps([_json(one, arguments.dry_run) for one in found if one.seen], indent=2))
    elif not found:
        is_of_ended = getattr(arguments, "ended", False)
        print("no instance has ended by itself" if is_of_ended else "there are no instances")
    return found


def _show(outcome: PassOutcome, arguments: argparse.Namespace) -> None:
    if outcome.fault:
        print(f"brine: error: {outcome.fault}", file=sys.stderr, flush=True)
    if arguments.json or not outcome.seen:
        return
    decision, done = outcome.decision, []
    for action in outcome.actions:
        is_failed_start = outcome.fault and action in STARTS
        words = _WORDS[action][arguments.dry_run]
        done.append("did not start" if is_failed_start else words)
    is_usual = not done and (decision.is_usual or not decision.why)
    if is_usual and not (arguments.dry_run or arguments.verbose):
        return
    why = decision.why or life_of(outcome.seen)
    print(f"{outcome.name}: {why}: {', '.join(done) or 'left as it is'}", flush=True)


def _json(outcome: PassOutcome, dry_run: bool) -> dict[str, Any]:
    assert outcome.seen
    return {
        "name": outcome.name,
        "state": life_of(outcome.seen),
        "ended_by": end_of(outcome.seen),
        "why": outcome.decision.why,
        "actions": list(outcome.actions),
        "dry_run": dry_run,
        "odd": outcome.decision.is_odd,
        "error": str(outcome.fault) if outcome.fault else None,
    }


def print_status(arguments: argparse.Namespace) -> int:
    """``brine watcher status``."""
    until = paused_until(time.time())
    tries = restart_counter.load()
    faults = told_faults()
    if arguments.json:
        found = {
            "paused_until": iso_time(until) if until else None,
            "tries": {
                name: {**asdict(one), "last": iso_time(one.last)} for name, one in tries.items()
            },
            "volume_faults": [{**one._asdict(), "fault": fault} for one, fault in faults.items()],
        }
        print(json.dumps(found, indent=2))
        return 0
    print(f"paused until {local_time(until)}" if until else "not paused")
    rows = [
        (name, str(one.count), local_time(one.last), "yes" if one.given_up else "no")
        for name, one in sorted(tries.items())
    ]
    print_table(("NAME", "TRIES", "LAST", "GIVEN UP"), rows, none="")
    if faults:
        print(f"volumes and snapshots with a fault: {len(faults)}; brine instance list names them")
    return 0


def forget_instance(arguments: argparse.Namespace) -> int:
    """``brine watcher forget``."""
    known = restart_counter.forget_counter(arguments.name)
    if not known and not store.spec_file_of(arguments.name).exists():
        raise BrineError(f"there is no instance {arguments.name!r}", hint="brine instance list")
    name = arguments.name
    done = f"forgotten: {name}" if known else f"unchanged: {name} had no tries"
    print_done(done, as_json=arguments.json, name=name)
    return 0


# The pause.


def pause_passes(arguments: argparse.Namespace) -> int:
    """``brine watcher pause``."""
    seconds = length_of_time(arguments.time.strip())
    if seconds is None or not 0 < seconds <= LONGEST_PAUSE_S:
        hint = "try 90s, 30m, 2h, 3d or 1w"
        raise UsageError(f"not a length of time: {arguments.time!r}", hint=hint)
    until = math.ceil(time.time() + seconds)
    with _told_if_unchangeable("written"):
        restart_counter.PAUSE_FILE.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        write_whole(restart_counter.PAUSE_FILE, f"{until}\n".encode(), alone=True)
    if arguments.json:
        print(json.dumps({"paused_until": iso_time(until)}))
    else:
        print(f"paused until {local_time(until)}; brine watcher resume ends it")
    return 0


def resume_passes(arguments: argparse.Namespace) -> int:
    """``brine watcher resume``."""
    try:
        paused = paused_until(time.time()) is not None
    except BrineError:
        paused = True  # it can't be read, and goes
    with _told_if_unchangeable("removed"):
        restart_counter.PAUSE_FILE.unlink(missing_ok=True)
    print_done("resumed" if paused else "unchanged: it was not paused", as_json=arguments.json)
    return 0


@contextmanager
def _told_if_unchangeable(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = "be root" if isinstance(error, PermissionError) else None
        text = f"{restart_counter.PAUSE_FILE}: can't be {what}: {error.strerror}"
        raise BrineError(text, hint=hint) from error
