#!py
"""The settings of the states: defaults, pillar's values in their place, and their consequences.

Salt's renderer py runs this file for each file of the states::

    {%- set brine = salt["slsutil.renderer"]("salt://" ~ tplroot ~ "/map.py", saltenv=saltenv) %}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    __grains__: dict[str, Any] = {}
    __opts__: dict[str, Any] = {}
    __salt__: dict[str, Callable[..., Any]] = {}

Values = dict[str, Any]

# What the states use where pillar says nothing; see pillar.example for the meaning.
DEFAULTS: Values = {
    "version": "",
    "repository": {"line": "", "key": ""},
    "kvmd": {"enabled": True, "on_demand": True, "root_only": False, "settings": {}},
    "confd": {
        # Where pillar does not say, a node with a key has the package.
        "enabled": None,
        # Where pillar does not say, it runs, but not on a node of the cluster that is no candidate.
        "daemon": None,
        "key": "",
        "previous_key": "",
        "root_only": False,
        "settings": {},
    },
    "network": {"bridges": {}},
    "hotplug": {"enabled": True, "gc": True, "scripts": {}},
    "storage": {
        # Where pillar does not say, a node with one of these, or that runs instances, has the
        # package, and a node that has it keeps it.
        "enabled": None,
        "directories": [],
        "default_unit": "",
        "allocatable": {},
    },
    "instance": {
        # Where pillar does not say, a node with instances or settings has the package, and a node
        # that has it keeps it.
        "enabled": None,
        "at_boot": True,
        "settings": {},
        "instances": {},
    },
    "lifecycle": {
        # Where pillar does not say, a node with an instance that has an owner has the package, and
        # a node that has it keeps it.
        "enabled": None,
        "fence": False,
        "settings": {},
    },
    # Where pillar does not say, a node that runs instances has the package.
    "watcher": {"enabled": None, "timer": True, "beacon": True, "settings": {}},
    # Where pillar does not say, a node with settings has the package, and a node that has it keeps
    # it.
    "moves": {"enabled": None, "settings": {}},
    # Where pillar does not say, a host that makes the configuration of nodes with moves has the
    # package, and a host that has it keeps it.
    "master": {"enabled": None},
    "config": {"apply": False, "prune": False, "source": "", "ssconf_source": ""},
}

# The repository's files, by family of distributions. The names are Brine's own, as the states
# also remove these files.
REPOSITORY_FILES = {
    "Debian": {
        "file": "/etc/apt/sources.list.d/brine-salt.list",
        "key_file": "/etc/apt/keyrings/brine-salt.asc",
    },
    "RedHat": {
        "file": "/etc/yum.repos.d/brine-salt.repo",
        "key_file": "/etc/pki/rpm-gpg/RPM-GPG-KEY-brine-salt",
    },
}

# Drop-ins of these states; others' drop-ins beside them are left alone.
_DROP_IN = "/etc/systemd/system/brine-{}.d/salt.conf"
_PLACES = {
    "kvmd": {
        "path_drop_in": _DROP_IN.format("kvmd.path"),
        "service_drop_in": _DROP_IN.format("kvmd.service"),
    },
    "confd": {"drop_in": _DROP_IN.format("confd.service")},
    # Others' scripts beside those of pillar are left alone.
    "hotplug": {"scripts_dir": "/etc/brine/nic.d"},
    "watcher": {"drop_in": _DROP_IN.format("watcher.timer")},
}

_OWN_FILES = {
    "kvmd": ("path_drop_in", "service_drop_in"),
    "confd": ("drop_in",),
    "watcher": ("drop_in", "beacon_file"),
}

_CONFIGURATION = "/var/lib/brine/config.data"

# By which a part's package shows.
_UNITS = {
    "kvmd": "brine-kvmd.service",
    "confd": "brine-confd.service",
    "hotplug": "brine-tap-gc.timer",
    "instance": "brine-instance@.service",
    "lifecycle": "brine-lifecycle.path",
    "watcher": "brine-watcher.timer",
    "moves": "brine-claims.service",
    "master": "brine-lockd.socket",
}

# The pillar's section cluster declares a cluster.
_PACKAGES = {"master": "brine-cluster"}

# Where a daemon's settings say nothing; the states must know these places, too.
_FALLBACKS = {
    "kvmd": {"control_dir": "/run/brine/ctrl", "suffix": ".kvmd"},
    "confd": {
        "config_file": _CONFIGURATION,
        "key_file": "/etc/brine/hmac.key",
        "previous_key_file": "/etc/brine/hmac.key.previous",
    },
}


def run() -> Values:
    """The settings that the states use as ``brine``.

    It has the keys of `DEFAULTS`, of which ``instance:instances`` is empty, and the places of files
    in the parts that have them. Besides:

    * ``family_known``: whether the states know this family of distributions; ``families``: those
      that they know.
    * ``parts``: each part of Brine, and whether this node is to have it; ``parts_fit``: whether
      none lacks another one that it needs; ``packages``: of those that it is to have;
      ``other_packages``: of the others; ``part_packages``: of all parts; ``unwanted``: those parts
      that it is not to have, and has something of.
    * ``specs``: of this node's instances that pillar declares, by name, in the order of their
      states; ``elsewhere``: the nodes of the others, by name.
    * ``in_cluster``: whether there is a configuration of a cluster that the node makes, copies or
      has; ``is_distributed``: whether the external pillar gives it to the node; ``of_cluster``: the
      cluster's instances that are this node's; ``node_name``: the node's own name there, or empty;
      ``has_configuration``: whether the node has a configuration to make its instances of;
      ``other_master``: the cluster's master, if that is to make the configuration in this node's
      place; else empty.
    """
    in_pillar = _mapping(__salt__["pillar.get"]("brine"))
    distributed = _mapping(in_pillar.get("distributed"))
    brine = _with_pillar(in_pillar)
    family = __grains__["os_family"]
    brine["repository"].update(REPOSITORY_FILES.get(family, {}))
    _add_places(brine)
    if brine["confd"]["daemon"] is None:
        brine["confd"]["daemon"] = distributed.get("candidate", True)
    specs, elsewhere = _declared(_mapping(_mapping(in_pillar.get("instance")).get("instances")))
    cluster = _of_cluster(in_pillar if brine["config"]["apply"] else {}, distributed)
    parts = _parts(brine, specs, has_instances=bool(specs or cluster["of_cluster"]))
    parts_fit = _fit(parts)
    return {
        **brine,
        "family_known": family in REPOSITORY_FILES,
        "families": sorted(REPOSITORY_FILES),
        "parts": parts,
        "parts_fit": parts_fit,
        "packages": [
            *("brine-common", "brine-config"),
            *(_package(part) for part in parts if parts[part] and not _is_put_off(part, brine)),
        ],
        "part_packages": [*map(_package, parts)],
        "other_packages": [_package(part) for part, enabled in parts.items() if not enabled],
        "unwanted": [
            part
            for part, enabled in parts.items()
            if parts_fit and not enabled and _has_something_of(part, brine[part])
        ],
        "specs": specs,
        "elsewhere": elsewhere,
        "in_cluster": bool(distributed or any(brine["config"].values()) or _exists(_CONFIGURATION)),
        "is_distributed": bool(distributed),
        **cluster,
    }


def _mapping(value: Any) -> Mapping[str, Any]:
    """A value that should be a mapping; an empty one in place of anything else."""
    return value if isinstance(value, Mapping) else {}


# ---- what pillar says


def _with_pillar(in_pillar: Mapping[str, Any]) -> Values:
    """The defaults, with what pillar says in place of them. Instances, and the cluster's own
    sections, may be large, and are left out."""
    said = {key: in_pillar[key] for key in DEFAULTS if key in in_pillar}
    said["instance"] = {**_mapping(said.get("instance")), "instances": None}
    return _merged(DEFAULTS, said)


def _merged(defaults: Mapping[Any, Any], said: Mapping[Any, Any]) -> Values:
    """A copy of nested defaults, with what pillar says in place of them.

    What pillar leaves empty, as in ``kvmd:``, is null there, and does not count. Neither does what
    has another shape than its default: brine_pillar refuses it, and has to be rendered for that.
    """
    merged = {
        str(key): _merged(value, {}) if isinstance(value, Mapping) else value
        for key, value in defaults.items()
    }
    for key, value in said.items():
        default = defaults.get(key)
        if value is None or (key in defaults and _shape(value) != _shape(default)):
            continue
        is_mapping = isinstance(value, Mapping)
        merged[str(key)] = _merged(_mapping(default), value) if is_mapping else value
    return merged


def _shape(value: Any) -> str:
    """The kind of a value that pillar has in place of a default. A default of null is one that
    pillar may have true or false in place of."""
    if isinstance(value, Mapping):
        return "mapping"
    if value is None or isinstance(value, bool):
        return "boolean"
    if isinstance(value, list | tuple):
        return "list"
    return "string" if isinstance(value, str) else "other"


def _add_places(brine: Values) -> None:
    """Add the places of files to the parts that have them."""
    for part, places in _PLACES.items():
        brine[part].update(places)
    for part, fallbacks in _FALLBACKS.items():
        settings = brine[part]["settings"]
        for key, fallback in fallbacks.items():
            said = settings.get(key)
            brine[part][key] = said if isinstance(said, str) else fallback
    # Salt itself reads it when the minion starts.
    folder, _, _ = __opts__["conf_file"].rpartition("/")
    brine["watcher"]["beacon_file"] = f"{folder}/minion.d/brine-beacon.conf"


# ---- instances and the cluster


def _is_this_node(name: Any) -> bool:
    """Whether a node's name is this node's. A short name means the whole one."""
    here, there = __grains__["nodename"].lower(), str(name).lower()
    return there in (here, here.split(".")[0]) or here == there.split(".")[0]


def _declared(instances: Mapping[Any, Any]) -> tuple[Values, dict[str, str]]:
    """The specs of the instances that pillar declares for this node, or for no node in particular,
    and the nodes of the others.

    An empty one, as in ``web1:``, is one with all defaults; one of another shape is left for
    ``brine``, or the check of pillar, to refuse. Those that are to go come first, as others may get
    their disks; then the order is that in which they start with the node.
    """
    specs: Values = {}
    elsewhere: dict[str, str] = {}
    for name, declared in instances.items():
        spec = _merged({}, _mapping(declared))
        if spec.get("absent") is False:
            del spec["absent"]
        node = spec.get("node") or ""
        if node and not _is_this_node(node):
            elsewhere[str(name)] = str(node).lower()
        else:
            has_shape = declared is None or isinstance(declared, Mapping)
            specs[str(name)] = spec if has_shape else declared
    in_order = sorted(specs, key=lambda name: (_turn(specs[name]), name))
    return {name: specs[name] for name in in_order}, elsewhere


def _turn(spec: Any) -> int:
    """When it is an instance's turn."""
    spec = _mapping(spec)
    if spec.get("absent") is True:
        return -1
    order = spec.get("start_order")
    return order if isinstance(order, int) and not isinstance(order, bool) else 100


