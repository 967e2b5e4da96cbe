"""What the unit runs beside QEMU at its start: the unit counts as started when QEMU answers."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress

from brine.common import markers
from brine.common.errors import BrineError, die
from brine.common.markers import MarkerKind
from brine.common.peer import unit_of
from brine.common.process import Process, main_pid
from brine.common.qmp.wire import QmpClosedError, QmpError, QmpTimeoutError
from brine.instance import messages, store
from brine.instance.history import why_not_started
from brine.instance.kvm.monitor import monitor_of
from brine.instance.kvm.resources import set_password
from brine.instance.shutdown import ended_by
from brine.instance.spec import Spec
from brine.instance.store import InstanceError

_PROGRAM = "brine-instance"
_ANSWER_S = 5.0
_PAUSE_S = 0.02
_SAID_S = 1.0


def main() -> None:
    """Wait for the QEMU, or the domain, of the instance that is named on the command line."""
    name = sys.argv[1] if len(sys.argv) == 2 else ""
    messages.log_to_journal(_PROGRAM)
    with Process.of(main_pid(), unit=unit_of(name)) as process:
        try:
            spec = store.load(name)
            if spec.is_xen():
                from brine.instance.xen.domain import wait_running  # most are QEMU's

                wait_running(spec, process, main_pid(), timeout_s=spec.start_limit_s())
            else:
                wait_ready(spec, process, timeout_s=spec.start_limit_s())
            mark_started(spec)
        except BrineError as error:
            messages.tell(messages.NOT_STARTED, name, reason=_reason(name, error))
            # systemd would wait for it as long as a guest may take that is asked to shut down.
            if process:
                ended_by(process)
            die(_PROGRAM, error, 1)
    messages.tell(messages.STARTED, name, pid=main_pid())


def mark_started(spec: Spec) -> None:
    """Have it known that the instance has run, when systemd has forgotten its unit.

    :raises InstanceError: if that can't be said.
    """
    try:
        markers.write_marker(MarkerKind.STARTED, spec.name, run=markers.this_run())
    except OSError as error:
        mark = markers.file_of(MarkerKind.STARTED, spec.name)
        raise InstanceError(spec.name, f"{mark}: can't be made: {error.strerror}") from error


def _reason(name: str, error: BrineError) -> str:
    """Why it did not start: as QEMU, or what prepared it, has told the journal.

    That comes by another way than what is asked for here, so it may take a moment to be there.
    """
    if isinstance(error, QmpError):
        return str(error)  # QEMU runs, and has nothing to say of that
    invocation = os.environ.get("INVOCATION_ID", "")
    deadline = time.monotonic() + _SAID_S
    with suppress(OSError):  # the journal may be damaged
        while invocation and time.monotonic() < deadline:
            if reason := why_not_started(name, invocation):
                return reason.text
            time.sleep(_PAUSE_S)
    return str(error).removeprefix(f"{name}: ")


def wait_ready(spec: Spec, qemu: Process | None, *, timeout_s: float) -> None:
    """Return when QEMU answers, and has what it is told after its start.

    :raises InstanceError: if it has ended, or does not answer in time.
    :raises BrineError: if it refuses what it is told.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        if qemu is None or qemu.ended():
            raise InstanceError(spec.name, "QEMU has ended; see what it said above")
        try:
            with monitor_of(spec.name, of_unit=True, timeout_s=_ANSWER_S) as qmp:
                set_password(qmp, spec)
            return
        except (QmpClosedError, QmpTimeoutError) as error:
            if time.monotonic() >= deadline:
                text = f"QEMU does not answer within {timeout_s:g} s: {error}"
                hint = "start_timeout of its spec gives it more time"
                raise InstanceError(spec.name, text, hint=hint) from error
        qemu.ended(_PAUSE_S)


if __name__ == "__main__":
    main()
