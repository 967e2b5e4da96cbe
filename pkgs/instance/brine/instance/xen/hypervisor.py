"""The implementation of the hypervisor protocol for Xen."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NoReturn

from brine.common.process import Process, main_pid
from brine.instance.devices import with_formats_found
from brine.instance.files import clear_last_run
from brine.instance.spec import Spec
from brine.instance.status import Observed
from brine.instance.unit import Unit
from brine.instance.xen import xl
from brine.instance.xen.domain import DomainGuest, become_xl, make_room, make_way, wait_running
from brine.instance.xen.leftovers import forget_domain


class Xen:
    """Xen; see :class:`brine.instance.hypervisor.Hypervisor`."""

    def prepared(self, spec: Spec) -> Spec:
        """The spec with the formats of its disks: nothing is plugged into a domain."""
        return with_formats_found(spec)

    def exec(self, spec: Spec) -> NoReturn:
        """Become the xl that makes its domain, and waits for the domain's end."""
        make_room(but=spec.name)
        make_way(spec)
        clear_last_run(spec.name)
        become_xl(spec)

    def wait_ready(self, spec: Spec, process: Process | None) -> None:
        """Return when its domain runs."""
        wait_running(spec, process, main_pid(), timeout_s=spec.start_limit_s())

    def guest(
        self, name: str, pid: int, run: str, *, uuid: str | None = None
    ) -> AbstractContextManager[DomainGuest]:
        """The domain of an instance."""
        return DomainGuest.of(name, uuid, pid)

    def may_run(self, name: str) -> bool:
        """Only Xen and systemd know."""
        return True

    def is_ending(self, name: str, unit: Unit) -> bool:
        """The state of a domain says what it does."""
        return False

    def is_paused(self, seen: Observed) -> bool:
        """Whether its domain is paused."""
        return seen.domain is not None and seen.domain.has("p")

    def set_paused(self, seen: Observed, run: str, *, paused: bool) -> bool:
        """Pause or unpause its domain; False if it is so already."""
        if seen.domain is None or self.is_paused(seen) == paused:
            return False
        (xl.pause if paused else xl.unpause)(seen.domain.number)
        return True

    def remove_rest(self, name: str) -> None:
        """Destroy a domain that has ended."""
        forget_domain(name)
