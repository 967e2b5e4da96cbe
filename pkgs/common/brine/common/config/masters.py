"""Who is the master of a cluster, and who could become it."""

from __future__ import annotations

from brine.common.config.draft import Draft
from brine.common.config.merge import Json
from brine.common.config.shape import member


def choose(draft: Draft, cluster: Json) -> None:
    """Give the cluster its master and the master's address, and make the master, and new nodes as
    long as there is room, master candidates.

    :param cluster: its JSON, changed in place; references are UUIDs by now.
    """
    nodes = draft.nodes()
    if not cluster.get("master_node"):
        if len(nodes) == 1:  # which needs no word on who is the master
            cluster["master_node"] = next(iter(nodes))
        else:
            draft.wrong("/cluster/master", "is needed: the master node's name", "missing")
    master = nodes.get(cluster.get("master_node", ""))
    if master:
        _give_address(draft, cluster, master)
        _make_candidate(draft, master)
    _fill_up(draft, cluster, nodes)


def _give_address(draft: Draft, cluster: Json, master: Json) -> None:
    """The cluster's address is the master's own, and goes with it, unless it has another."""
    if draft.foreign and cluster.get("master_ip"):
        return
    own = None
    if draft.current:
        before = draft.current.nodes.get(draft.current.cluster.master_node)
        own = before.primary_ip if before else None
    declared = draft.declared.get("cluster")
    is_given = type(declared) is dict and declared.get("master_ip") is not None
    if not is_given and cluster.get("master_ip") in (None, "", own):
        cluster["master_ip"] = master.get("primary_ip", "")


def _make_candidate(draft: Draft, master: Json) -> None:
    if draft.foreign or master.get("offline") or master.get("drained"):
        return  # that it can't be the master is found at the end
    said = draft.said("nodes", master["uuid"])
    if said.get("master_candidate") is False:
        where = member("/nodes", draft.keys["nodes"][master["uuid"]])
        draft.wrong(f"{where}/master_candidate", "the master is always a master candidate", "value")
    elif not master.get("master_candidate"):
        master["master_candidate"] = True
        draft.touched["nodes"][master["uuid"]] = master


def _fill_up(draft: Draft, cluster: Json, nodes: dict[str, Json]) -> None:
    size = cluster.get("candidate_pool_size", 10)
    count = sum(1 for node in nodes.values() if node.get("master_candidate"))
    for key, node in nodes.items():
        if key in draft.new and "master_candidate" not in node:
            node["master_candidate"] = bool(node.get("master_capable", True) and count < size)
            count += node["master_candidate"]
