"""Disks of running guests that are moved to another storage unit while the guests write."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.node import Node
from lab.tree import TREE
from lab.waiting import wait_for
from node.instance_on_node import boot, info, node_with_instances, qmp, run_in_guest

FIRST, SECOND = "/srv/first", "/srv/second"
NAME = "web1"
SECTORS = 2000
MOST_KILLS = 99

Json = dict[str, Any]

# Writes the number of each write into a sector, and then that it is on the disk. An order has one
# line.
_WRITE = f"dd of=/dev/vda bs=512 seek=$((i % {SECTORS})) conv=notrunc,fsync 2>/dev/null"
_WRITES = [
    "i=$(cat /written)",
    f"while i=$((i + 1)); do printf %512s $i | {_WRITE}; echo $i >/w && mv /w /written; done",
]
PREPARE = "; ".join(["echo 0 >/written", *(f"echo '{line}' >>/writer" for line in _WRITES)])
KILLED = f"""
import sys
sys.path.insert(0, "/srv")
from killing import killed_at
from brine.instance.disks.moves import move_disk
killed = killed_at(int(sys.argv[1]), lambda: move_disk("{NAME}", "data", sys.argv[2]))
print("killed" if killed else "done")
"""
WRITE = "sh /writer >/dev/null 2>&1 & echo $! >/writer.pid"


@pytest.fixture(scope="module", params=["bookworm", "trixie"])
def node(request: pytest.FixtureRequest, packages: list[Path]) -> Iterator[Node]:
    with node_with_instances(request.param, packages) as node:
        for folder in (FIRST, SECOND):
            node.run(["brine", "storage", "create", "file", folder])
        yield node


@pytest.fixture
def guest(node: Node) -> Iterator[Node]:
    """A guest that writes all the time."""
    disk = {"name": "data", "size_mib": 32, "unit": FIRST}
    boot(node, NAME, disks=[disk], security_model="pool", chroot=True)
    run_in_guest(node, NAME, PREPARE)
    # Something to copy: a disk has holes where nothing was written.
    run_in_guest(node, NAME, "dd if=/dev/zero of=/dev/vda bs=1M seek=8 count=20 conv=fsync")
    run_in_guest(node, NAME, WRITE)
    yield node
    node.run(["brine", "instance", "stop", "--force", "--timeout", "1", NAME], check=False)
    node.run(["brine", "instance", "undefine", NAME], check=False)
    node.shell(f"rm -rf {FIRST}/* {SECOND}/* {FIRST}/.brine/* {SECOND}/.brine/*")


def the_disk(node: Node) -> Json:
    spec = json.loads(node.read(Path(f"/var/lib/brine/instances/{NAME}.json")))
    (disk,) = spec["disks"]
    return dict(disk)


def files_in(node: Node, folder: str) -> list[str]:
    return node.run(["find", folder, "-type", "f"]).stdout.split()


def written(node: Node) -> int:
    return int(run_in_guest(node, NAME, "cat /written"))


def check_writes(node: Node) -> None:
    """The guest goes on writing, and each of its last writes is in the file that the spec names."""
    before = written(node)
    wait_for("another write", lambda: written(node) > before)
    run_in_guest(node, NAME, "kill $(cat /writer.pid)")
    last = written(node)
    data = node.path(the_disk(node)["path"]).read_bytes()
    for number in range(max(last - SECTORS + 2, 1), last + 1):
        at = 512 * (number % SECTORS)
        assert int(data[at : at + 512]) in (number, number + SECTORS), number
    run_in_guest(node, NAME, WRITE)


def check_place(node: Node) -> str:
    """The disk is at one place, in the spec, the runtime file and QEMU; returns the unit."""
    disk = the_disk(node)
    unit = disk["unit"]
    assert disk["path"] == f"{unit}/{disk['uuid']}.raw"
    other = SECOND if unit == FIRST else FIRST
    assert files_in(node, other) == []
    assert sorted(files_in(node, unit)) == sorted(
        [disk["path"], f"{unit}/.brine/{disk['uuid']}.json"]
    )
    listed = json.loads(node.run(["brine", "disk", "list", NAME, "--json"]).stdout)
    assert [one["path"] for one in listed] == [disk["path"]]
    assert qmp(node, NAME, "query-status")["status"] == "running"
    assert qmp(node, NAME, "query-jobs") == []
    assert "restart_pending" not in info(node, NAME) or not info(node, NAME)["restart_pending"]
    return str(unit)


def test_a_disk_is_moved_under_a_guest_that_writes(guest: Node) -> None:
    said = guest.run(["brine", "disk", "move", NAME, "data", "--to", SECOND, "--json"])
    told = json.loads(said.stdout)
    assert (told["result"], told["unit"], told["live"]) == ("moved", SECOND, True)
    assert check_place(guest) == SECOND
    check_writes(guest)
    # And back, slowly; meanwhile other commands work.
    move = ["brine", "disk", "move", NAME, "data", "--to", FIRST, "--rate", "4M"]
    process = subprocess.Popen(guest.command(move), stderr=subprocess.PIPE, text=True)
    guest.run(["brine", "instance", "pause", NAME])
    guest.run(["brine", "instance", "resume", NAME])
    assert process.poll() is None
    _, said_of_it = process.communicate(timeout=120)
    assert process.returncode == 0, said_of_it
    assert f"brine: {NAME}: copying to {FIRST}/" in said_of_it
    assert check_place(guest) == FIRST
    check_writes(guest)
    # The next start has it there, too.
    guest.run(["brine", "instance", "reboot", "--force", "--timeout", "1", NAME])
    assert check_place(guest) == FIRST


@pytest.mark.long  # of QEMU 7.2, one in some dozens of cancelled copies ends with SIGSEGV
def test_a_move_that_is_killed_leaves_the_disk_at_one_place(guest: Node) -> None:
    """It is killed before each change of a name in a folder, by which its records, the spec and
    files are written: so also between the switch and the spec."""
    guest.put(TREE / "tests/killing.py", Path("/srv/killing.py"))
    is_killed, number, units, stood_still = True, 0, [], False
    # While QEMU copies, each look at it is such a change: there are many.
    while is_killed and number < MOST_KILLS:
        number += 1
        units.append(check_place(guest))
        other = SECOND if units[-1] == FIRST else FIRST
        said = guest.run(["python3", "-c", KILLED, str(number), other], timeout_s=120).stdout
        is_killed = said.splitlines()[-1] == "killed"
        stood_still |= qmp(guest, NAME, "query-status")["status"] == "paused"
        settled = guest.run(["brine", "operations", "settle"])
        assert "left in" not in settled.stderr, (number, settled.stderr)
        left = json.loads(guest.run(["brine", "operations", "list", "--json"]).stdout)
        assert left == [], number
        check_place(guest)
        if number % 4 == 0 or not is_killed:
            check_writes(guest)
    assert stood_still
    assert len(set(units)) == 2


def test_a_vm_that_ends_during_the_move_keeps_its_disk(guest: Node) -> None:
    move = ["brine", "disk", "move", NAME, "data", "--to", SECOND, "--rate", "2M"]
    process = subprocess.Popen(guest.command(move), stderr=subprocess.PIPE, text=True)
    wait_for("the copy", lambda: files_in(guest, SECOND))
    wait_for("its job", lambda: qmp(guest, NAME, "query-jobs"))
    last = written(guest)
    guest.run(["kill", f"-{signal.SIGKILL.value}", str(info(guest, NAME)["pid"])])
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said.splitlines()[-2].startswith("brine: error: ")
    assert the_disk(guest)["unit"] == FIRST
    assert files_in(guest, SECOND) == []
    data = guest.path(the_disk(guest)["path"]).read_bytes()
    at = 512 * (last % SECTORS)
    assert int(data[at : at + 512]) >= last
