"""The confd client and `brine confd`, against peers that lie, are late, or are not there."""

from __future__ import annotations

import json
import socket
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from brine.common import cli
from brine.common.entry_points import EntryPoint
from brine.confd import questions
from brine.confd.client import (
    ConfdClient,
    ConfdError,
    Dropped,
    PeerStanding,
    Result,
    Silence,
)
from brine.confd.protocol import LARGEST_DATAGRAM, RequestType, Role
from component.confd_peers import (
    SECRET,
    Heard,
    Script,
    ScriptedPeer,
    closed_port,
    once,
    peers,
    says,
    silent,
)


def client(*them: ScriptedPeer | str, keys: Iterable[bytes] = (SECRET,)) -> ConfdClient:
    addresses = [one if isinstance(one, str) else one.address for one in them]
    return ConfdClient(addresses, list(keys))


def roles(*them: ScriptedPeer | str, patient: bool = True, timeout_s: float = 10) -> Result:
    """Ask them all for a node's role."""
    return client(*them).query(
        RequestType.NODE_ROLE, "node1.example.com", patient=patient, timeout_s=timeout_s
    )


# What is sent.


def test_a_peer_gets_an_authentic_request_of_this_time() -> None:
    with peers(says(1)) as [peer]:
        before = int(time.time())
        assert roles(peer).answer() == 1
    heard, *_ = peer.heard
    assert before <= heard.time_s <= time.time()
    salt = heard.content.pop("rsalt")
    assert len(salt) == 36
    assert heard.content == {"protocol": 1, "type": 1, "query": "node1.example.com"}


def test_of_many_peers_six_are_asked_at_random() -> None:
    with peers(*[says(1)] * 9) as them:
        asked = [set(roles(*them, patient=False).asked) for _ in range(20)]
    assert {len(one) for one in asked} == {6}
    assert len(set(map(frozenset, asked))) > 1


def test_a_lost_datagram_is_sent_again_with_another_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1_000_000, 2_000_000, 10))

    def only_the_second(heard: Heard) -> Iterator[bytes]:
        if len(peer.heard) == 2:
            yield heard.reply(1, 42)

    with peers(only_the_second) as [peer]:
        monkeypatch.setattr(time, "time", lambda: next(clock))
        asking = ConfdClient([peer.address], [SECRET])
        assert asking.ask(questions.node_role("node1")) is Role.CANDIDATE
    first, second, *_ = peer.heard
    assert second.time_s > first.time_s


def test_who_has_only_the_previous_key_is_reached_with_it() -> None:
    with peers(says(1), secret=b"old") as [peer]:
        asking = client(peer, keys=[b"new", b"old"])
        assert asking.query(RequestType.NODE_ROLE, "node1").answer() == 1


def test_a_request_that_fits_no_datagram_is_refused() -> None:
    with peers(silent) as [peer]:
        with pytest.raises(ConfdError, match="datagram"):
            client(peer).query(RequestType.NODE_ROLE, "x" * LARGEST_DATAGRAM)
    assert not peer.heard


# Which reply counts.


def test_the_highest_serial_wins_and_older_ones_are_told() -> None:
    with peers(says(1, 41), says(2, 42), says(1, 40)) as [older, newest, oldest]:
        result = roles(older, newest, oldest)
    assert result.answer() == 2
    assert result.newest
    assert str(result.newest.peer) == newest.address
    stale = {str(one.peer) for one in result.with_standing(PeerStanding.STALE)}
    assert stale == {older.address, oldest.address}
    assert not result.disagreement


@pytest.mark.parametrize(("status", "answer"), [(1, 1), (2, 2), (7, None)])
def test_a_peer_that_can_not_answer_does_not_count(status: int, answer: object) -> None:
    sent = threading.Event(), threading.Event()

    def failing(number: int) -> Script:
        def fail(heard: Heard) -> Iterator[bytes]:
            yield heard.reply(answer, 99, status=status)
            sent[number].set()

        return fail

    def late(heard: Heard) -> list[bytes]:
        assert all(each.wait(10) for each in sent)
        return [heard.reply(1, 42)]

    with peers(failing(0), failing(1), late, late, late) as them:
        result = roles(*them, patient=False)  # three are needed
    assert result.answer() == 1
    assert result.enough
    assert not result.disagreement
    assert len(result.with_standing(PeerStanding.FAILED)) == 2


# What does not count.


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (lambda heard: heard.reply(9, 99, secret=b"wrong"), Dropped.SIGNATURE),
        (lambda heard: heard.reply(9, 99, salt="of another question"), Dropped.SALT),
        (lambda heard: heard.reply(9, 99)[:-20], Dropped.MALFORMED),
        (lambda heard: b"plj1" + heard.reply(9, 99)[4:], Dropped.MALFORMED),
        (lambda _: b"\xff" * 1000, Dropped.MALFORMED),
        (lambda _: b"", Dropped.MALFORMED),
    ],
    ids=["wrong key", "foreign salt", "truncated", "other magic", "garbage", "empty"],
)
def test_a_lie_before_the_truth_is_dropped(lie: Callable[[Heard], bytes], reason: Dropped) -> None:
    with peers(once(lambda heard: [lie(heard), heard.reply(1, 42)])) as [peer]:
        result = roles(peer)
    assert result.answer() == 1
    assert result.dropped == {reason: 1}


