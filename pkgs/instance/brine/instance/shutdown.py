"""Shutting an instance down: its guest is asked, and ended if that takes too long.

All stops use this module: the command, ``systemctl stop``, and the node's shutdown. Source: "Who
ended this VM" in the design: a stop by the admin is marked by a file first, so that it does not
count as the user's.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from brine.common.errors import BrineError, die, warn
from brine.common.process import Process, main_pid
from brine.instance import messages, store
from brine.instance.hypervisor import DeafGuestError, Guest
from brine.instance.hypervisor_choice import hypervisor_running
from brine.instance.store import InstanceError
from brine.vm import markers
from brine.vm.instances import started_with
from brine.vm.markers import MarkerKind
from brine.vm.run import Run
from brine.vm.spec import Spec
from brine.vm.unit_name import unit_of

DEFAULT_TIMEOUT_S = 120.0

_PROGRAM = "brine-instance"
_WAY = "its guest is asked, and ended if need be"
_PRESS_AGAIN_S = 20.0  # a guest that was still booting has not heard of the power button
_PRESS_SOON_S = 2.0
_ASK_AGAIN_S = 1.0  # another client had the monitor


def main() -> None:
    """The unit's ExecStop: stop the instance that is named on the command line.

    systemd also runs it when QEMU has ended by itself, and when the unit has failed. Then there is
    no main process, or it is a killed one that still frees its memory.
    """
    name = sys.argv[1] if len(sys.argv) == 2 else ""
    if os.environ.get("SERVICE_RESULT", "success") != "success":
        return
    messages.log_to_journal(_PROGRAM)
    messages.tell_people_in_journal(_PROGRAM)
    try:
        stop_run(Run.own(name), main_pid())
    except BrineError as error:
        die(_PROGRAM, error, 1)


def stop_run(run: Run, pid: int) -> None:
    """Stop a run of an instance, for systemd; nothing happens if it has ended.

    :param pid: the main process of its unit.
    :raises BrineError: why it does not end.
    """
    name = run.name
    with ExitStack() as stack:
        if stack.enter_context(Process.of(pid, unit=unit_of(name))) is None:
            return
        with suppress(OSError):  # or its end is a reboot's
            markers.remove_marker(MarkerKind.REBOOT, name)
        spec = None
        try:
            spec = store.load(name)
        except BrineError as error:
            # An instance that was undefined while it ran, or has a damaged spec, must still stop.
            warn(str(error), program=_PROGRAM)
        timeout_s = shutdown_timeout_of(name, spec)
        messages.tell(messages.STOP_ASKED, name, by="systemd", how=_WAY, timeout=timeout_s)
        is_marked = False
        try:
            stack.enter_context(markers.held_marker(MarkerKind.STOP, name, run=run.id))
            is_marked = True
        except OSError as error:
            # Else systemd would end the guest without asking it.
            warn(_unmarkable(name, error), program=_PROGRAM)
        guest = stack.enter_context(hypervisor_running(name).guest(name, pid))
        # systemd ends it in any case, so the marker stays.
        shut_down(guest, run, timeout_s=timeout_s, force=True, may_use_agent=is_marked)


def shutdown_timeout_of(name: str, spec: Spec | None) -> float:
    """How long the guest of an instance may take to shut down, in seconds.

    :param spec: of it; without one, the spec of its last start says so.
    """
    if spec:
        return spec.shutdown_timeout
    started = started_with(name)
    timeout_s = started.get("shutdown_timeout") if isinstance(started, dict) else None
    return timeout_s if isinstance(timeout_s, int) and timeout_s > 0 else DEFAULT_TIMEOUT_S


def shut_down(
    guest: Guest,
    run: Run,
    *,
    timeout_s: float,
    force: bool = False,
    may_use_agent: bool = True,
) -> bool:
    """Shut an instance's guest down; False if it does not in time, and runs on.

    The caller has marked that the admin stops it.

    :param force: end it then.
    :param may_use_agent: if not, only the power button is used. QEMU reports that as the admin's,
        and an agent's shutdown as the guest's own.
    :raises DeafGuestError: without *force*, if it is of no use to ask the guest.
    :raises BrineError: if nothing ends the guest.
    """
    try:
        if _asked(guest, run, timeout_s, may_use_agent=may_use_agent):
            return True
    except DeafGuestError as error:
        if not force:
            raise
        warn(str(error), program=_PROGRAM)
        timeout_s = 0
    if force:
        messages.tell(messages.ENDED, run.name, timeout=timeout_s, signal=guest.kill())
    return force


@contextmanager
def stop_marked(guest: Guest | Process, run: Run, *, must: bool, cause: str = "") -> Iterator[None]:
    """Mark that the admin stops a run of an instance, for the time of the block.

    The marker stays if the guest has ended. If the guest runs on, its end is the user's will again,
    and the marker goes.

    :param must: make it an error if the marker can't be written; else it is a warning.
    :param cause: of the verdict on the end; empty is ``stopping``.
    """
    name = run.name
    facts: dict[str, Any] = {"cause": cause} if cause else {}
    with ExitStack() as stack:
        try:
            if facts:  # a stop that was killed may have left one with another cause
                markers.remove_unheld(MarkerKind.STOP, name)
            stack.enter_context(markers.held_marker(MarkerKind.STOP, name, run=run.id, **facts))
        except OSError as error:
            if must:
                raise InstanceError(name, _unmarkable(name, error)) from error
            warn(_unmarkable(name, error), program=_PROGRAM)
        try:
            yield
        finally:
            stack.close()
            if not guest.ended():
                with suppress(OSError):
                    markers.remove_unheld(MarkerKind.STOP, name)


def _unmarkable(name: str, error: OSError) -> str:
    return f"{markers.file_of(MarkerKind.STOP, name)}: can't be made: {error.strerror}"


def _asked(guest: Guest, run: Run, timeout_s: float, *, may_use_agent: bool) -> bool:
    """Ask a guest to shut down, repeatedly, until it has; False if it does not in time. It may
    still do so later."""
    deadline = time.monotonic() + timeout_s
    again_s = min(_PRESS_AGAIN_S, max(_PRESS_SOON_S, timeout_s / 4))
    is_first, said_last = True, None
    while not guest.ended():
        left_s = max(deadline - time.monotonic(), 0)
        fault = guest.ask(left_s, is_first=is_first, may_use_agent=may_use_agent)
        pause_s = _ASK_AGAIN_S
        if fault is None:
            is_first, pause_s = False, again_s
            with suppress(OSError):
                markers.write_marker(MarkerKind.ASKED, run.name, run=run.id)
        elif fault != said_last:
            warn(f"{run.name}: its guest was not reached: {fault}", program=_PROGRAM)
        said_last = fault
        left_s = deadline - time.monotonic()
        if guest.ended(min(left_s, pause_s)):
            break
        if left_s <= pause_s:
            return False
    return True


if __name__ == "__main__":
    main()
