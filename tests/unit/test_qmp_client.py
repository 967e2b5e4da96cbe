"""The QMP client against a scripted peer on real sockets."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from brine.common.qmp.client import QmpClient
from brine.common.qmp.wire import QmpClosedError, QmpCommandError, QmpProtocolError, QmpTimeoutError
from lab.fake_qemu import FakeQemus, Peer, played


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "q"


def test_a_command_gets_its_own_answer(path: Path) -> None:
    def script(it: Peer) -> None:
        it.negotiate()
        first, second = it.hear(), it.hear()
        it.say({"return": second["execute"], "id": second["id"]})
        it.say({"return": "stray", "id": "who"}, {"event": "RTC_CHANGE"})
        it.say({"return": first["execute"], "id": first["id"]})

    with played(path, script), QmpClient.connect(path) as qmp:
        first = qmp.begin("one")
        assert qmp.answer(first, "one") is None
        assert qmp.execute("two") == "two"
        # Its answer may come before the event, or between.
        while qmp.next_event(timeout_s=10, or_answer=first):
            pass
        assert qmp.answer(first, "one") == "one"


def test_a_refusal_is_an_error_with_qemus_words(path: Path) -> None:
    def script(it: Peer) -> None:
        it.negotiate()
        command = it.hear()
        assert command["arguments"] == {"id": "x"}
        error = {"class": "DeviceNotFound", "desc": "Device 'x' not found"}
        it.say({"error": error, "id": command["id"]})

    with played(path, script), QmpClient.connect(path) as qmp:
        with pytest.raises(QmpCommandError, match="refused device_del: Device 'x'") as caught:
            qmp.execute("device_del", {"id": "x"})
        assert caught.value.error_class == "DeviceNotFound"


def test_events_are_kept_until_taken(path: Path) -> None:
    def script(it: Peer) -> None:
        it.negotiate()
        it.say({"event": "STOP"}, {"event": "RESUME"})

        command = it.hear()
        it.say({"return": {}, "id": command["id"]})

    with played(path, script), QmpClient.connect(path) as qmp:
        qmp.execute("query-name")
        events = [qmp.next_event(timeout_s=0) for _ in range(2)]
        assert [event and event.name for event in events] == ["STOP", "RESUME"]
        for _ in range(2):
            with pytest.raises(QmpClosedError):
                qmp.next_event(timeout_s=10)


def test_what_does_not_come_in_time(path: Path) -> None:
    def script(it: Peer) -> None:
        it.negotiate()
        with pytest.raises(ConnectionError):
            while True:  # events do not lengthen the wait
                it.say({"event": "RTC_CHANGE"})
                time.sleep(0.01)

    with played(path, script), QmpClient.connect(path) as qmp:
        with pytest.raises(QmpTimeoutError):
            qmp.execute("query-status", timeout_s=0.2)
        qmp.drop_events()
        with pytest.raises(QmpTimeoutError, match="no event within 0 s"):
            qmp.next_event(timeout_s=0)


def test_no_answer_is_waited_for_beyond_a_socket_that_is_full(path: Path) -> None:
    def script(it: Peer) -> None:
        it.negotiate()
        done.wait(30)

    done = threading.Event()
    with played(path, script):
        with QmpClient.connect(path) as qmp:
            with pytest.raises(QmpTimeoutError, match="no answer to large"):
                qmp.execute("large", {"text": "x" * 2_000_000}, timeout_s=0.2)
            # Half of it is out: whatever came next would be a part of it.
            with pytest.raises(QmpClosedError, match="a command was interrupted"):
                qmp.execute("query-status")
        done.set()


def test_descriptors_travel_with_their_command(path: Path) -> None:
    received = []

    def script(it: Peer) -> None:
        it.negotiate()
        command = it.hear()
        received.extend(it.descriptors)
        it.say({"return": {}, "id": command["id"]})

    read_end, write_end = os.pipe()
    with played(path, script), QmpClient.connect(path) as qmp:
        qmp.execute("getfd", {"fdname": "tap"}, descriptors=[write_end])
    os.close(write_end)
    (theirs,) = received
    os.write(theirs, b"through")
    os.close(theirs)
    assert os.read(read_end, 100) == b"through"
    assert os.read(read_end, 100) == b"", "a copy of the write end is left somewhere"
    os.close(read_end)


def test_no_answer_in_time(path: Path) -> None:
    def script(it: Peer) -> None:
        it.negotiate()
        late = it.hear()
        command = it.hear()
        it.say({"return": 1, "id": late["id"]}, {"return": 2, "id": command["id"]})

    with played(path, script), QmpClient.connect(path) as qmp:
        with pytest.raises(QmpTimeoutError, match=r"no answer to query-status within 0\.05 s"):
            qmp.execute("query-status", timeout_s=0.05)
        assert qmp.execute("query-name") == 2


def test_a_command_that_is_out_of_time_is_not_sent(path: Path) -> None:
    heard: list[str] = []

    def script(it: Peer) -> None:
        it.negotiate()
        with pytest.raises(ConnectionError):
            while True:
                heard.append(it.hear()["execute"])

    with played(path, script), QmpClient.connect(path, limit_s=1) as qmp:
        with pytest.raises(QmpTimeoutError, match="no answer to first within"):
            qmp.execute("first")
        with pytest.raises(QmpTimeoutError, match="no time is left for second"):
            qmp.execute("second")
    assert heard == ["first"]


def test_events_may_come_before_the_greeting(path: Path) -> None:
    def script(it: Peer) -> None:
        it.say({"event": "STOP"}, {"event": "RESUME"})
        it.negotiate()
        it.say({"event": "RTC_CHANGE"})

    with played(path, script), QmpClient.connect(path) as qmp:
        event = qmp.next_event(timeout_s=10)
        assert event
        assert event.name == "RTC_CHANGE"


def test_a_line_without_end_is_cut_off(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brine.common.qmp.client.LINE_LIMIT", 100_000)

    def script(it: Peer) -> None:
        it.negotiate()
        it.hear()
        it.say(b"x" * 200_000)

    with played(path, script), QmpClient.connect(path) as qmp:
        with pytest.raises(QmpProtocolError, match="a line of more than 100000 bytes"):
            qmp.execute("query-status")
        with pytest.raises(QmpClosedError, match="a line of more than 100000 bytes"):
            qmp.execute("query-status")


def test_a_large_answer_in_small_pieces(path: Path) -> None:
    big = "x" * 300_000

    def script(it: Peer) -> None:
        it.negotiate()
        command = it.hear()
        line = json.dumps({"return": big, "id": command["id"]}).encode() + b"\r\n"
        for start in range(0, len(line), 50_000):
            it.say(line[start : start + 50_000])
            time.sleep(0.001)

    with played(path, script), QmpClient.connect(path) as qmp:
        assert qmp.execute("query-block") == big


def test_two_connections_never_number_a_command_alike(path: Path, qemus: FakeQemus) -> None:
    """QEMU gives its answer to whoever is connected by then."""
    peer = qemus.start(path)
    for _ in range(2):
        with QmpClient.connect(path) as qmp:
            qmp.execute("query-name")
    numbers = [request["id"] for request in peer.requests]
    assert len(set(numbers)) == len(numbers) == 4
    assert all(0 <= number < 2**53 for number in numbers)


# Peers that are none.


def busy(_: Peer) -> None:
    time.sleep(0.3)


def does_not_negotiate(it: Peer) -> None:
    it.say({"QMP": {}})
    command = it.hear()
    it.say({"error": {"class": "GenericError", "desc": "no"}, "id": command["id"]})


@pytest.mark.parametrize(
    ("script", "error", "said"),
    [
        (busy, QmpTimeoutError, "no greeting within 0.1 s"),
        (does_not_negotiate, QmpProtocolError, "refused qmp_capabilities"),
        (lambda it: it.say(b"SSH-2.0\r\n"), QmpProtocolError, "not JSON"),
        (lambda it: it.say(b'{"return": {}}\r\n'), QmpProtocolError, "no QMP greeting"),
        (lambda it: it.say(b"\xff\n"), QmpProtocolError, "not JSON"),
    ],
)
def test_a_peer_that_is_no_qemu(
    path: Path, script: Callable[[Peer], None], error: type[Exception], said: str
) -> None:
    with played(path, script), pytest.raises(error, match=said):
        with QmpClient.connect(path, timeout_s=0.1):
            pass


def test_nobody_there_or_too_many(path: Path) -> None:
    with pytest.raises(QmpClosedError, match="No such file"), QmpClient.connect(path):
        pass
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(str(path))
        with pytest.raises(QmpClosedError, match="Connection refused"), QmpClient.connect(path):
            pass
        listener.listen(0)
        first.connect(str(path))
        with pytest.raises(QmpTimeoutError, match="no greeting within 0.1 s") as caught:
            with QmpClient.connect(path, timeout_s=0.1):
                pass
    assert "another client" in (caught.value.hint or "")
