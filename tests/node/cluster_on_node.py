"""A cluster under a Salt master whose nodes can be emptied and rebooted while its guests run."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.fleet import DOMAIN, Fleet, address_of, boot_fleet
from lab.guest_image import KERNEL_OPTIONS, guest_image
from lab.node import Node
from lab.waiting import wait_for
from node.instance_on_node import FOLDER, GUEST, run_in_guest, wait_ready, wait_status

Json = dict[str, Any]

PORT = 7
BOOT_ID = "cat /proc/sys/kernel/random/boot_id"
TALKS = "/run/talks"
_LONG_S = 1200.0

# The node's address is on a bridge, which the guests are on, too.
NETWORK = """\
[Service]
Type=oneshot
ExecStart=/bin/ip link add br0 address {mac} type bridge
ExecStart=/bin/ip link set host0 master br0
ExecStart=/bin/ip address flush dev host0
ExecStart=/bin/ip address add {address}/24 dev br0
ExecStart=/bin/ip link set br0 up
ExecStart=/bin/ip link set host0 up

[Install]
WantedBy=multi-user.target
"""

# Has one connection to each guest, on which the guest says what it hears. A file for each has the
# number of the last word that has come back, or why no more will.
TALK = """\
import os, socket, sys, threading, time

def talk(folder, address, port):
    number = 0
    def note(text):
        with open(f"{folder}/{address}.new", "w") as file:
            file.write(text)
        os.replace(f"{folder}/{address}.new", f"{folder}/{address}")
    try:
        for _ in range(60):  # the guest may not listen yet
            try:
                connection = socket.create_connection((address, port))
                break
            except ConnectionRefusedError:
                time.sleep(1)
        else:
            raise OSError("it refuses each connection")
        with connection:
            heard = connection.makefile("rb")
            while True:
                number += 1
                connection.sendall(b"%d\\n" % number)
                said = heard.readline()
                if said != b"%d\\n" % number:
                    raise OSError(f"{said!r} came back for {number}")
                note(str(number))
                time.sleep(0.1)
    except OSError as error:
        note(f"lost: {error}")

folder, port, *addresses = sys.argv[1:]
os.makedirs(folder)
for address in addresses:
    threading.Thread(target=talk, args=(folder, address, int(port))).start()
