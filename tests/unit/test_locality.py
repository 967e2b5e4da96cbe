"""Which disks another node could have: by what the kernel tells of devices and mounts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from brine.storage.locality import Storage
from brine.vm.disk import Disk

Shared = Callable[[str], str | None]

DEVICES = {
    # name: its number, its place below devices/, its slaves, files
    "sda": ("8:0", "pci0000:00/ata1/host0/target0:0:0/0:0:0:0/block", (), {}),
    "sdb": ("8:16", "platform/host2/session1/target2:0:0/2:0:0:1/block", (), {}),
    "sdc": ("8:32", "pci0000:00/host3/rport-3:0-1/target3:0:0/3:0:0:1/block", (), {}),
    "vda": ("254:0", "pci0000:00/virtio1/block", (), {}),
    "nvme0n1": ("259:0", "pci0000:00/nvme/nvme0", (), {"device/transport": "pcie"}),
    "nvme1n1": ("259:1", "virtual/nvme-fabrics/nvme1", (), {"device/transport": "tcp"}),
    "rbd0": ("250:0", "rbd/0/block", (), {}),
    "drbd1": ("147:1", "virtual/block", (), {}),
    "nbd0": ("43:0", "virtual/block", (), {}),
    "dm-0": ("253:0", "virtual/block", ("sda",), {"dm/uuid": "LVM-x"}),
    "dm-1": ("253:1", "virtual/block", ("sda", "sdb"), {"dm/uuid": "LVM-y"}),
    "dm-2": ("253:2", "virtual/block", ("sda",), {"dm/uuid": "mpath-3600"}),
    "dm-3": ("253:3", "virtual/block", ("dm-2",), {"dm/uuid": "LVM-z"}),
    "dm-4": ("253:4", "virtual/block", (), {"dm/uuid": "CRYPT"}),
    "md0": ("9:0", "virtual/block", ("sda", "nvme0n1"), {}),
    "loop0": ("7:0", "virtual/block", (), {"loop/backing_file": "/srv/local/image"}),
    "loop1": ("7:1", "virtual/block", (), {"loop/backing_file": "/srv/nfs/image"}),
}

MOUNTS = """\
1 0 8:1 / / rw - ext4 /dev/sda1 rw
2 1 8:1 / /srv/local rw shared:3 master:1 - xfs /dev/sda1 rw
3 1 0:30 / /srv/nfs rw - nfs4 server:/vms rw
4 1 0:31 / /srv/ceph rw - ceph mon:/ rw
5 1 0:32 / /srv/gluster rw - fuse.glusterfs server:vms rw
6 1 253:1 / /srv/ocfs2 rw - ocfs2 /dev/dm-1 rw
7 1 8:16 / /srv/iscsi rw - ext4 /dev/sdb rw
8 1 0:33 / /srv/a\\040b rw - tmpfs tmpfs rw
9 1 0:34 / /srv/both rw - tmpfs tmpfs rw
10 9 0:35 / /srv/both rw - nfs server:/vms rw
"""

FILES = ("/srv/local/image", "/image", "/srv/a b/image", "/srv/nfs2/image")
"""Those that there are."""


@pytest.fixture
def fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shared:
    """Why another node could have what is behind a path; of devices, /dev/NAME."""
    sysfs = tmp_path / "sys"
    (sysfs / "dev/block").mkdir(parents=True)
    places = {}
    for name, (number, where, _, files) in DEVICES.items():
        places[name] = sysfs / "devices" / where / name
        places[name].mkdir(parents=True)
        (places[name] / "dev").write_text(f"{number}\n")
        for file, text in files.items():
            (places[name] / file).parent.mkdir(exist_ok=True)
            (places[name] / file).write_text(f"{text}\n")
        if not (places[name] / "device").exists():
            (places[name] / "device").symlink_to(places[name].parent.parent)
        (sysfs / "dev/block" / number).symlink_to(places[name])
    for name, (_, _, slaves, _) in DEVICES.items():
        (places[name] / "slaves").mkdir(exist_ok=True)
        for one in slaves:
            (places[name] / "slaves" / one).symlink_to(places[one])
    partition = places["sda"] / "sda1"
    partition.mkdir()
    (partition / "partition").write_text("1\n")
    (sysfs / "dev/block/8:1").symlink_to(partition)
    numbers = {f"/dev/{name}": number for name, (number, *_) in DEVICES.items()}
    numbers["/dev/sda1"] = "8:1"
    image = tmp_path / "image"
    image.touch()
    real = os.stat

    def stat(path: str, **how: object) -> os.stat_result:
        if path in FILES:
            return real(image)
        if path not in numbers:
            return real(path, **how)  # type: ignore[arg-type]
        major, minor = map(int, numbers[path].split(":"))
        found = list(real("/dev/null"))
        found[0] = 0o60660
        return os.stat_result(found, {"st_rdev": os.makedev(major, minor)})

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(os.path, "realpath", _realpath(os.path.realpath, {*numbers, *FILES}))
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    storage = Storage(sysfs, mounts)

    def why(path: str) -> str | None:
        return storage.why_shared(Disk(uuid="u", path=path))

    return why


def _realpath(real: Callable[..., str], known: set[str]) -> Callable[..., str]:
    return lambda path, **how: str(path) if str(path) in known else real(path, **how)


@pytest.mark.parametrize(
    "path",
    [
        *("/dev/sda", "/dev/sda1", "/dev/vda", "/dev/nvme0n1", "/dev/dm-0", "/dev/md0"),
        *("/dev/loop0", *FILES),
    ],
)
def test_it_is_this_nodes_own(fault: Shared, path: str) -> None:
    assert fault(path) is None


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/dev/sdb", "sdb is reached over a network"),
        ("/dev/sdc", "sdc is reached over a network"),
        ("/dev/nvme1n1", "nvme1n1 is reached over a network"),
        ("/dev/rbd0", "rbd0 is no disk of this node's own"),
        ("/dev/drbd1", "drbd1 is no disk"),
        ("/dev/nbd0", "nbd0 is no disk"),
        ("/dev/dm-1", "sdb is reached over a network"),
        ("/dev/dm-2", "several paths"),
        ("/dev/dm-3", "several paths"),
        ("/dev/dm-4", "dm-4 is of no device"),
        ("/dev/loop1", "it is on nfs4"),
        ("/dev/none", "it is not there"),
        ("/srv/local/missing", "it is not there"),  # as what is to be mounted there
        ("/srv/nfs/image", "it is on nfs4"),
        ("/srv/ceph/image", "it is on ceph"),
        ("/srv/gluster/image", "it is on fuse.glusterfs"),
        ("/srv/ocfs2/image", "it is on ocfs2"),
        ("/srv/iscsi/image", "sdb is reached over a network"),
        ("/srv/both/image", "it is on nfs"),
    ],
)
def test_another_node_could_have_it(fault: Shared, path: str, why: str) -> None:
    said = fault(path) or ""
    assert said.startswith(f"another node could have its disk {path}: ")
    assert why in said


def test_a_disk_that_is_only_read_may_be_shared(fault: Shared) -> None:
    del fault
    assert Storage().why_shared(Disk(uuid="u", path="/dev/none", read_only=True)) is None


def test_this_machines_own_files_are_its_own(tmp_path: Path) -> None:
    """On the real kernel, where a container's file systems have the host's devices."""
    (tmp_path / "image").touch()
    said = Storage().why_shared(Disk(uuid="u", path=str(tmp_path / "image")))
    assert said is None or "is not known" in said or "of no device" in said
