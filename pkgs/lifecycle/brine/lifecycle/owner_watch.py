"""An instance with an owner, as the handler observes it; decides whether the owner is there.

Everything here is pure. Source: "Watchdog Timer Safeguard" in the design of the coupling of VM
lifecycles.

A watchdog counts by changes that the handler has observed, on the monotonic clock. So a wall clock
that jumps ends nobody. The watchdog's time of change (mtime) only tells one change from the next,
and how old a watchdog is that the handler sees for the first time.
"""

from __future__ import annotations

from dataclasses import dataclass

from brine.common.markers import UNKNOWN_RUN
from brine.instance.owner import FUTURE_S, OwnersFile

PAUSE_S = 4.0
"""A handler that did not run for so long may have missed changes, and its owners their times."""

MOST_RENEWALS = 3
"""So often in a row an expiry starts anew without a change of the watchdog."""


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
    :param done_inode: the same, once that was confirmed: that owner does not return.
    :param is_up: whether it should run.
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
    done_inode: int = 0
    is_up: bool = False

    def observe(self, watchdog: OwnersFile | None, now_s: float, wall_s: float) -> bool:
        """Note what a watchdog is now; returns whether its owner is back.

        :param now_s: the monotonic clock.
        :param wall_s: the wall clock.
        """
        if watchdog is None:
            self.fault = "there is no watchdog"
            return False
        if watchdog.fault:
            self.fault = f"the watchdog {watchdog.fault}"
            return False
        if watchdog.mtime_ns == self.mtime_ns or watchdog.inode == self.done_inode:
            return False
        if -watchdog.age_s(wall_s) > FUTURE_S:
            self.fault = "the watchdog is in the future"
            return False
        self.mtime_ns, self.fault, self.renewals = watchdog.mtime_ns, "", 0
        self.seen_s = now_s
        was_gone, self.is_gone = self.is_gone, False
        return was_gone

    def take_over(self, watchdog: OwnersFile | None, now_s: float, wall_s: float) -> None:
        """Note a watchdog that is seen for the first time since the handler's start, while the wall
        clock went as the monotonic one: it is as old as it says."""
        self.observe(watchdog, now_s, wall_s)
        if watchdog and self.seen_s is not None:
            self.seen_s = min(now_s, now_s - watchdog.age_s(wall_s))

    def begin(self, now_s: float) -> None:
        """Note that its instance runs, which it does not without an owner."""
        self.done_inode = 0
        if self.seen_s is None or self.is_gone:
            self.seen_s, self.is_gone = now_s, False

    def note_asking(self, watchdog: OwnersFile | None) -> None:
        """Note whose request it is."""
        self.asking_inode = watchdog.inode if watchdog else 0

    def confirm(self) -> None:
        """Note that its owner was told that the instance has ended."""
        self.is_gone, self.done_inode = True, self.asking_inode

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


def is_older_run(request: str, run: str) -> bool:
    """Whether a request is about an earlier run of an instance than *run*.

    :param request: the content of the request; the run that it is about, or empty, which means
        the present one.
    :param run: the present or last one; may be unknown.
    """
    return run != UNKNOWN_RUN and bool(request.strip()) and request.split()[0] != run
