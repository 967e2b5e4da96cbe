"""Merging an input into a draft of the configuration: names become UUIDs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from brine.common.errors import closest
from brine.common.schema import SchemaError, member, shape_of, shown, unknown_key
from brine.common.uids import UidPoolError, parse_uid_pool
from brine.config import defaults, params, schema
from brine.config.model import KINDS, NOUNS, Configuration, Names
from brine.config.params import Mistake
from brine.config.schema import ConfigObject, canonical_uuid, is_private

# Merging the declaration of one object into its present JSON.

Json = dict[str, Any]

STAMPS = frozenset({"serial_no", "ctime", "mtime"})
_ALIASES = {"cluster": {"name": "cluster_name", "master": "master_node"}}
_IPS = frozenset({"ip", "primary_ip", "secondary_ip", "master_ip"})
_IN_DEFAULT_GROUP = frozenset({"nicparams", "beparams"})


@dataclass(frozen=True, slots=True)
class Rules:
    """How an object of one kind is merged.

    :param section: ``cluster``, ``nic`` or a section, as in :mod:`brine.config.defaults`.
    :param kind: its class, which has the keys.
    :param apart: keys that are merged elsewhere.
    """

    section: str
    kind: type[ConfigObject]
    apart: frozenset[str] = field(default=frozenset({"uuid"}))

    def merge(
        self, base: Json, declared: Mapping[str, Any], where: str, *, foreign: bool, new: bool
    ) -> Iterator[Mistake]:
        """Merge a declaration into *base*. An absent key stays, null resets or removes one, objects
        are merged recursively, and other values are replaced.

        :param base: the object's JSON, changed in place.
        :param foreign: the input is a configuration of Ganeti's: unknown keys are kept.
        :param new: the object is new, and gets all defaults.
        """
        aliases = _ALIASES.get(self.section, {})
        known = shape_of(self.kind).by_key
        reset: set[str] = set()
        for given, value in declared.items():
            key = aliases.get(given, given)
            place = member(where, given)
            if key in STAMPS:
                # The output of show or export has it; Brine keeps its own count.
                if new:
                    base[key] = value
                continue
            if key in self.apart:
                continue
            if key not in known:
                if value is None and not foreign:
                    base.pop(key, None)
                elif foreign or key in base:
                    base[key] = value
                else:
                    yield Mistake(place, unknown_key(given, {**known, **aliases}), "unknown-key")
                continue
            if value is None:
                reset.add(key)
                base.pop(key, None)
                continue
            try:
                value = value if foreign else self._easier(key, value)
                if type(value) is dict:
                    value = merged(base.get(key), value)
                known[key].check(value, place)
            except UidPoolError as error:
                yield Mistake(place, str(error), "value")
                continue
            except SchemaError as error:
                yield Mistake(error.where, error.text, "type")
                continue
            base[key] = value
        defaults.fill(self.section, base, only=None if new else reset)

    def _easier(self, key: str, value: Any) -> Any:
        """The stored form of a value that people may write in another form.

        :raises UidPoolError: if a pool of user ids is not valid.
        """
        if key in _IPS and type(value) is str:
            return schema.canonical_ip(value)
        if self.section != "cluster":
            return value
        if key == "uid_pool" and isinstance(value, str | int) and type(value) is not bool:
            return parse_uid_pool(str(value))
        if key in _IN_DEFAULT_GROUP and type(value) is dict:
            # One level, as instances have it: the group is optional here, as there is only one.
            component = params.NIC if key == "nicparams" else params.BACKEND
            if value and all(name in component for name in value):
                return {"default": value}
        return value


def merged(old: Any, new: Json) -> Json:
    """*old* with *new* merged into it, at each level; null removes a key."""
    result: Json = dict(old) if type(old) is dict else {}
    for key, value in new.items():
        if value is None:
            result.pop(key, None)
        elif type(value) is dict:
            result[key] = merged(result.get(key), value)
        else:
            result[key] = value
    return result


# A draft of a configuration: the input merged so far, over the present configuration.


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft of a configuration, which the steps of an apply change.

    :param current: None if there is none yet.
    :param declared: the input.
    :param foreign: whether the input is a configuration of Ganeti's.
    :param old: the present objects by section and UUID.
    :param touched: JSON of the objects that the input names, by section and UUID.
    :param new: UUIDs of the objects that are not in *old*.
    :param removed: UUIDs by section.
    :param keys: the input's names of the touched objects, by section and UUID.
    :param mistakes: in the input.
    :param notes: remarks for people.
    """

    current: Configuration | None
    declared: Json
    foreign: bool
    old: dict[str, dict[str, Any]]
    touched: dict[str, dict[str, Json]] = field(
        default_factory=lambda: {section: {} for section in KINDS}
    )
    new: set[str] = field(default_factory=set)
    removed: dict[str, set[str]] = field(
        default_factory=lambda: {section: set() for section in KINDS}
    )
    keys: dict[str, dict[str, str]] = field(
        default_factory=lambda: {section: {} for section in KINDS}
    )
    mistakes: list[Mistake] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def wrong(self, where: str, text: str, kind: str) -> None:
        """Add a mistake."""
        self.mistakes.append(Mistake(where, text, kind))

    def uuid(self, section: str, given: str) -> str:
        """The stored form of a UUID of the input; other text unchanged."""
        return given if given in self.old[section] else canonical_uuid(given)

    def old_names(self, section: str) -> Names:
        """A finder of present objects by name; disks have none."""
        if self.current is None or section not in NOUNS:
            return Names("object", {})
        return self.current.names(section)

    def value(self, section: str, uuid: str | None, key: str) -> Any:
        """The future value of *key* of an object; None if there is no such object."""
        if uuid is None:
            return None
        touched = self.touched[section].get(uuid)
        if touched is not None:
            return touched.get(key)
        old = None if uuid in self.removed[section] else self.old[section].get(uuid)
        return getattr(old, key, None)

    def nodes(self) -> dict[str, Json]:
        """All future nodes; untouched nodes are copies."""
        nodes = {
            key: self.touched["nodes"].get(key) or node.to_json()
            for key, node in self.old["nodes"].items()
            if key not in self.removed["nodes"]
        }
        return nodes | self.touched["nodes"]

    def removed_names(self) -> dict[str, str]:
        """The names of removed objects by UUID, as far as they can be referred to by name."""
        gone = ((section, uuid) for section in NOUNS for uuid in self.removed[section])
        return {uuid: self.old[section][uuid].name for section, uuid in gone}

    def said(self, section: str, uuid: str) -> Json:
        """The input's declaration of an object."""
        declared = self.declared.get(section)
        key = self.keys[section].get(uuid)
        said = declared.get(key) if type(declared) is dict and key is not None else None
        return said if type(said) is dict else {}


