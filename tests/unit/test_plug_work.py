"""Verbs that are told to end while they work."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from brine.common import cli
from brine.common.cli import EntryPoint
from brine.hotplug import commands


class Vm:
    """A VM in which a search sends this process a signal, and waits for what comes of it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.undone: list[int] = []

    @contextmanager
    def working_on(self, *_: object, **__: object) -> Iterator[Vm]:
        try:
            yield self
        except BaseException:
            self.undone.append(self.number)
            raise

    def find(self, *_: object) -> None:
        os.kill(os.getpid(), self.number)
        time.sleep(0.2)

    def refuse_boot_device(self, *_: object) -> None:
        """It has none."""


@pytest.fixture(autouse=True)
def only_the_command_itself(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process keeps its rights and its log, and its signals when all is over."""
    monkeypatch.setattr(commands, "give_up_privileges", lambda _: None)
    monkeypatch.setattr(commands, "log_command", lambda _identifier: None)
    entry = EntryPoint("disk", "brine.hotplug.cli:DISK")
    monkeypatch.setattr(cli, "entry_points", lambda _group: [entry])
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


def remove_a_disk(monkeypatch: pytest.MonkeyPatch, folder: Path, vm: Vm) -> int:
    monkeypatch.setattr(commands, "working_on", vm.working_on)
    return cli.main(["disk", "remove", "/never", "--qmp", str(folder / "web1.qmp")])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_told_to_end_it_undoes_what_it_began(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    vm = Vm(number)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        status: object = remove_a_disk(monkeypatch, tmp_path, vm)
    except SystemExit as ended:
        status = ended.code
    assert status == 128 + number
    assert vm.undone == [number]
    if number == signal.SIGINT:
        said = capsys.readouterr().err
        assert said.startswith("brine: interrupted: what was begun is undone")


def test_what_was_told_to_outlive_its_terminal_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    vm = Vm(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert remove_a_disk(monkeypatch, tmp_path, vm) == 0
    assert vm.undone == []
