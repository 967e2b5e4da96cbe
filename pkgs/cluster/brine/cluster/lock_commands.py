"""The verbs of ``brine lock``."""

from __future__ import annotations

import argparse
import json
import select
import shlex
import subprocess
import sys
import time

from brine.cluster.cli import LEVELS
from brine.cluster.lock_client import LockClient, LockServerGoneError, Row
from brine.cluster.lock_queue import LockError
from brine.common.cli import print_table
from brine.common.errors import UsageError, printable, warn

_HEADING = ("LOCKS", "MODE", "STATE", "SINCE", "PID", "PURPOSE")
_AGAIN_S = 0.5
_TRIES = 20
_NOT_FOUND, _NOT_RUN = 127, 126


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
    gone: LockError | None = None
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
    try:
        process = subprocess.Popen(command)
    except OSError as error:
        print(f"brine: error: {command[0]}: {error.strerror}", file=sys.stderr)
        return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_RUN
    poll = select.poll()
    poll.register(client, select.POLLIN)
    while process.poll() is None:
        try:
            if poll.poll(200):
                # The command goes on: what it does is safe without the locks.
                warn("brine-lockd has ended, and with it the locks of this command, which goes on")
                process.wait()
        except KeyboardInterrupt:
            process.wait()
    status = process.returncode
    return status if status >= 0 else 128 - status
