"""``brine config apply``: merging a declaration into the configuration."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from brine.common.errors import nearest
from brine.common.schema import SchemaError, member, shown
from brine.config import defaults, verify
from brine.config.merge import Draft, Json, References, Rules
from brine.config.model import KINDS, VERSION, Cluster, Configuration
from brine.config.params import Mistake
from brine.config.schema import ConfigError, canonical_uuid, same, shallow
from brine.config.sections import InstanceParts, Sections

# Salt 3008's mask: the text that its command line shows in place of pillar's values.

MASK = "*" * 10


def find_masked(declared: Any) -> list[Mistake]:
    """A mistake, if any value in an input is masked: one for all, because usually all are
    masked."""
    places = list(_places(declared, ""))
    if not places:
        return []
    more = f", one of {len(places)} such values" if len(places) > 1 else ""
    text = f"is {MASK}{more}: that hides the value, and is none"
    return [Mistake(places[0] or "/", text, "masked")]


def _places(value: Any, where: str) -> Iterator[str]:
    if value == MASK:
        yield where
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _places(inner, member(where, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _places(inner, f"{where}/{index}")


# The master of a cluster, and its candidates.


def choose_master(draft: Draft, cluster: Json) -> None:
    """Set the cluster's master and its address. The master becomes a candidate; so do new nodes, up
    to the size of the candidate pool.

    :param cluster: its JSON, changed in place; its references are UUIDs already.
    """
    nodes = draft.nodes()
    if not cluster.get("master_node"):
        if len(nodes) == 1:  # which needs no word on who is the master
            cluster["master_node"] = next(iter(nodes))
        else:
            draft.wrong("/cluster/master", "is needed: the master node's name", "missing")
    master = nodes.get(cluster.get("master_node", ""))
    if master:
        _give_address(draft, cluster, master)
        _make_candidate(draft, master)
    _fill_up(draft, cluster, nodes)


def _give_address(draft: Draft, cluster: Json, master: Json) -> None:
    """Set the cluster's address to the master's own, unless the cluster has an address of its
    own."""
    if draft.foreign and cluster.get("master_ip"):
        return
    own = None
    if draft.current:
        before = draft.current.nodes.get(draft.current.cluster.master_node)
        own = before.primary_ip if before else None
    declared = draft.declared.get("cluster")
    is_given = type(declared) is dict and declared.get("master_ip") is not None
    if not is_given and cluster.get("master_ip") in (None, "", own):
        cluster["master_ip"] = master.get("primary_ip", "")


def _make_candidate(draft: Draft, master: Json) -> None:
    if draft.foreign or master.get("offline") or master.get("drained"):
        return  # that it can't be the master is found at the end
    said = draft.said("nodes", master["uuid"])
    if said.get("master_candidate") is False:
        where = member("/nodes", draft.keys["nodes"][master["uuid"]])
        draft.wrong(f"{where}/master_candidate", "the master is always a master candidate", "value")
    elif not master.get("master_candidate"):
        master["master_candidate"] = True
        draft.touched["nodes"][master["uuid"]] = master


def _fill_up(draft: Draft, cluster: Json, nodes: dict[str, Json]) -> None:
    size = cluster.get("candidate_pool_size", 10)
    count = sum(1 for node in nodes.values() if node.get("master_candidate"))
    for key, node in nodes.items():
        if key in draft.new and "master_candidate" not in node:
            node["master_candidate"] = bool(node.get("master_capable", True) and count < size)
            count += node["master_candidate"]


FORMULA_KEYS = frozenset(
    {
        "version",
        "repository",
        "common",
        "config",
        "kvmd",
        "confd",
        "watcher",
        "hotplug",
        "instance",
        "lifecycle",
    }
)
"""The keys of the Salt formula under ``brine:`` besides the configuration."""

_LONGEST_LIST = 200
_UNMASKED = (
    "Salt hides pillar's values on the command line; the state brine.config "
    "(brine_config.applied) has them"
)
_OF_A_WHOLE_FILE = frozenset({"version", "serial_no", "ctime", "mtime", "filters"})


class InputError(ConfigError):
    """An input with mistakes; nothing was changed.

    :param mistakes: all mistakes in it.
    :param hint: how to mend them.
    """

    def __init__(self, mistakes: list[Mistake], hint: str = "see brine-config.data(5)") -> None:
        more = [f"  {mistake}" for mistake in mistakes[1:_LONGEST_LIST]]
        if len(mistakes) > _LONGEST_LIST:
            more.append(f"  and {len(mistakes) - _LONGEST_LIST} more")
        super().__init__(
            "\n".join([str(mistakes[0]), *more]),
            hint=f"nothing was changed; {hint}",
        )
        self.mistakes = mistakes


@dataclass(frozen=True, slots=True)
class Applied:
    """The result of an input.

    :param notes: remarks for people, such as a state that was kept.
    """

    new: Configuration
    notes: tuple[str, ...]


@shallow()
def apply(current: Configuration | None, declared: Any, *, prune: bool = False) -> Applied:
    """Merge a declaration into *current*.

    :param declared: the ``brine:`` part of pillar as JSON (brine-config.data(5)), with that key
        around it or not, or as salt-call prints it; or a whole Ganeti configuration.
    :param current: None if there is none yet.
    :param prune: remove objects that a declared section does not name.
    :raises InputError: with all mistakes of the input.
    """
    if isinstance(declared, dict) and [*declared] == ["local"]:
        declared = declared["local"]
    if isinstance(declared, dict) and isinstance(declared.get("brine"), dict):
        declared = declared["brine"]
    if masked := find_masked(declared):
        raise InputError(masked, _UNMASKED)
    if not isinstance(declared, dict):
        text = f"must be an object with cluster, nodes, instances, ..., but is {shown(declared)}"
        raise InputError([Mistake("/", text, "type")])
    if current is None and _is_whole(declared):
        return _imported(declared)
    return _Application(current, declared, prune=prune).run()


def _imported(declared: Json) -> Applied:
    """Take a complete configuration unchanged, serial numbers included."""
    new = Configuration.from_json(declared)
    notes = ["imported as it is, with its serial numbers"]
    if faults := verify.find(new):
        notes.append(f"it has faults: {len(faults)}; brine config verify lists them")
    return Applied(new, tuple(notes))


class _Application:
    def __init__(self, current: Configuration | None, declared: Json, *, prune: bool) -> None:
        old = {section: dict(getattr(current, section)) if current else {} for section in KINDS}
        self._draft = Draft(current, declared, _is_whole(declared), old)
        self._references = References(self._draft)
        self._sections = Sections(self._draft, self._references, prune=prune)

    def run(self) -> Applied:
        draft = self._draft
        self._check_keys()
        cluster = self._merge_cluster()
        self._sections.merge()
        self._give_groups()
        InstanceParts(draft, cluster, self._references).merge()
        self._references.resolve(cluster)
        choose_master(draft, cluster)
        try:
            new = self._build(cluster)
        except SchemaError as error:
            draft.wrong(error.where or "/", error.text, "type")
            raise InputError(draft.mistakes) from error
        draft.mistakes.extend(self._new_faults(new))
        if draft.mistakes:
            raise InputError(draft.mistakes)
        return Applied(new, tuple(draft.notes))

    def _new_faults(self, new: Configuration) -> list[Mistake]:
        """The new faults of the result as a whole, without those that follow from mistakes of the
        input."""
        removed = self._draft.removed_names()
        faults = verify.find(new, removed=removed)
        if faults and self._draft.current:
            # Faults are compared by UUID, because a renamed object keeps its faults.
            before = set(verify.find(self._draft.current, by_uuid=True))
            pairs = zip(faults, verify.find(new, by_uuid=True, removed=removed), strict=True)
            faults = [fault for fault, same in pairs if same not in before]
        if self._draft.foreign:
            harmless = ("unknown-key", "orphan")
            faults = [fault for fault in faults if fault.kind not in harmless]
        if self._draft.mistakes:
            known = {mistake.where for mistake in self._draft.mistakes}
            faults = [
                fault for fault in faults if fault.where not in known and fault.kind != "dangling"
            ]
        return faults

    def _check_keys(self) -> None:
        known = {"cluster", *KINDS, *FORMULA_KEYS}
        for key in self._draft.declared:
            if self._draft.foreign or key in known - {"version"}:
                continue
            if key == "version" and type(self._draft.declared[key]) in (str, type(None)):
                continue
            if key in _OF_A_WHOLE_FILE:
                text = "belongs to a whole configuration only, which this is not"
            else:
                text = f"is not known; {nearest(key, known)}"
            self._draft.wrong(member("", key), text, "unknown-key")

    def _merge_cluster(self) -> Json:
        declared = self._draft.declared.get("cluster")
        current = self._draft.current
        base = current.cluster.to_json() if current else {}
        if declared is None and current:
            return base
        if type(declared) is not dict:
            text = "is needed: there is no configuration yet"
            if declared is not None:
                text = f"must be an object, but is {shown(declared)}"
            self._draft.wrong("/cluster", text, "type")
            return {"cluster_name": "none", "uuid": str(uuid.uuid4())}
        rules = Rules("cluster", Cluster)
        self._draft.mistakes.extend(
            rules.merge(
                base, declared, "/cluster", foreign=self._draft.foreign, new=current is None
            )
        )
        if not base.get("cluster_name"):
            self._draft.wrong("/cluster/name", "is needed: the cluster's name", "missing")
            base["cluster_name"] = "none"
        given = declared.get("uuid")
        if isinstance(given, str):
            given = canonical_uuid(given)
        if current is None:
            base["uuid"] = given if isinstance(given, str) else str(uuid.uuid4())
        elif given is not None and given not in (base["uuid"], base["uuid"].lower()):
            text = f"is another cluster's: this one's is {base['uuid']}, and never changes"
            self._draft.wrong("/cluster/uuid", text, "value")
        return base

    def _give_groups(self) -> None:
        """Put new nodes without a group into the only group; make one if there is none."""
        without = [node for node in self._draft.touched["nodes"].values() if not node.get("group")]
        if not without:
            return
        groups = {*self._draft.old["nodegroups"], *self._draft.touched["nodegroups"]}
        groups -= self._draft.removed["nodegroups"]
        if len(groups) > 1:
            for node in without:
                where = member("/nodes", node["name"]) + "/group"
                self._draft.wrong(where, "is needed: there are several groups", "missing")
            return
        if not groups:
            made: Json = {"uuid": str(uuid.uuid4()), "name": "default"}
            defaults.fill("nodegroups", made)
            self._draft.touched["nodegroups"][made["uuid"]] = made
            groups = {made["uuid"]}
        (only,) = groups
        for node in without:
            node["group"] = only

    def _build(self, cluster: Json) -> Configuration:
        values: dict[str, Any] = {"cluster": Cluster.from_json(cluster, "/cluster")}
        values |= {section: self._build_section(section) for section in KINDS}
        whole = self._draft.declared if self._draft.foreign else {}
        top = {key: whole.get(key) for key in _OF_A_WHOLE_FILE}
        if type(top.get("version")) is int:
            values["version"] = top["version"]
        if current := self._draft.current:
            extra = dict(current.extra)
            if type(top.get("filters")) is dict:
                extra["filters"] = top["filters"]
            return dataclasses.replace(current, **{**values, "extra": extra})
        return Configuration(**{"version": VERSION, "extra": {"filters": {}}, **values})

    def _build_section(self, section: str) -> dict[str, Any]:
        gone, touched = self._draft.removed[section], self._draft.touched[section]
        kind = KINDS[section]
        built: dict[str, Any] = {}
        for key, item in self._draft.old[section].items():
            if key not in gone:
                built[key] = item
        for key, data in touched.items():
            if key in gone and key in self._draft.old[section]:
                continue
            made = kind.from_json(data, member(f"/{section}", data.get("name") or key))
            old = self._draft.old[section].get(key)
            built[key] = old if same(made, old) else made
        return built


def _is_whole(declared: Json) -> bool:
    """Whether it is a configuration of Ganeti's, rather than an input that a person wrote."""
    cluster = declared.get("cluster")
    return (
        type(declared.get("version")) is int
        and isinstance(cluster, dict)
        and "cluster_name" in cluster
    )
