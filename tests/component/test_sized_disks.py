"""Instances whose disks have sizes: definitions make volumes, and have them grow."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from brine.common import cli, operation, paths
from brine.common.entry_points import EntryPoint
from brine.common.errors import BrineError
from brine.common.operation import OperationKind, Work
from brine.instance import store
from brine.instance.clone import SNAPSHOT_OF_SOURCE, clone_instance
from brine.instance.disks import disk_commands
from brine.instance.disks.snapshots import SNAPSHOT, snapshots_of
from brine.instance.disks.volumes import VOLUMES
from brine.instance.registry import define_instance, undefine_instance
from brine.storage import directories
from brine.storage.directory_notes import RECORDS
from brine.storage.file_volume import FileVolume
from brine.storage.orphans import orphans
from brine.storage.unit import StorageError
from brine.vm.disk import Disk
from brine.vm.spec import SpecError, to_json
from killing import KilledError

pytestmark = [
    pytest.mark.usefixtures("own_node"),
    pytest.mark.skipif(os.geteuid() != 0, reason="makes disks as root; ./dev test runs as root"),
]

MIB = 1 << 20


@pytest.fixture
def unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A folder that is the default unit of the node."""
    monkeypatch.setattr(paths, "ETC_DIR", tmp_path / "etc")
    nouns = [EntryPoint("instance", "brine.instance.cli:COMMAND")]
    nouns.append(EntryPoint("disk", "brine.hotplug.cli:DISK"))
    nouns.append(EntryPoint("storage", "brine.storage.cli:COMMAND"))
    verbs = [EntryPoint("disk", "brine.instance.disks.cli:add_disk_verbs")]
    known = {"brine.commands": nouns, "brine.verbs": verbs}
    monkeypatch.setattr(cli, "entry_points", lambda group: known.get(group, []))
    kinds = [EntryPoint("volumes", "brine.instance.disks.volumes:VOLUMES")]
    kinds.append(EntryPoint("clone", "brine.instance.clone:CLONE"))
    kinds.append(EntryPoint("clone-snapshot", "brine.instance.clone:SNAPSHOT_OF_SOURCE"))
    kinds.append(EntryPoint("snapshot", "brine.instance.disks.snapshots:SNAPSHOT"))
    kinds.append(EntryPoint("snapshot-removal", "brine.instance.disks.snapshots:REMOVAL"))
    kinds.append(EntryPoint("snapshot-rest", "brine.instance.disks.snapshots:REST"))
    kinds.append(EntryPoint("rollback", "brine.instance.disks.snapshots:ROLLBACK"))
    monkeypatch.setattr(operation, "entry_points", lambda _group: kinds)
    with tempfile.TemporaryDirectory(prefix="brine-sized-", dir="/srv") as folder:
        paths.ETC_DIR.mkdir(exist_ok=True)
        settings = f'directories = ["{folder}"]\ndefault_unit = "{folder}"\n'
        (paths.ETC_DIR / "storage.toml").write_text(settings)
        yield folder


