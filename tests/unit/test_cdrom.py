"""The medium of a CD-ROM drive, with a fake QEMU; the node tests have a real one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from brine.common import process
from brine.common.errors import BrineError, UsageError
from brine.common.paths import InstanceFiles
from brine.common.process import unit_of
from brine.instance import store
from brine.instance.kvm.cdrom import change_medium
from brine.instance.operations import define_instance
from lab.fake_qemu import FakeQemu, FakeQemus, Refused
from lab.scripted_systemctl import ScriptedSystemctl

_DRIVE = {"qdev": "cdrom0", "inserted": {"node-name": "cdrom0"}, "tray_open": False}


@pytest.fixture
def systemctl(own_node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedSystemctl:
    monkeypatch.setattr(process, "runs_in", lambda *_: True)
    return ScriptedSystemctl(tmp_path / "systemctl", monkeypatch)


@pytest.fixture
def iso(tmp_path: Path) -> str:
    (tmp_path / "b.iso").write_bytes(b"b" * 4096)
    return str(tmp_path / "b.iso")


def runs(systemctl: ScriptedSystemctl, qemus: FakeQemus, **answers: Any) -> FakeQemu:
    """Have web1 run, with a QEMU that answers so."""
    define_instance({"name": "web1", "cdroms": ["/a.iso"]})
    properties = {"ActiveState": "active", "MainPID": str(os.getpid()), "InvocationID": "a" * 32}
    systemctl.unit(unit_of("web1"), **properties)
    usual = {"query-block": [_DRIVE], "add-fd": {"fdset-id": 7, "fd": 9}, "query-fdsets": []}
    return qemus.start(InstanceFiles("web1").qmp, answers={**usual, "query-name": {}, **answers})


def cdroms() -> list[str]:
    return list(store.load("web1").cdroms)


def test_of_one_that_is_down_the_spec_is_changed(systemctl: ScriptedSystemctl, iso: str) -> None:
    define_instance({"name": "web1", "cdroms": ["", "/a.iso"]})
    assert change_medium("web1", iso, dry_run=True)
    assert cdroms() == ["", "/a.iso"]
    assert change_medium("web1", iso)
    assert not change_medium("web1", iso)
    assert change_medium("web1", "", number=1)
    assert cdroms() == [iso, ""]


def test_what_can_be_in_no_drive_is_refused(systemctl: ScriptedSystemctl, iso: str) -> None:
    disk = {"path": iso, "format": "raw"}
    define_instance({"name": "web1", "cdroms": [""], "disks": [disk]})
    with pytest.raises(BrineError, match="another of its disks"):
        change_medium("web1", iso)
    with pytest.raises(BrineError, match="/nothing: can't be opened"):
        change_medium("web1", "/nothing")
    with pytest.raises(UsageError, match="has 1 CD-ROM drives, and none with the number 1"):
        change_medium("web1", iso, number=1)
    define_instance({"name": "web2"})
    with pytest.raises(UsageError, match="has no CD-ROM drive") as caught:
        change_medium("web2", iso)
    assert '"cdroms": [""]' in (caught.value.hint or "")
    assert cdroms() == [""]


def test_a_drive_that_its_guest_keeps_locked_keeps_its_medium(
    systemctl: ScriptedSystemctl, qemus: FakeQemus, iso: str
) -> None:
    qemu = runs(systemctl, qemus)
    with pytest.raises(BrineError, match="its guest keeps cdrom0 locked") as caught:
        change_medium("web1", iso, timeout_s=0.2)
    assert "--force" in (caught.value.hint or "")
    assert "blockdev-remove-medium" not in qemu.received
    # What it was handed is taken back.
    assert qemu.received[-2:] == ["blockdev-del", "remove-fd"]
    assert cdroms() == ["/a.iso"]


def test_what_qemu_refuses_leaves_the_medium_before(
    systemctl: ScriptedSystemctl, qemus: FakeQemus, iso: str
) -> None:
    is_open = {**_DRIVE, "tray_open": True}
    answers = {"query-block": [is_open], "blockdev-insert-medium": Refused("no")}
    qemu = runs(systemctl, qemus, **answers)
    with pytest.raises(BrineError, match="no"):
        change_medium("web1", iso)
    inserted = [one for one in qemu.requests if one["execute"] == "blockdev-insert-medium"]
    assert [one["arguments"]["node-name"] for one in inserted] == ["cdrom0.7", "cdrom0"]
    assert cdroms() == ["/a.iso"]


def test_a_drive_that_came_with_a_new_spec_is_there_later(
    systemctl: ScriptedSystemctl, qemus: FakeQemus, iso: str
) -> None:
    runs(systemctl, qemus, **{"query-block": []})
    with pytest.raises(BrineError, match="runs without the drive cdrom0") as caught:
        change_medium("web1", iso)
    assert "reboot web1" in (caught.value.hint or "")
