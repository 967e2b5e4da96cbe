"""Markers: whole files that name their run, held by several, in a folder with obstacles."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from brine.common import paths
from brine.vm import markers
from brine.vm.markers import (
    MarkerKind,
    held_marker,
    is_held,
    read_marker,
    remove_marker,
    remove_unheld,
    write_marker,
)

RUN = "0d" * 16
OTHER = "0e" * 16


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The node's own folder of marks."""
    monkeypatch.setattr(paths, "MARKS_DIR", tmp_path)
    return tmp_path


def loop(path: Path) -> None:
    path.symlink_to(path)


def sock(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def full_folder(path: Path) -> None:
    (path / "in it").mkdir(parents=True)


PLANTED: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "file": Path.touch,
    "link": lambda path: path.symlink_to(path.parent / "elsewhere"),
    "loop": loop,
    "folder": Path.mkdir,
    "full folder": full_folder,
    "fifo": os.mkfifo,
    "socket": sock,
}


def shown(folder: Path) -> list[str]:
    """The names in the folder, without those that were moved aside."""
    return sorted(name for name in os.listdir(folder) if ".aside-" not in name)


def test_a_mark_is_read_as_it_was_written_by_everybody(folder: Path) -> None:
    before = os.umask(0o077)
    try:
        write_marker(MarkerKind.VERDICT, "web1", run=RUN, who="user", cause="guest-shutdown")
    finally:
        os.umask(before)
    assert (folder / "web1.verdict").stat().st_mode & 0o777 == 0o644
    mark = read_marker(MarkerKind.VERDICT, "web1")
    assert mark
    assert (mark.kind, mark.name, mark.run) == (MarkerKind.VERDICT, "web1", RUN)
    assert mark.facts == {"who": "user", "cause": "guest-shutdown"}
    assert mark.made_at == (folder / "web1.verdict").stat().st_mtime
    write_marker(MarkerKind.VERDICT, "web1", run=OTHER, durable=True)
    assert read_marker(MarkerKind.VERDICT, "web1", run=OTHER)
    assert read_marker(MarkerKind.VERDICT, "web1", run=RUN) is None
    assert shown(folder) == ["web1.verdict"]
    for name in ("", "a/b", "../x", "a\0b"):
        with pytest.raises(ValueError, match="no instance's name"):
            write_marker(MarkerKind.STOP, name, run=RUN)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"run": 1}',
        '{"run": ""}',
        "\xff",
        "[" * 10_000,
        '{"run": "' + "0" * 100_000 + '"}',
    ],
)
def test_a_damaged_mark_says_nothing_and_makes_way(folder: Path, text: str) -> None:
    path = folder / "web1.stop"
    path.write_text(text, encoding="latin-1")
    assert read_marker(MarkerKind.STOP, "web1") is None
    with held_marker(MarkerKind.STOP, "web1", run=RUN):
        assert read_marker(MarkerKind.STOP, "web1", run=RUN)
    path.write_text(text, encoding="latin-1")
    write_marker(MarkerKind.STOP, "web1", run=RUN)
    assert read_marker(MarkerKind.STOP, "web1", run=RUN)


@pytest.mark.parametrize("what", PLANTED)
def test_whatever_stands_in_its_place_a_mark_is_made_and_removed(folder: Path, what: str) -> None:
    path = folder / "web1.stop"
    PLANTED[what](path)
    assert read_marker(MarkerKind.STOP, "web1") is None
    write_marker(MarkerKind.STOP, "web1", run=RUN)
    assert read_marker(MarkerKind.STOP, "web1", run=RUN)
    assert shown(folder) == ["web1.stop"]
    path.unlink()
    for remove in (remove_marker, remove_unheld):
        PLANTED[what](path)
        assert not is_held(MarkerKind.STOP, "web1")
        remove(MarkerKind.STOP, "web1")
        assert shown(folder) == []
    PLANTED[what](path)
    with held_marker(MarkerKind.STOP, "web1", run=RUN):
        assert read_marker(MarkerKind.STOP, "web1", run=RUN)
        assert is_held(MarkerKind.STOP, "web1")
        assert not (folder / "elsewhere").exists()
    remove_unheld(MarkerKind.STOP, "web1")
    assert shown(folder) == []


def test_whoever_takes_a_lease_holds_up_nobody(folder: Path) -> None:
    """The kernel has who opens such a file wait for its holder, three quarters of a minute."""
    path = folder / "web1.stop"
    path.touch()
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # by which the holder is told
    try:
        with path.open("r+") as leased:
            fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            assert read_marker(MarkerKind.STOP, "web1") is None
            assert not is_held(MarkerKind.STOP, "web1")
            write_marker(MarkerKind.STOP, "web1", run=OTHER)
            assert read_marker(MarkerKind.STOP, "web1", run=OTHER)
        path.unlink()
        path.touch()
        with path.open("r+") as leased:
            fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            with held_marker(MarkerKind.STOP, "web1", run=RUN):
                assert read_marker(MarkerKind.STOP, "web1", run=RUN)
    finally:
        signal.signal(signal.SIGIO, before)


