"""Every row of the table of ends, as events that QEMU was seen to send."""

from __future__ import annotations

from functools import reduce

import pytest

from brine.common.qmp.wire import QmpEvent
from brine.kvmd.verdict import NOTHING, EventHistory, Verdict, Who, fold, judge

MINUTE_USEC = 60 * 1_000_000
NOW = 1_700_000_000_000_000

POWERDOWN = QmpEvent("POWERDOWN", {}, NOW)
STOP = QmpEvent("STOP", {}, NOW + 1)
RESUME = QmpEvent("RESUME", {}, NOW + 2)
GUEST_RESET = QmpEvent("RESET", {"guest": True, "reason": "guest-reset"}, NOW + 3)
HOST_RESET = QmpEvent("RESET", {"guest": False, "reason": "host-qmp-system-reset"}, NOW + 3)
IO_ERROR = QmpEvent("BLOCK_IO_ERROR", {"action": "stop", "nospace": True}, NOW)
PANICKED = QmpEvent("GUEST_PANICKED", {"action": "pause"}, NOW + 4)
CRASHLOADED = QmpEvent("GUEST_CRASHLOADED", {"action": "run"}, NOW + 4)


def shutdown(
    reason: str | None, *, guest: bool | None = None, time_usec: int = NOW + 10
) -> QmpEvent:
    data: dict[str, object] = {}
    if guest is not None:
        data["guest"] = guest
    if reason is not None:
        data["reason"] = reason
    return QmpEvent("SHUTDOWN", data, time_usec)


POWEROFF = shutdown("guest-shutdown", guest=True)


def see(*events: QmpEvent) -> EventHistory:
    return reduce(fold, events, NOTHING)


def verdict(*events: QmpEvent, stop_cause: str = "", is_brines: bool = False) -> tuple[str, str]:
    given = judge(see(*events), stop_cause=stop_cause, powerdown_stale_s=600, is_brines=is_brines)
    return str(given.who), given.cause


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param([POWEROFF], ("user", "guest-shutdown"), id="guest poweroff"),
        pytest.param(
            [shutdown("host-signal", guest=False)], ("admin", "host-signal"), id="SIGTERM"
        ),
        pytest.param([], ("crash", "eof"), id="SIGKILL"),
        pytest.param(
            [shutdown("host-qmp-quit", guest=False)], ("admin", "host-qmp-quit"), id="quit"
        ),
        pytest.param([POWERDOWN, POWEROFF], ("admin", "powerdown"), id="system_powerdown"),
        pytest.param([STOP, RESUME, POWEROFF], ("user", "guest-shutdown"), id="stop, cont, off"),
        pytest.param([IO_ERROR, STOP], ("crash", "eof"), id="a full disk, SIGKILL"),
        pytest.param([IO_ERROR, STOP, RESUME, STOP], ("admin", "paused"), id="full, cont, stop"),
        pytest.param(
            [STOP, shutdown("host-signal", guest=False)],
            ("admin", "host-signal"),
            id="stop, SIGTERM",
        ),
        pytest.param([STOP], ("admin", "paused"), id="stop, SIGKILL or migrated away"),
        pytest.param([STOP, POWEROFF], ("admin", "paused"), id="off while stopped"),
        pytest.param([GUEST_RESET, POWEROFF], ("user", "guest-shutdown"), id="reboot, off"),
        pytest.param([GUEST_RESET], ("crash", "eof"), id="reboot, SIGKILL"),
        pytest.param(
            [shutdown("guest-reset", guest=True)], ("crash", "guest-reset"), id="-no-reboot"
        ),
        pytest.param([HOST_RESET, POWEROFF], ("user", "guest-shutdown"), id="system_reset, off"),
        pytest.param(
            [shutdown("host-qmp-system-reset", guest=False)],
            ("admin", "host-qmp-system-reset"),
            id="system_reset under -no-reboot",
        ),
        pytest.param(
            [PANICKED, shutdown("guest-panic", guest=True)], ("crash", "guest-panic"), id="panic"
        ),
        pytest.param([PANICKED, STOP], ("crash", "guest-panic"), id="panic, paused, SIGKILL"),
        pytest.param([PANICKED, POWEROFF], ("crash", "guest-panic"), id="panic, then off"),
        pytest.param([CRASHLOADED, POWEROFF], ("crash", "guest-panic"), id="kdump, then off"),
        pytest.param(
            [PANICKED, GUEST_RESET, POWEROFF],
            ("user", "guest-shutdown"),
            id="panic, reset, then the user",
        ),
        pytest.param(
            [PANICKED, STOP, shutdown("host-signal", guest=False)],
            ("admin", "host-signal"),
            id="panic, then the admin",
        ),
        pytest.param([shutdown("host-error", guest=False)], ("crash", "host-error"), id="error"),
        pytest.param([shutdown("host-ui", guest=False)], ("admin", "host-ui"), id="window"),
        pytest.param(
            [shutdown("subsystem-reset", guest=True)], ("crash", "subsystem-reset"), id="subsystem"
        ),
        pytest.param(
            [shutdown("snapshot-load", guest=False)], ("admin", "snapshot-load"), id="snapshot"
        ),
        pytest.param([shutdown("none", guest=False)], ("admin", "none"), id="none"),
        pytest.param([shutdown("later", guest=True)], ("crash", "later"), id="later QEMU's guest"),
        pytest.param([shutdown("later", guest=False)], ("admin", "later"), id="later QEMU's host"),
        # QEMU before 4.0 sends no reason: the rule of the seed, which is all that is left.
        pytest.param([shutdown(None, guest=True)], ("user", "shutdown"), id="3.x: off"),
        pytest.param([shutdown(None, guest=False)], ("admin", "host"), id="3.x: SIGTERM"),
        pytest.param([POWERDOWN, shutdown(None)], ("admin", "powerdown"), id="2.x: powerdown"),
        pytest.param([shutdown(None)], ("user", "shutdown"), id="2.x: off or SIGTERM"),
        pytest.param([STOP, shutdown(None)], ("admin", "paused"), id="2.x: stop, off"),
    ],
)
def test_each_end_has_its_verdict(events: list[QmpEvent], expected: tuple[str, str]) -> None:
    assert verdict(*events) == expected
    assert verdict(*events, stop_cause="stopping") == ("admin", "stopping")


