"""References between objects in an input: names in, UUIDs out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from brine.common.config.draft import Draft
from brine.common.config.merge import Json
from brine.common.config.shape import is_private, member, shown
from brine.common.nearest import nearest

NOUNS = {"nodes": "node", "nodegroups": "node group", "networks": "network"}
"""What can be referred to, by section."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What of one section can be referred to.

    :param names: UUIDs by whole name.
    :param short: UUIDs by each short name.
    """

    uuids: frozenset[str]
    names: dict[str, str]
    short: dict[str, list[str]]


class References:
    """Resolves what the touched objects refer to, in the configuration as it is going to be. A
    section is looked at when the first reference into it is, and has to be merged by then.

    :param draft: its touched objects are changed in place.
    """

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._known: dict[str, _Known] = {}

    def resolve(self, cluster: Json) -> None:
        """Put UUIDs in the place of all names."""
        self._member(cluster, "master_node", "nodes", "/cluster/master")
        for node in self._draft.touched["nodes"].values():
            self._member(node, "group", "nodegroups", member("/nodes", node["name"]) + "/group")
        for instance in self._draft.touched["instances"].values():
            self._instance(instance)
        for key, disk in self._draft.touched["disks"].items():
            self._disk(disk, member("/disks", key))

    def networks(self, declared: Any, where: str) -> Any:
        """What an input says of a group's networks, by UUID in place of name."""
        if type(declared) is not dict:
            return declared
        resolved: Json = {}
        for key, values in declared.items():
            found = self.find("networks", key)
            if found is None and values is None:
                found = self._leaving(key)
                if found is None:
                    continue  # it has left already
            if found is None:
                found = self._uuid("networks", key, member(where, key))
            if found in resolved:
                self._draft.wrong(member(where, key), "is there twice", "duplicate")
            resolved[found] = values
        return resolved

    def _leaving(self, key: str) -> str | None:
        """A network that goes, and so has to leave its groups."""
        networks = self._draft.old["networks"]
        gone = self._draft.removed["networks"]
        return next((uuid for uuid in gone if key in (uuid, networks[uuid].name)), None)

    def find(self, section: str, reference: Any) -> str | None:
        """The UUID of what is meant, or None if that can't be said."""
        if type(reference) is not str:
            return None
        known = self._section(section)
        if reference in known.uuids:
            return reference
        if reference in known.names:
            return known.names[reference]
        uuid = self._draft.uuid(section, reference)
        if uuid in known.uuids:
            return uuid
        short = known.short.get(reference, [])
        return short[0] if len(short) == 1 else None

    def _section(self, section: str) -> _Known:
        if section not in self._known:
            touched, removed = self._draft.touched[section], self._draft.removed[section]
            kept = {
                key: item.name
                for key, item in self._draft.old[section].items()
                if key not in removed and key not in touched
            }
            kept |= {key: data["name"] for key, data in touched.items()}
            short: dict[str, list[str]] = {}
            for key, name in kept.items():
                end = name.find(".")
                while end > 0:
                    short.setdefault(name[:end], []).append(key)
                    end = name.find(".", end + 1)
            names = {name: key for key, name in kept.items()}
            self._known[section] = _Known(frozenset(kept), names, short)
        return self._known[section]

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
        found = self.find(section, reference)
        if found is not None:
            return found
        text = self._fault(section, reference, where)
        told = {mistake.text for mistake in self._draft.mistakes}
        if not where.startswith("/disks/") or text not in told:
            # A disk follows its instance: there is only one word that is wrong.
            self._draft.wrong(where, text, "dangling")
        return reference

    def _fault(self, section: str, reference: Any, where: str) -> str:
        noun, known = NOUNS[section], self._section(section)
        if is_private(where) or type(reference) is not str:
            return f"must name a {noun}, and there is none of that name or UUID"
        if short := known.short.get(reference):
            return f"{len(short)} {noun}s are named {reference}: give the whole name"
        for uuid in self._draft.removed[section]:
            name = self._draft.old[section][uuid].name
            if reference in (uuid, name, name.split(".")[0]):
                return f"the {noun} {name} is being removed"
        hint = nearest(reference, known.names) if known.names else ""
        text = f"there is no {noun} {shown(reference)}"
        return text + (f"; {hint}" if hint.startswith("did") else "")
