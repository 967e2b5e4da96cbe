"""The verdict on a VM that ended, decided from its events.

Everything here is pure: events are folded into an :class:`EventHistory`, and :func:`judge` makes a
verdict of it. Folding the same event twice is the same as folding it once, since a daemon that was
killed between acting on an event and consuming it will see it again.

Sources: the seed "KVM daemon", QEMU's ``qapi/run-state.json``, and what real guests were seen to
do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from brine.common.qmp.wire import QmpEvent
from brine.vm.halt import PAUSED, SUSPENDED, printable_excerpt


class Who(StrEnum):
    """The party that ended a VM."""

    USER = "user"
    ADMIN = "admin"
    CRASH = "crash"


@dataclass(frozen=True, slots=True)
class Shutdown:
    """A SHUTDOWN event. QEMU tells whether the guest asked for it since 2.10, and its ShutdownCause
    since 4.0."""

    guest: bool | None
    reason: str | None
    time_usec: int | None


@dataclass(frozen=True, slots=True)
class IoError:
    """A BLOCK_IO_ERROR event for which QEMU stops the VM: at which block node, why, and whether its
    storage was full."""

    device: str = ""
    reason: str = ""
    no_space: bool = False


@dataclass(frozen=True, slots=True)
class EventHistory:
    """The facts from a VM's events so far that bear on the verdict.

    :param powerdown_usec: when the last powerdown request was made, as QEMU's wall clock in
        microseconds; 0 if it did not say; None if there was none since the guest's last reset.
    :param paused: whether the VM was stopped and not resumed.
    :param panicked: whether the guest's kernel panicked and was not reset since.
    :param shutdown: the SHUTDOWN event, until the VM runs again (``-no-shutdown``).
    :param io_error: the last one that stopped the VM, until it goes on.
    :param halted: the RunState in which the VM stands still without an administrator's doing.
    """

    powerdown_usec: int | None = None
    paused: bool = False
    panicked: bool = False
    shutdown: Shutdown | None = None
    io_error: IoError | None = None
    halted: str = ""

    @property
    def stands_still(self) -> bool:
        """Whether QEMU has said that the VM stands still, whoever wanted that."""
        return self.paused or bool(self.halted)


NOTHING = EventHistory()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The party that ended a VM, and the cause, in one word of brine-kvmd(8).

    :param time_usec: QEMU's wall clock at the end, in microseconds since the epoch, or None.
    :param given_usec: this node's clock when the verdict was given; 0 if that was not noted.
    """

    who: Who
    cause: str
    time_usec: int | None = None
    given_usec: int = 0


MOVING = "moving"
"""The cause of the end of a QEMU that waits for a guest of another node's: that has the guest
still."""

STOPPING = "stopping"
"""The cause of a stop that gives no other."""

_BY_SIGNAL = "host-signal"
# Which of QEMU's reasons name the host's side, and which the guest's misfortune. What a guest
# asks for by "guest-shutdown" needs a closer look.
_BY_ADMIN = frozenset(
    {"host-qmp-quit", "host-qmp-system-reset", _BY_SIGNAL, "host-ui", "snapshot-load"}
)
# Under -no-reboot a reset ends QEMU with SHUTDOWN. Its user wanted the VM back.
_BY_CRASH = frozenset({"host-error", "guest-panic", "guest-reset", "subsystem-reset"})
# States that a client of QEMU has asked for: a VM that ends in one has not crashed.
_WANTED = frozenset({"", PAUSED, "prelaunch", "postmigrate", SUSPENDED})


