"""A node of a cluster that is emptied and filled again, while its guests run on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.cluster_on_node import Cluster, boot_cluster, node_id
from node.instance_on_node import add_by_hand, expect_by_hand

pytestmark = pytest.mark.long

NAMES = [f"web{number}" for number in range(1, 9)]
SECOND, THIRD = node_id(2), node_id(3)


@pytest.fixture(scope="module")
def cluster(release: str, packages: list[Path]) -> Iterator[Cluster]:
    with boot_cluster(release, packages, dict.fromkeys(NAMES, 2)) as cluster:
        yield cluster


def test_a_node_is_emptied_and_filled(cluster: Cluster) -> None:
    node, other = cluster.node, cluster.other
    mac = add_by_hand(node, NAMES[0], "--link", "br0")
    serial = cluster.configured()["serial_no"]
    would = cluster.told("node", "drain", "node2", "--to", "node3", "--dry-run")
    assert would["moved"] == dict.fromkeys(NAMES, THIRD)
    assert (cluster.configured()["serial_no"], cluster.drained()) == (serial, [])

    told = cluster.told("node", "drain", "node2", "--to", "node3")
    assert told["moved"] == dict.fromkeys(NAMES, THIRD)
    assert cluster.told("operations", "list") == []
    assert cluster.drained() == [SECOND]
    cluster.expect_guests(other)
    # The drain has published a configuration, which the nodes have applied.
    expect_by_hand(other, NAMES[0], mac)

    # Nothing new comes there.
    refused = cluster.brine("instance", "migrate", NAMES[0], "--to", "node2")
    assert refused.returncode == 1
    assert "drained" in refused.stderr
    new = {"instances": {"web9": {"primary_node": SECOND, "nics": []}}}
    applied = cluster.master.run(
        ["brine", "config", "apply", "-"], stdin=json.dumps(new), check=False
    )
    assert applied.returncode == 1
    assert "drained" in applied.stderr

    told = cluster.told("node", "fill", "node2")
    assert told["moved"] == dict.fromkeys(NAMES, SECOND)
    assert cluster.drained() == []
    cluster.expect_guests(node)
    expect_by_hand(node, NAMES[0], mac)
    cluster.fleet.apply("brine", nodes=[node])
    expect_by_hand(node, NAMES[0], mac)