class References:
    """Resolves the references of touched objects in the future configuration.

    A section must be merged before the first reference into it is resolved.

    :param draft: its touched objects are changed in place.
    """

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._known: dict[str, Names] = {}

    def resolve(self, cluster: Json) -> None:
        """Replace all names by UUIDs."""
        self._member(cluster, "master_node", "nodes", "/cluster/master")
        for node in self._draft.touched["nodes"].values():
            self._member(node, "group", "nodegroups", member("/nodes", node["name"]) + "/group")
        for instance in self._draft.touched["instances"].values():
            self._instance(instance)
        for key, disk in self._draft.touched["disks"].items():
            self._disk(disk, member("/disks", key))

    def networks(self, declared: Any, where: str) -> Any:
        """The input's declaration of a group's networks, by UUID instead of name."""
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
        """Remove a network from its groups, because it is removed."""
        networks = self._draft.old["networks"]
        gone = self._draft.removed["networks"]
        return next((uuid for uuid in gone if key in (uuid, networks[uuid].name)), None)

    def find(self, section: str, reference: Any) -> str | None:
        """The UUID of the named object; None if it can't be resolved."""
        if type(reference) is not str:
            return None
        names = self._names(section)
        found = names.exact(reference) or names.exact(self._draft.uuid(section, reference))
        short = names.by_short_name.get(reference, []) if found is None else []
        return short[0] if len(short) == 1 else found

    def _names(self, section: str) -> Names:
        if section not in self._known:
            touched, removed = self._draft.touched[section], self._draft.removed[section]
            kept = {
                key: item.name
                for key, item in self._draft.old[section].items()
                if key not in removed and key not in touched
            }
            kept |= {key: data["name"] for key, data in touched.items()}
            self._known[section] = Names(NOUNS[section], kept)
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
            # A disk follows its instance, so the instance's mistake is enough.
            self._draft.wrong(where, text, "dangling")
        return reference

    def _fault(self, section: str, reference: Any, where: str) -> str:
        noun, known = NOUNS[section], self._names(section)
        if is_private(where) or type(reference) is not str:
            return f"must name a {noun}, and there is none of that name or UUID"
        if short := known.by_short_name.get(reference):
            return f"{len(short)} {noun}s are named {reference}: give the whole name"
        for uuid in self._draft.removed[section]:
            name = self._draft.old[section][uuid].name
            if reference in (uuid, name, name.split(".")[0]):
                return f"the {noun} {name} is being removed"
        hint = closest(reference, known.by_name)
        return f"there is no {noun} {shown(reference)}" + (f"; {hint}" if hint else "")
