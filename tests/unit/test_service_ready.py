"""An instance has started when its QEMU answers; and if it does not, there is a reason."""

from __future__ import annotations

import errno
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from brine.common import process
from brine.common.message import Message
from brine.common.process import Process
from brine.common.qmp.wire import QmpCommandError
from brine.instance import messages, store
from brine.instance.failed_starts import StartFailure, noted_failure, reason_in, why_not_started
from brine.instance.kvm import guest
from brine.instance.kvm.guest import Kvm
from brine.instance.service import ready
from brine.instance.store import InstanceError
from brine.instance.validate import completed
from brine.vm.files import InstanceFiles
from brine.vm.markers import MarkerKind, file_of, write_marker
from brine.vm.peer import StrangerError
from brine.vm.spec import Spec
from lab.fake_qemu import FakeQemus, Refused
from lab.stand_in import StandIn

SPEC = completed({"name": "web1"})


@pytest.fixture
def socket(own_node: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(process, "runs_in", lambda *_: True)
    return InstanceFiles("web1").qmp


@pytest.fixture
def qemu() -> Iterator[StandIn]:
    with StandIn() as stand_in:
        yield stand_in


def wait(qemu: StandIn, spec: Spec = SPEC) -> None:
    Kvm().wait_ready(spec, Process(qemu.descriptor))


def test_one_that_answers_is_ready(socket: Path, qemus: FakeQemus, qemu: StandIn) -> None:
    monitor = qemus.start(socket)
    wait(qemu)
    assert monitor.received == ["qmp_capabilities"]


def test_one_that_takes_its_time_is_waited_for(
    socket: Path, qemus: FakeQemus, qemu: StandIn
) -> None:
    starting = threading.Timer(0.3, qemus.start, [socket], {"listen_delay_s": 0.3})
    starting.start()
    wait(qemu)
    starting.join()


def test_one_that_never_answers_is_not_waited_for_without_end(
    socket: Path, qemus: FakeQemus, qemu: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest, "_READY_S", 0.2)
    qemus.start(socket, greet=False)
    with pytest.raises(
        InstanceError, match="web1: QEMU does not answer within .* s: .*no greeting"
    ):
        wait(qemu, completed({"name": "web1", "start_timeout": 1}))


def test_one_that_has_ended_is_not_waited_for(socket: Path, qemu: StandIn) -> None:
    threading.Timer(0.2, qemu.end).start()
    with pytest.raises(InstanceError, match="web1: QEMU has ended"):
        wait(qemu)
    with pytest.raises(InstanceError, match="web1: QEMU has ended"):
        Kvm().wait_ready(SPEC, None)


@pytest.fixture
def with_password(tmp_path: Path) -> Spec:
    (tmp_path / "password").write_text("hunter22\n")
    return completed(
        {"name": "web1", "vnc_bind": "::1", "vnc_password_file": str(tmp_path / "password")}
    )


def test_qemu_has_its_password_when_it_is_ready(
    socket: Path, qemus: FakeQemus, qemu: StandIn, with_password: Spec
) -> None:
    monitor = qemus.start(socket)
    wait(qemu, with_password)
    assert monitor.requests[-1]["execute"] == "set_password"
    assert monitor.requests[-1]["arguments"] == {"protocol": "vnc", "password": "hunter22"}


def test_one_that_takes_no_password_is_not_ready(
    socket: Path, qemus: FakeQemus, qemu: StandIn, with_password: Spec
) -> None:
    qemus.start(socket, answers={"set_password": Refused("no")})
    with pytest.raises(QmpCommandError, match="refused set_password") as told:
        wait(qemu, with_password)
    assert "hunter" not in str(told.value)


def test_nobody_but_its_qemu_is_told_the_password(
    socket: Path,
    qemus: FakeQemus,
    qemu: StandIn,
    with_password: Spec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "runs_in", lambda pid, _: pid == qemu.pid)
    monitor = qemus.start(socket)
    with pytest.raises(StrangerError, match="than its QEMU"):
        wait(qemu, with_password)
    assert monitor.requests == []


# Which line of a run says why it did not start

QEMU = "qemu-system-x86_64: -device nonsense: 'nonsense' is not a valid device model name"
WARNING = "qemu-system-x86_64: warning: TCG doesn't support requested feature"


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([], None),
        ([QEMU], QEMU),
        ([WARNING, QEMU, "(process:1): GLib: bye"], QEMU),
        ([WARNING], WARNING),
        (["bin/qemu: cannot execute"], "bin/qemu: cannot execute"),
        # A hostile image chooses what QEMU prints.
        (["qemu: \x1b]0;owned\x07", "brine-instance: hint: rm"], r"qemu: \x1b]0;owned\x07"),
    ],
)
def test_the_reason_is_what_qemu_says_of_a_fault(lines: list[str], reason: str | None) -> None:
    assert reason_in(lines) == reason


