"""Messages between the two nodes of a move: what a stranger, a liar and a replay get."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from brine.moves import channel, talk
from brine.moves.belongings import LARGEST
from brine.moves.channel import CONTROL
from brine.moves.migration import MoveError
from brine.moves.talk import Asker, Listener, Topic
from cluster_key import new_key
from lab.waiting import wait_for

HERE = "127.0.0.1"
KEY = new_key()


class Target:
    """A target that counts what it is told."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.memory: list[bytes] = []
        self.fault: MoveError | None = None
        self.socket = channel.listen(HERE)
        self.port = int(self.socket.getsockname()[1])
        self.listener = Listener(self.socket, KEY, self.answer, self.take)

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        self.told.append(message)
        if self.fault:
            raise self.fault
        return {"word": "runs" if message["told"] == "go" else "held"}

    def take(self, connection: socket.socket) -> None:
        with connection:
            self.memory.append(connection.recv(100))


@pytest.fixture
def target() -> Iterator[Target]:
    found = Target()
    yield found
    found.listener.close()


@pytest.fixture
def asker(target: Target) -> Iterator[Asker]:
    found = Asker(HERE, target.port, KEY)
    yield found
    found.close()


def test_messages_and_memory_on_one_port(target: Target, asker: Asker) -> None:
    assert asker.ask(Topic.HOLD) == {"word": "held"}
    assert asker.ask(Topic.GO, serial=7) == {"word": "runs"}
    with asker.memory() as connection:
        connection.sendall(b"the guest")
        wait_for("memory", lambda: target.memory == [b"the guest"], timeout_s=30)
    asker.close()
    assert asker.ask(Topic.GO, serial=7) == {"word": "runs"}  # on another connection
    assert target.told == [{"told": "hold"}, *[{"told": "go", "serial": 7}] * 2]