"""


def node_id(number: int) -> str:
    """The name of a node in the configuration."""
    return f"node{number}.{DOMAIN}"


def declared(homes: Mapping[str, int]) -> Json:
    """The cluster: three nodes, of which the first is the master.

    :param homes: by instance the number of its node.
    """
    hvparams: Json = {
        "kvm_flag": "disabled",
        "kernel_path": f"{GUEST}/kernel",
        "initrd_path": f"{GUEST}/initramfs",
        "root_path": "",
        "kernel_args": f"console=ttyS0 {KERNEL_OPTIONS}",
        "serial_console": True,
        "cpu_type": "qemu64",
        "security_model": "pool",
        "use_chroot": True,
    }
    cluster = {
        "name": "lab.example.com",
        "master": node_id(1),
        "nicparams": {"mode": "bridged", "link": "br0"},
        "uid_pool": "4000-4099",
        "hvparams": {"kvm": hvparams},
    }
    instances = {
        name: {
            "primary_node": node_id(number),
            "beparams": {"maxmem": 128, "minmem": 128, "vcpus": 1},
            "nics": [{}],
        }
        for name, number in homes.items()
    }
    nodes = {node_id(number): {"primary_ip": f"192.0.2.{number}"} for number in (1, 2, 3)}
    return {"cluster": cluster, "nodes": nodes, "instances": instances}


class Cluster:
    """The nodes, and what is known of the guests before anything is done.

    :param homes: by the names of guests the numbers of their nodes.
    :ivar boot_ids: of the guests.
    """

    def __init__(self, fleet: Fleet, homes: Mapping[str, int]) -> None:
        self.fleet = fleet
        self.master, self.node, self.other = fleet.nodes
        self.homes = {name: fleet.nodes[number - 1] for name, number in homes.items()}
        self.addresses = {name: f"192.0.2.{100 + n}" for n, name in enumerate(homes, 1)}
        self.boot_ids: dict[str, str] = {}

    def brine(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command on the master; it may fail."""
        return self.master.run(["brine", *command], check=False, timeout_s=_LONG_S)

    def told(self, *command: str) -> Any:
        """What such a command, which does not fail, prints for programs."""
        done = self.brine(*command, "--json")
        assert done.returncode == 0, (done.stdout, done.stderr)
        return json.loads(done.stdout)

    def running(self, node: Node) -> list[str]:
        listed = json.loads(node.run(["brine", "instance", "list", "--json"]).stdout)
        return sorted(one["name"] for one in listed if one["status"] == "running")

    def begin_talks(self) -> None:
        """Have a connection to each guest, from the master."""
        for name, node in self.homes.items():
            wait_ready(node, name)
            wired = f"ip address add {self.addresses[name]}/24 dev eth0 && ip link set eth0 up"
            run_in_guest(node, name, f"{wired} && (nc -ll -p {PORT} -e cat >/dev/null 2>&1 &)")
            self.boot_ids[name] = run_in_guest(node, name, BOOT_ID)
        self.master.write("/srv/talk.py", TALK)
        talk = ["python3", "/srv/talk.py", TALKS, str(PORT), *self.addresses.values()]
        self.master.run(["systemd-run", "--unit=talks", *talk])
        self.expect_talks()

    def talks(self) -> dict[str, str]:
        folder = self.master.path(TALKS)
        found = {name: folder / address for name, address in self.addresses.items()}
        return {name: path.read_text() if path.exists() else "0" for name, path in found.items()}

    def expect_talks(self) -> None:
        """Each connection goes on, and has never been another."""
        before = self.talks()

        def all_go_on() -> bool:
            now = self.talks()
            lost = {name: text for name, text in now.items() if not text.isdigit()}
            assert lost == {}
            return all(int(now[name]) > int(before[name]) for name in now)

        wait_for("an answer of all guests", all_go_on, timeout_s=120, interval_s=0.2)

    def expect_guests(self, *nodes: Node) -> dict[str, str]:
        """All guests run on these nodes, each on one, and none was restarted; returns where."""
        at = {name: node for node in nodes for name in self.running(node) if name in self.homes}
        assert at.keys() == self.homes.keys()
        everywhere = [name for node in self.fleet.nodes for name in self.running(node)]
        assert all(everywhere.count(name) == 1 for name in at)
        for name, node in at.items():
            assert run_in_guest(node, name, BOOT_ID) == self.boot_ids[name]
        self.expect_talks()
        return {name: node.name for name, node in at.items()}

    def expect_home(self) -> None:
        """All guests run where they are at home, and none was restarted."""
        at = self.expect_guests(*self.fleet.nodes)
        assert at == {name: node.name for name, node in self.homes.items()}

    def configured(self) -> Json:
        found: Json = self.told("config", "show")
        return found

    def nodes(self) -> list[Json]:
        """The nodes of the configuration."""
        return [*self.configured()["nodes"].values()]

    def drained(self) -> list[str]:
        return [one["name"] for one in self.nodes() if one["drained"]]


@contextmanager
def boot_cluster(
    release: str,
    packages: Sequence[Path],
    homes: Mapping[str, int],
) -> Iterator[Cluster]:
    """Three nodes and their guests; each of these has a connection to the master.

    :param homes: see :class:`Cluster`.
    """
    with boot_fleet(release, packages, count=3, keeps_files=True) as fleet:
        for node in fleet.nodes:
            mac = node.read("/sys/class/net/host0/address").strip()
            unit = NETWORK.format(mac=mac, address=address_of(node))
            node.write("/etc/systemd/system/lab-network.service", unit)
            node.run(["systemctl", "daemon-reload"])
            node.run(["systemctl", "restart", "lab-network.service"])
            node.put(guest_image().folder, GUEST)
        parts = {"moves": {"enabled": True}, "storage": {"directories": [FOLDER]}}
        writer = {"brine": {"config": {"apply": True}, **declared(homes)}}
        fleet.pillar({"brine": parts}, node1=writer)
        fleet.apply("brine", nodes=[fleet.master])
        assert fleet.run("brine.rotate_key")["result"] is True
        told = fleet.run("brine.redistribute", check=False)
        assert told["result"] is True, json.dumps(told, indent=1)
        cluster = Cluster(fleet, homes)
        for name, node in cluster.homes.items():
            wait_status(node, name, "running")
        cluster.begin_talks()
        yield cluster
