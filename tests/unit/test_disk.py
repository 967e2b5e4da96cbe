"""Opening what disks are kept in, and refusing the disk of another instance."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from brine.common import paths
from brine.vm.address import uuid_of_path
from brine.vm.conflicts import ConflictError, refuse_taken
from brine.vm.disk import Disk
from brine.vm.disk_files import DiskError, opened, size_of
from lab.fake_qemu import FakeQemus

UUID = "6a0f4f0d-0000-4000-8000-00000000000a"


def made_of(path: Path, **others: str) -> Disk:
    return Disk(uuid=UUID, path=str(path), cache="writeback", **others)  # type: ignore[arg-type]


def qcow2(path: Path, *, version: int = 3, features: int = 0, backing: int = 0) -> Path:
    header = b"QFI\xfb" + version.to_bytes(4, "big") + backing.to_bytes(8, "big")
    path.write_bytes(header.ljust(72, b"\0") + features.to_bytes(8, "big") + bytes(432))
    return path


def test_what_can_be_no_disk_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/null")):
        with pytest.raises(DiskError, match="neither a block device nor a file"):
            size_of(made_of(path))
        with pytest.raises(DiskError, match="neither a block device nor a file"):
            opened(made_of(path)).__enter__()


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder in memory, whose files QEMU writes in blocks of 4096 bytes past the page cache."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.parametrize("size", [1000, 512, 1_000_001])
def test_an_image_that_qemu_would_refuse_for_its_size_is_refused(
    in_memory: Path, size: int
) -> None:
    image = in_memory / "image"
    image.write_bytes(bytes(size))
    with pytest.raises(DiskError, match=f"has {size} bytes") as told:
        opened(Disk(uuid=UUID, path=str(image))).__enter__()
    assert f"truncate -s %4096 {image}" in str(told.value.hint)
    for disk in (made_of(image), Disk(uuid=UUID, path=str(image), read_only=True)):
        with opened(disk):
            pass
    os.truncate(image, 8192)
    with opened(Disk(uuid=UUID, path=str(image))):
        pass


def test_a_qcow2_image_that_is_to_be_raw_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = tmp_path / "plain"
    plain.write_bytes(bytes(512))
    with opened(made_of(plain)), opened(made_of(qcow2(tmp_path / "image"))):
        pass
    (record,) = caplog.records
    assert record.getMessage().endswith("image: looks like a qcow2 image, and is plugged in as raw")


@pytest.mark.parametrize(
    ("content", "named", "hint"),
    [
        (b"QFI\xfb", "qcow2", 'add "format": "qcow2"'),
        (b"KDMV", "VMDK", "qemu-img convert -O qcow2"),
        (bytes(64) + bytes.fromhex("7f10dabe"), "VDI", "qemu-img convert -O qcow2"),
        (b"vhdxfile", "VHDX", "qemu-img convert -O qcow2"),
        (b"LUKS\xba\xbe", "LUKS", 'add "format": "raw"'),
    ],
)
def test_another_formats_image_is_raw_only_if_somebody_says_so(
    tmp_path: Path, content: bytes, named: str, hint: str
) -> None:
    image = tmp_path / "image"
    image.write_bytes(content.ljust(512, b"\0"))
    with pytest.raises(DiskError, match=f"is a {named} file") as caught:
        opened(made_of(image, format_source="default")).__enter__()
    assert hint in str(caught.value.hint)
    with opened(made_of(image)) as files:
        assert len(files.descriptors) == 2


def test_its_size_is_rounded_up_and_need_not_be_known(tmp_path: Path) -> None:
    path = tmp_path / "image"
    assert size_of(made_of(path)) == 0
    with path.open("wb") as file:
        file.truncate((1 << 20) + 1)
    assert size_of(made_of(path)) == 2
    with opened(made_of(path)) as files:
        assert files.size_mib == 2
        assert not files.is_device


def test_what_was_looked_at_is_what_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "image", tmp_path / "other"
    path.write_bytes(b"first")
    other.write_bytes(b"other")
    real = os.pread

    def look_and_replace(descriptor: int, size: int, offset: int) -> bytes:
        header = real(descriptor, size, offset)
        other.rename(path)
        return header

    qcow2(path)
    first = path.stat().st_ino
    monkeypatch.setattr(os, "pread", look_and_replace)
    with opened(made_of(path, format="qcow2")) as files:
        assert {os.fstat(each).st_ino for each in files.descriptors} == {first}
    assert path.stat().st_ino != first


@pytest.mark.parametrize(
    ("image", "said"),
    [
        ({"features": 4}, "external data file"),
        ({"features": 1 << 2 | 1}, "external data file"),
        ({"backing": 65536}, "backing file"),
    ],
)
def test_an_image_that_needs_another_file_is_refused(
    tmp_path: Path, image: dict[str, int], said: str
) -> None:
    path = qcow2(tmp_path / "image", **image)
    with pytest.raises(DiskError, match=said):
        opened(made_of(path, format="qcow2")).__enter__()


@pytest.mark.parametrize("image", [{}, {"features": 1}, {"version": 2, "features": 4}])
def test_an_image_that_stands_alone_is_opened(tmp_path: Path, image: dict[str, int]) -> None:
    path = qcow2(tmp_path / "image", **image)
    with opened(made_of(path, format="qcow2")) as files:
        assert len(files.descriptors) == 2


# The disk of another instance.


@pytest.fixture
def disk(own_node: Path) -> Disk:
    """A disk, on a node of its own."""
    image = own_node / "image"
    image.write_bytes(b"")
    return Disk(uuid=uuid_of_path(str(image)), path=str(image))


def row(disk: Disk, **keys: Any) -> dict[str, Any]:
    return {"path": disk.path, "read_only": False, "interface": "virtio", **keys}


def is_defined(name: str, *rows: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """Have an instance with these disks; returns its spec."""
    spec = {"admin_state": "down", "disks": list(rows), "nics": [], **keys}
    paths.SPECS_DIR.mkdir(exist_ok=True)
    (paths.SPECS_DIR / f"{name}.json").write_text(json.dumps(spec))
    return spec


def has_run(name: str, *rows: dict[str, Any], **keys: Any) -> None:
    """Have its runtime file say that it has these disks now."""
    (paths.RUNTIME_DIR / f"{name}.json").write_text(json.dumps({"disks": list(rows), **keys}))


def refused(disk: Disk, own: str | None = "web2") -> str:
    with pytest.raises(ConflictError) as told:
        refuse_taken(own, disk.identities())
    return str(told.value)


def test_a_disk_of_another_is_refused_by_any_name(disk: Disk) -> None:
    is_defined("web1", row(disk))
    link = Path(disk.path).with_name("link")
    link.symlink_to(disk.path)
    assert (
        refused(Disk(uuid=disk.uuid, path=str(link)))
        == f"{link} is also a disk of web1, as {disk.path}"
    )
    assert refused(disk, None)  # of a QEMU that is no instance
    refuse_taken("web1", disk.identities())


def test_one_that_nobody_writes_may_be_shared(disk: Disk) -> None:
    is_defined("web1", row(disk, read_only=True))
    assert refused(disk)
    refuse_taken("web2", Disk(uuid=disk.uuid, path=disk.path, read_only=True).identities())


def test_what_was_plugged_in_or_on_ide_counts_also_when_it_has_ended(disk: Disk) -> None:
    spec = is_defined("web1")
    has_run("web1", row(disk), spec=spec)
    assert "is also a disk of web1" in refused(disk)
    has_run("web1", spec=is_defined("web1", row(disk, interface="ide")))
    assert "is also a disk of web1" in refused(disk)


def test_what_was_unplugged_is_free(disk: Disk, qemus: FakeQemus) -> None:
    spec = is_defined("web1", row(disk))
    has_run("web1", spec=spec)
    qemus.start(paths.CONTROL_DIR / "web1.qmp")
    refuse_taken("web2", disk.identities())


@pytest.mark.parametrize("runs", [True, False])
@pytest.mark.parametrize("now", ["another spec", "offline"])
def test_a_disk_that_is_not_there_at_the_next_start_is_free_unless_it_is_in_use(
    disk: Disk, qemus: FakeQemus, now: str, *, runs: bool
) -> None:
    keys = {"admin_state": "offline"} if now == "offline" else {}
    has_run("web1", row(disk), spec=is_defined("web1", row(disk), **keys))
    if now == "another spec":
        is_defined("web1")
    if runs:
        qemus.start(paths.CONTROL_DIR / "web1.qmp")
        assert "is also a disk of web1" in refused(disk)
    else:
        refuse_taken("web2", disk.identities())


@pytest.mark.parametrize("content", ["{", "[]", '{"disks": 5}', '{"disks": [5, {"path": 5}]}'])
def test_what_is_damaged_keeps_nobody(disk: Disk, content: str) -> None:
    is_defined("web1")
    (paths.RUNTIME_DIR / "web1.json").write_text(content)
    (paths.SPECS_DIR / "web3.json").write_text(content)
    refuse_taken("web2", disk.identities())
