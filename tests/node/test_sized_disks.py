"""Disks by size under running guests: made, plugged, grown, removed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.node import Node
from lab.tree import TREE
from lab.waiting import wait_for
from node.instance_on_node import boot, node_with_instances, qmp, run_in_guest

UNIT = "/srv/vms"
NAME = "web1"
SETTINGS = f'directories = ["{UNIT}"]\ndefault_unit = "{UNIT}"\n'


@pytest.fixture(scope="module", params=["bookworm", "trixie"])
def node(request: pytest.FixtureRequest, packages: list[Path]) -> Iterator[Node]:
    with node_with_instances(request.param, packages) as node:
        node.shell(f"mkdir -p {UNIT} && chmod 0750 {UNIT} && mkdir -p /etc/brine")
        node.write(Path("/etc/brine/storage.toml"), SETTINGS)
        yield node


@pytest.fixture(autouse=True)
def no_instance(node: Node) -> Iterator[None]:
    """Each test has its own web1, and leaves none."""
    yield
    node.run(["brine", "instance", "stop", "--force", NAME], check=False)
    node.run(["brine", "instance", "undefine", NAME, "--delete-volumes", "--yes"], check=False)


def disk(node: Node, verb: str, *words: str) -> Any:
    return json.loads(node.run(["brine", "disk", verb, NAME, *words, "--json"]).stdout)


def wait_size(node: Node, device: str, mib: int) -> None:
    """Wait until the guest sees a disk of this size."""
    command = f"cat /sys/block/{device}/size 2>/dev/null || echo 0"
    wait_for(f"{mib} MiB", lambda: int(run_in_guest(node, NAME, command)) == mib * 2048)


def test_a_disk_by_its_size_is_in_the_running_guest_and_grows_there(node: Node) -> None:
    root = {"name": "root", "size_mib": 16}
    scsi = {"name": "scsi", "size_mib": 16, "interface": "scsi", "format": "qcow2"}
    ide = {"name": "ide", "size_mib": 16, "interface": "ide"}
    boot(node, NAME, disks=[root, scsi, ide], security_model="pool", chroot=True)
    wait_size(node, "vda", 16)
    wait_size(node, "sda", 16)
    told = disk(node, "add", "--size", "20M", "--name", "data")
    assert told["plugged"] is True
    wait_size(node, "vdb", 20)
    disk(node, "add", "--size", "20M", "--name", "more", "--format", "qcow2")
    wait_size(node, "vdc", 20)
    for name, device in (("root", "vda"), ("scsi", "sda"), ("data", "vdb"), ("more", "vdc")):
        told = disk(node, "grow", name, "+8M")
        assert told["seen_by_guest"] is True
        wait_size(node, device, told["disk"]["size_mib"])
    # IDE has no way to tell a guest; the test guest has no driver for it. QEMU has the new size.
    assert disk(node, "grow", "ide", "+24M")["seen_by_guest"] is False
    images = [one["inserted"]["image"] for one in qmp(node, NAME, "query-block")]
    assert 40 << 20 in [one["virtual-size"] for one in images]
    rows = {row["name"]: row for row in disk(node, "status")}
    assert {name: row["made"] >> 20 for name, row in rows.items()} == {
        "root": 24,
        "scsi": 24,
        "ide": 40,
        "data": 28,
        "more": 28,
    }
    # A definition has it grow, too.
    spec = json.loads(node.read(Path(f"/var/lib/brine/instances/{NAME}.json")))
    for row in spec["disks"]:
        if row["name"] == "data":
            row["size_mib"] = 32
    node.run(["brine", "instance", "define", "-"], stdin=json.dumps(spec))
    wait_size(node, "vdb", 32)
    # The next start has all of them; nothing waits for it.
    assert json.loads(node.run(["brine", "instance", "info", NAME, "--json"]).stdout)
    kept = rows["more"]["path"]
    assert disk(node, "remove", "more")["deleted"] is False
    assert disk(node, "remove", "data", "--delete")["deleted"] is True
    wait_for("no disk", lambda: not run_in_guest(node, NAME, "ls /sys/block | grep vd[bc] || true"))
    files = node.run(["find", UNIT, "-maxdepth", "1", "-type", "f"]).stdout.split()
    assert sorted(files) == sorted(
        [*(rows[name]["path"] for name in ("root", "scsi", "ide")), kept]
    )
    node.run(["brine", "instance", "reboot", "--force", "--timeout", "1", NAME])
    assert [row["name"] for row in disk(node, "status")] == ["root", "scsi", "ide"]


KILLED = f"""
import sys
sys.path.insert(0, "/srv")
from killing import killed_at, steps_of
from brine.common import cli
number, size = sys.argv[1:]
work = lambda: cli.main(["disk", "grow", "{NAME}", "data", size])
print(killed_at(int(number), work) if number != "0" else steps_of(work))
"""


def test_a_growth_that_is_killed_is_seen_by_the_guest_or_not_in_the_spec(node: Node) -> None:
    disks = [{"name": "root", "size_mib": 16}, {"name": "data", "size_mib": 16, "format": "qcow2"}]
    boot(node, NAME, disks=disks, security_model="pool", chroot=True)
    node.put(TREE / "tests/killing.py", Path("/srv/killing.py"))
    size = 16

    def grow(number: int) -> str:
        nonlocal size
        size += 1
        return node.run(["python3", "-c", KILLED, str(number), f"{size}M"]).stdout.splitlines()[-1]

    steps = int(grow(0))
    for number in range(steps // 2, steps + 1, 4):  # as the spec is saved, and after it
        # One growth has a step more than another.
        assert grow(number) == "True" or number > steps * 3 // 4
        node.run(["brine", "operations", "settle"])
        row = next(row for row in disk(node, "status") if row["name"] == "data")
        assert row["size_mib"] == row["made"] >> 20, number
        size = row["size_mib"]
        wait_size(node, "vdb", size)


def test_a_disk_by_its_size_gets_a_slot_that_is_not_reserved(node: Node) -> None:
    boot(node, NAME, disks=[{"name": "root", "size_mib": 16}], security_model="pool")
    disk(node, "add", "--size", "8M", "--name", "data", "--reserved-slots", "20")
    rows = json.loads(node.run(["brine", "disk", "list", NAME, "--json"]).stdout)
    assert [row["slot"] for row in rows if row["slot"] >= 20]


def test_the_story_of_the_readme(node: Node) -> None:
    """An image that others made is adopted; an upgrade of the guest is undone."""
    folder, image = "/var/lib/vms", "/var/lib/vms/web2.qcow2"
    node.shell(f"mkdir -p {folder} && qemu-img create -q -f qcow2 {image} 16M")
    boot(node, "web2", disks=[{"path": image, "format": "qcow2"}])

    def brine(*words: str) -> str:
        return node.run(["brine", *words]).stdout

    assert brine("storage", "create", "file", folder) == f"created: {folder}\n"
    brine("disk", "add", "web2", "--size", "10M", "--unit", folder, "--name", "data")
    brine("disk", "grow", "web2", "data", "20M")
    assert "adopted: web2 root" in brine("disk", "adopt", "web2", image, "--name", "root")
    rows = json.loads(brine("disk", "status", "web2", "--json"))
    assert [(row["name"], row["made"] >> 20, row["status"]) for row in rows] == [
        ("root", 16, "ok"),
        ("data", 20, "ok"),
    ]
    run_in_guest(node, "web2", "echo before | dd of=/dev/vda conv=fsync")
    brine("disk", "snapshot", "web2", "--name", "before-upgrade")
    run_in_guest(node, "web2", "echo broken | dd of=/dev/vda conv=fsync")
    brine("disk", "rollback", "web2", "before-upgrade", "--force-stop")
    brine("instance", "start", "web2")
    wait_guest = "head -c 6 /dev/vda"
    wait_for("the guest", lambda: "before" in run_in_guest(node, "web2", wait_guest))
    assert "before-upgrade" in brine("disk", "status", "web2")
