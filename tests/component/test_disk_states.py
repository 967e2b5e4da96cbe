"""The state of volumes: before a start, and in what is told of instances."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import pytest

from brine.common import cli, paths
from brine.common.entry_points import EntryPoint
from brine.common.process import run_bounded
from brine.instance import store
from brine.instance.kvm import resources
from brine.instance.service import run as run_step
from brine.instance.validate import completed
from brine.storage import lvm
from brine.storage.directory_notes import RECORDS
from brine.storage.volume import VolumeRequest
from brine.storage.volumes import volume_in
from brine.vm.spec import NOT_CONFINED
from brine.watcher import commands, volume_watch
from component.own_lvm import loop_device, run_lvm, use_lvm_of

pytestmark = [
    pytest.mark.usefixtures("own_node"),
    pytest.mark.skipif(os.geteuid() != 0, reason="makes disks as root; ./dev test runs as root"),
]

MIB = 1 << 20
GROUP = "brine-states"
UUID = "5d0c1c9e-2a0b-4c39-8f0e-3b1f4d7a9c01"
TAGS = ("--addtag", "brine", "--addtag", f"brine.disk={UUID}")
IN_METADATA = ("--driverloaded", "n", "-an", "-Zn", "-Wn")
PATH = f"/dev/{GROUP}/brine-{UUID}"


class Said(NamedTuple):
    status: int
    out: str
    err: str


Brine = Callable[..., Said]


class BecameError(Exception):
    """The process has become QEMU."""


@pytest.fixture
def brine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Brine:
    """Runs `brine`; what a unit runs is `start`."""
    nouns = [EntryPoint("instance", "brine.instance.cli:COMMAND")]
    nouns.append(EntryPoint("disk", "brine.hotplug.cli:DISK"))
    nouns.append(EntryPoint("watcher", "brine.watcher.cli:COMMAND"))
    verbs = [EntryPoint("disk", "brine.instance.disks.cli:add_disk_verbs")]
    known = {"brine.commands": nouns, "brine.verbs": verbs}
    monkeypatch.setattr(cli, "entry_points", lambda group: known.get(group, []))
    monkeypatch.setattr(commands, "log_pass", lambda: None)  # the log is the test's
    monkeypatch.setattr(commands, "LOCK", paths.LOCK_DIR / "watcher.lock")
    # This process goes on, and becomes nothing else.
    monkeypatch.setattr(resources, "confine_runner", lambda: None)
    monkeypatch.setattr(resources, "confine_qemu", lambda _spec: None)

    def become(*_: object) -> None:
        raise BecameError

    monkeypatch.setattr(os, "execv", become)
    monkeypatch.setattr(sys, "argv", ["runner", "web1"])
    monkeypatch.setenv("INVOCATION_ID", "0d" * 16)

    def run(*arguments: str) -> Said:
        lvm.forget()  # each command is a process
        status: Any = 0
        try:
            if arguments == ("start",):
                run_step.main()
            status = cli.main([*arguments])
        except BecameError:
            status = 0
        except SystemExit as end:
            status = end.code
        assert isinstance(status, int)
        return Said(status, *capsys.readouterr())

    return run


def define(unit: str, path: str, *others: dict[str, Any], **keys: Any) -> None:
    disk = {"name": "data", "unit": unit, "uuid": UUID, "path": path, "size_mib": 16, **keys}
    # What confines QEMU takes the program's version, and this one has none.
    program = os.path.realpath(shutil.which("bash") or "")
    plain = {"name": "web1", "accel": "tcg", "qemu": program, **NOT_CONFINED}
    store.save(completed({**plain, "disks": [disk, *others]}))


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """The images of two physical volumes of a volume group, and an instance with a disk there."""
    images = [tmp_path / "a", tmp_path / "b"]
    devices: list[str] = []
    try:
        for image in images:
            devices.append(loop_device(image, 64 * MIB))
        use_lvm_of(devices, tmp_path / "lvm", monkeypatch)
        run_lvm("pvcreate", *devices)
        run_lvm("vgcreate", GROUP, *devices)
        define(GROUP, PATH)
        yield images
        subprocess.run(["lvm", "vgchange", "-an", GROUP], capture_output=True)
    finally:
        for device in devices:
            subprocess.run(["losetup", "--detach", device], check=True)


def wipe_label(image: Path) -> None:
    """Have LVM find a physical volume no more."""
    with image.open("r+b") as device:
        device.write(bytes(32 * 1024))


def told(brine: Brine) -> tuple[str, str]:
    """The state of the only volume, and why, as all commands tell it."""
    (row,) = json.loads(brine("disk", "status", "web1", "--json").out)
    found = json.loads(brine("instance", "info", "web1", "--json").out)
    assert found["volumes"] == [row]
    listed = json.loads(brine("instance", "list", "--json").out)
    assert listed[0]["volumes"] == [row]
    (line,) = brine("instance", "list").out.splitlines()[1:]
    assert (f"disk data in {row['unit']} is {row['status']}" in line) is (row["status"] != "ok")
    lines = brine("instance", "info", "web1").out.splitlines()
    (line,) = [one for one in lines if one.startswith("Volume:")]
    assert f"data in {row['unit']}" in line
    assert line.endswith(": ".join(filter(None, (row["status"], row["why"]))))
    return row["status"], row["why"]


def refused(brine: Brine) -> str:
    """Why it does not start, in one line."""
    said = brine("start")
    first, hint = said.err.splitlines()
    assert said.status == 1
    assert hint == "brine-instance: hint: brine disk status web1"
    return first.removeprefix("brine-instance: error: web1: its disk data ")


def test_a_volume_on_a_missing_device_is_degraded_and_does_not_start(
    brine: Brine, devices: list[Path]
) -> None:
    name = ("-n", f"brine-{UUID}", *TAGS)
    run_lvm("lvcreate", *IN_METADATA, "-L", "16M", "-i", "2", *name, GROUP)
    wipe_label(devices[1])
    status, why = told(brine)
    assert status == "degraded"
    assert why.startswith("partial: ")
    assert refused(brine) == f"in {GROUP} is degraded: {why}"


def test_a_volume_that_is_gone_is_missing_and_does_not_start(
    brine: Brine, devices: list[Path]
) -> None:
    assert told(brine) == ("missing", "there is no such volume")
    assert refused(brine) == f"in {GROUP} is missing: there is no such volume"
    for image in devices:
        wipe_label(image)
    why = f"there is no volume group {GROUP}"
    assert told(brine) == ("missing", why)
    assert refused(brine) == f"in {GROUP} is missing: {why}"


@pytest.fixture
def told_by_pass(brine: Brine, caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Makes a pass of the watcher; returns what it tells of volumes."""
    caplog.set_level(logging.INFO, logger="brine")

    def run() -> list[str]:
        caplog.clear()
        assert brine("watcher", "run").err == ""
        fields = [one.__dict__["fields"] for one in caplog.records if hasattr(one, "fields")]
        assert {one["BRINE_INSTANCE"] for one in fields} <= {"web1"}
        words = ("BRINE_EVENT", "BRINE_SNAPSHOT", "BRINE_STATUS")
        return [" ".join(filter(None, map(one.get, words))) for one in fields]

    return run


