"""``brine config apply``: merging a declaration into the configuration."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from brine.common.errors import nearest
from brine.common.schema import SchemaError, member, shown
from brine.config import params, verify
from brine.config.devices import merge_devices
from brine.config.effect import without_effect
from brine.config.merge import Draft, Json, fill
from brine.config.model import HOSTS, IPV4, IPV6, KINDS, MOVED_TAG, VERSION, Cluster, Configuration
from brine.config.params import Mistake
from brine.config.runnable import UNSUPPORTED
from brine.config.schema import ConfigError, canonical_uuid, is_uuid, same, shallow

_FORMULA_KEYS = {"version", "repository", "common", "config", "kvmd", "confd"}
_FORMULA_KEYS |= {"watcher", "hotplug", "instance", "lifecycle", "storage", "moves", "master"}
_FORMULA_KEYS |= {"distributed"}
"""The keys of the Salt formula under ``brine:`` besides the configuration."""

_MASK = "*" * 10
"""The text that Salt 3008's command line shows in place of pillar's values."""
_UNMASKED = (
    "Salt hides pillar's values on the command line; the state brine.config "
    "(brine_config.applied) has them"
)
_MANUAL = "see brine-config.data(5)"
_GANETIS = (
    "change these values with Ganeti's commands, and apply its configuration again; or declare "
    f"what is to change without the rest, {_MANUAL}"
)
_LONGEST_LIST = 200
_MOST_NAMES = 5
_OF_A_WHOLE_FILE = frozenset({"version", "serial_no", "ctime", "mtime", "filters"})
# Networks come before what names them as a key.
_USUALLY_APART = frozenset({"uuid", "name"})
_APART = {
    "disks": frozenset({"uuid"}),
    "instances": frozenset({"uuid", "name", "nics", "disks"}),
}
"""The keys of a section's objects that are not merged like the others."""
_ORDER = ("networks", "nodegroups", "nodes", "instances", "disks")


class InputError(ConfigError):
    """An input with mistakes; nothing was changed."""

    def __init__(self, mistakes: list[Mistake], hint: str = _MANUAL) -> None:
        more = [f"  {mistake}" for mistake in mistakes[1:_LONGEST_LIST]]
        if len(mistakes) > _LONGEST_LIST:
            more.append(f"  and {len(mistakes) - _LONGEST_LIST} more")
        text = "\n".join([str(mistakes[0]), *more])
        super().__init__(text, hint=f"nothing was changed; {hint}")
        self.mistakes = mistakes


@dataclass(frozen=True, slots=True)
class Applied:
    """The result of an input.

    :param notes: for people, such as on a state that was kept.
    :param without_effect: the places of the input, as JSON pointers, that set what Brine keeps and
        does not go by.
    """

    new: Configuration
    notes: tuple[str, ...]
    without_effect: tuple[str, ...] = ()


@shallow()
def apply(current: Configuration | None, declared: Any, *, prune: bool = False) -> Applied:
    """Merge a declaration into *current*.

    :param declared: the ``brine:`` part of pillar as JSON (brine-config.data(5)), with that key
        around it or not, or as salt-call prints it; or a whole Ganeti configuration.
    :param current: None if there is none yet.
    :param prune: remove objects that a declared section does not name.
    :raises InputError: with all mistakes of the input.
    """
    declared = _unwrapped(declared)
    foreign = _is_whole(declared)
    if current is None and foreign:
        return _imported(declared)
    draft = Draft(current, declared, foreign=foreign)
    new = _merged(draft, prune=prune)
    draft.mistakes.extend(_new_faults(draft, new))
    _check_moves(draft, new)
    _check_drained(draft, new)
    if draft.mistakes:
        raise InputError(draft.mistakes, _GANETIS if foreign else _MANUAL)
    return Applied(new, tuple(draft.notes), tuple(without_effect(declared, new)))


