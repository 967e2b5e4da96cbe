"""The contract of volumes, which each driver keeps."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from brine.common import paths
from brine.storage import lvm
from brine.storage.directory_notes import RECORDS
from brine.storage.file_volume import FileVolume
from brine.storage.unit import StorageError, UnitStatus
from brine.storage.volume import (
    UnusableVolumeError,
    Volume,
    VolumeRequest,
    VolumeSnapshot,
    Wipe,
)
from brine.storage.volumes import managed_volumes, volume_in
from brine.vm.disk import Backing, Disk
from component.own_lvm import loop_device, run_lvm, use_lvm_of
from lab.waiting import wait_for

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="makes disks as root; ./dev test runs as root"
)

MIB = 2**20


GROUP = "brine-volumes"


class Driver(NamedTuple):
    """A unit of a driver, and the format of volumes there."""

    unit: str
    format: str

    @property
    def is_lvm(self) -> bool:
        return not self.unit.startswith("/")

    def left(self) -> set[str]:
        """The UUIDs in the names of what is in the unit."""
        if self.is_lvm:
            names = run_lvm("lvs", "--noheadings", "-o", "lv_name", self.unit).split()
            return {name.removeprefix("brine-")[:36] for name in names}
        return {name.lstrip(".")[:36] for name in os.listdir(self.unit) if name != RECORDS}

    def recorded(self) -> set[str]:
        """The UUIDs of disks that have a mark."""
        if self.is_lvm:
            tags = run_lvm("lvs", "--noheadings", "-o", "lv_tags", self.unit)
            return set(re.findall(r"brine\.disk=([0-9a-f-]{36})", tags))
        return {one.uuid for one in FileVolume.list(self.unit)}

    def volume(self) -> Volume:
        return volume_in(self.unit, str(uuid.uuid4()))

    def made(self, size: int = 4 * MIB) -> Volume:
        volume = self.volume()
        volume.create(VolumeRequest(size=size, owner="web1", name="data", format=self.format))
        return volume


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A volume group of half a GiB."""
    device = loop_device(tmp_path / "pv", 512 * MIB)
    use_lvm_of([device], tmp_path / "lvm", monkeypatch)
    try:
        run_lvm("pvcreate", device)
        run_lvm("vgcreate", GROUP, device)
        lvm.forget()
        yield GROUP
        run_lvm("vgremove", "--force", "--yes", GROUP)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


@pytest.fixture
def driver_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node without settings of its own."""
    monkeypatch.setattr(paths, "ETC_DIR", tmp_path / "etc")
    monkeypatch.setattr(paths, "LOCK_DIR", tmp_path / "lock")


@pytest.fixture(
    params=[
        pytest.param("file-raw", id="raw"),
        pytest.param("file-qcow2", id="qcow2"),
        pytest.param("plain-raw", id="plain", marks=pytest.mark.needs_device_mapper),
    ]
)
def driver(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Driver]:
    monkeypatch.setattr(paths, "ETC_DIR", tmp_path / "etc")
    monkeypatch.setattr(paths, "LOCK_DIR", tmp_path / "lock")
    (tmp_path / "etc").mkdir()
    Path("/srv").mkdir(exist_ok=True)  # there is none on a kernel of the tests' own
    with tempfile.TemporaryDirectory(prefix="brine-volumes-", dir="/srv") as folder:
        (tmp_path / "etc/storage.toml").write_text(f'directories = ["{folder}"]\n')
        kind, image = request.param.split("-")
        unit = request.getfixturevalue("group") if kind == "plain" else folder
        yield Driver(unit, image)


def write(volume: Volume, text: str, at: int = 0) -> None:
    """Write as a guest of the volume's disk does."""
    disk = volume.disk(Disk(path="/x"))
    if disk.format == "raw":
        with open(disk.path, "r+b") as file:
            file.seek(at)
            file.write(padded(text))
            file.flush()
            os.fsync(file.fileno())
        return
    command = f"write -s /dev/stdin {at} 512"
    qemu_io(disk, command, padded(text))


def read(volume: Volume, at: int = 0) -> str:
    disk = volume.disk(Disk(path="/x"))
    if disk.format == "raw":
        with open(disk.path, "rb") as file:
            file.seek(at)
            return file.read(512).rstrip(b"\0").decode()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "raw"
        command = ["qemu-img", "convert", "-O", "raw", "-f", disk.format, disk.path, str(copy)]
        subprocess.run(command, check=True, capture_output=True)
        with open(copy, "rb") as file:
            file.seek(at)
            return file.read(512).rstrip(b"\0").decode()


