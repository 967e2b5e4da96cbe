"""The cluster's locks across processes: `brine-lockd`, its clients, and their ends."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from brine.cluster import lock_client
from brine.cluster.lock_client import (
    LockClient,
    LockServerGoneError,
    LockTimeoutError,
)
from brine.common import cli
from brine.common.entry_points import EntryPoint
from brine.common.locks import LockError
from lab.waiting import wait_for

_START = (
    "import os, runpy, sys; os.dup2(int(sys.argv[1]), 3); "
    "runpy.run_module('brine.cluster.lock_server', run_name='__main__')"
)

_BRINE = """
import pathlib, sys
from brine.common import cli, main
from brine.common.entry_points import EntryPoint
from brine.cluster.lock_client import LockClient
LockClient.__init__.__defaults__ = (pathlib.Path(sys.argv.pop(1)),)
commands = [EntryPoint("lock", "brine.cluster.cli:COMMAND")]
cli.entry_points = lambda group: commands if group == "brine.commands" else []
main.run()
"""


class _Server:
    """A server at a listening socket, which outlives it, as systemd's does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(128)
        self.start()

    def start(self) -> None:
        descriptor = self._listener.fileno()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, str(descriptor)],
            pass_fds=[descriptor],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def begin_run(self, *words: str, tty: int | None = None) -> subprocess.Popen[str]:
        """Begin ``brine lock run`` in a process of its own, whose standard error is a pipe.

        :param tty: its controlling terminal.
        """
        command = [sys.executable, "-P", "-c", _BRINE, str(self.path), "lock", "run", *words]
        return subprocess.Popen(
            command if tty is None else ["setsid", "--ctty", *command],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.DEVNULL if tty is None else tty,
            stderr=subprocess.PIPE,
            text=True,
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self._listener.close()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Server]:
    server = _Server(tmp_path / "lockd")
    monkeypatch.setattr(lock_client.LockClient.__init__, "__defaults__", (server.path,))
    entry = EntryPoint("lock", "brine.cluster.cli:COMMAND")
    monkeypatch.setattr(cli, "entry_points", lambda group: [entry] * (group == "brine.commands"))
    try:
        yield server
    finally:
        server.close()


def waiting(count: int) -> bool:
    with LockClient() as client:
        return sum(row["waits_for"] is not None for row in client.rows()) == count


def test_the_end_of_a_client_frees_what_it_holds(server: _Server) -> None:
    first = LockClient()
    first.claim(["instance/web1", "node/n1"], purpose="move web1")
    with LockClient() as second:
        with pytest.raises(LockTimeoutError):
            second.claim(["node/n1"], purpose="reboot n1", timeout_s=0)
        told: list[str] = []
        thread = threading.Thread(
            target=lambda: second.claim(
                ["node/n1"],
                purpose="reboot n1",
                waiting=lambda name, holders: told.append(f"{name} {holders[0]['purpose']}"),
            )
        )
        thread.start()
        wait_for("the second to wait", lambda: waiting(1))
        rows = first.rows()
        assert [(row["purpose"], row["holds"], row["waits_for"]) for row in rows] == [
            ("move web1", ["instance/web1", "node/n1"], None),
            ("reboot n1", [], "node/n1"),
        ]
        assert {row["pid"] for row in rows} == {os.getpid()}
        first.close()
        thread.join(60)
        assert told == ["node/n1 move web1"]
        assert [row["holds"] for row in second.rows()] == [["node/n1"]]
        second.release()
        assert second.rows() == []


def test_the_order_of_levels_is_kept(server: _Server) -> None:
    with LockClient() as client:
        client.claim(["node/n1"], purpose="drain")
        with pytest.raises(LockError, match="is to be taken before node/n1"):
            client.claim(["instance/web1"], purpose="drain")
        client.claim(["storage/n1"], purpose="drain")
        assert [row["locks"] for row in client.rows()] == [["node/n1"], ["storage/n1"]]


@pytest.mark.parametrize(
    "line",
    [
        b"no json\n",
        b"[" * 100_000 + b"\n",
        b'{"claim": "all"}\n',
        b'{"claim": ["instance/web1"], "timeout_s": "soon"}\n',
        b'{"claim": ["instance/web1"], "timeout_s": 1e999}\n',
        b'{"claim": ["instance/web1"], "timeout_s": -1}\n',
        b'{"claim": ["instance/web1"], "timeout_s": 1' + b"0" * 400 + b"}\n",
        b'{"claim": ["instance/web1"], "priority": 0.5}\n',
        b'{"claim": []}\n',
        b'{"claim": ["box/1"]}\n',
        b"null\n",
        b"x" * (2 << 20),
    ],
)
def test_a_client_that_makes_no_sense_harms_no_other(server: _Server, line: bytes) -> None:
    with LockClient() as good, socket.socket(socket.AF_UNIX) as bad:
        good.claim(["instance/web1"], purpose="a good one")
        bad.connect(str(server.path))
        bad.settimeout(60)
        try:
            bad.sendall(line)
            assert "error" in json.loads(bad.makefile().readline())
        except (BrokenPipeError, ConnectionResetError):
            assert len(line) > 1 << 20  # it is cut off before all of it came
        assert [row["purpose"] for row in good.rows()] == ["a good one"]


