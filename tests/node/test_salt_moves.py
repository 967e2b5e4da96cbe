"""An instance that Salt moves between two nodes of a cluster, and back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.errors import LabError
from lab.fleet import Fleet, boot_fleet
from lab.guest_image import KERNEL_OPTIONS, guest_image
from lab.waiting import wait_for
from node.instance_on_node import (
    FOLDER,
    GUEST,
    add_by_hand,
    expect_by_hand,
    info,
    run_in_guest,
    wait_ready,
    wait_status,
)

IDS = [f"node{number}.example.com" for number in (1, 2)]
BOOT_ID = "cat /proc/sys/kernel/random/boot_id"
ALL = {"brine": {"moves": {"enabled": True}, "storage": {"directories": [FOLDER]}}}


def declared(home: int) -> dict[str, Any]:
    """The cluster: two nodes, and an instance."""
    guest: dict[str, Any] = {
        "kvm_flag": "disabled",
        "kernel_path": f"{GUEST}/kernel",
        "root_path": "",
    }
    guest |= {"initrd_path": f"{GUEST}/initramfs", "cpu_type": "qemu64"}
    guest |= {"kernel_args": f"console=ttyS0 {KERNEL_OPTIONS}", "serial_console": True}
    web1 = {
        "primary_node": IDS[home - 1],
        "admin_state": "up",
        "beparams": {"maxmem": 128, "minmem": 128, "vcpus": 1},
        "hvparams": guest,
    }
    nodes = {
        name: {"primary_ip": f"192.0.2.{number}", "master_candidate": True}
        for number, name in enumerate(IDS, 1)
    }
    cluster = {"name": "lab.example.com", "master": IDS[0]}
    return {"cluster": cluster, "nodes": nodes, "instances": {"web1": web1}}


def give(fleet: Fleet, home: int) -> None:
    """Declare the cluster on its writer, the master's host."""
    fleet.pillar(ALL, node1={"brine": {"config": {"apply": True}, **declared(home)}})


@pytest.fixture(scope="module")
def fleet(release: str, packages: list[Path]) -> Iterator[Fleet]:
    """A cluster of two nodes; the instance runs on the first, the master's host."""
    with boot_fleet(release, packages, count=2) as fleet:
        for node in fleet.nodes:
            node.put(guest_image().folder, GUEST)
        give(fleet, 1)
        fleet.apply("brine", nodes=[fleet.master])
        assert fleet.run("brine.rotate_key")["result"] is True
        told = fleet.run("brine.redistribute", check=False)
        assert told["result"] is True, json.dumps(told, indent=1)
        wait_status(fleet.master, "web1", "running")
        wait_ready(fleet.master, "web1")
        yield fleet


def home_of(fleet: Fleet) -> set[str]:
    """Where the master candidates say that the instance is."""
    query = ["brine", "confd", "query", "instance-primary-node", "web1", "--json", "--peer"]
    answers = [fleet.master.run([*query, f"192.0.2.{number}"]).stdout for number in (1, 2)]
    return {json.loads(one)["answer"] for one in answers}


def migrate(fleet: Fleet, *options: str, check: bool = True) -> dict[str, Any]:
    """`brine instance migrate web1` on the master."""
    command = ["brine", "instance", "migrate", "web1", *options, "--json"]
    done = fleet.master.run(command, check=check, timeout_s=600)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_an_instance_moves_live_through_a_kill_of_salt_and_back_cold(fleet: Fleet) -> None:
    first, second = fleet.nodes
    would = fleet.run("brine.migrate", "web1", "test=True", check=False)
    assert (would["result"], would.get("target")) == (True, IDS[1]), would
    boot_id = run_in_guest(first, "web1", BOOT_ID)
    mac = add_by_hand(first, "web1", "--mode", "routed", "--ip", "192.0.2.77")

    # Salt is killed while the move goes on; another call goes on with it.
    first.shell("systemd-run --unit=move salt-run brine.migrate web1 to=node2")

    def pending() -> list[dict[str, Any]]:
        listed = first.run(["brine", "operations", "list", "--json"]).stdout
        return [one for one in json.loads(listed) if one["kind"] == "move"]

    keys: list[str] = []

    def is_prepared() -> bool:
        """Whether the target has a record with the key of the move."""
        records = second.shell("cat /var/lib/brine/operations/* 2>/dev/null || true")
        keys.extend(re.findall(r'"key": ?"([0-9a-f]{64})"', records))
        return bool(keys)

    wait_for("the move to begin", is_prepared, timeout_s=120)
    first.run(["systemctl", "kill", "--signal=KILL", "move"])
    told = migrate(fleet, "--to", "node2")
    assert told["result"] is True, told
    assert pending() == []
    assert run_in_guest(second, "web1", BOOT_ID) == boot_id
    assert info(second, "web1")["status"] == "running"
    assert home_of(fleet) == {IDS[1]}
    expect_by_hand(second, "web1", mac)

    # The jobs have the offer, and not the key of the move.
    jobs = "/var/cache/salt/master/jobs"
    assert first.run(["grep", "-rlaF", "comes_along", jobs], check=False).stdout
    for node in fleet.nodes:
        places = ["/var/cache/salt", "/var/log"]
        assert node.run(["grep", "-rlaF", keys[-1], *places], check=False).stdout == ""
        assert keys[-1] not in node.run(["journalctl", "--no-pager", "--output=export"]).stdout

    # Pillar still has the old node: that is told, and changes nothing.
    with pytest.raises(LabError, match="brine instance migrate web1"):
        fleet.apply("brine", nodes=[first])
    assert home_of(fleet) == {IDS[1]}
    assert info(second, "web1")["status"] == "running"
    give(fleet, 2)
    fleet.apply("brine")
    expect_by_hand(second, "web1", mac)
    would = fleet.apply("brine", test=True)
    assert [one for results in would.values() for one in results if one.result is None] == []

    told = migrate(fleet, "--to", "node1", "--cold")
    assert told["result"] is True, told
    wait_ready(first, "web1")
    assert home_of(fleet) == {IDS[0]}
    assert run_in_guest(first, "web1", BOOT_ID) != boot_id
    expect_by_hand(first, "web1", mac)
    give(fleet, 1)
    fleet.apply("brine", nodes=[first])
    expect_by_hand(first, "web1", mac)
