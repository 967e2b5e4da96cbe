"""The node's stopper: it stops each instance once, and ends when there is no more to stop."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from brine.common.errors import BrineError
from brine.instance.service import stop
from brine.vm.run import Run


@pytest.fixture
def fifo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """The stopper's end of a pipe, and the one for requests."""
    monkeypatch.setattr(stop, "FOLDER", tmp_path)
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    yield read, write
    os.close(read)
    os.close(write)


def is_locked(file: Path) -> bool:
    with file.open() as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_each_is_stopped_once_and_all_at_once(
    fifo: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"web{number}" for number in range(200)]
    begun: list[tuple[str, int, str]] = []
    all_begun = threading.Event()

    def stop_run(run: Run, pid: int) -> None:
        name = run.name
        begun.append((name, pid, run.id))
        assert is_locked(tmp_path / name)
        if len(begun) == len(names):
            all_begun.set()
        assert all_begun.wait(60), "they are not stopped at once"
        if name == "web7":
            raise BrineError("it does not end")

    monkeypatch.setattr(stop, "stop_run", stop_run)
    lines = [f"{name} run-{name} 17\n" for name in names]
    data = "".join(["web0 run-web0 17\n", *lines]).encode()
    os.write(fifo[1], data[:1000])
    more = threading.Timer(0.1, os.write, (fifo[1], data[1000:]))
    more.start()
    stop.stop_as_told(fifo[0], idle_s=1)
    more.join()
    assert sorted(begun) == sorted((name, 17, f"run-{name}") for name in names)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "line", ["", "web1", "web1 run", "web1 run -1", "../web1 run 17", "\xff run 17", "a b c d"]
)
def test_what_is_no_request_is_said_and_harms_none(
    fifo: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
) -> None:
    stopped: list[str] = []
    monkeypatch.setattr(stop, "stop_run", lambda run, pid: stopped.append(run.name))
    os.write(fifo[1], f"{line}\nweb2 run 18\n".encode("latin-1"))
    stop.stop_as_told(fifo[0], idle_s=0.1)
    assert stopped == ["web2"]
    assert "no such request" in capsys.readouterr().err


def test_who_just_looks_keeps_none_from_being_stopped(
    fifo: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[str] = []
    monkeypatch.setattr(stop, "stop_run", lambda run, pid: stopped.append(run.name))
    looks = os.open(tmp_path / "web1", os.O_RDWR | os.O_CREAT)
    fcntl.flock(looks, fcntl.LOCK_EX)
    ends = threading.Timer(0.3, os.close, [looks])
    ends.start()
    os.write(fifo[1], b"web1 run 17\n")
    stop.stop_as_told(fifo[0], idle_s=0.1)
    ends.join()
    assert stopped == ["web1"]