def _of_cluster(declared: Mapping[str, Any], distributed: Mapping[str, Any]) -> Values:
    """The cluster's part for this node: from the configuration that the external pillar gives it,
    and from the one that this node makes of pillar."""
    nodes = _mapping(declared.get("nodes"))
    instances = [str(name) for name in distributed.get("instances") or ()]
    for name, instance in _mapping(declared.get("instances")).items():
        node = _mapping(instance).get("primary_node")
        if node and _is_this_node(node):
            instances.append(str(name))
    names = [*filter(None, [distributed.get("node")]), *filter(_is_this_node, nodes)]
    node_name = str(names[0]) if names else ""
    # One that makes the configuration without being in it has no instances of it.
    makes_all = bool(declared) and not declared.get("nodes")
    return {
        "of_cluster": instances,
        "node_name": node_name,
        "has_configuration": bool(node_name) or makes_all,
        "other_master": _other_master(declared, node_name),
    }


def _other_master(declared: Mapping[str, Any], node_name: str) -> str:
    """The master that is declared, if it is another node of the cluster than this one. A host that
    is no node of the cluster may make the configuration for its master."""
    nodes, cluster = _mapping(declared.get("nodes")), _mapping(declared.get("cluster"))
    master = str(cluster.get("master") or cluster.get("master_node") or "").lower()
    names = []
    for name, node in nodes.items():
        whole, uuid = str(name).lower(), str(_mapping(node).get("uuid")).lower()
        if master in (whole, whole.split(".")[0], uuid):
            names.append(str(name))
    is_here = not node_name or node_name in names or any(map(_is_this_node, names))
    return "" if is_here else "".join(names[:1])


