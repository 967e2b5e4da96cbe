"""The record of tries: whole, durable, and never taken for empty when it is damaged."""

from __future__ import annotations

import errno
import logging
import os
import stat
from pathlib import Path

import pytest

from brine.watcher.counters import Counters, CountersError
from brine.watcher.restarts import NONE, Tries


def loaded(file: Path) -> Counters:
    counters = Counters(file)
    counters.load()
    return counters


def test_what_is_set_is_there_for_the_next_one(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "watcher.json"
    counters = loaded(file)
    assert counters.of("web1") == NONE
    counters.set("web1", Tries(2, 1.5))
    counters.set("web2", Tries(5, 2.5, given_up=True))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    again = loaded(file)
    assert again.of("web1") == Tries(2, 1.5)
    assert again.of("web2") == Tries(5, 2.5, given_up=True)
    again.forget("web2")
    again.forget("nobody")
    again.keep_only(frozenset({"web1", "web9"}))
    assert loaded(file).of("web1") == Tries(2, 1.5)
    again.keep_only(frozenset())
    assert loaded(file).of("web1") == NONE


@pytest.mark.parametrize(
    "text",
    [
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
    ],
)
def test_a_damaged_file_is_kept_aside_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    file = tmp_path / "watcher.json"
    file.write_text(text)
    counters = loaded(file)
    assert counters.of("web1") == NONE
    assert (tmp_path / "watcher.json.damaged").read_text() == text
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    counters.set("web1", Tries(1, 1.0))
    assert loaded(file).of("web1").count == 1


def test_what_can_not_be_written_is_an_error_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "watcher.json"
    counters = loaded(file)
    counters.set("web1", Tries(1, 1.0))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CountersError, match="No space left"):
        counters.set("web1", Tries(2, 2.0))
    assert counters.of("web1").count == loaded(file).of("web1").count == 1


def test_what_can_not_be_read_is_not_taken_for_empty(tmp_path: Path) -> None:
    file = tmp_path / "watcher.json"
    file.mkdir()
    with pytest.raises(CountersError, match="can't be read"):
        loaded(file)
