"""Marks in a folder where others may write: made, held by several, and never followed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from brine.instance import marks
from brine.instance.marks import held_mark, is_held, make_mark, remove_mark, remove_unheld


def link(path: Path) -> None:
    path.symlink_to(path.parent / "elsewhere")


def loop(path: Path) -> None:
    path.symlink_to(path)


def sock(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


PLANTED: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "file": Path.touch,
    "link": link,
    "loop": loop,
    "folder": Path.mkdir,
    "fifo": os.mkfifo,
    "socket": sock,
}


@pytest.mark.parametrize("what", PLANTED)
def test_whatever_stands_in_its_place_a_mark_is_made_and_removed(tmp_path: Path, what: str) -> None:
    mark = tmp_path / "web1.stopping"
    PLANTED[what](mark)
    make_mark(mark)
    assert mark.is_file()
    assert not mark.is_symlink()
    assert list(tmp_path.iterdir()) == [mark]
    mark.unlink()
    PLANTED[what](mark)
    remove_mark(mark)
    assert list(tmp_path.iterdir()) == []
    PLANTED[what](mark)
    with held_mark(mark):
        assert os.path.lexists(mark)
        assert not (tmp_path / "elsewhere").exists()
    remove_unheld(mark)
    assert list(tmp_path.iterdir()) == []


def test_what_somebody_holds_stays(tmp_path: Path) -> None:
    mark = tmp_path / "web1.stopping"
    with held_mark(mark):
        with held_mark(mark):
            pass
        remove_unheld(mark)
        assert mark.exists()
    assert mark.exists()
    remove_unheld(mark)
    assert not mark.exists()
    remove_unheld(mark)


def test_whoever_looks_whether_it_is_held_does_not_hold_it(tmp_path: Path) -> None:
    mark = tmp_path / "web1.stopping"
    assert not is_held(mark)
    with held_mark(mark):
        assert is_held(mark)
        with held_mark(mark):
            assert is_held(mark)
        assert is_held(mark)
    assert not is_held(mark)
    remove_unheld(mark)
    assert not mark.exists()


def test_who_keeps_others_from_holding_it_loses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write to its folder could keep an instance from being stopped."""
    monkeypatch.setattr(marks, "_LONGEST_WAIT_S", 0.1)
    mark = tmp_path / "web1.stopping"
    with mark.open("w") as planted:
        whole = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        fcntl.fcntl(planted, fcntl.F_OFD_SETLK, whole)
        assert not is_held(mark)
        remove_unheld(mark)
        assert mark.exists()
        with held_mark(mark):
            assert is_held(mark)
            assert not os.path.samestat(mark.stat(), os.fstat(planted.fileno()))


def test_one_that_somebody_holds_in_the_place_of_another_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "web1.stopping"
    mark.touch()
    locked = marks._locked
    with contextlib.ExitStack() as stack:

        def replaced_before(descriptor: int, kind: int) -> bool:
            monkeypatch.setattr(marks, "_locked", locked)
            mark.unlink()
            stack.enter_context(held_mark(mark))
            return locked(descriptor, kind)

        monkeypatch.setattr(marks, "_locked", replaced_before)
        remove_unheld(mark)
        assert is_held(mark)
    remove_unheld(mark)
    assert not mark.exists()


def test_another_process_sees_it_too(tmp_path: Path) -> None:
    mark = tmp_path / "web1.stopping"
    program = (
        "import sys, pathlib; from brine.instance.marks import is_held, remove_unheld;"
        " path = pathlib.Path(sys.argv[1]); print(is_held(path)); remove_unheld(path)"
    )

    def asked() -> str:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", program, str(mark)]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment
        ).stdout.strip()

    with held_mark(mark):
        assert asked() == "True"
        assert mark.exists()
    assert asked() == "False"
    assert not mark.exists()


@pytest.mark.parametrize("what", PLANTED)
def test_what_is_no_mark_is_held_by_nobody(tmp_path: Path, what: str) -> None:
    mark = tmp_path / "web1.stopping"
    PLANTED[what](mark)
    with held_mark(tmp_path / "elsewhere"):
        assert not is_held(mark)


def test_a_folder_with_something_in_it_is_an_error(tmp_path: Path) -> None:
    mark = tmp_path / "web1.stopping"
    (mark / "in").mkdir(parents=True)
    for make in (make_mark, remove_mark, remove_unheld):
        with pytest.raises(OSError, match="not empty"):
            make(mark)
