"""The truth about an end, by markers and by what systemd and Xen say: brine.vm.end."""

from __future__ import annotations

from typing import Any

import pytest

from brine.vm import end
from brine.vm.end import DomainEnd, EndCause, LastEnd
from brine.vm.markers import BELIEVED_S, UNKNOWN_RUN, MarkerKind, write_marker
from brine.vm.run import Run
from unit.runs import marked_run

RUN, OTHER = "0d" * 16, "1d" * 16
NOW = 1_800_000_000.0
MARKERS = {
    "up": MarkerKind.STARTED,
    "stop": MarkerKind.STOP,
    "shutdown": MarkerKind.SHUTDOWN,
    "reboot": MarkerKind.REBOOT,
    "asked": MarkerKind.ASKED,
}

# The markers of the last run; systemd's result, or how it has failed; how the domain has ended, of
# Xen; and further facts of the instance: "wanted" down, user's end "noted" in its spec, "new" since
# the node's start, the verdict after "=", and the markers of the run that failed last after "/".
TABLE = """
    shutdown          success        -            -           user
    stop              success        -            -           admin
    stop              signal         -            -           admin
    stop,shutdown     success        -            -           user
    stop              success        -            =crash      admin
    stop,reboot       success        -            -           reboot
    stop,reboot       success        -            down        admin
    shutdown,reboot   success        -            -           user
    reboot            success        -            =admin      reboot
    reboot            success        -            =user       user
    up                success        -            noted       user
    stop              success        -            noted       admin
    up                signal         -            noted       user
    up                success        -            =user       user
    up                success        -            =admin      admin
    up                success        -            =crash      crash
    up                success        -            =unknown    unknown
    up                success        -            =alien      untold
    up                success        -            -           untold
    -                 success        -            new         never
    -                 exec-condition -            new         never
    up                exit-code      -            -           crash
    up                signal         -            -           crash
    up                oom-kill       -            =user       crash
    -                 start:exit-code -           -           failed
    -                 start:timeout  -            new         failed
    shutdown          start:signal   -            -           user
    up                success        -            /-          failed
    up                success        -            /up         crash
    stop              success        -            /-          failed
    up                failed:signal  -            /-          crash
    up                success        gone         -           admin
    shutdown          success        gone         -           user
    stop,reboot       success        gone         -           reboot
    up                exit-code      gone         -           crash
    up                signal         gone         -           admin
    up                oom-kill       gone         -           admin
    up                signal         gone         new         crash
    -                 success        gone         new         never
    up                success        powered-off  -           user
    up                signal         powered-off  -           user
    stop              success        powered-off  -           admin
    stop,reboot       success        powered-off  -           reboot
    up                exit-code      crashed      -           crash
    stop              exit-code      crashed      -           admin
    up                success        other        -           reboot
    -                 signal         half-made    -           failed
    stop              signal         half-made    -           admin
    up                success        powered-off  /-          user
"""


def kinds(words: str) -> list[MarkerKind]:
    return [MARKERS[word] for word in words.split(",") if word != "-"]


@pytest.mark.parametrize("row", [line.strip() for line in TABLE.strip().splitlines()])
def test_who_ended_it(row: str) -> None:
    marks, result, domain, more, cause = row.split()
    way, _, result = result.rpartition(":")
    facts: dict[str, Any] = {}
    if more.startswith("="):
        facts["verdict"] = more[1:]
    elif more.startswith("/"):
        facts["failed"] = marked_run(MarkerKind.FAILURE, *kinds(more[1:]), run=OTHER)
    last = LastEnd(
        marked_run(*kinds(marks), run=RUN),
        result=result,
        is_failed=bool(way),
        came_up=way != "start",
        domain=None if domain == "-" else DomainEnd(domain),
        has_run=more != "new",
        is_wanted=more != "down",
        is_noted=more == "noted",
        **facts,
    )
    assert last.ended_by() is EndCause(cause)
    assert last.is_first() == (cause == "never")
    assert last.is_reset() == (more.startswith("/") and not way and not last.is_left)


def test_a_failure_counts_unless_its_user_or_an_admin_ended_that_run() -> None:
    failed = marked_run(MarkerKind.FAILURE, run=RUN, lacks=["br0"])
    assert LastEnd(marked_run(run=RUN)).counting_failure() is None
    for mark in (MarkerKind.SHUTDOWN, MarkerKind.STOP):
        assert LastEnd(marked_run(mark, run=RUN), failed).counting_failure() is None
        later = LastEnd(marked_run(mark, run=OTHER), failed).counting_failure()
        assert later is failed
        assert later.lacks == ("br0",)


