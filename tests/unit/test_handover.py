"""kvmd's histories of events, kept over a restart."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brine.common.systemd import ServiceManager
from brine.kvmd.control_dir import SocketIdentity
from brine.kvmd.handover import Keeper, VmRecord, key_of, parse_key
from brine.kvmd.verdict import EventHistory, Shutdown, Verdict, Who

WEB1 = "web1@1-2-3"


def keeper(folder: Path) -> Keeper:
    """The keeper of a daemon that begins with the records of the one before."""
    found = Keeper(ServiceManager({"RUNTIME_DIRECTORY": str(folder)}))
    assert found.restore() == []
    return found


@pytest.mark.parametrize(
    "record",
    [
        VmRecord(EventHistory(powerdown_usec=5, paused=True)),
        VmRecord(replaced=True, run="0d" * 16),
        VmRecord(
            EventHistory(panicked=True, shutdown=Shutdown(True, "guest-shutdown", 9)),
            Verdict(Who.USER, "guest-shutdown", 9, 10),
            written=False,
        ),
    ],
)
def test_a_record_comes_back_as_it_was_and_once(tmp_path: Path, record: VmRecord) -> None:
    keeper(tmp_path).keep_record(WEB1, record)
    later = keeper(tmp_path)
    assert later.recall(WEB1) == record
    assert later.recall(WEB1) is None
    later.keep_record(WEB1, VmRecord())  # which has nothing to be remembered
    assert list(tmp_path.iterdir()) == []


SEEN = {"powerdown_usec": None, "paused": False, "panicked": False, "shutdown": None}
GOOD = {"seen": SEEN, "verdict": None, "written": True, "replaced": True}


def test_a_record_of_the_first_version_is_read(tmp_path: Path) -> None:
    verdict = {"who": "user", "cause": "guest-shutdown", "time_usec": 9}
    (tmp_path / f"{WEB1}.json").write_text(json.dumps({**GOOD, "verdict": verdict}))
    expected = VmRecord(verdict=Verdict(Who.USER, "guest-shutdown", 9), replaced=True)
    assert keeper(tmp_path).recall(WEB1) == expected


@pytest.mark.parametrize(
    "text",
    [
        '{"seen": ',
        "[]",
        "[" * 100_000,
        json.dumps({**GOOD, "seen": "abc"}),
        json.dumps({**GOOD, "written": 1}),
        json.dumps({**GOOD, "seen": {**SEEN, "powerdown_usec": "x"}}),
        json.dumps({**GOOD, "verdict": {"who": "me", "cause": "x", "time_usec": 1}}),
        json.dumps({**GOOD, "verdict": {"who": "user"}}),
    ],
)
def test_a_corrupt_record_is_set_aside_and_the_others_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    keeper(tmp_path).keep_record(WEB1, VmRecord(replaced=True))
    (tmp_path / "bad@1-2-3.json").write_text(text)
    (tmp_path / "noidentity.json").write_text(json.dumps(GOOD))
    (tmp_path / ".abc").write_text("{")  # of a daemon that was killed while it wrote
    later = keeper(tmp_path)
    assert later.recall(WEB1) == VmRecord(replaced=True)
    assert list(later.leftovers()) == []
    assert len(caplog.records) == 2
    assert {file.name for file in tmp_path.iterdir()} == {
        f"{WEB1}.json",
        "bad@1-2-3.json.bad",
        "noidentity.json.bad",
    }
    caplog.clear()
    keeper(tmp_path)
    assert not caplog.records


def test_of_vms_that_are_gone_only_an_unwritten_verdict_is_left(tmp_path: Path) -> None:
    first = keeper(tmp_path)
    unwritten = VmRecord(verdict=Verdict(Who.USER, "guest-shutdown"), written=False)
    first.keep_record(WEB1, unwritten)
    first.keep_record("web2@1-2-3", VmRecord(replaced=True))
    assert list(keeper(tmp_path).leftovers()) == [(WEB1, unwritten)]
    assert [file.name for file in tmp_path.iterdir()] == [f"{WEB1}.json"]


def test_without_a_directory_nothing_is_remembered() -> None:
    without = Keeper(ServiceManager({}))
    without.keep_record(WEB1, VmRecord(replaced=True))
    assert without.restore() == []
    assert without.recall(WEB1) is None


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
