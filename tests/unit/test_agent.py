"""The guest agent, which is a program in somebody's guest: it may answer, or do anything else."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from brine.common import paths, peer
from brine.instance.kvm.guest import shut_down_by_agent

Script = Callable[["Agent"], object]
TIMEOUT_S = 0.3


class Agent:
    """The guest's end of the channel, as QEMU passes it on."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("rb")
        self.heard: list[dict[str, Any]] = []

    def hear(self) -> dict[str, Any]:
        """The next command; an empty one when there is none any more."""
        line = self._lines.readline()
        command: dict[str, Any] = json.loads(line) if line else {}
        if command:
            self.heard.append(command)
        return command

    def say(self, message: dict[str, Any] | bytes) -> None:
        data = message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n"
        self._connection.sendall(data)

    def answer(self, command: dict[str, Any]) -> None:
        self.say({"return": command["arguments"]["id"]})

    def close(self) -> None:
        self._lines.close()
        self._connection.close()


@contextmanager
def agent(path: Path, script: Script) -> Iterator[list[dict[str, Any]]]:
    """An agent that plays `script`; what it has heard is there when the block has ended."""
    heard: list[dict[str, Any]] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        listener.settimeout(10)

        def serve() -> None:
            connection, _ = listener.accept()
            connection.settimeout(10)
            it = Agent(connection)
            try:
                script(it)
                while it.hear():  # until the other end has gone
                    pass
            except ConnectionError:
                pass  # it has gone while this one still spoke
            finally:
                heard.extend(it.heard)
                it.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield heard
        finally:
            thread.join(20)
    assert not thread.is_alive()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(peer, "runs_in", lambda *_: True)
    monkeypatch.setattr(paths, "CONTROL_DIR", tmp_path)
    return tmp_path / "web1.agent"


def test_who_is_not_of_its_unit_hears_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "runs_in", lambda *_: False)
    done, heard, _ = ask(path, Agent.hear)
    assert not done
    assert heard == []


def ask(
    path: Path, script: Script, *, timeout_s: float = TIMEOUT_S
) -> tuple[bool, list[str], float]:
    """Whether an agent did as it was told, what it heard, and how long that took."""
    with agent(path, script) as heard:
        begun = time.monotonic()
        done = shut_down_by_agent("web1", timeout_s=timeout_s)
        took_s = time.monotonic() - begun
    return done, [command["execute"] for command in heard], took_s


def test_an_agent_that_lives_is_told_to_shut_down(path: Path) -> None:
    def script(it: Agent) -> None:
        it.answer(it.hear())

    with agent(path, script) as heard:
        assert shut_down_by_agent("web1", timeout_s=10)
    sync, shutdown = heard
    assert sync["execute"] == "guest-sync"
    assert shutdown == {"execute": "guest-shutdown", "arguments": {"mode": "powerdown"}}


def test_one_that_is_silent_is_told_nothing_more(path: Path) -> None:
    done, heard, took_s = ask(path, Agent.hear)
    assert not done
    assert heard == ["guest-sync"]
    assert took_s < 10 * TIMEOUT_S


def test_late_answers_to_earlier_questions_come_before(path: Path) -> None:
    def script(it: Agent) -> None:
        it.say({"return": 1})
        command = it.hear()
        it.say({"return": {"pid": 4711}})
        it.say({"error": {"class": "CommandNotFound", "desc": "what?"}})
        it.answer(command)

    done, heard, _ = ask(path, script, timeout_s=10)
    assert done
    assert heard == ["guest-sync", "guest-shutdown"]


def test_only_late_answers_are_no_sign_of_life(path: Path) -> None:
    def script(it: Agent) -> None:
        mark = it.hear()["arguments"]["id"]
        it.say({"return": mark + 1})
        it.say({"id": mark})

    done, heard, _ = ask(path, script)
    assert not done
    assert heard == ["guest-sync"]


def test_an_answer_in_pieces(path: Path) -> None:
    def script(it: Agent) -> None:
        mark = it.hear()["arguments"]["id"]
        for byte in b'\xff{"return": %d}\n' % mark:  # 0xff begins an answer anew
            it.say(bytes([byte]))

    assert ask(path, script, timeout_s=10)[0]


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\x80\xff\xfe\n",
        b"login: \n",
        b"[[\n]]\n",
        b"[" * 60_000 + b"\n",  # deeper than Python goes
        b'{"return": ' + b"9" * 10_000 + b"}\n",  # longer than it counts
        b'{"return": NaN}\n',
        b"5\nnull\n[]\n",
    ],
)
def test_garbage_is_passed_over(path: Path, garbage: bytes) -> None:
    def script(it: Agent) -> None:
        command = it.hear()
        it.say(garbage)
        it.answer(command)

    done, heard, _ = ask(path, script, timeout_s=10)
    assert done
    assert heard == ["guest-sync", "guest-shutdown"]


def test_garbage_without_end_is_no_answer(path: Path) -> None:
    def script(it: Agent) -> None:
        it.hear()
        while True:
            it.say(b"x" * 4096)

    done, _, took_s = ask(path, script)
    assert not done
    assert took_s < 10 * TIMEOUT_S


# A process of its own, that is as quick as it has to be.
_DRIBBLER = """
import socket, sys, time
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen(1)
print("ready", flush=True)
connection, _ = listener.accept()
while True:
    connection.sendall(sys.argv[2].encode())
    time.sleep(0.0001)
"""


@pytest.mark.parametrize("drop", ["\n", "1\n", " "])
def test_one_that_dribbles_has_no_more_time_than_a_silent_one(path: Path, drop: str) -> None:
    command = [sys.executable, "-c", _DRIBBLER, str(path), drop]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=quiet) as dribbler:
        assert dribbler.stdout
        assert dribbler.stdout.readline() == b"ready\n"
        begun = time.monotonic()
        assert not shut_down_by_agent("web1", timeout_s=TIMEOUT_S)
        assert time.monotonic() - begun < 10 * TIMEOUT_S
        dribbler.kill()


@pytest.mark.parametrize("after", [0, 1])
def test_one_that_ends_meanwhile(path: Path, after: int) -> None:
    def script(it: Agent) -> None:
        for _ in range(after):
            it.hear()
        it.close()
        raise ConnectionError

    assert not shut_down_by_ended(path, script)


def shut_down_by_ended(path: Path, script: Script) -> bool:
    with agent(path, script):
        return shut_down_by_agent("web1", timeout_s=TIMEOUT_S)


def test_there_is_none(path: Path) -> None:
    assert not shut_down_by_agent("web1", timeout_s=TIMEOUT_S)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
        assert not shut_down_by_agent("web1", timeout_s=TIMEOUT_S)


def test_as_many_wait_for_it_as_may(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(str(path))
        listener.listen(0)
        first.connect(str(path))
        assert not shut_down_by_agent("web1", timeout_s=TIMEOUT_S)
