"""The implementation of the hypervisor protocol for Xen: domains, made by xl."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NoReturn

from brine.common import paths
from brine.common.errors import BrineError
from brine.common.peer import unit_of
from brine.common.process import Process, main_pid
from brine.instance.devices import with_formats_found
from brine.instance.files import clear_last_run
from brine.instance.observe import Observed, suspended
from brine.instance.spec import Spec
from brine.instance.store import InstanceError
from brine.instance.unit import Unit
from brine.instance.xen import config, xl
from brine.instance.xen.config import GRUBS, kernel_of
from brine.instance.xen.leftovers import clean_up_ended, forget_domain
from brine.instance.xen.xl import Domain, XlError


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
        """Always true: only Xen and systemd know."""
        return True

    def is_ending(self, name: str, unit: Unit) -> bool:
        """Always false: the state of its domain shows whether it ends."""
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


# The console of a domain, by Xen's own program.


def become_console(name: str) -> NoReturn:
    """Become ``xl console``, which has the same escape, and serves several users at a time.

    :raises BrineError: if there is no domain, or no xl.
    """
    uuid = config.uuid_of(name)
    domain = xl.domain_of(uuid) if uuid else None
    if domain is None or not domain.lives():
        raise InstanceError(name, "has no domain that runs", hint=f"brine instance info {name}")
    if sys.stdin.isatty():
        print(f"Connected to {name}. Ctrl-] leaves.", file=sys.stderr, flush=True)
    try:
        os.execvp(xl.PROGRAM, [xl.PROGRAM, "console", str(domain.number)])
    except OSError as error:
        raise XlError(f"{xl.PROGRAM}: {error.strerror}") from error


_LOOK_AGAIN_S = 1.0
_HEARD_AT_LEAST_S = 1.0
_HEARD_S = 30.0
_NOTICED_S = 30.0
_DESTROY_AGAIN_S = 1.0
_DESTROY = "xl destroy"


class DomainGuest:
    """The domain of an instance. After a reboot of its guest it is another domain.

    :param uuid: of the domain.
    :param waiter: the xl that waits for its end; None if it was killed.
    """

    def __init__(self, name: str, uuid: str, waiter: Process | None) -> None:
        self._name = name
        self._uuid = uuid
        self._waiter = waiter

    @classmethod
    @contextlib.contextmanager
    def of(cls, name: str, uuid: str | None, pid: int) -> Iterator[DomainGuest]:
        """The domain of an instance.

        :param uuid: None is that of the domain which was started last.
        :param pid: of the main process of its unit; 0 if there is none.
        """
        uuid = uuid or config.uuid_of(name)
        if uuid is None:
            raise InstanceError(name, "nobody knows the UUID of its domain")
        with Process.of(pid, unit=unit_of(name)) as waiter:
            yield cls(name, uuid, waiter)

    def ended(self, timeout_s: float = 0) -> bool:
        """Whether it has ended, or ends within the timeout. Leftovers of it don't count.

        :raises XlError: if Xen can't be asked.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(deadline - time.monotonic(), 0)
            if self._waiter is None:
                if not self._lives():
                    return True
                time.sleep(min(left_s, _LOOK_AGAIN_S))
            elif self._waiter.ended(left_s):
                self._waiter = None  # its domain has ended, or it was killed
                continue
            if time.monotonic() >= deadline:
                return False

    def ask(self, left_s: float, *, is_first: bool, may_use_agent: bool) -> str | None:
        """Ask its guest to shut down; returns None, or why the guest was not asked."""
        try:
            domain = xl.domain_of(self._uuid)
            if domain is None or not domain.lives():
                return "its domain is not there just now"
            if domain.has("p"):
                xl.unpause(domain.number)  # it would hear nothing
            xl.shut_down(domain.number, timeout_s=max(min(left_s, _HEARD_S), _HEARD_AT_LEAST_S))
        except XlError as error:
            return str(error)
        return None

    def kill(self) -> str:
        """Destroy it, whatever its guest does; returns by what.

        If the guest reboots just then, its new domain is destroyed, too.

        :raises XlError: if Xen refuses, or can't be asked.
        :raises InstanceError: if it is still there.
        """
        deadline = time.monotonic() + _NOTICED_S
        while True:
            fault = self._destroy()
            left_s = max(deadline - time.monotonic(), 0)
            # Its xl must notice that it is gone.
            if self.ended(min(left_s, _DESTROY_AGAIN_S)):
                return _DESTROY
            if time.monotonic() >= deadline:
                text = f"its domain does not end, not even by {_DESTROY}"
                raise fault or InstanceError(self._name, text)

    def _destroy(self) -> XlError | None:
        """Destroy its present domain; returns the error, if any."""
        try:
            domain = xl.domain_of(self._uuid)
            if domain and not domain.is_dying():
                xl.destroy(domain)
        except XlError as error:
            return error
        return None

    def _lives(self) -> bool:
        domain: Domain | None = xl.domain_of(self._uuid)
        return domain is not None and domain.lives()


