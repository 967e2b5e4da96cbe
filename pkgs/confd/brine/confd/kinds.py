"""The questions as the command line has them: their names, arguments, options and help."""

from __future__ import annotations

import argparse
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from brine.common.errors import UsageError
from brine.confd.protocol import Field, RequestType

if TYPE_CHECKING:
    from brine.confd.questions import Question

FIELDS = {field.name.lower().replace("_", "-"): field for field in Field}
"""What the master can be asked for, by its name in the command line."""


@dataclass(frozen=True)
class QueryCommand:
    """A question as the command line has it.

    :param help: one line.
    :param build: makes the question of the parsed arguments.
    :param argument: the name of its argument, if it has one.
    :param missing: what it means that the entry is unknown; formatted with the arguments.
    :param many: whether it takes several arguments.
    :param options: of ``link``, ``field`` and ``after``.
    """

    help: str
    build: Callable[[argparse.Namespace], Question[Any]]
    argument: str | None = None
    missing: str = "there is no such entry in the configuration"
    many: bool = False
    options: tuple[str, ...] = ()


def _q(name: str) -> Callable[[argparse.Namespace], Question[Any]]:
    """The question of that name, with the argument, if there is one, and a link if one is named."""

    def build(arguments: argparse.Namespace) -> Question[Any]:
        from brine.confd import questions

        given = [arguments.argument] if hasattr(arguments, "argument") else []
        named = {
            option: getattr(arguments, option)
            for option in ("link", "after")
            if hasattr(arguments, option)
        }
        question: Question[Any] = getattr(questions, name)(*given, **named)
        return question

    return build


def _build_node_ip(arguments: argparse.Namespace) -> Question[Any]:
    from brine.confd import questions

    ips = list(dict.fromkeys(_ip(text) for text in arguments.argument))
    if len(ips) == 1:
        return questions.node_ip_of_instance_ip(ips[0], link=arguments.link)
    return questions.node_ips_of_instance_ips(ips, link=arguments.link)


def _build_config(arguments: argparse.Namespace) -> Question[Any]:
    from brine.confd import questions

    pointer = arguments.argument
    if pointer and not pointer.startswith("/"):
        hint = f"a pointer begins with a slash: /{pointer}"
        raise UsageError(f"not a JSON pointer: {pointer!r}", hint=hint)
    return questions.config(pointer)


def _build_master(arguments: argparse.Namespace) -> Question[Any]:
    from brine.confd import questions

    if not arguments.field:
        return questions.cluster_master()
    return questions.cluster_master_fields(dict.fromkeys(FIELDS[one] for one in arguments.field))


_NO_NODE = "there is no node {argument}"
_NO_INSTANCE = "there is no instance {argument}"

KINDS = {
    RequestType.PING: QueryCommand("the version of the configuration's format", _q("ping")),
    RequestType.NODE_ROLE: QueryCommand(
        "what a node is: master, candidate, offline, drained or regular",
        _q("node_role"),
        "NODE",
        _NO_NODE,
    ),
    RequestType.NODE_IP_OF_INSTANCE_IP: QueryCommand(
        "the IP of the node that an instance is on, by the instance's IP",
        _build_node_ip,
        "IP",
        "no instance has the IP {argument} on {link}",
        many=True,
        options=("link",),
    ),
    RequestType.CLUSTER_MASTER: QueryCommand(
        "the master's name", _build_master, options=("field",)
    ),
    RequestType.NODE_IPS: QueryCommand("the IPs of all nodes", _q("node_ips")),
    RequestType.MASTER_CANDIDATE_IPS: QueryCommand(
        "the IPs of the master candidates", _q("master_candidate_ips")
    ),
    RequestType.INSTANCE_IPS: QueryCommand(
        "the IPs of all instances on a link", _q("instance_ips"), options=("link",)
    ),
    RequestType.NODE_DRBD: QueryCommand(
        "a node's DRBD devices: node, minor, instance, disk, role, peer",
        _q("node_drbd"),
        "NODE",
        _NO_NODE,
    ),
    RequestType.NODE_INSTANCES: QueryCommand(
        "the instances of a node, primary and secondary", _q("node_instances"), "NODE", _NO_NODE
    ),
    RequestType.INSTANCE_DISKS: QueryCommand(
        "the disks of an instance, a JSON object a line",
        _q("instance_disks"),
        "INSTANCE",
        _NO_INSTANCE,
    ),
    RequestType.CONFIG: QueryCommand(
        "a part of the configuration, by a JSON pointer such as /cluster/mac_prefix",
        _build_config,
        "POINTER",
    ),
    RequestType.DATA_COLLECTORS: QueryCommand("the data collectors", _q("data_collectors")),
    RequestType.OFFLINE_NODES: QueryCommand("the nodes that are offline", _q("offline_nodes")),
    RequestType.INSTANCES: QueryCommand("all instances", _q("instances"), options=("after",)),
    RequestType.INSTANCE_PRIMARY_NODE: QueryCommand(
        "the node that an instance is on",
        _q("instance_primary_node"),
        "INSTANCE",
        _NO_INSTANCE,
    ),
}


def _ip(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise UsageError(f"not an IP address: {text!r}") from None
