"""The ``brine`` command: how it finds commands, begins and fails; and ``brine kvmd verdicts``."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from brine.common import __version__, cli, paths
from brine.common.cli import Command, add_verb
from brine.common.entry_points import EntryPoint, entry_points
from brine.common.errors import BrineError, UsageError, install_hint, root_hint
from brine.kvmd import cli as kvmd_command
from brine.kvmd import verdict_list
from brine.kvmd.verdict_list import VerdictLine, line_of, parse_since
from brine.vm.markers import MarkerKind, write_marker

NOW = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)


def _fail(_: argparse.Namespace) -> int:
    raise BrineError("the disk is full", hint="make room")


def _succeed(arguments: argparse.Namespace) -> int:
    print("hello", arguments.who)
    return 0


def _configure_greet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("who")
    parser.set_defaults(run=_succeed)


def _read(_: argparse.Namespace) -> int:
    print(sys.stdin.buffer.read())
    return 0


GREET = Command("greet somebody", _configure_greet)
FAIL = Command("fail", lambda parser: parser.set_defaults(run=_fail))
READ = Command("read standard input", lambda parser: parser.set_defaults(run=_read))


@pytest.fixture(autouse=True)
def commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three commands, as if three packages had been installed."""
    names = ("greet", "fail", "read")
    entries = {
        "brine.commands": [EntryPoint(name, f"{__name__}:{name.upper()}") for name in names],
        "brine.verbs": [],
    }
    monkeypatch.setattr(cli, "entry_points", entries.__getitem__)


def test_an_installed_command_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["greet", "you"]) == 0
    assert capsys.readouterr().out == "hello you\n"


def test_help_lists_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert cli.main(["--help"]) == 0
    assert "  greet        greet somebody\n" in capsys.readouterr().out


def add_sing(verbs: Any) -> None:
    verbs.add_parser("sing").set_defaults(run=lambda _: 3)


def add_dance(verbs: Any) -> None:
    verbs.add_parser("dance").set_defaults(run=lambda _: 4)


def test_several_parts_add_verbs_to_a_command_whose_own_part_may_lack(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verbs = [
        EntryPoint("move", f"{__name__}:add_sing"),
        EntryPoint("move", f"{__name__}:add_dance"),
    ]
    entries = {"brine.commands": [], "brine.verbs": verbs}
    monkeypatch.setattr(cli, "entry_points", entries.__getitem__)
    assert [cli.main(["move", verb]) for verb in ("sing", "dance")] == [3, 4]
    assert cli.main([]) == 0
    assert "  move         the steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["gret"], 2, ["there is no command gret", "did you mean greet?"]),
        (["watcher"], 2, ["there is no command watcher", "install the package brine-watcher"]),
        (["--colour"], 2, ["there is no option --colour", "see brine --help"]),
        (["greet"], 2, ["required: who", "see brine greet --help"]),
        (["greet", "a", "b"], 2, ["unrecognized arguments: b", "see brine greet --help"]),
        (["--version", "-v"], 2, ["no other option than --json", "see brine --help"]),
        (["fail"], 1, ["the disk is full", "make room"]),
    ],
)
def test_a_mistake_gets_one_line_and_a_hint(
    arguments: list[str], status: int, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == status
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("brine: error: ")
    assert said[0] in error
    assert hint.startswith("brine: hint: ")
    assert said[1] in hint


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([], "apt install ovmf"),
        (["var/lib/dpkg/info/brine-common.list"], "apt install ovmf"),
        (["var/lib/dpkg/info/brine-common.list", "usr/bin/dnf"], "apt install ovmf"),
        (["var/lib/dpkg/info/dnf.list", "usr/bin/dnf"], "dnf install edk2-ovmf"),
        (["usr/bin/dnf"], "dnf install edk2-ovmf"),
    ],
)
def test_what_installed_brine_is_what_a_hint_names(
    tmp_path: Path, files: list[str], said: str
) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert install_hint(apt="ovmf", dnf="edk2-ovmf", root=str(tmp_path)) == said


@pytest.mark.parametrize(
    "arguments", [["greet", "you"], ["greet", "--help"], ["--help"], ["--version"]]
)
def test_output_that_can_not_be_written_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as left:
            cli.main(arguments)
    assert left.value.code == 1
    assert capsys.readouterr().err == (
        "brine: error: output can't be written: No space left on device\n"
    )


