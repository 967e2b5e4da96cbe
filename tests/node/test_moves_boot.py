"""A node that boots asks first whose its instances are: real reboots beside a real candidate."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lab.network import bridge, give_addresses
from lab.node import Node, boot_node
from lab.repository import publish
from lab.waiting import wait_for
from node.confd_on_node import (
    CONFIG,
    KEY,
    KEY_FILE,
    NODES,
    SERVICE,
    apply,
    install_confd,
    start_confd,
    wait_serial,
)
from node.instance_on_node import IDLE, SMALLEST, info

HELD = "/run/brine/unasked"
CLAIMS = "brine-claims.service"
START_ALL = "brine-instances.service"
_SLOW = """\
[Service]
ExecStartPost=/bin/sh -c 'while [ -e /run/slow ]; do sleep 0.1; done'
"""
_SSCONF = Path("/var/lib/brine/ssconf")
_NETWORK = """\
[Service]
Type=oneshot
ExecStart=/bin/ip address add {address}/24 dev host0
ExecStart=/bin/ip link set host0 up
[Install]
WantedBy=multi-user.target
"""


def declared(**homes: str) -> dict[str, Any]:
    """A cluster whose only candidate is node2, and its instances on these nodes."""
    return {
        "cluster": {"name": "lab.example.com", "master": "node2.example.com"},
        "nodes": {
            f"{name}.example.com": {"primary_ip": ip, "master_candidate": name == "node2"}
            for name, ip in NODES.items()
            if name != "node3"
        },
        "instances": {
            name: {"primary_node": f"{home}.example.com", "admin_state": "down"}
            for name, home in homes.items()
        },
    }


def claims(master: Node) -> dict[str, dict[str, Any]]:
    """The UUID and the serial number of each instance in the configuration, by its name."""
    found = json.loads(master.read(CONFIG))["instances"].values()
    return {one["name"]: {"uuid": one["uuid"], "claim_serial": one["serial_no"]} for one in found}


def note_node(master: Node, node: Node) -> None:
    """Have *node* know which node it is, as defining instances from the configuration does."""
    known = json.loads(master.read(CONFIG))["nodes"].items()
    (uuid,) = [uuid for uuid, one in known if one["name"] == "node1.example.com"]
    machine_id = node.read("/etc/machine-id").strip()
    noted = {"uuid": uuid, "name": "node1.example.com", "machine_id": machine_id}
    node.write("/var/lib/brine/node.json", json.dumps(noted))


def test_a_booted_node_asks_first(release: str, packages: list[Path]) -> None:
    with ExitStack() as stack:
        network = stack.enter_context(bridge())
        master, node = (
            stack.enter_context(
                boot_node(release, name=name, network_bridge=network, keeps_files=name == "node1")
            )
            for name in ("node2", "node1")
        )
        give_addresses(master, f"{NODES['node2']}/24")
        install_confd(master, packages)
        apply(master, declared(moved="node1", stays="node1"))
        start_confd(master)
        publish(node, packages)
        parts = ["brine-instance", "brine-kvmd", "brine-moves"]
        node.run(["apt-get", "install", "--yes", "--quiet=2", *parts], timeout_s=300)
        unit = "/etc/systemd/system/lab-network.service"
        node.write(unit, _NETWORK.format(address=NODES["node1"]))
        node.run(["systemctl", "enable", "--now", "lab-network.service"])
        for file in master.path(_SSCONF).iterdir():
            node.write(_SSCONF / file.name, file.read_text())
        node.write(KEY_FILE, KEY, mode=0o600)
        note_node(master, node)
        for name, claim in claims(master).items():
            # Nothing boots in it: it needs no kernel.
            plain = {key: SMALLEST[key] for key in ("accel", "memory_mib")}
            spec = {"name": name, "node": "node1", "admin_state": "up", **claim, **plain, **IDLE}
            node.run(["brine", "instance", "define", "-"], stdin=json.dumps(spec))
            node.run(["brine", "instance", "start", name])

        # It is moved while the node is down.
        apply(master, declared(moved="node2", stays="node1"))
        wait_serial(master)
        node.reboot(timeout_s=300)
        assert info(node, "stays")["status"] == "running"
        found = info(node, "moved")
        assert (found["status"], found["oper_state"]) == ("elsewhere", "down")
        assert found["node"] == "node2.example.com"
        assert "node2.example.com" in node.run(["brine", "instance", "list"]).stdout
        (record,) = node.journal("--boot=0", "BRINE_EVENT=set-aside")
        assert (record["BRINE_INSTANCE"], record["BRINE_NODE"]) == ("moved", "node2.example.com")
        for command in (
            ["brine", "instance", "start", "moved"],
            ["systemctl", "start", "brine-instance@moved.service"],
        ):
            assert node.run(command, check=False).returncode != 0
        assert info(node, "moved")["oper_state"] == "down"

        # No candidate answers, and none may start without that.
        master.run(["systemctl", "stop", SERVICE])
        node.write("/etc/brine/moves.toml", 'start_unasked = "none"\nask_timeout = 3\n')
        node.write(f"/etc/systemd/system/{START_ALL}.d/slow.conf", _SLOW)
        node.reboot(timeout_s=300)
        found = info(node, "stays")
        assert (found["status"], found["oper_state"]) == ("ERROR_down", "down")
        assert "start_unasked" in found["why"]
        told = node.journal("--boot=0", "BRINE_EVENT=held-back")
        assert "stays" in {one["BRINE_INSTANCE"] for one in told}
        node.run(["systemctl", "is-active", "brine-claims.timer"])
        assert node.run(["brine", "instance", "start", "stays"], check=False).returncode == 1

        # It goes on asking, and starts it once it is answered: also where the start of others is
        # underway, which has passed by what was held back.
        node.write("/run/slow", "")
        node.run(["systemctl", "start", "--no-block", START_ALL])
        wait_for(
            "the start of all to take long",
            lambda: "start-post" in node.run(["systemctl", "show", START_ALL]).stdout,
            timeout_s=60,
        )
        start_confd(master)
        wait_for(
            "the instance to start",
            lambda: info(node, "stays")["status"] == "running",
            timeout_s=300,
        )
        node.path("/run/slow").unlink()
        assert info(node, "moved")["status"] == "elsewhere"
        timer = node.run(["systemctl", "is-active", "brine-claims.timer"], check=False).stdout
        assert timer == "inactive\n"

        # A question that fails after it has held all back is asked again.
        drop_in = "/etc/systemd/system/brine-claims.service.d/fails.conf"
        node.write(drop_in, "[Service]\nExecStartPre=/bin/false\n")
        node.run(["systemctl", "daemon-reload"])
        node.run(["truncate", "--size=0", HELD])
        assert node.run(["systemctl", "start", CLAIMS], check=False).returncode != 0
        node.run(["systemctl", "is-active", "brine-claims.timer"])
        node.run(["rm", drop_in])
        node.run(["systemctl", "daemon-reload"])
        wait_for(
            "the question to be asked again",
            lambda: node.run(["cat", HELD]).stdout == "{}\n",
            timeout_s=300,
        )
