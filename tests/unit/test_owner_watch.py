"""Whether an owner is there or gone: decided from observations of its files."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from brine.instance import owner
from brine.instance.owner import (
    OwnersFile,
    refuse_without_owner,
    warn_without_handler,
    why_not_alive,
)
from brine.instance.store import InstanceError
from brine.lifecycle.owner_watch import ENDING_S, MOST_RENEWALS, OwnerWatch, is_other_run
from brine.vm.markers import UNKNOWN_RUN
from brine.vm.spec import OwnerSpec, Spec
from lab.scripted_systemctl import ScriptedSystemctl

HANDLER = "brine-lifecycle.service"
TIMEOUT_S = 15.0
NOW, BEFORE = "0a" * 16, "0b" * 16
NOON = 1_800_000_000.0


def watchdog(touched: float, *, inode: int = 7, fault: str = "") -> OwnersFile:
    """A watchdog with a time of change, in seconds since 1970."""
    return OwnersFile(round(touched * 1e9), inode, fault)


def ci1() -> OwnerWatch:
    return OwnerWatch("ci1", TIMEOUT_S)


def there() -> OwnerWatch:
    """One whose owner has just come."""
    seen = ci1()
    assert seen.observe(watchdog(NOON), 100, NOON)
    return seen


def ended() -> OwnerWatch:
    """One whose owner was just told that the instance has ended, as it has asked for that."""
    seen = there()
    seen.note_asking(watchdog(NOON))
    seen.confirm(100)
    return seen


def test_a_watchdog_expires_once_when_nobody_touches_it() -> None:
    seen = there()
    assert not seen.observe(watchdog(NOON), 110, NOON + 10)
    assert not seen.note_if_gone(100 + TIMEOUT_S - 0.1)
    assert seen.note_if_gone(100 + TIMEOUT_S)
    assert not seen.note_if_gone(100 + TIMEOUT_S + 1)


def test_an_owner_that_returns_in_time_was_never_away_and_a_later_one_is_new() -> None:
    seen = there()
    assert not seen.observe(watchdog(NOON + 14), 114, NOON + 14)
    assert seen.note_if_gone(114 + TIMEOUT_S)
    assert seen.observe(watchdog(NOON + 60), 160, NOON + 60)


@pytest.mark.parametrize("jump_s", [0, -86_400, -3, 3, 86_400])
def test_a_touched_watchdog_does_not_expire_though_the_wall_clock_jumps(jump_s: float) -> None:
    seen = there()
    # Touches after the jump have the new time, and so has the clock.
    for after_s in range(5, 60, 5):
        now = NOON + jump_s + after_s
        assert not seen.observe(watchdog(now), 100 + after_s, now)
        assert not seen.note_if_gone(100 + after_s + TIMEOUT_S - 1)
    # Without touches it expires as if there had been none.
    assert seen.note_if_gone(155 + TIMEOUT_S)


def test_a_watchdog_of_the_future_is_no_touch() -> None:
    seen = there()
    assert not seen.observe(watchdog(NOON + 1e6), 105, NOON + 5)
    assert "in the future" in seen.fault
    assert seen.note_if_gone(100 + TIMEOUT_S)


@pytest.mark.parametrize("found", [None, watchdog(NOON, fault="is no regular file")])
def test_what_is_no_watchdog_is_no_touch(found: OwnersFile | None) -> None:
    seen = ci1()
    assert not seen.observe(found, 100, NOON)
    assert seen.fault
    assert seen.expires_s() is None


def test_a_watchdog_from_before_the_handlers_start_is_as_old_as_it_says() -> None:
    seen = ci1()
    seen.take_over(watchdog(NOON - 10), 100, NOON)
    assert not seen.note_if_gone(100 + 4)
    assert seen.note_if_gone(100 + 5)


def test_an_instance_that_runs_without_a_watchdog_has_one_timeout_for_its_first_owner() -> None:
    seen, other = ci1(), ci1()
    for one in (seen, other):
        one.observe(None, 100, NOON)
        one.begin(100)
    assert not seen.note_if_gone(100 + TIMEOUT_S - 1)
    assert seen.note_if_gone(100 + TIMEOUT_S)
    assert other.observe(watchdog(NOON + 5), 105, NOON + 5)
    assert not other.observe(watchdog(NOON + 10), 110, NOON + 10)


def test_after_a_pause_the_time_begins_anew_a_few_times() -> None:
    seen = there()
    for times in range(1, MOST_RENEWALS + 1):
        seen.renew(100 + times * 10)
    assert not seen.note_if_gone(100 + MOST_RENEWALS * 10 + TIMEOUT_S - 1)
    seen.renew(100 + MOST_RENEWALS * 10 + TIMEOUT_S)
    assert seen.note_if_gone(100 + MOST_RENEWALS * 10 + TIMEOUT_S)


def test_an_owner_that_touches_its_watchdog_while_it_ends_does_not_return() -> None:
    seen = ended()
    for after_s in range(1, round(ENDING_S)):
        assert not seen.observe(watchdog(NOON + after_s), 100 + after_s, NOON + after_s)
    # A last touch is no return, however late somebody looks.
    last, later_s = watchdog(NOON + ENDING_S - 1), 2 * ENDING_S
    assert not seen.observe(last, 100 + later_s, NOON + later_s)


def test_an_owner_has_returned_that_goes_on_touching_its_watchdog_or_makes_it_anew() -> None:
    seen, later_s = ended(), ENDING_S + 1
    assert not seen.observe(watchdog(NOON + 1), 101, NOON + 1)
    # A container that has restarted, and whose program makes no watchdog anew.
    assert seen.observe(watchdog(NOON + later_s), 100 + later_s, NOON + later_s)
    assert ended().observe(watchdog(NOON + 2, inode=8), 102, NOON + 2)


def test_the_same_fault_is_told_once_in_a_long_time() -> None:
    seen = ci1()
    assert seen.is_to_tell("the watchdog is a link", 100)
    assert seen.is_to_tell("the request is a link", 101)
    assert not seen.is_to_tell("the watchdog is a link", 102)
    assert seen.is_to_tell("the watchdog is a link", 100 + 86_400)


@pytest.mark.parametrize(
    ("text", "is_other"),
    [
        ("", False),
        (f"{NOW}\n", False),
        (NOW.upper(), False),
        (f"{BEFORE}\n", True),
        (f"{BEFORE}{BEFORE}", False),
        (f"{BEFORE} x", False),
        (f"{BEFORE[:-1]}g", False),
        ("Thu Nov 26 17:23:24 UTC 2026\n", False),
        ("\ufffd\0\n", False),
    ],
)
def test_only_the_id_of_another_run_makes_a_request_another_runs(text: str, is_other: bool) -> None:
    assert is_other_run(text, NOW) == is_other
    assert not is_other_run(text, UNKNOWN_RUN)


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        (None, "no watchdog"),
        (watchdog(NOON - 15), ""),
        (watchdog(NOON - 16), "16 s ago"),
        (watchdog(NOON + 2), ""),
        (watchdog(NOON + 3), "in the future"),
        (watchdog(NOON, fault="is no regular file"), "no regular file"),
    ],
)
def test_a_start_needs_an_unexpired_watchdog(found: OwnersFile | None, fault: str) -> None:
    said = why_not_alive(found, TIMEOUT_S, NOON)
    assert fault in said
    assert bool(fault) == bool(said)


def test_a_start_without_the_handler_names_its_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(owner, "HANDLER", tmp_path / "brine-lifecycle")
    with pytest.raises(InstanceError, match="its owner is not there") as error:
        refuse_without_owner(Spec(name="ci1", owner=OwnerSpec()))
    assert error.value.hint == "install the package brine-lifecycle"


@pytest.mark.parametrize(
    ("clock", "properties", "said"),
    [
        (None, {"LoadState": "masked", "ActiveState": "inactive"}, "is masked"),
        ("old", {"LoadState": "loaded", "ActiveState": "failed"}, "is failed"),
        ("old", {"LoadState": "loaded", "ActiveState": "active"}, "gives no sign of life for"),
        (None, {"LoadState": "loaded", "ActiveState": "activating"}, ""),
        (None, {"LoadState": "loaded", "ActiveState": "inactive", "Job": "7"}, ""),
        ("new", {"LoadState": "masked", "ActiveState": "inactive"}, ""),
        ("damaged", {"LoadState": "loaded", "ActiveState": "active"}, ""),
    ],
)
def test_where_no_handler_looks_after_owners_that_is_a_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    clock: str | None,
    properties: dict[str, str],
    said: str,
) -> None:
    ScriptedSystemctl(tmp_path / "systemctl", monkeypatch).unit(HANDLER, **properties)
    monkeypatch.setattr(owner, "CLOCK", tmp_path / "clock")
    times = {"old": time.monotonic() - 100, "new": time.monotonic()}
    if clock:
        owner.CLOCK.write_text(f"{times.get(clock, clock)} 1800000000.000 0.000\n")
    warn_without_handler()
    found = capsys.readouterr().err
    assert said in found
    assert bool(found) == bool(said)
