"""`brine storage`, with LVM's metadata on loop devices, and folders."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from brine.common import cli, paths
from brine.common.entry_points import EntryPoint
from brine.storage import lvm
from brine.storage.file_volume import FileVolume
from brine.storage.unit import StorageError
from brine.storage.volume import VolumeRequest
from brine.storage.volumes import volume_in
from brine.vm.disk import Disk
from component.own_lvm import loop_device, run_lvm, use_lvm_of

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="makes loop devices; ./dev test runs as root"
)

MIB = 2**20
GROUP = "brine-test"


class Said(NamedTuple):
    status: int
    out: str
    err: str


Brine = Callable[..., Said]


@pytest.fixture
def brine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Brine:
    """Runs `brine storage`, with settings of its own."""
    monkeypatch.setattr(paths, "ETC_DIR", tmp_path / "etc")
    monkeypatch.setattr(paths, "LOCK_DIR", tmp_path / "lock")
    entry = EntryPoint("storage", "brine.storage.cli:COMMAND")
    monkeypatch.setattr(cli, "entry_points", lambda group: [entry] * (group == "brine.commands"))

    def run(*arguments: str) -> Said:
        lvm.forget()  # each command is a process
        try:
            status = cli.main(["storage", *arguments])
        except SystemExit as error:
            assert isinstance(error.code, int)
            status = error.code
        return Said(status, *capsys.readouterr())

    return run


def units(brine: Brine, *arguments: str) -> dict[str, dict[str, Any]]:
    said = brine("list", "--json", *arguments)
    assert (said.status, said.err) == (0, "")
    return {row["name"]: row for row in json.loads(said.out)}


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Three physical volumes; two of them are a volume group with two volumes, one striped."""
    devices: list[str] = []
    try:
        for name in ("a", "b", "c"):
            devices.append(loop_device(tmp_path / name, 64 * MIB))
        use_lvm_of(devices, tmp_path / "lvm", monkeypatch)
        run_lvm("pvcreate", *devices)
        run_lvm("vgcreate", GROUP, *devices[:2])
        in_metadata = ["--driverloaded", "n", "-an", "-Zn", "-Wn"]
        run_lvm("lvcreate", *in_metadata, "-L", "40M", "-n", "one", GROUP, devices[0])
        run_lvm("lvcreate", *in_metadata, "-L", "16M", "-i", "2", "-n", "two", GROUP)
        yield devices
    finally:
        for device in devices:
            subprocess.run(["losetup", "--detach", device], check=True)


