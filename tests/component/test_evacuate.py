"""A physical volume that is emptied, on Debian's kernel, which has device-mapper."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from brine.common import cli, operation, paths
from brine.common.entry_points import EntryPoint
from brine.config import ssconf
from brine.config.model import Configuration
from brine.instance import store
from brine.instance.disks.moves import move_disk
from brine.instance.registry import define_instance
from brine.storage import lvm, pvmove
from brine.storage.lvm_units import LvmPv
from brine.vm.disk import Disk
from component.own_lvm import loop_device, run_lvm, use_lvm_of
from lab.ganeti_config import ganeti_config

pytestmark = [
    pytest.mark.usefixtures("own_node"),
    pytest.mark.skipif(os.geteuid() != 0, reason="makes disks as root; ./dev test runs as root"),
]

MIB = 1 << 20
GROUP = "brine-evacuate"
IN_METADATA = ("--driverloaded", "n", "-an", "-Zn", "-Wn")


class Place(NamedTuple):
    """A volume group of two physical volumes, and a folder."""

    devices: tuple[str, str]
    folder: str


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    devices: list[str] = []
    nouns = [EntryPoint("storage", "brine.storage.cli:COMMAND")]
    verbs = [EntryPoint("storage", "brine.instance.disks.storage_cli:add_storage_verbs")]
    known = {"brine.commands": nouns, "brine.verbs": verbs}
    monkeypatch.setattr(cli, "entry_points", lambda group: known.get(group, []))
    kinds = [EntryPoint("volumes", "brine.instance.disks.volumes:VOLUMES")]
    kinds.append(EntryPoint("disk-move", "brine.instance.disks.moves:MOVE"))
    monkeypatch.setattr(operation, "entry_points", lambda _group: kinds)
    Path("/srv").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="brine-evacuate-", dir="/srv") as folder:
        try:
            for name in ("a", "b"):
                devices.append(loop_device(tmp_path / name, 64 * MIB))
            use_lvm_of(devices, tmp_path / "lvm", monkeypatch)
            monkeypatch.setattr(paths, "ETC_DIR", tmp_path / "etc")
            (tmp_path / "etc").mkdir()
            text = f'directories = ["{folder}"]\ndefault_unit = "{GROUP}"\n'
            (tmp_path / "etc/storage.toml").write_text(text)
            run_lvm("pvcreate", *devices)
            run_lvm("vgcreate", GROUP, *devices)
            lvm.forget()
            yield Place((devices[0], devices[1]), folder)
            subprocess.run(["lvm", "vgremove", "--force", "--yes", GROUP], capture_output=True)
        finally:
            for device in devices:
                subprocess.run(["losetup", "--detach", device], check=True)


def evacuate(*words: str) -> int:
    lvm.forget()
    try:
        return cli.main(["storage", "evacuate", *words])
    except SystemExit as error:
        assert isinstance(error.code, int)
        return error.code


def define(*sizes: int) -> dict[str, Disk]:
    """An instance with disks on the first device, in which its guest has written."""
    disks = [{"name": f"disk{size}", "size_mib": size} for size in sizes]
    define_instance({"name": "web1", "accel": "tcg", "disks": disks})
    for disk in the_disks().values():
        Path(disk.path).write_bytes(content(disk))
    return the_disks()


def the_disks() -> dict[str, Disk]:
    return {disk.name: disk for disk in store.load("web1").disks}


def content(disk: Disk) -> bytes:
    return disk.name.encode().ljust(16, b".") * (disk.size_mib * MIB // 16)


def check_contents() -> None:
    for disk in the_disks().values():
        with open(disk.path, "rb") as file:
            assert file.read(disk.size_mib * MIB) == content(disk)


def occupants(device: str) -> list[str]:
    lvm.forget()
    return [one.name for one in pvmove.occupants(LvmPv.find(device))]


def allocate_on(device: str, *others: str) -> None:
    for one in others:
        run_lvm("pvchange", "--allocatable", "n", one)
    run_lvm("pvchange", "--allocatable", "y", device)
    lvm.forget()


def test_what_lies_on_a_device_is_known(place: Place) -> None:
    first, second = place.devices
    uuid = "33333333-2222-4333-8444-555555555555"
    tags = ("--addtag", "brine", "--addtag", f"brine.disk={uuid}")
    run_lvm("lvcreate", *IN_METADATA, "-L", "40M", "-n", "one", *tags, GROUP, first)
    run_lvm("lvcreate", *IN_METADATA, "-L", "16M", "-i", "2", "-n", "two", GROUP)
    run_lvm("lvcreate", *IN_METADATA, "-L", "8M", "-n", "three", GROUP, second)
    one, two = pvmove.occupants(LvmPv.find(first))
    assert (one.name, one.disk, one.size) == ("one", uuid, 40 * MIB)
    assert (two.name, two.disk, two.size) == ("two", "", 8 * MIB)
    assert occupants(second) == ["three", "two"]


def test_without_space_elsewhere_each_volume_is_named(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = place.devices
    monkeypatch.setattr(pvmove, "finish_interrupted", lambda _tell: None)  # it takes the kernel
    run_lvm("lvcreate", *IN_METADATA, "-L", "40M", "-n", "one", GROUP, first)
    run_lvm("lvcreate", *IN_METADATA, "-L", "48M", "-n", "two", GROUP, second)
    assert evacuate("lvm-pv", first, "--json") == 1
    said = capsys.readouterr()
    told = json.loads(said.out)
    assert (told["result"], told["moved"]) == ("incomplete", [])
    assert [one["volume"] for one in told["failed"]] == [f"{GROUP}/one"]
    assert f"brine: error: {GROUP}/one" in said.err
    assert "--to" in said.err
    lvm.forget()
    assert not LvmPv.find(first).allocatable
    assert evacuate("lvm-pv", first, "--to", place.folder) == 1
    assert f"brine: error: {GROUP}/one" in capsys.readouterr().err
    for words in (("lvm-pv", "/dev/none"), ("lvm-vg", GROUP), ("lvm-pv", first, "--rate", "1")):
        assert evacuate(*words) in (1, 2)
        assert "error: " in capsys.readouterr().err


@pytest.mark.needs_device_mapper
def test_new_volumes_are_made_as_the_cluster_says(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = ganeti_config(nodes=1)
    data["cluster"]["diskparams"] = {"plain": {"stripes": 2, "stripesize": 128, "vg": GROUP}}
    (node,) = data["nodes"].values()
    node["name"] = os.uname().nodename
    ssconf.write(tmp_path / "ssconf", ssconf.all_values(Configuration.from_json(data)))
    monkeypatch.setattr(paths, "SSCONF_DIR", tmp_path / "ssconf")
    (tmp_path / "etc/storage.toml").write_text("")  # the node itself has no default
    (disk,) = define(9).values()
    assert disk.unit == GROUP
    fields = ("--noheadings", "--units", "k", "--nosuffix", "-o", "stripes,stripe_size,lv_size")
    said = run_lvm("lvs", *fields, disk.path)
    assert [float(word) for word in said.split()] == [2, 128, 16 << 10]
    assert {*occupants(place.devices[0])} == {*occupants(place.devices[1])} != set()
    check_contents()


@pytest.mark.needs_device_mapper
def test_a_device_is_emptied_within_its_group(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = place.devices
    allocate_on(first, second)
    define(16, 8)
    run_lvm("lvcreate", "--yes", "-L", "4M", "-n", "foreign", GROUP, first)
    allocate_on(second)
    before = the_disks()
    assert evacuate("lvm-pv", first, "--rate", "8M", "--json") == 0, capsys.readouterr().err
    told = json.loads(capsys.readouterr().out)
    assert (told["result"], len(told["moved"])) == ("evacuated", 3)
    assert {one["to"] for one in told["moved"]} == {GROUP}
    assert occupants(first) == []
    assert len(occupants(second)) == 3
    assert the_disks() == before
    check_contents()
    assert not LvmPv.find(first).allocatable
    assert evacuate("lvm-pv", first) == 0
    assert capsys.readouterr().out == f"evacuated: {first}\n"


@pytest.mark.needs_device_mapper
def test_what_has_no_space_goes_to_a_folder_and_back(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = place.devices
    allocate_on(first, second)
    define(40, 8)
    allocate_on(second)
    run_lvm("lvcreate", "--yes", "-L", "36M", "-n", "foreign", GROUP, second)
    assert evacuate("lvm-pv", first, "--to", place.folder, "--json") == 0, capsys.readouterr().err
    moved = json.loads(capsys.readouterr().out)["moved"]
    assert {one["to"] for one in moved} == {GROUP, place.folder}
    assert occupants(first) == []
    disks = the_disks()
    large = disks["disk40"]
    assert large.path == f"{place.folder}/{large.uuid}.raw"
    assert disks["disk8"].path.startswith("/dev/")
    check_contents()
    run_lvm("lvremove", "--yes", f"{GROUP}/foreign")
    lvm.forget()
    move_disk("web1", "disk40", GROUP)
    assert the_disks()["disk40"].path.startswith("/dev/")
    check_contents()
    assert os.listdir(f"{place.folder}/.brine") == []


@pytest.mark.needs_device_mapper
def test_one_that_is_killed_goes_on(place: Place) -> None:
    first, second = place.devices
    allocate_on(first, second)
    define(40, 8)
    allocate_on(second)
    run_lvm("pvchange", "--allocatable", "n", first)
    one = pvmove.occupants(LvmPv.find(first))[0]
    command = ["lvm", "pvmove", "--interval", "1", "--name", one.name, first]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        deadline = time.monotonic() + 60
        while "pvmove0" not in run_lvm("lvs", "-a", "-o", "lv_name", GROUP):
            if process.poll() is not None or time.monotonic() > deadline:
                break
        process.send_signal(signal.SIGKILL)
    assert evacuate("lvm-pv", first) == 0
    assert occupants(first) == []
    assert "pvmove" not in run_lvm("lvs", "-a", "-o", "lv_name", GROUP)
    check_contents()
