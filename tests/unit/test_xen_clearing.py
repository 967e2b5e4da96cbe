"""What is done about what xl has left: only what nobody wants to see is removed."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from brine.common.markers import (
    UNKNOWN_RUN,
    MarkerKind,
    file_of,
    held_marker,
    is_held,
    write_marker,
)
from brine.common.paths import InstanceFiles
from brine.instance.service import clear
from brine.instance.spec import Spec, parse
from brine.instance.xen import config
from brine.instance.xen.domain import clear_domain
from brine.instance.xen.xl import ShutdownReason
from lab.scripted_xl import ScriptedXl

UUID = "6f1b5c1e-8a3b-4a50-9d0e-0d6f1c2b3a4f"
SPEC = replace(parse(Spec, {"name": "web1", "uuid": UUID, "kernel": "/k"}), hypervisor="xen-pvh")


@pytest.fixture
def scripted(own_node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedXl:
    config.write(SPEC)
    return ScriptedXl(tmp_path / "bin", monkeypatch)


def came_up() -> None:
    """Its start has succeeded."""
    write_marker(MarkerKind.STARTED, "web1", run=UNKNOWN_RUN)


@pytest.mark.parametrize(
    ("reason", "is_in_order"),
    [
        (ShutdownReason.POWEROFF, True),
        (ShutdownReason.CRASH, False),
        (ShutdownReason.WATCHDOG, False),
        (ShutdownReason.REBOOT, False),
        (None, False),
    ],
)
def test_who_ended_is_noted_and_its_domain_left(
    scripted: ScriptedXl, reason: ShutdownReason | None, is_in_order: bool
) -> None:
    came_up()
    scripted.domain("web1", 3, "---s--", UUID, reason)
    assert clear_domain("web1") is is_in_order
    assert file_of(MarkerKind.SHUTDOWN, "web1").exists() is is_in_order
    assert scripted.asked() == []


@pytest.mark.parametrize("state", ["---s--", "---sc-", "-b----"])
def test_what_was_stopped_is_removed(scripted: ScriptedXl, state: str) -> None:
    came_up()
    write_marker(MarkerKind.STOP, "web1", run=UNKNOWN_RUN)
    scripted.domain("web1", 3, state, UUID, ShutdownReason.POWEROFF if "s" in state else None)
    assert clear_domain("web1")
    assert scripted.asked() == ["destroy 3"]
    assert not file_of(MarkerKind.SHUTDOWN, "web1").exists()


@pytest.mark.parametrize("state", ["--p---", "-b----", "---sc-"])
def test_what_did_not_come_up_is_removed(scripted: ScriptedXl, state: str) -> None:
    scripted.domain("web1", 3, state, UUID)
    assert clear_domain("web1")
    assert scripted.asked() == ["destroy 3"]


def test_an_earlier_start_does_not_count(
    scripted: ScriptedXl, monkeypatch: pytest.MonkeyPatch
) -> None:
    came_up()
    monkeypatch.setenv("INVOCATION_ID", "0d" * 16)
    config.write(SPEC)
    scripted.domain("web1", 3, "-b----", UUID)
    clear_domain("web1")
    assert scripted.asked() == ["destroy 3"]


def test_a_clock_that_was_set_back_while_it_started_hides_no_end(scripted: ScriptedXl) -> None:
    an_hour_on = time.time() + 3600
    os.utime(InstanceFiles("web1").domain, (an_hour_on, an_hour_on))
    came_up()
    scripted.domain("web1", 3, "---s--", UUID, ShutdownReason.POWEROFF)
    assert clear_domain("web1")
    assert file_of(MarkerKind.SHUTDOWN, "web1").exists()
    assert scripted.asked() == []


@pytest.mark.parametrize("is_up", [True, False])
@pytest.mark.parametrize("is_stopped", [True, False])
def test_one_that_is_saved_or_moved_is_left_and_counts_as_stopped(
    scripted: ScriptedXl, is_up: bool, is_stopped: bool
) -> None:
    """Whoever does that needs its memory, and removes it then."""
    if is_up:
        came_up()
    if is_stopped:
        write_marker(MarkerKind.STOP, "web1", run=UNKNOWN_RUN)
    scripted.domain("web1", 3, "---ss-", UUID, ShutdownReason.SUSPEND)
    assert clear_domain("web1")
    assert scripted.asked() == []
    assert file_of(MarkerKind.STOP, "web1").exists()
    assert not file_of(MarkerKind.SHUTDOWN, "web1").exists()


@pytest.mark.parametrize(
    ("state", "reason", "stays"),
    [
        ("---s--", ShutdownReason.POWEROFF, True),
        ("---ss-", ShutdownReason.SUSPEND, False),
        ("-b----", None, False),
        ("-----d", None, False),
        (None, None, False),
    ],
)
def test_only_one_that_has_shut_down_is_to_reboot(
    scripted: ScriptedXl, state: str | None, reason: ShutdownReason | None, stays: bool
) -> None:
    """Another one may run elsewhere by now."""
    came_up()
    write_marker(MarkerKind.REBOOT, "web1", run=UNKNOWN_RUN, until=time.time())
    if state:
        scripted.domain("web1", 3, state, UUID, reason)
    assert clear_domain("web1")
    assert file_of(MarkerKind.REBOOT, "web1").exists() is stays


def test_who_stops_one_that_is_saved_goes_on_saying_so(scripted: ScriptedXl) -> None:
    came_up()
    scripted.domain("web1", 3, "---ss-", UUID, ShutdownReason.SUSPEND)
    with held_marker(MarkerKind.STOP, "web1", run=UNKNOWN_RUN):
        assert clear_domain("web1")
        assert is_held(MarkerKind.STOP, "web1")


def test_one_that_is_saved_has_not_failed_where_that_can_not_be_noted(scripted: ScriptedXl) -> None:
    came_up()
    (file_of(MarkerKind.STOP, "web1") / "in the way").mkdir(parents=True)
    scripted.domain("web1", 3, "---ss-", UUID, ShutdownReason.SUSPEND)
    assert clear_domain("web1")
    assert scripted.asked() == []


@pytest.mark.parametrize("state", ["-b----", "---s--", "---ss-"])
def test_a_start_that_was_refused_touches_nothing(
    scripted: ScriptedXl, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """What was written is of the run before, and so is its domain, whatever the marks say."""
    write_marker(MarkerKind.STOP, "web1", run=UNKNOWN_RUN)
    scripted.domain("web1", 3, state, UUID, ShutdownReason.POWEROFF if "s" in state else None)
    monkeypatch.setenv("INVOCATION_ID", "another")
    assert clear_domain("web1")
    assert scripted.asked() == []


def test_a_domain_outlives_an_xl_that_was_killed(scripted: ScriptedXl) -> None:
    came_up()
    scripted.domain("web1", 3, "-b----", UUID)
    assert clear_domain("web1")
    assert scripted.asked() == []


@pytest.mark.parametrize("state", ["", "-----d"])
def test_where_nothing_is_left_nothing_is_done(scripted: ScriptedXl, state: str) -> None:
    came_up()
    if state:
        scripted.domain("(null)", 3, state, UUID)
    assert clear_domain("web1")
    assert scripted.asked() == []


def test_a_domain_of_the_same_name_is_somebody_elses(scripted: ScriptedXl) -> None:
    scripted.domain("web1", 3, "---s--", UUID.replace("6", "7"), 0)
    assert clear_domain("web1")
    assert scripted.asked() == []


def test_what_can_not_be_known_is_a_fault(
    scripted: ScriptedXl, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    came_up()
    scripted.refuse("list", "libxl: error: libxl.c:1:f: no answer\n")
    monkeypatch.setattr(sys, "argv", ["clear", "web1"])
    with pytest.raises(SystemExit, match="1"):
        clear.main()
    assert "error: web1: its domain: xl list -v: no answer" in capsys.readouterr().err


def test_what_is_none_of_xens_is_not_asked_about(scripted: ScriptedXl) -> None:
    scripted.refuse("list", "no xl here\n")
    InstanceFiles("web1").domain.unlink()
    assert clear_domain("web1")
