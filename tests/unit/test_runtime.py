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
def test_a_device_is_added_replaced_and_removed(tmp_path: Path, data: Any) -> None:
    file = written(tmp_path, data)
    new = {"uuid": "d2", "pci": 15}
    Runtime.load(file).with_device(Kind.DISK, new, link="/dev/vg/lv").save(file)
    assert Runtime.load(file).find(Kind.DISK, "d2") == new
    changed = {**new, "pci": 16}
    Runtime.load(file).with_device(Kind.DISK, changed, link="/dev/vg/lv").save(file)
    assert Runtime.load(file).find(Kind.DISK, "d2") == changed
    Runtime.load(file).without_device(Kind.DISK, "d2").save(file)
    kept = json.loads(file.read_text())
    assert kept == (data if data is not OLDER else [*OLDER, []])


def test_ganetis_form_has_each_disks_link(tmp_path: Path) -> None:
    file = written(tmp_path, GANETI)
    Runtime.load(file).with_device(Kind.DISK, {"uuid": "d2"}, link="/dev/vg/lv").save(file)
    assert json.loads(file.read_text())[3] == [
        [DISK, "/dev/link", "kvm:uri"],
        [{"uuid": "d2"}, "/dev/vg/lv", None],
    ]


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
        ('{"nics": [{}]}', "is no runtime file"),
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
