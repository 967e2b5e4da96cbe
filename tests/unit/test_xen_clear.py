"""The leftovers of xl: only a domain that no one may still inspect is removed."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from brine.instance.service import clear
from brine.instance.xen import config
from brine.instance.xen.domain import clear_domain
from brine.instance.xen.xl import ShutdownReason as Why
from brine.vm.files import InstanceFiles
from brine.vm.markers import (
    UNKNOWN_RUN,
    MarkerKind,
    file_of,
    held_marker,
    is_held,
    write_marker,
)
from brine.vm.spec import Spec, parse
from lab.scripted_xl import ScriptedXl

UUID = "6f1b5c1e-8a3b-4a50-9d0e-0d6f1c2b3a4f"
SPEC = replace(parse(Spec, {"name": "web1", "uuid": UUID, "kernel": "/k"}), hypervisor="xen-pvh")
DESTROYED = ["destroy 3"]
UP, STOP, SHUTDOWN = MarkerKind.STARTED, MarkerKind.STOP, MarkerKind.SHUTDOWN


@pytest.fixture
def scripted(own_node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedXl:
    config.write_config(SPEC)
    return ScriptedXl(tmp_path / "bin", monkeypatch)


def mark(*kinds: MarkerKind) -> None:
    for kind in kinds:
        write_marker(kind, "web1", run=UNKNOWN_RUN)


@pytest.mark.parametrize(
    ("marks", "state", "why", "is_in_order", "asked", "left"),
    [
        # Who ended it is noted, and the domain is left.
        ([UP], "---s--", Why.POWEROFF, True, [], [UP, SHUTDOWN]),
        ([UP], "---s--", Why.CRASH, False, [], [UP]),
        ([UP], "---s--", Why.WATCHDOG, False, [], [UP]),
        ([UP], "---s--", Why.REBOOT, False, [], [UP]),
        ([UP], "---s--", None, False, [], [UP]),
        # What was stopped is removed; so is what did not come up.
        ([UP, STOP], "---s--", Why.POWEROFF, True, DESTROYED, [UP, STOP]),
        ([UP, STOP], "---sc-", Why.CRASH, True, DESTROYED, [UP, STOP]),
        ([UP, STOP], "-b----", None, True, DESTROYED, [UP, STOP]),
        ([], "--p---", None, True, DESTROYED, []),
        ([], "-b----", None, True, DESTROYED, []),
        ([], "---sc-", None, True, DESTROYED, []),
        # Whoever saves or moves it needs its memory, and removes it then: it counts as stopped.
        ([], "---ss-", Why.SUSPEND, True, [], [STOP]),
        ([UP], "---ss-", Why.SUSPEND, True, [], [UP, STOP]),
        ([UP, STOP], "---ss-", Why.SUSPEND, True, [], [UP, STOP]),
        # It outlives an xl that was killed.
        ([UP], "-b----", None, True, [], [UP]),
        # There is nothing left.
        ([UP], "-----d", None, True, [], [UP]),
        ([UP], None, None, True, [], [UP]),
    ],
)
def test_what_is_left_and_noted(
    scripted: ScriptedXl,
    marks: list[MarkerKind],
    state: str | None,
    why: Why | None,
    is_in_order: bool,
    asked: list[str],
    left: list[MarkerKind],
) -> None:
    mark(*marks)
    if state:
        scripted.domain("web1", 3, state, UUID, why)
    assert clear_domain("web1") is is_in_order
    assert scripted.asked() == asked
    assert [kind for kind in (UP, STOP, SHUTDOWN) if file_of(kind, "web1").exists()] == left


def test_an_earlier_start_does_not_count(
    scripted: ScriptedXl, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark(UP)
    monkeypatch.setenv("INVOCATION_ID", "0d" * 16)
    config.write_config(SPEC)
    scripted.domain("web1", 3, "-b----", UUID)
    clear_domain("web1")
    assert scripted.asked() == DESTROYED


def test_a_clock_that_was_set_back_while_it_started_hides_no_end(scripted: ScriptedXl) -> None:
    an_hour_on = time.time() + 3600
    os.utime(InstanceFiles("web1").domain, (an_hour_on, an_hour_on))
    mark(UP)
    scripted.domain("web1", 3, "---s--", UUID, Why.POWEROFF)
    assert clear_domain("web1")
    assert file_of(SHUTDOWN, "web1").exists()


@pytest.mark.parametrize(
    ("state", "why", "stays"),
    [
        ("---s--", Why.POWEROFF, True),
        ("---ss-", Why.SUSPEND, False),
        ("-b----", None, False),
        (None, None, False),
    ],
)
def test_only_one_that_has_shut_down_is_to_reboot(
    scripted: ScriptedXl, state: str | None, why: Why | None, stays: bool
) -> None:
    """Another one may run elsewhere by now."""
    mark(UP, MarkerKind.REBOOT)
    if state:
        scripted.domain("web1", 3, state, UUID, why)
    assert clear_domain("web1")
    assert file_of(MarkerKind.REBOOT, "web1").exists() is stays


def test_who_stops_one_that_is_saved_goes_on_saying_so(scripted: ScriptedXl) -> None:
    mark(UP)
    scripted.domain("web1", 3, "---ss-", UUID, Why.SUSPEND)
    with held_marker(STOP, "web1", run=UNKNOWN_RUN):
        assert clear_domain("web1")
        assert is_held(STOP, "web1")


def test_one_that_is_saved_has_not_failed_where_that_can_not_be_noted(scripted: ScriptedXl) -> None:
    mark(UP)
    (file_of(STOP, "web1") / "in the way").mkdir(parents=True)
    scripted.domain("web1", 3, "---ss-", UUID, Why.SUSPEND)
    assert clear_domain("web1")
    assert scripted.asked() == []


@pytest.mark.parametrize("state", ["-b----", "---s--", "---ss-"])
def test_a_start_that_was_refused_touches_nothing(
    scripted: ScriptedXl, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """The files are of the run before, and so is its domain, whatever the marks say."""
    mark(STOP)
    scripted.domain("web1", 3, state, UUID, Why.POWEROFF if "s" in state else None)
    monkeypatch.setenv("INVOCATION_ID", "another")
    assert clear_domain("web1")
    assert scripted.asked() == []


def test_a_domain_of_the_same_name_is_somebody_elses(scripted: ScriptedXl) -> None:
    scripted.domain("web1", 3, "---s--", UUID.replace("6", "7"), 0)
    assert clear_domain("web1")
    assert scripted.asked() == []


def test_what_can_not_be_known_is_a_fault(
    scripted: ScriptedXl, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mark(UP)
    scripted.refuse("list", "libxl: error: libxl.c:1:f: no answer\n")
    monkeypatch.setattr(sys, "argv", ["clear", "web1"])
    with pytest.raises(SystemExit, match="1"):
        clear.main()
    assert "error: web1: its domain: xl list -v: no answer" in capsys.readouterr().err
    InstanceFiles("web1").domain.unlink()
    assert clear_domain("web1")  # what is none of Xen's is not asked about
