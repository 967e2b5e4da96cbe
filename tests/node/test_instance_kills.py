"""Anything of an instance's may be killed at any time, and the next start repairs what that left.
So may commands that define, rename, clone and undefine: the same command again does the rest.

The order of what is done and killed is random, and its seed is told.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from lab.node import Node
from lab.waiting import wait_for
from node.instance_on_node import IDLE, define, info, left_of, node_with_instances, qmp
from node.kvmd_on_node import kvmd_pid

ROUNDS = 10
SETTLED_S = 30
NAME = "web1"

START = ["brine", "instance", "start", NAME]
STOP = ["brine", "instance", "stop", "--force", "--timeout", "1", NAME]
REBOOT = ["brine", "instance", "reboot", "--force", "--timeout", "1", NAME]
UNIT_STOP = ["systemctl", "stop", f"brine-instance@{NAME}"]
ADD = ["brine", "nic", "add", NAME, "--link", "br0"]

VICTIMS: dict[str, list[list[str]]] = {
    "brine.instance.service.run": [START, REBOOT],
    "brine.instance.service.ready": [START, REBOOT],
    f"guest={NAME},": [START, STOP, REBOOT, UNIT_STOP, ADD],
    "brine.instance.shutdown": [UNIT_STOP],
    "brine.instance.service.clear": [STOP, UNIT_STOP, REBOOT],
    f"brine instance start {NAME}": [START],
    "brine instance stop": [STOP],
    "brine instance reboot": [REBOOT],
    f"brine nic add {NAME}": [ADD],
    "brine-kvmd": [START, STOP, REBOOT, ADD],
}
"""The processes to kill, by a part of their command line, and the command meanwhile."""

KILLER = """
import os, signal, sys, time
wanted, delay_s = sys.argv[1], float(sys.argv[2])
deadline = time.monotonic() + 10
while time.monotonic() < deadline:
    for pid in set(filter(str.isdecimal, os.listdir("/proc"))) - {str(os.getpid())}:
        try:
            line = open(f"/proc/{pid}/cmdline", "rb").read().replace(b"\\0", b" ").decode()
            if wanted in line:
                time.sleep(delay_s)
                os.kill(int(pid), signal.SIGKILL)
                sys.exit(0)
        except (FileNotFoundError, ProcessLookupError):
            continue
    time.sleep(0.005)
sys.exit(1)
"""


DEFINITIONS = """
import json, os, random, subprocess, sys, time

rng, wanted = random.Random(int(sys.argv[1])), int(sys.argv[2])
ran = killed = 0
disk, copy = "/srv/kills/a", "/srv/kills/c-a"
spec = json.dumps({"name": "a", "disks": [{"path": disk, "format": "raw"}]}).encode()
os.mkdir("/srv/kills")
with open(disk, "wb") as file:
    file.write(bytes(1 << 20))

def brine(*line, stdin=b"", kills=False):
    global ran, killed
    ran += 1
    command = subprocess.Popen(
        ["brine", "instance", *line],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )
    if kills:
        time.sleep(rng.uniform(0, usual_s))
        command.kill()
    said = command.communicate(stdin)[0].decode()
    killed += command.returncode == -9
    return command.returncode, said

def names():
    status, said = brine("list", "--json")
    assert status == 0, said
    return sorted(one["name"] for one in json.loads(said))

def until_done(before, after, *line, stdin=b""):
    brine(*line, stdin=stdin, kills=True)
    assert (found := names()) in (before, after), (line, found)
    if found == before:
        assert (done := brine(*line, stdin=stdin))[0] == 0, (line, done)
        assert (found := names()) == after, (line, found)

usual_s = 1.0
began = time.monotonic()
assert brine("define", "-", stdin=spec)[0] == 0
usual_s = 1.3 * (time.monotonic() - began)
assert brine("undefine", "a")[0] == 0
while ran < wanted:
    until_done([], ["a"], "define", "-", stdin=spec)
    until_done(["a"], ["b"], "rename", "a", "b")
    assert os.listdir("/srv/kills") == ["a"]
    until_done(["b"], ["b", "c"], "clone", "b", "c", "--disk", f"{disk}={copy}")
    assert sorted(os.listdir("/srv/kills")) == ["a", "c-a"]
    with open(copy, "rb") as file:
        assert file.read() == bytes(1 << 20)
    os.unlink(copy)
    until_done(["b", "c"], ["b"], "undefine", "c")
    until_done(["b"], [], "undefine", "b")
