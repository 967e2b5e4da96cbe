"""A NIC and a disk for one of the demo's guests, while it runs."""

from __future__ import annotations

import json
from dataclasses import dataclass

from demo.cluster import INSTANCE_IPS
from lab.errors import LabError
from lab.guest import Guest
from lab.guest_devices import wait_disk, wait_nic
from lab.node import Node

BRIDGE = "br0"
BRIDGE_IP = "198.51.100.1"
IMAGE = "/var/lib/data.raw"
SERIAL = "data"


@dataclass(frozen=True)
class Plugged:
    """What was done, as lines of a terminal, and what the guest makes of it."""

    done: str
    seen: list[str]
    trouble: str = ""


def plug(node: Node, guest: Guest) -> Plugged:
    """Plug a NIC and a disk in, and have the guest use both."""
    node.run(["ip", "link", "add", BRIDGE, "up", "type", "bridge"])
    node.run(["ip", "address", "add", f"{BRIDGE_IP}/24", "dev", BRIDGE])
    node.run(["truncate", "--size=64M", IMAGE])
    socket = f"/run/brine/ctrl/{guest.name}.qmp"
    add_nic = ["brine", "nic", "add", "--qmp", socket, "--link", BRIDGE]
    add_disk = ["brine", "disk", "add", "--qmp", socket, "--path", IMAGE, "--serial", SERIAL]
    done = ""
    seen: list[str] = []
    try:
        for command in (add_nic, add_disk):
            done += f"# {' '.join(command)}\n{node.run(command).stdout}"
        seen.append(_use_nic(node, guest, socket))
        seen.append(_use_disk(guest))
    except LabError as error:
        return Plugged(done, seen, str(error))
    return Plugged(done, seen)


def _use_nic(node: Node, guest: Guest, socket: str) -> str:
    listed = json.loads(node.run(["brine", "nic", "list", "--qmp", socket, "--json"]).stdout)
    mac = listed[0]["mac"]
    name, ip = wait_nic(guest, mac), INSTANCE_IPS[guest.name]
    guest.run(f"ip link set {name} up; ip address add {ip}/24 dev {name}")
    guest.run(f"ping -c 1 -W 10 {BRIDGE_IP}")
    return f"{guest.name} sees a NIC, {name}, MAC {mac}; from {ip} it reaches {BRIDGE_IP}"


def _use_disk(guest: Guest) -> str:
    disk = wait_disk(guest, SERIAL)
    guest.run(f"echo hello >/dev/{disk.name}; sync")
    said = guest.run(f"head -c 5 /dev/{disk.name}")
    if said != "hello":
        raise LabError(f"{guest.name} read {said!r} from /dev/{disk.name}, not what it wrote")
    what = f"{disk.name}, serial {SERIAL}, {disk.size_bytes // 2**20} MiB"
    return f"{guest.name} sees a disk, {what}; what it writes there it reads"