def test_what_somebody_holds_stays() -> None:
    with held_marker(MarkerKind.STOP, "web1", run=RUN) as path:
        with held_marker(MarkerKind.STOP, "web1", run=RUN):
            pass
        remove_unheld(MarkerKind.STOP, "web1")
        assert path.exists()
        assert is_held(MarkerKind.STOP, "web1")
    assert path.exists()
    assert not is_held(MarkerKind.STOP, "web1")
    remove_unheld(MarkerKind.STOP, "web1")
    assert not path.exists()
    remove_unheld(MarkerKind.STOP, "web1")


def test_a_mark_of_another_run_is_replaced_also_where_its_holder_never_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(markers, "_LONGEST_WAIT_S", 0.1)
    with (
        held_marker(MarkerKind.STOP, "web1", run=OTHER),
        held_marker(MarkerKind.STOP, "web1", run=RUN),
    ):
        assert read_marker(MarkerKind.STOP, "web1", run=RUN)
        assert is_held(MarkerKind.STOP, "web1")
    assert read_marker(MarkerKind.STOP, "web1", run=RUN)


def test_who_keeps_others_from_holding_it_loses_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(markers, "_LONGEST_WAIT_S", 0.1)
    write_marker(MarkerKind.STOP, "web1", run=RUN)
    with (folder / "web1.stop").open("r+") as planted:
        whole = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        fcntl.fcntl(planted, fcntl.F_OFD_SETLK, whole)
        assert not is_held(MarkerKind.STOP, "web1")
        remove_unheld(MarkerKind.STOP, "web1")
        assert (folder / "web1.stop").exists()
        with held_marker(MarkerKind.STOP, "web1", run=RUN):
            assert is_held(MarkerKind.STOP, "web1")


def test_many_that_take_and_give_it_up_at_once_each_hold_the_mark_that_is_there() -> None:
    """Of whom one removes it again and again where nobody holds it."""
    faults: list[str] = []

    def take(run: str) -> None:
        for _ in range(20):
            with held_marker(MarkerKind.STOP, "web1", run=run):
                mark = read_marker(MarkerKind.STOP, "web1")
                if mark is None or mark.run != run or not is_held(MarkerKind.STOP, "web1"):
                    faults.append(f"held, and is {mark}")
            remove_unheld(MarkerKind.STOP, "web1")

    several = [threading.Thread(target=take, args=[RUN]) for _ in range(4)]
    for one in several:
        one.start()
    for one in several:
        one.join()
    assert faults == []


def test_two_that_replace_the_mark_of_another_run_hold_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the one that gives up removes what the other goes on doing."""
    write_marker(MarkerKind.STOP, "web1", run=OTHER)
    is_held_too, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with held_marker(MarkerKind.STOP, "web1", run=RUN):
            is_held_too.set()
            may_end.wait(60)

    second, lstat = threading.Thread(target=hold), os.lstat

    def overtaken(path: Path) -> os.stat_result:
        status = lstat(path)
        if threading.current_thread() is threading.main_thread() and not second.ident:
            second.start()
            is_held_too.wait(0.5)  # or it waits
        return status

    monkeypatch.setattr(os, "lstat", overtaken)
    with held_marker(MarkerKind.STOP, "web1", run=RUN):
        assert is_held_too.wait(60)
    remove_unheld(MarkerKind.STOP, "web1")
    assert read_marker(MarkerKind.STOP, "web1", run=RUN)
    may_end.set()
    second.join()


def test_another_process_sees_it_too(folder: Path) -> None:
    program = """
import sys, pathlib
from brine.common import paths
from brine.vm import markers
paths.MARKS_DIR = pathlib.Path(sys.argv[1])
print(markers.is_held("stop", "w"))
markers.remove_unheld("stop", "w")
"""

    def asked() -> str:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", program, str(folder)]
        return subprocess.check_output(command, text=True, env=environment).strip()

    with held_marker(MarkerKind.STOP, "w", run=RUN) as path:
        assert asked() == "True"
        assert path.exists()
    assert asked() == "False"
    assert not path.exists()


def test_a_full_disk_leaves_what_was_there_and_nothing_beside_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_marker(MarkerKind.VERDICT, "web1", run=OTHER)

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        write_marker(MarkerKind.VERDICT, "web1", run=RUN)
    with pytest.raises(OSError, match="No space"), contextlib.ExitStack() as stack:
        stack.enter_context(held_marker(MarkerKind.STOP, "web1", run=RUN))
    assert os.listdir(folder) == ["web1.verdict"]
    assert read_marker(MarkerKind.VERDICT, "web1", run=OTHER)
