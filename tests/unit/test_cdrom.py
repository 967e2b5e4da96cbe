"""The medium of a CD-ROM drive, with a fake QEMU; the node tests have a real one."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from brine.common import process
from brine.common.errors import BrineError, UsageError
from brine.instance import store
from brine.instance.conflicts import refuse_in_use
from brine.instance.kvm.cdrom import change_medium
from brine.instance.registry import define_instance
from brine.instance.store import InstanceError
from brine.instance.validate import completed
from brine.vm.files import InstanceFiles
from brine.vm.spec import to_json
from brine.vm.unit_name import unit_of
from lab.fake_qemu import Answers, FakeQemu, FakeQemus, Refused
from lab.scripted_systemctl import ScriptedSystemctl

Json = dict[str, Any]

_DRIVE = {"qdev": "cdrom0", "inserted": {"node-name": "cdrom0"}, "tray_open": False}


@pytest.fixture
def systemctl(own_node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedSystemctl:
    monkeypatch.setattr(process, "runs_in", lambda *_: True)
    return ScriptedSystemctl(tmp_path / "systemctl", monkeypatch)


@pytest.fixture
def iso(tmp_path: Path) -> str:
    for name in ("a", "b"):
        (tmp_path / f"{name}.iso").write_bytes(name.encode() * 4096)
    return str(tmp_path / "b.iso")


def runs(
    systemctl: ScriptedSystemctl,
    qemus: FakeQemus,
    medium: str = "/a.iso",
    answers: Answers | None = None,
) -> FakeQemu:
    """Have web1 run, with a QEMU that answers so."""
    define_instance({"name": "web1", "cdroms": [medium]})
    runtime = {"spec": to_json(store.load("web1")), "nics": [], "disks": []}
    InstanceFiles("web1").runtime.write_text(json.dumps(runtime))
    properties = {"ActiveState": "active", "MainPID": str(os.getpid()), "InvocationID": "a" * 32}
    systemctl.unit(unit_of("web1"), **properties)
    usual: Json = {"query-block": [_DRIVE], "add-fd": {"fdset-id": 7, "fd": 9}, "query-fdsets": []}
    return qemus.start(
        InstanceFiles("web1").qmp, answers={**usual, "query-name": {}, **(answers or {})}
    )


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
    qemu = runs(systemctl, qemus, answers=answers)
    with pytest.raises(BrineError, match="no"):
        change_medium("web1", iso)
    inserted = [one for one in qemu.requests if one["execute"] == "blockdev-insert-medium"]
    assert [one["arguments"]["node-name"] for one in inserted] == ["cdrom0.7", "cdrom0"]
    assert cdroms() == ["/a.iso"]


def claimed_by_web1(disk: str) -> bool:
    """Whether another instance can't start with a disk, as web1 has it."""
    try:
        refuse_in_use(completed({"name": "web2", "disks": [{"path": disk, "format": "raw"}]}))
    except InstanceError as error:
        return "is also a disk of web1" in str(error)
    return False


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_medium_is_claimed_before_qemu_gets_it(
    systemctl: ScriptedSystemctl, qemus: FakeQemus, iso: str, *, is_refused: bool
) -> None:
    claimed = []

    def insert() -> Any:
        claimed.append([claimed_by_web1(one) for one in (before, iso)])
        return Refused("no") if is_refused else {}

    is_open = {**_DRIVE, "tray_open": True}
    answers = {"query-block": [is_open], "blockdev-insert-medium": insert}
    before = iso.replace("b.iso", "a.iso")
    runs(systemctl, qemus, before, answers)
    with pytest.raises(BrineError, match="no") if is_refused else contextlib.nullcontext():
        change_medium("web1", iso)
    assert claimed[0] == [True, True]
    assert [claimed_by_web1(one) for one in (before, iso)] == [is_refused, not is_refused]


def test_after_a_kill_both_media_are_claimed_and_each_can_be_put_in(
    systemctl: ScriptedSystemctl, qemus: FakeQemus, iso: str
) -> None:
    """Which one QEMU has then is not known: neither counts as unchanged."""
    is_open = {**_DRIVE, "tray_open": True}
    kept = []

    def insert() -> Any:
        kept.append(InstanceFiles("web1").runtime.read_bytes())
        return {}

    before = iso.replace("b.iso", "a.iso")
    answers = {"query-block": [is_open], "blockdev-insert-medium": insert}
    runs(systemctl, qemus, before, answers)
    for path in (iso, before, ""):
        change_medium("web1", iso, force=True)
        define_instance({"name": "web1", "cdroms": [before]})
        InstanceFiles("web1").runtime.write_bytes(kept[0])  # as a kill leaves it
        assert claimed_by_web1(before)
        assert claimed_by_web1(iso)
        assert change_medium("web1", path)


def test_what_another_instance_writes_never_comes_into_the_drive(
    systemctl: ScriptedSystemctl, qemus: FakeQemus, iso: str
) -> None:
    """Not even for a moment, if that one gets it while the command connects."""

    def connect() -> Any:
        InstanceFiles("web2").runtime.write_text(json.dumps({"disks": [{"path": iso}]}))
        return {}

    is_open = {**_DRIVE, "tray_open": True}
    qemu = runs(systemctl, qemus, answers={"query-name": connect, "query-block": [is_open]})
    qemus.start(InstanceFiles("web2").qmp)
    with pytest.raises(BrineError, match="is also a disk of web2"):
        change_medium("web1", iso)
    assert "blockdev-insert-medium" not in qemu.received


def test_a_drive_that_came_with_a_new_spec_is_there_later(
    systemctl: ScriptedSystemctl, qemus: FakeQemus, iso: str
) -> None:
    runs(systemctl, qemus, answers={"query-block": []})
    with pytest.raises(BrineError, match="runs without the drive cdrom0") as caught:
        change_medium("web1", iso)
    assert "reboot web1" in (caught.value.hint or "")
