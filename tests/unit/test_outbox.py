"""Events for the cluster: each is kept until it is acknowledged, and reported once."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from brine.common import paths
from brine.common.files import unfinished
from brine.common.outbox import OutboxError, acknowledge, events, put
from brine.common.outbox_commands import acknowledge_events


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The node's own outbox."""
    monkeypatch.setattr(paths, "OUTBOX_DIR", tmp_path / "outbox")
    (tmp_path / "outbox").mkdir()
    return tmp_path / "outbox"


DOWN = {"admin_state": "down", "source": "user"}


def stored(folder: Path, number: int, instance: str) -> Path:
    """An event in its file, as an earlier version or another process has left it."""
    event_id = f"{number:020}-{number:08x}"
    event = {"id": event_id, "time": float(number), "kind": "admin-state", "instance": instance}
    file = folder / f"{event_id}.json"
    file.write_text(json.dumps({**event, "name": instance, "data": DOWN}))
    return file


def test_events_stay_in_order_until_they_are_acknowledged(folder: Path) -> None:
    folder.rmdir()
    assert list(events()) == []
    first = put("admin-state", instance="uuid-1", name="web1", data=DOWN)
    second = put("admin-state", instance="uuid-2", name="web2", data=DOWN)
    assert list(events()) == [first, second]
    assert acknowledge(first.id)
    assert not acknowledge(first.id)
    assert list(events()) == [second]
    assert folder.stat().st_mode & 0o077 == 0


def test_the_same_again_is_the_same_event_and_after_another_one_a_new_one() -> None:
    def say(state: str) -> str:
        data = {"admin_state": state}
        return put("admin-state", instance="uuid-1", name="web1", data=data).id

    first = say("down")
    assert say("down") == first
    second, third = say("up"), say("down")
    assert len({first, second, third}) == 3
    assert [event.id for event in events()] == [third]
    assert not acknowledge(second)  # what stands for it is not told yet
    # Acknowledged is told: if it happens once more, that is news.
    for event in list(events()):
        acknowledge(event.id)
    assert say("down") not in (first, second, third)


def test_a_clock_that_is_set_back_changes_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    first = put("admin-state", instance="uuid-1", name="web1", data=DOWN)
    monkeypatch.setattr("time.time_ns", lambda: 10**18)
    second = put("admin-state", instance="uuid-2", name="web2", data={})
    third = put("admin-state", instance="uuid-1", name="web1", data={})
    assert first.id < second.id < third.id
    assert list(events()) == [second, third]


def test_an_outbox_of_an_earlier_version_is_folded(folder: Path) -> None:
    for number in range(3000):
        stored(folder, number, f"uuid-{number % 3}")
    told = list(events())
    assert [event.time for event in told] == [2997, 2998, 2999]
    assert {file.stem for file in folder.iterdir()} == {event.id for event in told}
    assert acknowledge(told[-1].id)
    assert list(events()) == told[:-1]


def test_an_event_that_can_not_be_written_leaves_the_earlier_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = put("admin-state", instance="uuid-1", name="web1", data=DOWN)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OutboxError, match="No space left"):
            put("admin-state", instance="uuid-1", name="web1", data={})
    assert list(events()) == [first]


def test_what_is_no_event_or_can_not_be_read_hides_no_other(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / f"{0:020}-00000000.json").mkdir()
    event = put("admin-state", instance="uuid-1", name="web1", data=DOWN)
    unfinished(folder / f"{event.id}.json").write_text("{")  # of a killed writer
    (folder / "notes.json").write_text("an administrator's")
    caplog.clear()
    assert list(events()) == [event]
    assert "can't be read: Is a directory; left out" in caplog.text


WHOLE = {"id": "ID", "time": 1.0, "kind": "k", "instance": "u", "name": "n", "data": {}}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"id": 1}',
        json.dumps({**WHOLE, "surprise": True}),
        json.dumps({**WHOLE, "id": "another"}),
        json.dumps({**WHOLE, "time": "x"}),
        json.dumps({**WHOLE, "instance": None}),
        json.dumps({**WHOLE, "data": 5}),
        json.dumps({**WHOLE, "time": 1e20}),
        json.dumps({**WHOLE, "time": float("nan")}),
    ],
)
def test_a_damaged_event_is_told_and_kept_aside_and_stops_no_other(
    folder: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    event = put("admin-state", instance="uuid-1", name="web1", data=DOWN)
    text = text.replace("ID", event.id)
    (folder / f"{event.id}.json").write_text(text)
    other = put("admin-state", instance="uuid-2", name="web2", data=DOWN)
    assert list(events()) == [other]
    assert (folder / f"{event.id}.damaged").read_text() == text
    assert "damaged" in caplog.text


@pytest.mark.parametrize(
    "name", ["", "../../etc/passwd", "0", "*", "00000000000000000000-zzzzzzzz"]
)
def test_only_an_events_id_is_acknowledged(name: str) -> None:
    with pytest.raises(OutboxError, match="no event has such an id"):
        acknowledge(name)


def test_an_event_that_is_acknowledged_twice_was_there(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    event = put("admin-state", instance="uuid-1", name="web1", data=DOWN)
    assert acknowledge_events(Namespace(id=[event.id, event.id], json=True)) == 0
    assert json.loads(capsys.readouterr().out) == {"acknowledged": [event.id]}
    assert list(folder.iterdir()) == []


def test_where_nobody_takes_them_the_newest_thousand_are_kept(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1500):
        stored(folder, number, f"uuid-{number}")
    kept = [event.instance for event in events()]
    assert kept == [f"uuid-{number}" for number in range(500, 1500)]
    assert "the oldest 500 are dropped" in caplog.text
    assert len(list(folder.iterdir())) == 1000
    put("admin-state", instance="one more", name="web1", data={})
    assert len(list(events())) == 1000


def test_a_hundred_damaged_events_are_kept(folder: Path) -> None:
    for number in range(300):
        stored(folder, number, "uuid-1").write_text("{")
    last = stored(folder, 300, "uuid-1")
    assert [event.instance for event in events()] == ["uuid-1"]
    left = sorted(file.name for file in folder.iterdir())
    assert len(left) == 101
    assert left[0].startswith(f"{200:020}-")
    assert left[-1] == last.name
