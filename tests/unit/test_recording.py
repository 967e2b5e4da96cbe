"""Runtime files that several change at the same time, and what a removal finds there."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from brine.common import cli, paths
from brine.common.cli import EntryPoint
from brine.common.locks import locked
from brine.hotplug.address import DeviceKind
from brine.hotplug.runtime_file import Runtime, RuntimeFileError, change, is_recorded
from brine.hotplug.transaction import Pending, PendingAction

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
    return runtime.with_device(DeviceKind.NIC, {"uuid": uuid, "hvinfo": {"id": DEVICE_ID}})


def pending(action: PendingAction, file: Path, **others: Any) -> Pending:
    known: dict[str, Any] = {"kind": DeviceKind.NIC, "uuid": UUID, "device_id": DEVICE_ID, **others}
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
    assert len(Runtime.load(file).devices[DeviceKind.NIC]) == 24


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
        change(file, lambda runtime: runtime.without_device(DeviceKind.NIC, UUID), timeout_s=0.1)


@pytest.mark.parametrize("known", [UUID, UUID[:8]])
def test_a_device_is_recorded_and_forgotten(file: Path, known: str) -> None:
    device = {"uuid": UUID, "pci": 13, "hvinfo": {"id": DEVICE_ID}}
    assert not is_recorded(file, DeviceKind.NIC, UUID, DEVICE_ID)
    pending(PendingAction.ADD, file, device=device).record(plugged=True)
    assert is_recorded(file, DeviceKind.NIC, UUID, DEVICE_ID)
    assert not is_recorded(file, DeviceKind.NIC, UUID, "nic-9fb0b0f9-pci-14")
    pending(PendingAction.REMOVE, file, uuid=known).record(plugged=False)
    assert Runtime.load(file).devices[DeviceKind.NIC] == ()


def test_a_removal_takes_out_the_one_that_had_the_id(file: Path) -> None:
    twin = UUID[:-1] + "b"
    for uuid, slot in ((UUID, 13), (twin, 14)):
        device = {"uuid": uuid, "pci": slot, "hvinfo": {"id": f"nic-9fb0b0f9-pci-{slot}"}}
        pending(PendingAction.ADD, file, uuid=uuid, device=device).record(plugged=True)
    pending(PendingAction.REMOVE, file, uuid=UUID[:8]).record(plugged=False)
    assert [one["uuid"] for one in Runtime.load(file).devices[DeviceKind.NIC]] == [twin]


# brine nic modify --no-hotplug


@pytest.fixture(autouse=True)
def nouns(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("nic", "brine.hotplug.cli:NIC")
    monkeypatch.setattr(cli, "entry_points", lambda _group: [entry])


def modify(file: Path, *words: str) -> int:
    """Run the command on a file, with no VM there."""
    vm = ["--qmp", str(file.with_name("web9.qmp")), "--runtime", str(file)]
    return cli.main(["nic", "modify", *words, "--no-hotplug", *vm])


def add_recorded(file: Path, *words: str) -> None:
    vm = ["--qmp", str(file.with_name("web9.qmp")), "--runtime", str(file)]
    assert cli.main(["nic", "add", *words, "--no-hotplug", *vm]) == 0


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime file without devices."""
    monkeypatch.setattr(paths, "LOCK_DIR", tmp_path / "locks")
    file = tmp_path / "runtime.json"
    file.write_text('{"nics": [], "disks": [], "spec": {}}')
    return file


def test_a_recorded_nic_is_changed_for_the_next_start(
    empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mac, other = "aa:00:00:00:00:01", "aa:00:00:00:00:02"
    add_recorded(empty, "--link", "br0", "--mac", mac, "--tag", "web", "--queues", "2")
    add_recorded(empty, "--link", "br0", "--mac", other)
    (before, second) = json.loads(empty.read_text())["nics"]
    capsys.readouterr()

    text = empty.read_text()
    assert modify(empty, mac, "--link", "br1", "--dry-run") == 0
    assert capsys.readouterr().out.startswith("would be recorded: nic ")
    assert empty.read_text() == text

    assert modify(empty, mac, "--link", "br1", "--vlan", "7", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["uuid"], said["changed"], said["recorded"]) == (before["uuid"], True, True)
    (after, same) = json.loads(empty.read_text())["nics"]
    assert after == {**before, "nicparams": {"mode": "bridged", "link": "br1", "vlan": "7"}}
    assert same == second

    assert modify(empty, before["uuid"], "--link", "br1") == 0
    assert capsys.readouterr().out.startswith("unchanged: ")
    # Another mode has a link of its own, and checks what it needs.
    with pytest.raises(SystemExit):
        modify(empty, mac, "--mode", "routed")
    assert "needs its address" in capsys.readouterr().err
    assert modify(empty, mac, "--mode", "routed", "--ip", "192.0.2.10") == 0
    (routed, _) = json.loads(empty.read_text())["nics"]
    assert routed["nicparams"] == {"mode": "routed", "link": "", "vlan": ""}
    assert routed["ips"] == ["192.0.2.10"]


def test_a_new_nic_has_the_clusters_mode_and_link(
    empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "SSCONF_DIR", tmp_path)
    (tmp_path / "ssconf_nicparams").write_text("mode=openvswitch\nlink=ovs0\nvlan=\n")
    add_recorded(empty)
    add_recorded(empty, "--mode", "bridged", "--link", "br0")
    found = [nic["nicparams"] for nic in json.loads(empty.read_text())["nics"]]
    assert [(one["mode"], one["link"]) for one in found] == [
        ("openvswitch", "ovs0"),
        ("bridged", "br0"),
    ]


def test_a_place_in_the_vm_stays_with_a_recorded_nic(empty: Path) -> None:
    add_recorded(empty, "--link", "br0", "--mac", "aa:00:00:00:00:01")
    data = json.loads(empty.read_text())
    place = {"pci": 13, "hvinfo": {"bus": "pci.0", "addr": "0xd", "id": "nic-9fb0b0f9-pci-13"}}
    data["nics"][0].update(place)
    empty.write_text(json.dumps(data))
    assert modify(empty, "nic-9fb0b0f9-pci-13", "--mac", "aa:00:00:00:00:09") == 0
    (nic,) = json.loads(empty.read_text())["nics"]
    assert nic["mac"] == "aa:00:00:00:00:09"
    assert {key: nic[key] for key in place} == place


def test_a_recorded_nic_can_not_be_what_another_is(
    empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mac, other = "aa:00:00:00:00:01", "aa:00:00:00:00:02"
    for one in (mac, other):
        add_recorded(empty, "--link", "br0", "--mac", one)
    before = empty.read_text()
    for words, said in (
        ((mac, "--mac", other), f"{other} is the MAC address of NIC"),
        (("never", "--link", "br1"), "no nic is known as never"),
    ):
        with pytest.raises(SystemExit):
            modify(empty, *words)
        assert said in capsys.readouterr().err
        assert empty.read_text() == before


def test_a_nic_in_ganetis_form_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "LOCK_DIR", tmp_path / "locks")
    file = tmp_path / "runtime"
    params = {"mode": "bridged", "link": "br0", "vlan": ""}
    nic = {"uuid": "u1", "mac": "aa:00:00:00:00:01", "ip": None, "nicparams": params}
    file.write_text(json.dumps([["kvm"], [nic], {}, []]))
    assert modify(file, "u1", "--link", "br1") == 0
    ((changed,),) = (json.loads(file.read_text())[1],)
    assert changed["nicparams"] == {**params, "link": "br1"}
    assert changed["mac"] == nic["mac"]