def test_the_reason_of_a_preparation_comes_by_its_record() -> None:
    facts: dict[str, Any] = {"reason": "/dev/vg/a: can't be opened", "hint": "lvchange"}
    write_marker(MarkerKind.FAILURE, "web1", run="abc", lacks=[], **facts)
    noted = StartFailure(facts["reason"], facts["hint"])
    assert why_not_started("web1", "abc") == noted_failure("web1", "abc") == noted
    assert noted_failure("web1", "def") is None


# What the journal is told


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """The events of starts."""
    found: list[tuple[object, ...]] = []
    monkeypatch.setattr(sys, "argv", ["ready", "web1"])
    monkeypatch.setattr(store, "load", lambda _: SPEC)

    def tell(message: Message, name: str, **fields: object) -> None:
        found.append((message, name, fields))

    monkeypatch.setattr(messages, "tell", tell)
    return found


def test_a_start_is_told_and_marked(
    socket: Path,
    qemus: FakeQemus,
    qemu: StandIn,
    told: list[tuple[object, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MAINPID", str(qemu.pid))
    qemus.start(socket)
    ready.main()
    assert told == [(messages.STARTED, "web1", {"pid": qemu.pid})]
    assert file_of(MarkerKind.STARTED, "web1").exists()


@pytest.fixture
def failed(
    socket: Path, told: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[..., object]], dict[str, str]]:
    """Has a start fail of which the journal says something; returns the reason that is told."""
    monkeypatch.delenv("MAINPID", raising=False)
    monkeypatch.setenv("INVOCATION_ID", "abc")
    monkeypatch.setattr(ready, "_SAID_S", 0.2)

    def reason(why_not_started: Callable[..., object]) -> dict[str, str]:
        monkeypatch.setattr(ready, "why_not_started", why_not_started)
        with pytest.raises(SystemExit):
            ready.main()
        assert not file_of(MarkerKind.STARTED, "web1").exists()
        ((message, name, fields),) = told
        assert (message, name) == (messages.NOT_STARTED, "web1")
        assert isinstance(fields, dict)
        return fields

    return reason


Failed = Callable[[Callable[..., object]], dict[str, str]]


def test_one_that_fails_is_told_with_what_it_said(
    failed: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready, "_SAID_S", 30)
    said = iter([None, None, StartFailure("no disk")])  # which takes a moment to get there
    assert failed(lambda *_: next(said)) == {"reason": "no disk"}


def damaged(*_: object) -> None:
    raise OSError(errno.EBADMSG, "Bad message")


@pytest.mark.parametrize("journal", [lambda *_: None, damaged])
def test_one_that_fails_where_nothing_was_said(
    failed: Failed, journal: Callable[..., object]
) -> None:
    write_marker(MarkerKind.START, "web1", run="abc")
    assert failed(journal)["reason"].startswith("QEMU has ended; ")


@pytest.mark.parametrize("marked", [None, MarkerKind.FAILURE])
@pytest.mark.parametrize("hypervisor", ["kvm", "xen-pvh"])
def test_one_that_fails_before_qemu_runs_says_nothing_of_it(
    failed: Failed,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    hypervisor: str,
    marked: MarkerKind | None,
) -> None:
    """A missing disk is found before the start is marked, and what can't be executed after that."""
    spec = completed({"name": "web1", "hypervisor": hypervisor, "kernel": "/boot/vmlinuz"})
    monkeypatch.setattr(store, "load", lambda _: spec)
    write_marker(MarkerKind.START, "web1", run="abc" if marked else "before")
    if marked:
        write_marker(marked, "web1", run="abc")
    reason = failed(lambda *_: None)["reason"]
    assert reason.startswith("the start failed; ")
    error = f"brine-instance: error: web1: {reason}"
    assert capsys.readouterr().err.splitlines() == [error]
