"""The default values of new objects: every key that Ganeti's daemons require."""

from __future__ import annotations

import copy
from typing import Any

from brine.common.schema import shape_of
from brine.config import params
from brine.config.model import KINDS, Cluster, ConfigNic
from brine.config.schema import ConfigObject

Json = dict[str, Any]

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
_GROUPS = {"beparams": params.BACKEND, "nicparams": params.NIC}

_NOT_AS_ABSENT: dict[str, Json] = {
    "cluster": {
        "beparams": {"default": params.defaults(params.BACKEND)},
        "nicparams": {"default": params.defaults(params.NIC)},
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


def _defaults(kind: str) -> Json:
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
    for key, value in _defaults(kind).items():
        if key not in data and (only is None or key in only):
            data[key] = value
    if kind == "cluster":
        # Ganeti's daemons load a cluster only if these are complete.
        data["ndparams"] = params.defaults(params.NODE) | data.get("ndparams", {})
        for key, component in _GROUPS.items():
            groups = data.get(key, {})
            filled = params.defaults(component) | groups.get("default", {})
            data[key] = groups | {"default": filled}
