"""A guest that moves between two real nodes, by the steps that the master asks for."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from brine.cluster.moves import MoveStep
from brine.common.operation import Operation
from lab.network import bridge
from lab.node import Node
from lab.waiting import wait_for
from node.instance_on_node import SMALLEST, info, run_in_guest, start, wait_ready
from node.moves_on_node import KEY, NAME, UNIT, UUID, Nodes, boot_pair

ROUTED = "10.29.0.77"
PASSWORD = "5ecret-w"
PASSWORD_FILE = "/etc/brine/vnc/web1"
CONSOLE_LOG = f"/var/log/brine/console/{NAME}.log"
KILLS = 200

# The guest numbers its writes, and then notes in its memory that the number is on the disk.
_WRITE = "dd of=/dev/vda bs=512 seek=$((i % 2000)) conv=notrunc,fsync 2>/dev/null"
_WRITES = f"while i=$((i + 1)); do printf %512s $i | {_WRITE}; echo $i >/w && mv /w /written; done"
_BEGIN = "sh /writer >/dev/null 2>&1 & echo $! >/writer.pid"
_COUNT = f"echo $i >/written; echo '{_WRITES}' >/writer; {_BEGIN}"
COUNT = f"export i=0; {_COUNT}"


@pytest.fixture(scope="module")
def nodes(release: str, packages: list[Path]) -> Iterator[Nodes]:
    with bridge() as network, boot_pair([release, "trixie"], packages, network) as found:
        yield found


def states(record: Operation) -> list[tuple[str, str]]:
    return [(step.name, str(step.answer["state"])) for step in record.steps]


def written(node: Node) -> int:
    return int(run_in_guest(node, NAME, "cat /written"))


def check_on_disk(node: Node, number: int) -> None:
    """A write that was acknowledged, or a later one in its place, is on the guest's disk."""
    sector = f"dd if=/dev/vda bs=512 skip=$(({number} % 2000)) count=1 2>/dev/null"
    found = int(run_in_guest(node, NAME, sector))
    assert found >= number, "an acknowledged write is lost"
    assert (found - number) % 2000 == 0