@pytest.mark.needs_device_mapper
def test_the_watcher_tells_once_that_a_snapshot_fills_and_that_it_is_lost(
    devices: list[Path], told_by_pass: Callable[[], list[str]], brine: Brine
) -> None:
    volume = volume_in(GROUP, UUID)
    volume.create(VolumeRequest(size=16 * MIB))
    for name in ("one", "two"):
        volume.snapshot(name, space=8 * MIB)
    assert told_by_pass() == []

    def write(start: int, size: int) -> None:
        with open(PATH, "r+b") as device:
            device.seek(start)
            device.write(os.urandom(size))
            device.flush()
            os.fsync(device.fileno())

    write(0, 7 * MIB)
    assert told_by_pass() == ["snapshot-fills one filling", "snapshot-fills two filling"]
    assert told_by_pass() == []
    run_lvm("lvextend", "--size", "16M", f"{GROUP}/brine-{UUID}.two")
    assert told_by_pass() == ["snapshot-recovered two ok"]
    write(7 * MIB, 4 * MIB)
    assert told_by_pass() == ["snapshot-lost one lost"]
    assert told_by_pass() == []
    assert told(brine)[0] == "degraded"
    # The disk itself is whole.
    assert brine("start").status == 0
    volume.remove_snapshot("one")
    assert told_by_pass() == []
    assert told(brine) == ("ok", "")


