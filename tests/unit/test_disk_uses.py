"""A disk of one instance that is to be plugged into another is refused, and whose it is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from brine.common import paths
from brine.hotplug.address import uuid_of_path
from brine.hotplug.disk import Disk, refuse_disk_of_others
from brine.hotplug.errors import HotplugError
from lab.fake_qemu import FakeQemus


@pytest.fixture
def disk(own_node: Path) -> Disk:
    """A disk, on a node of its own."""
    image = own_node / "image"
    image.write_bytes(b"")
    return Disk(uuid_of_path(str(image)), image)


def row(disk: Disk, **keys: Any) -> dict[str, Any]:
    return {"path": str(disk.path), "read_only": False, "interface": "virtio", **keys}


def is_defined(name: str, *rows: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """Have an instance with these disks; returns its spec."""
    spec = {"admin_state": "down", "disks": list(rows), "nics": [], **keys}
    paths.SPECS_DIR.mkdir(exist_ok=True)
    (paths.SPECS_DIR / f"{name}.json").write_text(json.dumps(spec))
    return spec


def has_run(name: str, *rows: dict[str, Any], **keys: Any) -> None:
    """Have its runtime file say that it has these disks now."""
    (paths.RUNTIME_DIR / f"{name}.json").write_text(json.dumps({"disks": list(rows), **keys}))


def refused(disk: Disk, own: str | None = "web2") -> str:
    with pytest.raises(HotplugError) as told:
        refuse_disk_of_others(disk, own)
    return str(told.value)


def test_a_disk_of_another_is_refused_by_any_name(disk: Disk) -> None:
    is_defined("web1", row(disk))
    link = disk.path.with_name("link")
    link.symlink_to(disk.path)
    assert refused(Disk(disk.uuid, link)) == f"{link}: is a disk of web1 too, {disk.path}"
    assert refused(disk, None)  # of a QEMU that is no instance
    refuse_disk_of_others(disk, "web1")


def test_one_that_nobody_writes_may_be_shared(disk: Disk) -> None:
    is_defined("web1", row(disk, read_only=True))
    assert refused(disk)
    refuse_disk_of_others(Disk(disk.uuid, disk.path, read_only=True), "web2")


def test_what_was_plugged_in_counts_also_when_it_has_ended(disk: Disk) -> None:
    spec = is_defined("web1")
    has_run("web1", row(disk), spec=spec)
    assert "is a disk of web1 too" in refused(disk)


def test_what_was_unplugged_is_free(disk: Disk, qemus: FakeQemus) -> None:
    spec = is_defined("web1", row(disk))
    has_run("web1", spec=spec)
    qemus.start(paths.CONTROL_DIR / "web1.qmp")
    refuse_disk_of_others(disk, "web2")


def test_what_it_was_started_with_on_ide_counts(disk: Disk) -> None:
    spec = is_defined("web1", row(disk, interface="ide"))
    has_run("web1", spec=spec)
    assert "is a disk of web1 too" in refused(disk)


@pytest.mark.parametrize("runs", [True, False])
def test_a_spec_that_is_another_by_now_holds_and_what_runs_does(
    disk: Disk, qemus: FakeQemus, *, runs: bool
) -> None:
    has_run("web1", row(disk), spec=is_defined("web1", row(disk)))
    is_defined("web1")
    if runs:
        qemus.start(paths.CONTROL_DIR / "web1.qmp")
        assert "is a disk of web1 too" in refused(disk)
    else:
        refuse_disk_of_others(disk, "web2")


@pytest.mark.parametrize("runs", [True, False])
def test_that_of_one_that_is_offline_is_free_unless_it_runs(
    disk: Disk, qemus: FakeQemus, *, runs: bool
) -> None:
    spec = is_defined("web1", row(disk), admin_state="offline")
    has_run("web1", row(disk), spec=spec)
    if runs:
        qemus.start(paths.CONTROL_DIR / "web1.qmp")
        assert refused(disk)
    else:
        refuse_disk_of_others(disk, "web2")


@pytest.mark.parametrize("content", ["{", "[]", '{"disks": 5}', '{"disks": [5, {"path": 5}]}'])
def test_what_is_damaged_keeps_nobody(disk: Disk, content: str) -> None:
    is_defined("web1")
    (paths.RUNTIME_DIR / "web1.json").write_text(content)
    (paths.SPECS_DIR / "web3.json").write_text(content)
    refuse_disk_of_others(disk, "web2")