def test_free_space_of_a_volume_group_is_that_of_its_allocatable_volumes(
    brine: Brine, devices: list[str]
) -> None:
    first, second, third = devices
    found = units(brine)
    assert [found[one]["free"] // MIB for one in devices] == [12, 52, 64]
    assert (found[first]["size"], found[first]["used"]) == (60 * MIB, 48 * MIB)
    assert found[first]["group"] == GROUP
    assert found[GROUP] == {
        "type": "lvm-vg",
        "name": GROUP,
        "size": 120 * MIB,
        "used": 56 * MIB,
        "free": 64 * MIB,
        "allocatable": True,
        "status": "ok",
        "why": "",
        "extent": 4 * MIB,
    }
    assert (found[third]["allocatable"], found[third]["status"]) == (False, "ok")
    assert "no volume group" in found[third]["why"]

    modify = ("modify", "lvm-pv", second, "--allocatable")
    assert brine(*modify, "no").out == f"modified: {second}\n"
    assert brine(*modify, "no").out == f"unchanged: {second}\n"
    found = units(brine)
    assert (found[second]["allocatable"], found[second]["free"]) == (False, 52 * MIB)
    assert (found[GROUP]["free"], found[GROUP]["allocatable"]) == (12 * MIB, True)

    brine("modify", "lvm-pv", first, "--allocatable", "no")
    found = units(brine)
    assert (found[GROUP]["free"], found[GROUP]["allocatable"]) == (0, False)
    assert json.loads(brine(*modify, "yes", "--json").out) == {
        "type": "lvm-pv",
        "name": second,
        "result": "modified",
    }
    assert units(brine)[GROUP]["free"] == 52 * MIB


def test_a_device_has_several_names(brine: Brine, devices: list[str], tmp_path: Path) -> None:
    (tmp_path / "by-id").symlink_to(devices[0])
    by_link = brine("modify", "lvm-pv", str(tmp_path / "by-id"), "--allocatable", "no")
    assert by_link.out == f"modified: {devices[0]}\n"
    uuid = units(brine)[devices[0]]["uuid"]
    assert brine("modify", "lvm-pv", uuid, "--allocatable", "yes").status == 0
    assert units(brine)[devices[0]]["allocatable"] is True


def test_a_missing_device_has_a_row_and_makes_its_group_degraded(
    brine: Brine, devices: list[str], tmp_path: Path
) -> None:
    uuid = units(brine)[devices[1]]["uuid"]
    with (tmp_path / "b").open("r+b") as device:
        device.write(bytes(32 * 1024))
    found = units(brine)
    assert devices[1] not in found
    assert (found[uuid]["status"], found[uuid]["allocatable"]) == ("missing", False)
    assert found[GROUP]["status"] == "degraded"
    assert "1 of its 2" in found[GROUP]["why"]
    assert (found[GROUP]["free"], found[GROUP]["allocatable"]) == (12 * MIB, False)

    said = brine("check", "--json")
    assert (said.status, len(json.loads(said.out))) == (1, 2)
    for name in (uuid, devices[0]):
        said = brine("modify", "lvm-pv", name, "--allocatable", "no")
        assert said.status == 1
        assert said.err.startswith("brine: error: ")
    assert units(brine)[devices[0]]["allocatable"] is True


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        (("lvm-pv", "{third}"), "no volume group"),
        (("lvm-pv", "/dev/none"), "no lvm-pv /dev/none"),
        (("lvm-pv", "brine-test"), "no lvm-pv"),
        (("lvm-vg", "other"), "no lvm-vg other"),
        (("lvm-vg", "brine-test"), "lvm-vg brine-test"),
    ],
)
def test_what_can_not_be_modified_is_told_in_one_line(
    brine: Brine, devices: list[str], unit: tuple[str, str], expected: str
) -> None:
    kind, name = unit
    before = units(brine)
    said = brine("modify", kind, name.format(third=devices[2]), "--allocatable", "no")
    assert said.status == 1
    assert expected in said.err.splitlines()[0]
    assert units(brine) == before