def qemu_io(disk: Disk, command: str, given: bytes) -> None:
    with tempfile.NamedTemporaryFile() as source:
        source.write(given)
        source.flush()
        command = command.replace("/dev/stdin", source.name)
        words = ["qemu-io", "-f", disk.format, "-c", command, disk.path]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
    assert "wrote 512/512" in done.stdout, done.stdout


def test_it_is_made_empty_in_the_size_that_was_wanted(driver: Driver) -> None:
    volume = driver.made(4 * MIB + 1)
    disk = volume.disk(Disk(path="/x", name="data", interface="scsi"))
    assert (disk.unit, disk.uuid, disk.format) == (driver.unit, volume.uuid, driver.format)
    size_mib = 8 if driver.is_lvm else 5  # LVM has extents of 4 MiB
    assert (disk.size_mib, disk.name, disk.interface) == (size_mib, "data", "scsi")
    status = volume.status()
    assert (status.status, status.path, status.size) == (UnitStatus.OK, disk.path, size_mib * MIB)
    assert (status.owner, status.name, status.is_open) == ("web1", "data", False)
    assert not os.stat(disk.path).st_mode & 0o007
    assert read(volume) == ""
    volume.prepare()
    assert managed_volumes() == [volume]


def test_it_is_made_once(driver: Driver) -> None:
    volume = driver.made()
    write(volume, "precious")
    with pytest.raises(StorageError, match="already"):
        volume.create(VolumeRequest(size=MIB))
    assert read(volume) == "precious"


def test_more_than_there_is_room_for_is_refused_and_nothing_is_left(driver: Driver) -> None:
    volume = driver.volume()
    with pytest.raises(StorageError, match=driver.unit) as told:
        volume.create(VolumeRequest(size=1 << 50))
    assert "free" in str(told.value)
    assert managed_volumes() == []
    assert volume.status().status is UnitStatus.MISSING
    small = driver.made()
    with pytest.raises(StorageError, match="free"):
        small.grow(1 << 50)
    if driver.is_lvm:
        with pytest.raises(StorageError, match="free"):
            small.snapshot("now", space=1 << 50)
    assert small.status().size == 4 * MIB


def test_it_grows_and_keeps_its_data_and_does_not_shrink(driver: Driver) -> None:
    volume = driver.made()
    write(volume, "kept")
    volume.grow(12 * MIB - 1)
    volume.grow(2 * MIB)
    assert volume.disk(Disk(path="/x")).size_mib == 12
    assert read(volume) == "kept"
    assert read(volume, at=4 * MIB) == ""
    write(volume, "end", at=12 * MIB - 512)
    assert read(volume, at=12 * MIB - 512) == "end"


def test_it_is_removed_and_was_then(driver: Driver) -> None:
    volume = driver.made()
    path = volume.status().path
    volume.remove()
    assert not os.path.exists(path)
    assert managed_volumes() == []
    volume.remove()
    with pytest.raises(StorageError):
        volume.disk(Disk(path="/x"))


def test_what_is_in_use_stays(driver: Driver) -> None:
    volume = driver.made()
    for flags in (os.O_RDONLY, os.O_RDWR):
        descriptor = os.open(volume.status().path, flags)
        try:
            child = subprocess.Popen(["sleep", "60"], stdin=descriptor)
        finally:
            os.close(descriptor)
        try:
            lvm.forget()
            assert volume.status().is_open
            with pytest.raises(StorageError, match="in use"):
                volume.remove()
        finally:
            child.kill()
            child.wait()
    volume.remove()


def test_a_rollback_brings_back_what_was_there_at_the_snapshot(driver: Driver) -> None:
    volume = driver.made()
    write(volume, "before")
    volume.snapshot("upgrade")
    write(volume, "after")
    assert read(volume) == "after"
    assert [one.name for one in volume.status().snapshots] == ["upgrade"]
    for _ in range(2):  # the snapshot stays
        write(volume, "broken")
        volume.rollback("upgrade")
        assert read(volume) == "before"
    volume.remove_snapshot("upgrade")
    assert read(volume) == "before"
    assert volume.status().snapshots == ()
    volume.remove()


