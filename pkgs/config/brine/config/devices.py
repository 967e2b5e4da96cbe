"""The NICs and disks that an input lists, matched to those of the configuration."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Sequence
from typing import Any

from brine.common.digest import sha256
from brine.common.schema import member, shown
from brine.config.merge import Draft, Json
from brine.config.schema import canonical_uuid, is_uuid

# A MAC address of our choice, if there is none yet; the first two are what Ganeti's tools take.
_GIVE_ONE = ("auto", "generate", "", None)


def merge_devices(draft: Draft, cluster: Json) -> None:
    """Merge the NICs and disks of all declared instances; disks follow to a new primary node."""
    instances = draft.edited("instances")
    for key, instance in instances.items():
        where = member("/instances", draft.keys["instances"][key])
        declared, old = draft.said("instances", key), draft.old["instances"].get(key)
        if not draft.foreign and "hypervisor" not in instance:
            instance["hypervisor"] = (cluster.get("enabled_hypervisors") or ["kvm"])[0]
        instance.setdefault("hypervisor", "kvm")
        if "nics" in declared:
            _merge_nics(draft, cluster, f"{where}/nics", instance, declared["nics"] or [])
        if "disks" in declared:
            _merge_disks(draft, cluster, f"{where}/disks", instance, declared["disks"] or [])
        elif old and old.primary_node != instance.get("primary_node"):
            for disk in instance.get("disks", ()):
                if disk in draft.objects["disks"]:
                    _follow(draft, draft.edit("disks", disk), instance)
    # A disk may go from one instance to another, or be kept by name.
    for instance in instances.values():
        draft.leaving.difference_update(instance.get("disks", ()))
    for key in draft.leaving - draft.keys["disks"].keys():
        draft.objects["disks"].pop(key, None)


def _merge_nics(draft: Draft, cluster: Json, where: str, instance: Json, declared: Any) -> None:
    if not _is_list(draft, where, declared, dict):
        return
    before = instance.get("nics", [])
    matches = _by_key(declared, before, ("uuid", "name", "mac"))
    _by_place(matches, declared, before)
    made = []
    for index, (given, match) in enumerate(zip(declared, matches, strict=True)):
        place = f"{where}/{index}"
        nic = dict(match) if match else {"uuid": _new_uuid(draft, place, given)}
        values = {key: value for key, value in given.items() if key != "uuid"}
        if values.get("mac") in _GIVE_ONE:
            values.pop("mac", None)
        if not draft.foreign:
            _inherit(draft, instance, nic, values)
        draft.merge("nic", nic, values, place, new=match is None)
        if not nic.get("mac"):
            own = draft.value("networks", draft.find("networks", nic.get("network")), "mac_prefix")
            prefix = str(own or cluster.get("mac_prefix") or "aa:00:00").lower()
            nic["mac"] = _free_mac(prefix, f"{instance['name']}/{index}", draft.macs)
        made.append(nic)
    instance["nics"] = made


def _inherit(draft: Draft, instance: Json, nic: Json, values: Json) -> None:
    """A NIC that comes into a network gets the parameters that its node's group has for that, as
    Ganeti does it: no query looks them up there afterwards.

    :param nic: as it was; its nicparams are replaced.
    :param values: what is declared of it; a reset of nicparams is taken out.
    """
    before = nic.get("network")
    wanted = values.get("network", before)
    after = draft.find("networks", wanted)
    is_reset = "nicparams" in values and values["nicparams"] is None
    if not is_reset and (after == before or (wanted and after is None)):
        return
    node = draft.find("nodes", instance.get("primary_node"))
    group = draft.find("nodegroups", draft.value("nodes", node, "group"))
    networks = draft.value("nodegroups", group, "networks")
    by_network = networks if type(networks) is dict else {}
    inherited, left = by_network.get(after), by_network.get(before)
    if inherited and type(inherited) is dict:
        nic["nicparams"] = dict(inherited)
        if is_reset:
            del values["nicparams"]
    elif left and type(left) is dict:
        own = nic.get("nicparams", {}).items()
        nic["nicparams"] = {key: value for key, value in own if left.get(key) != value}


def _free_mac(prefix: str, seed: str, taken: set[str]) -> str:
    """An unused MAC address, the same for the same input, so that a dry run tells the
    truth."""
    start = int.from_bytes(sha256(seed.encode())[:3], "big")
    for number in itertools.islice(itertools.count(start), 1 << 24):
        low = (number % (1 << 24)).to_bytes(3, "big")
        mac = f"{prefix}:{low.hex(':')}"
        if mac not in taken:
            taken.add(mac)
            return mac
    return ""  # sixteen million NICs: the check for MAC addresses says the rest


def _merge_disks(draft: Draft, cluster: Json, where: str, instance: Json, declared: Any) -> None:
    if not _is_list(draft, where, declared, dict, str):
        return
    old_keys: list[str] = instance.get("disks", [])
    known = draft.objects["disks"]
    before = [draft.edit("disks", key) for key in old_keys if key in known]
    inline = [
        given if type(given) is dict else {"uuid": draft.uuid("disks", given)} for given in declared
    ]
    matches = _by_key(inline, before, ("uuid", "name"))
    if not draft.foreign and len(inline) < len(before):  # by its place, the wrong one could go
        both = enumerate(zip(inline, matches, strict=True))
        unclear = [index for index, (given, match) in both if not (match or given.get("uuid"))]
        for index in unclear:
            text = f"there are {len(before)} disks: say by uuid or name which of them this is"
            draft.wrong(f"{where}/{index}", text)
        if unclear:
            return
    _by_place(matches, inline, before)
    keys = []
    for index, (given, match) in enumerate(zip(inline, matches, strict=True)):
        place = f"{where}/{index}"
        if type(declared[index]) is str:
            keys.append(given["uuid"])  # of a disk among /disks; verified at the end
            continue
        disk = dict(match) if match else {"uuid": _new_uuid(draft, place, given)}
        draft.merge("disks", disk, given, place, new=match is None)
        if match is None:
            _finish_disk(draft, place, disk, instance, given, cluster)
        if not given.get("iv_name"):
            disk["iv_name"] = f"disk/{index}"
        _follow(draft, disk, instance)
        known[disk["uuid"]] = disk
        keys.append(disk["uuid"])
    draft.leaving.update(key for key in old_keys if key not in keys)
    instance["disks"] = keys


def _finish_disk(
    draft: Draft, where: str, disk: Json, instance: Json, given: Json, cluster: Json
) -> None:
    """Give a new disk its place: its node, and its volume in a volume group."""
    kind = disk.get("dev_type")
    if not given.get("size") and kind != "blockdev":
        draft.wrong(f"{where}/size", "is needed: MiB")
    if not disk.get("nodes") and instance.get("primary_node"):
        disk["nodes"] = [instance["primary_node"]]
    if disk.get("logical_id"):
        return
    if kind == "plain" and (group := _volume_group(draft, instance, cluster)):
        index = where.rpartition("/")[2]
        disk["logical_id"] = [group, f"{disk['uuid']}.disk{index}"]
    else:
        text = f"is needed for a disk of type {kind}"
        if kind == "plain":
            text = "is needed, or /cluster/volume_group_name"
        draft.wrong(f"{where}/logical_id", text)


def _volume_group(draft: Draft, instance: Json, cluster: Json) -> Any:
    """The volume group of the new disks of an instance, as its node's group and the cluster have
    it."""
    node = draft.find("nodes", instance.get("primary_node"))
    group = draft.find("nodegroups", draft.value("nodes", node, "group"))
    levels = (draft.value("nodegroups", group, "diskparams"), cluster.get("diskparams"))
    for level in levels:
        of_kind = level.get("plain") if isinstance(level, dict) else None
        if isinstance(of_kind, dict) and of_kind.get("vg"):
            return of_kind["vg"]
    return cluster.get("volume_group_name")


def _follow(draft: Draft, disk: Json, instance: Json) -> None:
    """A disk that is on the primary node alone is on the new one when that changes."""
    old = draft.old["instances"].get(instance["uuid"])
    if old and old.primary_node and disk.get("nodes") == [old.primary_node]:
        disk["nodes"] = [instance.get("primary_node")]


def _is_list(draft: Draft, where: str, declared: Any, *kinds: type) -> bool:
    noun = "an object" if len(kinds) == 1 else "an object or a UUID"
    if type(declared) is not list:
        draft.wrong(where, f"must be a list, but is {shown(declared)}")
        return False
    wrong = [index for index, item in enumerate(declared) if type(item) not in kinds]
    for index in wrong:
        draft.wrong(f"{where}/{index}", f"must be {noun}, but is {shown(declared[index])}")
    return not wrong


def _new_uuid(draft: Draft, where: str, given: Json) -> str:
    wanted = given.get("uuid")
    if wanted is None:
        return str(uuid.uuid4())
    if type(wanted) is not str or not is_uuid(wanted):
        draft.wrong(f"{where}/uuid", f"{shown(wanted)} is no UUID")
    return canonical_uuid(str(wanted))


def _by_key(
    given: Sequence[Json], before: Sequence[Json], keys: Sequence[str]
) -> list[Json | None]:
    """For each that is given, the one of before that it speaks of: by the first of *keys* that is
    the same."""
    matches: list[Json | None] = [None] * len(given)
    free = list(before)
    for key in keys:
        for index, item in enumerate(given):
            if matches[index] is None and item.get(key) is not None:
                match = next((old for old in free if _alike(old.get(key), item[key])), None)
                matches[index] = match
                free = [old for old in free if old is not match]
    return matches


def _by_place(matches: list[Json | None], given: Sequence[Json], before: Sequence[Json]) -> None:
    """Complete *matches*: a device without a match gets the one in its place, if that is free."""
    for index, (item, old) in enumerate(zip(given, before, strict=False)):
        is_open = matches[index] is None and item.get("uuid") is None
        if is_open and all(match is not old for match in matches):
            matches[index] = old


def _alike(old: Any, new: Any) -> bool:
    if type(old) is type(new) is str:
        return old.lower() == new.lower()
    return bool(old == new)
