"""`brine watcher`: what it prints, what it logs, and its exit statuses."""

from __future__ import annotations

import errno
import io
import json
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from brine.common import cli as brine
from brine.common import outbox, paths
from brine.common.errors import BrineError
from brine.common.locks import locked
from brine.instance import restart_counter, store
from brine.instance.intent import ADMIN_STATE
from brine.instance.restart_counter import Tries
from brine.instance.spec import Spec, parse
from brine.instance.status import Observed
from brine.instance.validate import define
from brine.watcher import cli, commands, record, settings
from brine.watcher.decide import Case, EndCause, Life

UP = Observed(parse(Spec, {"name": "web1", "admin_state": "up"}))
CRASHED = Case("web1", "web1", UP, Life.DOWN, EndCause.CRASH, said="QEMU was ended by signal 9")
RUNS = Case("web2", "web2", UP, Life.RUNNING, said="running")
UNTOLD = Case("web3", "web3", UP, Life.DOWN, EndCause.UNTOLD, said="QEMU ended by itself")


class Hands:
    """Instances that never change; starts are only counted."""

    def __init__(self, *found: Case | BrineError) -> None:
        self.found = found
        self.started: list[str] = []

    def look(self) -> list[Case | BrineError]:
        return list(self.found)

    def look_again(self, key: str) -> Case | None:
        return next(one for one in self.found if isinstance(one, Case) and one.key == key)

    def alone(self, case: Case) -> AbstractContextManager[None]:
        return nullcontext()

    def set_down(self, case: Case) -> None: ...

    def clean_up(self, case: Case) -> None: ...

    def start(self, case: Case) -> Callable[[], bool]:
        self.started.append(case.name)
        return lambda: True


class Full(io.StringIO):
    """A file on a disk that is full."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(autouse=True)
def node(own_node: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A node of the test's own, whose log is the test's."""
    monkeypatch.setattr(commands, "LOCK", paths.LOCK_DIR / "watcher.lock")
    monkeypatch.setattr(paths, "ETC_DIR", own_node)
    monkeypatch.setattr(record.paused_until, "__kwdefaults__", {"file": own_node / "pause"})
    monkeypatch.setattr(commands, "log_to_journal", lambda: None)
    caplog.set_level(logging.INFO, logger="brine")
    store.FOLDER.mkdir()
    for name in ("web1", "web2", "web3"):
        (store.FOLDER / f"{name}.json").touch()


def run(monkeypatch: pytest.MonkeyPatch, hands: Hands, *arguments: str) -> int:
    """Run ``brine watcher`` with these hands; returns its exit status."""
    monkeypatch.setattr(commands, "Instances", lambda **_: hands)
    parser = brine.Parser(prog="brine watcher")
    cli.COMMAND.configure(parser)
    parsed = parser.parse_args(arguments)
    status: int = brine.execute(parsed)
    return status


def test_all_is_well(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, Hands(RUNS), "run") == 0
    assert capsys.readouterr().out == ""
    assert run(monkeypatch, Hands(RUNS), "run", "--verbose") == 0
    assert capsys.readouterr().out == "web2: running: left as it is\n"
    assert run(monkeypatch, Hands(), "run") == 0
    assert capsys.readouterr().out == "there are no instances\n"


