"""A fleet under a Salt master: from a pillar to nodes that are as it says."""

from __future__ import annotations

from lab.fleet import Fleet
from node.fleet_on_node import fleet as fleet


def test_a_highstate_sets_up_all_nodes_and_the_second_changes_nothing(fleet: Fleet) -> None:
    fleet.pillar({"brine": {"kvmd": {"enabled": True}}}, node1={"brine": {"hotplug": {}}})
    first = fleet.apply("brine")
    assert first.keys() == {"node1.example.com", "node2.example.com", "node3.example.com"}
    for results in fleet.apply("brine").values():
        assert [one for one in results if one.changes] == []
    for node in fleet.nodes:
        assert node.path("/usr/sbin/brine-kvmd").exists()
