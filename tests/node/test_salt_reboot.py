"""Nodes of a cluster that are rebooted one after another, while their guests run on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.node import Node
from lab.repository import publish
from node.cluster_on_node import BOOT_ID, Cluster, boot_cluster, node_id
from node.instance_on_node import wait_status

pytestmark = pytest.mark.long

SECOND, THIRD = node_id(2), node_id(3)
SOCKET = "brine-stopper.socket"
_LONG_S = 1200.0


@pytest.fixture(scope="module")
def cluster(release: str, packages: list[Path]) -> Iterator[Cluster]:
    with boot_cluster(release, packages, {"web1": 2, "web2": 3}) as cluster:
        yield cluster


def salt_run(cluster: Cluster, *words: str) -> tuple[int, dict[str, Any]]:
    """The exit status of a function of the runner, and what it returned."""
    command = ["salt-run", "--out=json", "--log-level=error", *words]
    done = cluster.master.run(command, check=False, timeout_s=_LONG_S)
    return done.returncode, json.loads(done.stdout)


def boot_of(node: Node) -> str:
    return node.shell(BOOT_ID)


def version_on(node: Node) -> str:
    return node.run(["dpkg-query", "--show", "--showformat=${Version}", "brine-instance"]).stdout


def expect_well(cluster: Cluster) -> None:
    """All is as before, and nothing is left to do."""
    assert (cluster.told("operations", "list"), cluster.drained()) == ([], [])
    assert not any("brine:" in tag for one in cluster.nodes() for tag in one["tags"])
    cluster.expect_home()


def test_a_doubt_stops_a_reboot_until_it_is_mended(cluster: Cluster) -> None:
    drop_in = f"/etc/systemd/system/{SOCKET}.d/broken.conf"
    cluster.node.write(drop_in, "[Socket]\nExecStartPre=/bin/false\n")
    other_boot = boot_of(cluster.other)
    with cluster.node.rebooting(state="degraded", timeout_s=_LONG_S):
        status, told = salt_run(cluster, "brine.reboot", "node2,node3", "check_timeout=10")
        assert (status, told["result"]) == (1, False), told
    assert told["comment"].startswith(f"stopped at the step check of {SECOND}: ")
    assert SOCKET in told["comment"]
    assert "\n" not in told["comment"]
    assert told["left"] == [SECOND, THIRD]

    def is_as_it_stopped() -> None:
        assert cluster.drained() == [SECOND]
        at = cluster.expect_guests(cluster.master, cluster.other)
        assert at["web2"] == cluster.other.name
        assert boot_of(cluster.other) == other_boot
        (pending,) = cluster.told("operations", "list")
        assert pending["kind"] == "reboot"
        assert SOCKET in pending["waits_for"]
        assert SOCKET in cluster.brine("operations", "list").stdout

    is_as_it_stopped()
    (pending,) = cluster.told("operations", "list")
    status, told = salt_run(cluster, "brine.reboot", "check_timeout=0")
    assert (status, SOCKET in told["comment"]) == (1, True), told
    is_as_it_stopped()

    mend = f"rm {drop_in}; systemctl daemon-reload; systemctl reset-failed {SOCKET}"
    cluster.node.shell(f"{mend}; systemctl start {SOCKET}")
    with cluster.other.rebooting(timeout_s=_LONG_S):
        status, told = salt_run(cluster, "brine.resume", pending["id"])
        assert (status, told["result"]) == (0, True), told
    assert boot_of(cluster.other) != other_boot
    expect_well(cluster)


def test_a_reboot_whose_node_is_silent_can_be_given_up(cluster: Cluster) -> None:
    node = cluster.node
    node.run(["systemctl", "disable", "salt-minion"])
    with node.rebooting(timeout_s=_LONG_S):
        status, told = salt_run(cluster, "brine.reboot", "node2", "boot_timeout=60")
        assert (status, told["result"]) == (1, False), told
    doubt = f"{SECOND}: it does not answer"
    assert told["comment"] == f"stopped at the step reboot of {SECOND}: {doubt}"
    (pending,) = cluster.told("operations", "list")
    done = cluster.brine("operations", "abort", pending["id"])
    assert done.returncode == 0, done.stderr
    assert cluster.told("operations", "list") == []
    assert cluster.drained() == [SECOND]
    cluster.expect_guests(cluster.master, cluster.other)
    refused = cluster.brine("node", "fill", "node2")
    assert (refused.returncode, SECOND in refused.stderr) == (1, True)
    assert cluster.drained() == [SECOND]

    node.run(["systemctl", "enable", "--now", "salt-minion"], timeout_s=_LONG_S)
    cluster.fleet.wait_answering([node])
    assert cluster.told("node", "fill", "node2")["moved"] == {"web1": SECOND}
    expect_well(cluster)


def test_an_upgrade_is_a_part_of_a_reboot(cluster: Cluster, next_packages: list[Path]) -> None:
    before = version_on(cluster.node)
    publish(cluster.other, next_packages)
    command = ("node", "reboot", "node3", "--upgrade")
    would = cluster.brine(*command, "--dry-run").stdout.splitlines()
    assert would[0] == f"would reboot: {THIRD}"
    assert would[1].startswith("would move: web2 to node")
    assert version_on(cluster.other) == before
    with cluster.other.rebooting(timeout_s=_LONG_S):
        done = cluster.brine(*command)
        assert done.returncode == 0, done.stderr
    assert done.stdout == f"rebooted: {THIRD}\n"
    for step in ("drain", "upgrade", "reboot", "check", "fill"):
        assert f"{step}: {THIRD}\n" in done.stderr
    assert version_on(cluster.other) == f"{before}+next"
    assert version_on(cluster.node) == before
    expect_well(cluster)


def test_a_batch_is_as_large_as_the_other_nodes_have_room_for(cluster: Cluster) -> None:
    """The first node has room for one guest, and later for both."""
    memory_mib = int(cluster.told("node", "facts")["memory_mib"])
    room_mib = 300  # a guest of the two needs 194
    big: dict[str, Any] = {
        "primary_node": node_id(1),
        "beparams": {"maxmem": (memory_mib - room_mib - 64) * 50 // 51, "vcpus": 1},
        "hvparams": {"kvm_extra": "-S"},  # it touches nothing of its memory
        "nics": [],
    }
    big["beparams"]["minmem"] = big["beparams"]["maxmem"]
    new = json.dumps({"instances": {"big": big}})
    cluster.master.run(["brine", "config", "apply", "-"], stdin=new)
    assert cluster.fleet.run("brine.redistribute", check=False)["result"] is True
    wait_status(cluster.master, "big", "running")

    def batches() -> list[list[str]]:
        _, told = salt_run(cluster, "brine.reboot", "node*", "batch=2", "test=True")
        return [one["nodes"] for one in told["batches"]]

    def reboot_both() -> None:
        before = [boot_of(node) for node in (cluster.node, cluster.other)]
        with (
            cluster.node.rebooting(timeout_s=_LONG_S),
            cluster.other.rebooting(timeout_s=_LONG_S),
        ):
            status, told = salt_run(cluster, "brine.reboot", "node*", "batch=2")
            assert (status, told["result"]) == (0, True), told
            assert told["left_out"] == [node_id(1)]
        now = [boot_of(node) for node in (cluster.node, cluster.other)]
        assert all(one != other for one, other in zip(before, now, strict=True))
        expect_well(cluster)

    assert batches() == [[SECOND], [THIRD]]
    reboot_both()
    cluster.master.run(["brine", "instance", "stop", "big", "--force", "--timeout", "1"])
    assert batches() == [[SECOND, THIRD]]
    reboot_both()