def test_a_reboot_that_a_command_works_on_is_none_yet() -> None:
    marks = (MarkerKind.STOP, MarkerKind.REBOOT)
    assert LastEnd(marked_run(*marks, held=marks)).ended_by() is EndCause.ADMIN


@pytest.mark.parametrize(
    ("marks", "domain", "by_user", "by_admin"),
    [
        ("shutdown", None, True, False),
        ("stop", None, False, None),
        ("shutdown", "gone", True, False),
        ("-", "powered-off", True, False),
        ("stop", "powered-off", False, True),
        ("shutdown", "crashed", False, False),
        ("stop", "suspended", False, False),
    ],
)
def test_who_a_domain_is_off_by(
    marks: str, domain: str | None, by_user: bool, by_admin: bool | None
) -> None:
    run, what = marked_run(*kinds(marks)), DomainEnd(domain) if domain else None
    assert end.is_by_user(run, what) is by_user
    if what:
        assert end.is_by_admin(run, what) is by_admin


@pytest.mark.parametrize(
    ("marks", "age_s", "obeys", "is_stop_over", "is_reboot_over"),
    [
        ("-", 0, False, False, False),
        ("asked,stop,reboot", 0, True, False, False),
        ("asked,stop,reboot", BELIEVED_S - 1, True, False, False),
        ("asked,stop,reboot", BELIEVED_S + 1, False, False, True),
        ("asked,stop,reboot", BELIEVED_S + 59, False, False, True),
        ("asked,stop,reboot", BELIEVED_S + 61, False, True, True),
        # The clock was set back.
        ("asked,stop,reboot", -1, True, False, False),
        ("asked,stop,reboot", -BELIEVED_S - 1, False, False, False),
    ],
)
def test_what_an_admin_asked_for_counts_for_some_time(
    marks: str, age_s: float, obeys: bool, is_stop_over: bool, is_reboot_over: bool
) -> None:
    run = marked_run(*kinds(marks), made_at=NOW - age_s, until=NOW - age_s)
    assert end.has_obeyed(run, NOW) is obeys
    assert end.is_stop_over(run, 60, NOW) is is_stop_over
    assert end.is_reboot_over(run, NOW) is is_reboot_over


def test_a_reboot_without_a_time_is_over() -> None:
    assert end.is_reboot_over(marked_run(MarkerKind.REBOOT, until="soon"), NOW)


@pytest.mark.parametrize(
    ("marks", "result", "has_failed", "is_for_watcher", "keeps_domain"),
    [
        ("-", "success", False, False, False),
        ("-", "exec-condition", False, False, False),
        ("-", "exit-code", True, False, False),
        ("up", "success", False, True, True),
        ("up", "signal", True, True, True),
        ("up,stop", "signal", False, False, False),
        ("up,stop,reboot", "success", False, True, False),
        ("stop,reboot", "success", False, False, False),
        ("up,reboot", "success", False, True, True),
    ],
)
def test_what_the_units_last_step_does(
    marks: str, result: str, has_failed: bool, is_for_watcher: bool, keeps_domain: bool
) -> None:
    run = marked_run(*kinds(marks))
    assert end.has_failed(run, result) is has_failed
    assert end.is_for_watcher(run) is is_for_watcher
    assert end.keeps_domain(run) is keeps_domain


def test_a_start_that_was_broken_off_leaves_its_domain_by_half() -> None:
    assert end.was_broken_off(marked_run(), is_by_run=True)
    assert not end.was_broken_off(marked_run(), is_by_run=False)
    assert not end.was_broken_off(marked_run(MarkerKind.STARTED), is_by_run=True)


@pytest.mark.usefixtures("own_node")
def test_only_the_last_run_lacks_a_stop() -> None:
    assert not end.lacks_stop(Run("web1", UNKNOWN_RUN))
    assert not end.lacks_stop(Run("web1", RUN))
    write_marker(MarkerKind.START, "web1", run=RUN)
    assert end.lacks_stop(Run("web1", RUN))
    assert not end.lacks_stop(Run("web1", OTHER))
    write_marker(MarkerKind.STOP, "web1", run=OTHER)
    assert end.lacks_stop(Run("web1", RUN))
    write_marker(MarkerKind.STOP, "web1", run=RUN)
    assert not end.lacks_stop(Run("web1", RUN))
