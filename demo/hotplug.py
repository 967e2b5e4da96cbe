"""A NIC and a disk for one of the demo's instances, while it runs and after it has crashed."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

from demo.guest import Guest
from demo.report import Score
from demo.terminal import Terminal
from lab.errors import LabError
from lab.guest_devices import wait_disk, wait_nic
from lab.node import Node

BRIDGE = "br1"
NODE_IP = "203.0.113.1"
GUEST_IP = "203.0.113.2"
IMAGE = "/var/lib/data.raw"
SERIAL = "data"
WRITTEN = "hello"


def plug(terminal: Terminal, name: str) -> Score:
    """Plug a NIC and a disk in, and have the guest use both."""
    node = terminal.node
    node.run(["ip", "link", "add", BRIDGE, "up", "type", "bridge"])
    node.run(["ip", "address", "add", f"{NODE_IP}/24", "dev", BRIDGE])
    node.run(["truncate", "--size=64M", IMAGE])
    terminal.type(f"brine nic add {name} --link {BRIDGE}")
    terminal.type(f"brine disk add {name} --path {IMAGE} --serial {SERIAL}")
    guest = Guest(node, name)
    return _score(
        "devices were plugged in and used",
        partial(_use_nic, node, guest),
        partial(_write_and_read, guest),
    )


def use_again(node: Node, name: str) -> Score:
    """Have the guest, in its next life, use both."""
    guest = Guest(node, name)
    return _score(
        "devices are there after the crash",
        partial(_use_nic, node, guest),
        partial(_read_again, guest),
    )


def _score(what: str, *uses: Callable[[], str]) -> Score:
    right = 0
    for use in uses:
        try:
            print(use(), flush=True)
            right += 1
        except LabError as error:
            print(error, flush=True)
    return Score(right, len(uses), what)


def _use_nic(node: Node, guest: Guest) -> str:
    listed = json.loads(node.run(["brine", "nic", "list", guest.name, "--json"]).stdout)
    # What is plugged in comes after what was there before.
    mac = listed[-1]["mac"]
    name = wait_nic(guest, mac)
    guest.run(f"ip link set {name} up; ip address add {GUEST_IP}/24 dev {name}")
    guest.run(f"ping -c 1 -W 10 {NODE_IP}")
    return f"{guest.name} sees a NIC, {name}, MAC {mac}; from {GUEST_IP} it reaches {NODE_IP}"


def _write_and_read(guest: Guest) -> str:
    disk = wait_disk(guest, SERIAL)
    guest.run(f"echo {WRITTEN} >/dev/{disk.name}; sync")
    what = f"{disk.name}, serial {SERIAL}, {disk.size_bytes // 2**20} MiB"
    return f"{guest.name} sees a disk, {what}; it wrote {_read(guest, disk.name)} there"


def _read_again(guest: Guest) -> str:
    disk = wait_disk(guest, SERIAL)
    return f"{guest.name} sees a disk, {disk.name}; it reads {_read(guest, disk.name)} there"


def _read(guest: Guest, disk: str) -> str:
    said = guest.run(f"head -c {len(WRITTEN)} /dev/{disk}")
    if said != WRITTEN:
        raise LabError(f"{guest.name} read {said!r} from /dev/{disk}, not what it wrote")
    return said
