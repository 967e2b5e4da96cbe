"""Removing domains that have ended, which keep their memory.

Source: "Implementation" in the design of the detection of user shutdown: it is done before whatever
needs resources, and never by who only asks.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from enum import Enum, auto

from brine.common import markers
from brine.common.errors import BrineError
from brine.common.locks import LockedError
from brine.common.markers import MarkerKind
from brine.instance import messages, store
from brine.instance.intent import keep_users_will
from brine.instance.observe import Observed, Oper, look
from brine.instance.spec import AdminState, Spec
from brine.instance.store import InstanceError
from brine.instance.xen import config, xl
from brine.instance.xen.xl import Domain

_LOCK_S = 2.0
_AT_REST = (Oper.DOWN, Oper.USER_SHUTDOWN)


def clean_up_ended(*, but: str | None) -> list[BrineError]:
    """Remove all ended domains of this node's instances; what their users wanted is noted first.

    :param but: the instance that it is done for, with which the caller is alone, if it is one.
    :returns: what could not be removed.
    :raises XlError: if Xen can't be asked.
    """
    ended = {domain.uuid for domain in xl.domains().domains if domain.has_ended()}
    if not ended:
        return []
    failed: list[BrineError] = []
    for spec in store.load_all():
        if isinstance(spec, InstanceError) or spec.uuid not in ended or spec.name == but:
            continue
        try:
            _clean_up(spec)
        except LockedError:
            continue  # somebody is working on it
        except BrineError as error:
            failed.append(error)
    return failed


def _clean_up(spec: Spec) -> None:
    with store.alone(spec.name, timeout_s=_LOCK_S):
        seen = look(spec.name)
        if is_left(seen):
            if keep_users_will(spec.name):
                seen = look(spec.name)
            remove(seen)


def forget_domain(name: str) -> None:
    """Remove what is left of an instance, whatever it says. The caller is alone with it.

    :raises BrineError: if Xen refuses.
    """
    seen = look(name)
    if seen.domain and is_left(seen):
        xl.destroy(seen.domain)


def is_left(seen: Observed) -> bool:
    """Whether an instance has ended, and its domain is still there, which nobody works on."""
    is_over = seen.domain is not None and seen.domain.is_over()
    return is_over and seen.state.oper in _AT_REST and not seen.is_being_stopped


def remove(seen: Observed) -> None:
    """Remove what is left of an instance. The caller is alone with it.

    :raises InstanceError: if it can't be noted how it ended; then all is left as it is.
    :raises XlError: if Xen refuses.
    """
    if seen.domain is None:
        return
    try:
        if seen.spec.admin_state == AdminState.UP:
            _note_end(seen)
    except OSError as error:
        text = f"it can't be noted how it has ended: {error.strerror}"
        raise InstanceError(seen.name, text) from error
    xl.destroy(seen.domain)


def _note_end(seen: Observed) -> None:
    """Have what a domain says of its end not be lost with it. Where its xl was killed, nobody else
    has noted that."""
    name = seen.name
    if seen.state.oper is Oper.USER_SHUTDOWN:
        markers.write_marker(MarkerKind.SHUTDOWN, name, run=markers.last_run(name))
    elif not seen.was_stopped:
        # It is to run as if it never had; systemd may know no fault of it.
        markers.remove_marker(MarkerKind.STARTED, name)


# What is left of an instance when its xl has ended, and what is done about it.

_PROGRAM = "brine-instance"


class Left(Enum):
    """What is left after xl has ended."""

    NOTHING = auto()
    NOT_WANTED = auto()
    """It was stopped, or its start failed."""
    LIVES = auto()
    SUSPENDED = auto()
    """Somebody saves or moves it, and removes it then."""
    BY_USER = auto()
    BY_FAULT = auto()


def left_by(domain: Domain | None, *, is_wanted: bool) -> Left:
    """What is left.

    :param is_wanted: whether it has come up, and was not stopped on the admin's behalf.
    """
    if domain is None or domain.is_dying():
        return Left.NOTHING
    if domain.is_being_moved():
        return Left.SUSPENDED
    if not is_wanted:
        return Left.NOT_WANTED
    if domain.lives():
        return Left.LIVES
    return Left.BY_USER if domain.was_powered_off() else Left.BY_FAULT


def clear_domain(name: str) -> bool:
    """Note how an instance's domain has ended, and remove it if nobody wants to see it.

    :returns: whether it ended as it should.
    """
    try:
        return _clear(name)
    except (BrineError, OSError) as error:
        print(f"{_PROGRAM}: error: {name}: its domain: {error}", file=sys.stderr)
        return False


def _clear(name: str) -> bool:
    uuid = config.uuid_of(name)
    if uuid is None or not config.is_of_this_run(name):
        return True
    run = markers.this_run()
    domain = xl.domain_of(uuid)
    if domain and domain.was_powered_off() and config.was_asked(name):
        _mark_stopped(name, run)
    if domain is None or not domain.was_powered_off():
        with suppress(OSError):
            # Its guest has not followed that; it may be moved.
            markers.remove_marker(MarkerKind.REBOOT, name)
    was_stopped = markers.read_marker(MarkerKind.STOP, name, run=run) is not None
    is_wanted = config.has_come_up(name) and not was_stopped
    left = left_by(domain, is_wanted=is_wanted)
    if domain is None or left is Left.NOTHING:
        return True
    if left is Left.NOT_WANTED:
        xl.destroy(domain)
        return True
    if left is Left.LIVES:
        messages.tell(messages.DOMAIN_LIVES, name, domain=domain.number)
        return True
    if left is Left.SUSPENDED:
        # That its unit has not failed says as much; and who holds the marker goes on doing so.
        with suppress(OSError):
            _mark_stopped(name, run)
        messages.tell(messages.DOMAIN_SUSPENDED, name, domain=domain.number)
        return True
    if left is Left.BY_USER:
        markers.write_marker(MarkerKind.SHUTDOWN, name, run=run)
    how = "its user shut it down" if left is Left.BY_USER else domain.how_it_ended()
    messages.tell(messages.DOMAIN_LEFT, name, domain=domain.number, reason=how)
    return left is Left.BY_USER


def _mark_stopped(name: str, run: str) -> None:
    with markers.held_marker(
        MarkerKind.STOP, name, run=run
    ):  # who holds it already goes on doing so
        pass
