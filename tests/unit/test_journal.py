"""Log records: what goes to the journal, and where it goes without one."""

from __future__ import annotations

import logging
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from brine.common import journal
from brine.common.journal import NOTICE, JournalHandler, Message, printable, syslog_priority, tell

HELLO = Message("0" * 32, "hello", NOTICE)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """What the journal was given, in place of a journal."""
    records: list[dict[str, Any]] = []
    module = types.ModuleType("systemd")
    module.journal = types.SimpleNamespace(  # type: ignore[attr-defined]
        send=lambda text, **fields: records.append({"MESSAGE": text, **fields})
    )
    monkeypatch.setitem(sys.modules, "systemd", module)
    monkeypatch.setattr(journal, "_JOURNAL_SOCKET", str(tmp_path))
    return records


@pytest.fixture
def logger() -> logging.Logger:
    logger = logging.Logger("test")  # noqa: LOG001 - one that no other test shares
    logger.addHandler(logging.NullHandler())
    return logger


def test_a_record_has_the_fields_that_the_design_names(
    sent: list[dict[str, Any]], logger: logging.Logger
) -> None:
    logger.addHandler(JournalHandler("brine-x"))
    tell(logger, HELLO, "says hello", instance="web1", BRINE_CAUSE="joy")
    (record,) = sent
    assert record["MESSAGE"] == "web1: says hello"
    assert record["MESSAGE_ID"] == "0" * 32
    assert record["BRINE_INSTANCE"] == b"web1"
    assert record["BRINE_EVENT"] == "hello"
    assert record["BRINE_CAUSE"] == "joy"
    assert record["SYSLOG_IDENTIFIER"] == "brine-x"
    assert record["PRIORITY"] == "5"
    assert record["CODE_FILE"] == __file__


def test_arguments_of_a_record_are_not_sent(
    sent: list[dict[str, Any]], logger: logging.Logger
) -> None:
    logger.addHandler(JournalHandler("brine-x"))
    logger.warning("%.3s...", "abcsecret")
    assert "secret" not in repr(sent)


def test_names_that_are_not_text_arrive_as_their_bytes(
    sent: list[dict[str, Any]], logger: logging.Logger
) -> None:
    logger.addHandler(JournalHandler("brine-x"))
    tell(logger, HELLO, "x", instance="a\udcff\nb")
    assert sent[0]["BRINE_INSTANCE"] == b"a\xff\nb"
    assert sent[0]["MESSAGE"] == r"a\udcff\nb: x"


def test_what_the_journal_does_not_take_goes_to_the_console(
    sent: list[dict[str, Any]],
    logger: logging.Logger,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    console = tmp_path / "console"
    console.touch()
    monkeypatch.setattr(journal, "_JOURNAL_SOCKET", str(tmp_path / "gone"))
    logger.addHandler(JournalHandler("brine-x", console=str(console)))
    logger.error("help")
    assert sent == []
    assert console.read_text() == "brine-x: help\n"


@pytest.mark.usefixtures("sent")
def test_without_a_console_stderr_is_left(
    logger: logging.Logger,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(journal, "_JOURNAL_SOCKET", str(tmp_path / "gone"))
    logger.addHandler(JournalHandler("brine-x", console=str(tmp_path / "none" / "console")))
    logger.error("help")
    assert capsys.readouterr().err == "brine-x: help\n"


def test_levels_become_priorities() -> None:
    levels = [logging.CRITICAL, logging.ERROR, logging.WARNING, NOTICE, logging.INFO, logging.DEBUG]
    assert [syslog_priority(level) for level in levels] == [2, 3, 4, 5, 6, 7]
    assert syslog_priority(1) == 7


def test_printable_is_one_line() -> None:
    assert printable("web1.example") == "web1.example"
    assert printable("a\nb\x1b[31m\udc80") == r"a\nb\x1b[31m\udc80"
