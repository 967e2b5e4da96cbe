"""Volumes of a guest that runs, and writes: growth, snapshots, and rollback to a clean file system,
on each kind of storage unit."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from brine.common import operation
from brine.instance.registry import define_instance
from component.live_instance import NAME, LiveInstance, brine
from component.test_volumes import Driver, driver, group
from lab.guest import Guest
from lab.guest_devices import wait_disk
from lab.waiting import wait_for

__all__ = ["driver", "group"]

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="makes disks as root; ./dev test runs as root"
)

MIB = 1 << 20
# Each writes a file anew, and then that it is on the disk.
WRITER = "i=0; while i=$((i + 1)); do echo $i >/mnt/n$((i % 20)); sync; echo $i >/written; done"


@pytest.fixture
def web1(
    own_node: None, driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> LiveInstance:
    """An instance with a disk that has a file system."""
    live = LiveInstance(tmp_path, monkeypatch)
    disk = {"name": "data", "unit": driver.unit, "size_mib": 16, "format": driver.format}
    define_instance({"name": NAME, "accel": "tcg", "disks": [disk]})
    made = live.disk()
    image = tmp_path / "made"
    image.write_bytes(bytes(16 * MIB))
    subprocess.run(["mke2fs", "-q", "-F", "-t", "ext4", image], check=True)
    convert = ["qemu-img", "convert", "-n", "-f", "raw", "-O", made.format, str(image), made.path]
    subprocess.run(convert, check=True)
    return live


@contextmanager
def content_of(live: LiveInstance, folder: Path) -> Iterator[Path]:
    """What the guest's disk has, as a raw image of its own."""
    disk, copy = live.disk(), folder / "copy"
    convert = ["qemu-img", "convert", "-f", disk.format, "-O", "raw", disk.path, str(copy)]
    subprocess.run(convert, check=True)
    yield copy
    copy.unlink()


def check_file_system(image: Path) -> None:
    """It is whole: a replay of its journal is all that it needs."""
    replayed = subprocess.run(["e2fsck", "-p", image], capture_output=True, text=True, check=False)
    assert replayed.returncode in (0, 1), replayed.stdout
    looked = subprocess.run(["e2fsck", "-fn", image], capture_output=True, text=True, check=False)
    assert looked.returncode == 0, looked.stdout


def file_in(image: Path, name: str) -> str:
    command = ["debugfs", "-R", f"cat {name}", str(image)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def mount(live: LiveInstance) -> None:
    wait_disk(live.guest, live.disk().uuid[:20])
    live.guest.run("mkdir /mnt; mount -t ext4 /dev/vda /mnt")


def size_in(guest: Guest) -> int:
    return 512 * int(guest.run("cat /sys/block/vda/size"))


def await_writes(guest: Guest) -> None:
    before = int(guest.run("cat /written"))
    wait_for("writes", lambda: int(guest.run("cat /written")) > before + 2, timeout_s=120)


def test_it_grows_and_goes_back_to_a_clean_file_system(
    web1: LiveInstance, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with web1.running() as guest:
        mount(web1)
        guest.run("echo kept >/mnt/kept; sync")
        assert brine("disk", "grow", NAME, "data", "24M", "--json") == 0
        assert json.loads(capsys.readouterr().out)["seen_by_guest"]
        wait_for("the new size", lambda: size_in(guest) == 24 * MIB)
        guest.run(f"echo 0 >/written; ({WRITER}) >/dev/null 2>&1 & echo $! >/writer")
        await_writes(guest)
        assert brine("disk", "snapshot", NAME, "--name", "before") == 0
        await_writes(guest)
        guest.run("echo later >/mnt/later; sync")
    assert brine("disk", "rollback", NAME, "before") == 0, capsys.readouterr().err
    with content_of(web1, tmp_path) as image:
        assert image.stat().st_size == 24 * MIB
        check_file_system(image)
        assert file_in(image, "kept") == "kept\n"
        assert file_in(image, "later") == ""
    with web1.running() as guest:
        mount(web1)
        assert guest.run("cat /mnt/kept; ls /mnt/later || true").startswith("kept\n")
        guest.run(f"echo 0 >/written; ({WRITER}) >/dev/null 2>&1 & echo $! >/writer")
        assert brine("disk", "snapshot", NAME, "--remove", "before") == 0
        await_writes(guest)
        guest.run("echo after >/mnt/after; sync")
        assert brine("disk", "grow", NAME, "data", "+4M") == 0, capsys.readouterr().err
        wait_for("the new size", lambda: size_in(guest) == 28 * MIB)
    with content_of(web1, tmp_path) as image:
        check_file_system(image)
        assert file_in(image, "after") == "after\n"
    assert operation.pending() == []