for folder in ("instances", "runtime", "uefi"):
    folder = f"/var/lib/brine/{folder}"
    assert not os.path.isdir(folder) or os.listdir(folder) == [], os.listdir(folder)
print(json.dumps({"ran": ran, "killed": killed}))
"""


@pytest.fixture(scope="module")
def node(release: str, packages: list[Path]) -> Iterator[Node]:
    with node_with_instances(release, packages) as node:
        node.write("/etc/brine/instance.toml", 'uid_pool = "4000-4009"\n')
        node.write("/srv/killer.py", KILLER)
        yield node


@pytest.mark.parametrize("count", [30, pytest.param(700, marks=pytest.mark.long)])
def test_a_definition_that_is_killed_is_made_or_not_and_made_by_the_next(
    node: Node, count: int
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    said = node.run(
        ["python3", "-c", DEFINITIONS, str(seed), str(count)], timeout_s=60 * count
    ).stdout
    told = json.loads(said.splitlines()[-1])
    print(told)
    node.shell("rm -r /srv/kills")
    assert told["killed"] >= told["ran"] / 10, "hardly anything was killed in time"


def test_whatever_is_killed_a_state_is_named_and_a_start_repairs_it(node: Node) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    define(node, NAME, security_model="pool", nics=[{"link": "br0"}], **IDLE)
    victims = [*VICTIMS] * (ROUNDS // len(VICTIMS))
    rng.shuffle(victims)
    kills = 0
    for victim in victims:
        action = rng.choice(VICTIMS[victim])
        told = f"seed {seed}: {' '.join(action)}, {victim} killed"
        print(told)
        node.run(STOP if action == START else START)
        if action == START:
            assert left_of(node, NAME) == {}, told
        # Early ones above all: many of these programs live for less than a tenth of a second.
        with killing(node, victim, 0.5 * rng.random() ** 2) as killer:
            node.run(action, check=False)
        kills += killer.returncode == 0
        wait_for(f"a state after {told}", lambda: settled(node), timeout_s=SETTLED_S)
        node.run(START)
        assert info(node, NAME)["status"] == "running", told
        assert qmp(node, NAME, "query-status")["status"] == "prelaunch", told
        nics = json.loads(node.run(["brine", "nic", "list", NAME, "--json"]).stdout)
        assert len(nics) >= 1, told
    assert kills >= ROUNDS / 3, "hardly anything was killed in time"
    node.run(STOP)
    assert left_of(node, NAME) == {}
    assert info(node, NAME)["status"] == "ADMIN_down"
    for folder in ("instances", "runtime"):
        files = node.path(f"/var/lib/brine/{folder}").iterdir()
        assert [file.name for file in files] == [f"{NAME}.json"]
    wait_for("kvmd to run", lambda: kvmd_pid(node) != "0")
    kept = ["systemctl", "show", "--property=NFileDescriptorStore", "--value", "brine-kvmd"]
    wait_for("kvmd to let go of all", lambda: node.run(kept).stdout.strip() == "0")


def settled(node: Node) -> bool:
    """Whether `list` names a state that lasts."""
    listed = json.loads(node.run(["brine", "instance", "list", "--json"]).stdout)
    (status,) = [one["status"] for one in listed if one["name"] == NAME]
    lasting = {"running", "ERROR_up", "ERROR_down", "ADMIN_down"}
    assert status in lasting | {"starting", "stopping"}
    return status not in {"starting", "stopping"}


@contextmanager
def killing(node: Node, victim: str, delay_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """Kill the first process with such a command line, some time after it is seen."""
    command = node.command(["python3", "/srv/killer.py", victim, f"{delay_s:.3f}"])
    with ExitStack() as stack:
        killer = stack.enter_context(subprocess.Popen(command))
        stack.callback(killer.wait, 30)
        yield killer
