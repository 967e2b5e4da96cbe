"""What was seen of each VM, over a restart."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brine.kvmd.control_dir import SocketIdentity
from brine.kvmd.handover import RecordStore, VmRecord, key_of, parse_key
from brine.kvmd.verdict import EventHistory, Shutdown, Verdict, Who

WEB1 = "web1@1-2-3"
RECORDS = [
    VmRecord(EventHistory(powerdown_usec=5, paused=True)),
    VmRecord(replaced=True),
    VmRecord(
        EventHistory(panicked=True, shutdown=Shutdown(True, "guest-shutdown", 9)),
        Verdict(Who.USER, "guest-shutdown", 9),
        written=False,
    ),
]


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_comes_back_as_it_was(tmp_path: Path, record: VmRecord) -> None:
    RecordStore(tmp_path).save(WEB1, record)
    assert RecordStore(tmp_path).load() == {WEB1: record}


def test_what_is_dropped_is_gone(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    store.save(WEB1, RECORDS[0])
    store.drop(WEB1)
    store.drop(WEB1)
    assert store.load() == {}


GOOD = {
    "seen": {"powerdown_usec": None, "paused": False, "panicked": False, "shutdown": None},
    "verdict": None,
    "written": True,
    "replaced": False,
}


@pytest.mark.parametrize(
    "text",
    [
        '{"seen": ',
        "[]",
        "[" * 100_000,
        json.dumps({**GOOD, "seen": "abc"}),
        json.dumps({**GOOD, "written": 1}),
        json.dumps({**GOOD, "seen": {**GOOD["seen"], "powerdown_usec": "x"}}),  # type: ignore[dict-item]
        json.dumps({**GOOD, "verdict": {"who": "me", "cause": "x", "time_usec": 1}}),
        json.dumps({key: GOOD[key] for key in GOOD if key != "seen"}),
    ],
)
def test_a_corrupt_record_is_set_aside_and_the_others_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    store = RecordStore(tmp_path)
    store.save(WEB1, RECORDS[0])
    (tmp_path / "bad@1-2-3.json").write_text(text)
    (tmp_path / "noidentity.json").write_text(json.dumps(GOOD))
    assert store.load() == {WEB1: RECORDS[0]}
    assert len(caplog.records) == 2
    assert (tmp_path / "bad@1-2-3.json.bad").exists()
    caplog.clear()
    store.load()
    assert not caplog.records


def test_what_a_killed_daemon_left_half_written_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".abc").write_text("{")
    assert RecordStore(tmp_path).load() == {}
    assert list(tmp_path.iterdir()) == []


def test_without_a_directory_nothing_is_remembered() -> None:
    store = RecordStore(None)
    store.save(WEB1, RECORDS[0])
    store.drop(WEB1)
    assert store.load() == {}


IDENTITY = SocketIdentity(2**63, 2**63, 2**63)

file_names = st.binary(min_size=1, max_size=60).filter(lambda name: not set(name) & {0, ord("/")})


@given(file_names)
def test_any_file_name_survives(raw: bytes) -> None:
    name = os.fsdecode(raw)
    key = key_of(name, IDENTITY)
    assert key
    assert key.isascii()
    assert key.isprintable()
    assert not set(key) & {":", "/"}
    assert len(key) <= 255 - len(".json")
    assert parse_key(key) == (name, IDENTITY)


def test_a_name_too_long_to_store_is_not_stored() -> None:
    assert key_of("\n" * 90, IDENTITY) is None


@pytest.mark.parametrize("stranger", ["connection", "web1@", "web1@1-2", "web1@a-b-c"])
def test_a_stranger_in_the_descriptor_store_is_recognised(stranger: str) -> None:
    with pytest.raises(ValueError, match=r"invalid literal|unpack"):
        parse_key(stranger)
