"""When a domain counts as started, and why one did not start."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from brine.common import peer
from brine.common.markers import MarkerKind, file_of
from brine.common.process import Process
from brine.instance import store
from brine.instance.history import StartFailure, reason_in
from brine.instance.service import ready as ready_main
from brine.instance.spec import Spec, parse
from brine.instance.store import InstanceError
from brine.instance.xen import config, hypervisor
from brine.instance.xen.hypervisor import wait_running
from brine.instance.xen.xl import ShutdownReason as Why
from lab.scripted_xl import ScriptedXl
from lab.stand_in import StandIn

UUID = "6f1b5c1e-8a3b-4a50-9d0e-0d6f1c2b3a4f"
SPEC = parse(Spec, {"name": "web1", "uuid": UUID, "hypervisor": "xen-pvm", "kernel": "/k"})


@pytest.fixture
def xl(own_node: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedXl:
    monkeypatch.setattr(hypervisor, "_FIRST_PAUSE_S", 0.01)
    return ScriptedXl(own_node / "xl", monkeypatch)


def test_one_that_runs_is_ready(xl: ScriptedXl) -> None:
    config.write(SPEC)
    xl.domain("web1", 3, "r-----", UUID)
    with StandIn() as waiter:
        domain = wait_running(SPEC, Process(waiter.descriptor), os.getpid(), timeout_s=10)
    assert domain.number == 3


def test_that_it_has_come_up_is_noted(xl: ScriptedXl, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(SPEC)
    config.write(SPEC)
    xl.domain("web1", 3, "r-----", UUID)
    monkeypatch.setattr(sys, "argv", ["ready", "web1"])
    monkeypatch.setattr(peer, "runs_in", lambda *_: True)
    monkeypatch.setattr(config, "is_by", lambda *_: True)
    assert not config.has_come_up("web1")
    with StandIn() as waiter:
        monkeypatch.setenv("MAINPID", str(waiter.pid))
        ready_main.main()
    assert file_of(MarkerKind.STARTED, "web1").exists()
    assert config.has_come_up("web1")
    monkeypatch.setenv("INVOCATION_ID", "0d" * 16)
    assert not config.has_come_up("web1")


@pytest.mark.parametrize("state", ["--p---", "---s--", "-----d", ""])
def test_one_that_does_not_run_yet_is_waited_for(xl: ScriptedXl, state: str) -> None:
    config.write(SPEC)
    if state:
        xl.domain("web1", 3, state, UUID)
    with StandIn() as waiter, pytest.raises(InstanceError, match="within 0.1 s"):
        wait_running(SPEC, Process(waiter.descriptor), os.getpid(), timeout_s=0.1)


def test_one_of_another_xl_is_not_taken_for_it(xl: ScriptedXl) -> None:
    xl.domain("web1", 3, "r-----", UUID)
    with StandIn() as waiter:
        process = Process(waiter.descriptor)
        for pid in (os.getpid(), os.getpid() + 1):
            with pytest.raises(InstanceError, match="within 0.1 s"):
                wait_running(SPEC, process, pid, timeout_s=0.1)
            config.write(SPEC)


def test_why_it_has_ended_already(xl: ScriptedXl) -> None:
    config.write(SPEC)
    with pytest.raises(InstanceError, match="see what it said above"):
        wait_running(SPEC, None, os.getpid())
    xl.domain("web1", 3, "---sc-", UUID, Why.CRASH)
    with pytest.raises(InstanceError, match="^web1: ended as soon as it ran: it crashed$"):
        wait_running(SPEC, None, os.getpid())
    # Another one's is not told as its own.
    with pytest.raises(InstanceError, match="see what it said above"):
        wait_running(replace(SPEC), None, os.getpid() + 1)


def test_what_xl_said_is_told_by_its_cause() -> None:
    said = ["Parsing config from /run/brine/xen/web1.cfg"]
    assert reason_in("web1", said) is None
    said += ["libxl: error: libxl_dom.c:1:f: Domain 5:no memory", "libxl: error: libxl.c:1:g: so"]
    assert reason_in("web1", said) == StartFailure("no memory")
    ours = [*said, "brine-instance: error: web1: ended as soon as it ran: it crashed"]
    assert reason_in("web1", ours) == StartFailure("ended as soon as it ran: it crashed")
    ended = [said[0], "Waiting for domain web1 (domid 5) to die [pid 7]", "Done. Exiting now"]
    assert reason_in("web1", ended) is None