@pytest.mark.parametrize(("user", "hint"), [(0, None), (1000, "be root")])
def test_only_who_is_not_root_is_told_to_be_it(
    monkeypatch: pytest.MonkeyPatch, user: int, hint: str | None
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert root_hint(PermissionError()) == hint
    assert root_hint(FileNotFoundError()) is None


def test_input_that_is_closed_is_empty(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)  # as Python has it then
    assert cli.main(["read"]) == 0
    assert capsys.readouterr().out == "b''\n"


def test_a_verdict_is_read_from_its_journal_entry() -> None:
    entry = {
        "__REALTIME_TIMESTAMP": NOW,
        "_SOURCE_REALTIME_TIMESTAMP": NOW,
        "BRINE_INSTANCE": b"web\xff",
        "BRINE_VERDICT": "user",
        "BRINE_CAUSE": "guest-shutdown",
        "BRINE_EVENT_TIME_USEC": int(NOW.timestamp() * 1e6) - 1500,
    }
    line = line_of(entry)
    assert line == VerdictLine(
        "2026-05-04T12:00:00.000000+00:00", "web\udcff", "user", "guest-shutdown", 1.5
    )
    del entry["BRINE_EVENT_TIME_USEC"]
    assert line_of(entry).delay_ms is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90s", "2026-05-04T11:58:30+00:00"),
        ("2h", "2026-05-04T10:00:00+00:00"),
        ("3 d", "2026-05-01T12:00:00+00:00"),
        ("today", "2026-05-04T00:00:00+00:00"),
        ("yesterday", "2026-05-03T00:00:00+00:00"),
        ("2026-01-31T12:30+02:00", "2026-01-31T10:30:00+00:00"),
    ],
)
def test_a_point_in_time_is_understood(text: str, expected: str) -> None:
    assert parse_since(text, NOW).astimezone(UTC).isoformat() == expected


@pytest.mark.parametrize("text", ["", "someday", "5 moons", "2026-13-01", "-1h", "9" * 400 + "d"])
def test_no_point_in_time_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="not a point in time"):
        parse_since(text, NOW)


def test_verdicts_are_shown_as_a_table_and_as_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict_list, "_require_journal", lambda: None)
    lines = [
        VerdictLine("2026-05-04T12:00:00.000000+00:00", "web1", "user", "guest-shutdown", 0.51),
        VerdictLine("2026-05-04T12:00:01.000000+00:00", "db", "crash", "eof", None),
    ]
    monkeypatch.setattr(verdict_list, "read_verdicts", lambda **_: lines)
    parser = argparse.ArgumentParser()
    kvmd_command.COMMAND.configure(parser)

    arguments = parser.parse_args(["verdicts", "--json"])
    assert cli.execute(arguments) == 0
    assert json.loads(capsys.readouterr().out)[1] == {
        "time": "2026-05-04T12:00:01.000000+00:00",
        "instance": "db",
        "verdict": "crash",
        "cause": "eof",
        "delay_ms": None,
    }

    arguments = parser.parse_args(["verdicts"])
    assert cli.execute(arguments) == 0
    head, web1, db = capsys.readouterr().out.splitlines()
    assert head.split() == ["TIME", "INSTANCE", "VERDICT", "CAUSE", "DELAY"]
    assert web1.split()[2:] == ["web1", "user", "guest-shutdown", "0.5", "ms"]
    assert db.split()[2:] == ["db", "crash", "eof", "-"]


def test_a_verdict_that_the_journal_has_lost_is_read_where_the_daemons_settings_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "ETC_DIR", tmp_path)
    (tmp_path / "kvmd.toml").write_text(f'marks_dir = "{tmp_path}"\n')
    ended = int(NOW.timestamp() * 1e6)
    facts: dict[str, Any] = {"who": "user", "cause": "guest-shutdown", "time_usec": ended}
    write_marker(
        MarkerKind.VERDICT, "web1.test", run="r1", folder=tmp_path, given_usec=ended + 500, **facts
    )
    (line,) = verdict_list.read_verdicts(instances=["web1.test"], since=None)
    assert (line.verdict, line.cause, line.delay_ms) == ("user", "guest-shutdown", 0.5)
    (tmp_path / "kvmd.toml").write_text("marks_dir = 1\n")
    assert verdict_list.read_verdicts(instances=["web1.test"], since=None) == []


