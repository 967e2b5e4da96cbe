"""The domain of an instance: its start, its guest, and its leftovers, which keep their memory.

Source: "Implementation" in the design of the detection of user shutdown: ended domains are removed
before something needs their memory, and never by a command that only asks.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import NoReturn

from brine.common.errors import BrineError, warn
from brine.common.locks import LockedError
from brine.common.process import Process, main_pid
from brine.instance import messages, store
from brine.instance.conflicts import refuse_in_use
from brine.instance.devices import with_formats_found
from brine.instance.hypervisor import Hypervisor, ended_early
from brine.instance.intent import keep_users_will
from brine.instance.observe import Observed, Oper, look, suspended
from brine.instance.store import InstanceError, clear_last_run
from brine.instance.xen import config, last_start, xl
from brine.instance.xen.config import GRUBS, kernel_of
from brine.instance.xen.xl import Domain, ShutdownReason, XlError
from brine.vm import end, markers
from brine.vm.conflicts import identities_lock
from brine.vm.files import InstanceFiles
from brine.vm.markers import MarkerKind
from brine.vm.run import Run
from brine.vm.runtime_file import Runtime
from brine.vm.spec import AdminState, Spec
from brine.vm.unit_name import unit_of

_PROGRAM = "brine-instance"
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_LOOK_AGAIN_S = 1.0
_HEARD_AT_LEAST_S = 1.0
_HEARD_S = 30.0
_NOTICED_S = 30.0
_DESTROY_AGAIN_S = 1.0
_DESTROY = "xl destroy"
_LOCK_S = 2.0
_NO_DOMAIN = -1


class Xen(Hypervisor):
    """Xen."""

    def prepared(self, spec: Spec) -> Spec:
        """The spec with the formats of its disks: nothing is plugged into a domain."""
        return with_formats_found(spec)

    def exec(self, spec: Spec, awaited: Runtime | None = None) -> NoReturn:
        """Become the xl that makes its domain, and waits for the domain's end."""
        del awaited  # the guest of a domain is not moved while it runs
        xl.require()
        self._make_room(spec)
        for path in (kernel_of(spec), spec.initrd, *(disk.path for disk in spec.disks)):
            if path and not os.path.exists(path):  # xl would report it in many lines
                hint = "name a kernel, or install GRUB for Xen (grub-xen-host on Debian)"
                is_grub = path == GRUBS[spec.hypervisor]
                text = f"{path}: is not there"
                raise InstanceError(spec.name, text, hint=hint if is_grub else None)
        with identities_lock(partial(refuse_in_use, spec)):
            clear_last_run(spec.name)
            # The runtime file of a QEMU, if the instance was one.
            InstanceFiles(spec.name).runtime.unlink(missing_ok=True)
            file = config.write_config(spec)
        xl.become("create", "-F", str(file))

    def _make_room(self, spec: Spec) -> None:
        """Free the memory of ended domains, and refuse a start beside a domain that has not ended.
        If Xen does not free the memory of others, the start may fail."""
        try:
            failed = clean_up_ended(but=spec.name)
        except BrineError as error:
            failed = [error]
        for one in failed:
            warn(str(one), program=_PROGRAM)
        domain = xl.domain_of(spec.uuid)
        if domain and last_start.is_half_made(spec, domain):
            xl.destroy(domain)
        elif domain and domain.lives():
            text = f"runs already, as domain {domain.number}, and not as this unit"
            raise InstanceError(spec.name, text, hint=f"brine instance stop {spec.name}")
        if domain and domain.is_suspended():
            raise suspended(spec.name)
        if domain and domain.has_ended():
            xl.destroy(domain)

    def wait_ready(self, spec: Spec, process: Process | None) -> None:
        """Return when its domain runs. Xen makes one at a time, so it may wait for others."""
        name, limit_s = spec.name, spec.start_limit_s()
        deadline = time.monotonic() + limit_s
        pause_s = _FIRST_PAUSE_S
        while True:
            has_ended = process is None or process.ended(pause_s)
            domain = xl.domain_of(spec.uuid)
            # A domain of an earlier xl does not count: the start removes or refuses it.
            if domain and not last_start.is_by(name, main_pid()):
                domain = None
            if has_ended:
                if domain and domain.has_ended():
                    text = f"ended as soon as it ran: {domain.how_it_ended()}"
                    raise InstanceError(name, text)
                raise ended_early(name, "xl")
            if domain and domain.lives() and not domain.has("p"):
                return
            if time.monotonic() >= deadline:
                raise InstanceError(name, f"xl has not made its domain within {limit_s:g} s")
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    @contextlib.contextmanager
    def guest(self, name: str, pid: int, *, uuid: str | None = None) -> Iterator[DomainGuest]:
        uuid = uuid or last_start.uuid_of(name)
        if uuid is None:
            raise InstanceError(name, "the UUID of its domain is unknown")
        with Process.of(pid, unit=unit_of(name)) as waiter:
            yield DomainGuest(name, uuid, waiter)

    def is_paused(self, seen: Observed) -> bool:
        return seen.domain is not None and seen.domain.has("p")

    def set_paused(self, seen: Observed, run: str, *, paused: bool) -> bool:
        if seen.domain is None or self.is_paused(seen) == paused:
            return False
        xl.set_paused(seen.domain.number, paused=paused)
        return True

    def remove_rest(self, name: str) -> None:
        """Destroy a domain that has ended."""
        seen = look(name)
        if seen.domain and is_left(seen):
            xl.destroy(seen.domain)


