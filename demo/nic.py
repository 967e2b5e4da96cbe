"""A NIC that one of the demo's instances gets while it runs, and has after a crash, too."""

from __future__ import annotations

import json

from demo.cluster import SECOND_BRIDGE_IP
from demo.guest import Guest
from demo.report import Score
from lab.errors import LabError
from lab.guest_devices import wait_nic
from lab.node import Node

_GUEST_IP = "203.0.113.2"


def use(node: Node, name: str, when: str) -> Score:
    """Have the guest use the last NIC of an instance."""
    try:
        listed = json.loads(node.run(["brine", "nic", "list", name, "--json"]).stdout)
        mac = listed[-1]["mac"]
        guest = Guest(node, name)
        nic = wait_nic(guest, mac)
        guest.run(f"ip link set {nic} up; ip address add {_GUEST_IP}/24 dev {nic}")
        guest.run(f"ping -c 1 -W 10 {SECOND_BRIDGE_IP}")
        print(f"{name} sees a NIC, {nic}, MAC {mac}; it reaches {SECOND_BRIDGE_IP}", flush=True)
        return Score(1, 1, f"NIC is used {when}")
    except LabError as error:
        print(error, flush=True)
        return Score(0, 1, f"NIC is used {when}")
