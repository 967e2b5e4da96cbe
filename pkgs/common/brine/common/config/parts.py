"""NICs and disks of an instance in an input: lists, matched to what there is."""

from __future__ import annotations

import hashlib
import itertools
import uuid
from collections.abc import Sequence
from typing import Any

from brine.common.config.draft import Draft
from brine.common.config.formats import canonical_uuid, is_uuid
from brine.common.config.merge import Json, Rules
from brine.common.config.objects import Disk, Nic
from brine.common.config.references import References
from brine.common.config.shape import member, shown

_NIC = Rules("nic", Nic)
_DISK = Rules("disks", Disk)
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
