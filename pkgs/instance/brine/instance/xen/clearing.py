"""What is left of an instance when its xl has ended, and what is done about it.

An ended domain stays until somebody has seen how it ended, as only what is left of it says that. So
that it is not lost with the domain, it is noted: a user's shutdown as a mark, and any end that is a
fault by failing, which fails the unit.

One that is saved or moved loses its xl before it is gone. That is the admin's doing, and so it is
noted.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from enum import Enum, auto

from brine.common import marks
from brine.common.errors import BrineError
from brine.common.marks import Kind
from brine.instance import messages
from brine.instance.xen import started, xl
from brine.instance.xen.domains import Domain
from brine.instance.xen.state import how_it_ended

_PROGRAM = "brine-instance"


class Left(Enum):
    """What there is after xl has ended."""

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
    uuid = started.uuid_of(name)
    if uuid is None or not started.is_of_this_run(name):
        return True
    run = marks.this_run()
    domain = xl.domain_of(uuid)
    if domain and domain.was_powered_off() and started.was_asked(name):
        _mark_stopped(name, run)
    if domain is None or not domain.was_powered_off():
        with suppress(OSError):
            marks.remove_mark(Kind.REBOOT, name)  # its guest has not followed that; it may be moved
    was_stopped = marks.read_mark(Kind.STOP, name, run=run) is not None
    is_wanted = started.has_come_up(name) and not was_stopped
    left = left_by(domain, is_wanted=is_wanted)
    if domain is None or left is Left.NOTHING:
        return True
    if left is Left.NOT_WANTED:
        xl.destroy(domain)
        return True
    if left is Left.LIVES:
        messages.tell_domain_lives(name, domain.number)
        return True
    if left is Left.SUSPENDED:
        # That its unit has not failed says as much; and who holds the mark goes on doing so.
        with suppress(OSError):
            _mark_stopped(name, run)
        messages.tell_domain_suspended(name, domain.number)
        return True
    if left is Left.BY_USER:
        marks.write_mark(Kind.SHUTDOWN, name, run=run)
    how = "its user shut it down" if left is Left.BY_USER else how_it_ended(domain)
    messages.tell_domain_left(name, domain.number, how)
    return left is Left.BY_USER


def _mark_stopped(name: str, run: str) -> None:
    with marks.held_mark(Kind.STOP, name, run=run):  # who holds it already goes on doing so
        pass
