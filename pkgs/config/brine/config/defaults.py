"""The default values of new objects: every key that Ganeti's daemons require."""

from __future__ import annotations

import copy
from typing import Any

from brine.common.schema import shape_of
from brine.config import params
from brine.config.model import KINDS, Cluster, ConfigNic
from brine.config.schema import ConfigObject

Json = dict[str, Any]

_WRITTEN = {
    "cluster": """master_netdev master_netmask use_external_mip_script primary_ip_family
        rsahostkeypub highest_used_port tcpudp_port_pool mac_prefix reserved_lvs file_storage_dir
        shared_file_storage_dir gluster_storage_dir enabled_hypervisors hvparams os_hvp beparams
        osparams osparams_private_cluster nicparams ndparams diskparams candidate_pool_size
        modify_etc_hosts modify_ssh_setup maintain_node_health uid_pool default_iallocator
        default_iallocator_params hidden_os blacklisted_os prealloc_wipe_disks
        enabled_disk_templates candidate_certs max_running_jobs max_tracked_jobs install_image
        instance_communication_network zeroing_image compression_tools enabled_user_shutdown
        data_collectors ssh_key_type ssh_key_bits tags hv_state_static disk_state_static ipolicy""",
    "nodegroups": """ndparams diskparams ipolicy alloc_policy networks tags hv_state_static
        disk_state_static""",
    "nodes": """offline drained master_capable vm_capable ndparams powered tags hv_state_static
        disk_state_static""",
    "networks": "tags",
    "instances": """os hvparams beparams osparams osparams_private admin_state admin_state_source
        nics disks disks_active tags""",
    "disks": "dev_type mode size params nodes children iv_name",
    "nic": "nicparams",
}
"""The keys that a new object's JSON has, in order."""

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
    shape = shape_of(CLASSES[kind])
    absent = {key: shape.by_key[key].default for key in _WRITTEN[kind].split()}
    plain = {key: [*value] if type(value) is tuple else value for key, value in absent.items()}
    return copy.deepcopy(plain | _NOT_AS_ABSENT.get(kind, {}))


def fill(kind: str, data: Json, *, only: set[str] | None = None) -> None:
    """Add missing keys to *data*.

    :param kind: of :data:`CLASSES`.
    :param only: these keys; None means all.
    """
    stamps = {} if kind == "nic" else {"serial_no": 1, "ctime": 0.0, "mtime": 0.0}
    for key, value in (_defaults(kind) | stamps).items():
        if key not in data and (only is None or key in only):
            data[key] = value
    if kind == "cluster":
        # Ganeti's daemons load a cluster only if these are complete.
        data["ndparams"] = params.defaults(params.NODE) | data.get("ndparams", {})
        for key, component in _GROUPS.items():
            groups = data.get(key, {})
            filled = params.defaults(component) | groups.get("default", {})
            data[key] = groups | {"default": filled}