def test_a_guest_that_runs_goes_on_elsewhere(nodes: Nodes) -> None:
    n1, n2 = nodes["n1"], nodes["n2"]
    spec = {
        **SMALLEST,
        "name": NAME,
        "uuid": UUID,
        "node": "n1",
        "claim_serial": 1,
        "disks": [{"name": "data", "size_mib": 32, "unit": UNIT}],
        "nics": [{"mode": "bridged", "link": "br0"}],
        "cpu": "qemu64",
        "admin_state": "up",
        "security_model": "pool",
        "chroot": True,
        "vnc_bind": "127.0.0.1",
        "vnc_port": 5977,
        "vnc_password_file": PASSWORD_FILE,
    }
    n1.path(PASSWORD_FILE).parent.mkdir(mode=0o700)
    n1.write(PASSWORD_FILE, f"{PASSWORD}\n", mode=0o600)
    n1.run(["brine", "instance", "define", "-"], stdin=json.dumps(spec))
    start(n1, NAME)
    run_in_guest(n1, NAME, COUNT)
    wait_for("writes", lambda: written(n1) > 3, timeout_s=60)
    logged = next(line for line in n1.read(CONSOLE_LOG).splitlines() if line)

    record = nodes.move("n1", "n2", 2)
    assert {state for _, state in states(record)} == {"done"}, (record.steps, nodes.journals())
    before = written(n2)
    wait_for("further writes", lambda: written(n2) > before, timeout_s=60)

    # What it has said, and its password, have come along, and not by the master.
    assert n2.read(PASSWORD_FILE) == f"{PASSWORD}\n"
    assert logged in n2.read(CONSOLE_LOG)
    carried = json.dumps([[step.facts, step.answer] for step in record.steps])
    assert PASSWORD not in carried
    assert '"key"' not in carried
    assert KEY.strip() not in carried

    # All that was acknowledged is on the disk there.
    check_on_disk(n2, written(n2))

    found = json.loads(n2.run(["brine", "instance", "info", "--json", NAME]).stdout)
    assert (found["status"], found["spec"]["node"], found["spec"]["claim_serial"]) == (
        "running",
        "n2",
        2,
    )
    # The other one has nothing left but the knowledge of where it is.
    (claim,) = json.loads(n1.run(["brine", "node", "claims", "--json"]).stdout)
    assert (claim["name"], claim["node"], claim["serial"]) == (NAME, "n2", 2)
    assert n1.run(["find", UNIT, "-name", "*.raw"]).stdout == ""
    said = n1.run(["brine", "instance", "info", NAME], check=False)
    assert said.returncode == 1
    assert "moved to n2" in said.stderr
    (told,) = n1.journal("BRINE_EVENT=moved-away")
    assert (told["BRINE_INSTANCE"], told["BRINE_NODE"]) == (NAME, "n2")
    assert int(told["BRINE_DOWNTIME_MS"]) > 0
    counted = json.loads(n1.run(["brine", "move", "status", "--json"]).stdout)
    assert counted["downtime"] == {"count": 1, "milliseconds": int(told["BRINE_DOWNTIME_MS"])}
    assert counted["out"] == {"done": 1, "failed": 0}
    counted = json.loads(n2.run(["brine", "move", "status", "--json"]).stdout)
    assert counted["in"] == {"done": 1, "failed": 0}
    (verdict,) = n1.journal("BRINE_EVENT=verdict")
    assert (verdict["BRINE_VERDICT"], verdict["BRINE_CAUSE"]) == ("admin", "moved to n2")
    for node in (n1, n2):
        assert json.loads(node.run(["brine", "operations", "list", "--json"]).stdout) == []
        assert json.loads(node.run(["brine", "move", "list", "--json"]).stdout) == []

    # And back, stopped, moved and started: what it has written comes along.
    n2.run(["brine", "instance", "info", NAME])
    run_in_guest(n2, NAME, "kill $(cat /writer.pid); sync; sha256sum </dev/vda >/sum")
    checksum = run_in_guest(n2, NAME, "cat /sum")
    n2.run(["brine", "disk", "snapshot", NAME, "--name", "before"])
    run_in_guest(n2, NAME, "echo since | dd of=/dev/vda conv=notrunc,fsync 2>/dev/null")
    refused = n2.run(["brine", "move", "offer", NAME], check=False)
    assert refused.returncode == 1
    assert "disk data has snapshots: before" in refused.stderr
    assert "--cold" in refused.stderr
    record = nodes.move("n2", "n1", 3, cold=True)
    assert {state for _, state in states(record)} == {"done"}, (record.steps, nodes.journals())
    assert MoveStep.COPY in [name for name, _ in states(record)]
    wait_ready(n1, NAME)
    assert run_in_guest(n1, NAME, "head -c 5 /dev/vda") == "since"
    assert n2.run(["find", UNIT, "-name", "*.raw", "-o", "-name", "*.qcow2"]).stdout == ""
    (claim,) = json.loads(n2.run(["brine", "node", "claims", "--json"]).stdout)
    assert (claim["node"], claim["serial"]) == ("n1", 3)
    assert json.loads(n1.run(["brine", "node", "claims", "--json"]).stdout) == []

    # With its snapshot, to which it goes back.
    (snapshot,) = json.loads(n1.run(["brine", "disk", "snapshot", NAME, "--list", "--json"]).stdout)
    assert snapshot["snapshot"] == "before"
    n1.run(["brine", "disk", "rollback", NAME, "before", "--force-stop"])
    start(n1, NAME)
    assert run_in_guest(n1, NAME, "sha256sum </dev/vda") == checksum
    n1.run(["brine", "disk", "snapshot", NAME, "--remove", "before"])
    assert run_in_guest(n1, NAME, "sha256sum </dev/vda") == checksum


def listed(node: Node, noun: str, *words: str) -> Any:
    return json.loads(node.run(["brine", noun, "list", *words, "--json"]).stdout)


def declare_again(node: Node) -> dict[str, Any]:
    """What is done by a program that defines the instance without what was added by hand."""
    spec = info(node, NAME)["spec"]
    for key in ("disks", "nics"):
        spec[key] = [one for one in spec[key] if not one["by_hand"]]
    define = ["brine", "instance", "define", "-", "--live", "--keep-user-state", "--json"]
    told = json.loads(node.run(define, stdin=json.dumps(spec)).stdout)
    return {key: told[key] for key in ("changed", "attached", "detached")}


def runs_alone(node: Node, other: Node) -> None:
    """The guest runs on one node, goes on, and the other has nothing of it."""
    assert info(node, NAME)["status"] == "running"
    before = written(node)
    wait_for("further writes", lambda: written(node) > before, timeout_s=60)
    assert listed(other, "instance") == []
    files = other.run(["find", UNIT, "-name", "*.raw", "-o", "-name", "*.qcow2"]).stdout
    assert files + other.shell("ls /run/brine/empty") == ""
    for one in (node, other):
        assert listed(one, "operations") == []


