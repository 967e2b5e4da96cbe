"""The guest agent: a program in a user's guest, which may answer, or do anything else."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from brine.common import paths, process
from brine.instance.kvm.guest import freeze_by_agent, shut_down_by_agent, thaw_by_agent
from lab.fake_agent import LONG_S, Agent, Script, agent

TIMEOUT_S = 0.3
TOLD = ["guest-sync", "guest-shutdown"]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(process, "runs_in", lambda *_: True)
    monkeypatch.setattr(paths, "CONTROL_DIR", tmp_path)
    return tmp_path / "web1.agent"


def ask(path: Path, script: Script, *, timeout_s: float = LONG_S) -> tuple[bool, list[str]]:
    """Whether an agent was told to shut down, and what it heard."""
    with agent(path, script) as heard:
        done = shut_down_by_agent("web1", timeout_s=timeout_s)
    return done, [command["execute"] for command in heard]


def test_an_agent_that_lives_is_told_to_shut_down(path: Path) -> None:
    with agent(path, Agent.answer) as heard:
        assert shut_down_by_agent("web1", timeout_s=LONG_S)
    assert heard[1] == {"execute": "guest-shutdown", "arguments": {"mode": "powerdown"}}


def test_who_is_not_of_its_unit_hears_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "runs_in", lambda *_: False)
    assert ask(path, Agent.hear) == (False, [])


def no_life(it: Agent) -> None:
    mark = it.hear()["arguments"]["id"]
    it.say({"return": mark + 1})
    it.say({"id": mark})


def garbage_without_end(it: Agent) -> None:
    it.hear()
    while True:
        it.say(b"x" * 4096)


@pytest.mark.parametrize("script", [Agent.hear, no_life, garbage_without_end])
def test_one_that_gives_no_sign_of_life_is_told_nothing_more(path: Path, script: Script) -> None:
    assert ask(path, script, timeout_s=TIMEOUT_S) == (False, ["guest-sync"])


def test_an_answer_in_pieces(path: Path) -> None:
    def script(it: Agent) -> None:
        mark = it.hear()["arguments"]["id"]
        for byte in b'\xff{"return": %d}\n' % mark:  # 0xff begins an answer anew
            it.say(bytes([byte]))

    assert ask(path, script) == (True, TOLD)


@pytest.mark.parametrize(
    "before",
    [
        [{"return": {"pid": 4711}}, {"error": {"class": "CommandNotFound", "desc": "what?"}}],
        [b"\x00\x80\xff\xfe\n", b"login: \n", b"[[\n]]\n", b"5\nnull\n[]\n"],
        [b"[" * 60_000 + b"\n"],  # deeper than Python goes
        [b'{"return": ' + b"9" * 10_000 + b"}\n"],  # longer than it counts
    ],
)
def test_late_answers_and_garbage_are_passed_over(path: Path, before: list[Any]) -> None:
    assert ask(path, lambda it: it.answer(*before)) == (True, TOLD)


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
        assert not shut_down_by_agent("web1", timeout_s=TIMEOUT_S)
        dribbler.kill()


@pytest.mark.parametrize("after", [0, 1])
def test_one_that_ends_meanwhile(path: Path, after: int) -> None:
    def script(it: Agent) -> None:
        for _ in range(after):
            it.hear()
        it.close()
        raise ConnectionError

    assert not ask(path, script)[0]


def test_there_is_none_or_another_is_served(path: Path) -> None:
    assert not shut_down_by_agent("web1", timeout_s=TIMEOUT_S)
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(str(path))
        assert not shut_down_by_agent("web1", timeout_s=TIMEOUT_S)
        listener.listen(0)
        first.connect(str(path))
        assert not shut_down_by_agent("web1", timeout_s=TIMEOUT_S)


def counts(it: Agent) -> None:
    it.answer()
    it.hear()
    it.say({"return": 2})


def refuses(it: Agent) -> None:
    it.answer()
    it.hear()
    it.say({"error": {"class": "GenericError", "desc": "failed to freeze /"}})


def says_nothing_that_counts(it: Agent) -> None:
    it.answer()
    it.hear()
    it.say({"return": {"frozen": 2}})


@pytest.mark.parametrize(
    ("script", "is_done"), [(counts, True), (refuses, False), (says_nothing_that_counts, False)]
)
@pytest.mark.parametrize(
    ("ask_it", "command"),
    [(freeze_by_agent, "guest-fsfreeze-freeze"), (thaw_by_agent, "guest-fsfreeze-thaw")],
)
def test_file_systems_are_frozen_when_the_agent_says_how_many(
    path: Path, ask_it: Any, command: str, script: Script, is_done: bool
) -> None:
    with agent(path, script) as heard:
        assert ask_it("web1", timeout_s=LONG_S if is_done else TIMEOUT_S) is is_done
    assert [one["execute"] for one in heard] == ["guest-sync", command]
