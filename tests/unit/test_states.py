"""The states of all instances, out of their specs, systemd's words and their marks."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brine.common import paths
from brine.common.errors import BrineError
from brine.common.markers import MarkerKind, write_marker
from brine.common.peer import unit_of
from brine.instance import store
from brine.instance.observe import Observed, look, look_at_all
from brine.instance.operations import reboot_instance, rename_instance, undefine_instance
from brine.instance.spec import Spec, to_json
from brine.instance.start import start_instance
from brine.instance.store import InstanceError
from brine.instance.validate import define
from lab.scripted_systemctl import ScriptedSystemctl


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedSystemctl:
    """A node of its own, where no instance is defined."""
    monkeypatch.setattr(store, "FOLDER", tmp_path / "instances")
    monkeypatch.setattr(store, "_GROUP", "none here")
    monkeypatch.setattr(paths, "CONTROL_DIR", tmp_path / "ctrl")
    monkeypatch.setattr(paths, "MARKS_DIR", tmp_path / "marks")
    return ScriptedSystemctl(tmp_path / "systemctl", monkeypatch)


def defined(name: str, **keys: Any) -> Spec:
    spec = define({"name": name, "admin_state": "up", **keys})
    store.save(spec)
    return spec


def begun(name: str, run: str = "a") -> None:
    write_marker(MarkerKind.START, name, run=run)


def everyone() -> dict[str, tuple[str, str]]:
    seen = [one for one in look_at_all() if isinstance(one, Observed)]
    return {one.spec.name: (one.state.oper, one.state.status) for one in seen}


def test_each_has_its_own_state(systemctl: ScriptedSystemctl) -> None:
    for name in ("runs", "off", "crashed", "web.shutdown", "web"):
        defined(name)
    systemctl.unit(unit_of("runs"), ActiveState="active", MainPID="7", InvocationID="a")
    systemctl.unit(unit_of("crashed"), ActiveState="failed", Result="signal", InvocationID="a")
    for name in ("off", "crashed", "web.shutdown", "web"):
        begun(name)
    write_marker(MarkerKind.SHUTDOWN, "off", run="a")
    write_marker(MarkerKind.SHUTDOWN, "web.shutdown", run="a")  # which is not that of web
    write_marker(MarkerKind.SHUTDOWN, "web", run="the run before")
    write_marker(MarkerKind.SHUTDOWN, "crashed", run="the run before")
    assert everyone() == {
        "crashed": ("down", "ERROR_down"),
        "off": ("S", "USER_down"),
        "runs": ("running", "running"),
        "web": ("down", "ERROR_down"),
        "web.shutdown": ("S", "USER_down"),
    }
    for name, expected in everyone().items():
        one = look(name).state
        assert (one.oper, one.status) == expected


def test_one_that_was_stopped_behind_our_back_says_so(systemctl: ScriptedSystemctl) -> None:
    defined("web1")
    systemctl.unit(unit_of("web1"), ActiveState="inactive", Result="success", InvocationID="a")
    begun("web1")
    assert look("web1").state.why.endswith("QEMU ended by itself")
    write_marker(MarkerKind.STOP, "web1", run="the run before")
    assert look("web1").state.why.endswith("QEMU ended by itself")
    write_marker(MarkerKind.STOP, "web1", run="a")
    assert look("web1").state.why.endswith("it was stopped")


@pytest.mark.parametrize("ended", [MarkerKind.STOP, MarkerKind.SHUTDOWN])
def test_a_start_that_failed_counts_more_than_the_end_before_it(
    systemctl: ScriptedSystemctl, ended: MarkerKind
) -> None:
    defined("web1")
    begun("web1")
    write_marker(ended, "web1", run="a")
    failed = {"ActiveState": "failed", "Result": "exit-code", "ExecMainStatus": "1"}
    seen = []
    for run in ("a", "b"):
        systemctl.unit(unit_of("web1"), **failed, InvocationID=run)
        seen.append(look("web1"))
    assert [(one.state.oper == "S", one.was_stopped) for one in seen] == [
        (ended == MarkerKind.SHUTDOWN, ended == MarkerKind.STOP),
        (False, False),
    ]
    assert seen[1].state.why.endswith("its process ended with status 1")


def test_one_that_ended_is_not_taken_for_one_that_was_not_started(
    systemctl: ScriptedSystemctl,
) -> None:
    for name in ("ended", "new"):
        defined(name)
    write_marker(MarkerKind.STARTED, "ended", run="a")
    assert look("ended").state.why.endswith("QEMU ended by itself")
    assert look("new").state.why.endswith("it has not run since the node's start")


def test_a_fifo_in_a_specs_place_holds_nobody_up(systemctl: ScriptedSystemctl) -> None:
    defined("web1")
    os.mkfifo(store.FOLDER / "web0.json")
    fault, seen = look_at_all()
    assert str(fault).endswith("web0.json: can't be read: Is no regular file")
    assert isinstance(seen, Observed)


@pytest.mark.parametrize("state", ["active", "activating", "deactivating"])
def test_what_runs_without_a_sound_spec_is_told(systemctl: ScriptedSystemctl, state: str) -> None:
    defined("sound")
    (store.FOLDER / "bad.json").write_text("{")
    for name in ("bad", "gone", "sound"):
        systemctl.unit(unit_of(name), ActiveState=state, MainPID="7", InvocationID="a")
    systemctl.unit(unit_of("forgotten"), ActiveState="failed")
    bad, seen, gone = look_at_all()
    assert isinstance(seen, Observed)
    assert isinstance(bad, InstanceError)
    assert str(bad).startswith("bad: runs, and its spec can't be used: ")
    assert isinstance(gone, InstanceError)
    assert str(gone) == "gone: runs, and has no spec"
    assert "brine instance stop gone" in (gone.hint or "")


@pytest.mark.parametrize(
    "work",
    [
        look,
        start_instance,
        reboot_instance,
        undefine_instance,
        lambda name: rename_instance(name, "web2"),
    ],
)
def test_what_runs_without_a_spec_is_no_unknown_name(
    systemctl: ScriptedSystemctl, own_node: Path, work: Callable[[str], object]
) -> None:
    systemctl.unit(unit_of("web1"), ActiveState="active", MainPID="7", InvocationID="a")
    with pytest.raises(InstanceError, match="^web1: runs, and has no spec$") as told:
        work("web1")
    assert "brine instance stop web1 stops it" in (told.value.hint or "")


def test_a_damaged_spec_is_told_among_the_others(systemctl: ScriptedSystemctl) -> None:
    defined("web1")
    (store.FOLDER / "web0.json").write_text("{")
    fault, seen = look_at_all()
    assert isinstance(fault, InstanceError)
    assert isinstance(seen, Observed)


def test_five_hundred_take_one_question(systemctl: ScriptedSystemctl) -> None:
    data = to_json(defined("web0"))
    for number in range(1, 500):
        name = f"web{number}"
        (store.FOLDER / f"{name}.json").write_text(json.dumps({**data, "name": name}))
    assert len(everyone()) == 500
    assert len(systemctl.asked("show")) == 1


def test_marks_that_can_not_be_read_are_not_none(
    systemctl: ScriptedSystemctl,
) -> None:
    defined("web1")
    paths.MARKS_DIR.write_text("")
    for work in (lambda: look("web1"), lambda: list(look_at_all())):
        with pytest.raises(BrineError, match="marks: can't be read: Not a directory"):
            work()


def test_one_that_is_not_there(systemctl: ScriptedSystemctl) -> None:
    with pytest.raises(InstanceError, match="web1: there is no such instance"):
        look("web1")


@pytest.mark.parametrize(
    ("state", "began", "limit_s"),
    [
        ("activating", "InactiveExitTimestampMonotonic", 7),
        ("deactivating", "StateChangeTimestampMonotonic", 50),
    ],
)
def test_a_start_or_stop_that_takes_longer_than_it_may_is_told(
    systemctl: ScriptedSystemctl,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    began: str,
    limit_s: int,
) -> None:
    store.save(define({"name": "web1", "start_timeout": 7, "shutdown_timeout": 50}))
    verb = {"activating": "starting", "deactivating": "stopping"}[state]
    now_s = 1000.0
    monkeypatch.setattr(time, "clock_gettime", lambda _clock: now_s)  # since boot
    for ago_s, is_overdue in ((limit_s + 30, False), (limit_s + 300, True)):
        begun_us = {began: str(int((now_s - ago_s) * 1e6))}
        systemctl.unit(unit_of("web1"), ActiveState=state, InvocationID="a", **begun_us)
        seen = look("web1")
        assert (bool(seen.overdue), seen.state.status) == (is_overdue, verb)
        assert bool(seen.state.why) == is_overdue
    assert seen.state.why.startswith(f"it has been {verb} for {limit_s + 300} s")
    assert seen.state.why.endswith(f", and {limit_s} s are its limit")
