"""Runtime files that several change at the same time, and what a removal finds there."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from brine.common import paths
from brine.common.locks import locked
from brine.hotplug.device_names import Kind
from brine.hotplug.pending import Action, Pending
from brine.hotplug.recording import change, is_recorded, record
from brine.hotplug.runtime import Runtime, RuntimeFileError

UUID = "9fb0b0f9-0000-4000-8000-00000000000a"
DEVICE_ID = "nic-9fb0b0f9-pci-13"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty runtime file."""
    monkeypatch.setattr(paths, "LOCK_DIR", tmp_path / "locks")
    path = tmp_path / "web1.json"
    path.write_text(json.dumps({"nics": [], "disks": []}))
    return path


def with_nic(runtime: Runtime, uuid: str) -> Runtime:
    return runtime.with_device(Kind.NIC, {"uuid": uuid, "hvinfo": {"id": DEVICE_ID}})


def pending(action: Action, file: Path, **others: Any) -> Pending:
    known: dict[str, Any] = {"kind": Kind.NIC, "uuid": UUID, "device_id": DEVICE_ID, **others}
    return Pending(action=action, runtime=str(file), **known)


def test_changes_at_the_same_time_and_by_different_paths_are_all_there(
    tmp_path: Path, file: Path
) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(file.name)

    def add(number: int) -> None:
        path = (file, link)[number % 2]
        change(path, lambda runtime: with_nic(runtime, f"n{number}"), timeout_s=60)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(24)))
    assert len(Runtime.load(file).devices[Kind.NIC]) == 24


def test_what_is_so_already_is_not_written(file: Path) -> None:
    assert change(file, lambda runtime: with_nic(runtime, UUID))
    before = file.stat()
    assert not change(file, lambda runtime: with_nic(runtime, UUID))
    after = file.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_who_holds_it_for_too_long_is_named(file: Path) -> None:
    change(file, lambda runtime: with_nic(runtime, UUID))
    (lock,) = paths.LOCK_DIR.glob("runtime-web1-*.lock")
    with (
        locked(lock, timeout_s=1),
        pytest.raises(RuntimeFileError, match=f"locked by process {os.getpid()}"),
    ):
        change(file, lambda runtime: runtime.without_device(Kind.NIC, UUID), timeout_s=0.1)


@pytest.mark.parametrize("known", [UUID, UUID[:8]])
def test_a_device_is_recorded_and_forgotten(file: Path, known: str) -> None:
    device = {"uuid": UUID, "pci": 13, "hvinfo": {"id": DEVICE_ID}}
    assert not is_recorded(file, Kind.NIC, UUID, DEVICE_ID)
    record(pending(Action.ADD, file, device=device), plugged=True)
    assert is_recorded(file, Kind.NIC, UUID, DEVICE_ID)
    assert not is_recorded(file, Kind.NIC, UUID, "nic-9fb0b0f9-pci-14")
    record(pending(Action.REMOVE, file, uuid=known), plugged=False)
    assert Runtime.load(file).devices[Kind.NIC] == ()


def test_a_removal_takes_out_the_one_that_had_the_id(file: Path) -> None:
    twin = UUID[:-1] + "b"
    for uuid, slot in ((UUID, 13), (twin, 14)):
        device = {"uuid": uuid, "pci": slot, "hvinfo": {"id": f"nic-9fb0b0f9-pci-{slot}"}}
        record(pending(Action.ADD, file, uuid=uuid, device=device), plugged=True)
    record(pending(Action.REMOVE, file, uuid=UUID[:8]), plugged=False)
    assert [one["uuid"] for one in Runtime.load(file).devices[Kind.NIC]] == [twin]
