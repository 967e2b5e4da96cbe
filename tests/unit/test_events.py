"""Programs that are told of crashes: which are run, and what they are told."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from brine.common import cli, event_follower, event_programs, node_event, paths
from brine.common.entry_points import EntryPoint
from brine.common.event_follower import MOST_IN_MINUTE, Dispatcher
from brine.common.event_programs import MOST_PROGRAMS, ProgramError
from brine.common.node_event import NodeEvent, event_kinds, event_of, trial_event
from brine.kvmd import messages as kvmd
from brine.kvmd.verdict import Who
from brine.watcher import messages as watcher
from tree_entry_points import of_tree

Run = Callable[..., tuple[int, str, str]]
CRASH = kvmd.VERDICTS[Who.CRASH]
STRANGER = 4711


@pytest.fixture
def folder(own_node: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of programs, where all parts are installed."""
    found = own_node / "events.d"
    found.mkdir()
    monkeypatch.setattr(paths, "EVENT_PROGRAMS_DIR", found)
    monkeypatch.setattr(paths, "EVENTS_DIR", own_node / "events")
    monkeypatch.setattr(node_event, "entry_points", of_tree)
    # Others may write the folders above those of a test.
    monkeypatch.setattr("brine.common.script_folder.fault_of_writers", _fault_of_writers)
    return found


def _fault_of_writers(path: Path) -> str | None:
    return f"others than root may write {path}" if path.stat().st_mode & 0o022 else None


