"""The contract of volumes, which each driver keeps."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from brine.common import paths
from brine.storage.file_volume import RECORDS, FileVolume
from brine.storage.unit import StorageError, UnitStatus
from brine.storage.volume import Volume, VolumeRequest
from brine.storage.volumes import managed_volumes, volume_in
from brine.vm.disk import Disk

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="makes disks as root; ./dev test runs as root"
)

MIB = 2**20


class Driver(NamedTuple):
    """A unit of a driver, and the format of volumes there."""

    unit: str
    format: str

    def volume(self) -> Volume:
        return volume_in(self.unit, str(uuid.uuid4()))

    def made(self, size: int = 4 * MIB) -> Volume:
        volume = self.volume()
        volume.create(VolumeRequest(size=size, owner="web1", name="data", format=self.format))
        return volume


@pytest.fixture(params=["raw", "qcow2"])
def driver(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Driver]:
    monkeypatch.setattr(paths, "ETC_DIR", tmp_path / "etc")
    monkeypatch.setattr(paths, "LOCK_DIR", tmp_path / "lock")
    (tmp_path / "etc").mkdir()
    with tempfile.TemporaryDirectory(prefix="brine-volumes-", dir="/srv") as folder:
        (tmp_path / "etc/storage.toml").write_text(f'directories = ["{folder}"]\n')
        yield Driver(folder, request.param)


def write(volume: Volume, text: str, at: int = 0) -> None:
    """Write as a guest of the volume's disk does."""
    disk = volume.disk(Disk(path="/x"))
    command = f"write -s /dev/stdin {at} 512"
    qemu_io(disk, command, text.encode().ljust(512, b"\0"))


def read(volume: Volume, at: int = 0) -> str:
    disk = volume.disk(Disk(path="/x"))
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
    assert (disk.size_mib, disk.name, disk.interface) == (5, "data", "scsi")
    status = volume.status()
    assert (status.status, status.path, status.size) == (UnitStatus.OK, disk.path, 5 * MIB)
    assert (status.owner, status.name, status.is_open) == ("web1", "data", False)
    assert os.stat(disk.path).st_mode & 0o777 == 0o600
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
    assert small.status().size == 4 * MIB


def test_it_grows_and_keeps_its_data_and_does_not_shrink(driver: Driver) -> None:
    volume = driver.made()
    write(volume, "kept")
    volume.grow(9 * MIB - 1)
    volume.grow(2 * MIB)
    assert volume.disk(Disk(path="/x")).size_mib == 9
    assert read(volume) == "kept"
    write(volume, "end", at=9 * MIB - 512)
    assert read(volume, at=9 * MIB - 512) == "end"


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
    volume.grow(8 * MIB)
    volume.remove_snapshot("three")
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


def test_what_people_made_is_adopted_as_it_is(driver: Driver) -> None:
    made = driver.made()
    write(made, "theirs")
    theirs = f"{driver.unit}/theirs.img"
    os.rename(made.status().path, theirs)
    made.remove()
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


@pytest.mark.parametrize("where", ["/etc/passwd", "{unit}/none", "{unit}/.brine", "{unit}/../x"])
def test_what_is_no_file_of_the_unit_is_not_adopted(driver: Driver, where: str) -> None:
    volume = driver.volume()
    with pytest.raises(StorageError):
        volume.adopt(Disk(path=where.format(unit=driver.unit)), owner="web1")
    assert managed_volumes() == []


class Killed(BaseException):
    """The process ends here."""


def killed_at(monkeypatch: pytest.MonkeyPatch, count: int, work: Callable[[], None]) -> bool:
    """Do work that is killed before its so-many-th change of a file; returns whether it was."""
    left = count

    def counted(name: str) -> None:
        call = getattr(os, name)

        def change(*arguments: object, **options: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return call(*arguments, **options)

        patch.setattr(os, name, change)

    with monkeypatch.context() as patch:
        for name in ("rename", "unlink", "fsync", "truncate", "mkdir"):
            counted(name)
        with contextlib.suppress(Killed):
            work()
            return False
    return True


WORK: dict[str, Callable[[Volume, Driver], None]] = {
    "create": lambda volume, driver: volume.create(
        VolumeRequest(size=4 * MIB, format=driver.format)
    ),
    "snapshot": lambda volume, _: volume.snapshot("now"),
    "rollback": lambda volume, _: volume.rollback("before"),
    "remove snapshot": lambda volume, _: volume.remove_snapshot("before"),
    "merged": lambda volume, _: volume.merged("before"),
    "grow": lambda volume, _: volume.grow(9 * MIB),
    "remove": lambda volume, _: volume.remove(),
}


@pytest.mark.parametrize("what", sorted(WORK))
def test_work_that_was_killed_anywhere_can_be_done_again(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """What is left is either a volume with a record, or nothing: no file is without a record."""
    was_killed, count = True, 0
    while was_killed:
        if what == "create":
            volume = driver.volume()
        else:
            volume = driver.made()
            write(volume, "data")
            if what in ("rollback", "remove snapshot", "merged"):
                volume.snapshot("before")
                write(volume, "since")
            if what == "merged":  # as QEMU does it
                path = volume.status().path
                subprocess.run(["qemu-img", "commit", "-q", "-d", path], check=True)

        def work(volume: Volume = volume) -> None:
            WORK[what](volume, driver)

        was_killed = killed_at(monkeypatch, count, work)
        recorded = {one.uuid for one in FileVolume.list(driver.unit)}
        files = {name for name in os.listdir(driver.unit) if name != RECORDS}
        assert {name.lstrip(".")[:36] for name in files} <= recorded, count
        if was_killed and not (what == "create" and volume.status().status is UnitStatus.OK):
            if what == "snapshot" and volume.status().snapshots:
                pass
            else:
                work()
        if what == "remove":
            assert files == set() or was_killed
        else:
            wanted = {"create": "", "remove snapshot": "since", "merged": "since"}
            assert read(volume) == wanted.get(what, "data")
            for snapshot in reversed(volume.status().snapshots):
                volume.remove_snapshot(snapshot.name)
            volume.remove()
        assert os.listdir(driver.unit) == [RECORDS]
        assert os.listdir(f"{driver.unit}/{RECORDS}") == []
        count += 1
    assert count > 1
