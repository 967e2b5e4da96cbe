"""A draft of the configuration, into which an input is merged: names become UUIDs."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

from brine.common.schema import SchemaError, member, shape_of, unknown_key
from brine.common.uids import UidPoolError, parse_uid_pool
from brine.config import params
from brine.config.model import KINDS, NOUNS, Cluster, ConfigNic, Configuration, Names
from brine.config.params import Mistake
from brine.config.schema import ConfigObject, canonical_ip, canonical_uuid

Json = dict[str, Any]

_STAMPS = frozenset({"serial_no", "ctime", "mtime"})
_ALIASES = {"cluster": {"name": "cluster_name", "master": "master_node"}}
_IPS = frozenset({"ip", "primary_ip", "secondary_ip", "master_ip"})
_IN_DEFAULT_GROUP = {"nicparams": params.NIC, "beparams": params.BACKEND}
_FILLED = {"nicparams": params.NIC_OF_GANETI, "beparams": params.BACKEND}


class Draft:
    """A draft of a configuration, which the steps of an apply change.

    :ivar current: None if there is none yet.
    :ivar declared: the input.
    :ivar foreign: whether the input is a configuration of Ganeti's: its unknown keys are kept.
    :ivar old: the present objects by section and UUID.
    :ivar objects: the future ones: those of *old*, or the JSON of what is new or changed.
    :ivar keys: the input's names of the objects that it declares, by section and UUID.
    :ivar leaving: UUIDs of disks that go unless an instance or the input has them after all.
    """

    def __init__(self, current: Configuration | None, declared: Json, *, foreign: bool) -> None:
        self.current = current
        self.declared = declared
        self.foreign = foreign
        self.old: dict[str, dict[str, Any]] = {
            section: getattr(current, section) if current else {} for section in KINDS
        }
        self.objects = {section: dict(objects) for section, objects in self.old.items()}
        self.keys: dict[str, dict[str, str]] = {section: {} for section in KINDS}
        self.leaving: set[str] = set()
        self.mistakes: list[Mistake] = []
        self.notes: list[str] = []
        self._names: dict[str, Names] = {}

    def wrong(self, where: str, text: str) -> None:
        """Add a mistake."""
        self.mistakes.append(Mistake(where, text))

    def uuid(self, section: str, given: str) -> str:
        """The stored form of a UUID of the input; other text unchanged."""
        return given if given in self.old[section] else canonical_uuid(given)

    def old_names(self, section: str) -> Names:
        """A finder of present objects by name; disks have none."""
        if self.current is None or section not in NOUNS:
            return Names("", {})
        return self.current.names(section)

    def value(self, section: str, uuid: str | None, key: str) -> Any:
        """The future value of *key* of an object; None if there is no such object."""
        item = self.objects[section].get(uuid or "")
        return item.get(key) if type(item) is dict else getattr(item, key, None)

    def edit(self, section: str, uuid: str) -> Json:
        """The JSON of a future object, to be changed in place."""
        item = self.objects[section][uuid]
        made: Json = item if type(item) is dict else item.to_json()
        self.objects[section][uuid] = made
        return made

    def edited(self, section: str) -> dict[str, Json]:
        """The JSON of the new and changed objects of a section, by UUID."""
        return {key: item for key, item in self.objects[section].items() if type(item) is dict}

    def said(self, section: str, uuid: str) -> Json:
        """The input's declaration of an object."""
        key = self.keys[section].get(uuid)
        said: Json = {} if key is None else self.declared[section][key]
        return said

    def removed_names(self) -> dict[str, str]:
        """The names of removed objects, by all that may refer to them."""
        found: dict[str, str] = {}
        for section in NOUNS:
            for uuid, item in self.old[section].items():
                if uuid not in self.objects[section]:
                    found |= dict.fromkeys((uuid, item.name, item.name.split(".")[0]), item.name)
        return found

    @cached_property
    def macs(self) -> set[str]:
        """The MAC addresses of all NICs, old and new."""
        old = (nic.mac for one in self.old["instances"].values() for nic in one.nics)
        edited = self.edited("instances").values()
        new = (str(nic.get("mac")) for one in edited for nic in one.get("nics", ()))
        return {mac.lower() for mac in (*old, *new)}

    def find(self, section: str, reference: Any) -> str | None:
        """The UUID of the named future object; None if that is not clear. A section must be merged
        before the first reference into it is resolved."""
        if type(reference) is not str:
            return None
        if section not in self._names:
            every = {uuid: self.value(section, uuid, "name") for uuid in self.objects[section]}
            self._names[section] = Names(section, every)
        names = self._names[section]
        found = names.exact(reference) or names.exact(self.uuid(section, reference))
        short = names.short(reference) if found is None else []
        return short[0] if len(short) == 1 else found

    def merge(
        self,
        kind: str,
        base: Json,
        declared: Mapping[str, Any],
        where: str,
        *,
        new: bool,
        apart: Collection[str] = ("uuid",),
    ) -> None:
        """Merge the declaration of one object into *base*, its JSON, in place.

        An absent key stays, null resets or removes one, objects are merged recursively, and other
        values are replaced.

        :param kind: as in :data:`CLASSES`.
        :param new: the object is new, and gets all defaults.
        :param apart: keys that are merged elsewhere.
        """
        aliases = _ALIASES.get(kind, {})
        known = shape_of(CLASSES[kind]).by_key
        reset: set[str] = set()
        for given, value in declared.items():
            key = aliases.get(given, given)
            place = member(where, given)
            if key in _STAMPS:
                # The output of show or export has it; Brine keeps its own count.
                if new:
                    base[key] = value
            elif key in apart:
                pass
            elif key not in known:
                if value is None and not self.foreign:
                    base.pop(key, None)
                elif self.foreign or key in base:
                    base[key] = value
                else:
                    self.wrong(place, unknown_key(given, {**known, **aliases}))
            elif value is None:
                reset.add(key)
                base.pop(key, None)
            else:
                try:
                    value = value if self.foreign else _stored(kind, key, value)
                    if type(value) is dict:
                        value = _merged(base.get(key), value)
                    known[key].check(value, place)
                    base[key] = value
                except UidPoolError as error:
                    self.wrong(place, str(error))
                except SchemaError as error:
                    self.wrong(error.where, error.text)
        fill(kind, base, only=None if new else reset)


