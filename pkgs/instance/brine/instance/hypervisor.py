"""The hypervisor of an instance: QEMU with KVM, or Xen. All that differs between the two is here.

:mod:`brine.instance.kvm` and :mod:`brine.instance.xen` have one implementation each;
:mod:`brine.instance.hypervisor_choice` chooses.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NoReturn, Protocol

from brine.common.process import Process
from brine.instance.observe import Observed
from brine.instance.store import InstanceError
from brine.instance.unit import Unit
from brine.vm.run import Run
from brine.vm.runtime_file import Runtime
from brine.vm.spec import Spec


class EndedEarlyError(InstanceError):
    """A start whose process has ended. The process itself has told the reason."""


class DeafGuestError(InstanceError):
    """A guest that will never hear that it should shut down."""


class Guest(Protocol):
    """The guest of a running instance: in a QEMU, or in a domain. Errors are BrineErrors."""

    def ended(self, timeout_s: float = 0) -> bool:
        """Whether it has ended, or ends within the timeout."""

    def ask(self, left_s: float, *, is_first: bool, may_use_agent: bool) -> str | None:
        """Ask the guest to shut down; returns None, or why it could not be asked.

        :raises DeafGuestError: if it is of no use to ask again.
        :param left_s: how long the guest may take to shut down.
        :param is_first: whether it has not been asked yet.
        :param may_use_agent: whether the guest agent may be asked; QEMU reports that shutdown as
            the guest's own.
        """

    def kill(self) -> str:
        """End it, whatever the guest does; returns the means, for people."""


class Hypervisor(Protocol):
    """A hypervisor. The defaults here hold for one of the two. Errors are BrineErrors."""

    def prepared(self, spec: Spec) -> Spec:
        """The spec for the next start. The caller holds the instance's lock."""

    def exec(self, spec: Spec, awaited: Runtime | None = None) -> NoReturn:
        """Become the process that runs an instance: QEMU, or the xl that waits for a domain. After
        an error, also an OSError of a program or file, nothing is left of the attempt.

        :param awaited: of the QEMU whose guest this one waits for; None begins anew.
        """

    def wait_ready(self, spec: Spec, process: Process | None) -> None:
        """Return when an instance runs.

        :param process: what :meth:`exec` became; None if it has ended.
        """

    def guest(
        self, name: str, pid: int, *, uuid: str | None = None
    ) -> AbstractContextManager[Guest]:
        """The guest of an instance.

        :param pid: of the main process of its unit; 0 if there is none.
        :param uuid: of a domain; None is the domain that was started last.
        """

    def may_run(self, name: str) -> bool:
        """Whether an instance may run. If it surely does not, systemd need not be asked."""
        return True

    def is_ending(self, name: str, unit: Unit) -> bool:
        """Whether an instance with an active unit has begun to end. A domain's state shows that."""
        return False

    def is_paused(self, seen: Observed) -> bool:
        """Whether a running instance is paused."""

    def set_paused(self, seen: Observed, run: str, *, paused: bool) -> bool:
        """Pause or resume an instance, whatever has stopped it; False if nothing changes."""

    def remove_rest(self, name: str) -> None:
        """Remove the leftovers of an ended instance that its next start does not replace. The
        caller holds its lock."""
        return


def ended_early(name: str, program: str) -> EndedEarlyError:
    """The error of a start whose process has ended.

    :param program: what the process becomes once all is prepared.
    """
    run = Run.own(name)
    was_prepared = run.is_last() and run.failure is None
    subject = f"{program} has ended" if was_prepared else "the start failed"
    return EndedEarlyError(name, f"{subject}; the journal has the reason")
