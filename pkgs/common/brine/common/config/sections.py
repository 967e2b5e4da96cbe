"""Merging the sections of an input, object by object."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from brine.common.config import params
from brine.common.config.configuration import KINDS
from brine.common.config.draft import Draft
from brine.common.config.formats import is_uuid
from brine.common.config.merge import Json, Rules
from brine.common.config.references import References
from brine.common.config.shape import member, shown

# Networks come before what names them as a key.
_ORDER = ("networks", "nodegroups", "nodes", "instances", "disks")
_APART = {"instances": frozenset({"uuid", "name", "nics", "disks"})}
_HOSTS = frozenset({"nodes", "instances"})
_MOST_NAMES = 5
_ALWAYS_APART = frozenset({"uuid", "name"})


class Sections:
    """Merges all sections, but for the parts of instances and what objects refer to.

    :param references: resolves a group's networks.
    :param prune: objects that a declared section does not name are removed.
    """

    def __init__(self, draft: Draft, references: References, *, prune: bool) -> None:
        self._draft = draft
        self._references = references
        self._prune = prune
        self._short: dict[str, dict[str, list[str]]] = {}

    def merge(self) -> None:
        """Fill the draft with what is touched, new and removed."""
        for section in _ORDER:
            self._merge_section(section)

    def _merge_section(self, section: str) -> None:
        draft = self._draft
        declared = draft.declared.get(section)
        if declared is None:
            return
        if type(declared) is not dict:
            text = f"must be an object, by name or UUID, but is {shown(declared)}"
            draft.wrong(f"/{section}", text, "type")
            return
        place = f"/{section}"
        rules = Rules(section, KINDS[section], _APART.get(section, _ALWAYS_APART))
        by_name = {}
        if section != "disks":
            by_name = {item.name: key for key, item in reversed(draft.old[section].items())}
        for key, value in declared.items():
            if value is None:
                if found := self._known(section, key, by_name):
                    self._remove(section, found)
                elif not self._is_short(section, key):
                    draft.notes.append(f"nothing to remove: there is no {member(place, key)}")
            elif type(value) is not dict:
                text = f"must be an object or null, but is {shown(value)}"
                draft.wrong(member(place, key), text, "type")
            else:
                self._merge_object(section, rules, key, value, by_name)
        if self._prune:
            for key in draft.old[section]:
                if key not in draft.touched[section]:
                    self._remove(section, key)

    def _known(self, section: str, key: str, by_name: Mapping[str, str]) -> str | None:
        found = self._draft.uuid(section, key)
        return found if found in self._draft.old[section] else by_name.get(key)

    def _is_short(self, section: str, key: str) -> bool:
        """Whether *key*, which is nobody's name, is the first part of one: a mistake then. What is
        merged goes by whole names, as a short one may be another object's tomorrow."""
        if self._is_uuid(section, key):
            return False
        declared = self._draft.declared[section]
        names = [
            name
            for name in self._short_names(section).get(key, ())
            if name not in declared or declared[name] is not None  # else it goes
        ]
        if names:
            whole = " or ".join(sorted(names)[:_MOST_NAMES])
            text = f"is short for {whole}: give the whole name"
            self._draft.wrong(member(f"/{section}", key), text, "short-name")
        return bool(names)

    def _short_names(self, section: str) -> dict[str, list[str]]:
        """Names by their first part."""
        if section not in self._short:
            short: dict[str, list[str]] = {}
            for item in self._draft.old[section].values() if section in _HOSTS else ():
                short.setdefault(item.name.partition(".")[0], []).append(item.name)
            self._short[section] = short
        return self._short[section]

    def _merge_object(
        self, section: str, rules: Rules, key: str, value: Json, by_name: Mapping[str, str]
    ) -> None:
        draft = self._draft
        where = member(f"/{section}", key)
        found = self._identify(section, where, key, value, by_name)
        if found is None:
            return
        if found in draft.touched[section]:
            text = f"is there twice: also as {draft.keys[section][found]}"
            draft.wrong(where, text, "duplicate")
            return
        is_new = found not in draft.old[section]
        if is_new and value.get("uuid") is None and self._is_short(section, key):
            return
        base: Json = {"uuid": found} if is_new else draft.old[section][found].to_json()
        if not self._name(section, where, key, base, value):
            return
        if is_new:
            draft.new.add(found)
        if section == "nodegroups" and "networks" in value and not draft.foreign:
            networks = self._references.networks(value["networks"], f"{where}/networks")
            value = value | {"networks": networks}
        elif section == "instances":
            self._check_instance(where, base, value, new=is_new)
            value = self._kept_state(base, value, new=is_new)
        draft.mistakes.extend(rules.merge(base, value, where, foreign=draft.foreign, new=is_new))
        if section == "nodes":
            self._finish_node(where, base, value)
        draft.touched[section][found] = base
        draft.keys[section][found] = key

    def _identify(
        self, section: str, where: str, key: str, value: Json, by_name: Mapping[str, str]
    ) -> str | None:
        """The UUID of the object that is meant, a new one if it is new; None after a mistake."""
        draft = self._draft
        given = value.get("uuid")
        if given is not None:
            if type(given) is not str or not is_uuid(given):
                draft.wrong(f"{where}/uuid", f"{shown(given)} is no UUID", "value")
                return None
            given = draft.uuid(section, given)
        uuid_of_key = draft.uuid(section, key) if self._is_uuid(section, key) else None
        if uuid_of_key is None and value.get("name") not in (None, key):
            text = f"is {shown(value['name'])}, but the key says {key}"
            draft.wrong(f"{where}/name", text, "value")
            return None
        if given and uuid_of_key and given != uuid_of_key:
            draft.wrong(f"{where}/uuid", f"is {given}, but the key says {key}", "value")
            return None
        if given and uuid_of_key is None and by_name.get(key, given) != given:
            text = f"is {given}, but {key} has {by_name[key]}: a UUID never changes"
            draft.wrong(f"{where}/uuid", text, "value")
            return None
        known = self._known(section, given or key, by_name)
        return known or given or uuid_of_key or str(uuid.uuid4())

    def _is_uuid(self, section: str, key: str) -> bool:
        return key in self._draft.old[section] or is_uuid(key)

    def _name(self, section: str, where: str, key: str, base: Json, value: Json) -> bool:
        """Name *base*; False after a mistake."""
        if section == "disks":
            if "name" in value:
                base["name"] = value["name"]
            return True
        name = value.get("name") if self._is_uuid(section, key) else key
        if name is None and "name" not in base:
            self._draft.wrong(where, "a new object by UUID needs a name", "missing")
            return False
        if name is not None:
            if type(name) is not str:
                text = f"must be a string, but is {shown(name)}"
                self._draft.wrong(f"{where}/name", text, "type")
                return False
            base["name"] = name
        return True

    def _check_instance(self, where: str, base: Json, value: Json, *, new: bool) -> None:
        draft = self._draft
        given = value.get("hvparams")
        if type(given) is dict and not draft.foreign:
            for name in sorted(params.GLOBAL_HYPERVISOR & given.keys()):
                text = "is a parameter of the whole cluster, not of an instance"
                draft.wrong(f"{where}/hvparams/{name}", text, "misplaced-parameter")
        if new and not value.get("primary_node") and not value.get("forthcoming"):
            draft.wrong(f"{where}/primary_node", "is needed", "missing")
            base["primary_node"] = ""

    def _kept_state(self, base: Json, value: Json, *, new: bool) -> Json:
        """*value* without an admin_state that must not undo a user's shutdown. Null says no more
        than an absent key does."""
        if new or value.get("admin_state_source") is not None:
            return value
        if base.get("admin_state_source") == "user" and base.get("admin_state") == "down":
            if value.get("admin_state") not in ("down", None):
                self._draft.notes.append(
                    f"{base['name']}: stays down, as its user shut it down "
                    "(admin_state_source: admin overrules that)"
                )
            kept = ("admin_state", "admin_state_source")
            return {key: item for key, item in value.items() if key not in kept}
        return value

    def _finish_node(self, where: str, base: Json, value: Json) -> None:
        draft = self._draft
        if not base.get("primary_ip"):
            draft.wrong(f"{where}/primary_ip", "is needed", "missing")
            base["primary_ip"] = ""
        base.setdefault("secondary_ip", base["primary_ip"])
        if base.get("offline") or base.get("drained"):
            if value.get("master_candidate"):
                text = "a node that is offline or drained can be no master candidate"
                draft.wrong(f"{where}/master_candidate", text, "value")
            base["master_candidate"] = False
        elif base["uuid"] not in draft.new:
            base.setdefault("master_candidate", False)

    def _remove(self, section: str, key: str) -> None:
        draft = self._draft
        draft.removed[section].add(key)
        draft.touched[section].pop(key, None)
        if section == "instances":
            draft.removed["disks"].update(draft.old["instances"][key].disks)