def test_a_verdict_is_listed_once_though_its_instance_has_another_name_by_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "ETC_DIR", tmp_path)
    (tmp_path / "kvmd.toml").write_text(f'marks_dir = "{tmp_path}"\n')
    given, run = int(NOW.timestamp() * 1e6), "0" * 31 + "1"
    entry: dict[str, Any] = {
        "BRINE_INSTANCE": "old.test",
        "BRINE_VERDICT": "user",
        "BRINE_CAUSE": "eof",
    }
    entry |= {"BRINE_GIVEN_USEC": str(given), "BRINE_RUN": run}
    entry |= {"_SYSTEMD_UNIT": "brine-kvmd.service", "_UID": 0}
    entries = [{**entry, "__REALTIME_TIMESTAMP": NOW}]
    monkeypatch.setattr(verdict_list, "is_from", lambda *_: True)
    monkeypatch.setattr("systemd.journal.Reader", lambda: JournalOf(entries))
    facts: dict[str, Any] = {"who": "user", "cause": "eof", "given_usec": given}
    write_marker(MarkerKind.VERDICT, "new.test", run=run, folder=tmp_path, **facts)
    (line,) = verdict_list.read_verdicts(since=None)
    assert line.instance == "old.test"
    # Another run, whose verdict came at the same time.
    write_marker(MarkerKind.VERDICT, "other.test", run="r2", folder=tmp_path, **facts)
    assert len(verdict_list.read_verdicts(since=None)) == 2


class JournalOf(list[dict[str, Any]]):
    """A journal of these entries, whatever is asked for."""

    def add_match(self, **_: object) -> None:
        pass


_TEXT = """\
[console_scripts]
one = a.b:main

[brine.commands]
# a comment
nic = brine.hotplug.cli:NIC
tap=brine.hotplug.cli:TAP [extra]
"""


def test_a_groups_entries_are_found_in_whatever_kind_of_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, kind in enumerate(("dist-info", "egg-info")):
        folder = tmp_path / f"{number}" / f"brine_{number}-1.{kind}"
        folder.mkdir(parents=True)
        (folder / "entry_points.txt").write_text(_TEXT.replace("nic =", f"nic{number} ="))
    (tmp_path / "0/other-1.dist-info").mkdir()
    (tmp_path / "0/odd-1.dist-info").mkdir()
    (tmp_path / "0/odd-1.dist-info/entry_points.txt").write_bytes(b"\xff")
    monkeypatch.setattr(sys, "path", [str(tmp_path / name) for name in ("0", "1", "missing")])
    assert entry_points("brine.commands") == [
        EntryPoint("nic0", "brine.hotplug.cli:NIC"),
        EntryPoint("tap", "brine.hotplug.cli:TAP"),
        EntryPoint("nic1", "brine.hotplug.cli:NIC"),
    ]
    assert entry_points("brine.no-such-group") == []


def test_several_parts_add_verbs_to_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [f"brine.part{number}.cli:add_verbs" for number in range(2)]
    for number, value in enumerate(values):
        folder = tmp_path / f"brine_{number}-1.dist-info"
        folder.mkdir()
        text = f"[brine.verbs]\nnode = {value}\n[brine.commands]\nnode = {value}\n"
        (folder / "entry_points.txt").write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path)])
    assert [one.value for one in entry_points("brine.verbs")] == values
    assert [one.value for one in entry_points("brine.commands")] == values[:1]


def _configure_above(verbs: Any) -> None:
    add_verb(verbs, "wave", f"{__name__}:_wave", "wave to him").add_argument("--twice")
    verbs.choices["say"].add_argument("--aloud", help="so that all hear it")


def _wave(arguments: argparse.Namespace) -> int:
    print("waved", arguments.twice)
    return 0


