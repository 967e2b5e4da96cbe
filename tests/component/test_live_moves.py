"""Disks of a guest that writes, moved between volume groups and folders, also where a device under
them fails: on Debian's kernel, which has device-mapper."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from brine.common import operation, paths
from brine.instance import store
from brine.instance.clone import clone_instance
from brine.instance.disks.moves import move_disk
from brine.instance.registry import define_instance, undefine_instance
from brine.storage import lvm
from brine.storage.directory_notes import RECORDS
from brine.storage.volumes import volume_in
from brine.vm.disk import Disk
from component.live_instance import NAME, LiveInstance, brine, kill_when
from component.own_lvm import loop_device, run_lvm, use_lvm_of
from killing import killed_at
from lab.ganeti_config import ganeti_config, node_name
from lab.guest import Guest
from lab.guest_devices import wait_disk
from lab.qmp import Qmp
from lab.waiting import wait_for

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="makes disks as root; ./dev test runs as root"),
    pytest.mark.needs_device_mapper,
]

MIB = 1 << 20
FIRST, SECOND = "brine-first", "brine-second"
SECTORS = 40
# Writes the number of each write into a sector until that is on the disk, and then the next one.
_WRITE = f"dd of=/dev/vda bs=512 seek=$(((i + 1) % {SECTORS})) conv=notrunc,fsync 2>/dev/null"
_NEXT = "i=$((i + 1)) && echo $i >/w && mv /w /written"
WRITER = f"while true; do printf %512s $((i + 1)) | {_WRITE} && {_NEXT}; done"


class FailingDevice:
    """A block device that fails when it is told to.

    :param below: the device that it maps.
    """

    name = "brine-failing"

    def __init__(self, below: str) -> None:
        size = int(Path(f"/sys/block/{Path(below).name}/size").read_text())
        self._good = f"0 {size} linear {below} 0"
        self._bad = f"0 {size} flakey {below} 0 0 3600"
        self._dmsetup("create", "--table", self._good)
        self._dmsetup("mknodes")  # where there is no udev
        self.path = f"/dev/mapper/{self.name}"

    def fail(self, *, reads: bool = True) -> None:
        """Have writes fail from now on, and reads, too."""
        self._load(self._bad + ("" if reads else " 1 error_writes"))

    def mend(self) -> None:
        self._load(self._good)

    def remove(self) -> None:
        self._dmsetup("remove", "--force")

    def _load(self, table: str) -> None:
        self._dmsetup("suspend", "--noflush", "--nolockfs")
        self._dmsetup("load", "--table", table)
        self._dmsetup("resume")

    def _dmsetup(self, verb: str, *options: str) -> None:
        command = ["dmsetup", verb, "--noudevsync", *options, self.name]
        subprocess.run(command, check=True, capture_output=True, text=True)


class Units(NamedTuple):
    """Two volume groups, of which the second is on a device that can fail, and a folder."""

    folder: str
    failing: FailingDevice

    def left_in(self, unit: str) -> list[str]:
        """What is in a unit."""
        if unit == self.folder:
            return [one for one in os.listdir(unit) if one not in (RECORDS, "lost+found")]
        return run_lvm("lvs", "--noheadings", "-o", "lv_name", unit).split()


@pytest.fixture
def units(own_node: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Units]:
    monkeypatch.setattr(paths, "ETC_DIR", tmp_path / "etc")
    (tmp_path / "etc").mkdir()
    Path("/srv").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="brine-live-", dir="/srv") as folder:
        (tmp_path / "etc/storage.toml").write_text(f'directories = ["{folder}"]\n')
        devices = [loop_device(tmp_path / name, 96 * MIB) for name in ("a", "b", "c")]
        failing = FailingDevice(devices[1])
        try:
            # What is in memory may have no direct access.
            subprocess.run(["mke2fs", "-q", "-t", "ext4", devices[2]], check=True)
            subprocess.run(["mount", devices[2], folder], check=True)
            use_lvm_of([devices[0], failing.path], tmp_path / "lvm", monkeypatch)
            run_lvm("vgcreate", FIRST, devices[0])
            run_lvm("vgcreate", SECOND, failing.path)
            lvm.forget()
            yield Units(folder, failing)
            failing.mend()
            run_lvm("vgremove", "--force", "--yes", FIRST, SECOND)
        finally:
            subprocess.run(["umount", folder], check=False)
            failing.remove()
            for device in devices:
                subprocess.run(["losetup", "--detach", device], check=True)


@pytest.fixture
def web1(units: Units, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LiveInstance:
    """An instance with a disk in the second volume group."""
    live = LiveInstance(tmp_path, monkeypatch)
    define_instance(
        {
            "name": NAME,
            "accel": "tcg",
            "disks": [{"name": "data", "unit": SECOND, "size_mib": 32}],
        }
    )
    return live


def begin_writing(live: LiveInstance) -> None:
    wait_disk(live.guest, live.disk().uuid[:20])
    live.guest.run("dd if=/dev/zero of=/dev/vda bs=1M seek=8 count=20 conv=fsync 2>/dev/null")
    live.guest.run(f"echo 0 >/written; i=0; ({WRITER}) >/dev/null 2>&1 & echo $! >/writer")


def written(guest: Guest) -> int:
    """The number of the last write that is on the disk, as far as the guest was told."""
    return int(guest.run("cat /written"))


def await_writes(guest: Guest) -> None:
    before = written(guest)
    wait_for("writes", lambda: written(guest) > before, timeout_s=120)


def check_writes(live: LiveInstance) -> None:
    """The last writes are in the volume that the spec names; the guest writes no more then."""
    await_writes(live.guest)
    live.guest.run("kill $(cat /writer)")
    last = written(live.guest)
    with open(live.disk().path, "rb") as volume:
        data = volume.read(SECTORS * 512)
    for number in range(max(last - SECTORS + 2, 1), last + 1):
        at = 512 * (number % SECTORS)
        assert int(data[at : at + 512]) in (number, number + SECTORS), number


def check_place(live: LiveInstance, units: Units, unit: str) -> None:
    """The disk is in one unit, by its spec and QEMU; nothing is left in the others."""
    assert live.disk().unit == unit
    others = {FIRST, SECOND, units.folder} - {unit}
    assert [units.left_in(other) for other in others] == [[], []]
    assert live.guest.qmp("query-jobs") == []
    assert live.guest.qmp("query-status")["status"] == "running"
    assert operation.pending() == []


def error_of(said: str) -> str:
    """The line that says why a command has failed, which is one."""
    (line,) = [one for one in said.splitlines() if one.startswith("brine: error: ")]
    assert "Traceback" not in said
    return line


@pytest.mark.long
def test_a_disk_moves_between_groups_and_folders(web1: LiveInstance, units: Units) -> None:
    with web1.running() as guest, Qmp(guest.kvmd_socket) as events:
        begin_writing(web1)
        for unit in (units.folder, FIRST, SECOND, FIRST):
            await_writes(guest)
            assert brine("disk", "move", NAME, "data", "--to", unit) == 0
            check_place(web1, units, unit)
        tell_pauses(events)
        # One that is killed while QEMU copies leaves the disk where it is.
        kill_when(
            lambda: bool(guest.qmp("query-jobs")),
            lambda: move_disk(NAME, "data", SECOND, rate=MIB),
        )
        lvm.forget()
        store.settle_instance(NAME)
        check_place(web1, units, FIRST)
        assert brine("disk", "move", NAME, "data", "--to", SECOND) == 0
        check_place(web1, units, SECOND)
        check_writes(web1)


def tell_pauses(qmp: Qmp) -> None:
    """Print for how many ms the guest stood still, for those who run this by hand."""
    qmp.command("query-status")
    times = [
        (one["event"], one["timestamp"]["seconds"] * 1000 + one["timestamp"]["microseconds"] / 1000)
        for one in qmp.events
        if one["event"] in ("STOP", "RESUME")
    ]
    ends = zip(times[::2], times[1::2], strict=True)
    print("the guest stood still for", [f"{end - begin:.1f} ms" for (_, begin), (_, end) in ends])


def made_of(disk: Disk) -> list[int]:
    """The numbers of the writes that a disk has, by its sectors."""
    with open(disk.path, "rb") as volume:
        data = volume.read(SECTORS * 512)
    return [int(data[at : at + 512].strip(b"\0 ") or 0) for at in range(0, len(data), 512)]


@pytest.mark.long
def test_a_running_guest_is_cloned_as_it_is_at_one_moment(
    web1: LiveInstance, units: Units, capsys: pytest.CaptureFixture[str]
) -> None:
    with web1.running() as guest:
        begin_writing(web1)
        await_writes(guest)
        before = written(guest)
        clone = ("instance", "clone", NAME)
        assert brine(*clone, "web2", "--unit", units.folder, "--json") == 0
        told = json.loads(capsys.readouterr().out)
        assert any("power failure" in note for note in told["notes"])
        (copy,) = store.load("web2").disks
        assert (copy.unit, copy.format, copy.size_mib) == (units.folder, "raw", 32)
        numbers = made_of(copy)
        last = max(numbers)
        assert before <= last <= written(guest)
        for number in range(max(last - SECTORS + 1, 1), last + 1):
            assert numbers[number % SECTORS] == number
        assert len(units.left_in(SECOND)) == 1
        undefine_instance("web2")
        volume_in(copy.unit, copy.uuid).remove()
        # One that is killed leaves nothing, and the guest goes on: the next command sees to it.
        kill_when(
            lambda: len(units.left_in(SECOND)) > 1,
            lambda: clone_instance(NAME, "web2", unit=FIRST),
        )
        lvm.forget()
        store.settle_instance(NAME)
        assert len(units.left_in(SECOND)) == 1
        store.settle_instance("web2")
        check_place(web1, units, SECOND)
        assert store.names() == [NAME]
        # Without space for a snapshot, nothing changes.
        run_lvm("lvcreate", "--yes", "--extents", "100%FREE", "--name", "full", SECOND)
        assert brine(*clone, "web2") == 1
        assert SECOND in error_of(capsys.readouterr().err)
        run_lvm("lvremove", "--yes", f"{SECOND}/full")
        lvm.forget()
        check_place(web1, units, SECOND)
        assert brine("disk", "move", NAME, "data", "--to", units.folder) == 0
        capsys.readouterr()
        assert brine(*clone, "web2") == 1
        assert "data" in error_of(capsys.readouterr().err)
        check_writes(web1)


@pytest.mark.long
def test_a_clone_that_is_killed_anywhere_leaves_all_or_nothing(
    web1: LiveInstance, units: Units
) -> None:
    """It is killed before each seventh change of a name in a folder, or program that it runs."""
    with web1.running() as guest:
        begin_writing(web1)
        number, is_killed, outcomes = 1, True, set()
        while is_killed:
            is_killed = killed_at(number, lambda: clone_instance(NAME, "web2", unit=FIRST))
            lvm.forget()
            with store.alone(NAME):  # as each command on the original
                pass
            store.settle_instance("web2")
            is_there = "web2" in store.names()
            assert len(units.left_in(FIRST)) == is_there, number
            assert len(units.left_in(SECOND)) == 1, number
            assert guest.qmp("query-status")["status"] == "running", number
            assert operation.pending() == [], number
            outcomes.add(is_there)
            if is_there:
                (copy,) = store.load("web2").disks
                undefine_instance("web2")
                volume_in(copy.unit, copy.uuid).remove()
            number += 7
        assert outcomes == {False, True}
        check_writes(web1)


def fail_while_copying(guest: Guest, device: FailingDevice) -> None:
    wait_for("copy", lambda: guest.qmp("query-jobs"), timeout_s=120)
    device.fail()


@pytest.mark.long
def test_where_a_device_fails_a_disk_stays_whole(
    web1: LiveInstance, units: Units, capsys: pytest.CaptureFixture[str]
) -> None:
    with web1.running() as guest:
        begin_writing(web1)
        await_writes(guest)
        for target in (FIRST, SECOND):  # the original fails, and then the copy
            before = web1.disk()
            breaking = threading.Thread(target=fail_while_copying, args=(guest, units.failing))
            breaking.start()
            words = ("disk", "move", NAME, "data", "--to", target, "--rate", "4M", "--json")
            assert brine(*words) == 1
            breaking.join()
            why = error_of(capsys.readouterr().err)
            assert FIRST in why
            assert SECOND in why
            assert web1.disk() == before
            is_lost = before.unit == SECOND  # as long as LVM can't read its device
            assert brine("disk", "status", NAME) == is_lost
            assert ("missing" in capsys.readouterr().out) is is_lost
            units.failing.mend()
            await_writes(guest)
            # The copy that could not be removed from a device that failed is no disk's.
            assert brine("storage", "orphans", "--json") == 0
            left = json.loads(capsys.readouterr().out)
            assert [one["unit"] for one in left] == ([SECOND] if target == SECOND else [])
            assert brine("storage", "orphans", "--remove", "--yes") == 0
            check_place(web1, units, before.unit)
            assert brine("disk", "move", NAME, "data", "--to", target) == 0
        check_writes(web1)


def test_a_plain_disk_of_a_configuration_is_adopted_and_then_used(
    units: Units,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    live = LiveInstance(tmp_path, monkeypatch)
    run_lvm("lvcreate", "--yes", "--size", "8M", "--name", "theirs.disk0_data", FIRST)
    path = Path(f"/dev/{FIRST}/theirs.disk0_data")
    path.write_bytes(b"theirs".ljust(8 * MIB, b"x"))
    data = ganeti_config(nodes=1, instances=1)
    (instance,), (disk,) = data["instances"].values(), data["disks"].values()
    instance["name"] = NAME
    disk |= {"dev_type": "plain", "logical_id": [FIRST, path.name], "size": 8}
    file = tmp_path / "config.data"
    file.write_text(json.dumps(data))
    define = ("instance", "define", "--from-config", "--config", str(file), "--node", node_name(1))
    for word in ("defined", "unchanged"):
        assert brine(*define) == 0, capsys.readouterr().err
        assert capsys.readouterr().out.startswith(word)
        adopted = live.disk("disk0")
        assert (adopted.unit, adopted.path, adopted.size_mib) == (FIRST, str(path), 8)
        assert adopted.uuid in run_lvm(
            "lvs", "--noheadings", "-o", "lv_tags", f"{FIRST}/{path.name}"
        )
    assert path.read_bytes().startswith(b"theirs")
    assert brine("disk", "grow", NAME, "disk0", "12M") == 0
    assert brine("disk", "move", NAME, "disk0", "--to", SECOND) == 0
    assert units.left_in(FIRST) == []
    with open(live.disk("disk0").path, "rb") as volume:
        assert volume.read(12 * MIB) == b"theirs".ljust(8 * MIB, b"x").ljust(12 * MIB, b"\0")
    assert brine("disk", "remove", NAME, "disk0", "--delete") == 0
    assert units.left_in(SECOND) == []
