"""The verdict on each end stands in a small file that names its run, whatever the journal does."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from brine.vm.markers import UNKNOWN_RUN, Marker, MarkerKind, read_marker, write_marker
from component.kvmd_process import Kvmd
from component.peers import poweroff, user_ends, watched
from lab.fake_qemu import FakeQemus, event_line
from lab.waiting import wait_for

RUN = "4f" * 16
LATER = "0e" * 16
MANY = 1000


def begin(kvmd: Kvmd, name: str, run: str = RUN) -> None:
    """Have it be known that a run of Brine's has begun, whose QEMU this process is."""
    write_marker(MarkerKind.START, name, run=run, folder=kvmd.marks, pid=os.getpid())


def end_while_no_verdict_can_be_written(kvmd: Kvmd) -> None:
    """A user ends the VM "web", the daemon is killed with the verdict, and only then marks can be
    written again."""
    begin(kvmd, "web")
    with watched(kvmd, "web") as web:
        away = in_the_way(kvmd)
        web.say(poweroff())
        kvmd.wait_logged("trying again")
        kvmd.wait_verdict_kept()
        kvmd.stop(signal.SIGKILL)
    kvmd.marks.unlink()
    away.rename(kvmd.marks)


def in_the_way(kvmd: Kvmd) -> Path:
    """Have no mark be possible; returns where the folder of marks is until then."""
    away = kvmd.marks.rename(kvmd.folder / "away")
    kvmd.marks.touch()
    return away


def verdict_on(kvmd: Kvmd, name: str) -> Marker | None:
    return read_marker(MarkerKind.VERDICT, name, folder=kvmd.marks)


def said(mark: Marker | None) -> tuple[str, Any, Any] | None:
    return (mark.run, mark.facts["who"], mark.facts["cause"]) if mark else None


@pytest.mark.parametrize(
    ("last", "who", "cause"),
    [
        (poweroff(), "user", "guest-shutdown"),
        (event_line("SHUTDOWN", guest=False, reason="host-qmp-quit"), "admin", "host-qmp-quit"),
        (event_line("SHUTDOWN", guest=True, reason="guest-panic"), "crash", "guest-panic"),
        # earlyoom, or a stray kill: whoever stops an instance of Brine's makes a mark first.
        (event_line("SHUTDOWN", guest=False, reason="host-signal"), "crash", "host-signal"),
        (b"", "crash", "eof"),
    ],
    ids=["user", "admin", "panic", "signal", "eof"],
)
def test_a_verdict_names_its_run(kvmd: Kvmd, last: bytes, who: str, cause: str) -> None:
    begin(kvmd, "web")
    with watched(kvmd, "web") as web:
        web.say(last)
        web.end()
        assert kvmd.verdict("web") == f"{who}, {cause}"
    mark = verdict_on(kvmd, "web")
    assert said(mark) == (RUN, who, cause)
    assert mark
    assert (mark.facts["time_usec"] is None) == (cause == "eof")
    assert mark.facts["given_usec"] > 1e15


def test_one_that_brine_does_not_run_has_a_verdict_until_another_of_its_name_runs(
    kvmd: Kvmd,
) -> None:
    with watched(kvmd, "web") as web:
        web.say(poweroff())
        kvmd.verdict("web")
        assert said(verdict_on(kvmd, "web")) == (UNKNOWN_RUN, "user", "guest-shutdown")
        assert kvmd.shut_down_by_user("web")
    with watched(kvmd, "web", times=2) as web:
        assert verdict_on(kvmd, "web") is None


def test_no_other_vm_of_its_name_has_a_say_about_an_instance(kvmd: Kvmd) -> None:
    write_marker(MarkerKind.START, "web", run=RUN, folder=kvmd.marks, pid=os.getppid())
    write_marker(MarkerKind.VERDICT, "web", run=RUN, folder=kvmd.marks, who="crash", cause="eof")
    with watched(kvmd, "web") as web:
        user_ends(kvmd, web)
    assert said(verdict_on(kvmd, "web")) == (RUN, "crash", "eof")


def test_one_that_is_set_going_again_has_not_ended(kvmd: Kvmd) -> None:
    begin(kvmd, "web")
    with watched(kvmd, "web") as web:  # under -no-shutdown
        web.say(poweroff())
        kvmd.verdict("web")
        web.event("RESUME")
        kvmd.wait_logged("web: runs again")
        assert verdict_on(kvmd, "web") is None


def test_a_verdict_that_can_not_be_written_is_written_later(kvmd: Kvmd) -> None:
    end_while_no_verdict_can_be_written(kvmd)
    kvmd.start()
    wait_for("the verdict", lambda: verdict_on(kvmd, "web"))
    assert said(verdict_on(kvmd, "web")) == (RUN, "user", "guest-shutdown")


def test_a_verdict_that_comes_late_leaves_that_on_a_later_run_alone(kvmd: Kvmd) -> None:
    end_while_no_verdict_can_be_written(kvmd)
    # A later run has begun, and ended while no daemon saw it.
    begin(kvmd, "web", LATER)
    write_marker(
        MarkerKind.VERDICT, "web", run=LATER, folder=kvmd.marks, who="unknown", cause="off"
    )
    kvmd.start()
    kvmd.wait_logged("at last")
    assert said(verdict_on(kvmd, "web")) == (LATER, "unknown", "off")


def test_a_thousand_that_panic_while_the_daemon_is_killed_have_a_verdict_each(kvmd: Kvmd) -> None:
    names = [f"vm{number}" for number in range(MANY)]
    for name in names:
        begin(kvmd, name)
    with FakeQemus() as qemus:
        peers = [qemus.start(kvmd.control / f"{name}.kvmd") for name in names]
        for one in peers:
            one.wait_connected()
        wait_for("all to be watched", lambda: kvmd.watched() == MANY)
        for number, one in enumerate(peers):
            one.emit("GUEST_PANICKED", action="poweroff")
            one.emit_last("SHUTDOWN", guest=True, reason="guest-panic")
            if number in (MANY // 3, MANY // 2):
                kvmd.stop(signal.SIGKILL)
                kvmd.start()
        wait_for("all verdicts", lambda: all(verdict_on(kvmd, name) for name in names))
    assert {said(verdict_on(kvmd, name)) for name in names} == {(RUN, "crash", "guest-panic")}
