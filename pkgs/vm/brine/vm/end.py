"""The truth about an end: which party ended a run, and what its markers still count for.

All rules are here, and pure: they go by a :class:`~brine.vm.run.Run` and by what systemd and Xen
say. The unit's last step, lists, the watcher and Xen's clean-up ask them.

Source: "Implementation" in the design of the detection of user shutdown.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from brine.vm.markers import BELIEVED_S, WHO_UNKNOWN
from brine.vm.run import Run

USER = "user"
"""The party of a verdict on a user's shutdown."""

IN_ORDER = ("success", "exec-condition")
"""systemd's results of a unit that has not failed (systemd.exec(5), ``$SERVICE_RESULT``)."""

_KILLED = ("signal", "oom-kill")


class EndCause(StrEnum):
    """The cause of an instance's end.

    ``REBOOT`` is the first half of a reboot, by user or admin, without the second. ``FAILED`` is a
    failed start. ``NEVER``: it was not started since the node's own start. ``UNTOLD`` is a clean
    end without a verdict yet. ``UNKNOWN`` is a clean end without a verdict because brine-kvmd was
    off.
    """

    USER = USER
    ADMIN = "admin"
    CRASH = "crash"
    REBOOT = "reboot"
    FAILED = "failed"
    NEVER = "never"
    UNTOLD = "untold"
    UNKNOWN = "unknown"


class DomainEnd(StrEnum):
    """What Xen says of an instance's domain that does not run on.

    ``GONE``: there is none, or one that Xen can't free. ``HALF_MADE``: a start was broken off
    before its guest ran. ``SUSPENDED``: it goes on later, or on another node. ``OTHER`` is an end
    like that of a reboot.
    """

    GONE = "gone"
    POWERED_OFF = "powered-off"
    CRASHED = "crashed"
    HALF_MADE = "half-made"
    SUSPENDED = "suspended"
    OTHER = "other"


_VERDICTS = {
    USER: EndCause.USER,
    "admin": EndCause.ADMIN,
    "crash": EndCause.CRASH,
    WHO_UNKNOWN: EndCause.UNKNOWN,
}


class LastEnd(NamedTuple):
    """The end of the last run of an instance that is down.

    :param run: the last run.
    :param failed: the run that failed last, if none has begun since.
    :param result: of its unit, as systemd calls it.
    :param is_failed: whether systemd still counts the unit as failed.
    :param came_up: whether that start of the unit has succeeded.
    :param domain: None if it is a QEMU.
    :param has_run: whether the instance has run since the node's start.
    :param is_wanted: whether the instance should be up.
    :param is_noted: whether its spec says that its user has shut it down.
    :param verdict: the party that ended it, by brine-kvmd; empty if that is not known.
    """

    run: Run
    failed: Run | None = None
    result: str = IN_ORDER[0]
    is_failed: bool = False
    came_up: bool = True
    domain: DomainEnd | None = None
    has_run: bool = True
    is_wanted: bool = True
    is_noted: bool = False
    verdict: str = ""

    def ended_by(self) -> EndCause:
        """The party that ended it, or else the cause."""
        if (failed := self.counting_failure()) and not self.is_failed:
            return EndCause.CRASH if failed.has_come_up() else EndCause.FAILED
        return self._ended_by()

    def is_reset(self) -> bool:
        """Whether the instance failed last, and systemd was told to forget that."""
        return self.counting_failure() is not None and not self.is_failed

    def counting_failure(self) -> Run | None:
        """The failed run that the instance is down for, unless its user or an admin ended it."""
        if self.failed is None or self.is_left:
            return None
        by_somebody = self._ended_by() in (EndCause.USER, EndCause.ADMIN)
        return None if by_somebody and self.failed.id == self.run.id else self.failed

    def is_first(self) -> bool:
        """Whether the instance was not started since the node's own start."""
        return not self.is_left and self._ended_by() is EndCause.NEVER

    @property
    def is_left(self) -> bool:
        """Whether its domain is still there."""
        return self.domain not in (None, DomainEnd.GONE)

    def _ended_by(self) -> EndCause:
        """The same, whatever failed before."""
        cause = self._cause_by_domain() if self.is_left else self._cause_by_unit()
        # An admin's stop may be the first half of a reboot.
        is_half = cause is EndCause.ADMIN and self.is_wanted and self.run.awaits_reboot()
        return EndCause.REBOOT if is_half else cause

    def _cause_by_domain(self) -> EndCause:
        if self.run.was_stopped():
            return EndCause.ADMIN
        if self.domain is DomainEnd.HALF_MADE:
            return EndCause.FAILED
        if self.domain is DomainEnd.CRASHED:
            return EndCause.CRASH
        return EndCause.USER if self.domain is DomainEnd.POWERED_OFF else EndCause.REBOOT

    def _cause_by_unit(self) -> EndCause:
        if self.run.was_shut_down():
            return EndCause.USER
        if self.run.was_stopped():
            return EndCause.ADMIN
        if self.is_noted:
            return EndCause.USER  # its marker was removed then
        if self.result not in IN_ORDER:
            return self._cause_of_failure()
        if not self.has_run:
            return EndCause.NEVER
        if self.domain is not None:
            return EndCause.ADMIN  # only admins destroy domains
        return _VERDICTS.get(self.verdict, EndCause.UNTOLD)

    def _cause_of_failure(self) -> EndCause:
        if self.is_failed and not self.came_up:
            return EndCause.FAILED
        # If only the xl of a domain was killed, and the domain is gone, the domain was moved or
        # destroyed since: a domain that ends by itself stays.
        has_lost_xl = self.result in _KILLED and self.domain is not None and self.has_run
        return EndCause.ADMIN if has_lost_xl else EndCause.CRASH


