"""What a live move decides without asking QEMU: whether there is an end to it, whether two machines
are alike, and who has the key."""

from __future__ import annotations

import hashlib
import hmac
import stat
from pathlib import Path

import pytest

from brine.moves.cluster_keys import Agreement, ClusterKeys
from brine.moves.dirtying import DirtyWatch
from brine.moves.migration import MachineFacts, Migration, MigrationState, MoveError, MoveOptions
from brine.moves.move_key import KeyFolder, MoveKey, MoveKeyError, id_of
from cluster_key import give_keys, new_key

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
    key = new_key()
    assert key != new_key()
    assert MoveKey.of(key.text) == key
    folder = KeyFolder(tmp_path / "key", Path("/seen"))
    for each in (new_key(), key):
        folder.write(each)
    (file,) = folder.path.iterdir()
    text = file.read_text()
    assert text.startswith("brine:")
    assert key.text not in text  # a guest that has broken out must not speak for its node
    again = KeyFolder(tmp_path / "again", Path("/seen"))
    again.write(MoveKey.of(key.text))
    assert (again.path / file.name).read_text() == text
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
    key = new_key()
    assert key.proof(b"a", b"bc") == key.proof(b"a", b"bc")
    assert len({key.proof(b"a", b"bc"), key.proof(b"ab", b"c"), new_key().proof(b"a", b"bc")}) == 3


def test_a_key_is_derived_as_rfc_5869_says() -> None:
    """By an implementation of the standard's words, step by step."""
    secret, nonce = b"s" * 20, b"n" * 32
    extracted = hmac.new(nonce, secret, hashlib.sha256).digest()
    info = b"".join(
        len(one).to_bytes(4, "big") + one for one in (b"brine-move key", b"0176", b"n1")
    )
    expanded = hmac.new(extracted, info + b"\x01", hashlib.sha256).hexdigest()
    assert MoveKey.derived(secret, nonce, "0176", "n1").text == expanded


def test_each_move_has_another_key() -> None:
    keys = [
        MoveKey.derived(*parts)
        for parts in (
            (b"s" * 20, b"n" * 32, "0176", "n1"),
            (b"t" * 20, b"n" * 32, "0176", "n1"),
            (b"s" * 20, b"m" * 32, "0176", "n1"),
            (b"s" * 20, b"n" * 32, "0177", "n1"),
            (b"s" * 20, b"n" * 32, "0176n", "1"),
        )
    ]
    assert len(set(keys)) == len(keys)


def test_what_is_sealed_is_read_by_its_name_and_key_alone() -> None:
    key, data = new_key(), bytes(1000)
    sealed = key.sealed(data, b"talk", b"1")
    assert key.sealed(sealed, b"talk", b"1") == data
    assert key.sealed(b"", b"talk") == b""
    others = [key.sealed(data, b"talk", b"2"), new_key().sealed(data, b"talk", b"1")]
    assert len({sealed, data, *others}) == 4
    assert key.sealed(sealed, b"talk1") != data


def test_two_nodes_agree_on_a_key_that_both_have(own_node: Path) -> None:
    """While the cluster's key is replaced, in whatever order; and the other way around, not."""
    give_keys(b"new key of the cluster", b"old key of the cluster")
    target = ClusterKeys.read()
    for secrets, chosen in (
        ((b"old key of the cluster", b""), b"old key of the cluster"),
        ((b"old key of the cluster", b"new key of the cluster"), b"new key of the cluster"),
        ((b"new key of the cluster", b""), b"new key of the cluster"),
    ):
        give_keys(*secrets)
        source = ClusterKeys.read()
        found = target.agree(source.ids(), "n1")
        assert found.key_id == id_of(chosen)
        assert source.key_for(found, "0176") == target.key_for(found, "0176")
        assert source.key_for(found, "0176") != target.key_for(found, "0177")
    give_keys(b"another cluster's key")
    stranger = ClusterKeys.read()
    with pytest.raises(MoveError, match="no key of the cluster in common"):
        target.agree(stranger.ids(), "n1")
    with pytest.raises(MoveError, match="not here any more"):
        stranger.key_for(found, "0176")


def test_a_node_without_the_clusters_key_takes_part_in_no_move(own_node: Path) -> None:
    give_keys(b"")
    with pytest.raises(MoveError, match=r"hmac\.key") as refused:
        ClusterKeys.read()
    assert "rotate_key" in str(refused.value.hint)


@pytest.mark.parametrize("lie", [{"nonce": "ab"}, {"nonce": None}, {"nonce": "g" * 64}])
def test_what_is_no_agreement(lie: dict[str, object]) -> None:
    with pytest.raises(MoveKeyError):
        Agreement.of({"key_id": "a" * 16, "nonce": "a" * 64} | lie)
