"""The implementation of the hypervisor protocol for QEMU."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NoReturn

from brine.common import markers, peer
from brine.common.markers import MarkerKind
from brine.common.paths import InstanceFiles
from brine.common.peer import is_listening, unit_of
from brine.common.process import Process
from brine.instance.observe import Observed
from brine.instance.spec import Spec
from brine.instance.unit import Unit

if TYPE_CHECKING:
    from brine.instance.kvm.guest import QemuGuest


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
        from brine.instance.kvm.guest import wait_ready  # a start needs no monitor

        wait_ready(spec, process)

    def guest(
        self, name: str, pid: int, run: str, *, uuid: str | None = None
    ) -> AbstractContextManager[QemuGuest]:
        """The QEMU of an instance."""
        from brine.instance.kvm.guest import QemuGuest  # a start needs no monitor

        return QemuGuest.of(name, pid)

    def may_run(self, name: str) -> bool:
        """Whether a QEMU listens, or a process is left that is about to, or to end."""
        return is_listening(InstanceFiles(name).qmp) or _has_process(name)

    def is_ending(self, name: str, unit: Unit) -> bool:
        """Whether a QEMU that systemd says is running has begun to end."""
        from brine.instance.kvm.guest import is_ending  # a start needs no monitor

        return is_ending(name, unit)

    def is_paused(self, seen: Observed) -> bool:
        """Whether its processors stand still. QEMU is asked only where a marker says so."""
        if markers.read_marker(MarkerKind.PAUSED, seen.name, run=seen.run) is None:
            return False
        from brine.instance.kvm.guest import is_paused  # a start needs no monitor

        return is_paused(seen.name)

    def set_paused(self, seen: Observed, run: str, *, paused: bool) -> bool:
        """Stop or resume its processors; False if it is so already."""
        from brine.instance.kvm.guest import set_paused  # a start needs no monitor

        return set_paused(seen, run, paused=paused)

    def remove_rest(self, name: str) -> None:
        """Nothing is left of a QEMU that a next start does not replace."""


def _has_process(name: str) -> bool:
    """Whether the process that became its QEMU is still there: it may be about to end."""
    began = markers.read_marker(MarkerKind.START, name)
    pid = began.facts.get("pid") if began else None
    return isinstance(pid, int) and peer.runs_in(pid, unit_of(name))
