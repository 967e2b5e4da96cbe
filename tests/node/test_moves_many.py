"""A guest that moves there and back many times, between Debian 12 and 13: nothing of it is lost.

BRINE_MOVES is how many times, if 50 are too few or too many.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lab.guest_devices import wait_nic
from lab.move_history import (
    EventKind,
    HistoryEvent,
    faults_of,
    history_of_journal,
    intervals,
)
from lab.network import bridge, give_addresses
from lab.node import Node, boot_node
from lab.waiting import wait_for
from node.instance_on_node import SMALLEST, info, run_in_guest, start
from node.moves_on_node import NAME, UNIT, UUID, Nodes, boot_pair

PEER = "10.29.0.9"
PEER_OF_ROUTED = "10.99.0.1"
BRIDGED, ROUTED = "10.29.0.50", "10.77.0.77"
SECTOR = 512
DISKS = {"data": 32, "hot": 8}
"""The disks, and their sizes in MiB; the second is plugged in."""

# Each write goes to a sector of its own, with its number and a checksum. Once it is on the disk,
# the guest notes the number in its memory.
_TO_DISK = f"dd of=/dev/$1 bs={SECTOR} seek=$((i % n)) conv=notrunc,fsync 2>/dev/null"
_WRITER = (
    "n=$(cat /sys/class/block/$1/size); while i=$((i + 1)); do"
    f' printf "%-{SECTOR}s" "$i $(echo $i | sha256sum)" | {_TO_DISK};'
    " echo $i >/w.$1; mv /w.$1 /written.$1; done"
)
_COUNTER = "while i=$((i + 1)); do echo $i >/c; mv /c /count; usleep 20000; done"
_PEER_FILE = "/run/peer.jsonl"
_PEER_TALKS = """\
import json, socket, sys, threading, time

answers, gaps, faults = {}, {}, {}

def talk(address):
    try:
        with socket.create_connection((address, 7), timeout=60) as line:
            line.settimeout(600)
            said = line.makefile("rb")
            for number in range(1, 1 << 60):
                begun = time.monotonic()
                line.sendall(b"%d\\n" % number)
                heard = said.readline()
                if heard != b"%d\\n" % number:
                    raise ValueError(f"{heard!r} and not {number}")
                gaps[address] = max(gaps.get(address, 0), time.monotonic() - begun)
                answers[address] = number
                time.sleep(0.02)
    except Exception as error:
        faults[address] = repr(error)

for address in sys.argv[2:]:
    threading.Thread(target=talk, args=[address], daemon=True).start()
with open(sys.argv[1], "w") as file:
    while True:
        time.sleep(0.5)
        longest, gaps = gaps, {}
        told = {"time": time.time(), "answers": answers, "gaps": longest, "faults": faults}
        print(json.dumps(told), file=file, flush=True)
