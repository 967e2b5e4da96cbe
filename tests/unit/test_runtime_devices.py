"""Devices that were plugged in while an instance ran are there at its next start."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from brine.instance.kvm.runtime_devices import (
    UnusableError,
    device_changes,
    dropped,
    hot_changes_or_aside,
    with_hot_changes,
)
from brine.instance.store import InstanceError
from brine.instance.validate import completed
from brine.vm.address import DeviceKind
from brine.vm.disk import Disk
from brine.vm.files import InstanceFiles
from brine.vm.nic import Nic
from brine.vm.runtime_file import change_file
from brine.vm.slots import Slot, lun_slot, pci_slot
from brine.vm.spec import Spec, parse, to_json
from brine.vm.values import Mode
from brine.vm.vif import Vif
from lab.runtime_file import write_runtime_file

A, B = "0a000000-0000-4000-8000-00000000000a", "0b000000-0000-4000-8000-00000000000b"
HOT = "0c000000-0000-4000-8000-00000000000c"
MAC, HOT_MAC = "52:54:00:00:00:01", "52:54:00:00:00:0c"


@pytest.fixture
def file(own_node: Path) -> Path:
    """The runtime file of web1; it is not there yet."""
    return InstanceFiles("web1").runtime


def web1(**keys: Any) -> Spec:
    """An instance of two disks and a NIC."""
    usual = {
        "disks": [{"path": "/a", "uuid": A}, {"path": "/b", "uuid": B, "interface": "scsi"}],
        "nics": [{"uuid": A, "mac": MAC, "link": "br0", "vlan": "7"}],
    }
    return completed({"name": "web1", "uuid": A, **usual, **keys})


def entry(disk: Disk, slot: Slot) -> dict[str, Any]:
    return disk.entry(10, slot)


def started(spec: Spec) -> Spec:
    write_runtime_file(spec)
    return spec


def plug(file: Path, kind: DeviceKind, device: dict[str, Any]) -> None:
    assert change_file(file, lambda runtime: runtime.with_device(kind, device))


def unplug(file: Path, kind: DeviceKind, uuid: str) -> None:
    assert change_file(file, lambda runtime: runtime.without_device(kind, uuid))


def hot_nic(**keys: Any) -> dict[str, Any]:
    wiring = Vif(instance="web1", uuid=HOT, mode=Mode.BRIDGED, link="br1", mac=HOT_MAC, **keys)
    return wiring.recorded(pci_slot(21))


def test_nothing_plugged_is_no_change(file: Path) -> None:
    inner = {"path": "/base", "format": "raw"}
    backing = {"path": "/middle", "format": "qcow2", "backing": inner}
    overlay = {"path": "/a", "uuid": A, "format": "qcow2", "cache": "unsafe", "discard": False}
    disks = [
        {**overlay, "backing": backing},
        {"path": "/b", "uuid": B, "interface": "scsi", "read_only": True, "serial": "S"},
        {"path": "/c", "interface": "ide"},
    ]
    nics = [
        {"mac": MAC, "link": "br0", "queues": 4, "vhost": True, "mtu": 9000, "vlan": ".7"},
        {"mode": "routed", "ips": ["192.0.2.1", "2001:db8::1"], "model": "e1000"},
    ]
    spec = web1(disks=disks, nics=nics)
    assert with_hot_changes(spec) is spec  # it has not been started yet
    started(spec)
    assert device_changes(spec, with_hot_changes(spec)) == []


def test_a_disk_that_was_plugged_in_stays_though_a_limit_of_memory_may_be_too_small(
    file: Path,
) -> None:
    spec = started(web1(memory_max_mib=web1().least_memory_max_mib()))
    plug(file, DeviceKind.DISK, entry(Disk(uuid=HOT, path="/hot"), pci_slot(22)))
    after, fault = hot_changes_or_aside(spec)
    assert (after.disks[-1].uuid, fault) == (HOT, "")


@pytest.mark.parametrize(
    ("interface", "slot"), [("virtio", pci_slot(22)), ("scsi", lun_slot("scsi0.0", 1))]
)
def test_a_disk_that_was_plugged_in_comes_last(file: Path, interface: str, slot: Slot) -> None:
    spec = started(web1())
    usual: dict[str, Any] = {"format": "qcow2", "cache": "writeback", "aio": "io_uring"}
    usual |= {"read_only": True, "discard": False, "serial": "S"}
    plug(file, DeviceKind.DISK, entry(Disk(uuid=HOT, path="/hot", **usual), slot))
    after = with_hot_changes(spec)
    assert [disk.slot for disk in after.disks] == [12, 0, slot.number]
    assert [replace(disk, slot=-1) for disk in after.disks[:2]] == list(spec.disks)
    hot = Disk(uuid=HOT, path="/hot", interface=interface, slot=slot.number, by_hand=True, **usual)
    assert after.disks[2] == hot
    assert device_changes(replace(after, disks=spec.disks), spec) == []


def test_a_disk_that_is_entered_for_the_next_start_is_virtio(file: Path) -> None:
    spec = started(web1())
    plug(file, DeviceKind.DISK, {**Disk(uuid=HOT, path="/hot").recorded(), "size_mib": 10})
    assert with_hot_changes(spec).disks[2] == Disk(uuid=HOT, path="/hot", by_hand=True)


def test_a_nic_that_was_plugged_in_comes_last(file: Path) -> None:
    spec = started(web1())
    usual: dict[str, Any] = {"link": "100", "ips": ("192.0.2.9",), "mac": HOT_MAC, "mtu": 1400}
    usual |= {"queues": 2, "vhost": True}
    plug(
        file,
        DeviceKind.NIC,
        Vif(instance="web1", uuid=HOT, mode=Mode.ROUTED, **usual).recorded(pci_slot(21)),
    )
    after = with_hot_changes(spec)
    hot = Nic(uuid=HOT, model="virtio", mode="routed", slot=21, by_hand=True, **usual)
    assert after.nics == (replace(spec.nics[0], slot=13), hot)
    assert device_changes(replace(after, nics=spec.nics), spec) == []


def test_what_was_taken_out_stays_out_and_each_change_is_told(file: Path) -> None:
    spec = started(web1())
    plug(file, DeviceKind.NIC, hot_nic())
    unplug(file, DeviceKind.DISK, A)
    unplug(file, DeviceKind.NIC, A)
    after = with_hot_changes(spec)
    assert [disk.uuid for disk in after.disks] == [B]
    assert [nic.uuid for nic in after.nics] == [HOT]
    told = ["disk /a taken out", f"NIC {MAC} taken out", f"NIC {HOT_MAC} plugged in"]
    assert device_changes(spec, after) == told


def test_what_was_changed_is_so_in_its_old_place(file: Path) -> None:
    nics = [{"uuid": A, "mac": MAC, "link": "br0"}, {"uuid": B, "link": "br0"}]
    spec = started(web1(nics=nics))
    wish = Vif.of(spec, spec.nics[0])
    changed = replace(wish, link="br1", vlan="8")
    plug(file, DeviceKind.NIC, changed.recorded(pci_slot(20)))
    after = with_hot_changes(spec)
    assert [(nic.uuid, nic.mac, nic.link, nic.vlan) for nic in after.nics] == [
        (A, MAC, "br1", "8"),
        (B, spec.nics[1].mac, "br0", ""),
    ]
    assert device_changes(spec, after) == [f"NIC {MAC} changed"]


def test_ide_disks_which_nobody_plugs_stay_in_their_places(file: Path) -> None:
    disks = [
        {"path": "/first", "interface": "ide"},
        {"path": "/a", "uuid": A},
        {"path": "/last", "interface": "ide"},
    ]
    spec = started(web1(disks=disks))
    unplug(file, DeviceKind.DISK, A)
    plug(file, DeviceKind.DISK, entry(Disk(uuid=HOT, path="/hot"), pci_slot(22)))
    assert [disk.path for disk in with_hot_changes(spec).disks] == ["/first", "/last", "/hot"]


def test_all_else_is_as_the_admin_has_defined_it_since(file: Path) -> None:
    spec = started(web1())
    plug(file, DeviceKind.NIC, hot_nic())
    after = with_hot_changes(replace(spec, memory_mib=4096, admin_state="up"))
    assert (after.memory_mib, after.admin_state) == (4096, "up")
    assert [nic.uuid for nic in after.nics] == [A, HOT]


@pytest.mark.parametrize(
    ("keys", "disks", "nics", "gone"),
    [
        ({"nics": []}, ["/a", "/b", "/hot"], 0, [f"NIC {HOT_MAC}"]),
        ({"nics": [{"mac": MAC, "link": "br9"}]}, ["/a", "/b", "/hot"], 1, [f"NIC {HOT_MAC}"]),
        ({"disks": [{"path": "/a", "uuid": A}]}, ["/a"], 2, ["disk /hot"]),
    ],
)
def test_a_new_definition_of_one_kind_leaves_what_is_plugged_of_the_other(
    file: Path, keys: dict[str, Any], disks: list[str], nics: int, gone: list[str]
) -> None:
    started(web1())
    plug(file, DeviceKind.DISK, entry(Disk(uuid=HOT, path="/hot"), pci_slot(22)))
    plug(file, DeviceKind.NIC, hot_nic())
    anew = web1(**keys)
    after = with_hot_changes(anew)
    assert all(getattr(after, key) == getattr(anew, key) for key in keys)
    assert ([disk.path for disk in after.disks], len(after.nics)) == (disks, nics)
    assert dropped(anew) == gone


def test_what_is_in_the_spec_already_is_not_plugged_in_twice(file: Path) -> None:
    """A start that fails after the spec was written, and before the runtime file was."""
    spec = started(web1())
    plug(file, DeviceKind.NIC, hot_nic())
    after = with_hot_changes(spec)
    assert with_hot_changes(after) == after


@pytest.mark.parametrize("key", ["disks", "nics"])
def test_whether_a_device_was_added_by_hand_is_no_difference_to_qemu(file: Path, key: str) -> None:
    spec = started(web1())
    data = to_json(spec)
    for row in data[key]:
        row["by_hand"] = True
    plug(file, DeviceKind.NIC, hot_nic())
    after = with_hot_changes(parse(Spec, data))
    assert all(one["by_hand"] for one in to_json(after)[key])
    assert [one.uuid for one in after.nics] == [A, HOT]


def test_what_does_not_go_with_the_spec_says_whose_and_what(file: Path) -> None:
    spec = started(web1())
    plug(file, DeviceKind.DISK, entry(Disk(uuid=HOT, path="/a"), pci_slot(22)))
    with pytest.raises(InstanceError) as told:
        with_hot_changes(spec)
    assert str(told.value).startswith(f"web1: {file}: ")
    assert "/a is the path of another disk too" in str(told.value)


# Files of which little can be had


FOREIGN = "lacks the settings of its start"
FOUR = [["kvm"], [{"uuid": "n1", "mac": MAC}], {"acpi": True}, [[{"uuid": "d1"}, "/dev/l", None]]]
THREE = [["kvm", "-drive"], [{"mac": MAC}, {"mac": HOT_MAC}], {"acpi": True}]


def aside_of(file: Path, number: int = 1) -> Path:
    return file.with_name("web1.aside" if number == 1 else f"web1.aside-{number}")


@pytest.mark.parametrize(
    ("form", "unknown"),
    [
        ({"nics": [hot_nic()], "disks": []}, f"NIC {HOT_MAC}"),
        (FOUR, "disk /dev/l"),
        (THREE, f"NIC {HOT_MAC}"),
        ([["kvm"], [{"mac": MAC}], {}, [[{"uuid": A}, "/dev/l", None]]], ""),
    ],
)
def test_anothers_file_is_kept_and_what_only_it_has_is_told(
    file: Path, form: Any, unknown: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Ganeti's, or that of a VM that was started by hand."""
    content = json.dumps(form)
    file.write_text(content)
    spec = web1()
    with caplog.at_level(logging.INFO):
        after, fault = hot_changes_or_aside(spec)
    assert after == spec
    why = f"{FOREIGN}; its spec does not have {unknown}" if unknown else FOREIGN
    assert fault == f"its runtime file is not used, and kept as {aside_of(file)}: {why}"
    assert aside_of(file).read_text() == content
    assert not file.exists()
    (record,) = caplog.records
    assert record.getMessage().endswith(why)


