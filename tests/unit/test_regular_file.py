"""Reading a file where there may be something else, which is not waited for."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from brine.common.files import read_regular


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_file_is_read_whole_and_through_a_link(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 100_000)
    (tmp_path / "link").symlink_to(file)
    before = open_descriptors()
    assert read_regular(file) == read_regular(tmp_path / "link") == b"x" * 100_000
    assert open_descriptors() == before


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    before = open_descriptors()
    for name, said in {
        tmp_path / "fifo": "Is no regular file",
        Path("/dev/zero"): "Is no regular file",
        tmp_path: "Is a directory",
        tmp_path / "nothing": "No such file or directory",
    }.items():
        with pytest.raises(OSError, match=said) as told:
            read_regular(name)
        assert told.value.filename == str(name)
    assert open_descriptors() == before


def test_a_socket_is_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        with pytest.raises(OSError, match="No such device or address"):
            read_regular(tmp_path / "socket")
