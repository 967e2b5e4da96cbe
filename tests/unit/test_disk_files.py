"""Opening what disks are kept in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from brine.hotplug.disk import Disk, opened, size_of
from brine.hotplug.errors import HotplugError

UUID = "6a0f4f0d-0000-4000-8000-00000000000a"


def disk(path: Path, **others: str) -> Disk:
    return Disk(UUID, path, cache="writeback", **others)  # type: ignore[arg-type]


def qcow2(path: Path, *, version: int = 3, features: int = 0, backing: int = 0) -> Path:
    header = b"QFI\xfb" + version.to_bytes(4, "big") + backing.to_bytes(8, "big")
    path.write_bytes(header.ljust(72, b"\0") + features.to_bytes(8, "big") + bytes(432))
    return path


def test_what_can_be_no_disk_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/null")):
        with pytest.raises(HotplugError, match="neither a block device nor a file"):
            size_of(disk(path))
        with pytest.raises(HotplugError, match="neither a block device nor a file"):
            opened(disk(path)).__enter__()


def test_a_qcow2_image_that_is_to_be_raw_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = tmp_path / "plain"
    plain.write_bytes(bytes(512))
    with opened(disk(plain)), opened(disk(qcow2(tmp_path / "image"))):
        pass
    (record,) = caplog.records
    assert record.getMessage().endswith("image: looks like a qcow2 image, and is plugged in as raw")


@pytest.mark.parametrize(
    ("content", "named", "hint"),
    [
        (b"QFI\xfb", "qcow2", 'say "format": "qcow2"'),
        (b"KDMV", "VMDK", "qemu-img convert -O qcow2"),
        (bytes(64) + bytes.fromhex("7f10dabe"), "VDI", "qemu-img convert -O qcow2"),
        (b"vhdxfile", "VHDX", "qemu-img convert -O qcow2"),
        (b"LUKS\xba\xbe", "LUKS", 'say "format": "raw"'),
    ],
)
def test_another_formats_image_is_raw_only_if_somebody_says_so(
    tmp_path: Path, content: bytes, named: str, hint: str
) -> None:
    image = tmp_path / "image"
    image.write_bytes(content.ljust(512, b"\0"))
    with pytest.raises(HotplugError, match=f"begins as {named} does") as caught:
        opened(disk(image), is_format_said=False).__enter__()
    assert hint in str(caught.value.hint)
    with opened(disk(image)) as files:
        assert len(files.descriptors) == 2


def test_its_size_is_rounded_up_and_need_not_be_known(tmp_path: Path) -> None:
    path = tmp_path / "image"
    assert size_of(disk(path)) == 0
    with path.open("wb") as file:
        file.truncate((1 << 20) + 1)
    assert size_of(disk(path)) == 2
    with opened(disk(path)) as files:
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
    with opened(disk(path, format="qcow2")) as files:
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
    with pytest.raises(HotplugError, match=said):
        opened(disk(path, format="qcow2")).__enter__()


@pytest.mark.parametrize("image", [{}, {"features": 1}, {"version": 2, "features": 4}])
def test_an_image_that_stands_alone_is_opened(tmp_path: Path, image: dict[str, int]) -> None:
    path = qcow2(tmp_path / "image", **image)
    with opened(disk(path, format="qcow2")) as files:
        assert len(files.descriptors) == 2