def test_a_conversation_goes_on_after_a_long_silence(
    target: Target,
    asker: Asker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A large disk is copied between two messages, and the target ends the connection meanwhile."""
    monkeypatch.setattr(talk, "_QUIET_S", 0.01)
    assert asker.ask(Topic.HOLD) == {"word": "held"}
    with channel.call(HERE, target.port, key=KEY, purpose=CONTROL).connection as later:
        assert heard(later) == b""  # it has ended
    monkeypatch.undo()
    assert asker.ask(Topic.GO, serial=7) == {"word": "runs"}
    assert [one["told"] for one in target.told] == ["hold", "go"]
    assert caplog.text == ""


def test_another_key_tells_nothing(target: Target) -> None:
    stranger = Asker(HERE, target.port, new_key())
    with pytest.raises(MoveError, match="has refused the key"):
        stranger.ask(Topic.GO, serial=7)
    assert target.told == []


def test_a_process_that_has_ended_has_refused_no_key() -> None:
    with channel.listen(HERE) as listener:
        port = int(listener.getsockname()[1])
        ended = threading.Thread(target=lambda: listener.accept()[0].close())
        ended.start()
        with pytest.raises(MoveError, match="before the other node's greeting"):
            channel.call(HERE, port, key=KEY, purpose=CONTROL)
        ended.join()


def signed(session: bytes, number: int, body: str, side: bytes = b"source") -> bytes:
    """A line that the source has sealed and signed."""
    name = (b"talk", side, session, number.to_bytes(8, "big"))
    sealed = base64.b64encode(KEY.sealed(body.encode(), *name))
    proof = KEY.proof(*name, sealed).hex()
    return json.dumps([number, sealed.decode(), proof]).encode() + b"\n"


def changed(line: bytes) -> bytes:
    """A line with another body under its proof."""
    number, body, proof = json.loads(line)
    other = bytes(one ^ 1 for one in base64.b64decode(body))
    return json.dumps([number, base64.b64encode(other).decode(), proof]).encode() + b"\n"


GO = json.dumps({"told": "go", "serial": 7})


def heard(connection: socket.socket) -> bytes:
    """What the target says until it ends the connection, or is silent."""
    connection.settimeout(30)
    found = b""
    while b"\n" not in found and (data := connection.recv(4096)):
        found += data
    return found


def is_answer(line: bytes, session: bytes) -> bool:
    """Whether a line is the target's answer to *go*, the first of a connection."""
    sealed = base64.b64decode(json.loads(line)[1])
    found = KEY.sealed(sealed, b"talk", b"target", session, (1).to_bytes(8, "big"))
    return bool(json.loads(found) == {"word": "runs"})


def test_a_signed_line_is_taken(target: Target) -> None:
    call = channel.call(HERE, target.port, key=KEY, purpose=CONTROL)
    with call.connection as connection:
        connection.sendall(signed(call.session, 1, GO))
        assert is_answer(heard(connection), call.session)
    assert [one["told"] for one in target.told] == ["go"]


@pytest.mark.parametrize(
    "line",
    [
        lambda session: signed(bytes(32), 1, GO),  # of another connection: a replay
        lambda session: signed(session, 2, GO),  # one was left out
        lambda session: signed(session, 0, GO),
        lambda session: b'[-1, "", ""]\n',
        lambda session: signed(session, 1, GO, b"target"),  # its own words
        lambda session: changed(signed(session, 1, GO)),
        lambda session: signed(session, 1, "[]"),
        lambda session: b'[1, "{}", null]\n',
        lambda session: b"{}\n",
        lambda session: b"\xff\xfe\n",
        lambda session: b"[" * 5000 + b"\n",
        lambda session: b"x" * (32 << 20),
    ],
)
def test_any_other_line_ends_the_connection(
    target: Target, line: Any, caplog: pytest.LogCaptureFixture
) -> None:
    call = channel.call(HERE, target.port, key=KEY, purpose=CONTROL)
    with call.connection as connection:
        with caplog.at_level(logging.WARNING):
            try:
                connection.sendall(line(call.session))
                assert heard(connection) == b""
            except OSError:
                pass  # it was ended before all was sent
            wait_for("a record", lambda: bool(caplog.records), timeout_s=30)
    assert target.told == []
    assert len(caplog.records) == 1
    assert Asker(HERE, target.port, KEY).ask(Topic.HOLD) == {"word": "held"}


def test_a_stranger_on_the_way_can_read_nothing(target: Target) -> None:
    """Neither the question nor the answer, and no two of them look alike."""
    call = channel.call(HERE, target.port, key=KEY, purpose=CONTROL)
    with call.connection as connection:
        lines = [signed(call.session, number, GO) for number in (1, 2)]
        for line in list(lines):
            connection.sendall(line)
            lines.append(heard(connection))
    assert len(target.told) == 2
    bodies = [base64.b64decode(json.loads(line)[1]) for line in lines]
    assert len(set(bodies)) == 4
    assert not [one for one in bodies if b"go" in one or b"runs" in one or b"told" in one]


def test_what_comes_along_may_be_large(target: Target, asker: Asker) -> None:
    files = {"uefi_vars": "A" * (4 * LARGEST // 3)}
    assert asker.ask(Topic.BRING, files=files) == {"word": "held"}
    assert target.told == [{"told": "bring", "files": files}]


def test_a_line_that_was_sent_before_is_not_taken_again(target: Target) -> None:
    call = channel.call(HERE, target.port, key=KEY, purpose=CONTROL)
    line = signed(call.session, 1, GO)
    with call.connection as connection:
        connection.sendall(line)
        assert is_answer(heard(connection), call.session)
        connection.sendall(line)
        assert heard(connection) == b""
    again = channel.call(HERE, target.port, key=KEY, purpose=CONTROL)
    with again.connection as connection:
        connection.sendall(line)
        assert heard(connection) == b""
    assert len(target.told) == 1


def test_many_strangers_keep_no_one_from_talking(target: Target, asker: Asker) -> None:
    assert asker.ask(Topic.HOLD) == {"word": "held"}
    strangers = [socket.create_connection((HERE, target.port)) for _ in range(40)]
    try:
        assert asker.ask(Topic.HOLD) == {"word": "held"}
        deadline = time.monotonic() + 30
        while True:  # strangers are in the way for a moment
            try:
                assert Asker(HERE, target.port, KEY).ask(Topic.HOLD) == {"word": "held"}
                break
            except MoveError:
                assert time.monotonic() < deadline
    finally:
        for one in strangers:
            one.close()


def test_a_caller_that_goes_for_another_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has said something in the same moment, and the listener is told of first."""

    class Selector(selectors.SelectSelector):
        def select(self, timeout: float | None = None) -> Any:
            found = super().select(timeout)
            return sorted(found, key=lambda one: one[0].fileobj is not listener)

    monkeypatch.setattr(selectors, "DefaultSelector", Selector)
    with channel.listen(HERE) as listener, contextlib.ExitStack() as stack:
        address = (HERE, listener.getsockname()[1])

        def connect() -> socket.socket:
            return stack.enter_context(socket.create_connection(address))

        first, *_ = [connect() for _ in range(16)]

        def say_and_connect() -> None:
            first.sendall(b"x")
            connect()

        taken = threading.Timer(1.0, say_and_connect)
        taken.start()
        with pytest.raises(MoveError, match="not connected within"):
            channel.accept_call(listener, key=KEY, purposes=[CONTROL], timeout_s=3.0)
        taken.join()


def test_a_fault_at_the_port_ends_no_listening(
    target: Target, asker: Asker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept = channel.accept_call
    faults = [KeyError(7)]

    def accept_call(*arguments: Any, **keys: Any) -> Any:
        if faults:
            raise faults.pop()
        return accept(*arguments, **keys)

    assert asker.ask(Topic.HOLD) == {"word": "held"}
    monkeypatch.setattr(channel, "accept_call", accept_call)
    channel.connect(HERE, target.port, key=KEY).close()  # it ends the wait of before
    wait_for("the fault", lambda: not faults)
    assert Asker(HERE, target.port, KEY).ask(Topic.HOLD) == {"word": "held"}
    assert "a fault of Brine's" in caplog.text


def test_the_source_hears_why_something_is_not_done(target: Target, asker: Asker) -> None:
    target.fault = MoveError("web1: no space is left")
    assert asker.ask(Topic.HOLD) == {"error": "web1: no space is left"}


def test_the_port_of_a_process_that_was_killed_is_listened_at_again() -> None:
    """Its connections keep the port for a minute, as they were ended from this side."""
    with channel.listen(HERE) as listener:
        port = int(listener.getsockname()[1])
        with socket.create_connection((HERE, port)) as caller:
            listener.accept()[0].close()
            assert caller.recv(1) == b""
    channel.listen(HERE, port).close()


def test_a_target_that_is_silent_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with channel.listen(HERE) as listener:
        asker = Asker(HERE, int(listener.getsockname()[1]), KEY)
        with pytest.raises(MoveError, match="does not answer"):
            asker.ask(Topic.HOLD, timeout_s=0.3)
