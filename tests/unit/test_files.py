"""Files: whole or not at all, never waited for, and kept aside where they can't be used."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from brine.common.files import (
    fault_of_writers,
    put_aside,
    read_regular,
    second_name,
    unfinished,
    write_whole,
)


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

    def fail(*_: object, **__: object) -> None:
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


def test_nothing_that_is_kept_gives_way(tmp_path: Path) -> None:
    file, aside = tmp_path / "web1.json", tmp_path / "web1.damaged"
    for number in range(1, 101):
        file.write_text(str(number))
        name = put_aside(file, aside)
        assert name.name == ("web1.damaged" if number == 1 else f"web1.damaged-{number}")
        assert (name.read_text(), file.exists()) == (str(number), False)
    file.write_text("one too many")
    with pytest.raises(FileExistsError, match="too many are kept aside"):
        put_aside(file, aside)
    assert file.read_text() == "one too many"


def test_one_that_has_the_name_already_gets_no_other(tmp_path: Path) -> None:
    """Of a process that was killed half-way."""
    file, aside = tmp_path / "web1.json", tmp_path / "web1.damaged"
    file.write_text("{")
    assert second_name(file, aside) == second_name(file, aside) == aside
    assert len(os.listdir(tmp_path)) == 2


@pytest.mark.parametrize("leads_to", ["nothing", "file"])
def test_a_link_is_kept_as_one(tmp_path: Path, leads_to: str) -> None:
    (tmp_path / "file").write_text("other")
    link, aside = tmp_path / "web1.json", tmp_path / "web1.damaged"
    link.symlink_to(tmp_path / leads_to)
    assert put_aside(link, aside).readlink() == tmp_path / leads_to
    assert (tmp_path / "file").read_text() == "other"


def test_a_file_is_read_whole_and_what_is_none_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 100_000)
    (tmp_path / "link").symlink_to(file)
    os.mkfifo(tmp_path / "fifo")
    before = len(os.listdir("/proc/self/fd"))
    assert read_regular(file) == read_regular(tmp_path / "link") == b"x" * 100_000
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
    for name, said in {
        tmp_path / "fifo": "Is no regular file",
        tmp_path / "socket": "No such device or address",
        Path("/dev/zero"): "Is no regular file",
        tmp_path: "Is a directory",
        tmp_path / "nothing": "No such file or directory",
    }.items():
        with pytest.raises(OSError, match=said) as told:
            read_regular(name)
        assert told.value.filename == str(name)
    assert len(os.listdir("/proc/self/fd")) == before


def test_each_folder_and_link_of_a_path_counts_for_who_may_change_a_file(tmp_path: Path) -> None:
    folder, linked = tmp_path / "bin", tmp_path / "links"
    for each in (folder, linked):
        each.mkdir(mode=0o755)
    file, link = folder / "program", linked / "program"
    file.write_text("")
    file.chmod(0o755)
    link.symlink_to("../bin/./program")
    ways = (file, link, f"{linked}/../bin//program")
    assert [fault_of_writers(one) for one in ways] == [None] * 3
    assert fault_of_writers(folder / "none") is None
    assert fault_of_writers(file / "none") is None
    for changed, mode in ((file, 0o775), (folder, 0o757), (folder, 0o770)):
        changed.chmod(mode)
        said = f"others than root may write {changed} (chmod go-w)"
        assert [fault_of_writers(one) for one in ways] == [said] * 3
        changed.chmod(0o755)
    linked.chmod(0o777)  # its owner is root, but others may put another link there
    assert [fault_of_writers(one) is None for one in ways] == [True, False, False]
    linked.chmod(0o1777)  # as /tmp
    assert fault_of_writers(link) is None
    loop = folder / "loop"
    loop.symlink_to(loop)
    assert "Too many levels" in str(fault_of_writers(loop))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("theirs", ["bin", "bin/program", "link"])
def test_what_another_user_owns_that_user_may_change(tmp_path: Path, theirs: str) -> None:
    (tmp_path / "bin").mkdir(mode=0o755)
    (tmp_path / "bin/program").touch(0o755)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "bin/program")
    os.chown(tmp_path / theirs, 65534, 65534, follow_symlinks=False)
    assert fault_of_writers(link) == f"{tmp_path / theirs} belongs to user 65534, not to root"
