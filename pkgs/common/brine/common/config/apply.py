"""What is declared, merged into the configuration that there is: ``brine config apply``."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from brine.common.config import fresh, params, verify
from brine.common.config.configuration import KINDS, VERSION, Configuration, is_uuid
from brine.common.config.merge import Json, Rules
from brine.common.config.objects import Cluster
from brine.common.config.params import Mistake
from brine.common.config.parts import InstanceParts
from brine.common.config.references import References
from brine.common.config.shape import ConfigError, member, shown
from brine.common.settings import nearest

FORMULA_KEYS = frozenset(
    {
        "version",
        "repository",
        "common",
        "kvmd",
        "confd",
        "watcher",
        "hotplug",
        "instance",
        "lifecycle",
    }
)
"""What the Salt formula has under ``brine:`` besides the configuration."""

_ORDER = ("nodegroups", "networks", "nodes", "instances", "disks")
_LONGEST_LIST = 200
_OF_A_WHOLE_FILE = frozenset({"version", "serial_no", "ctime", "mtime", "filters"})


class InputError(ConfigError):
    """An input with mistakes; nothing was changed.

    :param mistakes: all that were found.
    """

    def __init__(self, mistakes: list[Mistake]) -> None:
        more = [f"  {mistake}" for mistake in mistakes[1:_LONGEST_LIST]]
        if len(mistakes) > _LONGEST_LIST:
            more.append(f"  and {len(mistakes) - _LONGEST_LIST} more")
        super().__init__(
            "\n".join([str(mistakes[0]), *more]),
            hint="nothing was changed; see brine-config.data(5)",
        )
        self.mistakes = mistakes


@dataclass(frozen=True, slots=True)
class Applied:
    """What an input makes of a configuration.

    :param notes: what a person should know, such as a state that was kept.
    """

    new: Configuration
    notes: tuple[str, ...]


def apply(current: Configuration | None, declared: Any, *, prune: bool = False) -> Applied:
    """Merge what is declared into *current*.

    :param declared: the ``brine:`` part of pillar as JSON (brine-config.data(5)), with that key
        around it or not, or a whole Ganeti configuration.
    :param current: None if there is none yet.
    :param prune: objects that a declared section does not name are removed.
    :raises InputError: if there is any mistake in it; it has all of them.
    """
    if isinstance(declared, dict) and isinstance(declared.get("brine"), dict):
        declared = declared["brine"]
    if not isinstance(declared, dict):
        text = f"must be an object with cluster, nodes, instances, ..., but is {shown(declared)}"
        raise InputError([Mistake("/", text, "type")])
    if current is None and _is_whole(declared):
        return _imported(declared)
    return _Work(current, declared, prune=prune).run()


def _imported(declared: Json) -> Applied:
    """A whole configuration as it is, serial numbers included."""
    new = Configuration.from_json(declared)
    notes = ["imported as it is, with its serial numbers"]
    if faults := verify.find(new):
        notes.append(f"it has faults: {len(faults)}; brine config verify lists them")
    return Applied(new, tuple(notes))


class _Work:
    def __init__(self, current: Configuration | None, declared: Json, *, prune: bool) -> None:
        self._current = current
        self._declared = declared
        self._prune = prune
        self._foreign = _is_whole(declared)
        self._mistakes: list[Mistake] = []
        self._notes: list[str] = []
        self._old: dict[str, dict[str, Any]] = {
            section: dict(getattr(current, section)) if current else {} for section in KINDS
        }
        # JSON of the objects that the input speaks of, by section and UUID; and which are new.
        self._touched: dict[str, dict[str, Json]] = {section: {} for section in KINDS}
        self._new: set[str] = set()
        self._removed: dict[str, set[str]] = {section: set() for section in KINDS}
        self._keys: dict[str, dict[str, str]] = {section: {} for section in KINDS}

    def run(self) -> Applied:
        self._check_keys()
        cluster = self._merge_cluster()
        for section in _ORDER:
            self._merge_section(section)
        self._give_groups()
        references = References(self._old, self._touched, self._removed, self._mistakes)
        self._merge_parts(cluster)
        references.resolve(cluster)
        self._set_master(cluster)
        self._choose_candidates(cluster)
        try:
            new = self._build(cluster)
        except ConfigError as error:
            self._wrong(error.where or "/", str(error).removeprefix(f"{error.where}: "), "type")
            raise InputError(self._mistakes) from error
        self._mistakes += self._new_faults(new)
        if self._mistakes:
            raise InputError(self._mistakes)
        return Applied(new, tuple(self._notes))

    def _new_faults(self, new: Configuration) -> list[Mistake]:
        """What is wrong with the result as a whole, and was not before, and does not follow from
        what was found already."""
        faults = verify.find(new)
        if faults and self._current:
            before = set(verify.find(self._current))
            faults = [fault for fault in faults if fault not in before]
        if self._foreign:
            harmless = ("unknown-key", "orphan")
            faults = [fault for fault in faults if fault.kind not in harmless]
        if self._mistakes:
            told = {mistake.where for mistake in self._mistakes}
            faults = [
                fault for fault in faults if fault.where not in told and fault.kind != "dangling"
            ]
        return faults

    def _wrong(self, where: str, text: str, kind: str) -> None:
        self._mistakes.append(Mistake(where, text, kind))

    def _check_keys(self) -> None:
        known = {"cluster", *KINDS, *FORMULA_KEYS}
        for key in self._declared:
            if self._foreign or key in known - {"version"}:
                continue
            if key == "version" and type(self._declared[key]) in (str, type(None)):
                continue
            if key in _OF_A_WHOLE_FILE:
                text = "belongs to a whole configuration only, which this is not"
            else:
                text = f"is not known; {nearest(key, known)}"
            self._wrong(member("", key), text, "unknown-key")

    def _merge_cluster(self) -> Json:
        declared = self._declared.get("cluster")
        current = self._current
        base = current.cluster.to_json() if current else {}
        if declared is None and current:
            return base
        if type(declared) is not dict:
            text = "is needed: there is no configuration yet"
            if declared is not None:
                text = f"must be an object, but is {shown(declared)}"
            self._wrong("/cluster", text, "type")
            return {"cluster_name": "none", "uuid": str(uuid.uuid4())}
        rules = Rules("cluster", Cluster)
        self._mistakes += rules.merge(
            base, declared, "/cluster", foreign=self._foreign, new=current is None
        )
        if not base.get("cluster_name"):
            self._wrong("/cluster/name", "is needed: the cluster's name", "missing")
            base["cluster_name"] = "none"
        given = declared.get("uuid")
        if current is None:
            base["uuid"] = given if isinstance(given, str) else str(uuid.uuid4())
        elif given is not None and given != base["uuid"]:
            text = f"is another cluster's: this one's is {base['uuid']}, and never changes"
            self._wrong("/cluster/uuid", text, "value")
        return base

    def _merge_section(self, section: str) -> None:
        declared = self._declared.get(section)
        if declared is None:
            return
        if type(declared) is not dict:
            text = f"must be an object, by name or UUID, but is {shown(declared)}"
            self._wrong(f"/{section}", text, "type")
            return
        apart = {"instances": frozenset({"uuid", "name", "nics", "disks"})}
        rules = Rules(section, KINDS[section], apart.get(section, frozenset({"uuid", "name"})))
        by_name = {}
        if section != "disks":
            by_name = {item.name: key for key, item in reversed(self._old[section].items())}
        for key, value in declared.items():
            where = member(f"/{section}", key)
            if value is None:
                if found := self._known(section, key, by_name):
                    self._remove(section, found)
                continue
            if type(value) is not dict:
                self._wrong(where, f"must be an object or null, but is {shown(value)}", "type")
                continue
            self._merge_object(section, rules, key, value, by_name)
        if self._prune:
            for key in self._old[section]:
                if key not in self._touched[section]:
                    self._remove(section, key)

    def _known(self, section: str, key: str, by_name: Mapping[str, str]) -> str | None:
        return key if key in self._old[section] else by_name.get(key)

    def _merge_object(
        self, section: str, rules: Rules, key: str, value: Json, by_name: Mapping[str, str]
    ) -> None:
        where = member(f"/{section}", key)
        given = value.get("uuid")
        if given is not None and (type(given) is not str or not is_uuid(given)):
            self._wrong(f"{where}/uuid", f"{shown(given)} is no UUID", "value")
            return
        name = value.get("name")
        keyed_by_uuid = is_uuid(key) or key in self._old[section]
        if not keyed_by_uuid and name not in (None, key):
            self._wrong(f"{where}/name", f"is {shown(name)}, but the key says {key}", "value")
            return
        found = self._known(section, given or key, by_name)
        if given and keyed_by_uuid and given != key:
            self._wrong(f"{where}/uuid", f"is {given}, but the key says {key}", "value")
            return
        if given and not keyed_by_uuid and by_name.get(key, given) != given:
            text = f"is {given}, but {key} has {by_name[key]}: a UUID never changes"
            self._wrong(f"{where}/uuid", text, "value")
            return
        if found is None:
            found = given or (key if keyed_by_uuid else str(uuid.uuid4()))
            base: Json = {"uuid": found}
            self._new.add(found)
        else:
            base = self._old[section][found].to_json()
        if found in self._touched[section]:
            self._wrong(where, f"is there twice: also as {self._keys[section][found]}", "duplicate")
            return
        name = name if keyed_by_uuid else key
        if section == "disks":
            if "name" in value:
                base["name"] = value["name"]
        elif name is not None:
            if type(name) is not str:
                self._wrong(f"{where}/name", f"must be a string, but is {shown(name)}", "type")
                return
            base["name"] = name
        elif "name" not in base:
            self._wrong(where, "a new object by UUID needs a name", "missing")
            return
        is_new = found in self._new
        if section == "instances":
            self._check_instance(where, base, value, new=is_new)
            value = self._kept_state(base, value, new=is_new)
        self._mistakes += rules.merge(base, value, where, foreign=self._foreign, new=is_new)
        if section == "nodes":
            self._finish_node(where, base, value)
        self._touched[section][found] = base
        self._keys[section][found] = key

    def _check_instance(self, where: str, base: Json, value: Json, *, new: bool) -> None:
        given = value.get("hvparams")
        if type(given) is dict and not self._foreign:
            for name in sorted(params.GLOBAL_HYPERVISOR & given.keys()):
                text = "is a parameter of the whole cluster, not of an instance"
                self._wrong(f"{where}/hvparams/{name}", text, "misplaced-parameter")
        if new and not value.get("primary_node") and not value.get("forthcoming"):
            self._wrong(f"{where}/primary_node", "is needed", "missing")
            base["primary_node"] = ""

    def _kept_state(self, base: Json, value: Json, *, new: bool) -> Json:
        """*value* without an admin_state that must not undo a user's shutdown."""
        state = value.get("admin_state")
        if new or state is None or "admin_state_source" in value:
            return value
        if base.get("admin_state_source") == "user" and base.get("admin_state") == "down":
            if state != "down":
                self._notes.append(
                    f"{base['name']}: stays down, as its user shut it down "
                    "(admin_state_source: admin overrules that)"
                )
            return {key: item for key, item in value.items() if key != "admin_state"}
        return value

    def _finish_node(self, where: str, base: Json, value: Json) -> None:
        if not base.get("primary_ip"):
            self._wrong(f"{where}/primary_ip", "is needed", "missing")
            base["primary_ip"] = ""
        base.setdefault("secondary_ip", base["primary_ip"])
        if base.get("offline") or base.get("drained"):
            if value.get("master_candidate"):
                text = "a node that is offline or drained can be no master candidate"
                self._wrong(f"{where}/master_candidate", text, "value")
            base["master_candidate"] = False
        elif base["uuid"] not in self._new:
            base.setdefault("master_candidate", False)

    def _remove(self, section: str, key: str) -> None:
        self._removed[section].add(key)
        self._touched[section].pop(key, None)
        if section == "instances":
            self._removed["disks"].update(self._old["instances"][key].disks)

    def _give_groups(self) -> None:
        """New nodes that name no group get the only one; a first one is made."""
        without = [node for node in self._touched["nodes"].values() if not node.get("group")]
        if not without:
            return
        groups = {*self._old["nodegroups"], *self._touched["nodegroups"]}
        groups -= self._removed["nodegroups"]
        if len(groups) > 1:
            for node in without:
                where = member("/nodes", node["name"]) + "/group"
                self._wrong(where, "is needed: there are several groups", "missing")
            return
        if not groups:
            made: Json = {"uuid": str(uuid.uuid4()), "name": "default"}
            fresh.fill("nodegroups", made)
            self._touched["nodegroups"][made["uuid"]] = made
            groups = {made["uuid"]}
        (only,) = groups
        for node in without:
            node["group"] = only

    def _merge_parts(self, cluster: Json) -> None:
        parts = InstanceParts(
            cluster,
            self._old,
            self._touched,
            self._removed,
            self._mistakes,
            foreign=self._foreign,
        )
        declared = self._declared.get("instances")
        values = declared if type(declared) is dict else {}
        for found, base in self._touched["instances"].items():
            key = self._keys["instances"][found]
            parts.merge(member("/instances", key), base, values[key])
        # A disk may go from one instance to another, or be kept by name.
        for base in self._touched["instances"].values():
            self._removed["disks"].difference_update(base.get("disks", ()))
        self._removed["disks"].difference_update(self._keys["disks"])

    def _set_master(self, cluster: Json) -> None:
        """A cluster of one node needs no word on who is the master."""
        nodes = self._nodes(cluster)
        if not cluster.get("master_node"):
            if len(nodes) == 1:
                cluster["master_node"] = next(iter(nodes))
            else:
                self._wrong("/cluster/master", "is needed: the master node's name", "missing")
        master = nodes.get(cluster.get("master_node", ""))
        if master and not cluster.get("master_ip"):
            cluster["master_ip"] = master.get("primary_ip", "")

    def _choose_candidates(self, cluster: Json) -> None:
        """The master, and new nodes as long as there is room, are master candidates."""
        nodes = self._nodes(cluster)
        master = nodes.get(cluster.get("master_node", ""))
        size = cluster.get("candidate_pool_size", 10)
        count = sum(1 for node in nodes.values() if node.get("master_candidate"))
        waiting = [
            node
            for key, node in nodes.items()
            if key in self._new and "master_candidate" not in node
        ]
        if master in waiting:
            waiting.remove(master)
            waiting.insert(0, master)
        for node in waiting:
            able = node.get("master_capable", True)
            node["master_candidate"] = bool(able and (count < size or node is master))
            count += node["master_candidate"]

    def _nodes(self, cluster: Json) -> dict[str, Json]:
        """All nodes as they are going to be; those that are not touched are copies."""
        gone = self._removed["nodes"]
        nodes = {
            key: self._touched["nodes"].get(key) or node.to_json()
            for key, node in self._old["nodes"].items()
            if key not in gone
        }
        return nodes | self._touched["nodes"]

    def _build(self, cluster: Json) -> Configuration:
        values: dict[str, Any] = {"cluster": Cluster.from_json(cluster, "/cluster")}
        values |= {section: self._build_section(section) for section in KINDS}
        top = {key: self._declared.get(key) for key in _OF_A_WHOLE_FILE} if self._foreign else {}
        if type(top.get("version")) is int:
            values["version"] = top["version"]
        if current := self._current:
            extra = dict(current.extra)
            if type(top.get("filters")) is dict:
                extra["filters"] = top["filters"]
            return dataclasses.replace(current, **{**values, "extra": extra})
        return Configuration(**{"version": VERSION, "extra": {"filters": {}}, **values})

    def _build_section(self, section: str) -> dict[str, Any]:
        gone, touched = self._removed[section], self._touched[section]
        kind = KINDS[section]
        built: dict[str, Any] = {}
        for key, item in self._old[section].items():
            if key not in gone:
                built[key] = item
        for key, data in touched.items():
            if key in gone and key in self._old[section]:
                continue
            made = kind.from_json(data, member(f"/{section}", data.get("name") or key))
            old = self._old[section].get(key)
            built[key] = old if made == old else made
        return built


def _is_whole(declared: Json) -> bool:
    """Whether it is a configuration of Ganeti's, not an input that a person wrote."""
    cluster = declared.get("cluster")
    return (
        type(declared.get("version")) is int
        and isinstance(cluster, dict)
        and "cluster_name" in cluster
    )