def web1(*disks: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {"name": "web1", "accel": "tcg", "disks": list(disks), **keys}


ROOT = {"name": "root", "size_mib": 4}
DATA = {"name": "data", "size_mib": 6, "format": "qcow2", "interface": "scsi"}


def disks_of(name: str = "web1") -> dict[str, Disk]:
    return {disk.name: disk for disk in store.load(name).disks}


def files_in(unit: str) -> set[str]:
    return set(os.listdir(unit)) - {RECORDS}


def test_a_definition_makes_what_is_missing_once(unit: str) -> None:
    first = define_instance(web1(ROOT, DATA))
    made = disks_of()
    assert {name: (one.unit, one.size_mib) for name, one in made.items()} == {
        "root": (unit, 4),
        "data": (unit, 6),
    }
    assert made["data"].path == f"{unit}/{made['data'].uuid}.qcow2"
    assert made["data"].interface == "scsi"
    assert os.stat(made["root"].path).st_size == 4 * MIB
    assert [disk.name for disk in first.volumes.made] == ["root", "data"]
    again = define_instance(web1(DATA, ROOT))  # in whichever order
    assert again.spec.disks == (made["data"], made["root"])
    assert not again.volumes.needs_work()
    assert len(files_in(unit)) == 2


def test_it_grows_and_is_not_made_smaller(unit: str) -> None:
    define_instance(web1(ROOT))
    path = disks_of()["root"].path
    Path(path).write_bytes(b"kept".ljust(4 * MIB, b"\0"))
    grown = define_instance(web1({**ROOT, "size_mib": 9}))
    assert [disk.name for disk in grown.volumes.grown] == ["root"]
    assert os.stat(path).st_size == 9 * MIB
    assert Path(path).read_bytes().startswith(b"kept")
    assert disks_of()["root"].size_mib == 9
    before = paths.SPECS_DIR.joinpath("web1.json").read_bytes()
    with pytest.raises(SpecError, match="shrink"):
        define_instance(web1({**ROOT, "size_mib": 8}))
    assert paths.SPECS_DIR.joinpath("web1.json").read_bytes() == before


@pytest.mark.parametrize(
    ("disk", "where", "named"),
    [
        ({"size_mib": 4}, "/disks/0", "name"),
        ({**ROOT, "size_mib": 0}, "/disks/0/size_mib", "0"),
        ({**ROOT, "size_mib": -1}, "/disks/0/size_mib", "-1"),
        ({**ROOT, "size_mib": "10x"}, "/disks/0/size_mib", "10x"),
        ({**ROOT, "size_mib": True}, "/disks/0/size_mib", "True"),
        ({**ROOT, "name": "../x"}, "/disks/0/name", "name"),
        ({**ROOT, "unit": "/srv/../etc"}, "/disks/0/unit", ".."),
        ({**ROOT, "unit": "a/b"}, "/disks/0/unit", "volume group"),
        ({**ROOT, "unit": 5}, "/disks/0/unit", ""),
        ({**ROOT, "unit": "/srv/none"}, "", "/srv/none"),
        ({**ROOT, "size_mib": 1 << 32}, "", "free"),
        ({**ROOT, "size_mib": 1 << 40}, "/disks/0/size_mib", ""),
        ({**ROOT, "format": "vmdk"}, "/disks/0/format", "vmdk"),
        ({"path": "/srv/a", "size_mib": 4}, "/disks/0/size_mib", "unit"),
        (
            {**ROOT, "format": "qcow2", "backing": {"path": "/srv/base", "format": "raw"}},
            "/disks/0/backing",
            "adopt",
        ),
    ],
)
def test_what_can_not_be_is_one_line_and_changes_nothing(
    unit: str, capsys: pytest.CaptureFixture[str], disk: dict[str, Any], where: str, named: str
) -> None:
    file = paths.SPECS_DIR.parent / "spec.json"
    file.write_text(json.dumps(web1({"name": "good", "size_mib": 1}, disk)))
    for options in ([], ["--dry-run"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["instance", "define", str(file), *options])
        assert ended.value.code == 1
        said = capsys.readouterr()
        assert where.replace("/0", "/1") in said.err
        assert named in said.err
        assert "Traceback" not in said.err
        assert files_in(unit) == set()
        assert store.names() == []


def test_without_a_default_unit_the_disk_says_where_it_is_to_be(unit: str) -> None:
    (paths.ETC_DIR / "storage.toml").write_text(f'directories = ["{unit}"]\n')
    with pytest.raises(SpecError, match="unit"):
        define_instance(web1(ROOT))
    define_instance(web1({**ROOT, "unit": unit}))
    with pytest.raises(SpecError, match="/disks/0/unit"):
        define_instance(web1({**ROOT, "unit": "vg1"}))


def test_a_dry_run_and_the_output_name_volumes(
    unit: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "web1.json"
    file.write_text(json.dumps(web1(ROOT)))
    assert cli.main(["instance", "define", str(file), "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["volumes"]
    assert [one["name"] for one in told["made"]] == ["root"]
    assert files_in(unit) == set()
    assert cli.main(["instance", "define", str(file)]) == 0
    assert f"web1: volume made: root, 4.0M in {unit}" in capsys.readouterr().out
    file.write_text(json.dumps(web1({**ROOT, "size_mib": 8})))
    assert cli.main(["instance", "define", str(file), "--dry-run"]) == 0
    assert "web1: volume would be grown: root, to 8.0M" in capsys.readouterr().out
    assert cli.main(["instance", "define", str(file)]) == 0
    path = disks_of()["root"].path
    capsys.readouterr()
    file.write_text(json.dumps(web1()))
    assert cli.main(["instance", "define", str(file)]) == 0
    assert f"web1: volume kept: {path}" in capsys.readouterr().out
    assert os.path.exists(path)


def test_a_snapshot_below_a_disk_is_not_lost_to_a_spec_that_does_not_know_it(unit: str) -> None:
    define_instance(web1(ROOT))
    disk = disks_of()["root"]
    volume = FileVolume(unit, disk.uuid)
    volume.snapshot("now")
    spec = store.load("web1")
    with store.alone("web1"):
        store.save(replace(spec, disks=(volume.disk(disk),)))
    layered = disks_of()["root"]
    assert layered.backing
    below = to_json(layered)["backing"]
    rows: list[dict[str, Any]] = [ROOT, {"path": disk.path}, {"uuid": disk.uuid, "path": disk.path}]
    rows.append({**ROOT, "format": "qcow2", "backing": below})
    for row in rows:
        again = define_instance(web1(row))
        assert again.spec.disks == (layered,)
        assert not again.changed
    other = {"path": f"{unit}/other.raw", "format": "raw"}
    with pytest.raises(SpecError, match="/disks/0/backing"):
        define_instance(web1({**ROOT, "format": "qcow2", "backing": other}))
    undefine_instance("web1")
    with pytest.raises(SpecError, match="/disks/0/backing"):
        define_instance(web1({**to_json(layered), "backing": other}))
    assert define_instance(web1(to_json(layered))).spec.disks == (layered,)


def test_what_no_instance_has_is_listed_and_removed_on_demand(
    unit: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nouns = [EntryPoint("storage", "brine.storage.cli:COMMAND")]
    monkeypatch.setattr(cli, "entry_points", lambda group: nouns * (group == "brine.commands"))

    def listed() -> list[dict[str, Any]]:
        assert cli.main(["storage", "orphans", "--json"]) == 0
        return list(json.loads(capsys.readouterr().out))

    define_instance(web1(ROOT, DATA))
    kept = disks_of()
    assert listed() == []
    FileVolume(unit, kept["data"].uuid).snapshot("now")
    define_instance(web1(ROOT))
    assert [(one["uuid"], one["owner"], one["disk"]) for one in listed()] == [
        (kept["data"].uuid, "web1", "data")
    ]
    undefine_instance("web1")
    assert {one["uuid"] for one in listed()} == {one.uuid for one in kept.values()}
    assert cli.main(["storage", "orphans"]) == 0
    said = capsys.readouterr().out
    assert kept["root"].uuid in said
    assert said.splitlines()[-1].startswith("brine disk add INSTANCE --path /")
    # Begun work may need one; a spec that can't be read may name one.
    facts = {"uuid": kept["root"].uuid}
    with operation.begin(VOLUMES, "instance/web2", facts=facts):
        assert [one["uuid"] for one in listed()] == [kept["data"].uuid]
    damaged = paths.SPECS_DIR / "web3.json"
    damaged.write_text("{")
    with pytest.raises(SystemExit):
        cli.main(["storage", "orphans", "--remove"])
    with pytest.raises(SystemExit):
        cli.main(["storage", "orphans", "--remove", "--yes"])
    damaged.unlink()
    assert "web3" in capsys.readouterr().err
    before = files_in(unit)
    for words in (["--remove", "x"], ["--remove", "", "--yes"], [kept["root"].uuid], ["--remove"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["storage", "orphans", *words])
        assert ended.value.code == 2
    assert "--yes" in capsys.readouterr().err
    for answer in ("n", ""):
        monkeypatch.setattr("sys.stdin", Terminal(f"{answer}\n"))
        with pytest.raises(SystemExit):
            cli.main(["storage", "orphans", "--remove"])
        assert kept["root"].path in capsys.readouterr().err
    assert files_in(unit) == before
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    with open(kept["root"].path, "rb"):
        assert cli.main(["storage", "orphans", "--remove"]) == 1
    assert kept["root"].path in capsys.readouterr().err
    assert files_in(unit) == {os.path.basename(kept["root"].path)}
    assert cli.main(["storage", "orphans", "--remove", kept["root"].uuid]) == 0
    capsys.readouterr()
    assert (files_in(unit), listed()) == (set(), [])


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: {**spec, "disk": spec["disks"], "disks": []},
        lambda spec: {key: value for key, value in spec.items() if key != "disks"} | {"disk": []},
        lambda spec: {**spec, "disks": {}},
        lambda spec: {**spec, "disks": None},
        lambda spec: {**spec, "disks": [{**one, "uuid": ""} for one in spec["disks"]]},
        lambda spec: [spec],
    ],
)
def test_a_spec_that_can_not_be_used_keeps_all_volumes(
    unit: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[dict[str, Any]], Any],
) -> None:
    nouns = [EntryPoint("storage", "brine.storage.cli:COMMAND")]
    nouns += [EntryPoint("instance", "brine.instance.cli:COMMAND")]
    nouns += [EntryPoint("disk", "brine.hotplug.cli:DISK")]
    verbs = [EntryPoint("disk", "brine.instance.disks.cli:add_disk_verbs")]
    known = {"brine.commands": nouns, "brine.verbs": verbs}
    monkeypatch.setattr(cli, "entry_points", lambda group: known.get(group, []))
    define_instance(web1(ROOT))
    kept = disks_of()["root"]
    define_instance({**web1(DATA), "name": "web2"})
    mine = to_json(disks_of("web2")["data"])
    file = paths.SPECS_DIR / "web1.json"
    sound = file.read_bytes()
    file.write_text(json.dumps(change(json.loads(sound))))
    before = files_in(unit)
    assert cli.main(["storage", "orphans", "--json"]) == 0
    assert "web1" in capsys.readouterr().err
    for words in (
        ["storage", "orphans", "--remove", "--yes"],
        ["storage", "orphans", "--remove", kept.uuid],
        ["instance", "undefine", "web2", "--delete-volumes", "--yes"],
        ["disk", "remove", "web2", "data", "--delete"],
        ["storage", "remove", "file", unit],
    ):
        with pytest.raises(SystemExit):
            cli.main(words)
        said = capsys.readouterr().err
        assert "web1" in said or words[1] == "remove", words
        assert "Traceback" not in said
        assert files_in(unit) == before
    with pytest.raises(BrineError, match="web1"):
        define_instance({**web1(mine, to_json(kept)), "name": "web2"})
    assert disks_of("web2").keys() == {"data"}
    file.write_bytes(sound)
    assert orphans() == []


def test_a_volume_that_is_there_is_neither_made_anew_nor_removed(unit: str) -> None:
    define_instance(web1(ROOT))
    kept = disks_of()["root"]
    Path(kept.path).write_bytes(b"kept".ljust(4 * MIB, b"\0"))
    define_instance(web1())
    for name in ("web1", "web2"):
        with pytest.raises(StorageError, match="already"):
            define_instance({**web1({**ROOT, "uuid": kept.uuid}), "name": name})
        assert Path(kept.path).read_bytes().startswith(b"kept")
        assert operation.pending() == []
    # It can be taken again, by its path.
    row = {"name": "root", "uuid": kept.uuid, "path": kept.path, "unit": unit, "size_mib": 4}
    assert define_instance(web1({**row, "format": "raw"})).spec.disks[0].path == kept.path


def test_a_growth_that_fails_holds_up_nothing(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    define_instance(web1(ROOT))
    grow = FileVolume.grow

    def fail(volume: FileVolume, size: int) -> None:
        if size > 4 * MIB:
            raise StorageError("the device is gone")
        grow(volume, size)

    monkeypatch.setattr(FileVolume, "grow", fail)
    with pytest.raises(StorageError):
        define_instance(web1({**ROOT, "size_mib": 8}))
    assert operation.pending() == []
    assert define_instance(web1(ROOT, vcpus=2)).changed


def test_an_instance_that_is_undefined_leaves_its_volumes_or_not(
    unit: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    define_instance(web1(ROOT, DATA))
    before = files_in(unit)
    undefine = ["instance", "undefine", "web1"]
    with open(disks_of()["root"].path, "rb"), pytest.raises(SystemExit):
        cli.main([*undefine, "--delete-volumes", "--yes"])
    with pytest.raises(SystemExit):
        cli.main([*undefine, "--delete-volumes"])
    for answer in ("n", ""):
        monkeypatch.setattr("sys.stdin", Terminal(f"{answer}\n"))
        with pytest.raises(SystemExit):
            cli.main([*undefine, "--delete-volumes"])
    assert (store.names(), files_in(unit)) == (["web1"], before)
    capsys.readouterr()
    assert cli.main([*undefine, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {os.path.basename(path) for path in told["volumes_kept"]} == before == files_in(unit)
    define_instance(web1(ROOT))
    FileVolume(unit, disks_of()["root"].uuid).snapshot("now")
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert cli.main([*undefine, "--delete-volumes"]) == 0
    assert files_in(unit) == before


def test_a_clone_has_volumes_of_its_own_with_what_the_originals_have(
    unit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = {"name": "shared", "size_mib": 1, "read_only": True}
    define_instance(web1(ROOT, DATA, shared))
    originals = disks_of()
    Path(originals["root"].path).write_bytes(b"root".ljust(4 * MIB, b"\0"))
    volume = FileVolume(unit, originals["root"].uuid)
    volume.snapshot("now")
    spec = store.load("web1")
    layered = tuple(volume.disk(one) if one.name == "root" else one for one in spec.disks)
    with store.alone("web1"):
        store.save(replace(spec, disks=layered))
    before = files_in(unit)
    clone = ["instance", "clone", "web1", "web2"]
    assert cli.main([*clone, "--dry-run"]) == 0
    assert files_in(unit) == before
    assert cli.main(clone) == 0
    made = disks_of("web2")
    assert made["shared"].path == originals["shared"].path
    assert made["shared"].unit == ""
    for name in ("root", "data"):
        assert made[name].unit == unit
        assert made[name].uuid != originals[name].uuid
        assert made[name].size_mib == originals[name].size_mib
        assert not made[name].backing
    assert FileVolume(unit, made["root"].uuid).status().owner == "web2"
    command = ["qemu-img", "convert", "-O", "raw", made["root"].path, f"{unit}/copy"]
    subprocess.run(command, check=True)
    assert Path(unit, "copy").read_bytes().rstrip(b"\0") == b"root"
    os.unlink(f"{unit}/copy")
    # A path of its own is as before: Brine has not made what is there.
    capsys.readouterr()
    mapped = ["--disk", f"{made['data'].path}={unit}/by-hand"]
    assert cli.main(["instance", "clone", "web2", "web3", *mapped, "--json"]) == 0
    by_hand = next(one for one in store.load("web3").disks if one.path == f"{unit}/by-hand")
    assert (by_hand.unit, by_hand.size_mib) == ("", 0)
    undefine_instance("web2")
    assert originals["data"].path == disks_of()["data"].path


def test_a_clone_that_fails_leaves_no_volume(unit: str) -> None:
    define_instance(web1(ROOT, DATA))
    before = files_in(unit)
    (paths.ETC_DIR / "storage.toml").write_text(f'directories = ["{unit}"]\n')
    os.unlink(disks_of()["data"].path)
    with pytest.raises(SystemExit):
        cli.main(["instance", "clone", "web1", "web2"])
    assert files_in(unit) < before
    assert store.names() == ["web1"]
    assert operation.pending() == []


def test_a_clone_that_can_not_be_undone_holds_up_nothing(
    unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    define_instance(web1(ROOT))
    keys: list[list[str]] = []
    with tempfile.TemporaryDirectory(prefix="brine-sized-", dir="/srv") as other:
        settings = f'directories = ["{unit}", "{other}"]\n'
        (paths.ETC_DIR / "storage.toml").write_text(settings)

        def fail(*_: object) -> None:
            keys.extend(one.keys for one in operation.pending())
            os.rename(other, f"{other}-away")
            raise StorageError("the device is gone")

        monkeypatch.setattr(FileVolume, "copy_from", fail)
        with pytest.raises(StorageError, match="the device is gone"):
            clone_instance("web1", "web2", unit=other)
        assert keys == [["instance/web2"]]
        assert operation.pending() == []
        os.rename(f"{other}-away", other)
        (left,) = orphans()
        assert (left.volume.unit, left.status.owner) == (other, "web2")
        left.remove()


class Terminal(io.StringIO):
    """A person's answers."""

    def isatty(self) -> bool:
        return True


Brine = Callable[..., tuple[int, str, str]]


@pytest.fixture
def disk(unit: str, capsys: pytest.CaptureFixture[str]) -> Brine:
    """Runs `brine disk`: its status, output and errors."""

    def run(*words: str) -> tuple[int, str, str]:
        try:
            status = cli.main(["disk", *words])
        except SystemExit as error:
            assert isinstance(error.code, int)
            status = error.code
        return status, *capsys.readouterr()

    return run


def test_a_disk_is_added_grown_and_removed_with_its_volume_or_without(
    unit: str, disk: Brine
) -> None:
    define_instance(web1())
    status, out, _ = disk("add", "web1", "--size", "10M", "--json")
    told = json.loads(out)
    assert (status, told["disk"]["name"], told["plugged"]) == (0, "disk0", False)
    added = disks_of()["disk0"]
    assert added.path == told["disk"]["path"]
    assert os.stat(added.path).st_size == 10 * MIB
    status, out, _ = disk("add", "web1", "--size", "1.5G", "--name", "data", "--format", "qcow2")
    assert (status, out) == (0, f"added: web1 data, 1.5G in {unit}\n")

    assert disk("grow", "web1", "disk0", "+6M", "--dry-run")[1].startswith("would be grown")
    assert os.stat(added.path).st_size == 10 * MIB
    for size, word in (("+6M", "grown"), ("16M", "unchanged")):
        status, out, _ = disk("grow", "web1", "disk0", size, "--json")
        told = json.loads(out)
        assert (status, told["result"], told["disk"]["size_mib"]) == (0, word, 16)
    assert os.stat(added.path).st_size == 16 * MIB
    assert disk("grow", "web1", "data", "2G")[0] == 0
    assert FileVolume(unit, disks_of()["data"].uuid).status().size == 2 << 30

    status, out, _ = disk("status", "web1", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert status == 0
    assert rows["data"] == {
        "name": "data",
        "uuid": disks_of()["data"].uuid,
        "unit": unit,
        "path": disks_of()["data"].path,
        "size_mib": 2048,
        "by_hand": True,
        "driver": "file",
        "made": 2 << 30,
        "used": rows["data"]["used"],
        "snapshots": [],
        "status": "ok",
        "why": "",
    }

    assert disk("remove", "web1", "disk0", "--dry-run")[0] == 0
    status, out, _ = disk("remove", "web1", "disk0")
    assert (status, added.path in out, os.path.exists(added.path)) == (0, True, True)
    status, out, _ = disk("remove", "web1", "data", "--delete", "--json")
    assert (status, json.loads(out)["deleted"]) == (0, True)
    assert disks_of() == {}
    assert files_in(unit) == {os.path.basename(added.path)}


def test_an_adopted_disk_gets_a_name_and_nothing_wrong_is_taken_for_done(
    unit: str, disk: Brine
) -> None:
    Path(path := f"{unit}/hand").write_bytes(bytes(MIB))
    define_instance(web1(ROOT, {"path": path, "format": "raw"}))
    assert disk("adopt", "web1", path)[0] == 0
    for words in (("--name", "../x"), ("--name", "root"), ("--unit", "/srv/none")):
        said = disk("adopt", "web1", path, *words)
        assert is_one_line(said), said
    assert disk("adopt", "web1", path, "--name", "hand")[1] == f"named: web1 hand, in {unit}\n"
    assert disks_of()["hand"].path == path
    assert disk("adopt", "web1", path, "--name", "hand", "--unit", unit)[1].startswith("unchanged")
    said = disk("adopt", "web1", path, "--name", "other")
    assert is_one_line(said), said


@pytest.mark.parametrize("which", ["root", "data"])
def test_a_volume_that_was_kept_is_put_back(
    unit: str, disk: Brine, capsys: pytest.CaptureFixture[str], which: str
) -> None:
    define_instance(web1(ROOT, DATA))
    assert disk("snapshot", "web1", "--name", "one")[0] == 0
    before = disks_of()[which]
    assert disk("remove", "web1", which)[0] == 0
    assert disk("add", "web1", "--path", before.path, "--format", "vmdk")[0] == 2
    assert disk("add", "web1", "--path", before.path, "--wipe", "full")[0] == 2
    assert which not in disks_of()
    capsys.readouterr()
    assert cli.main(["storage", "orphans"]) == 0
    assert f"disk add INSTANCE --path {before.path}" in capsys.readouterr().out
    assert disk("add", "web1", "--path", before.path, "--dry-run")[1].startswith("would be added")
    status, out, _ = disk("add", "web1", "--path", before.path, "--name", "again", "--json")
    assert (status, json.loads(out)["plugged"]) == (0, False)
    after = disks_of()["again"]
    assert (before.by_hand, after.by_hand) == (False, True)
    kept = ("uuid", "unit", "path", "format", "backing", "size_mib")
    assert [getattr(after, key) for key in kept] == [getattr(before, key) for key in kept]
    assert orphans() == []
    assert disk("remove", "web1", "again")[0] == 0
    assert disk("add", "web1", "--path", before.path)[0] == 0
    assert disks_of()[which].uuid == before.uuid


def test_commands_on_one_instance_wait_for_each_other(
    unit: str, disk: Brine, monkeypatch: pytest.MonkeyPatch
) -> None:
    define_instance(web1(ROOT))
    others = iter([DATA])

    def define_after_another(*arguments: Any, **options: Any) -> Any:
        for other in others:
            define_instance(web1(ROOT, other))
        return define_instance(*arguments, **options)

    monkeypatch.setattr(disk_commands, "define_instance", define_after_another)
    assert disk("add", "web1", "--size", "4M", "--name", "k")[0] == 0
    assert sorted(disks_of()) == ["data", "k", "root"]
    assert len(files_in(unit)) == 3


def test_disks_are_added_at_once_by_several_commands(unit: str, disk: Brine) -> None:
    define_instance(web1(ROOT))
    children = []
    for number in range(5):
        child = os.fork()
        if child == 0:
            try:
                os._exit(disk("add", "web1", "--size", "4M", "--name", f"k{number}")[0])
            finally:
                os._exit(9)
        children.append(child)
    ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert ended == [0] * 5
    assert len(disks_of()) == len(files_in(unit)) == 6


@pytest.mark.parametrize(("work", "is_left"), [("snapshot", False), ("remove_snapshot", True)])
def test_a_command_that_is_told_to_end_says_what_is_left(
    unit: str, disk: Brine, monkeypatch: pytest.MonkeyPatch, work: str, is_left: bool
) -> None:
    define_instance(web1(ROOT))
    words = ["snapshot", "web1", "--name", "one"]
    if is_left:
        assert disk(*words)[0] == 0
        words[2] = "--remove"

    def told_to_end(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FileVolume, work, told_to_end)
        status, _, err = disk(*words)
    assert (status, err.count("interrupted: ")) == (130, 1)
    assert ("snapshot-removal of instance/web1" in err) == is_left == bool(operation.pending())
    assert disk("snapshot", "web1", "--name", "two")[0] == 0
    assert operation.pending() == []


def test_a_volume_that_is_gone_is_told(unit: str, disk: Brine) -> None:
    define_instance(web1(ROOT))
    os.unlink(disks_of()["root"].path)
    status, out, _ = disk("status", "web1")
    assert status == 1
    assert "missing" in out
    assert disk("grow", "web1", "root", "1G")[0] == 1
    # And a definition makes no empty one in its place.
    define_instance(web1(ROOT, vcpus=2))
    assert files_in(unit) == set()


@pytest.mark.parametrize(
    ("words", "status", "named"),
    [
        (["add", "web1"], 2, "--size"),
        (["add", "web1", "--size", "0G"], 2, "0G"),
        (["add", "web1", "--size", "-1G"], 2, "--size"),
        (["add", "web1", "--size", "10x"], 2, "10x"),
        (["add", "web1", "--size", "10"], 2, "10"),
        (["add", "web1", "--size", "500K"], 2, "1M"),
        (["add", "web1", "--size", "900000T"], 1, "size_mib"),
        (["add", "web1", "--size", "8000T"], 1, "free"),
        (["add", "web1", "--size", "1G", "--path", "/srv/a"], 2, "--path"),
        (["add", "web1", "--size", "1G", "--name", "../x"], 1, "name"),
        (["add", "web1", "--size", "1G", "--name", "root"], 1, "root"),
        (["add", "web1", "--size", "1G", "--unit", "/etc"], 1, "/etc"),
        (["add", "web1", "--size", "1G", "--unit", "a/b"], 1, "unit"),
        (["add", "web2", "--size", "1G"], 1, "web2"),
        (["add", "web1", "--path", "/srv/a", "--name", "x"], 2, "--name"),
        (["add", "web1", "--size", "1G", "--name", ""], 2, "--name"),
        (["add", "web1", "--size", "1G", "--unit", ""], 2, "--unit"),
        (["add", "web1", "--path", ""], 2, "--path"),
        (["add", "web1", "--size", "1G", "--serial", ""], 2, "--serial"),
        (["grow", "web1", "", "9G"], 2, "DISK"),
        (["remove", "web1", ""], 2, "DISK"),
        (["adopt", "web1", "hand", "--unit", ""], 2, "--unit"),
        (["adopt", "web1", "hand", "--name", ""], 2, "--name"),
        (["add", "--qmp", "/x.qmp", "--size", "1G"], 2, "--qmp"),
        (["grow", "web1", "root", "2M"], 1, "shrink"),
        (["grow", "web1", "root", "8000T"], 1, "free"),
        (["grow", "web1", "other", "9G"], 1, "other"),
        (["grow", "web1", "hand", "9G"], 1, "adopt"),
        (["remove", "web1", "hand", "--delete"], 2, "hand"),
        (["adopt", "web1", "hand"], 1, "unit"),
    ],
)
def test_what_a_command_can_not_do_is_one_line_and_changes_nothing(
    unit: str, disk: Brine, tmp_path: Path, words: list[str], status: int, named: str
) -> None:
    (tmp_path / "hand").write_bytes(bytes(MIB))
    hand = {"name": "hand", "path": str(tmp_path / "hand"), "format": "raw"}
    define_instance(web1(ROOT, hand))
    before, files = store.load("web1"), files_in(unit)
    found, out, err = disk(*words)
    assert (found, out) == (status, "")
    assert named in err
    assert err.startswith("brine: error: ")
    assert (store.load("web1"), files_in(unit)) == (before, files)


def test_a_definition_that_is_killed_leaves_a_disk_or_nothing(
    unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write of a record of the operation, and the write of the spec, is a place to be killed
    at."""

    class Killed(BaseException):
        pass

    def killed_at(count: int, work: Callable[[], object]) -> bool:
        left = count

        def counted(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    raise Killed
                return original(*arguments, **options)

            return call

        with monkeypatch.context() as patch:
            for name in ("rename", "unlink", "fsync", "truncate"):
                patch.setattr(os, name, counted(getattr(os, name)))
            try:
                work()
            except Killed:
                return True
        return False

    count, was_killed = 0, True
    while was_killed:
        was_killed = killed_at(count, lambda: define_instance(web1(ROOT, DATA)))
        operation.settle(store.operation_key("web1"))
        spec = store.load_sound("web1")
        disks = spec.disks if spec else ()
        assert {os.path.basename(disk.path) for disk in disks} == files_in(unit), count
        assert operation.pending() == []
        assert len(disks) in (0, 2)
        if spec:
            undefine_instance("web1")
            for disk in disks:
                FileVolume(unit, disk.uuid).remove()
        count += 1
    assert count > 10
    assert VOLUMES.name == "volumes"


def test_a_disk_is_known_by_its_id_in_qemu_too(unit: str, disk: Brine) -> None:
    define_instance(web1(ROOT, DATA))
    known = f"disk-{disks_of()['data'].uuid[:8]}-scsi-1"
    assert disk("grow", "web1", known, "9M")[0] == 0
    assert disks_of()["data"].size_mib == 9
    assert disk("grow", "web1", known.replace("disk-", "nic-"), "10M")[0] == 1
    assert disk("remove", "web1", known, "--delete")[0] == 0
    assert list(disks_of()) == ["root"]


def test_a_disk_keeps_its_uuid(unit: str) -> None:
    define_instance(web1(ROOT))
    before = disks_of()["root"]
    other = "aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee"
    for row in ({**ROOT, "uuid": other}, {"path": before.path, "uuid": other}):
        with pytest.raises(SpecError, match=before.uuid) as told:
            define_instance(web1(row))
        assert told.value.where == "/disks/0/uuid"
    assert not define_instance(web1({**ROOT, "uuid": before.uuid.upper()})).changed
    assert disks_of() == {"root": before}


def test_a_unit_may_have_a_long_path(unit: str) -> None:
    folder = "/".join([unit, *["x" * 100] * 3])
    os.makedirs(folder)
    (paths.ETC_DIR / "storage.toml").write_text(f'directories = ["{folder}"]\n')
    define_instance(web1({**ROOT, "unit": folder}))
    assert os.path.exists(disks_of()["root"].path)


def test_an_image_in_use_by_others_is_not_grown_by_half(unit: str, disk: Brine) -> None:
    define_instance(web1(DATA))
    data = disks_of()["data"]
    before = store.load("web1")
    with open(data.path, "r+b"):
        status, _, err = disk("grow", "web1", "data", "12M")
        assert (status, "in use" in err) == (1, True)
        with pytest.raises(StorageError, match="in use"):
            define_instance(web1({**DATA, "size_mib": 12}))
        assert store.load("web1") == before
        assert FileVolume(unit, data.uuid).status().size == 6 * MIB
    assert disk("grow", "web1", "data", "12M")[0] == 0
    assert FileVolume(unit, data.uuid).status().size == 12 * MIB


def test_volumes_are_deleted_only_of_disks_that_a_person_has_seen(
    unit: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    define_instance(web1(ROOT))

    class Slow(Terminal):
        def isatty(self) -> bool:
            define_instance(web1(ROOT, DATA))
            return True

    monkeypatch.setattr("sys.stdin", Slow("y\n"))
    with pytest.raises(SystemExit):
        cli.main(["instance", "undefine", "web1", "--delete-volumes"])
    assert "changed" in capsys.readouterr().err
    assert len(files_in(unit)) == len(disks_of()) == 2


def test_of_two_commands_that_make_a_disk_of_one_uuid_one_does(
    unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {**ROOT, "uuid": "aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee"}
    other = {**web1(row), "name": "web2"}
    create = FileVolume.create
    refused = []

    def meanwhile(volume: FileVolume, *arguments: Any) -> None:
        with pytest.raises(StorageError, match="web1") as told:
            define_instance(other)
        refused.append(told.value)
        create(volume, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(FileVolume, "create", meanwhile)
        define_instance(web1(row))
    assert len(refused) == 1
    assert os.path.exists(disks_of()["root"].path)
    assert store.names() == ["web1"]


@pytest.fixture
def small(unit: str) -> Iterator[str]:
    """A unit with 24 MiB, of the same node."""
    os.mkdir(folder := f"{unit}/small")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], check=True)
    try:
        (paths.ETC_DIR / "storage.toml").write_text(f'directories = ["{folder}"]\n')
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def is_one_line(said: tuple[int, str, str]) -> bool:
    """Whether a command has failed and said why in a line, and perhaps given a hint."""
    status, _, err = said
    lines = [line for line in err.splitlines() if line.startswith("brine: error: ")]
    return status == 1 and len(lines) == 1 and "Traceback" not in err


@contextlib.contextmanager
def read_only(folder: str) -> Iterator[None]:
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", folder], check=True)


@contextlib.contextmanager
def full(folder: str) -> Iterator[None]:
    file = Path(folder, "in-the-way")
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as ballast:
        while ballast.write(bytes(4096)):
            pass
    try:
        yield
    finally:
        file.unlink()


@pytest.mark.parametrize("unusable", [read_only, full])
def test_a_folder_that_is_full_or_read_only_holds_up_no_instance(
    small: str, disk: Brine, unusable: Callable[[str], contextlib.AbstractContextManager[None]]
) -> None:
    disks = [{**one, "unit": small} for one in (ROOT, DATA)]
    define_instance(web1(*disks))
    assert disk("snapshot", "web1", "--name", "one")[0] == 0
    write = ["qemu-io", "-f", "qcow2", "-c", "write -P 1 0 3M", disks_of()["root"].path]
    subprocess.run(write, check=True, capture_output=True)
    before = store.load("web1")
    work = [
        ("add", "web1", "--size", "1M", "--unit", small, "--format", "qcow2"),
        ("grow", "web1", "data", "20M"),
        ("snapshot", "web1", "--name", "two"),
        ("snapshot", "web1", "--remove", "one"),
        *[("rollback", "web1", "one")] * (unusable is read_only),
    ]
    with unusable(small):
        for words in work:
            said = disk(*words)
            assert is_one_line(said), (words, said)
            assert operation.pending() == [], words
            assert store.load("web1") == before
        assert define_instance(web1(*disks, vcpus=2)).changed
    read = ["qemu-io", "-f", "qcow2", "-c", "read -P 1 0 3M", disks_of()["root"].path]
    assert "read 3145728" in subprocess.run(read, check=True, capture_output=True, text=True).stdout
    assert disk("snapshot", "web1", "--remove", "one")[0] == 0
    assert disks_of()["root"].backing is None
    undefine_instance("web1")
    with unusable(small):
        for orphan in orphans():
            with contextlib.suppress(StorageError):  # on a full one space is made so
                orphan.remove()
    for orphan in orphans():
        orphan.remove()
    assert files_in(small) == set()


@pytest.mark.parametrize("is_settled", [True, False])
def test_no_rollback_to_a_snapshot_whose_removal_has_begun(
    unit: str, small: str, disk: Brine, is_settled: bool
) -> None:
    settings = paths.ETC_DIR / "storage.toml"
    os.mkdir(large := f"{unit}/large")
    settings.write_text(f'directories = ["{large}", "{small}"]\ndefault_unit = "{large}"\n')
    define_instance(web1(ROOT, {**DATA, "unit": small}))
    assert disk("snapshot", "web1", "--name", "one")[0] == 0
    for each in disks_of().values():
        write = ["qemu-io", "-f", "qcow2", "-c", "write -P 1 0 3M", each.path]
        subprocess.run(write, check=True, capture_output=True)
    with full(small):
        os.truncate(ballast := f"{small}/in-the-way", os.stat(ballast).st_size - 128 * 1024)
        said = disk("snapshot", "web1", "--remove", "one")
        assert is_one_line(said), said
        assert "data" in said[2]
        before = store.load("web1")
        assert before.disks[0].backing is None
        assert "partial" in disk("snapshot", "web1", "--list")[1]
        said = disk("rollback", "web1", "one")
        assert is_one_line(said), said
        assert "data: partial" in said[2]
        assert store.load("web1") == before
        # What settles it, as a boot does, says why it can't now.
        with pytest.raises(operation.OperationError, match=r"not completed yet: .*one"):
            operation.settle("snapshots/web1")
        assert define_instance(web1(ROOT, {**DATA, "unit": small}, vcpus=2)).changed
    said = disk("rollback", "web1", "one")
    assert is_one_line(said), said
    if is_settled:
        operation.settle("snapshots/web1")
    else:
        assert disk("snapshot", "web1", "--remove", "one")[0] == 0
    assert operation.pending() == []
    assert all(one.backing is None for one in disks_of().values())
    for each in disks_of().values():
        read = ["qemu-io", "-f", each.format, "-c", "read -P 1 0 3M", each.path]
        assert (
            "read 3145728"
            in subprocess.run(read, check=True, capture_output=True, text=True).stdout
        )


def test_a_rollback_is_refused_before_it_begins_if_a_disk_is_missing(
    unit: str, disk: Brine
) -> None:
    define_instance(web1(ROOT))
    for name in ("one", "two"):
        assert disk("snapshot", "web1", "--name", name)[0] == 0
    define_instance(web1(ROOT, DATA))
    data = disks_of()["data"]
    os.rename(data.path, f"{unit}/away")
    before = {name: os.stat(f"{unit}/{name}") for name in files_in(unit)}
    said = disk("rollback", "web1", "one", "--discard-newer")
    assert is_one_line(said), said
    assert "data" in said[2]
    assert operation.pending() == []
    now = {name: os.stat(f"{unit}/{name}") for name in files_in(unit)}
    assert {name: one.st_ino for name, one in now.items()} == {
        name: one.st_ino for name, one in before.items()
    }
    os.rename(f"{unit}/away", data.path)
    assert disk("rollback", "web1", "one", "--discard-newer")[0] == 0


def test_snapshots_are_in_order_though_the_clock_is_put_back(
    unit: str, disk: Brine, monkeypatch: pytest.MonkeyPatch
) -> None:
    define_instance(web1(ROOT, DATA))
    now = time.time()
    for days, name in enumerate(("one", "two", "three")):
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda days=days: now - 86400 * days)
            assert disk("snapshot", "web1", "--name", name)[0] == 0
    assert list(snapshots_of(store.load("web1"))) == ["one", "two", "three"]


@contextlib.contextmanager
def unmounted(unit: str) -> Iterator[None]:
    """Have a folder be as if what is mounted there was not."""
    os.rename(unit, f"{unit}-away")
    os.mkdir(unit)
    try:
        yield
    finally:
        os.rmdir(unit)
        os.rename(f"{unit}-away", unit)


def begun(kind: OperationKind, *undo: operation.Call, **facts: Any) -> Iterator[Work]:
    """The record of a command on web1 that is killed in the block."""
    with (
        contextlib.suppress(KilledError),
        operation.begin(kind, "instance/web1", facts=facts) as work,
    ):
        for number, call in enumerate(undo):
            work.step(f"step {number}", undo=call)
        yield work
        raise KilledError


killed = contextlib.contextmanager(begun)


def test_a_growth_is_not_over_because_its_unit_is_not_seen(unit: str) -> None:
    define_instance(web1(ROOT))
    for name, is_back in (("brine-none", False), (unit, True)):
        growing = {"unit": name, "uuid": disks_of()["root"].uuid}
        with unmounted(unit):
            with killed(VOLUMES, ("grow", growing)):
                pass
            with pytest.raises(operation.OperationError, match=name), store.alone("web1"):
                pass
        (record,) = operation.pending()
        if is_back:
            store.settle_instance("web1")
            assert operation.pending() == []
        else:
            operation.forget(record)


def test_a_snapshot_is_not_undone_because_a_unit_is_not_seen(unit: str, disk: Brine) -> None:
    """Its guest has written to the overlay in the other unit."""
    with tempfile.TemporaryDirectory(prefix="brine-sized-", dir="/srv") as other:
        settings = f'directories = ["{unit}", "{other}"]\n'
        (paths.ETC_DIR / "storage.toml").write_text(settings)
        define_instance(web1({**ROOT, "unit": unit}, {**DATA, "unit": other}))
        assert disk("snapshot", "web1", "--name", "one")[0] == 0
        root = disks_of()["root"]
        write = ["qemu-io", "-f", "qcow2", "-c", "write -P 1 0 1M", root.path]
        subprocess.run(write, check=True, capture_output=True)
        rows = [{"unit": one.unit, "uuid": one.uuid} for one in disks_of().values()]
        undo = [("unmake", {**row, "snapshot": "one"}) for row in rows]
        facts = {"name": "web1", "snapshot": "one", "disks": rows}
        with (
            killed(SNAPSHOT, *undo, **facts) as work,
            work.committing(("is taken", facts), ("save", facts)),
        ):
            os.rename(f"{other}/{RECORDS}", f"{other}/away")  # the rest is of no interest
            raise KilledError
        with pytest.raises(operation.OperationError, match=other), store.alone("web1"):
            pass
        os.rename(f"{other}/away", f"{other}/{RECORDS}")
        store.settle_instance("web1")
        assert operation.pending() == []
        assert list(snapshots_of(store.load("web1"))) == ["one"]
        read = ["qemu-io", "-f", "qcow2", "-c", "read -P 1 0 1M", root.path]
        said = subprocess.run(read, check=True, capture_output=True, text=True).stdout
        assert "verification failed" not in said
        undefine_instance("web1")


def test_what_a_clone_reads_stays_and_what_it_can_not_remove_holds_up_nothing(
    unit: str, disk: Brine
) -> None:
    define_instance(web1(ROOT))
    for name in ("one", "two"):
        assert disk("snapshot", "web1", "--name", name)[0] == 0
    rows = [{"unit": "brine-none", "uuid": disks_of()["root"].uuid}]
    facts = {"name": "web1", "snapshot": "two", "disks": rows}
    with killed(SNAPSHOT_OF_SOURCE, ("remove", facts), **facts):
        for words in (
            ("snapshot", "web1", "--remove", "two"),
            ("rollback", "web1", "one", "--discard-newer"),
        ):
            said = disk(*words)
            assert is_one_line(said), said
            assert "cloned" in said[2]
        assert disk("snapshot", "web1", "--name", "three")[0] == 0
    assert operation.pending() == []
    assert disk("rollback", "web1", "one", "--discard-newer")[0] == 0


def test_a_folder_that_is_not_mounted_keeps_what_it_has(unit: str, disk: Brine) -> None:
    define_instance(web1(ROOT))
    settings = paths.ETC_DIR / "storage.toml"
    settings.write_text(f'directories = ["{unit}"]\n')
    with unmounted(unit):
        with pytest.raises(StorageError, match="volumes"):
            directories.remove(unit)
        assert unit in settings.read_text()
        status, out, err = disk("snapshot", "web1", "--list")
        assert (status, out) == (1, "")
        assert "mount" in err
        said = disk("remove", "web1", "root", "--delete")
        assert is_one_line(said), said
        assert "mount" in said[2]
        assert list(disks_of()) == ["root"]
        assert disk("remove", "web1", "root")[0] == 0
    (left,) = orphans()
    left.remove()