"""


class Life(NamedTuple):
    """What a guest has done since its boot, by its own memory."""

    boot_id: str
    counted: int
    written: dict[str, int]


class Guest:
    """The guest, wherever it is."""

    name = NAME

    def __init__(self, node: Node) -> None:
        self.node = node

    def run(self, command: str) -> str:
        return run_in_guest(self.node, NAME, command)

    def begin(self, script: str, argument: str = "") -> None:
        """Begin a script that goes on."""
        name = f"/begun.{argument}"
        self.run(f"echo '{script}' >{name}; sh {name} {argument} >/dev/null 2>&1 & echo $! >>/pids")

    def has_begun(self, disks: dict[str, str]) -> bool:
        """Whether it counts, and has written to all disks."""
        return self.run("ls / | grep -c -x -e count -e written.v.. || true").strip() == str(
            1 + len(disks)
        )

    def life(self, disks: dict[str, str]) -> Life:
        files = " ".join(f"/written.{device}" for device in disks.values())
        said = self.run(f"cat /proc/sys/kernel/random/boot_id /count {files}").split()
        return Life(said[0], int(said[1]), dict(zip(disks, map(int, said[2:]), strict=True)))


@pytest.fixture
def network() -> Iterator[str]:
    with bridge() as found:
        yield found


@pytest.fixture
def nodes(packages: list[Path], network: str) -> Iterator[Nodes]:
    with boot_pair(["bookworm", "trixie"], packages, network) as found:
        for node in found.by_name.values():
            node.shell(f"ip route add 10.77.0.0/24 dev br0; ip route add {PEER_OF_ROUTED} dev br0")
            node.write("/etc/brine/kvmd.toml", 'log_level = "debug"\n')
        yield found


@pytest.fixture
def peer(network: str) -> Iterator[Node]:
    """A node that talks with the guest over TCP."""
    with boot_node("trixie", name="peer", network_bridge=network) as node:
        give_addresses(node, f"{PEER}/24", f"{PEER_OF_ROUTED}/32")
        node.shell(f"ip route add 10.77.0.0/24 dev host0 src {PEER_OF_ROUTED}")
        yield node


def heard(peer: Node) -> dict[str, Any]:
    """What the peer has told last."""
    file = peer.path(_PEER_FILE)
    lines = file.read_text().splitlines() if file.exists() else []
    found: dict[str, Any] = (
        json.loads(lines[-1]) if lines else {"time": 0.0, "answers": {}, "faults": {}}
    )
    return found


def all_answer_anew(peer: Node) -> None:
    """Both connections are whole, and the guest answers on both from now on."""
    begun, addresses = time.time(), (BRIDGED, ROUTED)
    first: dict[str, int] = {}

    def more() -> bool:
        now = heard(peer)
        assert not now["faults"], now
        if now["time"] > begun and not first:
            first.update({one: now["answers"].get(one, 0) for one in addresses})
        return bool(first) and all(now["answers"].get(one, 0) > first[one] for one in addresses)

    wait_for("answers of the guest", more, timeout_s=120, interval_s=0.2)


def goes_on(guest: Guest, devices: dict[str, str]) -> Life:
    """How far the guest is, when it has counted and written to all disks from now on."""
    first = guest.life(devices)

    def more() -> Life | None:
        now = guest.life(devices)
        has_written = all(now.written[disk] > first.written[disk] for disk in devices)
        return now if now.counted > first.counted and has_written else None

    return wait_for("the guest to go on", more, timeout_s=120, interval_s=0.2)


@pytest.mark.long
def test_nothing_of_it_is_lost(nodes: Nodes, peer: Node) -> None:
    """A counter, two disks with writes and checksums, and two open TCP connections; a disk and the
    NIC with routes are plugged in."""
    moves = int(os.environ.get("BRINE_MOVES", "50"))
    guest = Guest(nodes["n1"])
    devices = boot(guest)
    guest.begin(_COUNTER)
    for device in devices.values():
        guest.begin(_WRITER, device)
    peer.write("/run/talks.py", _PEER_TALKS)
    talks = ["python3", "/run/talks.py", _PEER_FILE, BRIDGED, ROUTED]
    peer.run(["systemd-run", "--quiet", "--unit=talks", *talks])
    all_answer_anew(peer)

    wait_for("writes", lambda: guest.has_begun(devices), timeout_s=60)
    life = guest.life(devices)
    for number, (here, there) in zip(range(moves), itertools.cycle([("n1", "n2"), ("n2", "n1")])):
        record = nodes.move(here, there, number + 2)
        states = [str(step.answer["state"]) for step in record.steps]
        assert {*states} == {"done"}, (number, record.steps, nodes.journals())
        guest.node = nodes[there]
        all_answer_anew(peer)
        now = goes_on(guest, devices)
        assert now.boot_id == life.boot_id
        assert now.counted > life.counted
        life = now
        assert info(nodes[there], NAME)["status"] == "running"
        left = nodes[here].run(["find", UNIT, "-name", "*.raw"]).stdout
        assert left + nodes[here].run(["brine", "instance", "list", "--json"]).stdout == "[]\n"

    life = ended(guest, devices)
    history = [*written_and_found(guest.node, life)]
    for name, node in nodes.by_name.items():
        history += history_of_journal(name, node.journal(f"BRINE_INSTANCE={NAME}"))
    assert [one.node for one in intervals(history)] == [
        name for _, name in zip(range(moves + 1), itertools.cycle(nodes.by_name))
    ]
    assert not faults_of(history)
    assert not heard(peer)["faults"]
    tell_figures(nodes, peer, life)


def boot(guest: Guest) -> dict[str, str]:
    """Start the guest and plug a disk and a NIC into it; returns the devices of its disks."""
    node = guest.node
    spec = {
        **SMALLEST,
        "name": NAME,
        "uuid": UUID,
        "node": "n1",
        "claim_serial": 1,
        "disks": [{"name": "data", "size_mib": DISKS["data"], "unit": UNIT}],
        "nics": [{"mode": "bridged", "link": "br0"}],
        "cpu": "qemu64",
        "admin_state": "up",
        "security_model": "pool",
        "chroot": True,
    }
    node.run(["brine", "instance", "define", "-"], stdin=json.dumps(spec))
    start(node, NAME)
    node.run(["brine", "nic", "add", NAME, "--mode", "routed", "--ip", ROUTED])
    hot = ["--size", f"{DISKS['hot']}M", "--unit", UNIT, "--name", "hot"]
    node.run(["brine", "disk", "add", NAME, *hot])
    macs = [
        one["mac"] for one in json.loads(node.run(["brine", "nic", "list", NAME, "--json"]).stdout)
    ]
    first, second = (wait_nic(guest, mac) for mac in macs)
    guest.run(
        f"ip link set {first} up; ip address add {BRIDGED}/24 dev {first};"
        f"ip link set {second} up; ip address add {ROUTED}/32 dev {second};"
        f"ip route add {PEER_OF_ROUTED} dev {second}; (nc -ll -p 7 -e cat) >/dev/null 2>&1 &"
    )
    devices = {"data": "vda", "hot": "vdb"}
    wait_for("the disk", lambda: "vdb" in guest.run("ls /sys/block"), timeout_s=60)
    return devices


def ended(guest: Guest, devices: dict[str, str]) -> Life:
    """Have the guest write nothing more, and end it; returns how far it has come."""
    guest.run("kill $(cat /pids); sleep 1; sync")
    life = guest.life(devices)
    guest.node.run(["brine", "instance", "stop", "--force", NAME])
    return life


def written_and_found(node: Node, life: Life) -> Iterator[HistoryEvent]:
    """What the guest has noted as written and not written over since, and what its disks have."""
    for disk in info(node, NAME)["spec"]["disks"]:
        name, data = disk["name"], node.path(disk["path"]).read_bytes()
        sectors, last = len(data) // SECTOR, life.written[disk["name"]]
        assert last > 0
        # One more may be written, and not be noted yet: it is where the oldest was.
        for number in range(max(1, last - sectors + 2), last + 1):
            yield HistoryEvent(0.0, EventKind.WRITE, NAME, detail=f"{name}/{number}")
        for start_of in range(0, len(data), SECTOR):
            words = data[start_of : start_of + SECTOR].split()
            checksum = hashlib.sha256(words[0] + b"\n").hexdigest()
            if words[1:2] == [checksum.encode()]:
                yield HistoryEvent(0.0, EventKind.FOUND, NAME, detail=f"{name}/{words[0].decode()}")


def tell_figures(nodes: Nodes, peer: Node, life: Life) -> None:
    """Show what was measured; `pytest -s` shows it."""
    downtimes: list[int] = []
    for node in nodes.by_name.values():
        records = node.journal("BRINE_EVENT=moved-away")
        downtimes += [int(one["BRINE_DOWNTIME_MS"]) for one in records]
    downtimes.sort()
    lines = [json.loads(line) for line in peer.read(_PEER_FILE).splitlines()]
    print(f"\n{len(downtimes)} moves, {life.counted} counted, {life.written} written")
    middle = downtimes[len(downtimes) // 2]
    print(f"downtime {downtimes[0]}, {middle}, {downtimes[-1]} ms (least, median, most)")
    for address in (BRIDGED, ROUTED):
        longest = max(line["gaps"].get(address, 0) for line in lines)
        answers = lines[-1]["answers"][address]
        print(f"{address}: {answers} answers over one connection, {longest:.2f} s the longest wait")
