"""Who has ended an instance, as far as its unit's last step can tell."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from brine.common.instance_units import unit_of
from brine.common.marks import (
    UNKNOWN_RUN,
    Kind,
    file_of,
    held_mark,
    last_run,
    read_mark,
    write_mark,
)
from brine.instance import spec_files
from brine.instance.clearing import note_stop
from brine.instance.control import BELIEVED_S
from brine.instance.definition import define
from lab.scripted_systemctl import ScriptedSystemctl

UNIT = unit_of("web1")
RUN = "0d" * 16
STOPPING_UNIT = {"ActiveState": "deactivating", "Job": "7", "InactiveExitTimestampMonotonic": "5"}
UP, NOT_UP = "6", "4"
TIMEOUT_S = 60


@pytest.fixture
def systemctl(own_node: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedSystemctl:
    """That of a node of its own, where web1 is defined."""
    spec_files.save(define({"name": "web1", "shutdown_timeout": TIMEOUT_S}))
    monkeypatch.setenv("INVOCATION_ID", RUN)
    return ScriptedSystemctl(own_node / "systemctl", monkeypatch)


@pytest.mark.parametrize(
    ("up", "job", "is_admins"),
    [
        (NOT_UP, "stop", True),
        (NOT_UP, "restart", True),
        (NOT_UP, "start", False),  # which has failed
        (UP, "stop", False),  # ExecStop says so, if it is so
    ],
)
def test_a_start_that_systemd_is_told_to_stop_is_the_admins(
    systemctl: ScriptedSystemctl, up: str, job: str, is_admins: bool
) -> None:
    systemctl.queues(UNIT, job)
    systemctl.unit(UNIT, ActiveEnterTimestampMonotonic=up, **STOPPING_UNIT)
    note_stop("web1")
    assert (read_mark(Kind.STOP, "web1", run=RUN) is not None) is is_admins


@pytest.mark.parametrize("age_s", [60, 86400])
def test_also_where_the_mark_of_the_stop_before_is_still_there(
    systemctl: ScriptedSystemctl, age_s: float
) -> None:
    write_mark(Kind.STOP, "web1", run="the run before")
    mark = file_of(Kind.STOP, "web1")
    os.utime(mark, (time.time() - age_s, time.time() - age_s))
    systemctl.queues(UNIT, "stop")
    systemctl.unit(UNIT, ActiveEnterTimestampMonotonic=NOT_UP, **STOPPING_UNIT)
    note_stop("web1")
    assert read_mark(Kind.STOP, "web1", run=last_run("web1"))
    assert last_run("web1") == RUN


@pytest.mark.parametrize(("more_s", "is_admins"), [(-5, True), (5, False)])
def test_an_end_long_after_a_stop_that_was_broken_off_is_not_the_admins(
    systemctl: ScriptedSystemctl, more_s: float, is_admins: bool
) -> None:
    write_mark(Kind.STOP, "web1", run=UNKNOWN_RUN)
    mark = file_of(Kind.STOP, "web1")
    made_s = time.time() - TIMEOUT_S - BELIEVED_S - more_s
    os.utime(mark, (made_s, made_s))
    # Who stops it may have more patience than its spec.
    with held_mark(Kind.STOP, "web1", run=UNKNOWN_RUN):
        os.utime(mark, (made_s, made_s))
        note_stop("web1")
        assert mark.exists()
    note_stop("web1")
    assert mark.exists() is is_admins


@pytest.mark.parametrize(("more_s", "stays"), [(-5, True), (5, False)])
def test_an_end_long_after_a_reboot_that_was_given_up_is_none(
    systemctl: ScriptedSystemctl, more_s: float, stays: bool
) -> None:
    until_s = time.time() - BELIEVED_S - more_s
    write_mark(Kind.REBOOT, "web1", run=UNKNOWN_RUN, until=until_s)
    note_stop("web1")
    assert (read_mark(Kind.REBOOT, "web1") is not None) is stays


def test_what_can_not_be_noted_is_told(
    systemctl: ScriptedSystemctl, capsys: pytest.CaptureFixture[str]
) -> None:
    systemctl.refuse("show", "Connection timed out\n")
    note_stop("web1")
    assert "web1: its end can't be noted: systemctl show: Conn" in capsys.readouterr().err
