"""Salt's state of bridges, on a node whose commands are replaced."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from unit.salt_loader import load

UPLINK = {"ifname": "eth0", "address": "52:54:00:00:00:01"}
LEASE = {"local": "192.0.2.7", "prefixlen": 24, "scope": "global", "dynamic": True}
FIXED = {"local": "192.0.2.5", "prefixlen": 24, "scope": "global"}
OF_ROUTER = {"local": "2001:db8::5", "prefixlen": 64, "scope": "global", "dynamic": True}
OF_LINK = {"local": "fe80::5", "prefixlen": 64, "scope": "link"}
WHOLE = {"uplink": "eth0", "addresses": ["192.0.2.5/24"], "gateways": ["192.0.2.1"]}


class Node:
    """A node with systemd-networkd.

    :ivar networkd: what ``systemctl is-active`` says.
    :ivar uplink: the addresses of its uplink.
    :ivar state: what networkctl says of the uplink.
    :ivar obeys: whether the bridge is there after a reload.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.networkd = "active"
        self.uplink: list[dict[str, Any]] = [FIXED, OF_ROUTER, OF_LINK]
        self.state: dict[str, Any] = {"AdministrativeState": "configured"}
        self.gateway = {"dst": "default", "gateway": "192.0.2.1", "protocol": "static"}
        self.routes: list[dict[str, Any]] = []
        self.master: str | None = None
        self.others: list[dict[str, Any]] = []
        self.obeys = True
        self.bridge: dict[str, Any] | None = None
        self.done: list[list[str]] = []

    def run_all(self, command: list[str], **_: Any) -> dict[str, Any]:
        said: Any = ""
        if command[:2] == ["systemctl", "is-active"]:
            said = self.networkd
        elif command[0] == "systemctl":
            said = "enabled"
        elif command[:2] == ["networkctl", "--json=short"]:
            said = json.dumps(self.state)
        elif command[:3] == ["ip", "-json", "address"]:
            uplink = {**UPLINK, "addr_info": self.uplink}
            if self.master:
                uplink["master"] = self.master
            if self.bridge:
                uplink = {**UPLINK, "addr_info": [], "master": "br0"}
            said = json.dumps([uplink, *self.others, *([self.bridge] if self.bridge else [])])
        elif command[0] == "ip" and "route" in command:
            routes = [self.gateway, *(self.routes if "default" not in command else ())]
            said = json.dumps(routes if command[2] == "-4" and not self.bridge else [])
        else:
            self.done.append(command)
            if command == ["networkctl", "reload"] and self.obeys and self.files():
                self.bridge = {"ifname": "br0", "addr_info": [FIXED]}
        return {"retcode": 0, "stdout": said, "stderr": ""}

    def files(self) -> list[str]:
        return sorted(file.name for file in self.folder.iterdir())


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
def module(node: Node) -> ModuleType:
    module = load(
        "states",
        "brine_network",
        __opts__={"test": False},
        __salt__={"cmd.run_all": node.run_all},
    )
    vars(module).update(FOLDER=str(node.folder), TIMEOUT_S=0)
    return module


def test_a_bridge_takes_over_what_is_declared_once(node: Node, module: ModuleType) -> None:
    vars(module)["__opts__"] = {"test": True}
    would = module.bridge("br0", **WHOLE)
    assert (would["result"], node.files(), node.done) == (None, [], [])
    vars(module)["__opts__"] = {"test": False}
    made = module.bridge("br0", **WHOLE)
    assert made["result"] is True
    assert made["changes"].keys() == would["changes"].keys()
    names = ["br0-uplink.network", "br0.netdev", "br0.network"]
    assert node.files() == [f"00-brine-{name}" for name in names]
    assert UPLINK["address"] in (node.folder / "00-brine-br0.netdev").read_text()
    again = module.bridge("br0", **WHOLE)
    assert (again["result"], again["changes"]) == (True, {})
    assert node.done == [["networkctl", "reload"]]


def test_what_a_kill_left_before_networkd_read_it_is_read(node: Node, module: ModuleType) -> None:
    module.bridge("br0", **WHOLE)
    node.bridge = None
    assert module.bridge("br0", **WHOLE)["changes"].keys() == {"br0", "eth0"}
    assert node.done == [["networkctl", "reload"]] * 2


@pytest.mark.parametrize(
    ("change", "keys", "told"),
    [
        ({}, {"addresses": []}, "eth0 has 192.0.2.5/24, which the bridge would not have"),
        ({}, {"gateways": []}, "eth0 has the gateway 192.0.2.1"),
        ({}, {"addresses": [], "dhcp": True}, "eth0 has 192.0.2.5/24"),
        ({"uplink": [LEASE]}, {"addresses": []}, "eth0 has 192.0.2.7/24"),
        ({"networkd": "inactive"}, {}, "systemd-networkd is inactive"),
        ({"state": {"AdministrativeState": "unmanaged"}}, {}, "another manager of networks"),
        ({"state": {"NetworkFile": "/etc/systemd/network/00-a.network"}}, {}, "00-a.network"),
        ({}, {"uplink": "eth9"}, "there is no interface eth9"),
        ({}, {"uplink": "br0"}, "its own uplink"),
        ({}, {"uplink": "a b"}, "no name of an interface"),
        ({}, {"addresses": ["192.0.2.5"]}, "192.0.2.10/24"),
        ({}, {"dns": ["x\nAddress=y"]}, "dns"),
        ({}, {"addresses": "192.0.2.5/24"}, "must be a list"),
        ({"master": "bond0"}, {}, "eth0 is a port of bond0"),
        ({"others": [{"ifname": "storage100", "link": "eth0"}]}, {}, "storage100 needs eth0"),
        ({"routes": [{"dst": "10.9.0.0/16", "protocol": "static"}]}, {}, "a route to 10.9.0.0/16"),
    ],
)
def test_a_node_is_not_cut_off(
    node: Node, module: ModuleType, change: dict[str, Any], keys: dict[str, Any], told: str
) -> None:
    vars(node).update(change)
    result = module.bridge("br0", **{**WHOLE, **keys})
    assert (result["result"], result["changes"]) == (False, {})
    assert told in result["comment"]
    assert (node.files(), node.done) == ([], [])


def test_a_bridge_without_its_addresses_is_undone(node: Node, module: ModuleType) -> None:
    node.obeys = False
    (node.folder / "00-brine-br0.network").write_text("of before\n")
    result = module.bridge("br0", **WHOLE)
    assert (result["result"], result["changes"]) == (False, {})
    assert "the former configuration is restored" in result["comment"]
    assert node.files() == ["00-brine-br0.network"]
    assert (node.folder / "00-brine-br0.network").read_text() == "of before\n"
    back = [["ip", "link", "delete", "br0"], ["networkctl", "reload"]]
    assert node.done == [["networkctl", "reload"], *back, ["networkctl", "reconfigure", "eth0"]]
