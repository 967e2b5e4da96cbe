"""Configurations as a Ganeti 3.0 cluster has them, of any size, whole enough for its own daemon."""

from __future__ import annotations

import ipaddress
import uuid
from typing import Any

DEFAULT_LINK = "br0"
OTHER_LINK = "br1"

_TIME = 1700000000.5
_NAMESPACE = uuid.UUID("6d0f6f0e-8b4b-4f0e-9b57-0f6d5c2f7a11")
_FIRST_NODE_IP = int(ipaddress.IPv4Address("192.0.2.1"))
_FIRST_INSTANCE_IP = int(ipaddress.IPv4Address("10.0.0.1"))
_CANDIDATES = 10

Json = dict[str, Any]


def node_name(number: int) -> str:
    """The name of the node of that number, from 1."""
    return f"node{number}.example.com"


def node_ip(number: int) -> str:
    """The primary IP address of the node of that number, from 1."""
    return str(ipaddress.IPv4Address(_FIRST_NODE_IP + number - 1))


def instance_name(number: int) -> str:
    """The name of the instance of that number, from 1."""
    return f"instance{number}.example.com"


def instance_ip(number: int) -> str:
    """The IP address of the first NIC of the instance of that number, from 1."""
    return str(ipaddress.IPv4Address(_FIRST_INSTANCE_IP + number - 1))


def uuid_of(kind: str, number: int) -> str:
    """The UUID of an object: of a ``node``, ``instance``, ``disk``, ``nic`` or ``nodegroup``."""
    return str(uuid.uuid5(_NAMESPACE, f"{kind}{number}"))


def ganeti_config(*, nodes: int = 3, instances: int = 4, serial: int = 42) -> Json:
    """A configuration: node 1 is the master, the next nine are candidates.

    Of five or more nodes the last is offline and the last but one drained. Instance N is on node N
    (modulo their number) and has one LVM disk and one NIC with an IP address on the default link;
    each tenth instance has a DRBD disk and a second NIC, on another link.
    """
    disks: Json = {}
    records: Json = {}
    for number in range(1, instances + 1):
        record, its_disk = _instance(number, nodes)
        records[record["uuid"]] = record
        disks[its_disk["uuid"]] = its_disk
    group = {
        **_stamps("nodegroup", 1),
        "name": "default",
        "ndparams": {},
        "diskparams": {},
        "ipolicy": {},
        "alloc_policy": "preferred",
        "networks": {},
        "tags": [],
        "hv_state_static": {},
        "disk_state_static": {},
    }
    return {
        "version": 3000000,
        "serial_no": serial,
        "ctime": _TIME,
        "mtime": _TIME,
        "cluster": _cluster(),
        "nodes": {uuid_of("node", n): _node(n, nodes) for n in range(1, nodes + 1)},
        "nodegroups": {group["uuid"]: group},
        "instances": records,
        "networks": {},
        "disks": disks,
        "filters": {},
    }


def _stamps(kind: str, number: int) -> Json:
    return {"uuid": uuid_of(kind, number), "serial_no": 1, "ctime": _TIME, "mtime": _TIME}


def _node(number: int, count: int) -> Json:
    offline = count >= 5 and number == count
    drained = count >= 5 and number == count - 1
    return {
        **_stamps("node", number),
        "name": node_name(number),
        "primary_ip": node_ip(number),
        "secondary_ip": node_ip(number),
        "master_candidate": number <= _CANDIDATES and not offline and not drained,
        "offline": offline,
        "drained": drained,
        "group": uuid_of("nodegroup", 1),
        "master_capable": True,
        "vm_capable": True,
        "ndparams": {},
        "powered": True,
        "hv_state_static": {},
        "disk_state_static": {},
        "tags": [],
    }


def _instance(number: int, nodes: int) -> tuple[Json, Json]:
    primary = uuid_of("node", (number - 1) % nodes + 1)
    secondary = uuid_of("node", number % nodes + 1)
    mirrored = number % 10 == 0 and nodes > 1
    disk = _drbd(number, primary, secondary) if mirrored else _lv(number, 0, primary)
    nics = [_nic(2 * number, instance_ip(number), {})]
    if mirrored:
        other = str(ipaddress.IPv4Address("172.16.0.0") + number)
        nics.append(_nic(2 * number + 1, other, {"link": OTHER_LINK}))
    instance = {
        **_stamps("instance", number),
        "name": instance_name(number),
        "primary_node": primary,
        "os": "noop",
        "hypervisor": "kvm",
        "hvparams": {},
        "beparams": {"maxmem": 512, "minmem": 512},
        "osparams": {},
        "osparams_private": {},
        "admin_state": "up",
        "admin_state_source": "admin",
        "nics": nics,
        "disks": [disk["uuid"]],
        "disks_active": True,
        "network_port": 11000 + number,
        "tags": [],
    }
    return instance, disk