# The unit's ExecStartPost: the instance counts as started when its domain runs.

TIMEOUT_S = 150.0
"""Xen makes one domain at a time, so a start may wait for others."""

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


def wait_running(
    spec: Spec, waiter: Process | None, pid: int, *, timeout_s: float = TIMEOUT_S
) -> Domain:
    """Return when the domain of an instance has been made, and runs.

    :param waiter: the process that becomes xl; None if it has ended.
    :param pid: of that process.
    :raises InstanceError: if xl has ended, or takes too long.
    :raises XlError: if Xen can't be asked.
    """
    name = spec.name
    deadline = time.monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S
    while True:
        has_ended = waiter is None or waiter.ended(pause_s)
        domain = xl.domain_of(spec.uuid)
        # A domain of an earlier xl does not count: the start removes or refuses it.
        is_new = domain is not None and config.is_by(name, pid)
        if has_ended:
            raise InstanceError(name, _fault(domain if is_new else None))
        if domain and is_new and domain.lives() and not domain.has("p"):
            return domain
        if time.monotonic() >= deadline:
            raise InstanceError(name, f"xl has not made its domain within {timeout_s:g} s")
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)


def _fault(domain: Domain | None) -> str:
    if domain and domain.has_ended():
        return f"ended as soon as it ran: {domain.how_it_ended()}"
    return "xl has ended; see what it said above"


# The unit's ExecStart: the process becomes the xl that waits for the end of its domain.


def become_xl(spec: Spec) -> NoReturn:
    """Become the xl that makes the domain of an instance.

    :raises BrineError: why it can't be started. Then nothing is left of the attempt.
    :raises OSError: of xl, or of a file of Brine's.
    """
    # The runtime file of a QEMU, if the instance was one.
    (paths.InstanceFiles(spec.name).runtime).unlink(missing_ok=True)
    _check_files(spec)
    file = config.write(spec)
    environment = {**os.environ, "LC_ALL": "C"}
    os.execvpe(xl.PROGRAM, [xl.PROGRAM, "create", "-F", str(file)], environment)


def _check_files(spec: Spec) -> None:
    """Refuse missing files, which xl would report in many lines.

    :raises InstanceError: which file is missing.
    """
    for path in (kernel_of(spec), spec.initrd, *(disk.path for disk in spec.disks)):
        if path and not Path(path).exists():
            hint = None
            if path == GRUBS[spec.hypervisor]:
                hint = "apt install grub-xen-host, which finds the guest's; or name a kernel"
            raise InstanceError(spec.name, f"{path}: is not there", hint=hint)


def make_room(*, but: str) -> None:
    """Free the memory of ended domains. If Xen does not free it, the start may fail.

    :param but: the instance that is to start.
    """
    try:
        failed = clean_up_ended(but=but)
    except BrineError as error:
        failed = [error]
    for one in failed:
        print(f"brine-instance: warning: {one}", file=sys.stderr)


def make_way(spec: Spec) -> None:
    """Remove the leftovers of the domain of its last run.

    :raises InstanceError: if that domain lives, without its unit, or is being saved or moved.
    :raises XlError: if it can't be removed.
    """
    domain = xl.domain_of(spec.uuid)
    if domain and domain.lives():
        text = f"runs already, as domain {domain.number}, and not as this unit"
        raise InstanceError(spec.name, text, hint=f"brine instance stop {spec.name}")
    if domain and domain.is_suspended():
        raise suspended(spec.name)
    if domain and domain.has_ended():
        xl.destroy(domain)
