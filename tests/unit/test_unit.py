"""The states of units, from systemctl's output."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brine.common.ahead import begin_ahead
from brine.instance import unit
from brine.instance.unit import Active, CalledOffError, Unit, UnitError
from brine.vm.unit_name import unit_of
from lab.scripted_systemctl import ScriptedSystemctl

RUNNING = {
    "ActiveState": "active",
    "MainPID": "4711",
    "Result": "success",
    "ExecMainStatus": "0",
    "InactiveExitTimestampMonotonic": "123456000",
    "ActiveEnterTimestampMonotonic": "123456789",
    "StateChangeTimestampMonotonic": "123456790",
    "InvocationID": "0123456789abcdef0123456789abcdef",
}


def test_all_that_is_known_of_one(systemctl: ScriptedSystemctl) -> None:
    systemctl.unit(unit_of("web1"), **RUNNING)
    assert unit.units(["web1"]) == {
        "web1": Unit(
            name="web1",
            active=Active.ACTIVE,
            main_pid=4711,
            result="success",
            exit_status=0,
            begun_us=123456000,
            since_us=123456789,
            changed_us=123456790,
            invocation="0123456789abcdef0123456789abcdef",
        )
    }


def test_what_a_job_is_for(systemctl: ScriptedSystemctl) -> None:
    """A stop job of systemd differs from an end without one."""
    assert not unit.is_told_to_stop("web1")
    jobs = (("start", True, False), ("restart", True, True), ("stop", False, True))
    for kind, is_queued, is_told_to_stop in jobs:
        systemctl.queues(unit_of("web1"), kind)
        found = unit.units(["web1", "web2"])
        assert (found["web1"].is_queued, found["web2"].is_queued) == (is_queued, False)
        told = [unit.is_told_to_stop(name) for name in ("web1", "web2")]
        assert told == [is_told_to_stop, False]
    systemctl.unit(unit_of("web1"), **RUNNING, Job="7")
    assert not unit.units()["web1"].is_queued


def test_of_none_all_that_are_loaded(systemctl: ScriptedSystemctl) -> None:
    assert unit.units() == {}
    for name in ("web1", "db.example.com", "a-b_c.service"):
        systemctl.unit(unit_of(name), ActiveState="inactive")
    assert set(unit.units()) == {"web1", "db.example.com", "a-b_c.service"}
    assert systemctl.asked("show")[-1][-1] == "brine-instance@*.service"


@pytest.mark.parametrize(
    ("words", "is_asked"),
    [
        ("instance list --json", True),
        ("instance define --live web1.json --dry-run", True),
        ("instance define --live web1.json", False),
        ("instance define web1.json --dry-run", False),
        ("instance info web1", False),
        ("instance", False),
        ("", False),
    ],
)
def test_a_command_that_needs_all_units_as_they_are_asks_ahead(
    systemctl: ScriptedSystemctl, own_node: Path, words: str, is_asked: bool
) -> None:
    assert own_node  # of no part that is installed
    systemctl.unit(unit_of("web1"), **RUNNING)
    asked = begin_ahead(words.split())
    assert (asked is not None) is is_asked
    if asked:
        assert [*asked()] == ["web1"]
    assert len(systemctl.asked("show")) == is_asked


@pytest.mark.parametrize("active", Active)
def test_each_state_is_known(systemctl: ScriptedSystemctl, active: Active) -> None:
    systemctl.unit(unit_of("web1"), **{**RUNNING, "ActiveState": active.value})
    assert unit.units(["web1"])["web1"].active is active


@pytest.mark.parametrize(
    ("properties", "said"),
    [
        ({"ActiveState": "levitating"}, "web1.service is levitating, which is not known here"),
        ({"SubState": "dead"}, "nothing of the state of brine-instance@web1.service"),
    ],
)
def test_what_is_not_known_is_an_error(
    systemctl: ScriptedSystemctl, properties: dict[str, str], said: str
) -> None:
    systemctl.unit(unit_of("web1"), **properties)
    with pytest.raises(UnitError, match=said):
        unit.units(["web1"])


@pytest.mark.parametrize("text", ["", "[not set]", "-1", "x"])
def test_a_number_that_is_not_set_is_none(systemctl: ScriptedSystemctl, text: str) -> None:
    numbers = dict.fromkeys(("MainPID", "ExecMainStatus", "ActiveEnterTimestampMonotonic"), text)
    systemctl.unit(unit_of("web1"), **{**RUNNING, **numbers})
    found = unit.units(["web1"])["web1"]
    assert (found.main_pid, found.exit_status, found.since_us) == (0, 0, 0)


_SLOW = """#!/bin/sh
folder=$(dirname "$0")
case " $* " in
    *" list-jobs "*) echo "7 brine-instance@web1.service start waiting" ;;
    *" start "*)
        read -r _ <"$folder/queue"
        echo "Enqueued auxiliary job 9 modprobe@loop.service/start." >&2
        echo "Enqueued anchor job 8 brine-instance@web1.service/start." >&2
        read -r _ <"$folder/end"
        echo "Enqueued auxiliary job 10 brine-console-log.service/start." >&2
        echo "Job for brine-instance@web1.service canceled." >&2
        exit 1
        ;;
esac
"""


def test_a_start_has_begun_when_its_own_job_is_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "systemctl").write_text(_SLOW)
    (tmp_path / "systemctl").chmod(0o755)
    for name in ("queue", "end"):
        os.mkfifo(tmp_path / name)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    begun: list[Callable[[], None]] = []
    begin = threading.Thread(target=lambda: begun.append(unit.begin_start("web1")))
    begin.start()
    begin.join(0.3)
    assert begin.is_alive(), "another one's job is taken for it"
    (tmp_path / "queue").write_text("\n")
    begin.join()
    wait = threading.Timer(0, (tmp_path / "end").write_text, ["\n"])
    wait.start()
    with pytest.raises(CalledOffError) as told:
        begun[0]()
    wait.join()
    assert str(told.value) == "systemctl start: Job for brine-instance@web1.service canceled."


def test_a_systemd_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(_command: list[str], **_: Any) -> None:
        raise TimeoutError

    monkeypatch.setattr(unit, "run_bounded", hang)
    with pytest.raises(UnitError, match="does not answer within 30 s"):
        unit.units()
    unit.forget_failure("web1")  # which nobody waits for


def test_its_words_are_not_translated_and_nobody_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "systemctl"
    program.write_text('#!/bin/sh\necho "$1 LC_ALL=$LC_ALL" >&2\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    with pytest.raises(UnitError, match="--no-ask-password LC_ALL=C$"):
        unit.begin_start("web1")()


def test_a_failure_is_forgotten(systemctl: ScriptedSystemctl) -> None:
    unit.forget_failure("web1")
    assert systemctl.asked("reset-failed") == [["--", "brine-instance@web1.service"]]
    systemctl.refuse("reset-failed", "Unit brine-instance@web1.service not loaded.\n")
    unit.forget_failure("web1")  # systemd has forgotten all of it