def _unwrapped(declared: Any) -> Json:
    """The object that an input consists of, without the keys that Salt and pillar put around it.

    :raises InputError: if it is none, or has masked values.
    """
    if isinstance(declared, dict) and [*declared] == ["local"]:
        declared = declared["local"]
    if isinstance(declared, dict) and isinstance(declared.get("brine"), dict):
        declared = declared["brine"]
    if masked := list(_masked(declared, "")):
        more = f", one of {len(masked)} such values" if len(masked) > 1 else ""
        text = f"is {_MASK}{more}: that hides the value, and is none"
        raise InputError([Mistake(masked[0] or "/", text, "masked")], _UNMASKED)
    if not isinstance(declared, dict):
        text = f"must be an object with cluster, nodes, instances, ..., but is {shown(declared)}"
        raise InputError([Mistake("/", text, "type")])
    return declared


def _is_whole(declared: Json) -> bool:
    """Whether an input is a configuration of Ganeti's, rather than one that a person wrote."""
    cluster = declared.get("cluster")
    is_ganetis = isinstance(cluster, dict) and "cluster_name" in cluster
    return is_ganetis and type(declared.get("version")) is int


def _imported(declared: Json) -> Applied:
    """A configuration of Ganeti's as the first one."""
    new = Configuration.from_json(declared)
    notes = ["imported as it is, with its serial numbers"]
    if faults := verify.find_mistakes(new):
        notes.append(f"it has faults: {len(faults)}; brine config verify lists them")
    return Applied(new, tuple(notes), tuple(without_effect(declared, new)))


def _merged(draft: Draft, *, prune: bool) -> Configuration:
    """The configuration that the input of a draft makes; mistakes are noted in the draft.

    :raises InputError: if it makes none.
    """
    _check_keys(draft)
    cluster = _merge_cluster(draft)
    for section in _ORDER:
        _merge_section(draft, section, prune=prune)
    _give_groups(draft)
    merge_devices(draft, cluster)
    _resolve(draft, cluster)
    _choose_master(draft, cluster)
    _choose_family(draft, cluster)
    try:
        return _build(draft, cluster)
    except SchemaError as error:
        draft.wrong(error.where or "/", error.text)
        raise InputError(draft.mistakes) from error


