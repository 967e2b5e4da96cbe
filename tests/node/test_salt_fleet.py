"""A fleet under a Salt master: from a pillar to nodes that are as it says."""

from __future__ import annotations

from lab.fleet import Fleet
from lab.salt import STATES
from lab.tree import TREE
from lab.waiting import wait_for
from node.fleet_on_node import fleet as fleet


def test_a_highstate_sets_up_all_nodes_and_the_second_changes_nothing(fleet: Fleet) -> None:
    fleet.pillar({"brine": {"kvmd": {"enabled": True}}}, node1={"brine": {"hotplug": {}}})
    first = fleet.apply("brine")
    assert first.keys() == {"node1.example.com", "node2.example.com", "node3.example.com"}
    for results in fleet.apply("brine").values():
        assert [one for one in results if one.changes] == []
    for node in fleet.nodes:
        assert node.path("/usr/sbin/brine-kvmd").exists()


def test_minions_that_run_have_what_a_run_of_the_states_brought(fleet: Fleet) -> None:
    """Though nobody has synced anything, nor told them."""
    fleet.apply("brine.loaded")

    def all_have(function: str) -> bool:
        return all("brine" in said for said in fleet.call(function).values())

    for function in ("sys.list_modules", "grains.ls"):
        wait_for(function, lambda function=function: all_have(function))  # type: ignore[misc]


def test_the_orchestration_of_the_examples_has_the_writer_go_first(fleet: Fleet) -> None:
    cluster = {"name": "prod.example.com", "master": "node1.example.com"}
    nodes = {"node1.example.com": {"primary_ip": "192.0.2.1"}}
    writer = {"config": {"apply": True}, "cluster": cluster, "nodes": nodes}
    fleet.pillar({"brine": {"kvmd": {"enabled": True}}}, node1={"brine": writer})
    fleet.master.put(TREE / "salt/examples/orchestration.sls", f"{STATES}/orch.sls")
    (states,) = fleet.run("state.orchestrate", "orch")["data"].values()
    ran = sorted(states.values(), key=lambda state: int(state["__run_num__"]))
    assert [state["result"] for state in ran] == [True, True, True]
    _pillar_seen, writers, others = [state["comment"] for state in ran]
    assert "node1" in writers
    assert "node2" not in writers
    assert "node1" not in others
    assert "node2.example.com" in others
    assert "node3.example.com" in others