def test_a_snapshot_that_is_removed_leaves_what_was_written_since(driver: Driver) -> None:
    volume = driver.made()
    for name in ("one", "two", "three"):
        volume.snapshot(name)
        write(volume, name)
    with pytest.raises(StorageError, match="two"):
        volume.snapshot("two")
    with pytest.raises(StorageError, match="newest"):
        volume.rollback("two")
    with pytest.raises(StorageError, match="snapshot"):
        volume.remove()
    volume.remove_snapshot("two")
    volume.remove_snapshot("two")
    assert read(volume) == "three"
    volume.rollback("three")
    assert read(volume) == "two"
    volume.remove_snapshot("one")
    assert read(volume) == "two"
    volume.snapshot("four")
    write(volume, "four")
    for _ in range(2):
        volume.discard("four")  # before a rollback
    assert [one.name for one in volume.status().snapshots] == ["three"]
    volume.rollback("three")
    assert read(volume) == "two"
    if driver.is_lvm:
        with pytest.raises(StorageError, match="three"):
            volume.grow(8 * MIB)
    else:
        volume.grow(8 * MIB)
    volume.remove_snapshot("three")
    volume.grow(8 * MIB)
    assert read(volume) == "two"
    assert volume.status().size == 8 * MIB


def test_a_copy_has_all_that_its_source_has_with_what_is_below_it(driver: Driver) -> None:
    source = driver.made()
    write(source, "below")
    source.snapshot("now")
    write(source, "above", at=MIB)
    copy = driver.made(8 * MIB)
    told: list[float] = []
    copy.copy_from(source.disk(Disk(path="/x")), lambda done, _: told.append(done))
    assert (read(copy), read(copy, at=MIB)) == ("below", "above")
    assert copy.disk(Disk(path="/x")).backing is None
    assert copy.status().size == 8 * MIB
    assert told[-1] == 1.0


def test_its_files_are_all_of_it_in_another_unit(driver: Driver, tmp_path: Path) -> None:
    volume = driver.made()
    if driver.is_lvm:
        assert [one.path for one in volume.files()] == [volume.status().path]
        volume.snapshot("now")
        with pytest.raises(StorageError, match="snapshots that LVM keeps: now"):
            volume.files()
        return
    for text in ("one", "two", "three"):
        write(volume, text)
        if text != "three":
            volume.snapshot(text)
    there = [one.snapshot for one in volume.files() if one.snapshot]
    with tempfile.TemporaryDirectory(prefix="brine-volumes-", dir="/srv") as unit:
        settings = tmp_path / "etc/storage.toml"
        settings.write_text(f'directories = ["{driver.unit}", "{unit}"]\n')
        copy = volume_in(unit, volume.uuid)
        request = VolumeRequest(size=4 * MIB, format=driver.format, snapshots=tuple(there))
        free = os.statvfs(unit).f_bavail * os.statvfs(unit).f_frsize
        full = replace(request, snapshots=(replace(there[0], used=free),))
        with pytest.raises(StorageError, match="free, and"):
            copy.create(full)
        copy.create(request)
        for ours, theirs in zip(volume.files(), copy.files(), strict=True):
            shutil.copyfile(ours.path, theirs.path)
        for _ in range(2):
            copy.settle_copy()
        volume.remove(with_snapshots=True)
        names = [(one.name, one.since) for one in copy.status().snapshots]
        assert names == [(one.name, one.since) for one in there]
        assert read(copy) == "three"  # by the headers, too
        copy.rollback("two")
        assert read(copy) == "two"
        copy.remove_snapshot("one")
        assert read(copy) == "two"
        copy.merging("two")
        with pytest.raises(StorageError, match="removal has begun"):
            copy.files()
        copy.remove(with_snapshots=True)
        assert os.listdir(unit) == [RECORDS]


@pytest.mark.parametrize("driver", ["file-raw"], indirect=True)
def test_what_is_based_on_others_is_not_all_of_it(driver: Driver) -> None:
    (path := Path(driver.unit, "theirs.raw")).write_bytes(bytes(MIB))
    overlay = f"{driver.unit}/own.qcow2"
    command = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", str(path), overlay]
    subprocess.run(command, check=True)
    volume = driver.volume()
    backing = Backing(path=str(path), format="raw")
    volume.adopt(Disk(path=overlay, format="qcow2", backing=backing), owner="web1")
    with pytest.raises(StorageError, match="theirs.raw, which is not of its volume"):
        volume.files()


