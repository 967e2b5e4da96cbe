"""Runtime files of three forms."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from brine.hotplug.address import DeviceKind, uuid_of_mac
from brine.hotplug.runtime_file import Runtime, RuntimeFileError

NIC = {"uuid": "n1", "mac": "aa:00:00:00:00:01", "pci": 13}
DISK = {"uuid": "d1", "size": 1024, "pci": 14}

NEW: dict[DeviceKind, dict[str, Any]] = {
    DeviceKind.NIC: {
        "uuid": "d2",
        "mac": "aa:00:00:00:00:02",
        "ip": None,
        "nicparams": {"mode": "bridged", "link": "br0", "vlan": ""},
        "model": "virtio",
        "queues": 1,
        "pci": 15,
        "hvinfo": {"driver": "virtio-net-pci", "id": "nic-x", "bus": "pci.0", "addr": "0xf"},
    },
    DeviceKind.DISK: {
        "uuid": "d2",
        "path": "/dev/vg/lv",
        "format": "raw",
        "read_only": True,
        "size_mib": 1024,
        "pci": 15,
        "hvinfo": {"driver": "virtio-blk-pci", "id": "disk-x", "bus": "pci.0", "addr": "0xf"},
    },
}
# The slots of Ganeti's classes, which its FromDict insists on.
GANETIS_KEYS = {
    DeviceKind.NIC: {
        "name",
        "mac",
        "ip",
        "network",
        "nicparams",
        "netinfo",
        "pci",
        "hvinfo",
        "uuid",
    },
    DeviceKind.DISK: {
        *("dev_type", "logical_id", "children", "nodes", "iv_name", "size", "mode", "params"),
        *("spindles", "pci", "hvinfo", "name", "uuid"),
    },
}

OURS: Any = {"format": 1, "command": ["qemu"], "nics": [NIC], "disks": [DISK], "more": {"x": 1}}
GANETI: Any = [["kvm", "-m"], [NIC], {"acpi": True}, [[DISK, "/dev/link", "kvm:uri"]]]
OLDER: Any = [["kvm", "-drive"], [{"uuid": "n1", "mac": "aa:00:00:00:00:01"}], {"acpi": True}]


def written(tmp_path: Path, data: Any) -> Path:
    file = tmp_path / "web1.json"
    file.write_text(json.dumps(data))
    return file


@pytest.mark.parametrize("data", [OURS, GANETI])
def test_what_is_not_changed_is_kept(tmp_path: Path, data: Any) -> None:
    file = written(tmp_path, data)
    Runtime.load(file).save(file)
    assert json.loads(file.read_text()) == data


def test_the_older_form_gets_an_empty_list_of_disks(tmp_path: Path) -> None:
    file = written(tmp_path, OLDER)
    runtime = Runtime.load(file)
    assert runtime.devices[DeviceKind.DISK] == ()
    runtime.save(file)
    assert json.loads(file.read_text()) == [*OLDER, []]


@pytest.mark.parametrize("data", [OURS, GANETI, OLDER])
@pytest.mark.parametrize("kind", DeviceKind)
def test_a_device_is_added_replaced_and_removed(
    tmp_path: Path, data: Any, kind: DeviceKind
) -> None:
    file = written(tmp_path, data)
    new = NEW[kind]
    Runtime.load(file).with_device(kind, new, link="/dev/vg/lv").save(file)
    found = Runtime.load(file).find(kind, "d2")
    assert found
    assert (found["pci"], found["hvinfo"]) == (15, new["hvinfo"])
    Runtime.load(file).with_device(kind, {**new, "pci": 16}, link="/dev/vg/lv").save(file)
    found = Runtime.load(file).find(kind, "d2")
    assert found
    assert found["pci"] == 16
    Runtime.load(file).without_device(kind, "d2").save(file)
    kept = json.loads(file.read_text())
    assert kept == (data if data is not OLDER else [*OLDER, []])


def test_the_same_device_twice_is_no_change(tmp_path: Path) -> None:
    file = written(tmp_path, OURS)
    Runtime.load(file).with_device(DeviceKind.DISK, NEW[DeviceKind.DISK], link="/dev/vg/lv").save(
        file
    )
    runtime = Runtime.load(file)
    assert runtime.with_device(DeviceKind.DISK, NEW[DeviceKind.DISK], link="/dev/vg/lv") == runtime


def test_ganetis_form_has_each_disks_link_and_no_key_that_ganeti_does_not_know(
    tmp_path: Path,
) -> None:
    file = written(tmp_path, GANETI)
    for kind, device in NEW.items():
        Runtime.load(file).with_device(kind, device, link="/dev/vg/lv").save(file)
    _, nics, _, disks = json.loads(file.read_text())
    assert disks[0] == [DISK, "/dev/link", "kvm:uri"]
    disk, link, uri = disks[1]
    assert (link, uri) == ("/dev/vg/lv", None)
    assert (disk["dev_type"], disk["logical_id"]) == ("blockdev", ["manual", "/dev/vg/lv"])
    assert (disk["size"], disk["mode"], disk["iv_name"]) == (1024, "ro", "disk/1")
    assert disk.keys() <= GANETIS_KEYS[DeviceKind.DISK]
    assert nics[-1].keys() <= GANETIS_KEYS[DeviceKind.NIC]
    assert nics[-1]["nicparams"] == NEW[DeviceKind.NIC]["nicparams"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("5", "is no runtime file"),
        ("[]", "is no runtime file"),
        ("[[], [], {}, [], []]", "is no runtime file"),
        ("[[], [5], {}]", "is no runtime file"),
        ('{"nics": 5}', "is no runtime file"),
        ('{"nics": [{}]}', "has no UUID"),
        ("[[], [], {}, [[]]]", "is no runtime file"),
    ],
)
def test_what_is_none_is_told_and_left_alone(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "web1.json"
    file.write_text(content)
    with pytest.raises(RuntimeFileError, match=said):
        Runtime.load(file)
    assert file.read_text() == content


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RuntimeFileError, match="No such file"):
        Runtime.load(tmp_path / "web1.json")


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_a_file_keeps_its_mode_and_what_is_a_link_stays_one(tmp_path: Path, mode: int) -> None:
    (tmp_path / "real").mkdir()
    file = written(tmp_path / "real", OURS)
    file.chmod(mode)
    link = tmp_path / "link.json"
    link.symlink_to("real/web1.json")
    Runtime.load(link).with_device(DeviceKind.NIC, NEW[DeviceKind.NIC]).save(link)
    assert link.is_symlink()
    assert stat.S_IMODE(file.stat().st_mode) == mode
    assert Runtime.load(file).find(DeviceKind.NIC, "d2")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_keeps_its_owner(tmp_path: Path) -> None:
    file = written(tmp_path, OURS)
    os.chown(file, 65534, 1)
    Runtime.load(file).with_device(DeviceKind.NIC, NEW[DeviceKind.NIC]).save(file)
    assert (file.stat().st_uid, file.stat().st_gid) == (65534, 1)


def test_what_is_no_file_is_told_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name in ("fifo", "."):
        with pytest.raises(RuntimeFileError, match="Is no regular file|directory"):
            Runtime.load(tmp_path / name)


@pytest.mark.parametrize("data", [OURS, GANETI])
def test_the_uuid_of_one_disk_is_not_given_to_another(tmp_path: Path, data: Any) -> None:
    file = written(tmp_path, data)
    disk = NEW[DeviceKind.DISK]
    Runtime.load(file).with_device(DeviceKind.DISK, disk, link="/dev/vg/lv").save(file)
    with pytest.raises(RuntimeFileError, match="is /dev/vg/lv there, not /dev/vg/other"):
        Runtime.load(file).with_device(DeviceKind.DISK, {**disk, "path": "/dev/vg/other"})


def test_a_disk_of_ganetis_is_known_by_its_link(tmp_path: Path) -> None:
    file = written(tmp_path, GANETI)
    with pytest.raises(RuntimeFileError, match="is /dev/link there"):
        Runtime.load(file).with_device(DeviceKind.DISK, {**NEW[DeviceKind.DISK], "uuid": "d1"})


@pytest.mark.parametrize("data", [OURS, GANETI])
@pytest.mark.parametrize("kind", DeviceKind)
def test_what_is_recorded_again_without_a_place_keeps_the_one_that_it_has(
    tmp_path: Path, data: Any, kind: DeviceKind
) -> None:
    runtime = Runtime.load(written(tmp_path, data))
    runtime = runtime.with_device(kind, NEW[kind], link="/dev/vg/lv")
    placeless = {key: NEW[kind][key] for key in NEW[kind] if key not in ("pci", "hvinfo")}
    assert runtime.with_device(kind, placeless, link="/dev/vg/lv") == runtime


def test_devices_are_known_by_id_uuid_mac_serial_and_path(tmp_path: Path) -> None:
    nic_id, disk_id = "nic-9fb0b0f9-pci-13", "disk-6a0f4f0d-pci-14"
    uuid, other = "6a0f4f0d-0000-4000-8000-00000000000a", "7a0f4f0d-0000-4000-8000-00000000000a"
    nic = {**NIC, "hvinfo": {"id": nic_id}}
    disks = [
        {"uuid": uuid, "serial": None, "hvinfo": {"id": disk_id}},
        {"uuid": other, "serial": "data", "path": "/dev/vg/Data"},
    ]
    runtime = Runtime.load(written(tmp_path, {"nics": [nic], "disks": disks}))
    for reference in ("n1", nic_id, "AA:00:00:00:00:01"):
        assert runtime.known_as(DeviceKind.NIC, reference) == [nic]
    for reference in (uuid, disk_id, uuid[:20], uuid.upper()):
        assert runtime.known_as(DeviceKind.DISK, reference) == [disks[0]]
    for reference in ("data", other, "/dev/vg/Data", "/dev/vg/../vg/Data"):
        assert runtime.known_as(DeviceKind.DISK, reference) == [disks[1]]
    for reference in (other[:20], "/dev/vg/data"):
        assert runtime.known_as(DeviceKind.DISK, reference) == []


@pytest.mark.parametrize("nothing", [{}, {"uuid": None}])
def test_devices_of_old_ganetis_without_uuids_get_some_that_stay(
    tmp_path: Path, nothing: dict[str, None]
) -> None:
    nics = [{"mac": f"aa:00:00:00:00:0{number}", "ip": None, **nothing} for number in (1, 2)]
    disk = {"logical_id": ["vg", "lv"], **nothing}
    file = written(tmp_path, [["kvm"], nics, {}, [[disk, "/dev/vg/lv"]]])
    runtime = Runtime.load(file)
    assert runtime.find(DeviceKind.NIC, uuid_of_mac("aa:00:00:00:00:01"))
    assert len({one["uuid"] for one in runtime.devices[DeviceKind.NIC]}) == 2
    assert Runtime.load(file) == runtime
    runtime.save(file)
    assert Runtime.load(file).devices == runtime.devices
