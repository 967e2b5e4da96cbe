"""The implementation of the hypervisor protocol for QEMU."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, suppress
from typing import NoReturn

from brine.common import markers, peer
from brine.common.errors import BrineError
from brine.common.markers import MarkerKind
from brine.common.paths import InstanceFiles
from brine.common.peer import is_listening, unit_of
from brine.common.process import Process
from brine.common.qmp.client import QmpClient
from brine.common.qmp.wire import QmpClosedError, QmpError, QmpTimeoutError
from brine.instance.kvm.guest import QemuGuest, monitor_of, run_state
from brine.instance.spec import Spec
from brine.instance.status import Observed, Oper, oper_of
from brine.instance.store import InstanceError
from brine.instance.unit import Unit

_ANSWER_S = 2.0
_READY_S = 5.0
_PAUSE_S = 0.02


class Kvm:
    """QEMU; see :class:`brine.instance.hypervisor.Hypervisor`."""

    def prepared(self, spec: Spec) -> Spec:
        """The spec with what was plugged while the instance ran last, which it has from now on."""
        from brine.instance.kvm.exec import with_last_run  # only a start needs all of that

        return with_last_run(spec)

    def exec(self, spec: Spec) -> NoReturn:
        """Become QEMU."""
        from brine.instance.kvm.exec import become_qemu  # only a start needs all of that

        become_qemu(spec)

    def wait_ready(self, spec: Spec, process: Process | None) -> None:
        """Return when QEMU answers, and has what it is told after its start."""
        deadline = time.monotonic() + spec.start_limit_s()
        while True:
            if process is None or process.ended():
                raise InstanceError(spec.name, "QEMU has ended; see what it said above")
            try:
                with monitor_of(spec.name, of_unit=True, timeout_s=_READY_S) as qmp:
                    set_password(qmp, spec)
                return
            except (QmpClosedError, QmpTimeoutError) as error:
                if time.monotonic() >= deadline:
                    limit_s = spec.start_limit_s()
                    text = f"QEMU does not answer within {limit_s:g} s: {error}"
                    hint = "start_timeout of its spec gives it more time"
                    raise InstanceError(spec.name, text, hint=hint) from error
            process.ended(_PAUSE_S)

    def guest(
        self, name: str, pid: int, run: str, *, uuid: str | None = None
    ) -> AbstractContextManager[QemuGuest]:
        """The QEMU of an instance."""
        return QemuGuest.of(name, pid)

    def may_run(self, name: str) -> bool:
        """Whether a QEMU listens, or a process is left that is about to, or to end."""
        return is_listening(InstanceFiles(name).qmp) or _has_process(name)

    def is_ending(self, name: str, unit: Unit) -> bool:
        """Whether a QEMU that systemd says is running has begun to end."""
        if oper_of(unit) is Oper.STOPPING:
            return True
        if oper_of(unit) is not Oper.RUNNING or not unit.main_pid:
            return False
        if markers.read_marker(MarkerKind.SHUTDOWN, name, run=unit.invocation):
            return True
        with Process.of(unit.main_pid, unit=unit_of(name)) as qemu:
            if qemu is None:
                return True
            try:
                with monitor_of(
                    name, timeout_s=_ANSWER_S, answer_timeout_s=_ANSWER_S, of_unit=True
                ) as qmp:
                    run_state(qmp)
            except QmpClosedError:
                return True
            except QmpError:
                return qemu.ended()  # it is busy, or another program is connected
        return False

    def is_paused(self, seen: Observed) -> bool:
        """Whether its processors stand still. QEMU is asked only where a marker says so."""
        if markers.read_marker(MarkerKind.PAUSED, seen.name, run=seen.run) is None:
            return False
        try:
            with monitor_of(seen.name, timeout_s=_ANSWER_S, answer_timeout_s=_ANSWER_S) as qmp:
                return run_state(qmp) == "paused"
        except BrineError:
            return True  # this user may not ask, or somebody else does

    def set_paused(self, seen: Observed, run: str, *, paused: bool) -> bool:
        """Stop or resume its processors; False if it is so already."""
        with monitor_of(seen.name) as qmp:
            if run_state(qmp) not in (("running",) if paused else ("paused", "prelaunch")):
                return False
            qmp.execute("stop" if paused else "cont")
        with suppress(OSError):  # then lists do not show it
            if paused:
                markers.write_marker(MarkerKind.PAUSED, seen.name, run=run)
            else:
                markers.remove_marker(MarkerKind.PAUSED, seen.name)
        return True

    def remove_rest(self, name: str) -> None:
        """Nothing is left of a QEMU that a next start does not replace."""


def _has_process(name: str) -> bool:
    """Whether the process that became its QEMU is still there: it may be about to end."""
    began = markers.read_marker(MarkerKind.START, name)
    pid = began.facts.get("pid") if began else None
    return isinstance(pid, int) and peer.runs_in(pid, unit_of(name))


def set_password(qmp: QmpClient, spec: Spec) -> None:
    """Give QEMU the password of VNC, without which nobody gets in."""
    if spec.vnc_password_file:
        from brine.instance.kvm.resources import read_password  # few have one

        qmp.execute("set_password", {"protocol": "vnc", "password": read_password(spec)})