def test_all_that_it_has_comes_along(nodes: Nodes) -> None:
    """An image, a routed NIC, and what was plugged in, or out, since its start."""
    n1, n2 = nodes["n1"], nodes["n2"]
    run_in_guest(n1, NAME, COUNT)
    nic = ["--mode", "routed", "--ip", ROUTED, "--ip", "2001:db8::77"]
    n1.run(["brine", "nic", "add", NAME, *nic])
    n1.run(["brine", "nic", "add", NAME, "--link", "br1"])
    hot = ["--size", "8M", "--unit", UNIT, "--name", "hot", "--format", "qcow2"]
    n1.run(["brine", "disk", "add", NAME, *hot])
    record = nodes.move("n1", "n2", 4)
    assert {state for _, state in states(record)} == {"done"}, (record.steps, nodes.journals())
    runs_alone(n2, n1)
    shown = f"ip route show {ROUTED}; ip neigh show proxy"
    assert f"{ROUTED} dev" in n2.shell(shown)
    assert ROUTED not in n1.shell(shown)
    assert "vdb" in run_in_guest(n2, NAME, "ls /sys/block")

    # What was added by hand stays where it is, and what is taken out by hand does not come back.
    assert declare_again(n2) == {"changed": False, "attached": [], "detached": []}
    assert [one["by_hand"] for one in listed(n2, "nic", NAME)] == [False, True, True]
    gone = next(one for one in listed(n2, "nic", NAME) if one["link"] == "br1")
    n2.run(["brine", "nic", "remove", NAME, gone["mac"]])
    assert declare_again(n2) == {"changed": True, "attached": [], "detached": []}
    n2.run(["brine", "nic", "add", NAME, "--link", "br1"])
    n2.run(["brine", "disk", "remove", NAME, "hot", "--delete"])
    record = nodes.move("n2", "n1", 5)
    assert {state for _, state in states(record)} == {"done"}, (record.steps, nodes.journals())
    runs_alone(n1, n2)
    assert len(info(n1, NAME)["spec"]["disks"]) == 1
    assert declare_again(n1) == {"changed": False, "attached": [], "detached": []}
    assert len(listed(n1, "nic", NAME)) == 3


def test_whatever_is_killed_it_runs_on_one_node(nodes: Nodes) -> None:
    n1, n2 = nodes["n1"], nodes["n2"]
    unit = f"brine-instance@{NAME}.service"

    def kill_what_waits() -> None:
        n2.run(["systemctl", "kill", "--signal=KILL", unit], check=False)
        # And no start makes anything else there.
        n2.run(["systemctl", "start", unit], check=False)
        assert n2.run(["brine", "instance", "start", NAME], check=False).returncode != 0

    nodes.at_poll = kill_what_waits
    nodes.move("n1", "n2", 6)
    runs_alone(n1, n2)

    # The process that moves it, on both nodes in turn, after longer and longer pauses: a slow
    # machine gets through the last ones.
    turns = itertools.cycle((n1, n2))
    command = ["systemctl", "kill", "--signal=KILL", f"brine-move@{NAME}.service"]
    polls, kills = itertools.count(), {count * (count + 1) // 2 for count in range(40)}

    def kill_what_moves() -> None:
        if next(polls) in kills:
            next(turns).run(command, check=False)

    nodes.at_poll = kill_what_moves
    record = nodes.move("n1", "n2", 7)
    nodes.at_poll = lambda: None
    has_moved = MoveStep.CANCEL not in [name for name, _ in states(record)]
    here, there = (n2, n1) if has_moved else (n1, n2)
    for node in (n1, n2):
        wait_for("the end", lambda node=node: not listed(node, "move"), timeout_s=60)  # type: ignore[misc]
    runs_alone(here, there)


@pytest.mark.long
def test_two_hundred_kills_leave_one_guest_with_all_its_writes(nodes: Nodes) -> None:
    """Of the processes that move it, on both nodes, and of the QEMU that waits for it or has just
    got it, at any time of many moves. One that was started anew for that has lost its memory, and
    no write."""
    rng, seed = random.Random(), time.time_ns()
    rng.seed(seed)
    here, there = ("n1", "n2") if listed(nodes["n1"], "instance") else ("n2", "n1")
    serial = int(info(nodes[here], NAME)["spec"]["claim_serial"])
    killed = moves = number = 0

    def kill() -> None:
        nonlocal killed
        if rng.random() < 0.4:
            return
        time.sleep(rng.random() * 0.5)
        is_qemu = rng.random() < 0.2
        node = there if is_qemu else rng.choice((here, there))
        unit = f"brine-{'instance' if is_qemu else 'move'}@{NAME}.service"
        command = ["systemctl", "kill", "--signal=KILL", unit]
        killed += nodes[node].run(command, check=False).returncode == 0

    while killed < KILLS:
        serial, moves = serial + 1, moves + 1
        nodes.at_poll = kill
        nodes.move(here, there, serial)
        nodes.at_poll = lambda: None
        for node in nodes.by_name.values():
            wait_for("the end", lambda node=node: not listed(node, "move"), timeout_s=60)  # type: ignore[misc]
        (holder,) = [name for name, node in nodes.by_name.items() if listed(node, "instance")]
        here, there = holder, here if holder == there else there
        node, what = nodes[here], (seed, moves, killed, nodes.journals())
        if info(node, NAME)["status"] != "running":  # it was killed when it ran already
            start(node, NAME)
        if "no" in run_in_guest(node, NAME, "cat /written || echo no"):
            wait_ready(node, NAME)
            run_in_guest(node, NAME, f"export i={number + 2000}; {_COUNT}")
        runs_alone(node, nodes[there])
        check_on_disk(node, number)
        number = written(node)
        assert info(node, NAME)["spec"]["claim_serial"] <= serial, what