def test_what_is_kept_is_never_written_over(file: Path) -> None:
    for number in (1, 2, 3):
        file.write_text(f"{{{number}")
        _, fault = hot_changes_or_aside(web1())
        assert f"kept as {aside_of(file, number)}: " in fault
    assert [aside_of(file, number).read_text() for number in (1, 2, 3)] == ["{1", "{2", "{3"]


def test_a_fifo_holds_nobody_up_and_makes_way(file: Path) -> None:
    os.mkfifo(file)
    _, fault = hot_changes_or_aside(web1())
    assert "Is no regular file" in fault
    assert not file.exists()


def test_what_can_not_be_read_now_is_left_where_it_is(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("{}")

    def fail(_: Path, *, safely: bool) -> bytes:
        assert safely
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("brine.vm.runtime_file.read_regular", fail)
    with pytest.raises(InstanceError, match="can't be read: Input/output error"):
        hot_changes_or_aside(web1())
    assert file.exists()


def test_one_of_an_older_release_has_fewer_keys(file: Path) -> None:
    spec = started(web1())
    data = json.loads(file.read_text())
    del data["spec"]["memory_lock"], data["spec"]["nics"][0]["mtu"]
    data["spec"]["was_dropped"] = True
    file.write_text(json.dumps(data))
    plug(file, DeviceKind.NIC, hot_nic())
    assert [nic.uuid for nic in with_hot_changes(spec).nics] == [A, HOT]


Damage = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    "damage",
    [
        *("", "{", "[" * 100_000, "5", "[]"),
        lambda data: data.update(spec=5),
        lambda data: data["spec"].update(disks=5),
        lambda data: data["spec"]["nics"][0].update(queues="x"),
        lambda data: data["disks"][0].pop("path"),
        lambda data: data["disks"][0].update(path="relative"),
        lambda data: data["disks"][0].update(hvinfo=[1]),
        lambda data: data["disks"][0].update(uuid="d1"),
        lambda data: data["nics"][0].update(nicparams={"mode": "x", "link": "", "vlan": ""}),
        lambda data: data["nics"][0].update(nicparams=None),
        lambda data: data["nics"][0].pop("uuid"),
        lambda data: data.update(nics=5),
    ],
)
def test_what_is_damaged_is_named_and_left_alone(file: Path, damage: Damage | str) -> None:
    spec = started(web1())
    if isinstance(damage, str):
        file.write_text(damage)
    else:
        data = json.loads(file.read_text())
        damage(data)
        file.write_text(json.dumps(data))
    before = file.read_bytes()
    with pytest.raises(UnusableError) as told:
        with_hot_changes(spec)
    text = str(told.value)
    assert text.count(str(file)) == 1
    assert text.startswith(f"web1: {file}: ")
    assert file.read_bytes() == before
    after, fault = hot_changes_or_aside(spec)
    assert after == spec
    assert fault.startswith(f"its runtime file is not used, and kept as {aside_of(file)}: ")
    assert aside_of(file).read_bytes() == before
