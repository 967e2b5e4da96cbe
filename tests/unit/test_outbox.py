"""What the cluster has to learn: kept until it is acknowledged, and told once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from brine.common.files import unfinished
from brine.common.outbox import OutboxError, acknowledge, events, put

DOWN = {"admin_state": "down", "source": "user"}


def stored(folder: Path, number: int, instance: str) -> Path:
    """An event in its file, as an earlier version or another process has left it."""
    event_id = f"{number:020}-{number:08x}"
    event = {"id": event_id, "time": float(number), "kind": "admin-state", "instance": instance}
    file = folder / f"{event_id}.json"
    file.write_text(json.dumps({**event, "name": instance, "data": DOWN}))
    return file


def test_events_stay_in_order_until_they_are_acknowledged(tmp_path: Path) -> None:
    folder = tmp_path / "outbox"
    assert list(events(folder=folder)) == []
    first = put("admin-state", instance="uuid-1", name="web1", data=DOWN, folder=folder)
    second = put("admin-state", instance="uuid-2", name="web2", data=DOWN, folder=folder)
    assert list(events(folder=folder)) == [first, second]
    assert acknowledge(first.id, folder=folder)
    assert not acknowledge(first.id, folder=folder)
    assert list(events(folder=folder)) == [second]
    assert folder.stat().st_mode & 0o077 == 0


def test_the_same_again_is_the_same_event_and_after_another_one_a_new_one(tmp_path: Path) -> None:
    def say(state: str) -> str:
        data = {"admin_state": state}
        return put("admin-state", instance="uuid-1", name="web1", data=data, folder=tmp_path).id

    first = say("down")
    assert say("down") == first
    second, third = say("up"), say("down")
    assert len({first, second, third}) == 3
    assert [event.id for event in events(folder=tmp_path)] == [third]
    assert not acknowledge(second, folder=tmp_path)  # what stands for it is not told yet
    # Acknowledged is told: if it happens once more, that is news.
    for event in list(events(folder=tmp_path)):
        acknowledge(event.id, folder=tmp_path)
    assert say("down") not in (first, second, third)


def test_a_clock_that_is_set_back_changes_no_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = put("admin-state", instance="uuid-1", name="web1", data=DOWN, folder=tmp_path)
    monkeypatch.setattr("time.time_ns", lambda: 10**18)
    second = put("admin-state", instance="uuid-2", name="web2", data={}, folder=tmp_path)
    third = put("admin-state", instance="uuid-1", name="web1", data={}, folder=tmp_path)
    assert first.id < second.id < third.id
    assert list(events(folder=tmp_path)) == [second, third]


def test_an_outbox_of_an_earlier_version_is_folded(tmp_path: Path) -> None:
    for number in range(3000):
        stored(tmp_path, number, f"uuid-{number % 3}")
    told = list(events(folder=tmp_path))
    assert [event.time for event in told] == [2997, 2998, 2999]
    assert {file.stem for file in tmp_path.iterdir()} == {event.id for event in told}
    assert acknowledge(told[-1].id, folder=tmp_path)
    assert list(events(folder=tmp_path)) == told[:-1]


def test_an_event_that_can_not_be_written_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = put("admin-state", instance="uuid-1", name="web1", data=DOWN, folder=tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OutboxError, match="No space left"):
            put("admin-state", instance="uuid-1", name="web1", data={}, folder=tmp_path)
    assert list(events(folder=tmp_path)) == [first]


def test_what_is_no_event_or_can_not_be_read_hides_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / f"{0:020}-00000000.json").mkdir()
    event = put("admin-state", instance="uuid-1", name="web1", data=DOWN, folder=tmp_path)
    unfinished(tmp_path / f"{event.id}.json").write_text("{")  # of a killed writer
    (tmp_path / "notes.json").write_text("an administrator's")
    caplog.clear()
    assert list(events(folder=tmp_path)) == [event]
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
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    event = put("admin-state", instance="uuid-1", name="web1", data=DOWN, folder=tmp_path)
    text = text.replace("ID", event.id)
    (tmp_path / f"{event.id}.json").write_text(text)
    other = put("admin-state", instance="uuid-2", name="web2", data=DOWN, folder=tmp_path)
    assert list(events(folder=tmp_path)) == [other]
    assert (tmp_path / f"{event.id}.damaged").read_text() == text
    assert "damaged" in caplog.text


@pytest.mark.parametrize(
    "name", ["", "../../etc/passwd", "0", "*", "00000000000000000000-zzzzzzzz"]
)
def test_only_an_events_id_is_acknowledged(tmp_path: Path, name: str) -> None:
    with pytest.raises(OutboxError, match="no event has such an id"):
        acknowledge(name, folder=tmp_path)


def test_where_nobody_takes_them_the_newest_thousand_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1500):
        stored(tmp_path, number, f"uuid-{number}")
    kept = [event.instance for event in events(folder=tmp_path)]
    assert kept == [f"uuid-{number}" for number in range(500, 1500)]
    assert "nobody takes events: the oldest 500 are dropped" in caplog.text
    assert len(list(tmp_path.iterdir())) == 1000
    put("admin-state", instance="one more", name="web1", data={}, folder=tmp_path)
    assert len(list(events(folder=tmp_path))) == 1000


def test_a_hundred_damaged_events_are_kept(tmp_path: Path) -> None:
    for number in range(300):
        stored(tmp_path, number, "uuid-1").write_text("{")
    last = stored(tmp_path, 300, "uuid-1")
    assert [event.instance for event in events(folder=tmp_path)] == ["uuid-1"]
    left = sorted(file.name for file in tmp_path.iterdir())
    assert len(left) == 101
    assert left[0].startswith(f"{200:020}-")
    assert left[-1] == last.name
