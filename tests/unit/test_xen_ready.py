"""The start of a domain: when it is complete, why it failed, and how it is ended."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from brine.common import process
from brine.common.process import Process
from brine.instance import store
from brine.instance.failed_starts import reason_in
from brine.instance.service import ready
from brine.instance.store import InstanceError
from brine.instance.xen import config, domain
from brine.instance.xen.domain import DomainGuest, Xen
from brine.instance.xen.xl import Domain, ShutdownReason, XlError, destroy
from brine.vm.files import InstanceFiles
from brine.vm.markers import MarkerKind, file_of
from brine.vm.spec import Spec, parse
from lab.scripted_xl import ScriptedXl
from lab.stand_in import StandIn

UUID = "6f1b5c1e-8a3b-4a50-9d0e-0d6f1c2b3a4f"
SPEC = parse(Spec, {"name": "web1", "uuid": UUID, "hypervisor": "xen-pvm", "kernel": "/k"})


@pytest.fixture
def xl(own_node: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedXl:
    monkeypatch.setattr(domain, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(domain, "_DESTROY_AGAIN_S", 0.01)
    monkeypatch.setenv("MAINPID", str(os.getpid()))
    return ScriptedXl(own_node / "xl", monkeypatch)


@pytest.fixture
def waiter() -> Iterator[StandIn]:
    """The xl that waits for the domain's end."""
    with StandIn() as process:
        yield process


def test_one_that_runs_is_ready_and_that_is_noted(
    xl: ScriptedXl, waiter: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(SPEC)
    config.write_config(SPEC)
    file = InstanceFiles("web1").domain
    file.write_text(file.read_text().replace(f"process {os.getpid()}", f"process {waiter.pid}"))
    xl.domain("web1", 3, "r-----", UUID)
    monkeypatch.setattr(sys, "argv", ["ready", "web1"])
    monkeypatch.setattr(process, "runs_in", lambda *_: True)
    monkeypatch.setenv("MAINPID", str(waiter.pid))
    ready.main()
    assert file_of(MarkerKind.STARTED, "web1").exists()


@pytest.mark.parametrize(
    ("state", "is_by"),
    [("--p---", True), ("---s--", True), ("-----d", True), ("", True), ("r-----", False)],
)
def test_one_that_does_not_run_or_is_of_another_xl_is_waited_for(
    xl: ScriptedXl, waiter: StandIn, monkeypatch: pytest.MonkeyPatch, state: str, *, is_by: bool
) -> None:
    monkeypatch.setattr(Spec, "start_limit_s", lambda _: 0.1)
    config.write_config(SPEC)
    if not is_by:
        monkeypatch.setenv("MAINPID", str(os.getpid() + 1))
    if state:
        xl.domain("web1", 3, state, UUID)
    with pytest.raises(InstanceError, match="within 0.1 s"):
        Xen().wait_ready(SPEC, Process(waiter.descriptor))


def test_why_it_has_ended_already(xl: ScriptedXl, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_config(SPEC)
    with pytest.raises(InstanceError, match="^web1: .*; the journal"):
        Xen().wait_ready(SPEC, None)
    xl.domain("web1", 3, "---sc-", UUID, ShutdownReason.CRASH)
    with pytest.raises(InstanceError, match="^web1: ended as soon as it ran: it crashed$"):
        Xen().wait_ready(SPEC, None)
    monkeypatch.setenv("MAINPID", str(os.getpid() + 1))  # another one's is not told as its own
    with pytest.raises(InstanceError, match="^web1: .*; the journal"):
        Xen().wait_ready(SPEC, None)


def test_what_xl_said_is_told_by_its_cause() -> None:
    said = ["Parsing config from /run/brine/xen/web1.cfg"]
    assert reason_in(said) is None
    said += ["libxl: error: libxl_dom.c:1:f: Domain 5:no memory", "libxl: error: libxl.c:1:g: so"]
    assert reason_in(said) == "no memory"
    ended = [said[0], "Waiting for domain web1 (domid 5) to die [pid 7]", "Done. Exiting now"]
    assert reason_in(ended) is None


# Its end, also if its guest reboots meanwhile


@pytest.mark.parametrize("fault", ["", "xl destroy 3: there is no such domain"])
def test_one_that_reboots_just_then_is_ended_as_what_it_is_by_now(
    xl: ScriptedXl, waiter: StandIn, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    xl.domain("web1", 3, "-b----", UUID)

    def meanwhile(domain: Domain) -> bool:
        if domain.number == 3:
            xl.rows([])
            xl.domain("web1", 4, "-b----", UUID)
            if fault:
                raise XlError(fault)
            return destroy(domain)
        waiter.end()
        return destroy(domain)

    monkeypatch.setattr("brine.instance.xen.xl.destroy", meanwhile)
    assert DomainGuest("web1", UUID, Process(waiter.descriptor)).kill() == "xl destroy"
    assert xl.asked() == ["destroy 4"]


def test_one_that_has_no_xl_is_ended_at_once(xl: ScriptedXl) -> None:
    xl.domain("web1", 3, "-b----", UUID)
    assert DomainGuest("web1", UUID, None).kill() == "xl destroy"
    assert xl.asked() == ["destroy 3"]


def test_one_that_does_not_end_is_told(
    xl: ScriptedXl, waiter: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(domain, "_NOTICED_S", 0.1)
    with pytest.raises(
        InstanceError, match=r"^web1: its domain does not end, not even by xl destroy$"
    ):
        DomainGuest("web1", UUID, Process(waiter.descriptor)).kill()
    xl.domain("web1", 3, "-b----", UUID)
    xl.refuse("destroy", "libxl: error: libxl.c:1:f: not today\n")
    with pytest.raises(XlError, match=r"^xl destroy 3: not today$"):
        DomainGuest("web1", UUID, None).kill()
