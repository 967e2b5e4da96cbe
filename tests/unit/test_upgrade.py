"""An upgrade finds the markers of an older version, and keeps them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from brine.common import paths
from brine.instance import store
from brine.instance.observe import look
from brine.instance.validate import define
from brine.vm.markers import UNKNOWN_RUN, MarkerKind, last_run, read_marker, run_of
from brine.vm.unit_name import unit_of
from brine.vm.upgrade import main
from lab.scripted_systemctl import ScriptedSystemctl

RUN = "0d" * 16


@pytest.fixture(autouse=True)
def systemctl(own_node: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedSystemctl:
    """The systemctl of a node of its own, where web1 is defined."""
    store.save(define({"name": "web1", "admin_state": "up"}))
    return ScriptedSystemctl(own_node / "systemctl", monkeypatch)


def old(name: str, made_at: float = 1000.0) -> Path:
    file = paths.CONTROL_DIR / name
    file.parent.mkdir(exist_ok=True)
    file.touch()
    os.utime(file, (made_at, made_at))
    return file


def test_what_runs_is_known_by_its_run(systemctl: ScriptedSystemctl) -> None:
    systemctl.unit(unit_of("web1"), ActiveState="active", MainPID="7", InvocationID=RUN)
    old("web1.started")
    stop = old("web1.stopping")
    main()
    assert run_of("web1", 7) == RUN
    started = read_marker(MarkerKind.STARTED, "web1", run=RUN)
    assert started
    assert started.made_at == 1000.0
    # Who is stopping it may give that up, and removes what it has made.
    assert not look("web1").was_stopped
    assert stop.exists()
    assert not (paths.CONTROL_DIR / "web1.started").exists()


@pytest.mark.parametrize("unit", [{}, {"ActiveState": "failed", "InvocationID": RUN}])
@pytest.mark.parametrize(
    ("said", "status"), [("stopping", "ERROR_down"), ("shutdown", "USER_down")]
)
def test_what_does_not_run_ended_as_it_did(
    systemctl: ScriptedSystemctl, unit: dict[str, str], said: str, status: str
) -> None:
    if unit:
        systemctl.unit(unit_of("web1"), **unit)
    old("web1.started")
    old(f"web1.{said}")
    main()
    assert last_run("web1") == unit.get("InvocationID", UNKNOWN_RUN)
    seen = look("web1")
    assert seen.has_run
    assert (seen.was_stopped, seen.has_user_marker) == (said == "stopping", said == "shutdown")
    assert seen.state.status == status


def test_a_reboot_is_one_still() -> None:
    old("web1.started")
    (paths.CONTROL_DIR.parent / "reboot").mkdir()
    old("../reboot/web1")
    main()
    assert look("web1").is_to_reboot


def test_what_is_new_stays_as_it_is(systemctl: ScriptedSystemctl) -> None:
    systemctl.unit(unit_of("web1"), ActiveState="active", MainPID="7", InvocationID=RUN)
    main()
    systemctl.unit(unit_of("web1"), ActiveState="active", MainPID="8", InvocationID="another")
    main()
    assert last_run("web1") == RUN


def test_what_others_have_put_there_says_nothing() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    old("web1.started")
    os.chown(old("web1.shutdown"), 65534, 65534)
    (paths.CONTROL_DIR / "web1.stopping").symlink_to("web1.started")
    main()
    seen = look("web1")
    assert (seen.has_run, seen.was_stopped, seen.has_user_marker) == (True, False, False)


def test_vms_that_brine_does_not_run_have_no_marks() -> None:
    old("theirs.stopping")
    old("theirs.shutdown")
    main()
    assert list(paths.MARKS_DIR.iterdir()) == []


def test_a_systemd_that_says_nothing_is_told_and_breaks_no_upgrade(
    systemctl: ScriptedSystemctl, capsys: pytest.CaptureFixture[str]
) -> None:
    systemctl.refuse("show", "Connection timed out\n")
    main()
    assert "brine: warning: marks of an older version: " in capsys.readouterr().err
