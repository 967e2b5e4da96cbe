"""What a new object has where nothing says otherwise: every key that Ganeti's daemons insist on."""

from __future__ import annotations

import copy
from typing import Any

from brine.config import params

Json = dict[str, Any]

_LIMITS = {
    "cpu-count": (1, 8),
    "disk-count": (1, 16),
    "disk-size": (1024, 1048576),
    "memory-size": (128, 32768),
    "nic-count": (1, 8),
    "spindle-use": (1, 12),
}

_STATIC: Json = {"hv_state_static": {}, "disk_state_static": {}}

_CLUSTER: Json = {
    "master_netdev": "",
    "master_netmask": 32,
    "use_external_mip_script": False,
    "primary_ip_family": 2,
    "rsahostkeypub": "",
    "highest_used_port": 11000,
    "tcpudp_port_pool": [],
    "mac_prefix": "aa:00:00",
    "reserved_lvs": [],
    "file_storage_dir": "",
    "shared_file_storage_dir": "",
    "gluster_storage_dir": "",
    "enabled_hypervisors": ["kvm"],
    "hvparams": {},
    "os_hvp": {},
    "beparams": {"default": params.defaults(params.BACKEND)},
    "osparams": {},
    "osparams_private_cluster": {},
    "nicparams": {"default": params.defaults(params.NIC)},
    "ndparams": params.defaults(params.NODE),
    "diskparams": {},
    "candidate_pool_size": 10,
    "modify_etc_hosts": False,
    "modify_ssh_setup": False,
    "maintain_node_health": False,
    "uid_pool": [],
    "default_iallocator": "",
    "default_iallocator_params": {},
    "hidden_os": [],
    "blacklisted_os": [],
    "prealloc_wipe_disks": False,
    "enabled_disk_templates": ["plain", "file", "blockdev", "rbd"],
    "candidate_certs": {},
    "max_running_jobs": 20,
    "max_tracked_jobs": 25,
    "install_image": "",
    "instance_communication_network": "",
    "zeroing_image": "",
    "compression_tools": ["gzip"],
    "enabled_user_shutdown": True,
    "data_collectors": {},
    "ssh_key_type": "rsa",
    "ssh_key_bits": 2048,
    "tags": [],
    **_STATIC,
    "ipolicy": {
        "disk-templates": ["plain", "file", "blockdev", "rbd"],
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
}

_SECTIONS: dict[str, Json] = {
    "nodegroups": {
        "ndparams": {},
        "diskparams": {},
        "ipolicy": {},
        "alloc_policy": "preferred",
        "networks": {},
        "tags": [],
        **_STATIC,
    },
    "nodes": {
        "offline": False,
        "drained": False,
        "master_capable": True,
        "vm_capable": True,
        "ndparams": {},
        "powered": True,
        "tags": [],
        **_STATIC,
    },
    "networks": {"tags": []},
    "instances": {
        "os": "noop",
        "hvparams": {},
        "beparams": {},
        "osparams": {},
        "osparams_private": {},
        "admin_state": "up",
        "admin_state_source": "admin",
        "nics": [],
        "disks": [],
        "disks_active": False,
        "tags": [],
    },
    "disks": {
        "dev_type": "plain",
        "mode": "rw",
        "size": 0,
        "params": {},
        "nodes": [],
        "children": [],
        "iv_name": "",
    },
}

_NIC: Json = {"nicparams": {}}


def defaults(kind: str) -> Json:
    """Keys and values of a new object.

    :param kind: ``cluster``, ``nic``, or a section.
    """
    table = {"cluster": _CLUSTER, "nic": _NIC}.get(kind) or _SECTIONS[kind]
    return copy.deepcopy(table)


def fill(kind: str, data: Json, *, only: set[str] | None = None) -> None:
    """Give *data* what it lacks.

    :param only: of these keys alone; None is all.
    """
    stamps = {} if kind == "nic" else {"serial_no": 1, "ctime": 0.0, "mtime": 0.0}
    for key, value in (defaults(kind) | stamps).items():
        if key not in data and (only is None or key in only):
            data[key] = value
    if kind == "cluster":
        # These must be whole at the level of the cluster, or Ganeti's daemons do not load it.
        data["ndparams"] = params.defaults(params.NODE) | data.get("ndparams", {})
        for key, component in (("beparams", params.BACKEND), ("nicparams", params.NIC)):
            groups = data.get(key, {})
            filled = params.defaults(component) | groups.get("default", {})
            data[key] = groups | {"default": filled}
