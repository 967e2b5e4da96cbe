"""Why instances are down: the journal is read once, and only records of the right run count."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from brine.instance import history
from brine.instance.history import with_reasons
from brine.instance.observe import Observed
from brine.instance.unit import Active, Unit
from brine.instance.validate import completed
from brine.vm.markers import UNKNOWN_RUN, MarkerKind, write_marker
from brine.vm.run import Run
from brine.watcher import restart_counter
from brine.watcher.restart_counter import Tries

RUN = "0d" * 16
FAILED: dict[str, Any] = {
    "active": Active.FAILED,
    "result": "exit-code",
    "exit_status": 1,
    "begun_us": 5,
}
ENDED: dict[str, Any] = {"active": Active.INACTIVE, "begun_us": 5, "since_us": 6}


@pytest.fixture
def asked(own_node: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The queries to a journal that has a failed start of web1."""
    found: list[object] = []

    def failures(invocations: Iterable[str]) -> dict[str, str]:
        found.append(sorted(invocations))
        return {"of-web1": "no such disk"}

    monkeypatch.setattr(history, "start_failures", failures)
    return found


def note(name: str, tries: Tries) -> None:
    with restart_counter.changed() as record:
        record[name] = tries


def seen(name: str, *, has_run: bool = False, admin_state: str = "up", **keys: Any) -> Observed:
    spec = completed({"name": name, "admin_state": admin_state})
    unit = Unit(name, **{"active": Active.INACTIVE, "invocation": f"of-{name}", **keys})
    return Observed(spec, unit, run=Run(name, RUN) if has_run else Run(name), has_run=has_run)


def judged(name: str, who: str, cause: str, *, run: str = RUN) -> None:
    """A verdict of kvmd's."""
    write_marker(MarkerKind.VERDICT, name, run=run, who=who, cause=cause)


def whys(*several: Observed) -> list[str]:
    return [one.state.why for one in with_reasons(several)]


def test_a_start_that_failed_is_told_in_its_own_words(asked: list[object]) -> None:
    one, other = seen("web1", **FAILED), seen("web2", **FAILED)
    assert whys(one, other) == [
        "it should be up but did not start: no such disk",
        "it should be up but is down: its process ended with status 1",
    ]
    assert asked == [["of-web1", "of-web2"]]


def test_a_start_that_has_noted_its_failure_needs_no_journal(asked: list[object]) -> None:
    write_marker(MarkerKind.FAILURE, "web1", run="of-web1", reason="no bridge br9", hint=None)
    one, other = seen("web1", **FAILED), seen("web2", **FAILED)
    assert whys(one)[0] == "it should be up but did not start: no bridge br9"
    assert asked == []
    assert whys(one, other)[1].endswith("ended with status 1")
    assert asked == [["of-web2"]]


def test_what_failed_later_is_no_start_that_failed(asked: list[object]) -> None:
    assert whys(seen("web1", **{**FAILED, "since_us": 6}))[0].endswith("ended with status 1")
    assert asked == []


def test_who_ended_it_is_told_where_kvmd_knows(asked: list[object]) -> None:
    judged("web1", "crash", "guest-panic")
    judged("web2", "admin", "host-signal")
    judged("web3", "user", "guest-shutdown")
    several = [seen(name, has_run=True, **ENDED) for name in ("web1", "web2", "web3", "web4")]
    assert whys(*several) == [
        "it should be up but is down: it crashed (guest-panic)",
        "it should be up but is down: it was ended on the admin's behalf (host-signal)",
        "it should be up but is down: its user shut it down (guest-shutdown)",
        "it should be up but is down: QEMU ended by itself",
    ]
    assert asked == []


def test_a_verdict_on_another_run_is_none_on_this_one(asked: list[object]) -> None:
    judged("web1", "crash", "guest-panic", run="0e" * 16)
    judged("web2", "user", "guest-shutdown", run=UNKNOWN_RUN)
    several = [seen(name, has_run=True, **ENDED) for name in ("web1", "web2")]
    assert whys(*several) == ["it should be up but is down: QEMU ended by itself"] * 2


def test_an_end_that_nobody_can_know_of_is_told(asked: list[object]) -> None:
    write_marker(MarkerKind.START, "web1", run=RUN)
    write_marker(MarkerKind.VERDICT, "web1", run=RUN, who="unknown", cause="kvmd is off")
    one = replace(seen("web1", has_run=True, **ENDED), run=Run("web1", RUN))
    assert whys(one) == [
        "it should be up but is down: who ended it is unknown (kvmd is off)",
    ]
    assert asked == []


def test_a_panic_is_told_where_systemd_saw_a_status(asked: list[object]) -> None:
    judged("web1", "crash", "guest-panic")
    panicked = seen("web1", has_run=True, **{**FAILED, "since_us": 6})
    assert whys(panicked) == ["it should be up but is down: it crashed (guest-panic)"]
    judged("web1", "crash", "eof")
    killed = {**FAILED, "result": "signal", "exit_status": 9, "since_us": 6}
    assert whys(seen("web1", has_run=True, **killed)) == [
        "it should be up but is down: QEMU was ended by signal 9"
    ]


LATE = "the next try comes with the watcher's next pass"


def test_what_the_watcher_has_given_up_says_so_too(asked: list[object], own_node: Path) -> None:
    for name in ("web1", "web3", "runs"):
        note(name, Tries(5, 1.0, given_up=True))
    note("web2", Tries(4, 1.0))
    several = [seen("web1", **FAILED), seen("web2", **FAILED), seen("web3", **FAILED)]
    assert whys(*several, seen("runs", active=Active.ACTIVE)) == [
        (
            "it should be up but did not start: no such disk; "
            f"given up after 5 tries: {LATE}, or soon after brine watcher forget web1"
        ),
        f"it should be up but is down: its process ended with status 1; {LATE}",
        (
            "it should be up but is down: its process ended with status 1; "
            f"given up after 5 tries: {LATE}, or soon after brine watcher forget web3"
        ),
        "",
    ]
    (own_node / "watcher.json").write_text("{")
    assert "given up" not in whys(*several)[0]


def test_without_a_journal_what_systemd_knows_is_told(
    own_node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(_: object) -> dict[str, str]:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    monkeypatch.setattr(history, "start_failures", nothing)
    (why,) = whys(seen("web1", **FAILED))
    assert why == "it should be up but is down: its process ended with status 1"


def test_hundreds_that_are_as_they_should_be_take_no_question(asked: list[object]) -> None:
    several = [
        seen("runs", active=Active.ACTIVE),
        seen("new"),
        seen("web1", admin_state="down", **FAILED),
        seen("web1", admin_state="down", has_run=True, **ENDED),
    ]
    assert with_reasons(several) == several
    assert asked == []
