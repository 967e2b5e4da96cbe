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

# Merging what is declared of one object into what is known of it.

Json = dict[str, Any]

STAMPS = frozenset({"serial_no", "ctime", "mtime"})
_ALIASES = {"cluster": {"name": "cluster_name", "master": "master_node"}}
_IPS = frozenset({"ip", "primary_ip", "secondary_ip", "master_ip"})
_IN_DEFAULT_GROUP = frozenset({"nicparams", "beparams"})


@dataclass(frozen=True, slots=True)
class Rules:
    """How an object of one kind is merged.

    :param section: ``cluster``, ``nic`` or a section: what :mod:`brine.config.defaults` calls it.
    :param kind: its class, which knows the keys.
    :param apart: keys that somebody else looks after.
    """

    section: str
    kind: type[ConfigObject]
    apart: frozenset[str] = field(default=frozenset({"uuid"}))

    def merge(
        self, base: Json, declared: Mapping[str, Any], where: str, *, foreign: bool, new: bool
    ) -> Iterator[Mistake]:
        """Change *base* by what is *declared*: an absent key stays, null resets or removes one,
        objects are merged in turn, and everything else is replaced.

        :param base: the object's JSON, not shared with anybody.
        :param foreign: a whole configuration of Ganeti's: unknown keys come along.
        :param new: the object is new: it gets all defaults.
        """
        aliases = _ALIASES.get(self.section, {})
        known = shape_of(self.kind).by_key
        reset: set[str] = set()
        for given, value in declared.items():
            key = aliases.get(given, given)
            place = member(where, given)
            if key in STAMPS:
                # Comes along when what was shown or exported is applied; we keep our own count.
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
        """The form that is kept of what a person may write in its place.

        :raises UidPoolError: if a pool of user ids is none.
        """
        if key in _IPS and type(value) is str:
            return schema.canonical_ip(value)
        if self.section != "cluster":
            return value
        if key == "uid_pool" and isinstance(value, str | int) and type(value) is not bool:
            return parse_uid_pool(str(value))
        if key in _IN_DEFAULT_GROUP and type(value) is dict:
            # One level, as instances have it: there is only one group, and it is optional here.
            component = params.NIC if key == "nicparams" else params.BACKEND
            if value and all(name in component for name in value):
                return {"default": value}
        return value


def merged(old: Any, new: Json) -> Json:
    """*new* put over *old*, at each level: null removes a key."""
    result: Json = dict(old) if type(old) is dict else {}
    for key, value in new.items():
        if value is None:
            result.pop(key, None)
        elif type(value) is dict:
            result[key] = merged(result.get(key), value)
        else:
            result[key] = value
    return result


# A configuration in the making: what an input says so far, over what there is.


@dataclass(frozen=True, slots=True)
class Draft:
    """What the parts of an apply work on.

    :param current: None if there is none yet.
    :param declared: the input.
    :param foreign: the input is a whole configuration of Ganeti's.
    :param old: objects by section and UUID, as they are.
    :param touched: JSON of those that the input speaks of, by section and UUID.
    :param new: UUIDs of those that are not in old.
    :param removed: UUIDs by section.
    :param keys: what the input calls the touched ones, by section and UUID.
    :param mistakes: what is wrong in the input.
    :param notes: what a person should know.
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
        """There is a mistake."""
        self.mistakes.append(Mistake(where, text, kind))

    def uuid(self, section: str, given: str) -> str:
        """A UUID from the input as it is stored; what is none as it is."""
        return given if given in self.old[section] else canonical_uuid(given)

    def old_names(self, section: str) -> Names:
        """Finds what there was by its name; disks have none."""
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
        """All nodes as they are going to be; those that are not touched are copies."""
        nodes = {
            key: self.touched["nodes"].get(key) or node.to_json()
            for key, node in self.old["nodes"].items()
            if key not in self.removed["nodes"]
        }
        return nodes | self.touched["nodes"]

    def removed_names(self) -> dict[str, str]:
        """Names by UUID of all that is removed and can be referred to by name."""
        gone = ((section, uuid) for section in NOUNS for uuid in self.removed[section])
        return {uuid: self.old[section][uuid].name for section, uuid in gone}

    def said(self, section: str, uuid: str) -> Json:
        """The input about an object."""
        declared = self.declared.get(section)
        key = self.keys[section].get(uuid)
        said = declared.get(key) if type(declared) is dict and key is not None else None
        return said if type(said) is dict else {}


class References:
    """Resolves what the touched objects refer to, in the configuration as it is going to be. A
    section is looked at when the first reference into it is, and has to be merged by then.

    :param draft: its touched objects are changed in place.
    """

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._known: dict[str, Names] = {}

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
            # A disk follows its instance: there is only one word that is wrong.
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