def test_a_client_that_does_not_read_is_left(server: _Server) -> None:
    with LockClient() as good, socket.socket(socket.AF_UNIX) as bad:
        good.claim([f"instance/web{number}" for number in range(500)], purpose="many")
        bad.connect(str(server.path))
        bad.setblocking(False)
        ask = b'{"list": true}\n' * 1000
        with pytest.raises(OSError, match=r"."):
            for _ in range(100_000):
                try:
                    bad.send(ask)
                except BlockingIOError:
                    time.sleep(0.001)
        assert len(good.rows()) == 1


def test_a_client_that_reads_late_gets_all_its_answers(server: _Server) -> None:
    count = 1000  # of more than a socket holds
    with LockClient() as holder, socket.socket(socket.AF_UNIX) as client:
        holder.claim([f"instance/web{number}" for number in range(50)], purpose="test")
        client.settimeout(60)
        client.connect(str(server.path))
        client.sendall(b'{"list": true}\n' * count)
        assert len(holder.rows()) == 1  # meanwhile another one is served
        with client.makefile("rb") as answers:
            for _ in range(count):
                assert len(json.loads(answers.readline())["locks"]) == 1
        client.sendall(b'{"claim": ["instance/other"]}\n{"release": true}\n')
        with client.makefile("rb") as answers:
            assert [json.loads(answers.readline()) for _ in range(2)] == [
                {"granted": True},
                {"released": True},
            ]


def test_run_has_the_locks_while_its_command_runs(
    server: _Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = 'echo "$1" >"$2/began"; while [ ! -e "$2/end" ]; do sleep 0.01; done; exit 7'
    words = ["lock", "run", "--instance", "web1", "--node", "n1", "--node", "n2", "--"]
    results: list[int] = []
    command = ["sh", "-c", script, "sh", "moved", str(tmp_path)]
    thread = threading.Thread(target=lambda: results.append(cli.main([*words, *command])))
    thread.start()
    wait_for("the command to run", (tmp_path / "began").exists)
    assert cli.main(["lock", "list", "--json"]) == 0
    (row,) = json.loads(capfd.readouterr().out)
    assert row["holds"] == ["instance/web1", "node/n1", "node/n2"]
    assert row["purpose"].startswith("sh -c")
    assert cli.main(["lock", "list"]) == 0
    assert "instance/web1 node/n1 node/n2  exclusive  holds" in capfd.readouterr().out
    with pytest.raises(SystemExit) as end:
        cli.main(["lock", "run", "--node", "n2", "--timeout", "0", "--", "true"])
    assert end.value.code == 1
    assert "waiting for node/n2, which is held by: sh -c" in capfd.readouterr().err
    (tmp_path / "end").touch()
    thread.join(60)
    assert results == [7]
    assert cli.main(["lock", "list"]) == 0
    assert capfd.readouterr().out == "no lock is held\n"


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["run", "--node", "n1", "--", "/no/such"], 127),
        (["run", "--node", "n1", "--", "/etc/passwd"], 126),
        (["run", "--node", "n1", "--", "sh", "-c", "kill -9 $$"], 137),
        (["run", "--", "true"], 2),
        (["run", "--node", "n1"], 2),
        (["run", "--node", "a/b\n", "--", "true"], 1),
        (["run", "--node", "n1", "--timeout", "-1", "--", "true"], 2),
    ],
)
def test_run_ends_as_its_command_does(server: _Server, words: list[str], status: int) -> None:
    try:
        found = cli.main(["lock", *words])
    except SystemExit as end:
        found = int(end.code or 0)
    assert found == status


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)]
)
def test_a_signal_ends_one_who_waits(server: _Server, number: signal.Signals, status: int) -> None:
    with LockClient() as holder:
        holder.claim(["node/n1"], purpose="reboot n1")
        process = server.begin_run("--node", "n1", "--instance", "web1", "--", "true")
        assert process.stderr
        said = process.stderr.readline()
        assert said == f"waiting for node/n1, which is held by: reboot n1 (process {os.getpid()})\n"
        process.send_signal(number)
        assert process.communicate(timeout=60)[1] == ""
        assert process.returncode == status
        wait_for("its claim to end", lambda: waiting(0))
        assert [row["holds"] for row in holder.rows()] == [["node/n1"]]