def is_by_user(run: Run, domain: DomainEnd | None) -> bool:
    """Whether an instance is off by its user's shutdown: by the marker, or by a domain that has
    powered off, unless an admin has stopped that."""
    if domain in (None, DomainEnd.GONE):
        return run.was_shut_down()
    return domain is DomainEnd.POWERED_OFF and not run.was_stopped()


def is_by_admin(run: Run, domain: DomainEnd) -> bool:
    """Whether an admin has stopped a domain. The marker of a suspended domain only says that the
    admin did that."""
    return run.was_stopped() and domain is not DomainEnd.SUSPENDED


# What a marker still counts for.


def has_obeyed(run: Run, now: float) -> bool:
    """Whether a guest that powers off at that time does so on an admin's behalf: a stop told it to,
    and was given up.

    :param now: in seconds since 1970. The clock may have been set back meanwhile.
    """
    return run.was_asked() and abs(now - run.asked_at) < BELIEVED_S


def is_stop_over(run: Run, timeout_s: float, now: float) -> bool:
    """Whether the stop that has left a marker is surely over: the guest does not follow it any
    more. The age decides, as not all commands hold the marker.

    :param timeout_s: how long the guest may take.
    """
    return run.was_stopped() and now - run.stopped_at > timeout_s + BELIEVED_S


def is_reboot_over(run: Run, now: float) -> bool:
    """Whether the guest has not followed a reboot for long, and so its end is none."""
    until = run.reboot_until
    return run.is_to_reboot() and (until is None or now > until + BELIEVED_S)


def was_broken_off(run: Run, *, is_by_run: bool) -> bool:
    """Whether a domain whose guest has never run is the leftover of a start that was broken off, if
    no start is in progress.

    :param is_by_run: whether this run has written the domain's configuration.
    """
    return is_by_run and not run.has_come_up()


# The unit's last step.


def lacks_stop(run: Run) -> bool:
    """Whether this run of a QEMU has no marker of a stop, so that systemd's own stop of it is still
    to be marked."""
    return run.is_known() and run.is_last() and not run.was_stopped()


def has_failed(run: Run, result: str) -> bool:
    """Whether an end counts as a failure: systemd says so, and no admin has stopped the run."""
    return result not in IN_ORDER and not run.was_stopped()


def is_for_watcher(run: Run) -> bool:
    """Whether the watcher is to look at an end at once: of a run that had come up, and that no
    admin has stopped for good. A start that failed waits for the watcher's next pass."""
    is_for_good = run.was_stopped() and not run.is_to_reboot()
    return run.has_come_up() and not is_for_good


def keeps_domain(run: Run) -> bool:
    """Whether the domain of a run stays when its xl has ended: it lives on, or shows how it ended.
    That of a start that was broken off, or of a stop, does not."""
    return run.has_come_up() and not run.was_stopped()
