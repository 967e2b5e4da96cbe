"""`brine watcher`: what it prints, what it logs, and its exit statuses."""

from __future__ import annotations

import errno
import io
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from brine.common import cli as brine
from brine.common import outbox, paths
from brine.common.errors import BrineError, UsageError
from brine.common.locks import locked
from brine.common.times import iso_time
from brine.instance import store, supervisor
from brine.instance.intent import ADMIN_STATE
from brine.instance.observe import Observed
from brine.instance.unit import Active, Unit
from brine.instance.validate import completed
from brine.instance.xen.xl import Domain
from brine.vm.spec import Spec, parse
from brine.watcher import cli, commands, restart_counter, settings
from brine.watcher.passes import Instances
from brine.watcher.restart_counter import Tries
from unit.runs import observed

Run = Callable[..., tuple[int, str, str]]

UP = parse(Spec, {"name": "web1", "admin_state": "up"})
KILLED = Unit("web1", Active.FAILED, result="signal", exit_status=9, invocation="a", since_us=1)
CRASHED = observed(UP, KILLED, has_run=True)
RUNS = observed(replace(UP, name="web2"), Unit("web2", Active.ACTIVE))
UNTOLD = observed(replace(UP, name="web3"), has_run=True)


class Unchanging(Instances):
    """Instances that never change; starts are only counted."""

    def __init__(self, *found: Observed | BrineError) -> None:
        super().__init__(timeout_s=1)
        self.found = found
        self.started: list[str] = []

    def look(self) -> Iterator[Observed | BrineError]:
        yield from self.found

    def look_again(self, seen: Observed | Domain) -> Observed | None:
        assert isinstance(seen, Observed)
        return seen

    def start(self, seen: Observed | Domain) -> Callable[[], bool]:
        self.started.append(seen.name)
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
    monkeypatch.setattr(commands, "log_pass", lambda: None)
    caplog.set_level(logging.INFO, logger="brine")
    paths.SPECS_DIR.mkdir()
    for name in ("web1", "web2", "web3"):
        (paths.SPECS_DIR / f"{name}.json").touch()


def note(name: str, *tries: Any, **others: Any) -> None:
    with restart_counter.changed() as counters:
        counters[name] = Tries(*tries, **others)


