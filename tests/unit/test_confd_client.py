"""The confd client without a network: keys, peers, questions, and the newest answer."""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from brine.confd import questions
from brine.confd.client import (
    ConfdClient,
    ConfdError,
    Dropped,
    NoAnswerError,
    Peer,
    PeerReply,
    Result,
    Silence,
    find_peers,
    needed_replies,
    parse_peer,
)
from brine.confd.keys import KeyFileError, find_keys, load_key, new_key
from brine.confd.protocol import ConfdReply, ErrorCode, ReplyStatus, RequestType
from brine.confd.questions import Question
from lab.ganeti_config import ganeti_config, node_ip

# Keys.


@pytest.fixture
def key(tmp_path: Path) -> Path:
    file = tmp_path / "hmac.key"
    file.write_bytes(b"secret\n")
    file.chmod(0o600)
    return file


def test_a_key_is_taken_byte_for_byte(key: Path) -> None:
    key.write_bytes(b"\0secret \xff\r\n\n")
    assert load_key(key) == b"\0secret \xff\r\n\n"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.mkdir(), "Is a directory"),
        (os.mkfifo, "regular file"),
        (lambda path: path.write_bytes(b""), "empty"),
        (lambda path: path.write_bytes(b" \n"), "blank"),
        (lambda path: path.write_bytes(b"x" * 70_000), "no key"),
    ],
    ids=["folder", "FIFO", "empty", "blank", "huge"],
)
def test_what_is_no_key_is_told(tmp_path: Path, make: Any, said: str) -> None:
    """Also in the place of the previous key, which may be absent."""
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_bytes(b"secret\n")
    make(bad)
    for keys in ((bad, tmp_path / "none"), (good, bad)):
        with pytest.raises(KeyFileError, match=said):
            find_keys(*keys, {})


@pytest.mark.parametrize(("mode", "warned"), [(0o600, 0), (0o400, 0), (0o640, 1), (0o604, 1)])
def test_a_key_that_others_may_read_is_worth_a_warning(
    key: Path, mode: int, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    key.chmod(mode)
    assert load_key(key) == b"secret\n"
    assert len(caplog.records) == warned
    assert "secret" not in caplog.text


def test_both_keys_are_found_at_their_paths(key: Path, tmp_path: Path) -> None:
    previous = tmp_path / "old"
    previous.write_bytes(b"older\n")
    previous.chmod(0o600)
    found = find_keys(key, previous, {})
    assert [(one.source, one.secret) for one in found] == [
        (key, b"secret\n"),
        (previous, b"older\n"),
    ]
    assert "secret" not in repr(found)


def test_handed_over_keys_come_before_credentials_and_these_before_paths(
    key: Path, tmp_path: Path
) -> None:
    handed, credentials = tmp_path / "run", tmp_path / "credentials"
    environment = {"RUNTIME_DIRECTORY": str(handed), "CREDENTIALS_DIRECTORY": str(credentials)}
    for folder in (handed, credentials):
        folder.mkdir()

    def secrets() -> list[bytes]:
        return [found.secret for found in find_keys(key, tmp_path / "none", environment)]

    (credentials / "hmac.key").write_bytes(b"")  # the unit's fallback, where there is no file
    (credentials / "hmac.key.previous").write_bytes(b"")
    assert secrets() == [b"secret\n"]
    (credentials / "hmac.key").write_bytes(b"credential")
    (credentials / "hmac.key.previous").write_bytes(b"old credential")
    assert secrets() == [b"credential", b"old credential"]
    (handed / "hmac.key").write_bytes(b"handed over")
    assert secrets() == [b"handed over", b"old credential"]
    (handed / "hmac.key.previous").write_bytes(b"")  # there is none any more
    assert secrets() == [b"handed over"]


def test_a_new_key_is_random_and_its_owners(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for path in (one, other):
        new_key(path, tmp_path / "previous")
    assert len(bytes.fromhex(load_key(one).decode())) == 32
    assert load_key(one) != load_key(other)
    assert stat.S_IMODE(one.stat().st_mode) == 0o600
    assert sorted(tmp_path.iterdir()) == [one, other]
    new_key(one, tmp_path / "previous", replace=True)
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}


def test_a_second_replacement_does_not_lock_out_nodes_of_the_first(
    key: Path, tmp_path: Path
) -> None:
    previous = tmp_path / "previous"
    new_key(key, previous, replace=True)
    current = load_key(key)
    with pytest.raises(KeyFileError, match="not over"):
        new_key(key, previous, replace=True)
    assert (load_key(key), load_key(previous)) == (current, b"secret\n")


def test_a_new_key_that_can_not_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="can't be written"):
        new_key(tmp_path / "no folder" / "hmac.key", tmp_path / "previous")


