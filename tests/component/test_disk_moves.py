"""Disks that are moved to another storage unit, of instances that do not run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from brine.common import cli, operation, paths
from brine.common.entry_points import EntryPoint
from brine.instance import store
from brine.instance.disks.moves import move_disk
from brine.instance.registry import define_instance
from brine.storage.directory_notes import RECORDS
from brine.storage.file_volume import FileVolume
from brine.storage.orphans import orphans
from brine.storage.volume import VolumeRequest
from brine.vm.disk import Disk
from brine.vm.files import InstanceFiles
from killing import each_step
from lab.ganeti_config import ganeti_config, node_name

pytestmark = [
    pytest.mark.usefixtures("own_node"),
    pytest.mark.skipif(os.geteuid() != 0, reason="makes disks as root; ./dev test runs as root"),
]

MIB = 1 << 20
CONTENT = b"of the guest".ljust(MIB, b"x")


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """Two folders that are storage units."""
    nouns = [EntryPoint("disk", "brine.hotplug.cli:DISK")]
    nouns.append(EntryPoint("instance", "brine.instance.cli:COMMAND"))
    nouns.append(EntryPoint("storage", "brine.storage.cli:COMMAND"))
    verbs = [EntryPoint("disk", "brine.instance.disks.cli:add_disk_verbs")]
    verbs.append(EntryPoint("storage", "brine.instance.disks.storage_cli:add_storage_verbs"))
    known = {"brine.commands": nouns, "brine.verbs": verbs}
    monkeypatch.setattr(cli, "entry_points", lambda group: known.get(group, []))
    kinds = [EntryPoint("volumes", "brine.instance.disks.volumes:VOLUMES")]
    kinds.append(EntryPoint("disk-move", "brine.instance.disks.moves:MOVE"))
    kinds.append(EntryPoint("snapshot", "brine.instance.disks.snapshots:SNAPSHOT"))
    monkeypatch.setattr(operation, "entry_points", lambda _group: kinds)
    with tempfile.TemporaryDirectory(prefix="brine-moves-", dir="/srv") as folder:
        made = (f"{folder}/a", f"{folder}/b")
        for one in made:
            os.mkdir(one)
        monkeypatch.setattr(paths, "ETC_DIR", Path(folder))
        text = f'directories = {json.dumps(made)}\ndefault_unit = "{made[0]}"\n'
        (Path(folder) / "storage.toml").write_text(text)
        yield made


def have_web1(folders: tuple[str, str], **keys: Any) -> Disk:
    """An instance with a disk in the first folder, in which its guest has written."""
    disk = {"name": "data", "size_mib": 4, **keys}
    define_instance({"name": "web1", "accel": "tcg", "disks": [disk]})
    found = the_disk()
    if found.format == "raw":
        with open(found.path, "r+b") as file:
            file.write(CONTENT)
    else:
        subprocess.run(
            ["qemu-io", "-f", "qcow2", "-c", "write -P 120 0 1M", found.path],
            check=True,
            capture_output=True,
        )
    return found


def the_disk() -> Disk:
    (disk,) = store.load("web1").disks
    return disk


def content_of(disk: Disk) -> bytes:
    """The first MiB that the guest sees."""
    with tempfile.NamedTemporaryFile() as copy:
        command = ["qemu-img", "convert", "-f", disk.format, "-O", "raw", disk.path, copy.name]
        subprocess.run(command, check=True)
        assert os.stat(copy.name).st_size == 4 * MIB
        return copy.read(MIB)


def files_in(folder: str) -> list[str]:
    found = [name for name in os.listdir(folder) if name != RECORDS]
    records = Path(folder, RECORDS)
    return sorted([*found, *(os.listdir(records) if records.exists() else ())])


def brine(*arguments: str) -> int:
    try:
        return cli.main(arguments)
    except SystemExit as error:
        assert isinstance(error.code, int)
        return error.code


@pytest.mark.parametrize("image_format", ["raw", "qcow2"])
def test_a_disk_goes_to_another_folder(
    folders: tuple[str, str], capsys: pytest.CaptureFixture[str], image_format: str
) -> None:
    first, second = folders
    before = have_web1(folders, format=image_format)
    content = content_of(before)
    assert content.count(b"x") > MIB // 2
    runtime = InstanceFiles("web1").runtime
    rows = json.loads((paths.SPECS_DIR / "web1.json").read_text())["disks"]
    entry = before.entry(4)
    runtime.write_text(json.dumps({"spec": {"disks": rows}, "disks": [entry], "nics": []}))
    assert brine("disk", "move", "web1", "data", "--to", second, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    after = the_disk()
    path = f"{second}/{before.uuid}.{image_format}"
    assert after == replace(before, unit=second, path=path)
    assert (told["result"], told["path"], told["from"]) == ("moved", path, first)
    assert (told["changed"], told["live"]) == (True, False)
    assert content_of(after) == content
    assert files_in(first) == []
    known = json.loads(runtime.read_text())
    assert [one["path"] for one in (*known["disks"], *known["spec"]["disks"])] == [path, path]
    assert known["spec"]["disks"][0]["unit"] == second
    assert operation.pending() == []

    assert brine("disk", "move", "web1", before.uuid, "--to", second) == 0
    assert capsys.readouterr().out.startswith("unchanged: web1: disk data")

    # With snapshots it goes back as it is now, if these may go.
    for name in ("one", "two"):
        assert brine("disk", "snapshot", "web1", "--name", name) == 0
    assert brine("disk", "move", "web1", "data", "--to", first) == 1
    assert "--discard-snapshots" in capsys.readouterr().err
    assert brine("disk", "move", "web1", "data", "--to", first, "--discard-snapshots") == 0
    assert the_disk() == before
    assert content_of(before) == content
    assert files_in(second) == []
    assert operation.pending() == []


@pytest.mark.parametrize(
    ("words", "status", "named"),
    [
        (("web1", "none", "--to", "{second}"), 1, "data"),
        (("web1", "data", "--to", "/etc"), 1, "/etc"),
        (("web1", "data", "--to", "a/b"), 2, "a/b"),
        (("web1", "data", "--to", ""), 2, ""),
        (("web1", "data", "--to", "no-such-group"), 1, "no-such-group"),
        (("web2", "data", "--to", "{second}"), 1, "web2"),
        (("web1", "data", "--to", "{second}", "--rate", "10x"), 2, "10x"),
        (("web1", "data", "--to", "{second}", "--rate", "0M"), 2, "0M"),
        (("web1", "data"), 2, "--to"),
    ],
)
def test_what_can_not_be_is_one_line_and_changes_nothing(
    folders: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    status: int,
    named: str,
) -> None:
    before = have_web1(folders)
    given = [word.format(second=folders[1]) for word in words]
    assert brine("disk", "move", *given) == status
    said = capsys.readouterr().err
    # The parser shows how to use the verb first.
    assert "warning" not in said
    assert re.search(r"^brine( disk( move)?)?: error: ", said, re.MULTILINE)
    assert named in said
    assert the_disk() == before
    assert len(files_in(folders[0])) == 2
    assert files_in(folders[1]) == []
    assert operation.pending() == []


def test_what_would_not_be_whole_elsewhere_stays(
    folders: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = folders
    before = have_web1(folders)
    volume = FileVolume(first, before.uuid)
    volume.snapshot("monday")
    store.save(replace(store.load("web1"), disks=(volume.disk(before),)))
    assert brine("disk", "move", "web1", "data", "--to", second) == 1
    assert "monday" in capsys.readouterr().err
    volume.remove_snapshot("monday")
    store.save(replace(store.load("web1"), disks=(replace(before, unit=""),)))
    assert brine("disk", "move", "web1", "data", "--to", second) == 1
    assert "brine disk adopt" in capsys.readouterr().err
    assert files_in(second) == []


def test_a_move_that_is_killed_leaves_the_disk_at_one_place(
    folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = folders
    monkeypatch.setattr(os, "fsync", lambda _: None)  # kills are no power cuts

    def prepare() -> None:
        shutil.rmtree(paths.SPECS_DIR, ignore_errors=True)
        for folder in folders:
            shutil.rmtree(folder)
            os.mkdir(folder)
        paths.STORAGE_DIRECTORIES_FILE.unlink(missing_ok=True)
        have_web1(folders)

    seen = set()
    for step in each_step(lambda: move_disk("web1", "data", second), prepare):
        with store.alone("web1"):  # as each command on the instance
            disk = the_disk()
        assert content_of(disk) == CONTENT, step
        other = second if disk.unit == first else first
        assert files_in(other) == [], step
        assert files_in(disk.unit) == [f"{disk.uuid}.json", f"{disk.uuid}.raw"], step
        assert operation.pending() == [], step
        seen.add(disk.unit)
    assert seen == {first, second}


def test_a_folder_is_emptied_and_what_fails_stops_nothing(
    folders: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = folders
    disks = [{"name": name, "size_mib": 4} for name in ("one", "two", "three")]
    define_instance({"name": "web1", "accel": "tcg", "disks": disks})
    one, two, three = store.load("web1").disks
    FileVolume(first, two.uuid).snapshot("monday")
    with_snapshot = FileVolume(first, two.uuid).disk(two)
    store.save(replace(store.load("web1"), disks=(one, with_snapshot, three)))
    assert brine("storage", "evacuate", "file", first) == 1
    assert "--to" in capsys.readouterr().err
    assert brine("storage", "evacuate", "file", first, "--to", second, "--json") == 1
    said = capsys.readouterr()
    told = json.loads(said.out)
    assert (told["result"], len(told["moved"])) == ("incomplete", 2)
    (failed,) = told["failed"]
    assert (failed["instance"], failed["disk"]) == ("web1", "two")
    assert "monday" in failed["error"]
    assert "monday" in said.err
    units = {disk.name: disk.unit for disk in store.load("web1").disks}
    assert units == {"one": second, "two": first, "three": second}
    FileVolume(first, two.uuid).remove_snapshot("monday")
    store.save(replace(store.load("web1"), disks=(*store.load("web1").disks[::2], two)))
    assert brine("storage", "evacuate", "file", first, "--to", second) == 0
    assert capsys.readouterr().out.endswith(f"evacuated: {first}\n")
    assert files_in(first) == []


def test_a_folder_is_not_empty_while_volumes_are_left_or_a_spec_can_not_be_used(
    folders: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = folders
    disk = have_web1(folders)
    for uuid in (str(uuid4()), str(uuid4())):
        FileVolume(first, uuid).create(VolumeRequest(size=MIB, owner="gone", name="data"))
    evacuate = ("storage", "evacuate", "file", first, "--to", second)
    spec = paths.SPECS_DIR / "web1.json"
    sound = spec.read_bytes()
    spec.write_text(json.dumps({**json.loads(sound), "disks": None}))
    assert brine(*evacuate) == 1
    said = capsys.readouterr()
    assert "web1" in said.err
    last = said.out.splitlines()[-1]
    assert (last.startswith("evacuated:"), "3 left" in last, "web1" in last) == (False, True, True)
    assert brine(*evacuate, "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["result"], told["moved"]) == ("incomplete", [])
    assert [one["instance"] for one in told["failed"]] == ["web1", None, None, None]
    spec.write_bytes(sound)
    assert brine(*evacuate, "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert [one["volume"] for one in told["moved"]] == [disk.path]
    left = {one.volume.uuid for one in orphans()}
    assert {one["volume"].rpartition("/")[2] for one in told["failed"]} == left
    assert brine(*evacuate) == 1
    assert capsys.readouterr().out == f"incomplete: {first}, 2 left\n"
    assert brine("storage", "orphans", "--remove", "--yes") == 0
    capsys.readouterr()
    assert brine(*evacuate) == 0
    assert capsys.readouterr().out == f"evacuated: {first}\n"


def test_disks_of_a_configuration_are_adopted_and_stay_where_they_were_moved(
    folders: tuple[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first, second = folders
    data = ganeti_config(nodes=1, instances=1)
    (instance,), (disk,) = data["instances"].values(), data["disks"].values()
    instance["name"] = "web1"
    path = f"{first}/web1/{disk['uuid']}.file.disk0"
    disk |= {"dev_type": "file", "logical_id": ["loop", path], "size": 4}
    Path(path).parent.mkdir()
    Path(path).write_bytes(CONTENT.ljust(4 * MIB, b"\0"))
    file = tmp_path / "config.data"
    file.write_text(json.dumps(data))
    define = ("instance", "define", "--from-config", "--config", str(file), "--node", node_name(1))
    assert brine(*define, "--dry-run") == 0
    assert store.names() == []
    for _ in range(2):
        assert brine(*define) == 0, capsys.readouterr().err
        adopted = the_disk()
        assert (adopted.unit, adopted.name, adopted.path) == (first, "disk0", path)
        assert adopted.size_mib == 4
    assert brine("disk", "move", "web1", "disk0", "--to", second) == 0
    assert not os.path.exists(path)
    moved = the_disk()
    assert content_of(moved) == CONTENT
    capsys.readouterr()
    assert brine(*define) == 0
    assert capsys.readouterr().out == "unchanged: web1\n"
    assert the_disk() == moved

    # A disk that was added by hand keeps its place and its name, also beside another one.
    assert brine("disk", "add", "web1", "--size", "4M", "--unit", first, "--name", "disk1") == 0
    by_hand = next(one for one in store.load("web1").disks if one.by_hand)
    capsys.readouterr()
    assert brine(*define) == 0
    assert capsys.readouterr().out == "unchanged: web1\n"
    other = {**disk, "uuid": str(uuid4()), "logical_id": ["loop", f"{first}/web1/other"]}
    Path(f"{first}/web1/other").write_bytes(bytes(4 * MIB))
    data["disks"][other["uuid"]] = other
    instance["disks"].append(other["uuid"])
    file.write_text(json.dumps(data))
    for _ in range(2):
        assert brine(*define) == 0, capsys.readouterr().err
        found = store.load("web1").disks
        assert [(one.name, one.unit, one.by_hand) for one in found] == [
            ("disk0", second, False),
            ("", first, False),
            ("disk1", first, True),
        ]
        assert (found[0], found[2]) == (moved, by_hand)
