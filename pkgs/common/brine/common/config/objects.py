"""The objects of a cluster, as a Ganeti 2.16 to 3.1 configuration has them.

An object remembers which keys its JSON had, and keeps those that it does not know, so what was read
is what is written. A key that is absent, or null where that means nothing, has its default.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from brine.common.config.shape import ConfigError, ConfigObject

__all__ = [
    "Cluster",
    "ConfigError",
    "ConfigObject",
    "Disk",
    "Groups",
    "Instance",
    "Network",
    "Nic",
    "Node",
    "NodeGroup",
    "Params",
    "Stamped",
]

Params = dict[str, Any]
"""Parameters of a component: a flat mapping."""

Groups = dict[str, dict[str, Any]]
"""Parameters by group: by hypervisor, by disk template, or under ``default``."""


def _key(key: str) -> Any:
    """A field whose JSON key is not its name."""
    return field(metadata={"key": key})


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamped(ConfigObject):
    """What has a serial number and times (seconds since 1970) of its own.

    :param serial_no: raised at each change of the object.
    """

    serial_no: int = 1
    ctime: float = 0.0
    mtime: float = 0.0
    tags: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster(Stamped):
    """The cluster.

    :param master_node: UUID of a node.
    :param uid_pool: ranges of user ids, both ends inclusive.
    :param nicparams: under ``default``; so are beparams.
    """

    name: str = _key("cluster_name")
    master_node: str = ""
    master_ip: str = ""
    master_netdev: str = ""
    master_netmask: int = 32
    use_external_mip_script: bool = False
    primary_ip_family: int = 2
    rsahostkeypub: str = ""
    dsahostkeypub: str = ""
    highest_used_port: int = 11000
    tcpudp_port_pool: list[int] = field(default_factory=list)
    mac_prefix: str = "aa:00:00"
    volume_group_name: str | None = None
    reserved_lvs: list[str] = field(default_factory=list)
    drbd_usermode_helper: str | None = None
    default_bridge: str | None = None
    default_hypervisor: str | None = None
    file_storage_dir: str = ""
    shared_file_storage_dir: str = ""
    gluster_storage_dir: str = ""
    enabled_hypervisors: list[str] = field(default_factory=lambda: ["kvm"])
    hvparams: Groups = field(default_factory=dict)
    ipolicy: Params = field(default_factory=dict)
    os_hvp: dict[str, Groups] = field(default_factory=dict)
    beparams: Groups = field(default_factory=dict)
    osparams: Groups = field(default_factory=dict)
    osparams_private_cluster: Groups = field(default_factory=dict)
    nicparams: Groups = field(default_factory=dict)
    ndparams: Params = field(default_factory=dict)
    diskparams: Groups = field(default_factory=dict)
    candidate_pool_size: int = 10
    modify_etc_hosts: bool = True
    modify_ssh_setup: bool = True
    maintain_node_health: bool = False
    uid_pool: list[list[int]] = field(default_factory=list)
    default_iallocator: str = ""
    default_iallocator_params: Params = field(default_factory=dict)
    hidden_os: list[str] = field(default_factory=list)
    blacklisted_os: list[str] = field(default_factory=list)
    prealloc_wipe_disks: bool = False
    hv_state_static: Params = field(default_factory=dict)
    disk_state_static: Params = field(default_factory=dict)
    enabled_disk_templates: list[str] = field(default_factory=list)
    candidate_certs: dict[str, str] = field(default_factory=dict)
    max_running_jobs: int = 20
    max_tracked_jobs: int = 25
    install_image: str = ""
    instance_communication_network: str = ""
    zeroing_image: str = ""
    compression_tools: list[str] = field(default_factory=list)
    enabled_user_shutdown: bool = False
    data_collectors: Groups = field(default_factory=dict)
    diagnose_data_collector_filename: str = ""
    maint_round_delay: int = 300
    maint_balance: bool = False
    maint_balance_threshold: float = 0.1
    enabled_predictive_queue: bool = True
    ssh_key_type: str = "rsa"
    ssh_key_bits: int = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Node(Stamped):
    """A node.

    :param group: UUID of its node group.
    """

    name: str
    primary_ip: str
    secondary_ip: str = ""
    master_candidate: bool = False
    offline: bool = False
    drained: bool = False
    group: str = ""
    master_capable: bool = True
    vm_capable: bool = True
    ndparams: Params = field(default_factory=dict)
    powered: bool = True
    hv_state: Params = field(default_factory=dict)
    hv_state_static: Params = field(default_factory=dict)
    disk_state: Params = field(default_factory=dict)
    disk_state_static: Params = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup(Stamped):
    """A group of nodes.

    :param networks: by UUID of a network: the NIC parameters of a NIC in it.
    """

    name: str
    ndparams: Params = field(default_factory=dict)
    diskparams: Groups = field(default_factory=dict)
    ipolicy: Params = field(default_factory=dict)
    alloc_policy: str = "preferred"
    networks: Groups = field(default_factory=dict)
    hv_state_static: Params = field(default_factory=dict)
    disk_state_static: Params = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network(Stamped):
    """An IP network.

    :param network: with its prefix length, as ``192.0.2.0/24``.
    :param reservations: a string of ``0`` and ``1``, one for each address.
    """

    name: str
    network: str = ""
    network6: str | None = None
    gateway: str | None = None
    gateway6: str | None = None
    mac_prefix: str | None = None
    reservations: str | None = None
    ext_reservations: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic(ConfigObject):
    """A network interface of an instance.

    :param network: UUID of a network.
    """

    name: str | None = None
    mac: str = ""
    ip: str | None = None
    network: str | None = None
    nicparams: Params = field(default_factory=dict)
    netinfo: Params | None = None
    pci: int | None = None
    hvinfo: Params | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk(Stamped):
    """A disk, or a part of one.

    :param logical_id: what it is, in ``dev_type``'s way: ``[volume group, volume]`` for ``plain``,
        ``[node, node, port, minor, minor, secret]`` for ``drbd``.
    :param nodes: UUIDs.
    :param size: MiB.
    """

    name: str | None = None
    dev_type: str = ""
    logical_id: list[Any] = field(default_factory=list)
    children: tuple[Disk, ...] = ()
    nodes: list[str] = field(default_factory=list)
    iv_name: str = ""
    size: int = 0
    mode: str = "rw"
    params: Params = field(default_factory=dict)
    spindles: int | None = None
    pci: int | None = None
    hvinfo: Params | None = None
    dynamic_params: Params | None = None
    forthcoming: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance(Stamped):
    """A virtual machine.

    :param primary_node: UUID of a node.
    :param admin_state: ``up``, ``down`` or ``offline``: what it should be.
    :param admin_state_source: who said so: ``admin`` or ``user``.
    :param disks: UUIDs.
    """

    name: str
    primary_node: str = ""
    secondary_nodes: list[str] = field(default_factory=list)
    os: str = ""
    hypervisor: str = "kvm"
    hvparams: Params = field(default_factory=dict)
    beparams: Params = field(default_factory=dict)
    osparams: Params = field(default_factory=dict)
    osparams_private: Params = field(default_factory=dict)
    admin_state: str = "down"
    admin_state_source: str = "admin"
    nics: tuple[Nic, ...] = ()
    disks: tuple[str, ...] = ()
    disks_info: list[Any] | None = None
    disk_template: str = ""
    disks_active: bool = False
    network_port: int | None = None
    forthcoming: bool = False
