"""Sub-commands that are told to end while they work."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Iterator

import pytest

from brine.hotplug import cli, messages
from brine.hotplug.address import DeviceKind


@pytest.fixture(autouse=True)
def only_the_command_itself(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process keeps its rights and its log, and its signals when all is over."""
    monkeypatch.setattr(cli, "_give_up_privileges", lambda _: None)
    monkeypatch.setattr(messages, "log_to_journal", lambda: None)
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


async def work(number: int, undone: list[int]) -> int:
    """Sends this process a signal, and waits for what comes of it."""
    try:
        os.kill(os.getpid(), number)
        await asyncio.sleep(0.2)
    except asyncio.CancelledError:
        undone.append(number)
        raise
    return 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_told_to_end_it_undoes_what_it_began(number: int) -> None:
    undone: list[int] = []
    assert cli.run(work(number, undone), DeviceKind.DISK) == 128 + number
    assert undone == [number]


def test_on_a_keyboards_interrupt_too() -> None:
    undone: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        cli.run(work(signal.SIGINT, undone), DeviceKind.DISK)
    assert undone == [signal.SIGINT]


@pytest.mark.filterwarnings("error")
def test_on_an_interrupt_before_it_began_it_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: DeviceKind) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_give_up_privileges", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cli.run(work(signal.SIGINT, []), DeviceKind.DISK)
    gc.collect()


def test_what_was_told_to_outlive_its_terminal_does() -> None:
    undone: list[int] = []
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert cli.run(work(signal.SIGHUP, undone), DeviceKind.DISK) == 0
    assert undone == []