# ---- the parts


def _parts(brine: Values, specs: Values, *, has_instances: bool) -> dict[str, bool]:
    """The parts that this node is to have. Virtual machines that were made by hand need theirs,
    whatever pillar leaves out: a part that it does not mention stays where it is."""
    confd, instance, lifecycle = brine["confd"], brine["instance"], brine["lifecycle"]
    with_confd, with_instance = confd["enabled"], instance["enabled"]
    with_lifecycle, with_watcher = lifecycle["enabled"], brine["watcher"]["enabled"]
    with_storage, with_moves = brine["storage"]["enabled"], brine["moves"]["enabled"]
    with_master = brine["master"]["enabled"]
    if with_instance is None:
        is_used = has_instances or instance["settings"] or with_moves
        with_instance = bool(is_used) or _is_installed("instance")
    if with_storage is None:
        is_used = with_instance or any(brine["storage"].values())
        with_storage = is_used or _is_installed("storage")
    if with_watcher is None:
        with_watcher = with_instance
    if with_lifecycle is None:
        is_used = lifecycle["settings"] or lifecycle["fence"] or any(map(_is_owned, specs.values()))
        with_lifecycle = with_instance and (bool(is_used) or _is_installed("lifecycle"))
    if with_moves is None:
        is_used = bool(brine["moves"]["settings"]) or _is_installed("moves")
        with_moves = with_instance and confd["enabled"] is not False and is_used
    if with_confd is None:
        with_confd = with_moves or confd["key"] != "" or _is_installed("confd")
    if with_master is None:
        with_master = (with_moves and brine["config"]["apply"]) or _is_installed("master")
    return {
        "kvmd": brine["kvmd"]["enabled"],
        "confd": with_confd,
        "hotplug": brine["hotplug"]["enabled"],
        "storage": with_storage,
        "instance": with_instance,
        "lifecycle": with_lifecycle,
        "watcher": with_watcher,
        "moves": with_moves,
        "master": with_master,
    }