class DomainGuest:
    """The domain of an instance. After a reboot of its guest it is another domain, which its xl
    makes. Without that xl, a further domain is another run's.

    :param waiter: the xl that waits for its end; None if it was killed.
    """

    def __init__(self, name: str, uuid: str, waiter: Process | None) -> None:
        self._name = name
        self._uuid = uuid
        self._waiter = waiter
        self._last: int | None = None  # the number of the domain that its xl has left

    def _domain(self) -> Domain | None:
        domain = xl.domain_of(self._uuid)
        if self._waiter is None:
            number = domain.number if domain else _NO_DOMAIN
            if self._last is None:
                self._last = number
            elif number != self._last:
                return None
        return domain

    def ended(self, timeout_s: float = 0) -> bool:
        """Whether it has ended, or ends within the timeout. Leftovers of it don't count."""
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(deadline - time.monotonic(), 0)
            if self._waiter is None:
                domain = self._domain()
                if domain is None or not domain.lives():
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
            domain = self._domain()
            if domain is None or not domain.lives():
                return "its domain is not there just now"
            if domain.has("p"):
                xl.set_paused(domain.number, paused=False)  # it would hear nothing
            xl.ask_shutdown(domain.number, timeout_s=max(min(left_s, _HEARD_S), _HEARD_AT_LEAST_S))
        except XlError as error:
            return str(error)
        return None

    def kill(self) -> str:
        """Destroy it, whatever its guest does; returns by what. If the guest reboots just then, its
        new domain is destroyed, too."""
        deadline = time.monotonic() + _NOTICED_S
        while True:
            fault: BrineError | None = None
            try:
                domain = self._domain()
                if domain and not domain.is_dying():
                    xl.destroy(domain)
            except XlError as error:
                fault = error
            left_s = max(deadline - time.monotonic(), 0)
            # Its xl must notice that it is gone.
            if self.ended(min(left_s, _DESTROY_AGAIN_S)):
                return _DESTROY
            if time.monotonic() >= deadline:
                text = f"its domain does not end, not even by {_DESTROY}"
                raise fault or InstanceError(self._name, text)


def become_console(name: str) -> NoReturn:
    """Become ``xl console``, which has the same escape, and serves several users at a time."""
    try:
        uuid = last_start.uuid_of(name)
    except PermissionError as error:
        raise InstanceError(name, "is a domain, whose console is root's", hint="be root") from error
    domain = xl.domain_of(uuid) if uuid else None
    if domain is None or not domain.lives():
        raise InstanceError(name, "has no domain that runs", hint=f"brine instance info {name}")
    if sys.stdin.isatty():
        print(f"Connected to {name}. Ctrl-] leaves.", file=sys.stderr, flush=True)
    xl.become("console", str(domain.number))


