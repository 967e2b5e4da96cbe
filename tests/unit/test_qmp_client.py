"""The QMP client against a scripted peer on real sockets."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from brine.common.qmp.client import QmpClient
from brine.common.qmp.wire import QmpClosedError, QmpCommandError, QmpProtocolError, QmpTimeoutError
from lab.qmp_peer import Peer, peer


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "q"


def test_a_command_gets_its_own_answer(path: Path) -> None:
    async def script(it: Peer) -> None:
        await it.negotiate()
        first, second = await it.hear(), await it.hear()
        await it.say({"return": second["execute"], "id": second["id"]})
        await it.say({"return": "stray", "id": "who"}, {"event": "RTC_CHANGE"})
        await it.say({"return": first["execute"], "id": first["id"]})

    async def story() -> None:
        async with peer(path, script), QmpClient.connect(path) as qmp:
            assert qmp.greeting.version == (10, 0, 0)
            answers = await asyncio.gather(qmp.execute("one"), qmp.execute("two"))
            assert list(answers) == ["one", "two"]

    asyncio.run(story())


def test_a_refusal_is_an_error_with_qemus_words(path: Path) -> None:
    async def script(it: Peer) -> None:
        await it.negotiate()
        command = await it.hear()
        assert command["arguments"] == {"id": "x"}
        error = {"class": "DeviceNotFound", "desc": "Device 'x' not found"}
        await it.say({"error": error, "id": command["id"]})

    async def story() -> None:
        async with peer(path, script), QmpClient.connect(path) as qmp:
            with pytest.raises(QmpCommandError, match="refused device_del: Device 'x'") as caught:
                await qmp.execute("device_del", {"id": "x"})
            assert caught.value.error_class == "DeviceNotFound"

    asyncio.run(story())


def test_events_are_kept_until_taken(path: Path) -> None:
    async def script(it: Peer) -> None:
        await it.negotiate()
        await it.say({"event": "STOP"}, {"event": "RESUME"})

    async def story() -> None:
        async with peer(path, script), QmpClient.connect(path) as qmp:
            await asyncio.sleep(0.05)
            assert (await qmp.next_event()).name == "STOP"
            assert (await qmp.next_event(timeout_s=1)).name == "RESUME"
            with pytest.raises(QmpClosedError):
                await qmp.next_event(timeout_s=1)
            with pytest.raises(QmpClosedError):
                await qmp.next_event(timeout_s=1)

    asyncio.run(story())


def test_descriptors_travel_with_their_command(path: Path) -> None:
    received = []

    async def script(it: Peer) -> None:
        await it.negotiate()
        command = await it.hear()
        received.extend(it.descriptors)
        await it.say({"return": {}, "id": command["id"]})

    async def story() -> None:
        read_end, write_end = os.pipe()
        async with peer(path, script), QmpClient.connect(path) as qmp:
            await qmp.execute("getfd", {"fdname": "tap"}, descriptors=[write_end])
        os.close(write_end)
        (theirs,) = received
        os.write(theirs, b"through")
        os.close(theirs)
        assert os.read(read_end, 100) == b"through"
        assert os.read(read_end, 100) == b"", "a copy of the write end is left somewhere"
        os.close(read_end)

    asyncio.run(story())


def test_no_answer_in_time(path: Path) -> None:
    async def script(it: Peer) -> None:
        await it.negotiate()
        late = await it.hear()
        command = await it.hear()
        await it.say({"return": 1, "id": late["id"]}, {"return": 2, "id": command["id"]})

    async def story() -> None:
        async with peer(path, script), QmpClient.connect(path) as qmp:
            with pytest.raises(QmpTimeoutError, match=r"no answer to query-status within 0\.05 s"):
                await qmp.execute("query-status", timeout_s=0.05)
            assert await qmp.execute("query-name") == 2

    asyncio.run(story())


def test_a_command_that_is_out_of_time_is_not_sent(path: Path) -> None:
    heard: list[str] = []

    async def script(it: Peer) -> None:
        await it.negotiate()
        with pytest.raises(ConnectionError):
            while True:
                heard.append((await it.hear())["execute"])

    async def story() -> None:
        async with peer(path, script), QmpClient.connect(path, limit_s=1) as qmp:
            with pytest.raises(QmpTimeoutError, match="no answer to first within"):
                await qmp.execute("first")
            with pytest.raises(QmpTimeoutError, match="no time is left for second"):
                await qmp.execute("second")

    asyncio.run(story())
    assert heard == ["first"]


def test_the_end_of_qemu_fails_what_waits(path: Path) -> None:
    async def script(it: Peer) -> None:
        await it.negotiate()
        await it.hear()

    async def story() -> None:
        async with peer(path, script), QmpClient.connect(path) as qmp:
            with pytest.raises(QmpClosedError):
                await qmp.execute("quit")
            with pytest.raises(QmpClosedError):
                await qmp.execute("quit")

    asyncio.run(story())


def test_a_busy_socket_gives_no_greeting(path: Path) -> None:
    async def script(_: Peer) -> None:
        await asyncio.sleep(0.3)

    async def story() -> None:
        async with peer(path, script):
            with pytest.raises(QmpTimeoutError, match="no greeting") as caught:
                async with QmpClient.connect(path, timeout_s=0.1):
                    pass
            assert "another client" in (caught.value.hint or "")

    asyncio.run(story())


@pytest.mark.parametrize("line", [b"SSH-2.0\r\n", b'{"event": "STOP"}\r\n', b"\xff\n"])
def test_a_peer_that_is_no_qemu(path: Path, line: bytes) -> None:
    async def script(it: Peer) -> None:
        await it.say(line)

    async def story() -> None:
        async with peer(path, script):
            with pytest.raises(QmpProtocolError):
                async with QmpClient.connect(path):
                    pass

    asyncio.run(story())


def test_nobody_there(path: Path) -> None:
    async def story() -> None:
        with pytest.raises(QmpClosedError, match="No such file"):
            async with QmpClient.connect(path):
                pass

    asyncio.run(story())


def test_a_large_answer_in_small_pieces(path: Path) -> None:
    big = "x" * 300_000

    async def script(it: Peer) -> None:
        await it.negotiate()
        command = await it.hear()
        line = json.dumps({"return": big, "id": command["id"]}).encode() + b"\r\n"
        for start in range(0, len(line), 50_000):
            await it.say(line[start : start + 50_000])
            await asyncio.sleep(0.001)

    async def story() -> None:
        async with peer(path, script), QmpClient.connect(path) as qmp:
            assert await qmp.execute("query-block") == big

    asyncio.run(story())