def _stored(kind: str, key: str, value: Any) -> Any:
    """The stored form of a value that people may write in another form; raises UidPoolError."""
    if key in _IPS and type(value) is str:
        return canonical_ip(value)
    if kind != "cluster":
        return value
    if key == "uid_pool" and type(value) in (str, int):
        return parse_uid_pool(str(value))
    known = _IN_DEFAULT_GROUP.get(key, {})
    if value and type(value) is dict and all(name in known for name in value):
        # One level, as instances have it: the group is optional here, as there is only one.
        return {"default": value}
    return value


def _merged(old: Any, new: Json) -> Json:
    """*old* with *new* merged into it, at each level; null removes a key."""
    result: Json = dict(old) if type(old) is dict else {}
    for key, value in new.items():
        if value is None:
            result.pop(key, None)
        elif type(value) is dict:
            result[key] = _merged(result.get(key), value)
        else:
            result[key] = value
    return result


# The default values of new objects: every key that Ganeti's daemons require.

_ABSENT = {
    "cluster": """master_node master_ip dsahostkeypub diagnose_data_collector_filename
        maint_round_delay maint_balance maint_balance_threshold enabled_predictive_queue""",
    "nodegroups": "",
    "nodes": "secondary_ip master_candidate group hv_state disk_state",
    "networks": "network",
    "instances": "primary_node secondary_nodes hypervisor disk_template forthcoming",
    "disks": "tags logical_id forthcoming",
    "nic": "mac",
}
"""The keys that a new object's JSON lacks, beside those that are null or must be given."""

_LIMITS = {
    "cpu-count": (1, 8),
    "disk-count": (1, 16),
    "disk-size": (1024, 1048576),
    "memory-size": (128, 32768),
    "nic-count": (1, 8),
    "spindle-use": (1, 12),
}
_TEMPLATES = ["plain", "file", "blockdev", "rbd"]

_NOT_AS_ABSENT: dict[str, Json] = {
    "cluster": {
        "beparams": {"default": params.defaults(params.BACKEND)},
        "nicparams": {"default": params.defaults(params.NIC_OF_GANETI)},
        "ndparams": params.defaults(params.NODE),
        "modify_etc_hosts": False,
        "modify_ssh_setup": False,
        "enabled_disk_templates": _TEMPLATES,
        "compression_tools": ["gzip"],
        "enabled_user_shutdown": True,
        "ipolicy": {
            "disk-templates": _TEMPLATES,
            "minmax": [
                {
                    "min": {name: low for name, (low, _) in _LIMITS.items()},
                    "max": {name: high for name, (_, high) in _LIMITS.items()},
                }
            ],
            "std": {name: low for name, (low, _) in _LIMITS.items()},
            "spindle-ratio": 32.0,
            "vcpu-ratio": 4.0,
        },
    },
    "instances": {"os": "noop", "admin_state": "up"},
    "disks": {"dev_type": "plain"},
}
"""The values of new objects that differ from the meaning of an absent key."""


CLASSES: dict[str, type[ConfigObject]] = {"cluster": Cluster, "nic": ConfigNic, **KINDS}
"""The kinds of objects: ``cluster``, ``nic``, or a section."""


def new_object(kind: str) -> Json:
    """The values that a new object of a kind has where the input says nothing."""
    left_out = {"uuid", *_ABSENT[kind].split()}
    found = {}
    for key, what in shape_of(CLASSES[kind]).by_key.items():
        if not what.is_required and what.default is not None and key not in left_out:
            found[key] = [] if what.default == () else what.default
    return copy.deepcopy(found | _NOT_AS_ABSENT.get(kind, {}))


def fill(kind: str, data: Json, *, only: set[str] | None = None) -> None:
    """Add missing keys to *data*.

    :param kind: of :data:`CLASSES`.
    :param only: these keys; None means all.
    """
    for key, value in new_object(kind).items():
        if key not in data and (only is None or key in only):
            data[key] = value
    if kind == "cluster":
        # Ganeti's daemons load a cluster only if these are complete.
        data["ndparams"] = params.defaults(params.NODE) | data.get("ndparams", {})
        for key, component in _FILLED.items():
            groups = data.get(key, {})
            filled = params.defaults(component) | groups.get("default", {})
            data[key] = groups | {"default": filled}
