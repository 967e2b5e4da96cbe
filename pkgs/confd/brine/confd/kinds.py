"""The types of queries on the command line: names, arguments, options and help."""

from __future__ import annotations

import argparse
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from brine.common.errors import UsageError
from brine.confd import questions
from brine.confd.protocol import Field, RequestType
from brine.confd.questions import Question

FIELDS = {field.name.lower().replace("_", "-"): field for field in Field}
"""What the master can be asked for, by its name in the command line."""


@dataclass(frozen=True)
class QueryCommand:
    """A question as the command line has it.

    :param help: one line.
    :param ask: makes the question of the argument, if it has one, and of the options by name.
    :param argument: the name of its argument, if it has one.
    :param missing: what it means that the entry is unknown; formatted with the arguments.
    :param many: whether it takes several arguments.
    :param options: of ``link``, ``field`` and ``after``.
    """

    help: str
    ask: Callable[..., Question[Any]]
    argument: str | None = None
    missing: str = "there is no such entry in the configuration"
    many: bool = False
    options: tuple[str, ...] = ()

    def question(self, arguments: argparse.Namespace) -> Question[Any]:
        """The question that the parsed arguments are."""
        given = [arguments.argument] if self.argument else []
        return self.ask(*given, **{option: getattr(arguments, option) for option in self.options})


def _node_ip(texts: list[str], *, link: str | None) -> Question[Any]:
    ips = list(dict.fromkeys(_ip(text) for text in texts))
    if len(ips) == 1:
        return questions.node_ip_of_instance_ip(ips[0], link=link)
    return questions.node_ips_of_instance_ips(ips, link=link)


def _ip(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise UsageError(f"not an IP address: {text!r}") from None


def _config(pointer: str) -> Question[Any]:
    if pointer and not pointer.startswith("/"):
        hint = f"a pointer begins with a slash: /{pointer}"
        raise UsageError(f"not a JSON pointer: {pointer!r}", hint=hint)
    return questions.config(pointer)


def _master(*, field: list[str] | None) -> Question[Any]:
    if not field:
        return questions.cluster_master()
    return questions.cluster_master_fields(dict.fromkeys(FIELDS[one] for one in field))


_NO_NODE = "there is no node {argument}"
_NO_INSTANCE = "there is no instance {argument}"

KINDS = {
    RequestType.PING: QueryCommand("the version of the configuration's format", questions.ping),
    RequestType.NODE_ROLE: QueryCommand(
        "what a node is: master, candidate, offline, drained or regular",
        questions.node_role,
        "NODE",
        _NO_NODE,
    ),
    RequestType.NODE_IP_OF_INSTANCE_IP: QueryCommand(
        "the IP of the node that an instance is on, by the instance's IP",
        _node_ip,
        "IP",
        "no instance has the IP {argument} on {link}",
        many=True,
        options=("link",),
    ),
    RequestType.CLUSTER_MASTER: QueryCommand("the master's name", _master, options=("field",)),
    RequestType.NODE_IPS: QueryCommand("the IPs of all nodes", questions.node_ips),
    RequestType.MASTER_CANDIDATE_IPS: QueryCommand(
        "the IPs of the master candidates", questions.master_candidate_ips
    ),
    RequestType.INSTANCE_IPS: QueryCommand(
        "the IPs of all instances on a link", questions.instance_ips, options=("link",)
    ),
    RequestType.NODE_DRBD: QueryCommand(
        "a node's DRBD devices: node, minor, instance, disk, role, peer",
        questions.node_drbd,
        "NODE",
        _NO_NODE,
    ),
    RequestType.NODE_INSTANCES: QueryCommand(
        "the instances of a node, primary and secondary", questions.node_instances, "NODE", _NO_NODE
    ),
    RequestType.INSTANCE_DISKS: QueryCommand(
        "the disks of an instance, one JSON object per line",
        questions.instance_disks,
        "INSTANCE",
        _NO_INSTANCE,
    ),
    RequestType.CONFIG: QueryCommand(
        "a part of the configuration, by a JSON pointer such as /cluster/mac_prefix",
        _config,
        "POINTER",
    ),
    RequestType.DATA_COLLECTORS: QueryCommand("the data collectors", questions.data_collectors),
    RequestType.OFFLINE_NODES: QueryCommand("the nodes that are offline", questions.offline_nodes),
    RequestType.INSTANCES: QueryCommand("all instances", questions.instances, options=("after",)),
    RequestType.INSTANCE_PRIMARY_NODE: QueryCommand(
        "the node that an instance is on",
        questions.instance_primary_node,
        "INSTANCE",
        _NO_INSTANCE,
    ),
}
