"""Matching the NICs and disks of an input to those of the configuration."""

from __future__ import annotations

import hashlib
import itertools
import uuid
from collections.abc import Sequence
from typing import Any

from brine.common.schema import member, shown
from brine.config import params
from brine.config.merge import Draft, Json, References, Rules
from brine.config.model import KINDS, ConfigDisk, ConfigNic
from brine.config.schema import canonical_uuid, is_uuid

_NIC = Rules("nic", ConfigNic)
_DISK = Rules("disks", ConfigDisk)
# A MAC address of our choice, if there is none yet; the first two are what Ganeti's tools take.
_GIVE_ONE = ("auto", "generate", "", None)


class InstanceParts:
    """Merges the NICs and disks that an input lists.

    :param draft: its touched instances are changed in place; disks are added to those that are
        touched and removed.
    :param cluster: the cluster's JSON as it is going to be.
    :param references: finds nodes, groups and networks.
    """

    def __init__(self, draft: Draft, cluster: Json, references: References) -> None:
        self._draft = draft
        self._cluster = cluster
        self._references = references
        self._macs: set[str] | None = None

    def merge(self) -> None:
        """Merge the parts of all instances that are touched, and see to what a new primary node
        means for them."""
        draft = self._draft
        for found, instance in draft.touched["instances"].items():
            where = member("/instances", draft.keys["instances"][found])
            self._merge(where, instance, draft.said("instances", found))
        # A disk may go from one instance to another, or be kept by name.
        for instance in draft.touched["instances"].values():
            draft.removed["disks"].difference_update(instance.get("disks", ()))
        draft.removed["disks"].difference_update(draft.keys["disks"])

    def _merge(self, where: str, instance: Json, declared: Json) -> None:
        if not self._draft.foreign and "hypervisor" not in instance:
            instance["hypervisor"] = (self._cluster.get("enabled_hypervisors") or ["kvm"])[0]
        instance.setdefault("hypervisor", "kvm")
        if "nics" in declared:
            self._nics(f"{where}/nics", instance, declared["nics"] or [])
        if "disks" in declared:
            self._disks(f"{where}/disks", instance, declared["disks"] or [])
        else:
            self._move_disks(instance)

    def _nics(self, where: str, instance: Json, declared: Any) -> None:
        if not self._is_list(where, declared, dict):
            return
        before: list[Json] = instance.get("nics", [])
        matches = _matches(declared, before, ("uuid", "name", "mac"))
        made = []
        for index, (given, match) in enumerate(zip(declared, matches, strict=True)):
            place = f"{where}/{index}"
            nic = dict(match) if match else {"uuid": self._fresh_uuid(place, given)}
            values = {key: value for key, value in given.items() if key != "uuid"}
            if values.get("mac") in _GIVE_ONE:
                values.pop("mac", None)
            if not self._draft.foreign:
                self._inherit(instance, nic, values)
            self._draft.mistakes.extend(
                _NIC.merge(nic, values, place, foreign=self._draft.foreign, new=match is None)
            )
            if not nic.get("mac"):
                nic["mac"] = self._free_mac(instance["name"], index, nic.get("network"))
            made.append(nic)
        instance["nics"] = made

    def _inherit(self, instance: Json, nic: Json, values: Json) -> None:
        """A NIC that comes into a network gets the parameters that its node's group has for that,
        as Ganeti does it: nobody looks them up there afterwards.

        :param nic: as it was; its nicparams are replaced.
        :param values: what is declared of it; a reset of nicparams is taken out.
        """
        before = nic.get("network")
        wanted = values.get("network", before)
        after = self._references.find("networks", wanted)
        is_reset = "nicparams" in values and values["nicparams"] is None
        if not is_reset and (after == before or (wanted and after is None)):
            return
        inherited = self._network_params(instance, after)
        if inherited:
            nic["nicparams"] = inherited
            if is_reset:
                del values["nicparams"]
        elif left := self._network_params(instance, before):
            own = nic.get("nicparams", {}).items()
            nic["nicparams"] = {key: value for key, value in own if left.get(key) != value}

    def _network_params(self, instance: Json, network: str | None) -> Json:
        """NIC parameters of a network on the instance's primary node."""
        node = self._references.find("nodes", instance.get("primary_node"))
        group = self._draft.value("nodes", node, "group")
        found = self._references.find("nodegroups", group)
        networks = self._draft.value("nodegroups", found, "networks")
        values = networks.get(network) if type(networks) is dict and network else None
        return dict(values) if type(values) is dict else {}

    def _disks(self, where: str, instance: Json, declared: Any) -> None:
        if not self._is_list(where, declared, dict, str):
            return
        old_keys: list[str] = instance.get("disks", [])
        before = [self._disk(key) for key in old_keys]
        inline = [
            given if type(given) is dict else {"uuid": self._draft.uuid("disks", given)}
            for given in declared
        ]
        there = [disk for disk in before if disk]
        if not self._is_clear(where, inline, there):
            return
        matches = _matches(inline, there, ("uuid", "name"))
        keys = []
        for index, (given, match) in enumerate(zip(inline, matches, strict=True)):
            place = f"{where}/{index}"
            if type(declared[index]) is str:
                keys.append(given["uuid"])  # of a disk among /disks; verified at the end
                continue
            disk = dict(match) if match else {"uuid": self._fresh_uuid(place, given)}
            self._draft.mistakes.extend(
                _DISK.merge(disk, given, place, foreign=self._draft.foreign, new=match is None)
            )
            if match is None:
                self._finish_disk(place, disk, index, instance, given)
            elif not given.get("iv_name"):
                disk["iv_name"] = f"disk/{index}"
            self._follow(disk, instance)
            self._draft.touched["disks"][disk["uuid"]] = disk
            keys.append(disk["uuid"])
        self._draft.removed["disks"].update(key for key in old_keys if key not in keys)
        instance["disks"] = keys

    def _is_clear(self, where: str, given: list[Json], before: list[Json]) -> bool:
        """Whether it is said which disks go; by its place alone, the wrong one could."""
        if self._draft.foreign or len(given) >= len(before):
            return True
        matches = _matches(given, before, ("uuid", "name"), by_place=False)
        unclear = [
            index
            for index, (item, match) in enumerate(zip(given, matches, strict=True))
            if match is None and item.get("uuid") is None
        ]
        for index in unclear:
            text = f"there are {len(before)} disks: say by uuid or name which of them this is"
            self._draft.wrong(f"{where}/{index}", text, "missing")
        return not unclear

    def _finish_disk(self, where: str, disk: Json, index: int, instance: Json, given: Json) -> None:
        if not given.get("size") and disk.get("dev_type") != "blockdev":
            self._draft.wrong(f"{where}/size", "is needed: MiB", "missing")
        disk["iv_name"] = given.get("iv_name") or f"disk/{index}"
        if not disk.get("nodes") and instance.get("primary_node"):
            disk["nodes"] = [instance["primary_node"]]
        if disk.get("logical_id"):
            return
        group = self._cluster.get("volume_group_name")
        if disk.get("dev_type") != "plain":
            text = f"is needed for a disk of type {disk.get('dev_type')}"
            self._draft.wrong(f"{where}/logical_id", text, "missing")
        elif not group:
            text = "is needed, or /cluster/volume_group_name"
            self._draft.wrong(f"{where}/logical_id", text, "missing")
        else:
            disk["logical_id"] = [group, f"{disk['uuid']}.disk{index}"]

    def _move_disks(self, instance: Json) -> None:
        """Disks that are on the primary node alone are on the new one when it changes."""
        old = self._draft.old["instances"].get(instance["uuid"])
        if old is None or old.primary_node == instance.get("primary_node"):
            return
        for key in instance.get("disks", ()):
            disk = self._disk(key)
            if disk:
                self._follow(disk, instance)
                self._draft.touched["disks"][key] = disk

    def _follow(self, disk: Json, instance: Json) -> None:
        old = self._draft.old["instances"].get(instance["uuid"])
        if old and old.primary_node and disk.get("nodes") == [old.primary_node]:
            disk["nodes"] = [instance.get("primary_node")]

    def _disk(self, key: str) -> Json | None:
        touched: Json | None = self._draft.touched["disks"].get(key)
        if touched is not None:
            return touched
        old = self._draft.old["disks"].get(key)
        return old.to_json() if old else None

    def _is_list(self, where: str, declared: Any, *kinds: type) -> bool:
        noun = "an object" if len(kinds) == 1 else "an object or a UUID"
        if type(declared) is not list:
            text = f"must be a list, but is {shown(declared)}"
            self._draft.wrong(where, text, "type")
            return False
        wrong = [index for index, item in enumerate(declared) if type(item) not in kinds]
        for index in wrong:
            text = f"must be {noun}, but is {shown(declared[index])}"
            self._draft.wrong(f"{where}/{index}", text, "type")
        return not wrong

    def _fresh_uuid(self, where: str, given: Json) -> str:
        wanted = given.get("uuid")
        if wanted is None:
            return str(uuid.uuid4())
        if type(wanted) is not str or not is_uuid(wanted):
            self._draft.wrong(f"{where}/uuid", f"{shown(wanted)} is no UUID", "value")
        return canonical_uuid(str(wanted))

    def _free_mac(self, name: str, index: int, network: Any) -> str:
        """A MAC address that nobody has, the same for the same input, so that a dry run tells the
        truth."""
        if self._macs is None:
            self._macs = {
                nic.mac.lower()
                for instance in self._draft.old["instances"].values()
                for nic in instance.nics
            }
            for data in self._draft.touched["instances"].values():
                nics = data.get("nics")
                self._macs.update(str(nic.get("mac")).lower() for nic in nics or ())
        prefix = self._mac_prefix(network)
        seed = hashlib.sha256(f"{name}/{index}".encode()).digest()
        start = int.from_bytes(seed[:3], "big")
        for number in itertools.islice(itertools.count(start), 1 << 24):
            low = (number % (1 << 24)).to_bytes(3, "big")
            mac = f"{prefix}:{low.hex(':')}"
            if mac not in self._macs:
                self._macs.add(mac)
                return mac
        return ""  # sixteen million NICs: the check for MAC addresses says the rest

    def _mac_prefix(self, network: Any) -> str:
        own = None
        for key, data in self._draft.touched["networks"].items():
            if network in (key, data.get("name")):
                own = data.get("mac_prefix")
        for key, item in self._draft.old["networks"].items():
            if own is None and network in (key, item.name):
                own = item.mac_prefix
        return str(own or self._cluster.get("mac_prefix") or "aa:00:00").lower()