@pytest.fixture
def watcher(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``brine watcher`` with these instances: status, output, errors."""

    def run(instances: Instances, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(commands, "Instances", lambda **_: instances)
        parser = brine.Parser(prog="brine watcher")
        cli.COMMAND.configure(parser)
        status = brine.execute(parser.parse_args(arguments))
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return run


def test_all_is_well(watcher: Run) -> None:
    assert watcher(Unchanging(RUNS), "run") == (0, "", "")
    told = "web2: running: left as it is\n"
    assert watcher(Unchanging(RUNS), "run", "--verbose") == (0, told, "")
    assert watcher(Unchanging(), "run") == (0, "there are no instances\n", "")


def test_what_crashed_is_started_which_is_logged_once(
    watcher: Run, caplog: pytest.LogCaptureFixture
) -> None:
    instances = Unchanging(CRASHED, RUNS)
    status, output, _ = watcher(instances, "run", "--dry-run")
    assert (status, "web1: it crashed: try 1 of 5: would be started\n" in output) == (0, True)
    assert (instances.started, caplog.records, restart_counter.load()) == ([], [], {})
    assert watcher(instances, "run") == (0, "web1: it crashed: try 1 of 5: started\n", "")
    assert instances.started == ["web1"]
    fields: list[Any] = [vars(record)["fields"] for record in caplog.records]
    assert [(one["BRINE_EVENT"], one["BRINE_TRIES"]) for one in fields] == [("restart-tried", "1")]


def test_what_it_can_not_mend_is_odd_and_told(
    watcher: Run, caplog: pytest.LogCaptureFixture
) -> None:
    status, output, _ = watcher(Unchanging(UNTOLD), "run")
    assert status == commands.ODD
    assert "the cause is not known" in output
    fields: list[Any] = [vars(record)["fields"] for record in caplog.records]
    assert [one["BRINE_EVENT"] for one in fields] == ["odd"]


def test_a_fault_fails_and_the_others_are_worked_on(watcher: Run) -> None:
    instances = Unchanging(BrineError("web9: its spec is damaged"), CRASHED)
    status, output, errors = watcher(instances, "run", "--json")
    assert status == 1
    assert "brine: error: web9: its spec is damaged" in errors
    assert json.loads(output) == [
        {
            "name": "web1",
            "state": "down",
            "ended_by": "crash",
            "why": "it crashed: try 1 of 5",
            "actions": ["try"],
            "dry_run": False,
            "odd": False,
            "error": None,
        }
    ]


def test_where_nobody_hears_what_is_done_it_is_done_all_the_same(
    watcher: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    instances = Unchanging(CRASHED, replace(CRASHED, spec=replace(UP, name="web3")))
    monkeypatch.setattr("sys.stdout", Full())
    with pytest.raises(OSError, match="No space left"):
        watcher(instances, "run")
    assert sorted(instances.started) == ["web1", "web3"]


def test_a_pass_corrects_what_the_cluster_is_about_to_hear(watcher: Run) -> None:
    """A command was killed between the event and the spec."""
    spec = completed({"name": "web4", "admin_state": "up"})
    store.save(spec)
    data = {"admin_state": "down", "source": "user"}
    outbox.put(ADMIN_STATE, instance=spec.uuid, name="web4", data=data)
    for verbs, told in ((["run", "--dry-run"], ["down"]), (["run"], ["up"])):
        assert watcher(Unchanging(RUNS), *verbs)[0] == 0
        assert [event.data["admin_state"] for event in outbox.events()] == told


def test_one_pass_at_a_time(watcher: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_CLEANUP_WAIT_S", 0.1)
    instances = Unchanging(CRASHED)
    with locked(commands.LOCK, timeout_s=0):
        for verb in ("run", "cleanup"):
            status, _, errors = watcher(instances, verb)
            assert status == commands.BUSY
            assert "another pass is in progress" in errors
        assert watcher(instances, "run", "--dry-run")[0] == 0
    assert instances.started == []


def test_an_instance_that_is_gone_is_forgotten(watcher: Run) -> None:
    for name in ("web2", "gone"):
        note(name, 1, time.time())
    assert watcher(Unchanging(RUNS), "run", "--dry-run")[0] == 0
    assert restart_counter.load().keys() == {"web2", "gone"}
    assert watcher(Unchanging(RUNS), "run")[0] == 0
    assert restart_counter.load().keys() == {"web2"}


def test_bad_settings_make_no_pass(watcher: Run, own_node: Path) -> None:
    (own_node / "watcher.toml").write_text("trys = 3\n")
    with pytest.raises(BrineError, match="trys") as caught:
        watcher(Unchanging(CRASHED), "run")
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


def test_status_and_forget(watcher: Run) -> None:
    note("web1", 5, 1.0, given_up=True)
    status, output, _ = watcher(Unchanging(), "status", "--json")
    assert (status, json.loads(output)) == (
        0,
        {
            "paused_until": None,
            "tries": {"web1": {"count": 5, "last": "1970-01-01T00:00:01+00:00", "given_up": True}},
            "volume_faults": [],
        },
    )
    for said in ("forgotten: web1\n", "unchanged: web1 had no tries\n"):
        assert watcher(Unchanging(), "forget", "web1") == (0, said, "")


# The pause.

NOW = 1_800_000_000.0


def test_a_pause_ends_by_itself_or_by_a_word(
    watcher: Run, own_node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW)
    assert restart_counter.paused_until(NOW) is None
    assert watcher(Unchanging(), "pause", "2h")[0] == 0
    assert (own_node / "pause").read_text() == "1800007200\n"  # as Ganeti's watcher has it
    assert restart_counter.paused_until(NOW + 7199) == NOW + 7200
    assert restart_counter.paused_until(NOW + 7200) is None
    assert watcher(Unchanging(), "resume")[0] == 0
    assert not (own_node / "pause").exists()


def test_others_are_told_what_the_watcher_does_not_start(
    watcher: Run, own_node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note("web1", 5, 1.0, given_up=True)
    with monkeypatch.context() as patch:
        patch.setattr(supervisor, "entry_points", lambda _group: [])
        assert supervisor.supervisor().reasons_to_wait()("web1") is None  # there is no watcher
        assert supervisor.supervisor().attempts() == {}
    reason = supervisor.supervisor().reasons_to_wait()
    assert reason("web2") is None
    assert "given it up after 5 tries; brine instance start web1" in (reason("web1") or "")
    watcher(Unchanging(), "pause", "1h")
    assert "the watcher is paused until " in (
        restart_counter.WATCHER.reasons_to_wait()("web2") or ""
    )
    (own_node / "pause").write_text("tomorrow")
    assert "is unknown" in (restart_counter.WATCHER.reasons_to_wait()("web2") or "")


def test_while_it_is_paused_nothing_is_done(watcher: Run) -> None:
    instances = Unchanging(CRASHED)
    assert watcher(instances, "pause", "1h")[0] == 0
    for options, out in (([], ""), (["--json"], "[]\n")):
        status, output, errors = watcher(instances, "run", *options)
        assert (status, output) == (0, out)
        assert errors.startswith("paused until ")
    assert instances.started == []
    for said in ("resumed\n", "unchanged: it was not paused\n"):
        assert watcher(instances, "resume") == (0, said, "")


@pytest.mark.parametrize(
    "content", [b"", b"tomorrow", b"\xff", b"1 2", b"inf", b"nan", b"1e20", b"1831708800", b"2e11"]
)
def test_a_pause_that_says_nothing_or_takes_years_is_an_error(
    own_node: Path, content: bytes
) -> None:
    (own_node / "pause").write_bytes(content)
    with pytest.raises(BrineError) as caught:
        restart_counter.paused_until(NOW)
    assert caught.value.hint == "brine watcher resume removes it"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("90s", 90), ("30m", 1800), ("5min", 300), ("2h", 7200), (" 3d", 259200), ("1w", 604800)),
        ("365d", 365 * 86400),
    ],
)
def test_a_pause_takes_as_long_as_it_was_told_to(
    watcher: Run, monkeypatch: pytest.MonkeyPatch, text: str, seconds: int
) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW)
    status, output, _ = watcher(Unchanging(), "pause", "--json", text)
    assert (status, json.loads(output)) == (0, {"paused_until": iso_time(NOW + seconds)})
    # Also after a clock was set back a little.
    assert restart_counter.paused_until(NOW - 3600) == NOW + seconds


@pytest.mark.parametrize("text", ["", "2", "0h", "2 years", "400d", "h", "1e3s", "²h"])
def test_what_is_no_length_of_time(watcher: Run, text: str) -> None:
    with pytest.raises(UsageError, match="not a length of time"):
        watcher(Unchanging(), "pause", text)
