"""Verbs that are told to end while they work."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial

import pytest

from brine.hotplug import commands
from brine.hotplug.address import DeviceKind


@pytest.fixture(autouse=True)
def only_the_command_itself(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process keeps its rights and its log, and its signals when all is over."""
    monkeypatch.setattr(commands, "give_up_privileges", lambda _: None)
    monkeypatch.setattr(commands, "log_to_journal", lambda: None)
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


def work(number: int, undone: list[int]) -> int:
    """Sends this process a signal, and waits for what comes of it."""
    try:
        os.kill(os.getpid(), number)
        time.sleep(0.2)
    except BaseException:
        undone.append(number)
        raise
    return 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_told_to_end_it_undoes_what_it_began(number: int) -> None:
    undone: list[int] = []
    with pytest.raises(SystemExit) as ended:
        commands._run(partial(work, number, undone), DeviceKind.DISK)
    assert ended.value.code == 128 + number
    assert undone == [number]


def test_on_a_keyboards_interrupt_too(capsys: pytest.CaptureFixture[str]) -> None:
    undone: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        commands._run(partial(work, signal.SIGINT, undone), DeviceKind.DISK)
    assert undone == [signal.SIGINT]
    assert capsys.readouterr().err.startswith("brine: interrupted: what was begun is undone")


def test_what_was_told_to_outlive_its_terminal_does() -> None:
    undone: list[int] = []
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert commands._run(partial(work, signal.SIGHUP, undone), DeviceKind.DISK) == 0
    assert undone == []
