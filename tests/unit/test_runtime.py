"""Runtime files of three forms."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from brine.hotplug.device_names import Kind
from brine.hotplug.runtime import Runtime, RuntimeFileError

NIC = {"uuid": "n1", "mac": "aa:00:00:00:00:01", "pci": 13}
DISK = {"uuid": "d1", "size": 1024, "pci": 14}

NEW: dict[Kind, dict[str, Any]] = {
    Kind.NIC: {
        "uuid": "d2",
        "mac": "aa:00:00:00:00:02",
        "ip": None,
        "nicparams": {"mode": "bridged", "link": "br0", "vlan": ""},
        "model": "virtio",
        "queues": 1,
        "pci": 15,
        "hvinfo": {"driver": "virtio-net-pci", "id": "nic-x", "bus": "pci.0", "addr": "0xf"},
    },
    Kind.DISK: {
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
    Kind.NIC: {"name", "mac", "ip", "network", "nicparams", "netinfo", "pci", "hvinfo", "uuid"},
    Kind.DISK: {
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
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_older_form_gets_an_empty_list_of_disks(tmp_path: Path) -> None:
    file = written(tmp_path, OLDER)
    runtime = Runtime.load(file)
    assert runtime.devices[Kind.DISK] == ()
    runtime.save(file)
    assert json.loads(file.read_text()) == [*OLDER, []]


@pytest.mark.parametrize("data", [OURS, GANETI, OLDER])
@pytest.mark.parametrize("kind", Kind)
def test_a_device_is_added_replaced_and_removed(tmp_path: Path, data: Any, kind: Kind) -> None:
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
    Runtime.load(file).with_device(Kind.DISK, NEW[Kind.DISK], link="/dev/vg/lv").save(file)
    runtime = Runtime.load(file)
    assert runtime.with_device(Kind.DISK, NEW[Kind.DISK], link="/dev/vg/lv") == runtime


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
    assert disk.keys() <= GANETIS_KEYS[Kind.DISK]
    assert nics[-1].keys() <= GANETIS_KEYS[Kind.NIC]
    assert nics[-1]["nicparams"] == NEW[Kind.NIC]["nicparams"]


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
