"""The right answers to confd's questions, looked up in a configuration in the plainest way."""

from __future__ import annotations

import json
from typing import Any

from lab.confd_wire import Asks

_MASTER, _CANDIDATE, _OFFLINE, _DRAINED, _REGULAR = range(5)
_UNORDERED = frozenset({Asks.NODE_IPS, Asks.MASTER_CANDIDATE_IPS, Asks.INSTANCE_IPS})
_UNORDERED_ROWS = frozenset({Asks.NODE_DRBD})
_UNORDERED_LISTS = frozenset({Asks.NODE_INSTANCES})


def normal(type: int, answer: Any) -> Any:
    """An answer with its lists in one order, where the order has no meaning.

    Ganeti's daemon has most lists in the order of its hash tables, and rounds times its own way.
    """
    answer = _with_times(answer)
    if type in _UNORDERED:
        return sorted(answer)
    if type in _UNORDERED_ROWS:
        return sorted(answer, key=json.dumps)
    if type in _UNORDERED_LISTS:
        return [sorted(part, key=lambda instance: str(instance["name"])) for part in answer]
    return answer


class _Time(float):
    """Seconds, of which Ganeti's daemon keeps microseconds: others within two of these are equal.

    To round both would not do: what lies between two roundings comes out as either.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int | float) and abs(float(self) - other) < 2e-6

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]


def _with_times(answer: Any) -> Any:
    if isinstance(answer, float):
        return _Time(answer)
    if isinstance(answer, list):
        return [_with_times(one) for one in answer]
    if isinstance(answer, dict):
        return {key: _with_times(value) for key, value in answer.items()}
    return answer


class RightAnswers:
    """The right answers of a daemon that has this configuration."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._cluster = config["cluster"]
        self._nodes = config["nodes"]
        self._node_ids = {node["name"]: uuid for uuid, node in self._nodes.items()}
        self._instances = {it["name"]: it for it in config["instances"].values()}
        self._addresses: dict[tuple[str, str], str] = {}
        self._links: dict[str, list[str]] = {}
        self._primary: dict[str, list[Any]] = {}
        self._secondary: dict[str, list[Any]] = {}
        self._minors: dict[str, list[Any]] = {}
        default = self._cluster["nicparams"]["default"]["link"]
        self._default_link = default
        for instance in config["instances"].values():
            self._primary.setdefault(instance["primary_node"], []).append(instance)
            for nic in instance["nics"]:
                if nic.get("ip") is None:
                    continue
                link = nic["nicparams"].get("link", default)
                self._links.setdefault(link, []).append(nic["ip"])
                self._addresses[link, nic["ip"]] = instance["primary_node"]
            for number, uuid in enumerate(instance["disks"]):
                if config["disks"][uuid]["dev_type"] == "drbd":
                    self._add_mirror(instance, number, config["disks"][uuid]["logical_id"])

    def serial(self, type: int) -> int:
        """The serial number that an answer carries: the cluster's, but for a ping."""
        return 0 if type == Asks.PING else int(self._cluster["serial_no"])

    def ganetis_serial(self, type: int, query: Any) -> int:
        """The serial number that Ganeti's daemon gives: of a node or an instance, its own."""
        if type in (Asks.NODE_DRBD, Asks.NODE_INSTANCES):
            return int(self._nodes[self._node_ids[query]]["serial_no"])
        if type == Asks.INSTANCE_DISKS:
            return int(self._instances[query]["serial_no"])
        return self.serial(type)

    def answer(self, type: int, query: Any) -> Any:
        """The answer to a question about something that there is, in normal order."""
        return normal(type, self._answer(type, query))

    def _answer(self, type: int, query: Any) -> Any:
        match type:
            case Asks.PING:
                return self._config["version"]
            case Asks.NODE_ROLE:
                return self._role(self._node_ids[query])
            case Asks.NODE_IP_OF_INSTANCE_IP:
                link = query.get("0", self._default_link)
                return self._nodes[self._addresses[link, query["1"]]]["primary_ip"]
            case Asks.CLUSTER_MASTER:
                return self._master(query)
            case Asks.NODE_IPS:
                return [node["primary_ip"] for node in self._nodes.values()]
            case Asks.MASTER_CANDIDATE_IPS:
                nodes = self._nodes.values()
                return [node["primary_ip"] for node in nodes if node["master_candidate"]]
            case Asks.INSTANCE_IPS:
                return self._links.get(query or self._default_link, [])
            case Asks.NODE_DRBD:
                return self._minors.get(self._node_ids[query], [])
            case Asks.NODE_INSTANCES:
                node = self._node_ids[query]
                return [self._primary.get(node, []), self._secondary.get(node, [])]
            case Asks.INSTANCE_DISKS:
                return [self._config["disks"][uuid] for uuid in self._instances[query]["disks"]]
            case Asks.CONFIG:
                return self._pointed_at(query)
            case Asks.DATA_COLLECTORS:
                return self._cluster["data_collectors"]
        raise ValueError(f"no such type of request: {type}")

    def _role(self, uuid: str) -> int:
        node = self._nodes[uuid]
        if uuid == self._cluster["master_node"]:
            return _MASTER
        if node["master_candidate"]:
            return _CANDIDATE
        return _DRAINED if node["drained"] else _OFFLINE if node["offline"] else _REGULAR

    def _master(self, query: Any) -> Any:
        node = self._nodes[self._cluster["master_node"]]
        fields = [node["name"], self._cluster["master_ip"], node["primary_ip"]]
        return fields[0] if query is None else [fields[number] for number in query["3"]]

    def _add_mirror(self, instance: dict[str, Any], number: int, logical_id: list[Any]) -> None:
        one, other, _port, one_minor, other_minor, _secret = logical_id
        for node, minor, peer in ((one, one_minor, other), (other, other_minor, one)):
            primary = node == instance["primary_node"]
            names = self._nodes[node]["name"], self._nodes[peer]["name"]
            role = "primary" if primary else "secondary"
            row = [names[0], minor, instance["name"], f"disk/{number}", role, names[1]]
            self._minors.setdefault(node, []).append(row)
            if not primary:
                self._secondary.setdefault(node, []).append(instance)

    def _pointed_at(self, pointer: str) -> Any:
        value: Any = self._config
        for part in pointer.split("/")[1:]:
            value = value[int(part)] if isinstance(value, list) else value[part]
        return value