@pytest.mark.needs_device_mapper
def test_a_start_activates_a_volume(brine: Brine, devices: list[Path]) -> None:
    volume_in(GROUP, UUID).create(VolumeRequest(size=16 * MIB))
    volume_in(GROUP, UUID).snapshot("one")
    run_lvm("lvchange", "--activate", "n", GROUP)
    assert not os.path.exists(PATH)
    assert told(brine) == ("ok", "it is not active")
    assert brine("start") == Said(0, "", "")
    assert os.path.exists(PATH)
    assert told(brine) == ("ok", "")
    assert brine("start") == Said(0, "", "")
    # An active one could be opened.
    wipe_label(devices[0])
    assert told(brine)[0] == "degraded"
    assert "partial" in refused(brine)
    run_lvm("vgreduce", "--removemissing", "--force", GROUP)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A storage unit, and an instance with a disk there."""
    monkeypatch.setattr(paths, "ETC_DIR", tmp_path / "etc")
    with tempfile.TemporaryDirectory(prefix="brine-states-", dir="/srv") as folder:
        paths.ETC_DIR.mkdir()
        (paths.ETC_DIR / "storage.toml").write_text(f'directories = ["{folder}"]\n')
        volume_in(folder, UUID).create(VolumeRequest(size=16 * MIB))
        define(folder, f"{folder}/{UUID}.raw")
        yield folder


def test_a_file_that_is_gone_is_missing(brine: Brine, folder: str) -> None:
    assert told(brine) == ("ok", "")
    assert brine("start") == Said(0, "", "")
    file = f"{folder}/{UUID}.raw"
    os.rename(file, f"{file}.away")
    assert told(brine) == ("missing", f"{file} is missing")
    assert refused(brine) == f"in {folder} is missing: {file} is missing"


def test_the_watcher_tells_once_that_a_volume_is_degraded_and_that_it_is_well(
    brine: Brine, folder: str, told_by_pass: Callable[[], list[str]]
) -> None:
    assert told_by_pass() == []
    file = f"{folder}/{UUID}.raw"
    os.rename(file, f"{file}.away")
    assert brine("watcher", "run", "--dry-run").status == 0
    assert told_by_pass() == ["volume-degraded missing"]
    assert told_by_pass() == []
    known = json.loads(brine("watcher", "status", "--json").out)
    fault = {"unit": folder, "uuid": UUID, "snapshot": "", "fault": "missing"}
    assert known["volume_faults"] == [fault]
    assert "volumes and snapshots with a fault: 1;" in brine("watcher", "status").out
    os.rename(f"{file}.away", file)
    assert told_by_pass() == ["volume-recovered ok"]
    assert told_by_pass() == []
    # That of an instance of another node is there, if anywhere.
    os.unlink(file)
    spec = store.load("web1")
    store.save(replace(spec, node="other"))
    assert told_by_pass() == []
    # Nor is a damaged record the end of all watching.
    store.save(spec)
    assert told_by_pass() == ["volume-degraded missing"]
    volume_watch.FILE.write_text('{"faults": [["a"]]}')
    assert "volume-degraded missing" in told_by_pass()
    store.remove("web1")
    assert told_by_pass() == []
    assert json.loads(volume_watch.FILE.read_text())["faults"] == []


def test_what_can_be_opened_starts_without_its_record(brine: Brine, folder: str) -> None:
    os.unlink(f"{folder}/{RECORDS}/{UUID}.json")
    assert told(brine) == ("missing", "there is no such volume")
    said = brine("start")
    assert said.status == 0
    assert said.err.startswith("brine-instance: warning: web1: its disk data ")


def test_an_lvm_that_hangs_is_named(
    brine: Brine, devices: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lvm, "TIMEOUT_S", 1)
    assert devices
    with (tmp_path / "lvm/locks/P_global").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert told(brine) == ("unknown", "lvm lvs: no answer within 1 s")
        assert refused(brine) == f"in {GROUP}: lvm lvs: no answer within 1 s"
        said = brine("watcher", "run")
        assert "lvm lvs: no answer within 1 s" in said.err
        assert said.status == 1
        # What only shows instances does not wait that long.
        monkeypatch.setattr(lvm, "TIMEOUT_S", 60)
        (row,) = json.loads(brine("instance", "list", "--json").out)[0]["volumes"]
        assert (row["status"], row["why"]) == ("unknown", "no answer within 5 s")


def test_a_start_asks_an_lvm_that_hangs_once(
    brine: Brine, devices: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = map(str, devices)  # what can be opened
    define(GROUP, first, {"unit": GROUP, "uuid": str(uuid4()), "path": second, "size_mib": 16})
    monkeypatch.setattr(lvm, "TIMEOUT_S", 1)
    asked: list[object] = []

    def noting(command: Any, **how: Any) -> Any:
        asked.append(command)
        return run_bounded(command, **how)

    monkeypatch.setattr("brine.storage.lvm.run_bounded", noting)
    with (tmp_path / "lvm/locks/P_global").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = brine("start")
    assert (said.status, len(asked)) == (0, 1)
    assert said.err.count("brine-instance: warning: web1: its disk ") == 2
