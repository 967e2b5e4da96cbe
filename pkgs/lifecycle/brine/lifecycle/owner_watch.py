"""An instance with an owner, as the handler observes it; decides whether the owner is there.

Everything here is pure. Source: "Watchdog Timer Safeguard" in the design of the coupling of VM
lifecycles.

A watchdog counts by changes that the handler has observed, on the monotonic clock. So a wall clock
that jumps ends no instance. The watchdog's time of change (mtime) only tells one change from the
next, and how old a watchdog is that the handler sees for the first time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum

from brine.instance.owner import OwnersFile, fault_of
from brine.vm.markers import UNKNOWN_RUN

PAUSE_S = 4.0
"""A handler that did not run for so long may have missed changes, and its owners their times."""

MOST_RENEWALS = 3
"""So often in a row an expiry starts anew without a change of the watchdog."""

ENDING_S = 30.0
"""So long after its request was confirmed an owner may still touch its watchdog while it ends."""

_RUN = re.compile("[0-9a-f]{32}")  # an invocation id (systemd.exec(5))
_FAULT_S = 3600.0  # a fault that stays, or comes again and again, is told once in that time


class EndReason(StrEnum):
    """Why an instance is ended: the cause of its verdict."""

    REQUEST = "owner-request"
    GONE = "owner-gone"
    SPEC_GONE = "spec-gone"


@dataclass(slots=True)
class OwnerWatch:
    """An instance with an owner.

    :param timeout_s: how long its watchdog may stay unchanged.
    :param restarts: whether it starts again when its owner returns.
    :param has_spec: whether it is defined.
    :param seen_s: when its watchdog changed last, by the monotonic clock; None if it has never been
        seen to count.
    :param mtime_ns: of the watchdog then.
    :param fault: why the watchdog does not count; empty if it does.
    :param is_gone: whether the owner is gone, and that was acted on.
    :param renewals: how often its expiry has started anew since the last change.
    :param request: of its owner to end it; None if there is none.
    :param asking_inode: of the watchdog of an owner that has asked for the end.
    :param ending_inode: the same, once that was confirmed.
    :param ending_until_s: until then, a change of that watchdog is no owner's return.
    :param next_request_s: a request of its owner is not passed on before that time.
    :param is_up: whether it should run.
    :param told_s: when each of its faults was told last.
    """

    name: str
    timeout_s: float
    restarts: bool = False
    has_spec: bool = False
    seen_s: float | None = None
    mtime_ns: int = 0
    fault: str = ""
    is_gone: bool = True
    renewals: int = 0
    request: OwnersFile | None = None
    asking_inode: int = 0
    ending_inode: int = 0
    ending_until_s: float = 0.0
    next_request_s: float = 0.0
    is_up: bool = False
    told_s: dict[str, float] = field(default_factory=dict)

    def observe(self, watchdog: OwnersFile | None, now_s: float, wall_s: float) -> bool:
        """Note what a watchdog is now; returns whether its owner is back.

        :param now_s: the monotonic clock.
        :param wall_s: the wall clock.
        """
        # The wall clock may have been set back since: what has counted does not become a fault.
        if watchdog and not watchdog.fault and watchdog.mtime_ns == self.mtime_ns:
            self.fault = ""
            return False
        self.fault = fault_of(watchdog, wall_s)
        if watchdog is None or self.fault:
            return False
        was_away = self.is_gone or not self.mtime_ns
        self.mtime_ns, self.renewals = watchdog.mtime_ns, 0
        if watchdog.inode == self.ending_inode and now_s < self.ending_until_s:
            return False
        self.seen_s, self.is_gone = now_s, False
        return was_away

    def take_over(self, watchdog: OwnersFile | None, now_s: float, wall_s: float) -> None:
        """Note a watchdog that is seen for the first time since the handler's start, while the wall
        clock went as the monotonic one: it is as old as it says."""
        self.observe(watchdog, now_s, wall_s)
        if watchdog and self.seen_s is not None:
            self.seen_s = min(now_s, now_s - watchdog.age_s(wall_s))

    def begin(self, now_s: float) -> None:
        """Note that its instance runs, which it does not without an owner."""
        self.ending_inode = 0
        if self.seen_s is None or self.is_gone:
            self.seen_s, self.is_gone = now_s, False

    def note_asking(self, watchdog: OwnersFile | None) -> None:
        """Note whose request it is."""
        self.asking_inode = watchdog.inode if watchdog else 0

    def confirm(self, now_s: float) -> None:
        """Note that its owner was told that the instance has ended."""
        self.is_gone, self.ending_inode = True, self.asking_inode
        self.ending_until_s = now_s + ENDING_S

    def is_to_tell(self, fault: str, now_s: float) -> bool:
        """Whether a fault of its owner's files is told: it was not for long."""
        told_s = self.told_s.get(fault)
        if told_s is not None and now_s < told_s + _FAULT_S:
            return False
        self.told_s[fault] = now_s
        return True

    def forget_inodes(self) -> None:
        """Note that its folder is another one: numbers of inodes begin anew there."""
        self.asking_inode = self.ending_inode = 0

    def renew(self, now_s: float) -> None:
        """Start the expiry anew, after a time in which a change could not be made or seen."""
        if self.seen_s is not None and not self.is_gone and self.renewals < MOST_RENEWALS:
            self.seen_s, self.renewals = now_s, self.renewals + 1

    def expires_s(self) -> float | None:
        """When it expires, by the monotonic clock; None if it has already, or has no owner yet."""
        if self.seen_s is None or self.is_gone:
            return None
        return self.seen_s + self.timeout_s

    def note_if_gone(self, now_s: float) -> bool:
        """Whether its owner has just gone; it is noted then."""
        expires_s = self.expires_s()
        if expires_s is None or now_s < expires_s:
            return False
        self.is_gone = True
        return True


def is_other_run(request: str, run: str) -> bool:
    """Whether a request is about another run of an instance than *run*.

    :param request: the content of the request. The id of a run, alone, means that run; anything
        else is about the present one.
    :param run: the present or last one; may be unknown.
    """
    text = request.strip().lower()
    return run != UNKNOWN_RUN and _RUN.fullmatch(text) is not None and text != run