def _configure_polite(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    add_verb(verbs, "say", f"{__name__}:_wave", "say it")


POLITE = Command("be polite", _configure_polite)


def test_a_part_adds_verbs_and_options_to_a_command_below_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = {
        "brine.commands": [EntryPoint("polite", f"{__name__}:POLITE")],
        "brine.verbs": [EntryPoint("polite", f"{__name__}:_configure_above")],
    }
    monkeypatch.setattr(cli, "entry_points", entries.__getitem__)
    assert cli.main(["polite", "wave", "--twice", "yes"]) == 0
    assert capsys.readouterr().out == "waved yes\n"
    for command, shown in (["polite"], "wave to him"), (["polite", "say"], "so that all hear it"):
        with pytest.raises(SystemExit):
            cli.main([*command, "--help"])
        assert shown in capsys.readouterr().out


def test_each_installed_part_has_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("brine_common-9.dist-info", "brine_kvmd-9.1.egg-info", "other_kvmd-1.dist-info"):
        (tmp_path / name).mkdir()
    (tmp_path / "later/brine_kvmd-8.dist-info").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "later")])
    assert cli.main(["--version", "--json"]) == 0
    assert cli.main(["--version"]) == 0
    as_json, plain = capsys.readouterr().out.splitlines()
    assert json.loads(as_json) == {"version": __version__, "parts": {"kvmd": "9.1"}}
    assert plain == f"brine {__version__}"


@pytest.mark.parametrize("group", ["pytest11", "brine.commands"])
def test_it_finds_what_the_standard_library_finds(group: str) -> None:
    theirs = {
        (one.name, one.value.partition(" [")[0]) for one in metadata.entry_points(group=group)
    }
    assert {(one.name, one.value) for one in entry_points(group)} == theirs


_SCRIPT = """
import signal
signal.signal(signal.SIGINT, signal.{before})
from brine.common import cli
from brine.common import main as program
seen = [signal.getsignal(signal.SIGINT)]
def main(*, ahead):
    seen.append(signal.getsignal(signal.SIGINT))
    return 7
cli.main = main
status = program.main()
seen.append(signal.getsignal(signal.SIGINT))
print(status, *(getattr(each, "name", "heard") for each in seen))
"""


@pytest.mark.parametrize(
    ("before", "seen"),
    [
        ("default_int_handler", "7 SIG_DFL heard SIG_DFL"),
        ("SIG_IGN", "7 SIG_IGN SIG_IGN SIG_IGN"),
    ],
)
def test_it_is_an_exception_only_while_somebody_catches_that(before: str, seen: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-P", "-c", _SCRIPT.format(before=before)]
    done = subprocess.run(
        command, capture_output=True, check=True, text=True, timeout=60, env=environment
    )
    assert done.stdout.strip() == seen


_DROPPED = """
import signal, time, weakref
from brine.common import cli
from brine.common import main as program
class Thing: pass
def main(*, ahead):
    cli.undo_when_told_to_end()
    thing = Thing()
    reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.{name}))
    try:
        del thing
        time.sleep(30)
    except (KeyboardInterrupt, SystemExit) as end:
        return print("undone", type(end).__name__) or 9
    return 0
cli.main = main
program.run()
"""


@pytest.mark.parametrize(
    ("name", "error"), [("SIGINT", "KeyboardInterrupt"), ("SIGTERM", "SystemExit")]
)
def test_a_signal_in_the_callback_of_a_weak_reference_ends_a_command(name: str, error: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-P", "-c", _DROPPED.format(name=name)]
    done = subprocess.run(
        command, capture_output=True, check=False, text=True, timeout=60, env=environment
    )
    assert (done.returncode, done.stdout, done.stderr) == (9, f"undone {error}\n", "")


_ENDING = """
import atexit, sys, threading, time
from brine.common import cli
from brine.common import main as program
atexit.register(print, "taken apart")
def work():
    time.sleep(0.5)
    print("worked")
def main(*, ahead):
    if {has_thread}:
        threading.Thread(target=work).start()
    print("said")
    print("told", file=sys.stderr)
    return 7
cli.main = main
program.run()
"""


@pytest.mark.parametrize(
    ("has_thread", "said"), [(False, ["said"]), (True, ["said", "worked", "taken apart"])]
)
def test_python_is_taken_apart_only_if_a_thread_is_at_work(
    has_thread: bool, said: list[str]
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-P", "-c", _ENDING.format(has_thread=has_thread)]
    done = subprocess.run(
        command, capture_output=True, check=False, text=True, timeout=60, env=environment
    )
    assert (done.returncode, done.stdout.split("\n")[:-1], done.stderr) == (7, said, "told\n")
