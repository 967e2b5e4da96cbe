"""Snapshots of all disks of an instance: taken, listed, removed and rolled back by `brine disk`."""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.brine_command import kill_at_once
from lab.command import CommandError
from lab.node import Node
from lab.waiting import wait_for
from node.instance_on_node import (
    define,
    info,
    node_with_instances,
    qmp,
    run_in_guest,
    start,
    wait_ready,
)

UNIT = "/srv/vms"
NAME = "web1"
DISKS = [
    {"name": "one", "unit": UNIT, "size_mib": 16},
    {"name": "two", "unit": UNIT, "size_mib": 16, "format": "qcow2", "interface": "scsi"},
    {"name": "ide", "unit": UNIT, "size_mib": 16, "interface": "ide"},
]


@pytest.fixture(scope="module")
def node(release: str, packages: list[Path]) -> Iterator[Node]:
    with node_with_instances(release, packages) as found:
        found.run(["mkdir", UNIT])
        found.run(["brine", "storage", "create", "file", UNIT])
        yield found


@pytest.fixture
def web1(node: Node) -> Iterator[Node]:
    """A running instance with a disk on each bus."""
    define(node, NAME, disks=DISKS, machine="pc")
    start(node, NAME)
    yield node
    node.shell(f"brine instance stop --force --timeout 1 {NAME}; brine instance undefine {NAME}")
    node.shell(f"rm -rf {UNIT}/* {UNIT}/.brine/*")


def disk(node: Node, *words: str) -> Any:
    """What `brine disk` prints as JSON."""
    return json.loads(node.run(["brine", "disk", *words, "--json"]).stdout)


def refusal(node: Node, *words: str) -> str:
    with pytest.raises(CommandError) as error:
        node.run(["brine", "disk", *words])
    said = error.value.stderr
    assert error.value.returncode in (1, 2)
    assert said.startswith("brine: error: "), said
    return said


def snapshots(node: Node) -> list[str]:
    return [one["snapshot"] for one in disk(node, "snapshot", NAME, "--list")]


def guest_disks(node: Node) -> list[str]:
    """The guest's disks, of which its kernel can't read the one on IDE."""
    names = run_in_guest(node, NAME, "ls /sys/block").split()
    return [one for one in names if one.startswith(("vd", "sd"))]


def write(node: Node, text: str, at_mib: int = 1) -> None:
    """Have the guest write a text to each of its disks."""
    for name in guest_disks(node):
        command = f"echo {text} | dd of=/dev/{name} bs=1M seek={at_mib} conv=fsync 2>/dev/null"
        run_in_guest(node, NAME, command)


def read(node: Node, at_mib: int = 1) -> set[str]:
    """What the guest reads from its disks there."""
    run_in_guest(node, NAME, "echo 3 >/proc/sys/vm/drop_caches")
    command = f"dd if=/dev/%s bs=1M skip={at_mib} count=1 2>/dev/null | head -n 1"
    return {run_in_guest(node, NAME, command % one).strip() for one in guest_disks(node)}


def nodes(node: Node) -> int:
    """How many block nodes of disks its QEMU has."""
    found = qmp(node, NAME, "query-named-block-nodes")
    return len([one for one in found if not one["node-name"].startswith("cdrom")])


def files(node: Node) -> list[str]:
    return sorted(node.shell(f"ls {UNIT}").split())


def test_a_snapshot_of_a_running_guest_is_taken_merged_and_rolled_back_to(web1: Node) -> None:
    assert nodes(web1) == 4  # the images, and the file of the one that is qcow2
    assert len(guest_disks(web1)) == 2
    write(web1, "first")
    taken = disk(web1, "snapshot", NAME, "--name", "one")
    assert [one["name"] for one in taken["disks"]] == ["one", "two", "ide"]
    assert "agent" in taken["notes"][0]
    write(web1, "second")
    disk(web1, "snapshot", NAME, "--name", "two")
    write(web1, "third")
    assert snapshots(web1) == ["one", "two"]
    assert "already" in refusal(web1, "snapshot", NAME, "--name", "two")
    assert "runs" in refusal(web1, "rollback", NAME, "two")
    assert "restart_pending" not in info(web1, NAME) or not info(web1, NAME)["restart_pending"]

    # The layer in the middle, then a restart from the spec, then the layer on top.
    disk(web1, "snapshot", NAME, "--remove", "one")
    assert snapshots(web1) == ["two"]
    assert read(web1) == {"third"}
    web1.run(["brine", "instance", "stop", NAME])
    start(web1, NAME)
    assert read(web1) == {"third"}
    disk(web1, "snapshot", NAME, "--remove", "two")
    assert snapshots(web1) == []
    assert len(files(web1)) == 3
    assert nodes(web1) == 6  # what was a backing file at the start has a node of its file
    assert read(web1) == {"third"}
    write(web1, "fourth")

    disk(web1, "snapshot", NAME, "--name", "one")
    write(web1, "fifth")
    disk(web1, "snapshot", NAME, "--name", "two")
    write(web1, "sixth")
    assert "two" in refusal(web1, "rollback", NAME, "one", "--force-stop")
    assert info(web1, NAME)["status"] == "running"
    done = disk(web1, "rollback", NAME, "one", "--force-stop", "--discard-newer")
    assert done["discarded"] == ["two"]
    assert snapshots(web1) == ["one"]
    start(web1, NAME)
    assert read(web1) == {"fourth"}
    write(web1, "seventh")
    web1.run(["brine", "instance", "stop", NAME])
    disk(web1, "rollback", NAME, "one")
    disk(web1, "snapshot", NAME, "--remove", "one")
    start(web1, NAME)
    assert read(web1) == {"fourth"}
    assert len(files(web1)) == 3


KILLED = {
    "snapshot": ("snapshot", NAME, "--name", "killed"),
    "removal": ("snapshot", NAME, "--remove", "killed"),
}


@pytest.mark.parametrize("rounds", [6, pytest.param(60, marks=pytest.mark.long)])
def test_a_kill_of_a_command_loses_nothing_that_the_guest_wrote(web1: Node, rounds: int) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for number in range(rounds):
        text = f"round-{number}"
        write(web1, text)
        verb = "removal" if snapshots(web1) else "snapshot"
        with subprocess.Popen(web1.command(["brine", "disk", *KILLED[verb]])) as process:
            time.sleep(chance.uniform(0.1, 1.6))
            kill_at_once(web1, process)
        if number % 2:
            # The guest may have been left standing still: then it has written nothing, either.
            web1.run(["systemctl", "kill", "--signal=KILL", f"brine-instance@{NAME}"])
            wait_for("end", lambda: info(web1, NAME)["status"].startswith("ERROR"))
        web1.run(["brine", "operations", "settle"])
        assert json.loads(web1.run(["brine", "operations", "list", "--json"]).stdout) == []
        there = snapshots(web1)
        assert there in ([], ["killed"]), f"{seed}: {verb}"
        assert len(files(web1)) == (6 if there else 3), f"{seed}: {verb}"
        if number % 2:
            web1.shell(f"brine instance stop {NAME} --force; brine instance start {NAME}")
            wait_ready(web1, NAME)
        assert read(web1) == {text}, f"{seed}: {verb} in round {number}"
        assert qmp(web1, NAME, "query-jobs") == []