# Peers.


@pytest.mark.parametrize(
    ("text", "peer", "shown"),
    [
        ("192.0.2.1", Peer("192.0.2.1", 1814), "192.0.2.1"),
        ("192.0.2.1:99", Peer("192.0.2.1", 99), "192.0.2.1:99"),
        ("2001:db8::1", Peer("2001:db8::1", 1814), "2001:db8::1"),
        ("[2001:db8::1]", Peer("2001:db8::1", 1814), "2001:db8::1"),
        ("[2001:db8::1]:99", Peer("2001:db8::1", 99), "[2001:db8::1]:99"),
        ("fe80::1%eth0", Peer("fe80::1%eth0", 1814), "fe80::1%eth0"),
        ("node1.example.com", Peer("node1.example.com", 1814), "node1.example.com"),
        ("node1:99", Peer("node1", 99), "node1:99"),
    ],
)
def test_an_address_is_understood(text: str, peer: Peer, shown: str) -> None:
    assert parse_peer(text) == peer
    assert str(peer) == shown


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", ":1814", "a b", "192.0.2.1:", "192.0.2.1:0", "192.0.2.1:65536", "node1:x"),
        *("[2001:db8::1", "[node1]:1", "[::1]x", "2001:db8::1::2", "-x", "node1:१", "node/1"),
    ],
)
def test_no_address_is_told(text: str) -> None:
    with pytest.raises(ConfdError):
        parse_peer(text)


def test_a_peer_that_is_named_twice_is_asked_once() -> None:
    twice = ConfdClient(["192.0.2.1", "192.0.2.1:7", "192.0.2.1"], [b"secret"], port=7)
    assert twice.peers == (Peer("192.0.2.1", 7),)


def test_peers_come_from_ssconf_or_else_from_the_configuration(tmp_path: Path) -> None:
    data = ganeti_config(nodes=4)
    first, second, *_ = data["nodes"].values()
    first["master_candidate"] = False
    second["offline"] = True
    config, ssconf = tmp_path / "config.data", tmp_path / "ssconf_master_candidates_ips"
    config.write_text(json.dumps(data))
    assert find_peers(ssconf_dir=tmp_path, config_file=config) == [node_ip(3), node_ip(4)]
    ssconf.write_text("192.0.2.1\n2001:db8::2\n")
    found = find_peers(ssconf_dir=tmp_path, config_file=config)
    assert found == ["192.0.2.1", "2001:db8::2"]
    ssconf.write_bytes(b"\xff\n")
    with pytest.raises(ConfdError, match="not text"):
        find_peers(ssconf_dir=tmp_path, config_file=config)


def test_a_client_without_peers_or_keys_is_refused() -> None:
    with pytest.raises(ConfdError, match="peer"):
        ConfdClient([], [b"secret"])
    with pytest.raises(ConfdError, match="key"):
        ConfdClient(["192.0.2.1"], [])


# Whom to believe.


def result(
    *replies: ConfdReply, silent: int = 0, why: Silence = Silence.SILENT, kind: int = 1
) -> Result:
    """The result of asking 192.0.2.1, .2, ...; the last ones did not reply."""
    peers = [Peer(f"192.0.2.{n}") for n in range(1, len(replies) + silent + 1)]
    came = [PeerReply(*pair, 0.001) for pair in zip(peers, replies, strict=False)]
    return Result(kind, "node1", tuple(came), dict.fromkeys(peers[len(replies) :], why), Counter())


def ok(answer: Any, serial: int = 42) -> ConfdReply:
    return ConfdReply(ReplyStatus.OK, answer, serial)


def standings(*replies: ConfdReply, kind: int = 1) -> list[str]:
    return [one.value for one in result(*replies, kind=kind).standings]