def _masked(value: Any, where: str) -> Iterator[str]:
    """The places of what Salt has masked."""
    if value == _MASK:
        yield where
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _masked(inner, member(where, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _masked(inner, f"{where}/{index}")


def _check_keys(draft: Draft) -> None:
    known = {"cluster", *KINDS, *_FORMULA_KEYS}
    for key, value in draft.declared.items():
        is_release = key == "version" and type(value) in (str, type(None))
        if draft.foreign or is_release or key in known - {"version"}:
            continue
        text = "belongs to a whole configuration only, which this is not"
        if key not in _OF_A_WHOLE_FILE:
            text = f"is not known; {nearest(key, known)}"
        draft.wrong(member("", key), text)


# The cluster, its master and its groups.


def _merge_cluster(draft: Draft) -> Json:
    """The cluster's future JSON, which may still have names for UUIDs."""
    declared, current = draft.declared.get("cluster"), draft.current
    base = current.cluster.to_json() if current else {}
    if declared is None and current:
        return base
    if type(declared) is not dict:
        text = "is needed: there is no configuration yet"
        if declared is not None:
            text = f"must be an object, but is {shown(declared)}"
        draft.wrong("/cluster", text)
        return {"cluster_name": "none", "uuid": str(uuid.uuid4())}
    draft.merge("cluster", base, declared, "/cluster", new=current is None)
    if not base.get("cluster_name"):
        draft.wrong("/cluster/name", "is needed: the cluster's name")
        base["cluster_name"] = "none"
    given = declared.get("uuid")
    if current is None:
        base["uuid"] = canonical_uuid(given) if isinstance(given, str) else str(uuid.uuid4())
    elif given is not None and str(given).lower() != base["uuid"].lower():
        text = f"is another cluster's: this one's is {base['uuid']}, and never changes"
        draft.wrong("/cluster/uuid", text)
    return base


def _give_groups(draft: Draft) -> None:
    """Put new nodes without a group into the only group; make one if there is none."""
    without = [node for node in draft.edited("nodes").values() if not node.get("group")]
    groups = draft.objects["nodegroups"]
    if without and not groups:
        made: Json = {"uuid": str(uuid.uuid4()), "name": "default"}
        fill("nodegroups", made)
        groups[made["uuid"]] = made
    for node in without:
        if len(groups) > 1:
            where = member("/nodes", node["name"]) + "/group"
            draft.wrong(where, "is needed: there are several groups")
        else:
            (node["group"],) = groups


def _choose_master(draft: Draft, cluster: Json) -> None:
    """Set the cluster's master and its address. The master becomes a candidate; so do new nodes, up
    to the size of the candidate pool.

    :param cluster: its JSON, changed in place; its references are UUIDs already.
    """
    nodes = draft.objects["nodes"]
    if not cluster.get("master_node"):
        if len(nodes) == 1:  # a single node is the master
            (cluster["master_node"],) = nodes
        else:
            draft.wrong("/cluster/master", "is needed: the master node's name")
    master = cluster.get("master_node", "")
    if master in nodes:
        _make_candidate(draft, master)
        if _takes_masters_address(draft, cluster):
            cluster["master_ip"] = draft.value("nodes", master, "primary_ip")
    _fill_candidate_pool(draft, cluster.get("candidate_pool_size", 10))


def _make_candidate(draft: Draft, master: str) -> None:
    """Make the master a candidate, unless it is out: verify finds that it can't be master."""
    is_out = any(draft.value("nodes", master, state) for state in ("offline", "drained"))
    if is_out:
        return
    is_said = draft.said("nodes", master).get("master_candidate") is False
    if is_said and not draft.foreign:
        where = member("/nodes", draft.keys["nodes"][master]) + "/master_candidate"
        draft.wrong(where, "the master is always a master candidate")
    elif not (draft.foreign or draft.value("nodes", master, "master_candidate")):
        draft.edit("nodes", master)["master_candidate"] = True


def _takes_masters_address(draft: Draft, cluster: Json) -> bool:
    """Whether the cluster's address is its master's: it has none of its own."""
    current = draft.current
    before = current.nodes.get(current.cluster.master_node) if current else None
    declared = draft.declared.get("cluster")
    is_given = type(declared) is dict and declared.get("master_ip") is not None
    taken = (None, "") if draft.foreign or not before else (None, "", before.primary_ip)
    return not is_given and cluster.get("master_ip") in taken


def _fill_candidate_pool(draft: Draft, size: int) -> None:
    """Make new nodes master candidates, until there are as many as *size*."""
    nodes = draft.edited("nodes")
    every = draft.objects["nodes"]
    count = sum(1 for key in every if draft.value("nodes", key, "master_candidate"))
    for key, node in nodes.items():
        if key not in draft.old["nodes"] and "master_candidate" not in node:
            node["master_candidate"] = bool(node.get("master_capable", True) and count < size)
            count += node["master_candidate"]


def _choose_family(draft: Draft, cluster: Json) -> None:
    """Give a new cluster, or one whose keys are reset, the family of its own address, and that
    address alone as its network.

    :param cluster: its JSON, changed in place; it has its address already.
    """
    declared = draft.declared.get("cluster")
    declared = declared if type(declared) is dict else {}

    def is_open(key: str) -> bool:
        is_reset = key in declared or draft.current is None
        return not draft.foreign and is_reset and declared.get(key) is None

    if is_open("primary_ip_family"):
        cluster["primary_ip_family"] = IPV6 if ":" in str(cluster.get("master_ip")) else IPV4
    if is_open("master_netmask"):
        cluster["master_netmask"] = 128 if cluster.get("primary_ip_family") == IPV6 else 32


# Sections, object by object.


def _merge_section(draft: Draft, section: str, *, prune: bool) -> None:
    declared = draft.declared.get(section)
    if declared is None:
        return
    if type(declared) is not dict:
        draft.wrong(f"/{section}", f"must be an object, by name or UUID, but is {shown(declared)}")
        return
    for key, value in declared.items():
        where = member(f"/{section}", key)
        if value is None:
            found = draft.uuid(section, key)
            if found not in draft.old[section]:
                found = draft.old_names(section).named(key) or ""
            if found:
                _remove(draft, section, found)
            elif not _is_short(draft, section, key):
                draft.notes.append(f"nothing to remove: there is no {where}")
        elif type(value) is not dict:
            draft.wrong(where, f"must be an object or null, but is {shown(value)}")
        else:
            _merge_object(draft, section, key, value)
    if prune and not declared and draft.old[section]:
        # A template that found nothing must not take a cluster apart.
        draft.notes.append(f"nothing is removed: /{section} is empty")
    elif prune:
        for key in draft.old[section]:
            if key not in draft.keys[section]:
                _remove(draft, section, key)


def _remove(draft: Draft, section: str, key: str) -> None:
    if section == "disks":
        draft.leaving.add(key)
        return
    draft.objects[section].pop(key, None)
    if section == "instances":
        draft.leaving.update(draft.old["instances"][key].disks)


def _is_uuid(draft: Draft, section: str, key: str) -> bool:
    return key in draft.old[section] or is_uuid(key)


def _is_short(draft: Draft, section: str, key: str) -> bool:
    """Whether *key*, which is no object's name, is the first part of one: a mistake then. A merge
    goes by whole names, as a short one may be another object's tomorrow."""
    if section not in HOSTS or "." in key or _is_uuid(draft, section, key):
        return False
    declared, old = draft.declared[section], draft.old[section]
    found = draft.old_names(section).short(key)
    names = [old[one].name for one in found]
    # A name that is declared as null goes.
    names = [name for name in names if name not in declared or declared[name] is not None]
    if names:
        whole = " or ".join(sorted(names)[:_MOST_NAMES])
        draft.wrong(member(f"/{section}", key), f"is short for {whole}: give the whole name")
    return bool(names)


def _merge_object(draft: Draft, section: str, key: str, value: Json) -> None:
    where = member(f"/{section}", key)
    found = _mergeable(draft, section, where, key, value)
    if found is None:
        return
    old = draft.old[section].get(found)
    base: Json = old.to_json() if old else {"uuid": found}
    if section != "disks" and not _set_name(draft, section, base, key, value, old):
        return
    if section == "nodegroups" and "networks" in value and not draft.foreign:
        networks = _by_network(draft, value["networks"], f"{where}/networks")
        value = value | {"networks": networks}
    elif section == "instances":
        value = _prepared_instance(draft, where, base, value, new=old is None)
    apart = _APART.get(section, _USUALLY_APART)
    draft.merge(section, base, value, where, new=old is None, apart=apart)
    if section == "nodes":
        _finish_node(draft, where, base, value)
    draft.objects[section][found] = base
    draft.keys[section][found] = key


def _mergeable(draft: Draft, section: str, where: str, key: str, value: Json) -> str | None:
    """The UUID of the object that a declaration is merged into; None after a mistake, and if the
    object is removed."""
    found = _identify(draft, section, where, key, value)
    if found is None:
        return None
    if found in draft.keys[section]:
        draft.wrong(where, f"is there twice: also as {draft.keys[section][found]}")
        return None
    if found in draft.old[section]:
        # An object that is gone was removed by another of its names.
        return found if found in draft.objects[section] else None
    if value.get("uuid") is None and _is_short(draft, section, key):
        return None
    return found


def _set_name(draft: Draft, section: str, base: Json, key: str, value: Json, old: Any) -> bool:
    """Set the name of an object in *base*, its JSON; False after a mistake.

    :param key: its name or UUID in the input.
    :param old: the present object, if there is one.
    """
    if not _is_uuid(draft, section, key):
        if not old or not _is_named(section, old.name, key):
            base["name"] = key
        return True
    where, name = member(f"/{section}", key), value.get("name")
    if type(name) is str:
        base["name"] = name
    elif name is not None:
        draft.wrong(f"{where}/name", f"must be a string, but is {shown(name)}")
        return False
    elif old is None:
        draft.wrong(where, "a new object by UUID needs a name")
        return False
    return True


def _prepared_instance(draft: Draft, where: str, base: Json, value: Json, *, new: bool) -> Json:
    """The declaration of an instance as it is merged into *base*, its JSON."""
    own = value.get("hvparams")
    for name in sorted(params.GLOBAL_HYPERVISOR.intersection(own if type(own) is dict else ())):
        if not draft.foreign:
            text = "is a parameter of the whole cluster, not of an instance"
            draft.wrong(f"{where}/hvparams/{name}", text)
    if not new:
        return _kept_state(draft, base, value)
    if not value.get("primary_node") and not value.get("forthcoming"):
        draft.wrong(f"{where}/primary_node", "is needed")
        base["primary_node"] = ""
    return value


def _identify(draft: Draft, section: str, where: str, key: str, value: Json) -> str | None:
    """The UUID of the object that is meant, a new one if it is new; None after a mistake."""
    given = value.get("uuid")
    if given is not None:
        if type(given) is not str or not is_uuid(given):
            draft.wrong(f"{where}/uuid", f"{shown(given)} is no UUID")
            return None
        given = draft.uuid(section, given)
    if _is_uuid(draft, section, key):
        found: str | None = draft.uuid(section, key)
        fault = f"is {given}, but the key says {key}"
    else:
        if not _is_named(section, value.get("name"), key):
            text = f"is {shown(value['name'])}, but the key says {key}"
            draft.wrong(f"{where}/name", text)
            return None
        found = draft.old_names(section).named(key)
        fault = f"is {given}, but {key} has {found}: a UUID never changes"
    if given and found and given != found:
        draft.wrong(f"{where}/uuid", fault)
        return None
    return given or found or str(uuid.uuid4())


def _is_named(section: str, name: Any, key: str) -> bool:
    """Whether *key* is the name, where one is given. Case does not count in names of hosts."""
    if section in HOSTS and type(name) is str:
        return name.lower() == key.lower()
    return name in (None, key)


def _by_network(draft: Draft, declared: Any, where: str) -> Any:
    """The input's declaration of a group's networks, by UUID instead of name."""
    if type(declared) is not dict:
        return declared
    resolved: Json = {}
    for key, values in declared.items():
        found = draft.find("networks", key)
        if found is None and values is None:
            # It leaves the group because it is removed; or it has left already.
            old = draft.old["networks"].items()
            found = next((uuid for uuid, item in old if key in (uuid, item.name)), None)
            if found is None:
                continue
        if found in resolved:
            draft.wrong(member(where, key), "is there twice")
        resolved[found or key] = values
    return resolved


def _kept_state(draft: Draft, base: Json, value: Json) -> Json:
    """*value* without an admin_state that must not undo a user's shutdown. Null says no more than
    an absent key does."""
    if value.get("admin_state_source") is not None:
        return value
    if base.get("admin_state_source") != "user" or base.get("admin_state") != "down":
        return value
    if value.get("admin_state") not in ("down", None):
        draft.notes.append(
            f"{base['name']}: stays down, as its user shut it down "
            "(admin_state_source: admin overrules that)"
        )
    kept = ("admin_state", "admin_state_source")
    return {key: item for key, item in value.items() if key not in kept}


def _finish_node(draft: Draft, where: str, base: Json, value: Json) -> None:
    if not base.get("primary_ip"):
        draft.wrong(f"{where}/primary_ip", "is needed")
        base["primary_ip"] = ""
    base.setdefault("secondary_ip", base["primary_ip"])
    if base.get("offline") or base.get("drained"):
        is_said = any(value.get(state) for state in ("offline", "drained"))
        if value.get("master_candidate") and not is_said and base["uuid"] in draft.old["nodes"]:
            draft.notes.append(f"{base['name']}: is no master candidate while it is out")
        elif value.get("master_candidate"):
            text = "a node that is offline or drained can be no master candidate"
            draft.wrong(f"{where}/master_candidate", text)
        base["master_candidate"] = False
    elif base["uuid"] in draft.old["nodes"]:
        base.setdefault("master_candidate", False)


# The new configuration.


def _resolve(draft: Draft, cluster: Json) -> None:
    """Replace the names in references of what is new or changed by UUIDs. One that names nothing
    stays, and is found by verify."""

    def one(data: Json, key: str, section: str) -> None:
        if data.get(key):
            data[key] = draft.find(section, data[key]) or data[key]

    one(cluster, "master_node", "nodes")
    for node in draft.edited("nodes").values():
        one(node, "group", "nodegroups")
    for instance in draft.edited("instances").values():
        one(instance, "primary_node", "nodes")
        _resolve_nodes(draft, instance, "secondary_nodes")
        for nic in instance.get("nics", ()):
            one(nic, "network", "networks")
    for disk in draft.edited("disks").values():
        _resolve_disk(draft, disk)


def _resolve_disk(draft: Draft, disk: Json) -> None:
    _resolve_nodes(draft, disk, "nodes")
    if disk.get("dev_type") == "drbd":
        _resolve_nodes(draft, disk, "logical_id", most=2)
    children = disk.get("children")
    for child in children if type(children) is list else ():
        if isinstance(child, dict):
            _resolve_disk(draft, child)


def _resolve_nodes(draft: Draft, data: Json, key: str, most: int | None = None) -> None:
    """Resolve a list of nodes, or the first *most* of a list."""
    values = data.get(key)
    if type(values) is list:
        nodes = [draft.find("nodes", value) or value for value in values[:most]]
        data[key] = nodes if most is None else nodes + values[most:]


def _build(draft: Draft, cluster: Json) -> Configuration:
    values: dict[str, Any] = {"cluster": Cluster.from_json(cluster, "/cluster")}
    for section, kind in KINDS.items():
        values[section] = built = dict(draft.objects[section])
        for key, item in draft.edited(section).items():
            made = kind.from_json(item, member(f"/{section}", item.get("name") or key))
            old = draft.old[section].get(key)
            built[key] = old if same(made, old) else made
    whole = draft.declared if draft.foreign else {}
    if type(whole.get("version")) is int:
        values["version"] = whole["version"]
    if draft.current is None:
        return Configuration(**{"version": VERSION, "extra": {"filters": {}}, **values})
    extra = dict(draft.current.extra)
    if type(whole.get("filters")) is dict:
        extra["filters"] = whole["filters"]
    return dataclasses.replace(draft.current, **values, extra=extra)


def _check_moves(draft: Draft, new: Configuration) -> None:
    """Refuse another primary node for an instance that is up: two nodes would run it, on the same
    disks; and for one that a move has taken from there: its disks are not there. A node that is
    marked offline runs nothing. Ganeti moves its instances itself.
    """
    for key in () if draft.foreign else draft.edited("instances"):
        old, moved = draft.old["instances"].get(key), new.instances[key]
        if not old or moved.primary_node == old.primary_node or old.forthcoming:
            continue
        before = new.nodes.get(old.primary_node) or draft.old["nodes"].get(old.primary_node)
        after = new.nodes.get(moved.primary_node)
        if not before or before.offline or not after:
            continue
        back = f"brine instance migrate {moved.name} --to {after.name}"
        follow = f'declare "primary_node": "{before.name}", or move it by: {back}'
        if f"{MOVED_TAG}{after.name}" in old.tags:
            text = f"it was moved from {after.name} to {before.name}: {follow}"
        elif old.admin_state == "up":
            text = (
                f"can't change while the instance is up on {before.name}, which may run it: "
                f'{follow}; or first apply "admin_state": "down"; or, if that node is dead, '
                '"offline": true for it'
            )
        else:
            continue
        draft.wrong(member("/instances", moved.name) + "/primary_node", text)


def _check_drained(draft: Draft, new: Configuration) -> None:
    """Refuse instances that would be new on a node which is drained, as Ganeti does."""
    for key in () if draft.foreign else draft.edited("instances"):
        old, found = draft.old["instances"].get(key), new.instances[key]
        node = new.nodes.get(found.primary_node)
        if node and node.drained and (old is None or old.primary_node != node.uuid):
            text = f"{node.name} is drained: it takes no instances"
            draft.wrong(member("/instances", found.name) + "/primary_node", text)


def _new_faults(draft: Draft, new: Configuration) -> list[Mistake]:
    """The new faults of the result as a whole, without those that follow from mistakes of the
    input."""
    removed = draft.removed_names()
    faults = verify.find_mistakes(new, removed=removed)
    if faults and draft.current:
        # Faults are compared by UUID, because a renamed object keeps its faults.
        before = set(verify.find_mistakes(draft.current, by_uuid=True))
        pairs = zip(faults, verify.find_mistakes(new, by_uuid=True, removed=removed), strict=True)
        faults = [fault for fault, same in pairs if same not in before]
    if draft.foreign:
        ganetis = ("unknown-key", "orphan", UNSUPPORTED)
        faults = [fault for fault in faults if fault.kind not in ganetis]
    if draft.mistakes:
        known = {mistake.where for mistake in draft.mistakes}
        faults = [fault for fault in faults if fault.where not in known]
    return faults
