"""What a pass makes of instances and of domains that are none, where systemd, kvmd and Xen are
stand-ins."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from brine.common import outbox
from brine.common.errors import BrineError
from brine.instance import journal, spec_files
from brine.instance.control import control_of
from brine.instance.definition import define
from brine.instance.journal import Verdict
from brine.instance.spec import Spec
from brine.instance.xen.domains import Reason
from brine.watcher import instances
from brine.watcher.decisions import End
from brine.watcher.instances import Instances
from brine.watcher.passes import Case, Pass
from brine.watcher.restarts import Policy
from lab.scripted_systemctl import ScriptedSystemctl
from lab.scripted_xl import ScriptedXl

STARTED, ENDED = 1000.0, 1001.0
THEIRS = "6c1f0000-0000-0000-0000-000000000001"


@pytest.fixture
def systemctl(own_node: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedSystemctl:
    """That of a node of its own, where no unit is loaded."""
    monkeypatch.setattr(instances, "_VERDICT_S", 0.0)
    monkeypatch.setattr(instances, "_REBOOT_S", 0.0)
    scripted = ScriptedSystemctl(own_node / "systemctl")
    monkeypatch.setenv("PATH", scripted.path())
    return scripted


@pytest.fixture
def kvmd(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Verdict]]:
    """kvmd's answers, one a question; none if no more is said."""
    answers: list[dict[str, Verdict]] = []

    def told(since: Mapping[str, float]) -> dict[str, Verdict]:
        assert set(since.values()) == {STARTED}
        return answers.pop(0) if answers else {}

    monkeypatch.setattr(journal, "last_verdicts", told)
    return answers


def ran(name: str = "web1", *, wanted_at: float = STARTED) -> Spec:
    """An instance that has run, and left no mark when it ended."""
    spec = define({"name": name, "admin_state": "up"})
    spec_files.save(spec)
    os.utime(spec_files.file_of(name), (wanted_at, wanted_at))
    control_of(name).started.touch()
    os.utime(control_of(name).started, (STARTED, STARTED))
    return spec


def seen() -> dict[str, Case]:
    found = {}
    for case in Instances(timeout_s=1).look():
        assert isinstance(case, Case), case
        found[case.name] = case
    return found


def done() -> dict[str, tuple[str, ...]]:
    """What a pass does."""
    outcomes = Pass(Instances(timeout_s=1), Policy(), clean_all=True).run()
    return {one.name: tuple(one.actions) for one in outcomes}


def test_a_users_will_that_left_no_mark_is_kept_all_the_same(
    systemctl: ScriptedSystemctl, kvmd: list[dict[str, Verdict]]
) -> None:
    ran()
    kvmd += [{"web1": Verdict("user", "guest-shutdown", ENDED)}] * 2
    assert done() == {"web1": ("set-down",)}
    spec = spec_files.load("web1")
    assert (spec.admin_state, spec.admin_state_source) == ("down", "user")
    assert [event.name for event in outbox.events()] == ["web1"]
    assert done() == {"web1": ()}


def test_who_wants_it_up_after_its_user_shut_it_down_has_it_started(
    systemctl: ScriptedSystemctl, kvmd: list[dict[str, Verdict]]
) -> None:
    ran(wanted_at=ENDED + 1)
    kvmd += [{"web1": Verdict("user", "guest-shutdown", ENDED)}] * 2
    systemctl.becomes("start", "brine-instance@web1.service", ActiveState="active")
    assert done() == {"web1": ("start",)}
    assert spec_files.load("web1").admin_state == "up"
    assert len(systemctl.asked("start")) == 1


def test_a_verdict_that_is_just_being_written_is_waited_for(
    systemctl: ScriptedSystemctl, kvmd: list[dict[str, Verdict]]
) -> None:
    ran("web1")
    ran("web2")
    kvmd += [
        {"web1": Verdict("admin", "host-signal", ENDED)},
        {"web2": Verdict("crash", "guest-panic", ENDED)},
    ]
    ends = {name: case.sight.end for name, case in seen().items()}
    assert ends == {"web1": End.ADMIN, "web2": End.CRASH}


def test_a_journal_that_can_not_be_read_is_told_and_stops_nothing(
    systemctl: ScriptedSystemctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Mapping[str, float]) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(journal, "last_verdicts", fail)
    ran()
    fault, case = Instances(timeout_s=1).look()
    assert isinstance(fault, BrineError)
    assert str(fault) == "the journal can't be read: Permission denied"
    assert isinstance(case, Case)
    assert case.sight.end is End.UNTOLD


def test_a_domain_of_others_that_reboots_is_left_to_its_xl(
    systemctl: ScriptedSystemctl, own_node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instances, "_makes_domains", lambda: True)
    xl = ScriptedXl(own_node / "xl", monkeypatch)
    xl.domain("theirs", 3, "---sr-", THEIRS, Reason.REBOOT)

    def reboots(then: Callable[[], object]) -> None:
        monkeypatch.setattr("brine.watcher.instances.time.sleep", lambda _: then())

    def anew() -> None:
        xl.rows([])
        xl.domain("theirs", 4, "-b----", THEIRS)

    reboots(anew)
    done()
    assert xl.asked() == []
    # One that nobody makes anew is only in the way.
    xl.rows([])
    xl.domain("theirs", 4, "---sr-", THEIRS, Reason.REBOOT)
    reboots(lambda: None)
    assert done() == {"theirs": ("clean-up",)}
    assert xl.asked() == ["destroy 4"]