@pytest.mark.parametrize(
    ("asked", "needed"), [(0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (5, 3), (6, 4), (10, 6), (11, 6)]
)
def test_how_many_are_needed(asked: int, needed: int) -> None:
    assert needed_replies(asked) == needed


def test_the_first_of_equals_is_the_newest() -> None:
    newest = result(ok(1, 41), ok(2, 42), ok(3, 42)).newest
    assert newest
    assert str(newest.peer) == "192.0.2.2"


UNKNOWN = ConfdReply(ReplyStatus.ERROR, ErrorCode.UNKNOWN_ENTRY, 42)
FAILED = ConfdReply(ReplyStatus.ERROR, ErrorCode.INTERNAL)
GANETI_UNKNOWN = ConfdReply(ReplyStatus.ERROR, "Node name x not found")


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        ([ok(1), ok(1)], ["newest", "agrees"]),
        ([ok(1), ok(2)], ["newest", "disagrees"]),
        ([ok(1, 41), ok(2, 42)], ["stale", "newest"]),
        ([ok(1), UNKNOWN], ["newest", "disagrees"]),
        ([ok(1, 43), UNKNOWN], ["newest", "stale"]),
        ([ok(1, 41), UNKNOWN], ["stale", "newest"]),
        ([UNKNOWN, UNKNOWN], ["newest", "agrees"]),
        ([UNKNOWN, GANETI_UNKNOWN], ["newest", "agrees"]),
        ([GANETI_UNKNOWN, ok(1)], ["disagrees", "newest"]),
        ([FAILED, ok(1)], ["failed", "newest"]),
        ([FAILED, UNKNOWN], ["failed", "newest"]),
        ([ConfdReply(ReplyStatus.NOT_IMPLEMENTED, 2, 99), ok(1)], ["failed", "newest"]),
        ([FAILED, FAILED], ["newest", "agrees"]),
        ([], []),
    ],
)
def test_standings(replies: list[ConfdReply], expected: list[str]) -> None:
    assert standings(*replies) == expected
    assert result(*replies).disagreement == ("disagrees" in expected)


def test_order_counts_only_where_it_means_something() -> None:
    there, back = [1, 2], [2, 1]
    assert standings(ok(there), ok(back), kind=RequestType.NODE_IPS) == ["newest", "agrees"]
    assert standings(ok(there), ok(back), kind=RequestType.CONFIG) == ["newest", "disagrees"]
    both = ok([there, back]), ok([back, there])
    assert standings(*both, kind=RequestType.NODE_INSTANCES) == ["newest", "agrees"]
    swapped = ok([there, [3]]), ok([[3], there])
    assert standings(*swapped, kind=RequestType.NODE_INSTANCES) == ["newest", "disagrees"]


@pytest.mark.parametrize(
    ("why", "hint"),
    [
        (Silence.SILENT, "clocks"),
        (Silence.REFUSED, "running"),
        (Silence.UNRESOLVED, "IP addresses"),
        (Silence.UNREACHABLE, "UDP"),
    ],
)
def test_nobody_answered_and_what_to_do(why: Silence, hint: str) -> None:
    with pytest.raises(NoAnswerError, match=f"192.0.2.1 {why.value}, 192.0.2.2") as told:
        result(silent=2, why=why).answer()
    assert told.value.hint
    assert hint in told.value.hint


def test_other_signatures_are_the_first_thing_to_look_at() -> None:
    nothing = result(silent=1)
    nothing.dropped[Dropped.SIGNATURE] += 1
    with pytest.raises(NoAnswerError) as told:
        nothing.answer()
    assert told.value.hint
    assert "another signature" in told.value.hint


# Answers of another shape than the question's. The command's test has each question's own.


@pytest.mark.parametrize(
    "question",
    [
        questions.ping(),
        questions.node_role("n"),
        questions.node_ips_of_instance_ips(["a"]),
        questions.cluster_master(),
        questions.node_ips(),
        questions.node_drbd("n"),
        questions.node_instances("n"),
        questions.instance_disks("i"),
        questions.data_collectors(),
    ],
    ids=lambda question: question.type.name,
)
@pytest.mark.parametrize("answer", [True, 5.5, [1], [[1]], {"a": 1}, None, [None, None]])
def test_an_answer_of_another_shape_is_an_error(question: Question[Any], answer: Any) -> None:
    if question.type == RequestType.DATA_COLLECTORS and isinstance(answer, dict):
        return
    with pytest.raises(ConfdError, match="none to this question"):
        result(ok(answer)).decoded(question)
