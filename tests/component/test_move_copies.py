"""Files of disks that are copied to another node while no guest uses them, by QEMU's tools."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from brine.moves.copying import FileServer, checksum_of, end_copy, send_file
from brine.moves.migration import MoveError, MoveProgress
from brine.moves.move_key import KeyFolder, MoveKey
from cluster_key import new_key

HERE = "127.0.0.1"
MIB = 1 << 20


def key_in(folder: Path, key: MoveKey) -> KeyFolder:
    found = KeyFolder(folder, folder)
    found.write(key)
    return found


def test_a_file_is_copied_with_its_holes(tmp_path: Path) -> None:
    key = new_key()
    ours, theirs = key_in(tmp_path / "a-key", key), key_in(tmp_path / "b-key", key)
    source, target = tmp_path / "a", tmp_path / "b"
    with source.open("wb") as file:
        file.truncate(64 * MIB + 512)  # of no whole MiB
        file.seek(10 * MIB)
        file.write(os.urandom(2 * MIB))
        file.seek(64 * MIB)
        file.write(b"the end")
    target.write_bytes(b"x" * MIB)  # of a copy that was killed
    server, told = FileServer(HERE, theirs), list[MoveProgress]()
    port, is_zero = server.serve(str(target), source.stat().st_size)
    try:
        stranger = key_in(tmp_path / "c-key", new_key())
        with pytest.raises(MoveError, match="was not copied"):
            send_file(str(source), HERE, port, stranger, is_zero=is_zero)
        send_file(str(source), HERE, port, ours, is_zero=is_zero, tell=told.append)
    finally:
        server.close()
    assert not server.is_open
    assert checksum_of(str(target)) == checksum_of(str(source))
    assert target.stat().st_size == source.stat().st_size
    assert target.stat().st_blocks * 512 < 4 * MIB
    assert told[-1].done <= told[-1].total == source.stat().st_size


def test_a_file_of_no_whole_sectors_is_copied(tmp_path: Path) -> None:
    """As images are that QEMU has just made."""
    key = key_in(tmp_path / "key", new_key())
    source, target = tmp_path / "a", tmp_path / "b"
    source.write_bytes(os.urandom(1000))
    target.touch()
    server = FileServer(HERE, key)
    port, is_zero = server.serve(str(target), 1000)
    try:
        send_file(str(source), HERE, port, key, is_zero=is_zero)
    finally:
        server.close()
    for _ in range(2):
        end_copy(str(target), 1000)
        assert target.read_bytes() == source.read_bytes()


def test_a_copy_that_is_called_off_ends(tmp_path: Path) -> None:
    class CalledOffError(Exception):
        pass

    def call_off(_progress: MoveProgress) -> None:
        raise CalledOffError

    key = key_in(tmp_path / "key", new_key())
    source, target = tmp_path / "a", tmp_path / "b"
    source.write_bytes(bytes(MIB))
    target.touch()
    server = FileServer(HERE, key)
    port, _ = server.serve(str(target), MIB)
    try:
        with pytest.raises(CalledOffError):
            send_file(str(source), HERE, port, key, is_zero=False, tell=call_off)
    finally:
        server.close()