def _matches(
    given: Sequence[Json], before: Sequence[Json], keys: Sequence[str], *, by_place: bool = True
) -> list[Json | None]:
    """For each that is given, the one of before that it speaks of: by the first of *keys* that is
    the same, else the one in its place if nobody else is that one.

    :param by_place: False leaves out that last guess.
    """
    matches: list[Json | None] = [None] * len(given)
    free = list(before)
    for key in keys:
        for index, item in enumerate(given):
            if matches[index] is None and item.get(key) is not None:
                match = next((old for old in free if _same(old.get(key), item[key])), None)
                if match is not None:
                    matches[index] = match
                    free = [old for old in free if old is not match]
    for index, item in enumerate(given):
        if not by_place:
            break
        if matches[index] is None and index < len(before) and item.get("uuid") is None:
            match = before[index]
            if any(old is match for old in free):
                matches[index] = match
                free = [old for old in free if old is not match]
    return matches


def _same(old: Any, new: Any) -> bool:
    if type(old) is type(new) is str:
        return old.lower() == new.lower()
    return bool(old == new)


# Merging the sections of an input, object by object.

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
        for key, value in declared.items():
            if value is None:
                if found := self._known(section, key):
                    self._remove(section, found)
                elif not self._is_short(section, key):
                    draft.notes.append(f"nothing to remove: there is no {member(place, key)}")
            elif type(value) is not dict:
                text = f"must be an object or null, but is {shown(value)}"
                draft.wrong(member(place, key), text, "type")
            else:
                self._merge_object(section, rules, key, value)
        if self._prune:
            for key in draft.old[section]:
                if key not in draft.touched[section]:
                    self._remove(section, key)

    def _known(self, section: str, key: str) -> str | None:
        found = self._draft.uuid(section, key)
        if found in self._draft.old[section]:
            return found
        return self._draft.old_names(section).by_name.get(key)

    def _is_short(self, section: str, key: str) -> bool:
        """Whether *key*, which is nobody's name, is the first part of one: a mistake then. What is
        merged goes by whole names, as a short one may be another object's tomorrow."""
        if section not in _HOSTS or "." in key or self._is_uuid(section, key):
            return False
        declared, old = self._draft.declared[section], self._draft.old[section]
        found = self._draft.old_names(section).by_short_name.get(key, ())
        names = [old[one].name for one in found]
        # A name that is declared as null goes.
        names = [name for name in names if name not in declared or declared[name] is not None]
        if names:
            whole = " or ".join(sorted(names)[:_MOST_NAMES])
            text = f"is short for {whole}: give the whole name"
            self._draft.wrong(member(f"/{section}", key), text, "short-name")
        return bool(names)

    def _merge_object(self, section: str, rules: Rules, key: str, value: Json) -> None:
        draft = self._draft
        where = member(f"/{section}", key)
        found = self._identify(section, where, key, value)
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

    def _identify(self, section: str, where: str, key: str, value: Json) -> str | None:
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
        named = self._draft.old_names(section).by_name.get(key, given)
        if given and uuid_of_key is None and named != given:
            text = f"is {given}, but {key} has {named}: a UUID never changes"
            draft.wrong(f"{where}/uuid", text, "value")
            return None
        known = self._known(section, given or key)
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