# Ended domains of any instance.


def clean_up_ended(*, but: str | None) -> list[BrineError]:
    """Remove all ended domains of this node's instances; the will of their users is noted first.

    :param but: an instance whose lock the caller holds, if any.
    :returns: the errors of those that could not be removed.
    """
    listed = xl.domains().domains
    ended = {one.uuid for one in listed if one.has_ended() or one.never_ran()}
    failed: list[BrineError] = []
    for spec in store.load_all() if ended else ():
        if isinstance(spec, InstanceError) or spec.uuid not in ended or spec.name == but:
            continue
        try:
            with store.alone(spec.name, timeout_s=_LOCK_S):
                seen = look(spec.name)
                if is_left(seen):
                    remove_domain(look(spec.name) if keep_users_will(spec.name) else seen)
        except LockedError:
            continue  # another command works on it
        except BrineError as error:
            failed.append(error)
    return failed


def is_left(seen: Observed) -> bool:
    """Whether an instance has ended, or was made by half, and its domain is still there, which no
    command works on."""
    is_over = seen.domain is not None and (seen.domain.is_over() or seen.is_half_made)
    is_down = seen.state.oper in (Oper.DOWN, Oper.USER_SHUTDOWN)
    return is_over and is_down and not seen.run.is_being_stopped()


def remove_domain(seen: Observed) -> None:
    """Remove the ended domain of an instance, if it can be noted how it ended. The caller holds the
    instance's lock."""
    if seen.domain is None:
        return
    name = seen.name
    # If its xl was killed, the domain alone shows how it ended.
    with store.telling(name, "it can't be noted how it has ended"):
        if seen.spec.admin_state == AdminState.UP and seen.state.oper is Oper.USER_SHUTDOWN:
            markers.write_marker(MarkerKind.SHUTDOWN, name, run=Run.last(name).id)
        elif seen.spec.admin_state == AdminState.UP and not seen.run.was_stopped():
            # It is to run as if it never had; systemd may know no fault of it.
            markers.remove_marker(MarkerKind.STARTED, name)
    xl.destroy(seen.domain)


# The unit's last step, when xl has ended.


def clear_domain(name: str) -> bool:
    """Note how an instance's domain has ended, and remove it unless its end is still to be seen.

    :returns: whether it ended as it should.
    :raises BrineError: or OSError, if that can't be known or noted.
    """
    uuid = last_start.uuid_of(name)
    if uuid is None or not last_start.is_of_this_run(name):
        return True
    domain = xl.domain_of(uuid)
    was_powered_off = domain is not None and domain.was_powered_off()
    if was_powered_off and end.has_obeyed(Run.own(name), time.time()):
        _mark_stopped(name)
    if not was_powered_off:
        with suppress(OSError):  # its guest has not followed that; it may be moved
            markers.remove_marker(MarkerKind.REBOOT, name)
    if domain is None or domain.is_dying():
        return True
    if domain.has_ended() and domain.reason == ShutdownReason.SUSPEND:
        # The program that saves or moves it needs its memory, and removes it then. It counts as
        # stopped; a holder of the marker goes on holding it.
        with suppress(OSError):
            _mark_stopped(name)
        messages.tell(messages.DOMAIN_SUSPENDED, name, domain=domain.number)
        return True
    run = Run.own(name)
    if not end.keeps_domain(run):
        xl.destroy(domain)
        return True
    if domain.lives():
        messages.tell(messages.DOMAIN_LIVES, name, domain=domain.number)
        return True
    if end.is_by_user(run, domain.end()):
        markers.write_marker(MarkerKind.SHUTDOWN, name, run=run.id)
    how = "its user shut it down" if was_powered_off else domain.how_it_ended()
    messages.tell(messages.DOMAIN_LEFT, name, domain=domain.number, reason=how)
    return was_powered_off


def _mark_stopped(name: str) -> None:
    with markers.held_marker(MarkerKind.STOP, name, run=markers.this_run()):
        pass
