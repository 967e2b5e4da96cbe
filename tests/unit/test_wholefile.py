"""Whole-file writes: the new content or the old, and nothing beside it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from brine.common.files import unfinished, write_whole


def test_content_and_mode_are_what_was_asked(tmp_path: Path) -> None:
    file = tmp_path / "x"
    old_umask = os.umask(0o077)
    try:
        write_whole(file, b"one", mode=0o640)
    finally:
        os.umask(old_umask)
    assert file.read_bytes() == b"one"
    assert file.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("step", ["fsync", "rename", "fchmod"])
def test_a_fault_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    file = tmp_path / "x"
    write_whole(file, b"old")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="full"):
        write_whole(file, b"new")
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_reader_of_the_old_file_keeps_it(tmp_path: Path) -> None:
    file = tmp_path / "x"
    write_whole(file, b"old")
    with file.open("rb") as reader:
        write_whole(file, b"new", durable=False)
        assert reader.read() == b"old"
    assert file.read_bytes() == b"new"


def test_a_folder_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "no" / "x", b"")


def test_what_a_writer_that_is_alone_left_makes_way_for_the_next(tmp_path: Path) -> None:
    file, other = tmp_path / "x", tmp_path / "other"
    other.write_text("somebody else's")
    # As a link, it would have the next writer write elsewhere.
    for left in (unfinished(file).write_text, lambda _: unfinished(file).symlink_to(other)):
        left("half a fi")
        write_whole(file, b"new", alone=True)
        assert file.read_bytes() == b"new"
        assert sorted(tmp_path.iterdir()) == [other, file]
    assert other.read_text() == "somebody else's"
