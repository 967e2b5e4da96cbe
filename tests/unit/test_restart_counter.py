"""The restart counters: whole, durable, and never taken for empty when they are damaged."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
from pathlib import Path
from threading import Thread

import pytest

from brine.common import paths
from brine.common.locks import locked
from brine.watcher import restart_counter
from brine.watcher.restart_counter import NONE, Tries, TriesError

DAMAGED = [
    "",
    "{",
    "null",
    "[]",
    "[" * 100_000,
    '{"version": 2, "instances": {}}',
    '{"version": 1}',
    '{"version": 1, "instances": []}',
    '{"version": 1, "instances": {"web1": null}}',
    '{"version": 1, "instances": {"web1": {"count": "2"}}}',
    '{"version": 1, "instances": {"web1": {"tries": 2}}}',
]


def note(name: str, tries: Tries) -> None:
    with restart_counter.changed() as record:
        record[name] = tries


def given_up() -> dict[str, int]:
    """The tries of those that are given up, as others are told."""
    found = restart_counter.WATCHER.attempts()
    return {name: one.count for name, one in found.items() if one.given_up}


def test_what_is_noted_is_there_for_the_next_one(own_node: Path) -> None:
    assert restart_counter.load() == {}
    assert restart_counter.load().get("web1", NONE) == NONE
    note("web1", Tries(2, 1.5))
    note("web2", Tries(5, 2.5, given_up=True))
    assert stat.S_IMODE((own_node / "watcher.json").stat().st_mode) == 0o640
    assert restart_counter.load().get("web1", NONE) == Tries(2, 1.5)
    assert given_up() == {"web2": 5}
    assert restart_counter.forget_counter("web2")
    assert not restart_counter.forget_counter("web2")
    assert restart_counter.load() == {"web1": Tries(2, 1.5)}


def test_where_nothing_was_tried_nothing_is_written(own_node: Path) -> None:
    assert not restart_counter.forget_counter("web1")
    with restart_counter.changed():
        pass
    assert not (own_node / "watcher.json").exists()


def test_an_instance_that_moves_takes_its_tries_along(own_node: Path) -> None:
    assert restart_counter.WATCHER.record("web1") is None
    note("web1", Tries(3, 1.5, given_up=True))
    moved = json.loads(json.dumps(restart_counter.WATCHER.record("web1")))
    restart_counter.WATCHER.forget("web1")
    restart_counter.WATCHER.keep("web1", moved)
    assert restart_counter.load() == {"web1": Tries(3, 1.5, given_up=True)}


@pytest.mark.parametrize(
    "told", [5, "x", [], {"count": "1"}, {"count": -1}, {"count": 10**9}, {"last": 1e300}, {"a": 1}]
)
def test_what_another_node_tells_that_is_no_record_of_tries_is_refused(
    own_node: Path, told: object
) -> None:
    with pytest.raises(TriesError, match="web1: its tries"):
        restart_counter.WATCHER.keep("web1", told)
    assert restart_counter.load() == {}


@pytest.mark.parametrize("text", DAMAGED)
def test_who_only_asks_changes_nothing_of_a_damaged_one(own_node: Path, text: str) -> None:
    file = own_node / "watcher.json"
    file.write_text(text)
    assert given_up() == {}
    with pytest.raises(TriesError, match="damaged") as caught:
        restart_counter.load()
    assert caught.value.hint
    assert file.read_text() == text


@pytest.mark.parametrize("text", DAMAGED)
def test_who_changes_a_damaged_one_keeps_it_aside_and_tells(
    own_node: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    file = own_node / "watcher.json"
    file.write_text(text)
    note("web1", Tries(1, 1.0))
    assert (own_node / "watcher.json.damaged").read_text() == text
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert restart_counter.load().get("web1", NONE).count == 1


def test_what_can_not_be_written_is_an_error_and_changes_nothing(
    own_node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note("web1", Tries(1, 1.0))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TriesError, match="No space left"):
        note("web1", Tries(2, 2.0))
    assert restart_counter.load().get("web1", NONE).count == 1


def test_what_can_not_be_read_is_not_taken_for_empty(own_node: Path) -> None:
    (own_node / "watcher.json").mkdir()
    with pytest.raises(TriesError, match="can't be read"):
        restart_counter.load()
    assert given_up() == {}


def test_nobody_overwrites_what_another_one_notes(own_node: Path) -> None:
    names = [f"web{number}" for number in range(20)]
    threads = [Thread(target=note, args=(name, Tries(1, 1.0))) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(restart_counter.load()) == sorted(names)


def test_a_lock_that_is_held_for_good_is_an_error(
    own_node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart_counter, "_LOCK_S", 0.0)
    with locked(paths.LOCK_DIR / "tries.lock", timeout_s=0), pytest.raises(TriesError):
        note("web1", Tries(1, 1.0))
