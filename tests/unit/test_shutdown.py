"""Stopping: the guest is asked, gets its time, and only then QEMU is ended."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from brine.common import paths, process
from brine.common.process import Process
from brine.instance import shutdown, store
from brine.instance.kvm import guest
from brine.instance.kvm.guest import QemuGuest
from brine.instance.store import InstanceError
from brine.instance.validate import completed
from brine.vm.files import InstanceFiles
from brine.vm.markers import UNKNOWN_RUN, MarkerKind, file_of, read_marker, write_marker
from brine.vm.run import Run
from lab.fake_agent import Agent, agent
from lab.fake_qemu import FakeQemu, FakeQemus, Refused
from lab.runtime_file import write_runtime_file
from lab.stand_in import StandIn

RUN = "0d" * 16
WEB1 = InstanceFiles("web1")
AGENT = {"label": "agent", "frontend-open": True}
NO_AGENT = {"label": "agent", "frontend-open": False}
SERIAL = {"label": "serial", "frontend-open": True}


@pytest.fixture(autouse=True)
def node(own_node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node of its own."""
    monkeypatch.setattr(guest, "_AGENT_TIMEOUT_S", 5)
    monkeypatch.setattr(process, "runs_in", lambda *_: True)


@pytest.fixture
def qemu() -> Iterator[StandIn]:
    with StandIn() as stand_in:
        yield stand_in


def of(qemu: StandIn) -> QemuGuest:
    return QemuGuest("web1", Process(qemu.descriptor))


def shut_down(name: str, guest: QemuGuest, run_id: str, **options: Any) -> bool:
    """As the command does it."""
    run = Run(name, run_id)
    with shutdown.stop_marked(guest, run, must=True):
        return shutdown.shut_down(guest, run, **options)


def answers(
    powerdown: Callable[[], object] = dict, *, status: str = "running", chardevs: Any = (SERIAL,)
) -> dict[str, Any]:
    def press() -> Any:
        powerdown()
        return {}

    return {
        "query-status": {"status": status},
        "query-chardev": list(chardevs),
        "system_powerdown": press,
    }


_ORDERS = ("cont", "system_powerdown", "system_wakeup")


def orders(monitor: FakeQemu) -> list[str]:
    """The commands to QEMU that change something."""
    return [one for one in monitor.received if one in _ORDERS]


# The guest


def test_it_is_said_that_the_admin_wants_it_before_anything_is_done(
    qemus: FakeQemus, qemu: StandIn
) -> None:
    said = []

    def look() -> dict[str, str]:
        said.append(read_marker(MarkerKind.STOP, "web1", run=UNKNOWN_RUN) is not None)
        return {"status": "running"}

    qemus.start(WEB1.qmp, answers={**answers(qemu.end), "query-status": look})
    assert shut_down("web1", of(qemu), UNKNOWN_RUN, timeout_s=30)
    assert said == [True]


def test_the_button_is_pressed_again_for_a_guest_that_was_still_booting(
    qemus: FakeQemus, qemu: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "_PRESS_AGAIN_S", 0.1)
    presses = itertools.count(1)

    def press() -> None:
        if next(presses) == 3:
            qemu.end()

    qemus.start(WEB1.qmp, answers=answers(press))
    assert shut_down("web1", of(qemu), UNKNOWN_RUN, timeout_s=30)
    assert next(presses) == 4


@pytest.mark.parametrize(("status", "woken"), [("paused", "cont"), ("suspended", "system_wakeup")])
def test_a_guest_that_hears_nothing_is_woken_first(
    qemus: FakeQemus, qemu: StandIn, status: str, woken: str
) -> None:
    monitor = qemus.start(WEB1.qmp, answers=answers(qemu.end, status=status))
    assert shut_down("web1", of(qemu), UNKNOWN_RUN, timeout_s=30)
    assert orders(monitor)[:2] == [woken, "system_powerdown"]


def test_one_that_has_ended_is_not_asked(qemus: FakeQemus, qemu: StandIn) -> None:
    monitor = qemus.start(WEB1.qmp, answers=answers())
    qemu.end()
    assert of(qemu).ended(10)
    assert shut_down("web1", of(qemu), UNKNOWN_RUN, timeout_s=30)
    assert monitor.connections == 0


# Its agent


def shutdowns(obeys: Callable[[], object] = lambda: None) -> AbstractContextManager[list[Any]]:
    """An agent in the guest; what it hears."""

    def script(it: Agent) -> None:
        it.answer()
        it.hear()
        obeys()

    return agent(WEB1.agent, script)


def told(heard: list[dict[str, Any]]) -> list[str]:
    """The commands to an agent, after the question whether it lives."""
    return [one["execute"] for one in heard][1:]


