"""Keys and parameters of a configuration that Brine keeps and does not go by.

The format is Ganeti's, so a configuration may say more than Brine acts on. ``brine config apply``
names those of its input, and ``brine instance define --from-config`` and ``brine instance info``
those of an instance. Each one leaves these tables as soon as a part of Brine acts on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from brine.common.schema import member, shape_of
from brine.config import params
from brine.config.merge import CLASSES, Json, new_object
from brine.config.model import Configuration, Instance

_STATES = "hv_state hv_state_static disk_state disk_state_static"

_KEYS: dict[str, frozenset[str]] = {
    kind: frozenset(keys.split())
    for kind, keys in {
        "cluster": f"""
            blacklisted_os compression_tools default_bridge default_hypervisor default_iallocator
            default_iallocator_params diagnose_data_collector_filename diskparams
            drbd_usermode_helper dsahostkeypub enabled_disk_templates enabled_predictive_queue
            hidden_os highest_used_port install_image instance_communication_network ipolicy
            maint_balance maint_balance_threshold maint_round_delay max_running_jobs
            max_tracked_jobs modify_etc_hosts modify_ssh_setup osparams osparams_private_cluster
            prealloc_wipe_disks reserved_lvs rsahostkeypub ssh_key_bits ssh_key_type
            tcpudp_port_pool use_external_mip_script zeroing_image {_STATES}
        """,
        "nodes": f"powered tags {_STATES}",
        "nodegroups": f"alloc_policy diskparams ipolicy tags {_STATES}",
        "networks": "ext_reservations gateway gateway6 network6 reservations tags",
        "nic": "hvinfo netinfo pci",
        "disks": """
            dynamic_params hvinfo iv_name params pci size spindles tags
        """,
        "instances": """
            disk_template disks_active disks_info os osparams osparams_private secondary_nodes
        """,
    }.items()
}
"""The keys of each kind of object."""

_PARAMETERS: dict[str, frozenset[str]] = {
    component: frozenset(names.split())
    for component, names in {
        "kvm": """
            cdrom_disk_type cpu_mask debug_threads floppy_image_path keymap kvm_pci_reservations
            migration_bandwidth migration_caps migration_downtime migration_mode migration_port
            scsi_controller_type soundhw spice_bind spice_image_compression spice_ip_version
            spice_jpeg_wan_compression spice_password_file spice_playback_compression
            spice_streaming_video spice_tls_ciphers spice_use_tls spice_use_vdagent
            spice_zlib_glz_wan_compression usb_devices vga vnc_tls vnc_x509_path vnc_x509_verify
            vnet_hdr
        """,
        "xen-pvm": """
            blockdev_prefix bootloader_args cpu_mask cpuid migration_mode migration_port soundhw
            vif_script xen_cmd
        """,
        "beparams": "always_failover auto_balance minmem spindle_use",
        "ndparams": """
            cpu_speed exclusive_storage oob_program ovs ovs_link ovs_name spindle_count
        """,
    }.items()
}
"""The parameters of components; of a hypervisor that is not here, Brine runs no instance."""

_COMPONENTS = {"beparams": params.BACKEND, "ndparams": params.NODE}
_WISHES = ("os", "osparams")
"""The keys of an instance that a node knows, and that are no facts about its disks."""


def without_effect(declared: Json, new: Configuration) -> Iterator[str]:
    """The places, as JSON pointers, where an input sets what has no effect.

    A value that is the default sets nothing.

    :param declared: an input of ``brine config apply``.
    :param new: the configuration that it makes.
    """
    yield from _of_object("cluster", declared.get("cluster"), "/cluster")
    for section in ("networks", "nodegroups", "nodes", "instances", "disks"):
        for name, item in _items(declared.get(section)):
            where = member(f"/{section}", name)
            yield from _of_object(section, item, where)
            if section == "instances" and isinstance(item, dict):
                yield from _of_devices(item, where)
                uuid = new.names("instances").exact(name)
                kind = new.instances[uuid].hypervisor if uuid else ""
                yield from _of_hypervisor(kind, item.get("hvparams"), f"{where}/hvparams")


def ignored_wishes(configuration: Configuration, instance: Instance) -> list[str]:
    """The names of what is set for an instance, at any level, and has no effect on it; but not its
    hypervisor parameters, some of which have an effect beside others only."""
    backend = _of_component("beparams", configuration.be_params(instance), "")
    own = _of_object("instances", instance.to_json(), "")
    wishes = [where for where in own if where.removeprefix("/") in _WISHES]
    disks = [
        f"/disks/{index}/params"
        for index, uuid in enumerate(instance.disks)
        if uuid in configuration.disks and configuration.disks[uuid].params
    ]
    return [where.removeprefix("/") for where in (*backend, *wishes, *disks)]


def in_one_line(places: list[str]) -> str:
    """Such places in one line: objects of one section are counted together.

    ``/instances/web1/os``; ``/nodes/*/powered (3)`` for three nodes.
    """
    counted: dict[str, list[str]] = {}
    for place in places:
        _, section, *rest = place.split("/")
        shape = place if section == "cluster" else "/".join(("", section, "*", *rest[1:]))
        counted.setdefault(shape, []).append(place)
    return ", ".join(
        one[0] if len(one) == 1 else f"{shape} ({len(one)})" for shape, one in counted.items()
    )


def _of_object(kind: str, declared: Any, where: str) -> Iterator[str]:
    usual = {key: one.default for key, one in shape_of(CLASSES[kind]).by_key.items()}
    usual |= new_object(kind)
    for key, value in _items(declared):
        if kind != "instances" and key == "hvparams":
            for hypervisor, values in _items(value):
                yield from _of_hypervisor(hypervisor, values, f"{where}/hvparams/{hypervisor}")
        elif key == "os_hvp":
            for system, by_hypervisor in _items(value):
                for hypervisor, values in _items(by_hypervisor):
                    place = f"{member(f'{where}/os_hvp', system)}/{hypervisor}"
                    yield from _of_hypervisor(hypervisor, values, place)
        elif key in _COMPONENTS:
            is_grouped = isinstance(value, dict) and isinstance(value.get("default"), dict)
            place = f"{where}/{key}" + "/default" * is_grouped
            yield from _of_component(key, value["default"] if is_grouped else value, place)
        elif key not in _KEYS[kind] or value in (None, usual.get(key)):
            continue
        elif key == "diskparams":
            for template, values in _items(value):
                usual_values = params.defaults(params.DISKS.get(template, {}))
                used = params.DISK_PARAMETERS.get(template, ())
                for place in _changed(values, usual_values, f"{where}/diskparams/{template}"):
                    if place.rpartition("/")[2] not in used:
                        yield place
        else:
            yield member(where, key)


def _of_devices(instance: Json, where: str) -> Iterator[str]:
    for key, kind in (("nics", "nic"), ("disks", "disks")):
        devices = instance.get(key)
        for index, device in enumerate(devices if isinstance(devices, list) else ()):
            yield from _of_object(kind, device, f"{where}/{key}/{index}")


def _of_hypervisor(hypervisor: str, values: Any, where: str) -> Iterator[str]:
    component = params.HYPERVISORS.get(hypervisor, {})
    ignored = _PARAMETERS.get(hypervisor, frozenset(component))
    for place in _changed(values, params.defaults(component), where):
        if place.rpartition("/")[2] in ignored:
            yield place


def _of_component(key: str, values: Any, where: str) -> Iterator[str]:
    for place in _changed(values, params.defaults(_COMPONENTS[key]), where):
        name = place.rpartition("/")[2]
        # Brine has one size of memory. A smaller one that differs is a wish.
        is_same_size = name == "minmem" and values["minmem"] == values.get("maxmem")
        if name in _PARAMETERS[key] and not is_same_size:
            yield place


def _changed(values: Any, usual: Mapping[str, Any], where: str) -> Iterator[str]:
    """The places of the values that are not the usual ones."""
    for name, value in _items(values):
        if value is not None and value != usual.get(name):
            yield member(where, name)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """The members of an object; none of what is something else, which other checks report."""
    if isinstance(value, dict):
        yield from value.items()