@pytest.mark.parametrize("driver", ["file-qcow2"], indirect=True)
def test_an_image_that_names_another_file_is_not_followed(driver: Driver) -> None:
    """A guest that has broken out of its QEMU can write the header of its image."""
    volume = driver.made()
    volume.snapshot("now")
    path = volume.status().path
    with open(path, "r+b") as file:
        file.seek(72)
        file.write((1 << 2).to_bytes(8, "big"))
    works: list[Callable[[], None]] = [
        lambda: driver.made().copy_from(volume.disk(Disk(path="/x"))),
        lambda: volume.remove_snapshot("now"),
        lambda: volume.grow(8 * MIB),
    ]
    for work in works:
        with pytest.raises(StorageError, match="external"):
            work()


def test_what_people_made_is_adopted_as_it_is(driver: Driver) -> None:
    theirs = theirs_in(driver, "theirs")
    volume = driver.volume()
    disk = Disk(path=theirs, format=driver.format, name="root")
    for _ in range(2):
        volume.adopt(disk, owner="web2")
    assert read(volume) == "theirs"
    assert (volume.status().owner, volume.disk(disk).path) == ("web2", theirs)
    with pytest.raises(StorageError, match=volume.uuid):
        driver.volume().adopt(disk, owner="web3")
    volume.remove()
    assert not os.path.exists(theirs)


def theirs_in(driver: Driver, text: str) -> str:
    """A disk in a unit that Brine has not made."""
    if driver.is_lvm:
        theirs = f"/dev/{driver.unit}/theirs"
        run_lvm("lvcreate", "--yes", "--name", "theirs", "--size", "4M", driver.unit)
        lvm.forget()
    else:
        theirs = f"{driver.unit}/theirs.img"
        subprocess.run(["qemu-img", "create", "-f", driver.format, theirs, "4M"], check=True)
    qemu_io(Disk(path=theirs, format=driver.format), "write -s /dev/stdin 0 512", padded(text))
    return theirs


def padded(text: str) -> bytes:
    return text.encode().ljust(512, b"\0")


@pytest.mark.parametrize("driver", ["file-raw"], indirect=True)
@pytest.mark.parametrize("where", ["/etc/passwd", "{unit}/none", "{unit}/.brine", "{unit}/../x"])
def test_what_is_no_file_of_the_unit_is_not_adopted(driver: Driver, where: str) -> None:
    volume = driver.volume()
    with pytest.raises(StorageError):
        volume.adopt(Disk(path=where.format(unit=driver.unit)), owner="web1")
    assert managed_volumes() == []


class Killed(BaseException):
    """The process ends here."""


