"""Marks in a folder where others may write: made, held by several, and never followed."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from brine.instance.marks import held_mark, make_mark, remove_mark, remove_unheld


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


def test_a_folder_with_something_in_it_is_an_error(tmp_path: Path) -> None:
    mark = tmp_path / "web1.stopping"
    (mark / "in").mkdir(parents=True)
    for make in (make_mark, remove_mark, remove_unheld):
        with pytest.raises(OSError, match="not empty"):
            make(mark)