def test_an_agent_is_asked_in_the_buttons_stead(qemus: FakeQemus, qemu: StandIn) -> None:
    monitor = qemus.start(WEB1.qmp, answers=answers(chardevs=[SERIAL, AGENT]))
    with shutdowns(qemu.end) as heard:
        assert shut_down("web1", of(qemu), UNKNOWN_RUN, timeout_s=30)
    assert told(heard) == ["guest-shutdown"]
    assert orders(monitor) == []


@pytest.mark.parametrize("chardevs", [[AGENT], [NO_AGENT], []])
def test_where_no_agent_answers_the_button_is_pressed(
    qemus: FakeQemus, qemu: StandIn, chardevs: list[Any]
) -> None:
    monitor = qemus.start(WEB1.qmp, answers=answers(qemu.end, chardevs=chardevs))
    assert shut_down("web1", of(qemu), UNKNOWN_RUN, timeout_s=30)
    assert orders(monitor) == ["system_powerdown"]


def test_after_an_agent_that_does_nothing_the_button_is_pressed(
    qemus: FakeQemus, qemu: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent may be forbidden to shut the guest down, and says so to nobody who waits for it."""
    monkeypatch.setattr(shutdown, "_PRESS_AGAIN_S", 0.2)
    monitor = qemus.start(WEB1.qmp, answers=answers(qemu.end, chardevs=[AGENT]))
    with shutdowns() as heard:
        assert shut_down("web1", of(qemu), UNKNOWN_RUN, timeout_s=30)
    assert told(heard) == ["guest-shutdown"]
    assert orders(monitor) == ["system_powerdown"]


# Its monitor


def test_a_monitor_that_is_busy_is_asked_again_soon(
    qemus: FakeQemus,
    qemu: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It serves one client at a time, and somebody may be plugging a disk."""
    monkeypatch.setattr(guest, "_QMP_TIMEOUT_S", 0.5)
    monitor = qemus.start(WEB1.qmp, answers=answers(qemu.end))
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(str(WEB1.qmp))
        other.settimeout(20)
        other.recv(4096)  # the greeting: it is served
        leaving = threading.Timer(1.5, other.shutdown, [socket.SHUT_RDWR])
        leaving.start()
        # Less than the time after which a guest that was asked is asked again.
        assert shut_down("web1", of(qemu), UNKNOWN_RUN, timeout_s=10)
        leaving.join()
    assert orders(monitor) == ["system_powerdown"]
    first, *_ = capsys.readouterr().err.splitlines()
    begin = f"brine-instance: warning: web1: its guest was not reached: {WEB1.qmp}: "
    assert first.startswith(begin)


@pytest.mark.parametrize(
    "odd",
    [
        {"query-status": Refused("no")},
        {"query-status": []},
        {"query-status": {}},
        {"query-chardev": {"x": 1}},
        {"query-chardev": [{}]},
        {"query-chardev": 5},
        {"system_powerdown": Refused("this machine has no such button")},
    ],
)
def test_a_monitor_that_says_odd_things_is_warned_of(
    qemus: FakeQemus, qemu: StandIn, capsys: pytest.CaptureFixture[str], odd: dict[str, Any]
) -> None:
    qemus.start(WEB1.qmp, answers={**answers(), **odd})
    assert not shut_down("web1", of(qemu), UNKNOWN_RUN, timeout_s=0.2)
    said = capsys.readouterr().err
    assert said.startswith("brine-instance: warning: web1: its guest was not reached: ")
    assert len(said.splitlines()) == 1


def test_somebody_who_only_says_to_be_qemu_is_not_heard(
    qemus: FakeQemus,
    qemu: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(shutdown, "_ASK_AGAIN_S", 0.05)
    monkeypatch.setattr(process, "runs_in", lambda pid, _: pid == qemu.pid)
    monitor = qemus.start(WEB1.qmp, answers=answers())
    assert shut_down("web1", of(qemu), UNKNOWN_RUN, timeout_s=0.3, force=True)
    assert monitor.received == []
    (said,) = capsys.readouterr().err.splitlines()  # once, however often it was tried
    assert "its guest was not reached: " in said
    assert f"than its QEMU listens there: process {os.getpid()}" in said


def test_nobody_is_asked_for_what_nobody_would_know_to_be_the_admins(
    qemu: StandIn,
) -> None:
    paths.MARKS_DIR.rmdir()
    paths.MARKS_DIR.touch()
    with pytest.raises(InstanceError, match="web1.stop: can't be made: Not a directory"):
        shut_down("web1", of(qemu), UNKNOWN_RUN, timeout_s=0.2, force=True)
    assert qemu.runs()


def test_without_a_mark_only_the_power_button_is_used(
    qemus: FakeQemus, qemu: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What an agent does looks like the user's own shutdown, where no mark says otherwise.
    paths.MARKS_DIR.rmdir()
    paths.MARKS_DIR.touch()
    monitor = qemus.start(WEB1.qmp, answers=answers(qemu.end, chardevs=[SERIAL, AGENT]))
    with shutdowns(qemu.end) as heard:
        shutdown.stop_run(Run("web1", RUN), qemu.pid)
    assert heard == []
    assert orders(monitor) == ["system_powerdown"]


# QEMU itself


@pytest.mark.parametrize("deaf", [False, True])
def test_a_guest_that_does_not_obey_runs_on_unless_it_is_forced(
    qemus: FakeQemus, monkeypatch: pytest.MonkeyPatch, deaf: bool
) -> None:
    monkeypatch.setattr(process, "TERM_TIMEOUT_S", 1)
    monitor = qemus.start(WEB1.qmp, answers=answers())
    with StandIn(deaf=deaf) as qemu:
        assert not shut_down("web1", of(qemu), UNKNOWN_RUN, timeout_s=0.3)
        assert not file_of(MarkerKind.STOP, "web1").exists()
        assert qemu.runs()
        assert shut_down("web1", of(qemu), UNKNOWN_RUN, timeout_s=0.2, force=True)
        assert qemu.status() == -(signal.SIGKILL if deaf else signal.SIGTERM)
    assert orders(monitor) == ["system_powerdown"] * 2
    assert file_of(MarkerKind.STOP, "web1").exists()


def test_what_the_kernel_does_not_let_go_is_told() -> None:
    class Stuck(Process):
        """A process that waits for a disk that is gone."""

        def ended(self, timeout_s: float = 0) -> bool:
            return False

        def signal(self, number: signal.Signals) -> None:
            pass

    with pytest.raises(InstanceError, match="web1: QEMU does not end, not even by SIGKILL"):
        shut_down("web1", QemuGuest("web1", Stuck(-1)), UNKNOWN_RUN, timeout_s=0.1, force=True)


# What the unit runs


def run_main(
    monkeypatch: pytest.MonkeyPatch, qemu: StandIn, *, main_pid: str, is_ours: bool = True
) -> list[float]:
    """Run the unit's command; the time that it gave the guest, if it stopped it."""
    given: list[float] = []

    def is_of(pid: int, unit: str) -> bool:
        return is_ours and (pid, unit) == (qemu.pid, "brine-instance@web1.service")

    def note(_: QemuGuest, run: Run, *, timeout_s: float, **how: bool) -> bool:
        assert run == Run("web1", RUN)
        assert how == {"force": True, "may_use_agent": True}
        given.append(timeout_s)
        return True

    monkeypatch.setattr(process, "runs_in", is_of)
    monkeypatch.setattr(shutdown, "shut_down", note)
    monkeypatch.setattr(sys, "argv", ["stopping", "web1"])
    monkeypatch.setenv("MAINPID", main_pid)
    monkeypatch.setenv("INVOCATION_ID", RUN)
    shutdown.main()
    return given


def test_the_unit_gives_a_guest_the_time_that_its_spec_does_if_there_is_one(
    qemu: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store.save(completed({"name": "web1", "shutdown_timeout": 77}))
    write_marker(MarkerKind.REBOOT, "web1", run=UNKNOWN_RUN, until=time.time())
    assert run_main(monkeypatch, qemu, main_pid=str(qemu.pid), is_ours=False) == []
    assert run_main(monkeypatch, qemu, main_pid=str(qemu.pid)) == [77]
    assert not file_of(MarkerKind.REBOOT, "web1").exists()
    store.remove("web1")
    assert run_main(monkeypatch, qemu, main_pid=str(qemu.pid)) == [120]
    write_runtime_file(completed({"name": "web1", "shutdown_timeout": 66}))
    assert run_main(monkeypatch, qemu, main_pid=str(qemu.pid)) == [66]
    assert "warning: web1: there is no such instance" in capsys.readouterr().err


@pytest.mark.parametrize("main_pid", ["", "0", "x", "-1"])
def test_what_ended_by_itself_was_not_stopped(
    qemu: StandIn, monkeypatch: pytest.MonkeyPatch, main_pid: str
) -> None:
    write_marker(MarkerKind.REBOOT, "web1", run=UNKNOWN_RUN, until=time.time())
    assert run_main(monkeypatch, qemu, main_pid=main_pid) == []
    assert not file_of(MarkerKind.STOP, "web1").exists()
    assert file_of(MarkerKind.REBOOT, "web1").exists()


@pytest.mark.parametrize("result", ["oom-kill", "signal", "core-dump", "exit-code", "timeout"])
def test_a_unit_that_failed_was_not_stopped(
    qemu: StandIn, monkeypatch: pytest.MonkeyPatch, result: str
) -> None:
    # A QEMU that is killed for want of memory frees gigabytes before it has ended.
    monkeypatch.setenv("SERVICE_RESULT", result)
    assert run_main(monkeypatch, qemu, main_pid=str(qemu.pid)) == []
    assert not WEB1.stopping.exists()
    monkeypatch.setenv("SERVICE_RESULT", "success")
    assert run_main(monkeypatch, qemu, main_pid=str(qemu.pid))
