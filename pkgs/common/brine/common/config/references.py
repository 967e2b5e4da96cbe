"""References between objects in an input: names in, UUIDs out."""

from __future__ import annotations

from typing import Any

from brine.common.config.merge import Json
from brine.common.config.params import Mistake
from brine.common.config.shape import member, shown
from brine.common.settings import nearest

_NOUNS = {"nodes": "node", "nodegroups": "node group", "networks": "network"}


class References:
    """Resolves what the touched objects refer to, in the configuration as it is going to be.

    :param old: objects by section and UUID, as they are.
    :param touched: JSON of those that the input speaks of; changed in place.
    :param removed: UUIDs by section.
    :param mistakes: where to add what is found.
    """

    def __init__(
        self,
        old: dict[str, dict[str, Any]],
        touched: dict[str, dict[str, Json]],
        removed: dict[str, set[str]],
        mistakes: list[Mistake],
    ) -> None:
        self._touched = touched
        self._removed = removed
        self._mistakes = mistakes
        self._names: dict[str, dict[str, str]] = {}
        self._short: dict[str, dict[str, list[str]]] = {}
        for section in _NOUNS:
            names = {
                item.name: key
                for key, item in old[section].items()
                if key not in removed[section] and key not in touched[section]
            }
            names |= {data["name"]: key for key, data in touched[section].items()}
            self._names[section] = names
            short: dict[str, list[str]] = {}
            for name, key in names.items():
                end = name.find(".")
                while end > 0:
                    short.setdefault(name[:end], []).append(key)
                    end = name.find(".", end + 1)
            self._short[section] = short
            self._uuids = getattr(self, "_uuids", {}) | {section: set(names.values())}

    def resolve(self, cluster: Json) -> None:
        """Put UUIDs in the place of all names."""
        self._member(cluster, "master_node", "nodes", "/cluster/master")
        for node in self._touched["nodes"].values():
            self._member(node, "group", "nodegroups", member("/nodes", node["name"]) + "/group")
        for group in self._touched["nodegroups"].values():
            where = member("/nodegroups", group["name"]) + "/networks"
            networks = group.get("networks")
            if type(networks) is dict:
                group["networks"] = {
                    self._uuid("networks", key, member(where, key)): value
                    for key, value in networks.items()
                }
        for instance in self._touched["instances"].values():
            self._instance(instance)
        for key, disk in self._touched["disks"].items():
            self._disk(disk, member("/disks", key))

    def _instance(self, instance: Json) -> None:
        where = member("/instances", instance["name"])
        self._member(instance, "primary_node", "nodes", f"{where}/primary_node")
        self._each(instance, "secondary_nodes", f"{where}/secondary_nodes")
        for index, nic in enumerate(instance.get("nics", ())):
            if isinstance(nic, dict):
                self._member(nic, "network", "networks", f"{where}/nics/{index}/network")

    def _disk(self, disk: Json, where: str) -> None:
        self._each(disk, "nodes", f"{where}/nodes")
        logical_id = disk.get("logical_id")
        if disk.get("dev_type") == "drbd" and type(logical_id) is list:
            places = (f"{where}/logical_id/{index}" for index in range(2))
            ends = [
                self._uuid("nodes", node, place)
                for node, place in zip(logical_id[:2], places, strict=False)
            ]
            disk["logical_id"] = ends + logical_id[2:]
        children = disk.get("children")
        for index, child in enumerate(children if type(children) is list else ()):
            if isinstance(child, dict):
                self._disk(child, f"{where}/children/{index}")

    def _member(self, data: Json, key: str, section: str, where: str) -> None:
        if data.get(key):
            data[key] = self._uuid(section, data[key], where)

    def _each(self, data: Json, key: str, where: str) -> None:
        values = data.get(key)
        if type(values) is list and values:
            data[key] = [
                self._uuid("nodes", value, f"{where}/{index}") for index, value in enumerate(values)
            ]

    def _uuid(self, section: str, reference: Any, where: str) -> Any:
        if reference in self._uuids[section]:
            return reference
        names = self._names[section]
        if reference in names:
            return names[reference]
        noun = _NOUNS[section]
        short = self._short[section].get(reference, [])
        if len(short) == 1:
            return short[0]
        if short:
            text = f"{len(short)} {noun}s are named {reference}: give the whole name"
        elif reference in self._removed[section]:
            text = f"the {noun} is being removed"
        else:
            hint = nearest(str(reference), names) if names else ""
            text = f"there is no {noun} {shown(reference)}"
            text += f"; {hint}" if hint.startswith("did") else ""
        if not where.startswith("/disks/") or text not in {each.text for each in self._mistakes}:
            # A disk follows its instance: there is only one word that is wrong.
            self._mistakes.append(Mistake(where, text, "dangling"))
        return reference
