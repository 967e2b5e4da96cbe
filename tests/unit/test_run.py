"""A run of an instance, by its markers: brine.vm.run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from brine.common import paths
from brine.vm.halt import Halt
from brine.vm.markers import (
    UNKNOWN_RUN,
    MarkerKind,
    file_of,
    held_marker,
    remove_marker,
    write_marker,
)
from brine.vm.run import RecordedVerdict, Run, RunFailure

RUN, OTHER = "0d" * 16, "1d" * 16

pytestmark = pytest.mark.usefixtures("own_node")


def note(kind: MarkerKind, run: str = RUN, **facts: Any) -> None:
    write_marker(kind, "web1", run=run, **facts)


QUESTIONS = {
    MarkerKind.STARTED: Run.has_come_up,
    MarkerKind.STOP: Run.was_stopped,
    MarkerKind.SHUTDOWN: Run.was_shut_down,
    MarkerKind.ASKED: Run.was_asked,
    MarkerKind.REBOOT: Run.is_to_reboot,
    MarkerKind.PAUSED: Run.is_paused,
}


@pytest.mark.parametrize("kind", QUESTIONS)
def test_only_a_marker_of_the_run_answers(kind: MarkerKind) -> None:
    asked = QUESTIONS[kind]
    assert not asked(Run("web1", RUN))
    note(kind, OTHER)
    assert not asked(Run("web1", RUN))
    note(kind)
    assert asked(Run("web1", RUN))
    assert not asked(Run("web2", RUN))


def test_the_last_run_is_the_one_that_its_marker_names() -> None:
    assert Run.last("web1") == Run("web1", UNKNOWN_RUN)
    assert not Run.last("web1").is_known()
    note(MarkerKind.START, pid=os.getpid())
    run = Run.last("web1")
    assert (run, run.pid) == (Run("web1", RUN), os.getpid())
    assert run.is_known()
    assert run.is_last()
    assert not run.is_followed()
    assert not run.has_process()  # it is none of the unit's
    assert Run.of_process("web1", os.getpid()) == run
    assert Run.of_process("web1", os.getppid()) is None
    note(MarkerKind.START, OTHER)
    assert run.is_followed()
    assert not run.is_last()


def test_a_run_whose_end_is_not_known_follows_none() -> None:
    note(MarkerKind.START, UNKNOWN_RUN)
    assert not Run("web1", RUN).is_followed()
    assert Run.marked(MarkerKind.START, "web1") == Run("web1", UNKNOWN_RUN)


def test_this_process_knows_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INVOCATION_ID", RUN)
    assert Run.own("web1") == Run("web1", RUN)
    monkeypatch.delenv("INVOCATION_ID")
    assert Run.own("web1") == Run("web1", UNKNOWN_RUN)


def test_what_was_read_stays_so_until_the_run_is_asked_again() -> None:
    run = Run("web1", RUN)
    note(MarkerKind.STOP)
    assert run.was_stopped()
    remove_marker(MarkerKind.STOP, "web1")
    note(MarkerKind.STARTED)
    assert run.was_stopped()
    assert run.has_come_up()  # nothing has asked for that before
    assert not run.again().was_stopped()


def test_what_is_not_in_the_listing_is_not_looked_for() -> None:
    note(MarkerKind.STOP)
    note(MarkerKind.PAUSED)
    kinds = (MarkerKind.STOP, MarkerKind.PAUSED, MarkerKind.REBOOT)
    run = Run("web1", RUN).read(*kinds, files={"web1.stop"})
    note(MarkerKind.REBOOT)
    remove_marker(MarkerKind.STOP, "web1")
    assert run.was_stopped()
    assert not run.is_paused()
    assert not run.is_to_reboot()


def test_a_marker_that_a_process_holds_is_in_progress() -> None:
    with (
        held_marker(MarkerKind.STOP, "web1", run=RUN, cause="owner-request"),
        held_marker(MarkerKind.REBOOT, "web1", run=RUN, until=7.0),
    ):
        run = Run("web1", RUN).read(MarkerKind.STOP, MarkerKind.REBOOT, files=marks())
        assert (run.is_being_stopped(), run.awaits_reboot()) == (True, False)
        assert not Run("web1", OTHER).is_being_stopped()
    assert (run.is_being_stopped(), run.awaits_reboot()) == (True, False)
    run = run.again()
    assert (run.is_being_stopped(), run.awaits_reboot()) == (False, True)
    assert (run.stop_cause, run.reboot_until) == ("owner-request", 7.0)


def marks() -> set[str]:
    return {file.name for file in paths.MARKS_DIR.iterdir()}


@pytest.mark.parametrize(("until", "said"), [(None, None), ("soon", None), (7, 7)])
def test_a_reboot_that_says_no_time_has_none(until: object, said: float | None) -> None:
    note(MarkerKind.REBOOT, until=until)
    assert Run("web1", RUN).reboot_until == said


def test_the_time_of_a_marker_is_its_files() -> None:
    for kind in (MarkerKind.STOP, MarkerKind.ASKED):
        note(kind)
        os.utime(file_of(kind, "web1"), (1000, 1000))
    run = Run("web1", RUN)
    assert (run.stopped_at, run.asked_at, run.made_at(MarkerKind.STARTED)) == (1000, 1000, 0)


def test_the_facts_are_checked() -> None:
    run = Run("web1", RUN)
    assert (run.verdict, run.failure, run.lacks, run.halt(), run.pid) == (
        None,
        None,
        (),
        None,
        None,
    )
    note(MarkerKind.VERDICT, who="user\n", cause=None, given_usec=9, time_usec="x")
    note(MarkerKind.FAILURE, reason="no\x1b", hint=4, lacks=["/d", 5])
    note(MarkerKind.HALTED, state="io-error")
    note(MarkerKind.START, pid="7")
    os.utime(file_of(MarkerKind.HALTED, "web1"), (1000, 1000))
    run = run.again()
    verdict = run.verdict
    assert verdict
    assert (verdict.who.startswith("user"), "\n" in verdict.who) == (True, False)
    assert verdict.cause == "None"
    assert run.verdict_usec == (9, None)
    assert run.failure
    assert "\x1b" not in str(run.failure.reason)
    assert (run.failure.hint, run.lacks) == (None, ("/d", "5"))
    assert run.halt() == Halt("io-error", since=1000.0)
    assert run.pid is None
    note(MarkerKind.VERDICT, who="admin", cause="stopping")
    note(MarkerKind.FAILURE, lacks="br0")
    assert run.again().verdict == RecordedVerdict("admin", "stopping")
    assert run.again().failure == RunFailure()


def test_a_folder_of_its_own_is_looked_in(tmp_path: Path) -> None:
    folder = tmp_path / "marks"
    folder.mkdir()
    write_marker(MarkerKind.START, "web1", run=RUN, folder=folder, pid=7)
    write_marker(MarkerKind.STOP, "web1", run=RUN, folder=folder)
    assert Run.last("web1", folder=folder).was_stopped()
    assert Run.of_process("web1", 7, folder=folder) == Run("web1", RUN)
    assert not Run.last("web1").is_known()