_TOLD = """
cd "$1"
trap 'echo int >>told' INT
trap 'echo term >>told' TERM
touch began
while [ ! -e end ]; do sleep 0.01; done
exit 7
"""


def test_the_command_is_told_to_end_and_has_its_locks_until_it_has(
    server: _Server, tmp_path: Path
) -> None:
    command = ["sh", "-c", _TOLD, "sh", str(tmp_path)]
    process = server.begin_run("--node", "n1", "--purpose", "drain", "--", *command)
    told = tmp_path / "told"
    wait_for("the command to run", (tmp_path / "began").exists)
    process.send_signal(signal.SIGINT)
    wait_for("the command to be told", lambda: told.exists() and told.read_text() == "int\n")
    process.terminate()
    wait_for("the command to be told again", lambda: told.read_text() == "int\nterm\n")
    with LockClient() as client:
        assert [row["holds"] for row in client.rows()] == [["node/n1"]]
        (tmp_path / "end").touch()
        process.communicate(timeout=60)
        assert process.returncode == 7
        client.claim(["node/n1"], purpose="the next", timeout_s=60)


def test_a_command_that_a_signal_ends_is_waited_for(server: _Server, tmp_path: Path) -> None:
    began = tmp_path / "began"
    script = 'touch "$1"; exec sleep 600'
    process = server.begin_run("--node", "n1", "--", "sh", "-c", script, "sh", str(began))
    wait_for("the command to run", began.exists)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143


def test_ctrl_c_reaches_the_command_once(server: _Server, tmp_path: Path) -> None:
    """The terminal has sent it to both. What is handed on comes in order of the numbers."""
    terminal, end = os.openpty()
    command = ["sh", "-c", _TOLD, "sh", str(tmp_path)]
    process = server.begin_run("--node", "n1", "--", *command, tty=end)
    os.close(end)
    told = tmp_path / "told"
    wait_for("the command to run", (tmp_path / "began").exists)
    os.write(terminal, b"\x03")
    wait_for("the command to be told", lambda: told.exists() and told.read_text() != "")
    process.terminate()
    wait_for("the command to be told again", lambda: "term" in told.read_text())
    (tmp_path / "end").touch()
    process.communicate(timeout=60)
    os.close(terminal)
    assert told.read_text() == "int\nterm\n"


def test_a_command_goes_on_without_its_locks_and_that_is_said(
    server: _Server, tmp_path: Path
) -> None:
    command = ["sh", "-c", _TOLD, "sh", str(tmp_path)]
    process = server.begin_run("--node", "n1", "--", *command)
    wait_for("the command to run", (tmp_path / "began").exists)
    server.kill()
    assert process.stderr
    assert "the locks of this command, which goes on" in process.stderr.readline()
    (tmp_path / "end").touch()
    process.communicate(timeout=60)
    assert process.returncode == 7


def test_a_server_that_ends_is_told_and_asked_again(
    server: _Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    holder = LockClient()
    holder.claim(["node/n1"], purpose="reboot n1")
    results: list[int] = []
    words = ["lock", "run", "--node", "n1", "--", "touch", str(tmp_path / "ran")]
    thread = threading.Thread(target=lambda: results.append(cli.main(words)))
    thread.start()
    wait_for("the command to wait", lambda: waiting(1))
    server.kill()
    with pytest.raises(LockServerGoneError):
        holder.release()
    server.start()
    thread.join(60)
    assert results == [0]
    assert (tmp_path / "ran").exists()
    assert "brine-lockd has ended, and with it all locks; asking again" in capfd.readouterr().err


def test_processes_that_are_killed_hold_nothing(server: _Server) -> None:
    script = (
        "import sys, pathlib; from brine.cluster.lock_client import LockClient\n"
        "while True:\n"
        "  with LockClient(pathlib.Path(sys.argv[1])) as client:\n"
        "    client.claim(['instance/a', 'instance/b', 'node/n'], purpose='loop')\n"
        "    print('got', flush=True)\n"
        "    client.release()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    chance = random.Random(1)
    for _ in range(5):
        processes = [
            subprocess.Popen(
                [sys.executable, "-P", "-c", script, str(server.path)],
                env=environment,
                stdout=subprocess.PIPE,
            )
            for _ in range(3)
        ]
        for process in processes:
            assert process.stdout
            assert process.stdout.readline() == b"got\n"
        time.sleep(chance.random() / 20)
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        with LockClient() as client:
            client.claim(["instance/a", "instance/b", "node/n"], purpose="the last", timeout_s=60)
            assert [row["purpose"] for row in client.rows()] == ["the last"]
