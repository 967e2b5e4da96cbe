"""Copies of volumes on file systems that can share blocks, and on those that can't."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from brine.common import cli, operation, paths
from brine.instance import store
from brine.instance.registry import define_instance
from brine.vm.disk import Disk
from component.own_lvm import loop_device
from tree_entry_points import of_tree

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="makes disks as root; ./dev test runs as root"
)

MIB = 1 << 20
SHARES = {"xfs": True, "btrfs": True, "ext4": False, "tmpfs": False}


@pytest.fixture(params=SHARES)
def file_system(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The kind of a file system, and its folder."""
    kind: str = request.param
    Path("/srv").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="brine-reflink-", dir="/srv") as folder:
        device = "" if kind == "tmpfs" else loop_device(tmp_path / "image", 320 * MIB)
        try:
            if device:
                quiet = ["-q"] if kind != "ext4" else ["-q", "-F"]
                subprocess.run([f"mkfs.{kind}", *quiet, device], check=True)
            mount = ["mount", "-t", kind, device or "brine", folder]
            done = subprocess.run(mount, check=False, capture_output=True, text=True)
            if "unknown filesystem" in done.stderr:
                pytest.skip(f"this kernel has no {kind}")
            assert done.returncode == 0, done.stderr
            try:
                yield kind, Path(folder)
            finally:
                subprocess.run(["umount", folder], check=True)
        finally:
            if device:
                subprocess.run(["losetup", "--detach", device], check=True)


@pytest.fixture
def unit(
    own_node: None,
    file_system: tuple[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A storage unit there."""
    for module in (cli, operation):
        monkeypatch.setattr(module, "entry_points", of_tree)
    monkeypatch.setattr(paths, "ETC_DIR", tmp_path / "etc")
    (tmp_path / "etc").mkdir()
    folder = file_system[1] / "disks"
    folder.mkdir()
    text = f'directories = ["{folder}"]\ndefault_unit = "{folder}"\n'
    (tmp_path / "etc/storage.toml").write_text(text)
    return folder


def used(folder: Path) -> int:
    """The bytes in use of a folder's file system."""
    os.sync()
    usage = os.statvfs(folder)
    return (usage.f_blocks - usage.f_bfree) * usage.f_frsize


def content_of(disk: Disk, folder: Path) -> bytes:
    copy = folder / "raw"
    convert = ["qemu-img", "convert", "-f", disk.format, "-O", "raw", disk.path, str(copy)]
    subprocess.run(convert, check=True)
    data = copy.read_bytes()
    copy.unlink()
    return data


@pytest.mark.parametrize("image_format", ["raw", "qcow2"])
def test_a_clone_shares_blocks_where_the_file_system_can(
    unit: Path, file_system: tuple[str, Path], tmp_path: Path, image_format: str
) -> None:
    disk = {"name": "data", "size_mib": 48, "format": image_format}
    define_instance({"name": "web1", "accel": "tcg", "disks": [disk]})
    (original,) = store.load("web1").disks
    written = os.urandom(40 * MIB).ljust(48 * MIB, b"\0")
    (tmp_path / "written").write_bytes(written)
    convert = ["qemu-img", "convert", "-n", "-f", "raw", "-O", image_format]
    subprocess.run([*convert, f"{tmp_path}/written", original.path], check=True)
    before = used(unit)
    assert cli.main(["instance", "clone", "web1", "web2"]) == 0
    took = used(unit) - before
    (copy,) = store.load("web2").disks
    assert (took < 8 * MIB) is SHARES[file_system[0]], took
    assert content_of(copy, tmp_path) == written
    # Each is its own: what one guest writes is not the other's.
    command = ["qemu-io", "-f", image_format, "-c", "write -P 7 0 4096", copy.path]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert content_of(copy, tmp_path)[:4096] == b"\7" * 4096
    assert content_of(original, tmp_path) == written