def fold(seen: EventHistory, event: QmpEvent) -> EventHistory:
    """*seen* after one more event; *seen* itself if the event has no bearing."""
    match event.name:
        case "POWERDOWN":
            return replace(seen, powerdown_usec=event.time_usec or 0)
        case "STOP":
            return replace(seen, paused=True)
        case "RESUME" if seen.shutdown:
            # Under -no-shutdown: the request that ended the guest then explains no later end.
            return EventHistory(panicked=seen.panicked)
        case "RESUME":
            return replace(seen, paused=False, io_error=None, halted="")
        case "BLOCK_IO_ERROR" if event.data.get("action") == "stop":
            return replace(seen, io_error=_io_error(event))
        case "SUSPEND":
            return replace(seen, halted=SUSPENDED)
        case "WAKEUP":
            return replace(seen, halted="")
        case "GUEST_PANICKED" | "GUEST_CRASHLOADED":
            return replace(seen, panicked=True)
        case "RESET":
            # A guest that reboots has not obeyed: what its user does with it later is his own will.
            return replace(seen, panicked=False, powerdown_usec=None)
        case "SHUTDOWN" if seen.shutdown is None:
            guest, reason = event.data.get("guest"), event.data.get("reason")
            shutdown = Shutdown(
                guest if isinstance(guest, bool) else None,
                reason if isinstance(reason, str) else None,
                event.time_usec,
            )
            # Not replace(), which takes a good part of the time from an event to its verdict.
            return EventHistory(
                seen.powerdown_usec,
                seen.paused,
                seen.panicked,
                shutdown,
                seen.io_error,
                seen.halted,
            )
        case _:
            return seen


def _io_error(event: QmpEvent) -> IoError:
    data = event.data
    # The device is empty for a disk that was made by its block nodes.
    device = printable_excerpt(data.get("device")) or printable_excerpt(data.get("node-name"))
    return IoError(device, printable_excerpt(data.get("reason")), data.get("nospace") is True)


def judge(
    seen: EventHistory, *, stop_cause: str, powerdown_stale_s: float, is_brines: bool = False
) -> Verdict:
    """The verdict on a VM whose connection ended, or which sent SHUTDOWN.

    :param stop_cause: why an administrator stops it, as a marker says; empty if none does.
    :param is_brines: whether Brine runs it, all of whose ways to stop one make that marker: then a
        signal without it is no admin's will, such as earlyoom's or a stray kill's.
    :param powerdown_stale_s: a powerdown request older than this, in seconds, explains nothing.
    """
    end = seen.shutdown
    who, cause = _judge(seen, end, powerdown_stale_s)
    if stop_cause:
        who, cause = Who.ADMIN, stop_cause
    elif is_brines and cause == _BY_SIGNAL:
        who = Who.CRASH
    return Verdict(who, cause, end.time_usec if end else None)


def _judge(seen: EventHistory, end: Shutdown | None, powerdown_stale_s: float) -> tuple[Who, str]:
    reason = end.reason if end else None
    if reason in _BY_ADMIN:
        return Who.ADMIN, str(reason)
    if reason in _BY_CRASH:
        return Who.CRASH, str(reason)
    if end and reason is None and end.guest is False:
        return Who.ADMIN, "host"
    if end and reason not in (None, "guest-shutdown"):
        # A reason of a later QEMU. When in doubt a VM comes back: no one asked for it to be off.
        return (Who.ADMIN if end.guest is False else Who.CRASH), str(reason)
    if seen.panicked:
        return Who.CRASH, "guest-panic"
    if seen.paused and not seen.io_error and seen.halted in _WANTED:
        return Who.ADMIN, "paused"
    if end is None:  # killed, or migrated away
        return Who.CRASH, "eof"
    # The guest turned itself off. Without a reason from QEMU this is the seed's rule.
    if seen.powerdown_usec is not None and not _stale(seen.powerdown_usec, end, powerdown_stale_s):
        return Who.ADMIN, "powerdown"
    return Who.USER, reason or "shutdown"


def _stale(powerdown_usec: int, end: Shutdown, powerdown_stale_s: float) -> bool:
    if powerdown_usec == 0 or end.time_usec is None:
        return False  # without a clock the request still counts
    return end.time_usec - powerdown_usec > powerdown_stale_s * 1e6
