"""``brine instance migrate``, ``brine operations resume`` and ``abort``, on the cluster's master.

Salt carries the questions of a move to the nodes: these commands run its runner, and show how far
it is, as the move's record has it.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

from brine.cluster.move_operation import MOVE
from brine.cluster.rebooting import REBOOT
from brine.common import operation
from brine.common.cli import print_json
from brine.common.errors import BrineError, printable, tell_error, warn
from brine.common.operation import Operation, settle_one

_POLL_S = 0.25
_SAME_STEP_S = 2.0
_INTERRUPTED = 130
_SHOWN = (MOVE.name, REBOOT.name)

Told = Mapping[str, Any]


def migrate(arguments: argparse.Namespace) -> int:
    """``brine instance migrate``: 1 if the instance has not moved, or could not."""
    words = {
        "instance": arguments.name,
        "to": arguments.to,
        "cold": arguments.cold,
        "test": arguments.dry_run,
        "auto_converge": arguments.auto_converge,
        "max_downtime": arguments.max_downtime,
        "rate": arguments.rate,
    }
    told = run_salt("migrate", words, arguments.json, lambda one: _is_about(one, arguments.name))
    if arguments.dry_run and not arguments.json:
        return _tell_dryrun_salt(told)
    return tell_outcome(told, arguments.json)


def _is_about(record: Operation, name: str) -> bool:
    whole = str(record.facts.get("instance", ""))
    return name in (whole, whole.partition(".")[0], record.facts.get("uuid"))


def resume(arguments: argparse.Namespace) -> int:
    """``brine operations resume``: moves and reboots go on; others are completed or undone."""
    record = _pending(arguments.id)
    if record.kind == MOVE.name:
        return _carry(arguments, abort=False)
    if record.kind == REBOOT.name:
        return tell_outcome(run_salt("reboot", {}, arguments.json, lambda _: True), arguments.json)
    is_settled = settle_one(record)
    if arguments.json:
        print_json({"result": is_settled, "operation": record.id})
    else:
        print(f"{'settled' if is_settled else 'unchanged, as it is in progress'}: {record.id}")
    return 0


def abort(arguments: argparse.Namespace) -> int:
    """``brine operations abort``: a move goes back, if it can; a reboot of nodes is forgotten."""
    record = _pending(arguments.id)
    if record.kind == REBOOT.name:
        words = {"abort": True}
        return tell_outcome(
            run_salt("reboot", words, arguments.json, lambda _: False), arguments.json
        )
    if record.kind != MOVE.name:
        hint = "of a move between nodes, the master has the operation that can be aborted"
        raise BrineError(f"{record.id}: a {record.kind} can't be aborted", hint=hint)
    return _carry(arguments, abort=True)


def _carry(arguments: argparse.Namespace, *, abort: bool) -> int:
    words = {"operation": arguments.id, "abort": abort}
    told = run_salt("resume", words, arguments.json, lambda one: one.id == arguments.id)
    return tell_outcome(told, arguments.json)


def _pending(identity: str) -> Operation:
    if record := operation.find(identity):
        return record
    raise BrineError(f"{identity}: no such operation is pending", hint="brine operations list")


def run_salt(
    function: str, words: Mapping[str, Any], is_quiet: bool, is_ours: Callable[[Operation], bool]
) -> Told:
    """What a function of Salt's runner ``brine`` returns.

    :param is_quiet: show no progress.
    :param is_ours: tells of a pending operation whether its progress is shown.
    :raises BrineError: if it can't be run, or returns nothing.
    """
    program = shutil.which("salt-run")
    if program is None:
        raise BrineError("there is no salt-run here", hint="run this on the host of Salt's master")
    # JSON is YAML: without quotes, Salt would make numbers of some names.
    given = [f"{key}={json.dumps(one)}" for key, one in words.items() if one not in (None, False)]
    command = [program, "--out=json", "--log-level=error", f"brine.{function}", *given]
    # By its answer it has said all. Salt 3008 also complains that it leaves parts of itself open.
    with tempfile.TemporaryFile() as errors:
        said = _output(command, errors, is_quiet, is_ours)
        try:
            told: Any = json.loads(said)
        except ValueError:
            told = said.decode(errors="replace").strip()
        if isinstance(told, dict) and isinstance(told.get("result"), bool):
            return told
        errors.seek(0)
        sys.stderr.write(errors.read().decode(errors="replace"))
    raise BrineError(f"salt-run brine.{function}: {printable(str(told))[-300:] or 'no answer'}")


def _output(
    command: list[str], errors: IO[bytes], is_quiet: bool, is_ours: Callable[[Operation], bool]
) -> bytes:
    """What the runner prints. An interruption by the user names what is left of it."""
    pipe, no_input = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, stdout=pipe, stderr=errors, stdin=no_input) as child:
        try:
            return _read(child, None if is_quiet else is_ours)
        except KeyboardInterrupt:
            left = [one for one in operation.pending() if one.kind in _SHOWN and is_ours(one)]
            for one in left:
                hint = f"brine operations resume {one.id}, or abort"
                warn(f"the {one.kind} is pending", hint=hint)
            raise SystemExit(_INTERRUPTED) from None


def _read(child: subprocess.Popen[bytes], is_ours: Callable[[Operation], bool] | None) -> bytes:
    """The output of the runner. Meanwhile the progress of moves and reboots is shown."""
    assert child.stdout
    said = b""
    shown: dict[str, tuple[str, float]] = {}
    while True:
        if select.select([child.stdout], [], [], _POLL_S)[0]:
            part = os.read(child.stdout.fileno(), 65536)
            if not part:
                return said
            said += part
        for line in _progress(is_ours, shown) if is_ours else ():
            print(printable(line), file=sys.stderr, flush=True)


def _progress(
    is_ours: Callable[[Operation], bool], shown: dict[str, tuple[str, float]]
) -> Iterator[str]:
    """What is new about moves and reboots: at once if that is another step, else now and then.

    :param shown: by operation, its last line, and when that was shown; it is kept.
    """
    now = time.monotonic()
    for one in operation.pending():
        if not is_ours(one):
            continue
        step = operation.awaited(one)
        if one.kind == REBOOT.name and step:
            text = line = f"{step.name}: {', '.join(step.facts['nodes'])}"
        elif one.kind == MOVE.name and one.progress:
            done, text = one.progress.get("done", 0), str(one.progress.get("text", ""))
            line = f"{one.facts.get('instance', '')}: {100 * done:.0f} % {text}"
        else:
            continue
        last, then = shown.get(one.id, ("", 0.0))
        is_other_step = text.partition(":")[0] not in last
        if line != last and (is_other_step or now - then > _SAME_STEP_S):
            shown[one.id] = (line, now)
            yield line


def _tell_dryrun_salt(told: Told) -> int:
    """A line for each obstacle."""
    if told.get("obstacles"):
        print("\n".join(printable(line) for line in told["obstacles"]))
    return tell_outcome(told, False)


def tell_outcome(told: Told, as_json: bool) -> int:
    """Show what a function of the runner has returned; returns the exit status."""
    status = 0 if told["result"] else 1
    if as_json:
        print_json({key: one for key, one in told.items() if key != "retcode"})
        return status
    for note in told.get("notes", []):
        warn(printable(note))
    comment = printable(str(told.get("comment", "")))
    if status:
        tell_error(BrineError(comment, hint=printable(str(told.get("hint", "")))))
    else:
        print(comment)
    return status
