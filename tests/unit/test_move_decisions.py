"""What a live move decides without asking QEMU: whether there is an end to it, whether two machines
are alike, and who has the key."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from brine.moves.dirtying import DirtyWatch
from brine.moves.migration import MachineFacts, Migration, MigrationState, MoveOptions
from brine.moves.move_key import KeyFolder, MoveKey, MoveKeyError

MIB = 1 << 20


def seen(passes: int, remaining: int, **others: float) -> Migration:
    rates = {"rate": 10.0 * MIB, "dirtied": 20.0 * MIB} | others
    return Migration(MigrationState.ACTIVE, remaining=remaining, passes=passes, **rates)  # type: ignore[arg-type]


def test_a_rest_that_gets_smaller_has_an_end() -> None:
    watch = DirtyWatch(MoveOptions(patience=3, patience_s=10))
    for number in range(100):
        assert watch.hopeless(60.0 * number, seen(number, int(1000 * MIB * 0.9**number))) == ""


def test_looks_within_one_pass_decide_nothing() -> None:
    watch = DirtyWatch(MoveOptions(patience=1, patience_s=1))
    for number in range(100):
        assert watch.hopeless(60.0 * number, seen(1, 100 * MIB)) == ""


def test_it_takes_both_passes_and_time() -> None:
    options = MoveOptions(patience=3, patience_s=10)
    fast, slow = DirtyWatch(options), DirtyWatch(options)
    told = [fast.hopeless(0.1 * number, seen(number, MIB)) for number in range(200)]
    assert told.index(next(filter(None, told))) > 100
    told = [slow.hopeless(60.0 * number, seen(number, MIB)) for number in range(20)]
    assert [bool(one) for one in told[:6]] == [False, False, False, False, True, True]
    assert "20.0M/s" in told[-1]
    assert "10.0M/s" in told[-1]


def test_a_guest_that_is_being_slowed_down_has_hope() -> None:
    watch = DirtyWatch(MoveOptions(patience=1, patience_s=1, auto_converge=True))
    for number in range(50):
        assert watch.hopeless(9.0 * number, seen(number, MIB, throttle=min(98, 2 * number))) == ""
    assert watch.hopeless(999.0, seen(50, MIB, throttle=99))
    assert "--auto-converge" not in watch.choices()
    assert "--cold" in watch.choices()


def test_the_rest_of_the_time() -> None:
    assert seen(1, 100 * MIB, dirtied=0).rest_s() == 10
    assert seen(1, 100 * MIB, dirtied=5 * MIB).rest_s() == 20
    assert seen(1, 100 * MIB).rest_s() is None
    assert seen(1, 100 * MIB, rate=0, dirtied=0).rest_s() is None


def test_what_differs_is_named() -> None:
    here = MachineFacts("pc-i440fx-7.2", 64 * MIB, 1, {"/machine/peripheral/a": "x at 1"})
    assert here.differences(here) == []
    there = MachineFacts("pc-i440fx-9.0", 32 * MIB, 2, {"/machine/peripheral/b\n": "y at 1"})
    told = here.differences(there)
    assert len(told) == 5
    assert all(one.isprintable() for one in told)
    moved = here._replace(devices={"/machine/peripheral/a": "x at 2"})
    assert here.differences(moved) == ["a: x at 1 here, x at 2 there"]


def test_a_key_is_new_each_time_and_read_by_its_qemu_alone(tmp_path: Path) -> None:
    key = MoveKey.new()
    assert key != MoveKey.new()
    assert MoveKey.of(key.text) == key
    folder = KeyFolder(tmp_path / "key", Path("/seen"))
    for each in (MoveKey.new(), key):
        folder.write(each)
    (file,) = folder.path.iterdir()
    assert key.text in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o400
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert folder.credentials("server")["dir"] == "/seen"
    folder.remove()
    folder.remove()
    assert not folder.path.exists()


@pytest.mark.parametrize("text", ["", "ab", "g" * 64, "ab " * 32, "a" * 63, "a" * 66])
def test_what_is_no_key(text: str) -> None:
    with pytest.raises(MoveKeyError):
        MoveKey.of(text)


def test_a_proof_is_of_its_parts() -> None:
    key = MoveKey.new()
    assert key.proof(b"a", b"bc") == key.proof(b"a", b"bc")
    assert (
        len({key.proof(b"a", b"bc"), key.proof(b"ab", b"c"), MoveKey.new().proof(b"a", b"bc")}) == 3
    )