def test_a_command_of_lvm_that_waits_without_end_is_named_and_hides_no_folder(
    brine: Brine,
    devices: list[str],
    tmp_path: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert devices
    brine("create", "file", str(folder))
    monkeypatch.setattr(lvm, "TIMEOUT_S", 1)
    with (tmp_path / "lvm/locks/P_global").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = brine("list", "--json")
        assert said.status == 1
        assert [row["name"] for row in json.loads(said.out)] == [str(folder)]
        assert said.err.splitlines()[0] == "brine: error: lvm fullreport: no answer within 1 s"
        said = brine("modify", "lvm-pv", devices[0], "--allocatable", "no")
        assert (said.status, said.out) == (1, "")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that could be made and is no one's: nothing below /tmp can be a unit."""
    folder = Path("/opt") / f"brine-test-{os.getpid()}"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_a_folder_becomes_a_unit_and_is_none_any_more(
    brine: Brine, folder: Path, tmp_path: Path
) -> None:
    settings = tmp_path / "etc/storage.toml"
    settings.parent.mkdir()
    settings.write_text("# ours\ndirectories = []  # none yet\n")
    assert brine("create", "file", str(folder)).out == f"created: {folder}\n"
    assert brine("create", "file", str(folder)).out == f"unchanged: {folder}\n"
    assert settings.read_text().startswith("# ours\n")
    assert folder.stat().st_mode & 0o7777 == 0o750
    space = os.statvfs(folder)
    row = units(brine, "--type", "file")[str(folder)]
    assert row["size"] == space.f_blocks * space.f_frsize
    assert 0 < row["free"] <= row["size"] - row["used"]
    assert (row["allocatable"], row["status"]) == (True, "ok")

    (folder / "disk").touch()
    said = brine("remove", "file", str(folder))
    assert said.status == 1
    assert "disk" in said.err
    assert units(brine, "--type", "file")
    (folder / "disk").unlink()
    volume = FileVolume(str(folder), "9fb0b0f9-1f0e-4c55-9a53-3ecf6c4d1a37")
    volume.create(VolumeRequest(size=MIB))
    said = brine("remove", "file", str(folder))
    assert said.status == 1
    assert volume.uuid in said.err
    volume.remove()
    assert brine("remove", "file", str(folder)).out == f"removed: {folder}\n"
    assert not folder.exists()
    assert brine("list", "--type", "file").out == "no storage unit is there\n"
    assert brine("remove", "file", str(folder)).status == 1


def test_a_node_has_one_default_unit_or_none(
    brine: Brine, folder: Path, devices: list[str], tmp_path: Path
) -> None:
    settings = tmp_path / "etc/storage.toml"
    assert brine("default").out == "no default unit\n"
    assert (brine("default", "--none").out, settings.exists()) == ("unchanged: none\n", False)
    brine("create", "file", str(folder))
    settings.write_text(f"# ours\n{settings.read_text()}")
    for unit in (str(folder), GROUP):
        assert brine("default", unit).out == f"modified: {unit}\n"
        assert json.loads(brine("default", unit, "--json").out)["result"] == "unchanged"
        assert json.loads(brine("default", "--json").out) == {"default_unit": unit}
    before = settings.read_text()
    assert before.startswith("# ours\n")
    for unit in ("none", "/srv/none", devices[0], "", "a/b", "/srv/../etc"):
        said = brine("default", unit)
        assert (said.status, said.out, said.err.count("error:")) == (1 if unit else 2, "", 1)
    assert brine("default", GROUP, "--none").status == 2
    assert settings.read_text() == before
    assert brine("default", "--none").out == "modified: none\n"
    assert brine("default").out == "no default unit\n"


def test_the_default_unit_is_not_removed(brine: Brine, folder: Path) -> None:
    brine("create", "file", str(folder))
    brine("default", str(folder))
    said = brine("remove", "file", str(folder))
    assert (said.status, folder.exists()) == (1, True)
    assert "brine storage default" in said.err
    assert units(brine, "--type", "file")
    brine("default", "--none")
    assert brine("remove", "file", str(folder)).status == 0


def test_facts_are_for_what_decides_where_disks_go(
    brine: Brine, folder: Path, devices: list[str]
) -> None:
    brine("create", "file", str(folder))
    brine("default", GROUP)
    said = brine("facts", "--json")
    assert (said.status, said.err) == (0, "")
    facts = json.loads(said.out)
    assert (facts["default_unit"], facts["complete"]) == (GROUP, True)
    units = {row["name"]: row for row in facts["units"]}
    assert units[GROUP]["has_volumes"] is units[str(folder)]["has_volumes"] is True
    assert units[devices[0]]["has_volumes"] is False
    # The extents of a volume group: its ends have LVM's metadata.
    assert 0 < units[GROUP]["free"] < units[GROUP]["size"] < 128 * MIB
    for type_, name in (("file", str(folder)), ("lvm-vg", GROUP), ("lvm-pv", devices[0])):
        said = brine("repair", type_, name)
        assert (said.status, said.out) == (1, "")
        assert type_ in said.err
    assert brine("repair", "file", "/srv/none").status == 1


def test_a_folder_that_is_gone_or_belongs_to_others_is_told(brine: Brine, folder: Path) -> None:
    brine("create", "file", str(folder))
    folder.chmod(0o777)
    row = units(brine, "--type", "file")[str(folder)]
    assert (row["status"], row["allocatable"]) == ("degraded", False)
    assert "write" in row["why"]
    folder.rmdir()
    row = units(brine, "--type", "file")[str(folder)]
    assert (row["status"], row["size"]) == ("missing", 0)
    said = brine("check", "--type", "file")
    assert said.status == 1
    assert str(folder) in said.out
    # It can be made again, or given up.
    assert brine("create", "file", str(folder)).out == f"created: {folder}\n"
    folder.rmdir()
    assert brine("remove", "file", str(folder)).out == f"removed: {folder}\n"


def mount_at(folder: Path, image: Path) -> None:
    if not image.exists():
        image.write_bytes(b"")
        os.truncate(image, 16 * MIB)
        subprocess.run(["mke2fs", "-q", "-F", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, folder], check=True)


@pytest.mark.parametrize("is_listed_by_hand", [False, True])
def test_a_folder_whose_file_system_is_not_mounted_is_missing(
    brine: Brine, folder: Path, tmp_path: Path, is_listed_by_hand: bool
) -> None:
    folder.mkdir()
    mount_at(folder, tmp_path / "image")
    try:
        if is_listed_by_hand:
            (tmp_path / "etc").mkdir()
            (tmp_path / "etc/storage.toml").write_text(f'directories = ["{folder}"]\n')
            first = FileVolume(str(folder), "9fb0b0f9-1f0e-4c55-9a53-3ecf6c4d1a37")
            first.create(VolumeRequest(size=MIB))
        else:
            assert brine("create", "file", str(folder)).status == 0
        assert units(brine, "--type", "file")[str(folder)]["status"] == "ok"
    finally:
        subprocess.run(["umount", folder], check=True)
    row = units(brine, "--type", "file")[str(folder)]
    assert (row["status"], row["allocatable"], row["size"]) == ("missing", False, 0)
    assert "not mounted" in row["why"]
    volume = FileVolume(str(folder), "9fb0b0f9-1f0e-4c55-9a53-3ecf6c4d1a38")
    with pytest.raises(StorageError, match="not mounted"):
        volume.create(VolumeRequest(size=MIB))
    (folder / "in").touch()
    disk = Disk(uuid=volume.uuid, path=f"{folder}/in")
    with pytest.raises(StorageError, match="not mounted"):
        volume.adopt(disk, owner="web1")
    (folder / "in").unlink()
    assert os.listdir(folder) == []
    assert brine("create", "file", str(folder)).status == 1
    # Another file system is not its own, either.
    mount_at(folder, tmp_path / "other")
    try:
        assert "not mounted" in units(brine, "--type", "file")[str(folder)]["why"]
    finally:
        subprocess.run(["umount", folder], check=True)
    mount_at(folder, tmp_path / "image")
    try:
        assert units(brine, "--type", "file")[str(folder)]["status"] == "ok"
        volume.create(VolumeRequest(size=MIB))
        volume.remove()
    finally:
        subprocess.run(["umount", folder], check=True)
    # It may be lost, and given up.
    assert brine("remove", "file", str(folder)).status == 0
    assert brine("create", "file", str(folder)).status == 0
    assert units(brine, "--type", "file")[str(folder)]["status"] == "ok"


@pytest.mark.parametrize("how", ["fstab", "unit"])
def test_a_folder_that_was_never_used_is_missing_where_a_file_system_is_to_be_mounted(
    brine: Brine, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    inner = folder / "of vms"
    inner.mkdir(parents=True)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/storage.toml").write_text(f'directories = ["{inner}"]\n')
    monkeypatch.setattr(paths, "FSTAB_FILE", tmp_path / "fstab")
    monkeypatch.setattr(paths, "SYSTEMD_DIR", tmp_path)
    paths.FSTAB_FILE.write_text("# none\n")
    assert units(brine, "--type", "file")[str(inner)]["status"] == "ok"
    if how == "fstab":
        place = str(inner).replace(" ", r"\040")
        paths.FSTAB_FILE.write_text(
            f"# disks\nUUID=5 none swap sw 0 0\nUUID=6 {place} ext4 rw 0 2\n"
        )
    else:
        escape = ["systemd-escape", "--path", "--suffix=mount", str(folder)]
        name = subprocess.run(escape, check=True, capture_output=True, text=True).stdout.strip()
        (tmp_path / name).touch()
    row = units(brine, "--type", "file")[str(inner)]
    assert (row["status"], "not mounted" in row["why"]) == ("missing", True)
    volume = FileVolume(str(inner), "9fb0b0f9-1f0e-4c55-9a53-3ecf6c4d1a37")
    with pytest.raises(StorageError, match="not mounted") as told:
        volume.create(VolumeRequest(size=MIB))
    assert "findmnt" in (told.value.hint or "")
    assert os.listdir(inner) == []
    mounted = inner if how == "fstab" else folder
    mount_at(mounted, tmp_path / "image")
    try:
        inner.mkdir(exist_ok=True)
        volume.create(VolumeRequest(size=MIB))
    finally:
        subprocess.run(["umount", mounted], check=True)
    assert units(brine, "--type", "file")[str(inner)]["status"] == "missing"


def test_a_folder_that_is_bound_is_missing_without_it(
    brine: Brine, folder: Path, tmp_path: Path
) -> None:
    (behind := tmp_path / "behind").mkdir()
    folder.mkdir()
    subprocess.run(["mount", "--bind", behind, folder], check=True)
    try:
        assert brine("create", "file", str(folder)).status == 0
    finally:
        subprocess.run(["umount", folder], check=True)
    row = units(brine, "--type", "file")[str(folder)]
    assert (row["status"], str(folder) in row["why"]) == ("missing", True)
    # One that is bound to itself, as the sandbox of a service has it, is what it was.
    (folder / ".brine").mkdir()
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    try:
        assert units(brine, "--type", "file")[str(folder)]["status"] == "missing"
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_folder_without_records_is_missing_while_a_spec_has_volumes_in_it(
    brine: Brine, folder: Path, own_node: None
) -> None:
    brine("create", "file", str(folder))
    paths.SPECS_DIR.mkdir()
    disk = {"uuid": "9fb0b0f9-1f0e-4c55-9a53-3ecf6c4d1a37", "unit": str(folder), "path": "/x"}
    (paths.SPECS_DIR / "web1.json").write_text(json.dumps({"name": "web1", "disks": [disk]}))
    row = units(brine, "--type", "file")[str(folder)]
    assert (row["status"], "not mounted" in row["why"]) == ("missing", True)


def test_what_is_no_unit_is_told_with_what_would_make_it_one(
    brine: Brine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    said = brine("default", str(folder))
    assert said.status == 1
    assert f"{folder}: is no storage unit" in said.err
    assert f"brine storage create file {folder}" in said.err
    said = brine("default", "srv/vms")
    assert "absolute path" in said.err
    monkeypatch.setattr(lvm, "is_installed", lambda: False)
    said = brine("default", GROUP)
    assert (said.status, "not installed" in said.err, "lvm2" in said.err) == (1, True, True)


@pytest.mark.skipif(
    "device-mapper" in Path("/proc/misc").read_text(), reason="this kernel has a device mapper"
)
def test_a_kernel_without_device_mapper_is_told(devices: list[str]) -> None:
    volume = volume_in(GROUP, "9fb0b0f9-1f0e-4c55-9a53-3ecf6c4d1a37")
    with pytest.raises(StorageError, match="device mapper") as told:
        volume.create(VolumeRequest(size=MIB))
    assert len(str(told.value)) < 100
    assert "dm_mod" in str(told.value.hint)


def test_a_link_or_an_open_folder_can_not_become_a_unit(
    brine: Brine, folder: Path, tmp_path: Path
) -> None:
    folder.mkdir()
    (folder / "in").symlink_to("/opt")
    for path, expected in (
        (folder / "in", "link"),
        (folder / "in" / folder.name, "link"),
        (folder / "none" / "deeper", "no such folder"),
    ):
        said = brine("create", "file", str(path))
        assert said.status == 1
        assert expected in said.err
    folder.chmod(0o777)
    said = brine("create", "file", str(folder))
    assert said.status == 1
    assert "chmod go-w" in said.err
    assert not (tmp_path / "etc/storage.toml").exists()


def test_a_unit_within_another_is_refused_and_leaves_nothing(brine: Brine, folder: Path) -> None:
    brine("create", "file", str(folder))
    said = brine("create", "file", str(folder / "in"))
    assert said.status == 1
    assert "one is in the other" in said.err
    assert not (folder / "in").exists()


def test_settings_that_are_not_good_are_left_alone(
    brine: Brine, folder: Path, tmp_path: Path
) -> None:
    settings = tmp_path / "etc/storage.toml"
    settings.parent.mkdir()
    settings.write_text("directory = []\n")
    for verb in ("create", "remove"):
        said = brine(verb, "file", str(folder))
        assert said.status == 1
        assert "directory" in said.err
    assert settings.read_text() == "directory = []\n"
    assert not folder.exists()