def test_a_peer_that_repeats_itself_counts_once() -> None:
    def twice(heard: Heard) -> list[bytes]:
        return [heard.reply(1, 42), heard.reply(2, 43)]

    with peers(once(twice), silent) as them:
        result = roles(*them, timeout_s=2)
    assert len(result.replies) == 1
    assert result.answer() == 1
    assert result.dropped == {Dropped.DUPLICATE: 1}
    assert not result.enough


def test_one_reply_played_back_under_other_addresses_makes_no_majority() -> None:
    caught = threading.Event()
    loot: list[bytes] = []

    def honest(heard: Heard) -> list[bytes]:
        loot.append(heard.reply(1, 42))
        caught.set()
        return loot

    def echo(_heard: Heard) -> list[bytes]:
        assert caught.wait(10)
        return loot

    with peers(honest, echo, echo) as them:
        result = roles(*them, timeout_s=2)
    assert len(result.replies) == 1
    assert not result.enough
    assert result.dropped[Dropped.DUPLICATE] >= 1


def test_a_reply_from_another_address_of_the_peer_counts() -> None:
    with peers(says(1), replies_from="127.0.0.2") as [peer]:
        result = roles(peer)
    assert result.answer() == 1
    assert str(result.replies[0].peer) == peer.address


# Who does not answer.


def test_enough_replies_end_the_wait() -> None:
    with peers(says(1), says(1), silent) as them:
        result = roles(*them, patient=False, timeout_s=60)
    assert len(result.replies) == 2
    assert result.enough
    assert list(result.silences.values()) == [Silence.SILENT]


def test_a_late_reply_is_taken_until_the_time_is_over() -> None:
    go = threading.Event()

    def late(heard: Heard) -> list[bytes]:
        assert go.wait(10)
        return [heard.reply(2, 43)]

    def early(heard: Heard) -> list[bytes]:
        threading.Timer(0.1, go.set).start()
        return [heard.reply(1, 42)]

    with peers(early, late) as them:
        assert roles(*them).answer() == 2


def test_nobody_who_listens_is_told_as_refused_and_not_waited_for() -> None:
    gone = closed_port()
    result = roles(gone, timeout_s=60)
    assert list(result.silences.values()) == [Silence.REFUSED]


def test_a_refusal_beside_an_answer_is_not_fatal() -> None:
    gone = closed_port()
    with peers(says(1)) as [peer]:
        result = roles(gone, peer)
    assert result.answer() == 1
    assert not result.enough
    assert {str(one): why for one, why in result.silences.items()} == {gone: Silence.REFUSED}


def test_a_daemon_that_restarts_is_asked_again() -> None:
    address = closed_port()
    host, port = address.split(":")
    up = threading.Event()

    def answer() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as restarted:
            restarted.bind((host, int(port)))
            restarted.settimeout(10)
            up.set()
            datagram, sender = restarted.recvfrom(65536)
            restarted.sendto(Heard(datagram, SECRET).reply(1, 42), sender)

    restart = threading.Timer(0.2, answer)
    restart.start()
    assert roles(address).answer() == 1
    restart.join()


@pytest.mark.parametrize("name", ["nobody.invalid", f"{'x' * 64}.example.com"])
def test_a_name_without_an_address_is_told(name: str) -> None:
    with peers(says(1)) as [peer]:
        result = roles(peer, name)
    assert Silence.UNRESOLVED in result.silences.values()
    assert result.answer() == 1


def test_a_resolver_that_hangs_does_not_outlast_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers, ended = threading.Event(), threading.Event()
    usual = socket.getaddrinfo

    def hanging(host: str, *arguments: Any, **options: Any) -> Any:
        if options.get("flags"):
            return usual(host, *arguments, **options)
        answers.wait(30)
        ended.set()
        raise socket.gaierror(socket.EAI_AGAIN, "no server")

    monkeypatch.setattr(socket, "getaddrinfo", hanging)
    result = ConfdClient(["no.example.com"], [SECRET]).query(0, timeout_s=0.3)
    assert not ended.is_set()  # it was not waited for
    answers.set()
    assert result.newest is None