def _nic(number: int, address: str, nicparams: Json) -> Json:
    digits = f"{number:06x}"
    return {
        "uuid": uuid_of("nic", number),
        "mac": f"aa:00:00:{digits[0:2]}:{digits[2:4]}:{digits[4:6]}",
        "ip": address,
        "nicparams": nicparams,
    }


def _lv(number: int, part: int, *nodes: str) -> Json:
    return {
        **_stamps("disk", 1_000_000 * part + number),
        "dev_type": "plain",
        "logical_id": ["xenvg", f"{uuid_of('disk', number)}.disk{part}"],
        "size": 10240 if part != 2 else 128,
        "mode": "rw",
        "params": {},
        "nodes": list(nodes),
        "children": [],
        "iv_name": "disk/0" if part == 0 else "",
    }


def _drbd(number: int, primary: str, secondary: str) -> Json:
    minor = number // 10
    return {
        **_stamps("disk", number),
        "dev_type": "drbd",
        "logical_id": [primary, secondary, 12000 + minor, minor, minor, "a" * 40],
        "iv_name": "disk/0",
        "size": 10240,
        "mode": "rw",
        "params": {},
        "nodes": [primary, secondary],
        "children": [_lv(number, 1, primary, secondary), _lv(number, 2, primary, secondary)],
    }


def _cluster() -> Json:
    limits = {
        "cpu-count": 8,
        "disk-count": 16,
        "disk-size": 1048576,
        "memory-size": 32768,
        "nic-count": 8,
        "spindle-use": 12,
    }
    return {
        **_stamps("cluster", 1),
        "cluster_name": "cluster.example.com",
        "master_node": uuid_of("node", 1),
        "master_ip": "192.0.2.254",
        "master_netdev": "eth0",
        "master_netmask": 32,
        "use_external_mip_script": False,
        "primary_ip_family": 2,
        "rsahostkeypub": "",
        "highest_used_port": 31000,
        "tcpudp_port_pool": [],
        "mac_prefix": "aa:00:00",
        "volume_group_name": "xenvg",
        "reserved_lvs": [],
        "drbd_usermode_helper": "/bin/true",
        "file_storage_dir": "",
        "shared_file_storage_dir": "",
        "gluster_storage_dir": "",
        "enabled_hypervisors": ["kvm"],
        "hvparams": {"kvm": {"acpi": True, "migration_port": 8102, "user_shutdown": True}},
        "os_hvp": {},
        "beparams": {
            "default": {
                "always_failover": False,
                "auto_balance": True,
                "maxmem": 128,
                "minmem": 128,
                "spindle_use": 1,
                "vcpus": 1,
            }
        },
        "osparams": {},
        "osparams_private_cluster": {},
        "nicparams": {"default": {"link": DEFAULT_LINK, "mode": "bridged", "vlan": ""}},
        "ndparams": {
            "cpu_speed": 1.0,
            "exclusive_storage": False,
            "oob_program": "",
            "ovs": False,
            "ovs_link": "",
            "ovs_name": "switch1",
            "spindle_count": 1,
            "ssh_port": 22,
        },
        "diskparams": {},
        "candidate_pool_size": _CANDIDATES,
        "modify_etc_hosts": False,
        "modify_ssh_setup": False,
        "maintain_node_health": False,
        "uid_pool": [[4000, 4099]],
        "default_iallocator": "hail",
        "default_iallocator_params": {},
        "hidden_os": [],
        "blacklisted_os": [],
        "prealloc_wipe_disks": False,
        "hv_state_static": {},
        "disk_state_static": {},
        "enabled_disk_templates": ["plain", "drbd"],
        "candidate_certs": {},
        "max_running_jobs": 20,
        "max_tracked_jobs": 25,
        "install_image": "",
        "instance_communication_network": "",
        "zeroing_image": "",
        "compression_tools": ["gzip"],
        "enabled_user_shutdown": True,
        "data_collectors": {
            "cpu-avg-load": {"active": True, "interval": 5000000.0},
            "drbd": {"active": False, "interval": 5000000.0},
        },
        "ssh_key_type": "rsa",
        "ssh_key_bits": 2048,
        "tags": [],
        "ipolicy": {
            "disk-templates": ["plain", "drbd"],
            "minmax": [{"min": dict.fromkeys(limits, 1), "max": limits}],
            "std": dict.fromkeys(limits, 1),
            "spindle-ratio": 32.0,
            "vcpu-ratio": 4.0,
        },
    }