@pytest.mark.parametrize("before", [[], [POWERDOWN], [STOP], [PANICKED, STOP]])
def test_a_signal_that_no_mark_explains_is_nobodys_will_where_brine_runs_the_vm(
    before: list[QmpEvent],
) -> None:
    signal = shutdown("host-signal", guest=False)
    assert verdict(*before, signal, is_brines=True) == ("crash", "host-signal")
    assert verdict(*before, signal, is_brines=True, stop_cause="stopping") == ("admin", "stopping")
    assert verdict(*before, signal) == ("admin", "host-signal")
    for end in (POWEROFF, shutdown("host-qmp-quit", guest=False), shutdown("none", guest=False)):
        assert verdict(*before, end, is_brines=True) == verdict(*before, end)


def off_after(minutes: float) -> QmpEvent:
    return shutdown("guest-shutdown", guest=True, time_usec=NOW + int(minutes * MINUTE_USEC))


AGAIN = QmpEvent("POWERDOWN", {}, NOW + 100 * MINUTE_USEC)
NO_CLOCK = QmpEvent("POWERDOWN", {}, None)


@pytest.mark.parametrize(
    ("events", "who"),
    [
        ([POWERDOWN, off_after(1)], "admin"),
        ([POWERDOWN, off_after(10)], "admin"),
        ([POWERDOWN, off_after(10.01)], "user"),
        ([POWERDOWN, AGAIN, off_after(101)], "admin"),
        ([NO_CLOCK, POWEROFF], "admin"),
        ([POWERDOWN, GUEST_RESET, off_after(1)], "user"),
        ([POWERDOWN, HOST_RESET, off_after(60)], "user"),
        ([POWERDOWN, GUEST_RESET, AGAIN, off_after(101)], "admin"),
        # Under -no-shutdown: ended by request, set going again, and then its user's own poweroff.
        ([POWERDOWN, POWEROFF, STOP, HOST_RESET, RESUME, POWEROFF], "user"),
        # Under -no-shutdown: off, and hours later the admin ends QEMU.
        ([POWEROFF, shutdown("host-qmp-quit", guest=False)], "user"),
    ],
)
def test_a_powerdown_explains_an_end_for_a_while(events: list[QmpEvent], who: str) -> None:
    assert verdict(*events)[0] == who


@pytest.mark.parametrize(
    "event",
    [POWERDOWN, STOP, RESUME, GUEST_RESET, PANICKED, POWEROFF],
    ids=lambda event: event.name,
)
@pytest.mark.parametrize("before", [[], [STOP], [PANICKED, STOP], [POWEROFF]])
def test_an_event_seen_twice_is_as_if_seen_once(event: QmpEvent, before: list[QmpEvent]) -> None:
    assert see(*before, event, event) == see(*before, event)


def test_what_was_seen_is_kept_as_it_is_until_something_new_is() -> None:
    seen = see(STOP)
    assert fold(seen, QmpEvent("RTC_CHANGE", {"offset": 1}, NOW)) is seen
    assert see(POWEROFF, STOP, RESUME).shutdown is None
    given = judge(see(POWEROFF), stop_cause="", powerdown_stale_s=600)
    assert given == Verdict(Who.USER, "guest-shutdown", NOW + 10)
    assert judge(NOTHING, stop_cause="", powerdown_stale_s=600).time_usec is None
