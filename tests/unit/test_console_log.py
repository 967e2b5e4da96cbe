"""The output of guests on their serial lines: from the pipe to the log and to its readers."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from brine.common import paths
from brine.instance import serial_log, store
from brine.instance.kvm.resources import open_pipe
from brine.instance.serial_log import LOG_BYTES, append, lines_of, read_log
from brine.instance.store import InstanceError
from brine.vm.files import InstanceFiles
from lab.waiting import wait_for

_READER = """
import sys
from pathlib import Path
from brine.common import paths
paths.CONSOLE_DIR, paths.CONSOLE_LOG_DIR = map(Path, sys.argv[1:3])
from brine.instance.service.console_log import main
main()
"""


@pytest.fixture(autouse=True)
def folders(own_node: Path) -> None:
    paths.CONSOLE_LOG_DIR.mkdir()


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Have the program read all pipes, as the unit runs it."""
    command = [sys.executable, "-c", _READER]
    command += map(str, (paths.CONSOLE_DIR, paths.CONSOLE_LOG_DIR))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(command, env=environment)
    yield
    process.terminate()
    assert process.wait(30) == 0


@pytest.fixture
def reader() -> Iterator[None]:
    with reading():
        yield


@contextlib.contextmanager
def started(name: str, *, is_read: bool = True) -> Iterator[int]:
    """The descriptor that a QEMU has which has just been started."""
    writer = open_pipe(name)
    os.set_blocking(writer, True)  # as QEMU does it
    if is_read:
        wait_for("a reader", lambda: has_reader(writer), timeout_s=30)
    try:
        yield writer
    finally:
        os.close(writer)


def has_reader(writer: int) -> bool:
    poll = select.poll()
    poll.register(writer, 0)
    return not any(event & select.POLLERR for _, event in poll.poll(0))


def logged(name: str) -> bytes:
    try:
        return read_log(name)
    except InstanceError:
        return b""


def wait_logged(name: str, said: bytes) -> None:
    wait_for(f"{said!r} to be logged", lambda: said in logged(name), timeout_s=30)


def test_what_is_said_is_logged_of_each_apart(reader: None) -> None:
    with started("web1") as web1, started("web2") as web2:
        os.write(web1, b"one")
        os.write(web2, b"two")
        wait_logged("web1", b"one")
        wait_logged("web2", b"two")
        os.write(web1, b" and more")
        wait_logged("web1", b"one and more")
    assert b"one" not in logged("web2")
    assert b"web1 starts, " in logged("web1")


def test_a_log_is_bounded_however_much_is_said(reader: None) -> None:
    with started("web1") as writer:
        for number in range(40):
            os.write(writer, b"%06d" % number * 10_000)
        os.write(writer, b"the last words")
        wait_logged("web1", b"the last words")
    files = set(paths.CONSOLE_LOG_DIR.iterdir())
    assert InstanceFiles("web1").console_log in files
    assert files <= {InstanceFiles("web1").console_log, InstanceFiles("web1").previous_console_log}
    assert all(file.stat().st_size <= LOG_BYTES for file in files)


def test_a_full_log_is_the_one_before() -> None:
    for number in range(5):
        append("web1", b"%d" % number * 40_000)
    assert read_log("web1") == b"3" * 40_000 + b"4" * 40_000
    append("web1", b"5" * 2 * LOG_BYTES)
    assert InstanceFiles("web1").console_log.stat().st_size == LOG_BYTES
    assert sorted(os.listdir(paths.CONSOLE_LOG_DIR)) == ["web1.log", "web1.log.1"]


def test_nobody_is_held_up_where_nobody_reads() -> None:
    with started("web1", is_read=False) as writer, pytest.raises(BrokenPipeError):
        os.write(writer, b"x" * 1_000_000)


def test_what_was_said_at_the_end_is_logged() -> None:
    with ExitStack() as stack:
        with reading():
            writer = stack.enter_context(started("web1"))
            os.write(writer, b"one")
            wait_logged("web1", b"one")
            os.write(writer, b"two")
    assert b"onetwo" in logged("web1")


def test_a_full_disk_loses_no_last_words(reader: None) -> None:
    with started("web1") as writer:
        os.write(writer, b"one")
        wait_logged("web1", b"one")
        InstanceFiles("web1").console_log.unlink()
        InstanceFiles("web1").console_log.mkdir()  # what can't be written to
        os.write(writer, b"two")
        os.write(writer, b"three")
        InstanceFiles("web1").console_log.rmdir()
        wait_logged("web1", b"twothree")


def test_what_takes_the_place_of_a_pipe_is_no_pipe(reader: None) -> None:
    paths.CONSOLE_DIR.mkdir(exist_ok=True)
    InstanceFiles("web1").console_pipe.write_text("in the way")
    with started("web1") as writer:
        os.write(writer, b"one")
        wait_logged("web1", b"one")


def test_what_is_no_file_of_its_own_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("as it was")
    InstanceFiles("web1").console_log.symlink_to(other)
    with pytest.raises(OSError, match="symbolic"):
        append("web1", b"one")
    assert other.read_text() == "as it was"


def test_a_log_does_nothing_to_a_terminal() -> None:
    said = b"\x1b[2J\x1b[1;31mGRUB\x1b[0m\r\r\n\x1b]0;title\x07a\tb\x00\x9b\xff\rend \xc3\xa9"
    assert lines_of(said) == ["GRUB", "a\tb\\x00\ufffd\ufffd", "end é"]
    assert lines_of(b"") == []
    assert lines_of(b"one\r\n") == ["one"]


def test_a_log_follows_its_instance_to_another_name() -> None:
    append("web1", b"one")
    os.close(open_pipe("web1"))
    append("web2", b"of one that had this name before")
    store.share("web1", "web2")
    store.forget("web1")
    assert read_log("web2") == b"one"
    assert not InstanceFiles("web1").console_pipe.exists()
    assert logged("web1") == b""


def test_what_a_domain_of_xens_said_is_in_xens_own_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serial_log, "XEN_LOGS", tmp_path)
    with pytest.raises(InstanceError, match="No such file") as caught:
        read_log("web1", is_xen=True)
    assert "XENCONSOLED_TRACE=guest" in (caught.value.hint or "")
    (tmp_path / "guest-web1.log").write_bytes(b"x" * 5 * LOG_BYTES + b"the end")
    found = read_log("web1", is_xen=True)
    assert found.endswith(b"the end")
    assert len(found) == 2 * LOG_BYTES


def test_what_nobody_knows_is_an_error() -> None:
    with pytest.raises(InstanceError, match="no output of its console is kept") as caught:
        read_log("web1")
    assert "next start" in (caught.value.hint or "")
