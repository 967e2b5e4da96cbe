"""The Salt states of hotplug."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from lab.errors import LabError
from lab.node import Node
from lab.repository import publish
from lab.salt import STATES, StateResult, apply_state, give_states
from lab.waiting import wait_for

TIMER = "brine-tap-gc.timer"
SCRIPTS_DIR = "/etc/brine/nic.d"
NETWORKS, NETWORKD = "/etc/systemd/network", "systemd-networkd.service"
TEXT = "#!/bin/sh\necho \"$1 $INTERFACE\" >>'/run/calls'  # {not: yaml}\n"
SCRIPTS = {"scripts": {"50-file": "salt://network/file.sh", "60-text": TEXT}}


@pytest.fixture(scope="module")
def node(node: Node) -> Node:
    """The same, where Salt has a script to give."""
    node.write(f"{STATES}/network/file.sh", "#!/bin/sh\ntrue\n")
    return node


def applied(
    node: Node, hotplug: Mapping[str, Any], *, test: bool = False
) -> dict[str, StateResult]:
    """Apply another pillar, and return what was changed, or would be, by name."""
    give_states(node, {"brine": {"hotplug": hotplug}})
    results = apply_state(node, test=test)
    return {one.name: one for one in results if one.result is None or one.changes}


def timer_states(node: Node) -> list[str]:
    """Whether the timer is active, and whether it is enabled."""
    states = node.run(["systemctl", "is-active", TIMER], check=False).stdout
    return [
        *states.split(),
        node.run(["systemctl", "is-enabled", TIMER], check=False).stdout.strip(),
    ]


def test_test_mode_says_what_it_would_do_and_does_nothing(node: Node) -> None:
    would = applied(node, SCRIPTS, test=True)
    assert {TIMER, f"{SCRIPTS_DIR}/50-file", f"{SCRIPTS_DIR}/60-text"} <= would.keys()
    assert not node.path("/etc/brine").exists()


def test_first_run_wires_a_node_and_the_second_changes_nothing(node: Node) -> None:
    applied(node, SCRIPTS)
    assert timer_states(node) == ["active", "enabled"]
    assert node.read(f"{SCRIPTS_DIR}/50-file") == "#!/bin/sh\ntrue\n"
    assert node.read(f"{SCRIPTS_DIR}/60-text") == TEXT
    modes = ["stat", "--format=%U:%G %a", f"{SCRIPTS_DIR}/50-file", f"{SCRIPTS_DIR}/60-text"]
    assert node.run(modes).stdout.splitlines() == ["root:root 755"] * 2
    assert applied(node, SCRIPTS) == {}
    assert applied(node, SCRIPTS, test=True) == {}

    node.run(["ip", "link", "add", "br0", "type", "bridge"])
    node.run(["brine", "tap", "up", "t0", "--link", "br0"])
    node.run(["brine", "tap", "down", "t0"])
    assert node.read("/run/calls").split() == [
        word for phase in ("pre-up", "up", "pre-down", "down") for word in (phase, "t0")
    ]


def test_scripts_of_others_stay_and_empty_ones_go(node: Node) -> None:
    applied(node, SCRIPTS)
    node.write(f"{SCRIPTS_DIR}/70-mine", "#!/bin/sh\n", mode=0o755)
    done = applied(node, {"scripts": {"50-file": "", "80-none": ""}})
    assert done.keys() == {f"{SCRIPTS_DIR}/50-file"}
    left = {path.name for path in node.path(SCRIPTS_DIR).iterdir()}
    assert left == {"60-text", "70-mine", "README.txt"}


@pytest.mark.parametrize("test", [False, True])
def test_a_name_that_would_not_be_run_is_refused(node: Node, test: bool) -> None:
    with pytest.raises(LabError, match=r"50-a\.sh: a name here is of letters"):
        applied(node, {"scripts": {"50-a.sh": "#!/bin/sh\n"}}, test=test)
    assert not node.path(f"{SCRIPTS_DIR}/50-a.sh").exists()


def test_without_the_timer(node: Node) -> None:
    applied(node, {"gc": False})
    assert timer_states(node) == ["inactive", "disabled"]
    assert applied(node, {"gc": False}) == {}
    applied(node, {"gc": None, "scripts": None})
    assert timer_states(node) == ["active", "enabled"]


def test_a_node_that_is_to_have_no_hotplug_loses_it(node: Node) -> None:
    applied(node, SCRIPTS)
    node.path(f"{SCRIPTS_DIR}/70-mine").unlink()
    node.run(["brine", "tap", "up", "t0", "--link", "br0"])
    without = {"enabled": False, **SCRIPTS}
    applied(node, without)
    assert node.shell("find /usr -xdev -name '*tap-gc*' -o -name '*hotplug*'") == ""
    assert {path.name for path in node.path(SCRIPTS_DIR).iterdir()} <= {"README.txt"}
    assert node.path("/usr/bin/brine").exists()
    assert "t0" in node.run(["ip", "-o", "link", "show", "t0"]).stdout
    assert applied(node, without) == {}
    # What was done for taps is not forgotten.
    applied(node, {})
    assert "t0" in node.run(["brine", "tap", "list"]).stdout
    node.run(["brine", "tap", "down", "t0"])


def test_a_part_that_is_added_upgrades_nothing(node: Node, next_packages: list[Path]) -> None:
    def versions() -> dict[str, str]:
        listed = node.run(["dpkg-query", "--show", "brine-*"]).stdout.splitlines()
        return dict(line.split("\t") for line in listed if not line.endswith("\t"))

    applied(node, {})
    before = versions()
    publish(node, next_packages)
    old = before["brine-common"]
    more = {"confd": {"enabled": True, "daemon": False}, "storage": {"directories": ["/srv/vms"]}}
    give_states(node, {"brine": more})
    apply_state(node)
    assert versions() == {**before, "brine-confd": old, "brine-storage": old}
    give_states(node, {"brine": {"storage": {"enabled": False}}})
    apply_state(node)
    assert not node.path("/usr/lib/python3/dist-packages/brine/storage").exists()
    assert not node.path("/etc/brine/storage.toml").exists()
    assert node.path("/srv/vms").exists()
    # A part comes with those that it needs, in a version that is not the newest.
    give_states(node, {"brine": {"version": old, "instance": {"enabled": True}}})
    apply_state(node)
    assert {"brine-instance", "brine-storage"} < versions().keys()
    assert set(versions().values()) == {old}
    give_states(node, {"brine": {"version": "latest"}})
    apply_state(node)
    assert set(versions().values()) == {f"{old}+next"}


def test_clean_undoes_it(node: Node) -> None:
    applied(node, SCRIPTS)
    apply_state(node, "brine.clean")
    assert all(not one.changes for one in apply_state(node, "brine.clean"))
    left = node.shell("find /etc /usr /run -xdev -name '*brine*' -not -name '*brine-lab*'")
    assert left == ""


@pytest.fixture
def uplink(node: Node) -> Iterator[str]:
    """An interface of the node that systemd-networkd has configured."""
    node.run(["ln", "-sf", "/dev/null", f"{NETWORKS}/80-container-host0.network"])
    node.write(
        f"{NETWORKS}/50-up9.network", "[Match]\nName=up9\n[Network]\nAddress=203.0.113.5/24\n"
    )
    node.run(["ip", "link", "add", "up9", "type", "veth", "peer", "name", "lan9"])
    node.run(["ip", "link", "set", "lan9", "up"])
    yield "up9"
    node.run(["systemctl", "disable", "--now", "systemd-networkd.socket", NETWORKD])
    node.shell(f"rm {NETWORKS}/*; ip link delete up9; ip link delete br9")


def test_a_bridge_is_there_and_comes_back_and_takes_no_address_away(
    node: Node, uplink: str
) -> None:
    def bridges(keys: Mapping[str, Any], *, test: bool = False) -> dict[str, StateResult]:
        network = {"bridges": {"br9": {"uplink": uplink, **keys}}}
        give_states(node, {"brine": {"network": network}})
        results = apply_state(node, test=test)
        return {one.name: one for one in results if one.result is None or one.changes}

    def addresses(link: str) -> list[str]:
        (shown,) = json.loads(node.run(["ip", "-json", "address", "show", link]).stdout)
        return [one["local"] for one in shown["addr_info"] if one["family"] == "inet"]

    whole = {"addresses": ["203.0.113.5/24"], "gateways": ["203.0.113.1"]}
    with pytest.raises(LabError, match="systemd-networkd is inactive"):
        bridges(whole)
    node.run(["systemctl", "enable", "--now", NETWORKD])
    wait_for("the uplink's address", lambda: addresses(uplink))
    cases: list[dict[str, Any]] = [{}, {"dhcp": True}, {"addresses": ["203.0.113.6/24"]}]
    for lacks in cases:
        with pytest.raises(LabError, match="up9 has 203.0.113.5/24, which the bridge would not"):
            bridges(lacks)
    assert addresses(uplink) == ["203.0.113.5"]

    assert "br9" in bridges(whole, test=True)
    assert addresses(uplink) == ["203.0.113.5"]
    assert bridges(whole)["br9"].result is True
    assert (addresses("br9"), addresses(uplink)) == (["203.0.113.5"], [])
    assert bridges(whole) == {}
    assert bridges(whole, test=True) == {}
    node.run(["ip", "link", "delete", "br9"])
    node.run(["systemctl", "restart", NETWORKD])  # as the next boot does
    wait_for("the bridge", lambda: node.path("/sys/class/net/br9").exists())
    wait_for("its address", lambda: addresses("br9"))
    node.run(["brine", "tap", "up", "t9", "--link", "br9"])
    node.run(["brine", "tap", "down", "t9"])