def test_a_name_is_tried_at_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    with peers(says(1)) as [peer]:
        port = peer.socket.getsockname()[1]
        real = socket.getaddrinfo

        def both(host: str, *rest: object, **options: object) -> object:
            if host != "two.example.com":
                return real(host, *rest, **options)  # type: ignore[arg-type]
            if options.get("flags"):
                raise socket.gaierror
            kind = (socket.AF_INET, socket.SOCK_DGRAM, 17, "")
            return [(*kind, ("127.0.0.3", port)), (*kind, ("127.0.0.1", port))]

        monkeypatch.setattr(socket, "getaddrinfo", both)
        assert roles(f"two.example.com:{port}").answer() == 1


# What is carried.


def test_ipv6_and_ipv4_peers_are_asked_together() -> None:
    with peers(says(1)) as [four], peers(says(1), address="::1") as [six]:
        result = roles(four, six)
    assert {str(one.peer) for one in result.replies} == {four.address, six.address}
    assert six.address.startswith("[::1]:")


def test_the_largest_answers_arrive_from_all() -> None:
    def large(heard: Heard) -> list[bytes]:
        room = LARGEST_DATAGRAM - len(heard.reply("", 42))
        datagram = heard.reply("x" * room, 42)
        assert len(datagram) == LARGEST_DATAGRAM
        return [datagram]

    with peers(*[large] * 6) as them:
        result = client(*them).query(RequestType.CONFIG, "/", patient=True)
    assert len(result.replies) == 6
    assert not result.disagreement


# The faces.


def test_several_threads_ask_with_one_client() -> None:
    def double(heard: Heard) -> list[bytes]:
        return [heard.reply(heard.content["query"] * 2, 42)]

    with peers(double) as [peer], ThreadPoolExecutor(10) as threads:
        asking = client(peer)
        asked = [questions.instance_primary_node(str(n)) for n in range(50)]
        answers = list(threads.map(asking.ask, asked))
    assert answers == [str(n) * 2 for n in range(50)]


def test_no_descriptor_is_left() -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with peers(says(1), silent) as them:
        before = count()
        for _ in range(5):
            roles(*them, closed_port(), timeout_s=0.05)
        assert count() == before


# The command.


@pytest.fixture
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    entry = EntryPoint("confd", "brine.confd.cli:COMMAND")
    monkeypatch.setattr(cli, "entry_points", lambda group: [entry] * (group == "brine.commands"))
    file = tmp_path / "hmac.key"
    file.write_bytes(SECRET)
    file.chmod(0o600)
    return file


def brine(key_file: Path, *arguments: str, to: Iterable[ScriptedPeer | str]) -> int:
    addresses = [one if isinstance(one, str) else one.address for one in to]
    named = [f"--peer={one}" for one in addresses]
    return cli.main(["confd", *arguments, "--key", str(key_file), *named])


def test_ping_shows_who_answers(key_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = closed_port()
    with peers(says(3000000, 0), says("no configuration", 0, status=1)) as [good, bad]:
        assert brine(key_file, "ping", to=[good, bad, gone]) == 4
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == ["PEER", "ANSWER", "ROUND", "TRIP"]
        rows = {line.split()[0]: line.split()[1:] for line in lines[1:]}
        assert rows[good.address][:2] == ["version", "3000000"]
        assert rows[good.address][3] == "ms"
        assert rows[bad.address][:3] == ["error:", "no", "configuration"]
        assert rows[gone] == ["refused", "-"]

        assert brine(key_file, "ping", to=[good]) == 0
        assert brine(key_file, "ping", to=[good, bad]) == 1
        assert brine(key_file, "ping", to=[gone]) == 3
        capsys.readouterr()

        assert brine(key_file, "ping", "--json", to=[good, gone]) == 4
    shown = json.loads(capsys.readouterr().out)
    assert (shown["asked"], shown["answered"]) == (2, 1)
    by_peer = {row.pop("peer"): row for row in shown["peers"]}
    assert by_peer[good.address].pop("round_trip_ms") > 0
    assert by_peer == {
        good.address: {"answer": 3000000, "status": 0, "trouble": None},
        gone: {"answer": None, "status": None, "trouble": "refused", "round_trip_ms": None},
    }


def test_the_manuals_client_gets_an_answer() -> None:
    manual = Path(__file__).parents[2] / "docs/man/confd-protocol.7.rst"
    section = manual.read_text().split("A CLIENT IN A FEW LINES\n")[1].split("GANETI'S DAEMON")[0]
    program: dict[str, Any] = {}
    exec(textwrap.dedent(section.split("::\n")[1]), program)

    def noise_and_answer(heard: Heard) -> list[bytes]:
        return [b"noise", heard.reply(1, salt="x"), heard.reply("192.0.2.7", 42)]

    with peers(noise_and_answer) as [peer]:
        host, port = peer.address.split(":")
        reply = program["ask"](host, int(port), SECRET, 2, {"1": "198.51.100.7"})
    assert reply == {"protocol": 1, "status": 0, "answer": "192.0.2.7", "serial": 42}
    assert peer.heard[0].content["query"] == {"1": "198.51.100.7"}
