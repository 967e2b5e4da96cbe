"""What was seen of each VM, over a restart."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brine.kvmd.seen_store import (
    Record,
    SeenStore,
    descriptor_name,
    key,
    parse_descriptor_name,
)
from brine.kvmd.verdict import Seen, Shutdown, Verdict, Who

RECORDS = [
    Record("1-2"),
    Record("1-2", Seen(powerdown_usec=5, paused=True)),
    Record(
        "1-2",
        Seen(panicked=True, shutdown=Shutdown(True, "guest-shutdown", 9)),
        Verdict(Who.USER, "guest-shutdown", 9),
        written=False,
    ),
]


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_comes_back_as_it_was(tmp_path: Path, record: Record) -> None:
    SeenStore(tmp_path).save("web1", record)
    assert SeenStore(tmp_path).load() == {"web1": record}


def test_what_is_dropped_is_gone(tmp_path: Path) -> None:
    store = SeenStore(tmp_path)
    store.save("web1", RECORDS[0])
    store.drop("web1")
    store.drop("web1")
    assert store.load() == {}


def test_a_corrupt_record_is_set_aside_and_the_others_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = SeenStore(tmp_path)
    store.save("good", RECORDS[1])
    (tmp_path / "bad.json").write_text('{"identity": ')
    (tmp_path / "odd.json").write_text('{"identity": 1, "seen": [], "verdict": 3}')
    assert store.load() == {"good": RECORDS[1]}
    assert len(caplog.records) == 2
    assert (tmp_path / "bad.json.bad").exists()


def test_without_a_directory_nothing_is_remembered() -> None:
    store = SeenStore(None)
    store.save("web1", RECORDS[0])
    store.drop("web1")
    assert store.load() == {}


def test_a_name_too_long_to_store_is_not_stored(tmp_path: Path) -> None:
    store = SeenStore(tmp_path)
    assert descriptor_name("\n" * 90, "1-2") is None
    store.save("\n" * 90, RECORDS[0])
    assert store.load() == {}


file_names = st.binary(min_size=1, max_size=60).filter(lambda name: not set(name) & {0, ord("/")})


@given(file_names)
def test_any_file_name_survives(raw: bytes) -> None:
    name = os.fsdecode(raw)
    stored = descriptor_name(name, "12-34")
    assert stored
    assert stored.isascii()
    assert stored.isprintable()
    assert ":" not in stored
    assert len(stored) <= 255
    assert parse_descriptor_name(stored) == (name, "12-34")
    assert "/" not in (key(name) or "")


def test_a_stranger_in_the_descriptor_store_is_recognised() -> None:
    assert parse_descriptor_name("connection") is None
