"""ExecStartPost of an instance's unit: waits until QEMU answers, or the domain runs."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import NoReturn

from brine.common.ending import end_process
from brine.common.errors import BrineError, die
from brine.common.process import Process, main_pid
from brine.instance import messages, store
from brine.instance.failed_starts import StartFailure, why_not_started
from brine.instance.hypervisor import EndedEarlyError
from brine.instance.hypervisor_choice import hypervisor_of
from brine.instance.service.machined import register_machine
from brine.vm import markers
from brine.vm.markers import MarkerKind
from brine.vm.run import Run
from brine.vm.unit_name import unit_of

_PROGRAM = "brine-instance"
_PAUSE_S = 0.02
_SAID_S = 1.0


def run() -> NoReturn:
    """Do all this, and end at once: systemd waits for that."""
    main()
    end_process(0)


def main() -> None:
    """Wait for the QEMU, or the domain, of the instance that is named on the command line."""
    name = sys.argv[1] if len(sys.argv) == 2 else ""
    messages.log_to_journal(_PROGRAM, at_once=True)  # while QEMU loads; the start waits for its end
    messages.tell_people_in_journal(_PROGRAM)
    with Process.of(main_pid(), unit=unit_of(name)) as process:
        try:
            spec = store.load(name)
            hypervisor_of(spec).wait_ready(spec, process)
            # For the time when systemd has forgotten the unit.
            with store.telling(name, f"{markers.file_of(MarkerKind.STARTED, name)}: can't be made"):
                markers.write_marker(MarkerKind.STARTED, name, run=markers.this_run())
        except BrineError as error:
            reason = _reason(name, error)
            messages.tell(messages.NOT_STARTED, name, reason=reason.text)
            _note(name, reason)
            # systemd would wait for it as long as a guest may take that is asked to shut down.
            if process:
                process.terminate()
            die(_PROGRAM, error, 1)
    register_machine(name, spec.uuid, main_pid())
    if node := Run.own(name).awaits_from:
        messages.tell(messages.AWAITS, name, pid=main_pid(), node=node)
    else:
        messages.tell(messages.STARTED, name, pid=main_pid())


def _reason(name: str, error: BrineError) -> StartFailure:
    """Why it did not start: the error; or if the process has ended, what its preparation has noted,
    or the last message of QEMU in the journal, which may take a moment to get there."""
    said = StartFailure(str(error).removeprefix(f"{name}: "), error.hint)
    if not isinstance(error, EndedEarlyError):
        return said
    invocation = os.environ.get("INVOCATION_ID", "")
    deadline = time.monotonic() + _SAID_S
    with suppress(OSError):  # the journal may be damaged
        while invocation and time.monotonic() < deadline:
            if reason := why_not_started(name, invocation):
                return reason
            time.sleep(_PAUSE_S)
    return said


def _note(name: str, reason: StartFailure) -> None:
    """Note it for the command that started it, unless the preparation has."""
    run = Run.own(name)
    if run.failure is None or run.failure.reason is None:
        facts = {"reason": reason.text} | ({"hint": reason.hint} if reason.hint else {})
        known = run.facts(MarkerKind.FAILURE)
        with suppress(OSError):
            markers.write_marker(MarkerKind.FAILURE, name, run=run.id, **{**known, **facts})


if __name__ == "__main__":
    run()