def test_what_crashed_is_started_which_is_logged_once(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    hands = Hands(CRASHED, RUNS)
    assert run(monkeypatch, hands, "run", "--dry-run") == 0
    assert "web1: it crashed: try 1 of 5: would be started\n" in capsys.readouterr().out
    assert (hands.started, caplog.records, restart_counter.load()) == ([], [], {})
    assert run(monkeypatch, hands, "run") == 0
    assert capsys.readouterr().out == "web1: it crashed: try 1 of 5: started\n"
    assert hands.started == ["web1"]
    fields: list[Any] = [vars(record)["fields"] for record in caplog.records]
    assert [(one["BRINE_EVENT"], one["BRINE_TRIES"]) for one in fields] == [("restart-tried", "1")]


def test_what_it_can_not_mend_is_odd_and_told(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert run(monkeypatch, Hands(UNTOLD), "run") == commands.ODD
    assert "nobody knows who did it" in capsys.readouterr().out
    fields: list[Any] = [vars(record)["fields"] for record in caplog.records]
    assert [one["BRINE_EVENT"] for one in fields] == ["odd"]


def test_giving_up_is_logged_once_and_odd_as_long_as_it_holds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    restart_counter.note("web1", Tries(5, time.time()))
    for _ in range(3):
        assert run(monkeypatch, Hands(CRASHED), "run") == commands.ODD
    fields: list[Any] = [vars(record)["fields"] for record in caplog.records]
    assert [one["BRINE_EVENT"] for one in fields] == ["given-up"]


def test_a_fault_fails_and_the_others_are_worked_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hands = Hands(BrineError("web9: its spec is damaged"), CRASHED)
    assert run(monkeypatch, hands, "run", "--json") == 1
    shown = capsys.readouterr()
    assert "brine: error: web9: its spec is damaged" in shown.err
    (one,) = json.loads(shown.out)
    assert one == {
        "name": "web1",
        "state": "down",
        "ended_by": "crash",
        "why": "it crashed: try 1 of 5",
        "actions": ["try"],
        "dry_run": False,
        "odd": False,
        "error": None,
    }


def test_where_nobody_hears_what_is_done_it_is_done_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hands = Hands(CRASHED, replace(CRASHED, key="web3", name="web3"))
    monkeypatch.setattr("sys.stdout", Full())
    with pytest.raises(OSError, match="No space left"):
        run(monkeypatch, hands, "run")
    assert sorted(hands.started) == ["web1", "web3"]


def test_a_pass_corrects_what_the_cluster_is_about_to_hear(
    monkeypatch: pytest.MonkeyPatch, own_node: Path
) -> None:
    """Somebody was killed between the event and the spec."""
    spec = define({"name": "web4", "admin_state": "up"})
    store.save(spec)
    data = {"admin_state": "down", "source": "user"}
    outbox.put(ADMIN_STATE, instance=spec.uuid, name="web4", data=data)
    for verbs, told in ((["run", "--dry-run"], ["down"]), (["run"], ["up"])):
        assert run(monkeypatch, Hands(RUNS), *verbs) == 0
        assert [event.data["admin_state"] for event in outbox.events()] == told


def test_one_pass_at_a_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "_CLEANUP_WAIT_S", 0.1)
    hands = Hands(CRASHED)
    with locked(commands.LOCK, timeout_s=0):
        for verb in ("run", "cleanup"):
            assert run(monkeypatch, hands, verb) == commands.BUSY
            assert "another pass is in progress" in capsys.readouterr().err
        assert run(monkeypatch, hands, "run", "--dry-run") == 0
    assert hands.started == []


def test_an_instance_that_is_gone_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("web2", "gone"):
        restart_counter.note(name, Tries(1, time.time()))
    assert run(monkeypatch, Hands(RUNS), "run", "--dry-run") == 0
    assert restart_counter.load().keys() == {"web2", "gone"}
    assert run(monkeypatch, Hands(RUNS), "run") == 0
    assert restart_counter.load().keys() == {"web2"}


def test_bad_settings_make_no_pass(monkeypatch: pytest.MonkeyPatch, own_node: Path) -> None:
    (own_node / "watcher.toml").write_text("trys = 3\n")
    with pytest.raises(BrineError, match="trys") as caught:
        run(monkeypatch, Hands(CRASHED), "run")
    assert "tries" in str(caught.value) + str(caught.value.hint)


@pytest.mark.parametrize(
    ("text", "fault"),
    [("", ""), ("tries = 0\n", ""), ("interval = 0\n", "interval"), ("x", "toml")],
)
def test_settings_are_checked_before_they_are_put_in_place(
    own_node: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    fault: str,
) -> None:
    file = own_node / "new.toml"
    file.write_text(text)
    monkeypatch.setattr("sys.argv", ["check", str(file)])
    if fault:
        with pytest.raises(SystemExit) as ended:
            settings.main()
        assert ended.value.code == 1
        assert fault in capsys.readouterr().err
    else:
        settings.main()


def test_status_and_forget(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    restart_counter.note("web1", Tries(5, 1.0, given_up=True))
    assert run(monkeypatch, Hands(), "status", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "paused_until": None,
        "tries": {"web1": {"count": 5, "last": 1.0, "given_up": True}},
    }
    for said in ("forgotten: web1\n", "unchanged: web1 had no tries\n"):
        assert run(monkeypatch, Hands(), "forget", "web1") == 0
        assert capsys.readouterr().out == said
