"""Log records: what goes to the journal, and where it goes without one."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from brine.common import journal as journal_module
from brine.common.errors import printable
from brine.common.journal import JournalHandler, tell
from brine.common.message import NOTICE, Message

HELLO = Message("0" * 32, "hello", NOTICE)


def parse(datagram: bytes) -> dict[str, bytes]:
    """The fields of a record in the journal's native protocol."""
    fields = {}
    while datagram:
        line, datagram = datagram.split(b"\n", 1)
        if b"=" in line:
            key, value = line.split(b"=", 1)
        else:
            key = line
            (length,) = struct.unpack("<Q", datagram[:8])
            value = datagram[8 : 8 + length]
            datagram = datagram[8 + length + 1 :]
        fields[key.decode()] = value
    return fields


class Journal:
    """A journal's end of its socket, and a console beside it."""

    def __init__(self) -> None:
        self.console = journal_module.CONSOLE
        self.console.touch()
        self.listen()

    def listen(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(journal_module.SOCKET))
        self._socket.setblocking(False)

    def read(self) -> dict[str, bytes]:
        return parse(self._socket.recv(65536))

    def close(self) -> None:
        self._socket.close()
        journal_module.SOCKET.unlink()


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Journal]:
    monkeypatch.setattr(journal_module, "SOCKET", tmp_path / "socket")
    monkeypatch.setattr(journal_module, "CONSOLE", tmp_path / "console")
    journal = Journal()
    yield journal
    with contextlib.suppress(FileNotFoundError):
        journal.close()


@pytest.fixture
def logger(journal: Journal) -> logging.Logger:
    logger = logging.Logger("test")  # noqa: LOG001 - one that no other test shares
    logger.addHandler(JournalHandler("brine-x"))
    return logger


def test_a_record_has_the_fields_that_the_design_names(
    journal: Journal, logger: logging.Logger
) -> None:
    tell(logger, HELLO, "says hello", instance="web1", BRINE_CAUSE="joy")
    record = journal.read()
    assert record["MESSAGE"] == b"web1: says hello"
    assert record["MESSAGE_ID"] == b"0" * 32
    assert record["BRINE_INSTANCE"] == b"web1"
    assert record["BRINE_EVENT"] == b"hello"
    assert record["BRINE_CAUSE"] == b"joy"
    assert record["SYSLOG_IDENTIFIER"] == b"brine-x"
    assert record["PRIORITY"] == b"5"
    assert record["CODE_FILE"] == __file__.encode()


def test_arguments_of_a_record_are_not_sent(journal: Journal, logger: logging.Logger) -> None:
    logger.warning("%.3s...", "abcsecret")
    assert b"secret" not in b"".join(journal.read().values())


def test_names_that_are_not_text_arrive_as_their_bytes(
    journal: Journal, logger: logging.Logger
) -> None:
    tell(logger, HELLO, "x", instance="a\udcff\nb")
    record = journal.read()
    assert record["BRINE_INSTANCE"] == b"a\xff\nb"
    assert record["MESSAGE"] == rb"a\udcff\nb: x"


def test_a_traceback_is_part_of_the_message(journal: Journal, logger: logging.Logger) -> None:
    try:
        raise KeyError("lost")
    except KeyError:
        logger.exception("a fault")
    assert b"KeyError: 'lost'" in journal.read()["MESSAGE"]


def test_without_a_journal_the_console_hears_it_and_the_journal_later_of_it(
    journal: Journal, logger: logging.Logger
) -> None:
    journal.close()
    logger.error("help")
    logger.error("more help")
    assert journal.console.read_text() == "brine-x: help\nbrine-x: more help\n"
    journal.console.unlink()
    journal.console.mkdir()
    logger.error("nobody hears that")
    journal.listen()
    logger.error("again")
    assert journal.read()["MESSAGE"] == b"3 records did not get here"
    assert journal.read()["MESSAGE"] == b"again"


def test_a_journal_that_hangs_stops_nobody_and_has_hundreds_of_records_when_it_goes_on(
    journal: Journal, logger: logging.Logger
) -> None:
    queue = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text())
    # More than twice what a socket holds by default, which any user may have.
    for number in range(wanted := min(300, queue)):
        logger.error("%s", f"{number} {'x' * 200}")
    assert journal.console.read_text() == ""
    said = [journal.read()["MESSAGE"].split()[0] for _ in range(wanted)]
    assert said == [str(number).encode() for number in range(wanted)]
    for number in range(5000):  # far more than a socket's queue holds
        logger.error("%d", number)
    assert journal.console.read_text().endswith("brine-x: 4999\n")


@pytest.mark.parametrize(
    ("level", "priority"),
    [(50, b"2"), (40, b"3"), (30, b"4"), (NOTICE, b"5"), (20, b"6"), (10, b"7")],
)
def test_levels_become_priorities(
    journal: Journal, logger: logging.Logger, level: int, priority: bytes
) -> None:
    logger.log(level, "x")
    assert journal.read()["PRIORITY"] == priority


def test_printable_is_one_line() -> None:
    assert printable("web1.example") == "web1.example"
    assert printable("a\nb\x1b[31m\udc80") == r"a\nb\x1b[31m\udc80"