@pytest.fixture
def brine_events(brine: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    known = {"brine.commands": [EntryPoint("events", "brine.common.cli:EVENTS")]}
    monkeypatch.setattr(cli, "entry_points", lambda group: known.get(group, []))
    return lambda *arguments: brine(*arguments, noun="events")


def put(folder: Path, name: str, mode: int = 0o755) -> None:
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(mode)


def entry(message_id: str, **fields: Any) -> dict[str, Any]:
    """A record as systemd's journal.Reader has it."""
    return {
        "MESSAGE_ID": uuid.UUID(message_id),
        "MESSAGE": "web1: ended: crash, eof",
        "_UID": 0,
        "__REALTIME_TIMESTAMP": datetime(2026, 7, 25, 17, 20, tzinfo=UTC),
        "__CURSOR": "s=1;i=2",
        "BRINE_INSTANCE": "web1",
        "BRINE_EVENT": "verdict",
        "BRINE_CAUSE": "eof",
        **fields,
    }


def test_an_event_has_the_facts_of_its_record(folder: Path) -> None:
    kinds = event_kinds()
    found = event_of(entry(CRASH.id), kinds)
    assert found
    told = json.loads(json.dumps(found.to_json()))
    assert told["event"] == "crash"
    assert told["instance"] == "web1"
    assert told["time"] == "2026-07-25T17:20:00.000+00:00"
    assert told["facts"] == {"cause": "eof"}
    again = event_of(entry(CRASH.id), kinds)
    assert again
    assert again.id == found.id
    later = event_of(entry(CRASH.id, __CURSOR="s=1;i=3"), kinds)
    assert later
    assert later.id != found.id
    names = {kind.name for kind in kinds.values()}
    assert {"crash", "halted", "given-up"} <= names


@pytest.mark.parametrize(
    "record",
    [
        entry(CRASH.id, _UID=STRANGER),
        entry(watcher.GIVEN_UP.id, _UID=STRANGER),
        entry(kvmd.VERDICTS[Who.USER].id),
        {**entry(CRASH.id), "MESSAGE_ID": None},
        {"_UID": 0},
    ],
)
def test_a_record_of_a_stranger_or_of_another_kind_is_no_event(
    folder: Path, record: dict[str, Any]
) -> None:
    assert event_of(record, event_kinds()) is None


def test_hostile_fields_stay_one_line_of_text(folder: Path) -> None:
    hostile = {"BRINE_INSTANCE": b"a\xff\n$(id)", "BRINE_CAUSE": ["x" * 5000, "y"], "MESSAGE": "\n"}
    found = event_of(entry(CRASH.id, **hostile), event_kinds())
    assert found
    text = json.dumps(found.to_json())
    assert "\n" not in found.instance + found.text
    assert len(text) < 4000


def test_programs_that_others_may_change_or_can_not_be_run_are_listed_with_the_reason(
    brine_events: Run, folder: Path
) -> None:
    for name in ("mail", "backup~", "note.txt", ".hidden"):
        put(folder, name)
    put(folder, "open", 0o777)
    put(folder, "own", 0o700)
    put(folder, "text", 0o644)
    (folder / "gone").symlink_to("nothing")
    status, out, _ = brine_events("list", "--json")
    rows = {Path(one["program"]).name: one["fault"] for one in json.loads(out)["programs"]}
    assert status == 1
    assert rows.keys() == {"mail", "open", "own"}
    assert rows["mail"] is None
    assert "others" in rows["open"]
    assert "chmod" in rows["own"]
    for number in range(MOST_PROGRAMS):
        put(folder, f"a{number}")
    out = brine_events("list", "--json")[1]
    rows = {Path(one["program"]).name: one["fault"] for one in json.loads(out)["programs"]}
    assert "more than" in rows["mail"]


class Ran:
    """Programs that are only counted; some of them fail."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.faults: dict[str, ProgramError] = {}

    def __call__(self, event: NodeEvent, programs: list[str]) -> list[ProgramError]:
        self.told += [(event.id, program) for program in programs]
        return [self.faults[program] for program in programs if program in self.faults]


@pytest.fixture
def ran(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    counted = Ran()
    monkeypatch.setattr(event_follower, "run_programs", counted)
    return counted


def test_a_program_that_hangs_is_left_out_and_the_others_are_told(
    ran: Ran, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(folder, "hangs")
    put(folder, "mail")
    put(folder, "open", 0o777)
    ran.faults["hangs"] = ProgramError("hangs", "it took longer than 60 s", has_hung=True)
    dispatcher = Dispatcher()
    events = [trial_event() for _ in range(3)]
    for event in events:
        dispatcher.take(event)
    assert [program for _, program in ran.told] == ["hangs", "mail", "mail", "mail"]
    told = [record for record in caplog.records if hasattr(record, "fields")]
    assert [record.__dict__["fields"]["BRINE_EVENT"] for record in told] == [
        "event-program-refused",
        "event-program-failed",
    ]
    assert all("\n" not in record.getMessage() for record in told)


def test_old_events_and_a_flood_are_left_out_and_counted(
    ran: Ran, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder, "mail")
    dispatcher = Dispatcher()
    now = trial_event()
    old = (datetime.now(UTC) - timedelta(hours=2)).isoformat()
    dispatcher.take(NodeEvent("1", "crash", old, "n", "web1", "", {}))
    assert ran.told == []
    for _ in range(MOST_IN_MINUTE + 20):
        dispatcher.take(now)
    assert len(ran.told) == MOST_IN_MINUTE
    later = time.monotonic() + 61
    monkeypatch.setattr(time, "monotonic", lambda: later)
    dispatcher.tell_left_out()
    dispatcher.tell_left_out()
    (record,) = caplog.records
    assert record.__dict__["fields"]["BRINE_COUNT"] == "21"
    dispatcher.take(now)
    assert len(ran.told) == MOST_IN_MINUTE + 1


@pytest.mark.parametrize(
    ("result", "status", "text", "has_hung"),
    [
        ("timeout", 0, "60 s", True),
        ("exit-code", 3, "status 3", False),
        ("signal", 11, "signal 11", False),
        ("oom-kill", 9, "memory", False),
        ("resources", 0, "resources", False),
        ("success", 0, "Unit not found", False),
    ],
)
def test_why_a_program_failed_is_told_in_one_line(
    folder: Path,
    result: str,
    status: int,
    text: str,
    has_hung: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    systemctl, asked = folder.parent / "bin/systemctl", folder.parent / "asked"
    systemctl.parent.mkdir()
    systemctl.write_text(
        f"#!/bin/sh\necho $1 >>{asked}\n"
        f'[ "$1" != show ] || printf "Result={result}\nExecMainStatus={status}\n"\n'
        '[ "$1" != start ] || { echo "Failed: Unit not found.\nAnd more." >&2; exit 1; }\n'
    )
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{systemctl.parent}:{os.environ['PATH']}")
    (error,) = event_programs.run_programs(trial_event(), ["a"])
    assert text in str(error)
    assert "\n" not in str(error)
    assert error.has_hung is has_hung
    assert asked.read_text().split() == ["start", "show", "reset-failed"]
    assert list(paths.EVENTS_DIR.iterdir()) == []


class FakeJournal:
    """A reader of records with these numbers. As that of systemd 257, it finds nothing after the
    end, whatever comes later."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = list(numbers)
        self._at: float | None = None  # None is the end

    def seek_tail(self) -> None:
        self._at = None

    def seek_head(self) -> None:
        self._at = -1

    def seek_cursor(self, cursor: str) -> None:
        self._at = int(cursor) - 0.5

    def get_previous(self) -> dict[str, str] | None:
        before = [one for one in self.numbers if self._at is None or one < self._at]
        return self._found(max(before, default=None))

    def get_next(self) -> dict[str, str] | None:
        after = [one for one in self.numbers if self._at is not None and one > self._at]
        return self._found(min(after, default=None))

    def _found(self, number: int | None) -> dict[str, str] | None:
        if number is None:
            return None
        self._at = number
        return {"__CURSOR": str(number)}


@pytest.fixture
def cursor(own_node: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = own_node / "events.cursor"
    monkeypatch.setattr(paths, "EVENTS_CURSOR_FILE", file)
    return file


@pytest.mark.parametrize(
    ("kept", "there", "first"),
    [
        ("", [], 7),  # the first event of a new node
        ("", [5], 7),
        ("5", [5], 7),
        ("4", [5], 5),  # what the journal has lost
        ("4", [], 7),
        ("x", [5], 7),
    ],
)
def test_no_event_is_lost_at_a_start(cursor: Path, kept: str, there: list[int], first: int) -> None:
    if kept:
        cursor.write_text(kept)
    reader = FakeJournal(*there)
    event_follower._Place().seek(reader)
    reader.numbers.append(7)
    entry = reader.get_next()
    assert entry
    assert entry["__CURSOR"] == str(first)


def test_a_full_disk_ends_no_follower(cursor: Path, caplog: pytest.LogCaptureFixture) -> None:
    cursor.mkdir()  # which can't be replaced
    place = event_follower._Place()
    for number in range(3):
        place.keep({"__CURSOR": str(number)})
    assert len([one for one in caplog.records if "can't be written" in one.message]) == 1
    cursor.rmdir()
    place.keep({"__CURSOR": "4"})
    assert cursor.read_text() == "4\n"
