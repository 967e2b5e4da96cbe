"""The verbs of ``brine lock``."""

from __future__ import annotations

import argparse
import json
import os
import select
import shlex
import signal
import sys
import time

from brine.cluster.cli import LEVELS
from brine.cluster.lock_client import LockClient, LockServerGoneError, Row
from brine.common.errors import UsageError, printable, warn
from brine.common.tables import print_table

_HEADING = ("LOCKS", "MODE", "STATE", "SINCE", "PID", "PURPOSE")
_AGAIN_S = 0.5
_TRIES = 20
_LOOK_S = 0.5  # whether brine-lockd is still there
_NOT_FOUND, _NOT_RUN = 127, 126
_HANDED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


def list_locks(arguments: argparse.Namespace) -> int:
    """``brine lock list``."""
    with LockClient() as client:
        rows = client.rows()
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        print_table(_HEADING, map(_row, rows), none="no lock is held")
    return 0


def _row(row: Row) -> tuple[str, ...]:
    mode = "shared" if row["shared"] else "exclusive"
    state = f"waits for {row['waits_for']}" if row["waits_for"] else "holds"
    locks, purpose = printable(" ".join(row["locks"])), printable(row["purpose"])
    return (locks, mode, printable(state), f"{row['seconds']:g} s", str(row["pid"]), purpose)


def run(arguments: argparse.Namespace) -> int:
    """``brine lock run``: the command's exit status; 1 if it has not run."""
    names = ["cluster"] if arguments.cluster else []
    names += [f"{level}/{name}" for level in LEVELS for name in getattr(arguments, level)]
    if not names:
        raise UsageError("no lock is named", hint="such as --instance web1")
    if not arguments.command:
        raise UsageError("no command is named", hint="it comes after --")
    purpose = arguments.purpose or shlex.join(arguments.command)
    with _claimed(names, purpose, arguments) as client:
        return _run_command(client, arguments.command)


def _claimed(names: list[str], purpose: str, arguments: argparse.Namespace) -> LockClient:
    """A connection that has these locks."""
    until = None if arguments.timeout is None else time.monotonic() + arguments.timeout
    gone: LockServerGoneError | None = None
    for _ in range(_TRIES):
        left_s = None if until is None else max(0.0, until - time.monotonic())
        try:
            client = LockClient()
            try:
                client.claim(
                    names,
                    purpose=purpose,
                    shared=arguments.shared,
                    timeout_s=left_s,
                    waiting=_tell_wait,
                )
                return client
            except BaseException:
                client.close()
                raise
        except LockServerGoneError as error:
            gone = error
            warn(f"{error}; asking again")
            time.sleep(_AGAIN_S)
    assert gone
    raise gone


def _tell_wait(name: str, holders: list[Row]) -> None:
    whose = ", ".join(f"{one['purpose']} (process {one['pid']})" for one in holders)
    print(f"waiting for {name}, which is held by: {printable(whose)}", file=sys.stderr)


def _run_command(client: LockClient, command: list[str]) -> int:
    """Run a command, and hand on to it the signals that this process gets. Returns its exit
    status."""
    handed_on = [each for each in _HANDED_ON if signal.getsignal(each) is not signal.SIG_IGN]
    heard = [*handed_on, signal.SIGCHLD]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    try:
        process = os.posix_spawnp(
            command[0], command, os.environ, setsigmask=mask, setsigdef=_IGNORED_BY_PYTHON
        )
        return _wait_for(process, client, heard)
    except OSError as error:
        print(f"brine: error: {command[0]}: {error.strerror}", file=sys.stderr)
        return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_RUN
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _wait_for(process: int, client: LockClient, heard: list[signal.Signals]) -> int:
    """Wait for the end of a child process; returns its exit status, as shells have it."""
    is_served = True
    while True:
        told = signal.sigtimedwait(heard, _LOOK_S)
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        # What the kernel sends, as at Ctrl-C, goes to all processes of a terminal: it has that.
        if told and told.si_signo != signal.SIGCHLD and told.si_code <= 0:
            os.kill(process, told.si_signo)
        if is_served and select.select([client], [], [], 0)[0]:
            # The command goes on: what it does is safe without the locks.
            warn("brine-lockd has ended, and with it the locks of this command, which goes on")
            is_served = False