def killed_at(
    monkeypatch: pytest.MonkeyPatch, count: int, work: Callable[[], None], *, is_lvm: bool
) -> bool:
    """Do work that is killed before its so-many-th change of a file, or of LVM's; returns whether
    it was."""
    left = count

    def counted(module: ModuleType, name: str) -> None:
        call = getattr(module, name)

        def change(*arguments: object, **options: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return call(*arguments, **options)

        patch.setattr(module, name, change)

    with monkeypatch.context() as patch:
        for name in ("rename", "unlink", "fsync", "truncate", "mkdir"):
            if not is_lvm:
                counted(os, name)
        counted(lvm, "change")
        with contextlib.suppress(Killed):
            work()
            return False
    return True


WORK: dict[str, Callable[[Volume, Driver], None]] = {
    "create": lambda volume, driver: volume.create(
        VolumeRequest(size=4 * MIB, format=driver.format)
    ),
    "create a copy": lambda volume, driver: volume.create(
        VolumeRequest(
            size=4 * MIB,
            format=driver.format,
            snapshots=(VolumeSnapshot(name="one", since=7.0), VolumeSnapshot(name="two")),
        )
    ),
    "snapshot": lambda volume, _: volume.snapshot("now"),
    "rollback": lambda volume, _: volume.rollback("before"),
    "remove snapshot": lambda volume, _: volume.remove_snapshot("before"),
    "merged": lambda volume, _: volume.merged("before"),
    "grow": lambda volume, _: volume.grow(9 * MIB),
    "remove": lambda volume, _: volume.remove(),
}


@pytest.mark.parametrize("driver", ["file-raw", "file-qcow2"], indirect=True)
@pytest.mark.parametrize("what", sorted(WORK))
def test_work_that_was_killed_anywhere_can_be_done_again(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """What is left is either a volume with a record, or nothing: no file is without a record."""
    kill_and_do_again(driver, monkeypatch, what)


@pytest.mark.needs_device_mapper
@pytest.mark.parametrize("driver", ["plain-raw"], indirect=True)
def test_a_logical_volume_whose_making_was_killed_is_made_again(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_and_do_again(driver, monkeypatch, "create")


@pytest.mark.long
@pytest.mark.needs_device_mapper
@pytest.mark.parametrize("driver", ["plain-raw"], indirect=True)
@pytest.mark.parametrize("what", sorted({*WORK} - {"create", "create a copy", "merged"}))
def test_work_on_a_logical_volume_that_was_killed_anywhere_can_be_done_again(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    kill_and_do_again(driver, monkeypatch, what)


def kill_and_do_again(driver: Driver, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    was_killed, count = True, 0
    while was_killed:
        is_new = what.startswith("create")
        if is_new:
            volume = driver.volume()
        else:
            volume = driver.made()
            write(volume, "data")
            if what in ("rollback", "remove snapshot", "merged"):
                volume.snapshot("before")
                write(volume, "since")
            if what == "merged" and not driver.is_lvm:  # as QEMU does it
                path = volume.status().path
                subprocess.run(["qemu-img", "commit", "-q", "-d", path], check=True)

        def work(volume: Volume = volume) -> None:
            WORK[what](volume, driver)

        was_killed = killed_at(monkeypatch, count, work, is_lvm=driver.is_lvm)
        assert driver.left() <= driver.recorded(), count
        if was_killed and not (is_new and volume.status().status is UnitStatus.OK):
            if what == "snapshot" and volume.status().snapshots:
                pass
            else:
                work()
        if what != "remove":
            wanted = {
                "create": "",
                "create a copy": "",
                "remove snapshot": "since",
                "merged": "since",
            }
            assert read(volume) == wanted.get(what, "data")
            for snapshot in reversed(volume.status().snapshots):
                volume.remove_snapshot(snapshot.name)
            volume.remove()
        assert driver.left() == driver.recorded() == set()
        count += 1
    assert count > 1


@pytest.mark.needs_device_mapper
def test_no_data_of_a_former_owner_can_be_read(group: str, driver_settings: None) -> None:
    secret = b"secret..." * (8 * MIB // 9)
    run_lvm("lvcreate", "--yes", "--name", "theirs", "--size", "16M", group)
    Path(f"/dev/{group}/theirs").write_bytes(secret)
    run_lvm("lvremove", "--yes", f"{group}/theirs")
    lvm.forget()
    volume = volume_in(group, str(uuid.uuid4()))
    volume.create(VolumeRequest(size=8 * MIB, wipe=Wipe.ENDS))
    path = Path(volume.status().path)
    with path.open("rb") as device:
        assert not device.read(MIB).strip(b"\0")
        assert b"secret" in device.read(6 * MIB)
        assert not device.read(MIB).strip(b"\0")
    volume.grow(16 * MIB)
    with path.open("rb") as device:
        device.seek(8 * MIB)
        assert not device.read(8 * MIB).strip(b"\0")
    volume.remove()
    told: list[float] = []
    for wipe in (Wipe.ZERO, Wipe.FULL):
        volume.create(VolumeRequest(size=16 * MIB, wipe=wipe), lambda done, _: told.append(done))
        assert not path.read_bytes().strip(b"\0")
        assert told.pop() == 1
        path.write_bytes(secret)
        volume.remove()


@pytest.mark.needs_device_mapper
def test_a_growth_that_was_killed_is_empty_before_it_is_used(
    group: str, driver_settings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_lvm("lvcreate", "--yes", "--name", "theirs", "--size", "16M", group)
    Path(f"/dev/{group}/theirs").write_bytes(b"secret" * (16 * MIB // 6))
    run_lvm("lvremove", "--yes", f"{group}/theirs")
    lvm.forget()
    volume = volume_in(group, str(uuid.uuid4()))
    volume.create(VolumeRequest(size=8 * MIB))

    def fails(error: BaseException) -> None:
        def call(*_: object) -> None:
            raise error

        patch.setattr(fcntl, "ioctl", call)

    with monkeypatch.context() as patch:
        fails(Killed())
        with pytest.raises(Killed):
            volume.grow(16 * MIB)
        fails(OSError(errno.EIO, "Input/output error"))
        with pytest.raises(UnusableVolumeError, match="not wiped"):
            volume.prepare()
    assert "secret" in read(volume, at=9 * MIB)
    volume.prepare()
    assert not Path(volume.status().path).read_bytes().strip(b"\0")
    write(volume, "kept", at=9 * MIB)
    volume.prepare()
    volume.grow(16 * MIB)
    assert read(volume, at=9 * MIB) == "kept"
    volume.remove()


@pytest.mark.needs_device_mapper
def test_of_two_commands_at_once_one_gets_the_space(group: str, driver_settings: None) -> None:
    children = []
    for _ in range(2):
        if (child := os.fork()) == 0:
            status = 2
            try:
                request = VolumeRequest(size=300 * MIB, wipe=Wipe.ENDS)
                volume_in(group, str(uuid.uuid4())).create(request)
                status = 0
            except StorageError as error:
                status = 1 if "free" in str(error) else 2
            finally:
                os._exit(status)
        children.append(child)
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert sorted(ends) == [0, 1]
    (volume,) = managed_volumes()
    volume.remove()


@pytest.mark.needs_device_mapper
def test_stripes_are_seen_in_the_table(tmp_path: Path, group: str, driver_settings: None) -> None:
    device = loop_device(tmp_path / "pv2", 128 * MIB)
    conf = tmp_path / "lvm/lvm.conf"
    conf.write_text(conf.read_text().replace('"r|', f'"a|^{device}$|", "r|'))
    try:
        run_lvm("vgextend", group, device)
        volume = volume_in(group, str(uuid.uuid4()))
        volume.create(VolumeRequest(size=4 * MIB, stripes=2, stripe_size=8192))
        assert volume.status().size == 8 * MIB  # an extent on each
        parts = (group, Path(volume.status().path).name)
        name = "-".join(one.replace("-", "--") for one in parts)
        said = subprocess.run(
            ["dmsetup", "table", name], check=True, capture_output=True, text=True
        )
        assert re.fullmatch(r"0 16384 striped 2 16 .*\n", said.stdout), said.stdout
        volume.remove()
        run_lvm("vgreduce", group, device)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


@pytest.mark.needs_device_mapper
def test_thin_volumes_and_snapshots_of_others_are_refused_by_name(
    group: str, driver_settings: None
) -> None:
    run_lvm("lvcreate", "--yes", "--name", "theirs", "--size", "4M", group)
    run_lvm("lvcreate", "--yes", "-s", "--name", "snap", "--size", "8M", f"{group}/theirs")
    run_lvm("lvcreate", "--type", "thin-pool", "--name", "pool", "--size", "8M", group)
    run_lvm("lvcreate", "--thin", "--name", "thin", "--virtualsize", "32M", f"{group}/pool")
    lvm.forget()
    for name, why in (("snap", ""), ("none", ""), ("pool", "thin pool"), ("thin", "thin pool")):
        with pytest.raises(StorageError, match=f"{group}/{name}: .*{why}"):
            path = f"/dev/{group}/{name}"
            volume_in(group, str(uuid.uuid4())).adopt(Disk(path=path), owner="web1")
    assert managed_volumes() == []


def test_a_copy_ends_with_the_process_that_wants_it(tmp_path: Path) -> None:
    """Else it would keep the images open that are removed when its operation is settled."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(os.urandom(8 * MIB))
    script = "import sys; from brine.storage import qemu_img; qemu_img.run_long(*sys.argv[1:])"
    words = ["convert", "-r", "65536", "-f", "raw", "-O", "raw", str(source), str(target)]
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", script, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )

    def copies() -> bool:
        found = subprocess.run(["pgrep", "--full", f"qemu-img.*{target}"], capture_output=True)
        return found.returncode == 0

    wait_for("the copy to begin", copies)
    process.kill()
    process.wait()
    wait_for("the copy to end", lambda: not copies())