def _package(part: str) -> str:
    return _PACKAGES.get(part, f"brine-{part}")


def _is_put_off(part: str, brine: Values) -> bool:
    """Whether a part waits for an upgrade. The brine-instance before it needs no brine-storage, and
    its repository may have none."""
    is_needed = brine["version"] or any(brine["storage"].values()) or _is_installed("storage")
    return part == "storage" and _is_installed("instance") and not is_needed


def _is_owned(spec: Any) -> bool:
    """Whether a spec is of an instance that has an owner, and stays."""
    spec = _mapping(spec)
    return spec.get("owner") is not None and spec.get("absent") is not True


def _is_installed(part: str) -> bool:
    if part == "storage":  # which has no unit
        # Salt has no such function for a family of distributions that it does not know.
        return "pkg.version" in __salt__ and bool(__salt__["pkg.version"]("brine-storage"))
    return _exists(f"/usr/lib/systemd/system/{_UNITS[part]}")


def _has_something_of(part: str, values: Mapping[str, Any]) -> bool:
    """Whether the node has the package of a part, or a file that these states have put there."""
    files = [f"/etc/brine/{part}.toml"]
    files += [values[key] for key in _OWN_FILES.get(part, ())]
    if part == "confd" and values["key"]:
        files += [values["key_file"], values["previous_key_file"]]
    if part == "hotplug":
        files += [f"{values['scripts_dir']}/{name}" for name in values["scripts"]]
    return _is_installed(part) or any(map(_exists, files))


def _exists(file: str) -> bool:
    exists: bool = __salt__["file.file_exists"](file)
    return exists


def _fit(parts: Mapping[str, bool]) -> bool:
    """Whether no part lacks another one that it needs."""
    needs = {
        "instance": ("hotplug", "storage"),
        "watcher": ("instance",),
        "lifecycle": ("instance",),
        "moves": ("instance", "confd"),
    }
    return all(parts[other] for part, others in needs.items() if parts[part] for other in others)
