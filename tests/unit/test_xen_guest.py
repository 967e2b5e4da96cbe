"""The domain of an instance to its end, also where its guest reboots meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from brine.common.process import Process
from brine.instance.store import InstanceError
from brine.instance.xen import hypervisor
from brine.instance.xen.hypervisor import DomainGuest
from brine.instance.xen.xl import Domain, XlError, destroy
from lab.scripted_xl import ScriptedXl
from lab.stand_in import StandIn

UUID = "6f1b5c1e-8a3b-4a50-9d0e-0d6f1c2b3a4f"


@pytest.fixture
def xl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedXl:
    monkeypatch.setattr(hypervisor, "_DESTROY_AGAIN_S", 0.01)
    monkeypatch.setattr(hypervisor, "_NOTICED_S", 5.0)
    return ScriptedXl(tmp_path / "xl", monkeypatch)


@pytest.fixture
def waiter() -> Iterator[StandIn]:
    """The xl that waits for the domain's end."""
    with StandIn() as process:
        yield process


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
    monkeypatch.setattr(hypervisor, "_NOTICED_S", 0.1)
    with pytest.raises(
        InstanceError, match=r"^web1: its domain does not end, not even by xl destroy$"
    ):
        DomainGuest("web1", UUID, Process(waiter.descriptor)).kill()
    xl.domain("web1", 3, "-b----", UUID)
    xl.refuse("destroy", "libxl: error: libxl.c:1:f: not today\n")
    with pytest.raises(XlError, match=r"^xl destroy 3: not today$"):
        DomainGuest("web1", UUID, None).kill()
