"""The QMP client that blocks, against a scripted peer on real sockets."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brine.common.qmp.blocking import BlockingQmpClient, without_loop
from brine.common.qmp.wire import (
    QmpClosedError,
    QmpCommandError,
    QmpError,
    QmpProtocolError,
    QmpTimeoutError,
)
from lab.qmp_peer import Peer, Script, peer

Story = Callable[[BlockingQmpClient], Any]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "q"


def play(path: Path, script: Script, story: Story, **limits: Any) -> Any:
    """Have a client do `story` in a thread, while the peer plays its script."""

    def connected() -> Any:
        with BlockingQmpClient.connect(path, **limits) as qmp:
            return story(qmp)

    async def both() -> Any:
        async with peer(path, script):
            return await asyncio.to_thread(connected)

    return asyncio.run(both())


def ask(qmp: BlockingQmpClient, command: str = "query-status") -> Any:
    return without_loop(qmp.execute(command))


def test_its_own_answer_is_taken_and_all_else_passed_over(path: Path) -> None:
    async def script(it: Peer) -> None:
        await it.negotiate()
        for answer in (1, 2):
            command = await it.hear()
            await it.say(
                {"event": "STOP"}, {"return": "stray", "id": "who"}, {"return": "nobody's"}
            )
            await it.say({"return": [command["execute"], answer], "id": command["id"]})

    answers = play(path, script, lambda qmp: [ask(qmp, "one"), ask(qmp, "two")])
    assert answers == [["one", 1], ["two", 2]]


def test_arguments_go_with_their_command(path: Path) -> None:
    async def script(it: Peer) -> None:
        await it.negotiate()
        command = await it.hear()
        await it.say({"return": command["arguments"], "id": command["id"]})

    def story(qmp: BlockingQmpClient) -> Any:
        return without_loop(qmp.execute("qom-list", {"path": "/machine"}))

    assert play(path, script, story) == {"path": "/machine"}


def test_a_refusal_is_an_error_with_qemus_words(path: Path) -> None:
    async def script(it: Peer) -> None:
        await it.negotiate()
        command = await it.hear()
        error = {"class": "DeviceNotFound", "desc": "Device 'x' not found"}
        await it.say({"error": error, "id": command["id"]})

    with pytest.raises(QmpCommandError, match="refused query-status: Device 'x'") as caught:
        play(path, script, ask)
    assert caught.value.error_class == "DeviceNotFound"


def test_a_late_answer_is_not_that_of_the_next_command(path: Path) -> None:
    async def script(it: Peer) -> None:
        await it.negotiate()
        late, command = await it.hear(), await it.hear()
        await it.say({"return": 1, "id": late["id"]}, {"return": 2, "id": command["id"]})

    def story(qmp: BlockingQmpClient) -> Any:
        with pytest.raises(QmpTimeoutError, match=r"no answer to query-status within 0\.2 s"):
            ask(qmp)
        return ask(qmp)

    assert play(path, script, story, answer_timeout_s=0.2) == 2


def test_events_do_not_lengthen_the_wait(path: Path) -> None:
    async def script(it: Peer) -> None:
        await it.negotiate()
        with pytest.raises(ConnectionError):
            while True:
                await it.say({"event": "RTC_CHANGE"})
                await asyncio.sleep(0.01)

    with pytest.raises(QmpTimeoutError):
        play(path, script, ask, answer_timeout_s=0.2)


def test_the_end_of_qemu(path: Path) -> None:
    async def script(it: Peer) -> None:
        await it.negotiate()
        await it.hear()

    with pytest.raises(QmpClosedError, match="QEMU closed the connection"):
        play(path, script, ask)


def test_a_busy_socket_gives_no_greeting(path: Path) -> None:
    async def script(_: Peer) -> None:
        await asyncio.sleep(0.3)

    with pytest.raises(QmpTimeoutError, match="no greeting") as caught:
        play(path, script, ask, timeout_s=0.1)
    assert "another client" in (caught.value.hint or "")


def test_a_queue_of_clients_that_is_full(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(str(path))
        listener.listen(0)
        first.connect(str(path))
        with pytest.raises(QmpTimeoutError, match=re.escape("no greeting within 0.1 s")):
            with BlockingQmpClient.connect(path, timeout_s=0.1):
                pass


@pytest.mark.parametrize("line", [b"SSH-2.0\r\n", b'{"event": "STOP"}\r\n', b"\xff\n"])
def test_a_peer_that_is_no_qemu(path: Path, line: bytes) -> None:
    async def script(it: Peer) -> None:
        await it.say(line)

    with pytest.raises(QmpProtocolError):
        play(path, script, ask)


def test_a_monitor_that_does_not_negotiate(path: Path) -> None:
    async def script(it: Peer) -> None:
        await it.say({"QMP": {}})
        command = await it.hear()
        await it.say({"error": {"class": "GenericError", "desc": "no"}, "id": command["id"]})

    with pytest.raises(QmpProtocolError, match="refused qmp_capabilities"):
        play(path, script, ask)


@pytest.mark.parametrize("made", [False, True])
def test_nobody_there(path: Path, *, made: bool) -> None:
    if made:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    with pytest.raises(QmpClosedError, match="Connection refused" if made else "No such file"):
        with BlockingQmpClient.connect(path):
            pass


def test_a_large_answer_in_small_pieces(path: Path) -> None:
    big = "x" * 300_000

    async def script(it: Peer) -> None:
        await it.negotiate()
        command = await it.hear()
        line = json.dumps({"return": big, "id": command["id"]}).encode() + b"\r\n"
        for start in range(0, len(line), 50_000):
            await it.say(line[start : start + 50_000])
            await asyncio.sleep(0.001)

    assert play(path, script, ask) == big


def test_a_line_without_end_is_cut_off(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brine.common.qmp.blocking.LINE_LIMIT", 100_000)

    async def script(it: Peer) -> None:
        await it.negotiate()
        await it.hear()
        await it.say(b"x" * 200_000)

    with pytest.raises(QmpError, match="a line of more than 100000 bytes"):
        play(path, script, ask)


def test_what_waits_for_something_else_needs_a_loop() -> None:
    with pytest.raises(RuntimeError, match="needs an event loop"):
        without_loop(asyncio.sleep(0))
