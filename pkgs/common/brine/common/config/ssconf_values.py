"""The values of ssconf, out of a configuration."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from brine.common import __version__
from brine.common.config import params
from brine.common.config.configuration import Configuration
from brine.common.config.shape import shown
from brine.common.errors import BrineError
from brine.common.uid_pool import format_uid_pool, uid_pool_fault

HVPARAMS = "hvparams_"
"""What the keys of hypervisors' parameters begin with."""

_NUMBERS = re.compile(r"([0-9]+)")


class SsconfError(BrineError):
    """A value of ssconf that can't be used.

    :param key: which.
    """

    def __init__(self, key: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(f"ssconf {key}: {message}", hint=hint)
        self.key = key


def export(configuration: Configuration) -> dict[str, str]:
    """All values of a configuration by key, without final line ends.

    :raises SsconfError: if a name has a line end or a blank, which would make two of it, or a
        range of user ids is none.
    """
    cluster = configuration.cluster
    if fault := uid_pool_fault(cluster.uid_pool):
        raise SsconfError("uid_pool", fault)
    nodes = list(configuration.nodes.values())
    master = configuration.node_names.find(cluster.master_node)
    values: dict[str, str] = {
        "cluster_name": cluster.name,
        "cluster_tags": _lines("cluster_tags", sorted(cluster.tags)),
        "enabled_user_shutdown": str(cluster.enabled_user_shutdown),
        "file_storage_dir": cluster.file_storage_dir,
        "gluster_storage_dir": cluster.gluster_storage_dir,
        "hypervisor_list": _lines("hypervisor_list", cluster.enabled_hypervisors),
        "instance_list": _lines(
            "instance_list",
            sorted((each.name for each in configuration.instances.values()), key=_natural),
        ),
        "maintain_node_health": str(cluster.maintain_node_health),
        "master_candidates": _names("master_candidates", (n for n in nodes if n.master_candidate)),
        "master_candidates_certs": _lines(
            "master_candidates_certs",
            (f"{key}={value}" for key, value in cluster.candidate_certs.items()),
        ),
        "master_candidates_ips": _lines(
            "master_candidates_ips", (n.primary_ip for n in nodes if n.master_candidate)
        ),
        "master_ip": cluster.master_ip,
        "master_netdev": cluster.master_netdev,
        "master_netmask": str(cluster.master_netmask),
        "master_node": master.name if master else "",
        "networks": _pairs("networks", configuration.networks.values()),
        "nicparams": _lines(
            "nicparams",
            (f"{name}={value}" for name, value in cluster.nicparams.get("default", {}).items()),
        ),
        "node_list": _names("node_list", nodes),
        "node_primary_ips": _by_node("node_primary_ips", " ", nodes, "primary_ip"),
        "node_secondary_ips": _by_node("node_secondary_ips", " ", nodes, "secondary_ip"),
        "node_vm_capable": _by_node("node_vm_capable", "=", nodes, "vm_capable"),
        "nodegroups": _pairs("nodegroups", configuration.nodegroups.values()),
        "offline_nodes": _names("offline_nodes", (n for n in nodes if n.offline)),
        "online_nodes": _names("online_nodes", (n for n in nodes if not n.offline)),
        "primary_ip_family": str(cluster.primary_ip_family),
        "release_version": __version__,
        "shared_file_storage_dir": cluster.shared_file_storage_dir,
        "ssh_ports": _lines(
            "ssh_ports", (f"{n.name}={configuration.nd_params(n)['ssh_port']}" for n in nodes)
        ),
        "uid_pool": format_uid_pool(cluster.uid_pool, "\n"),
    }
    for hypervisor, component in params.HYPERVISORS.items():
        key = f"{HVPARAMS}{hypervisor}"
        filled = params.defaults(component) | cluster.hvparams.get(hypervisor, {})
        values[key] = _lines(key, (f"{name}={value}" for name, value in filled.items()))
    for key in ("cluster_name", "master_ip", "master_netdev", "file_storage_dir"):
        one_line(key, values[key])
    return values


def one_line(key: str, text: str) -> str:
    """*text*, if it is one line; raises SsconfError."""
    if "\n" in text or "\0" in text:
        raise SsconfError(key, f"{shown(text)} is more than one line")
    return text


def _lines(key: str, items: Iterable[str]) -> str:
    return "\n".join(one_line(key, item) for item in items)


def _names(key: str, items: Iterable[Any]) -> str:
    return _lines(key, (item.name for item in items))


def _pairs(key: str, items: Iterable[Any]) -> str:
    return _lines(key, sorted((f"{item.uuid} {item.name}" for item in items), key=_natural))


def _by_node(key: str, separator: str, nodes: Iterable[Any], attribute: str) -> str:
    pairs = []
    for node in nodes:
        if separator in node.name:
            raise SsconfError(key, f"the name {shown(node.name)} has a {shown(separator)} in it")
        pairs.append(f"{node.name}{separator}{getattr(node, attribute)}")
    return _lines(key, pairs)


def _natural(text: str) -> list[Any]:
    """Sorts web10 after web9."""
    parts: list[Any] = _NUMBERS.split(text)
    parts[1::2] = [int(digits) for digits in parts[1::2]]
    return parts
