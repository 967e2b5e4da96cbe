"""Specs from the cluster's configuration: this node's instances with all parameters.

In the tables, names on the left are Ganeti's. A parameter without a counterpart is reported.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from brine.common.errors import BrineError, UsageError, tell_error, warn
from brine.config import params
from brine.config.model import ConfigDisk, ConfigNic, Configuration, Instance
from brine.config.store import ConfigStore
from brine.instance import store
from brine.instance.messages import log_to_journal
from brine.instance.operations import define_instance
from brine.instance.spec import Interface, SecurityModel, Source, Spec
from brine.instance.store import InstanceError

_SAME = {
    "acpi": "acpi",
    "cpu_cores": "cores",
    "cpu_sockets": "sockets",
    "cpu_threads": "threads",
    "cpu_type": "cpu",
    "initrd_path": "initrd",
    "kernel_path": "kernel",
    "mem_path": "huge_pages",
    "reboot_behavior": "reboot_behavior",
    "security_model": "security_model",
    "serial_console": "serial_console",
    "use_chroot": "chroot",
    "use_guest_agent": "guest_agent",
    "vnc_bind_address": "vnc_bind",
    "vnc_password_file": "vnc_password_file",
}
"""Parameters that mean the same under another name."""

_READ = {
    "boot_order",
    "cdrom2_image_path",
    "cdrom_image_path",
    "disk_aio",
    "disk_cache",
    "disk_discard",
    "disk_type",
    "kernel_args",
    "kvm_extra",
    "kvm_flag",
    "kvm_path",
    "machine_version",
    "nic_type",
    "root_path",
    "security_domain",
    "usb_mouse",
    "use_localtime",
    "user_shutdown",
    "vhost_net",
    "virtio_net_queues",
}
"""Parameters that need a conversion."""

_WITHOUT_EFFECT = {"kvm_pci_reservations", "migration_caps", "migration_downtime", "vnet_hdr"}
_WITHOUT_EFFECT |= {"migration_bandwidth", "migration_mode", "migration_port", "serial_speed"}
_XEN = "xen-pvm"
_PYGRUB = "pygrub"  # of whose guests GRUB itself finds the kernel, too
_XEN_READ = {"bootloader_path", "cpu_cap", "cpu_weight", "initrd_path", "kernel_args"}
_XEN_READ |= {"kernel_path", "reboot_behavior", "root_path", "use_bootloader", "user_shutdown"}
# These have no effect: Brine uses xl, domains do not migrate, and disks are xvda, xvdb and so on.
_XEN_READ |= {"blockdev_prefix", "migration_mode", "migration_port", "xen_cmd"}
_USUAL_WEIGHT = 256
_DEFAULT_PROGRAM = "/usr/bin/kvm"

_INTERFACES = {
    "paravirtual": Interface.VIRTIO,
    "ide": Interface.IDE,
    "scsi": Interface.SCSI,
    "scsi-hd": Interface.SCSI,
}
_MODELS = {"paravirtual": "virtio", "e1000": "e1000", "rtl8139": "rtl8139"}


@dataclass(frozen=True, slots=True)
class Imported:
    """An instance of the configuration.

    :param data: its spec, as people write it.
    :param ignored: parameters that are set and have no effect.
    """

    data: dict[str, Any]
    ignored: tuple[str, ...]


def define_all(arguments: argparse.Namespace) -> int:
    """``brine instance define --from-config``"""
    if arguments.file is not None:
        hint = "give a file, or -, or --from-config"
        raise UsageError("where is the spec to come from?", hint=hint)
    log_to_journal("brine")
    configuration = ConfigStore().read()
    node = arguments.node or os.uname().nodename
    failed = False
    results: list[dict[str, Any]] = []
    for instance in instances_of(configuration, node):
        try:
            imported = spec_of(configuration, instance)
            data = keeping_users_will(imported.data, store.load_sound(instance.name))
            changed = define_instance(data, dry_run=arguments.dry_run).changed
        except BrineError as error:
            failed = True
            tell_error(error, "" if isinstance(error, InstanceError) else instance.name)
            continue
        results.append({"name": instance.name, "changed": changed, "ignored": imported.ignored})
    others = elsewhere(configuration, node)
    if arguments.json:
        rows = [{"name": name, "node": owner} for name, owner in others.items()]
        told = {"instances": results, "elsewhere": rows, "dry_run": arguments.dry_run}
        print(json.dumps(told, indent=2))
        return 1 if failed else 0
    for result in results:
        word = "would be defined" if arguments.dry_run else "defined"
        print(f"{word if result['changed'] else 'unchanged'}: {result['name']}")
        for name in result["ignored"]:
            warn(f"{result['name']}: its parameter {name} has no effect here")
    if not results and not failed:
        print("no instance is this node's")
    for name, owner in others.items():
        warn(
            f"{name}: is defined here, and is {owner}'s in the cluster's configuration",
            hint=f"brine instance undefine {name}, unless it is to come back",
        )
    return 1 if failed else 0


def instances_of(configuration: Configuration, node: str) -> Iterator[Instance]:
    """The instances with that primary node, by name.

    :param node: its short or full name, or its UUID.
    :raises ConfigError: if there is no such node.
    """
    uuid = configuration.node(node).uuid
    every = configuration.instances.values()
    yield from sorted(
        (one for one in every if one.primary_node == uuid), key=lambda instance: instance.name
    )


def elsewhere(configuration: Configuration, node: str) -> dict[str, str]:
    """Instances that are defined here and belong to another node now: their names, and its name.

    They are found by their UUIDs; instances that are not in the configuration are left alone.

    :param node: this node: its short or full name, or its UUID.
    :raises ConfigError: if there is no such node.
    """
    uuid = configuration.node(node).uuid
    found = {}
    for spec in store.load_all():
        if isinstance(spec, InstanceError):
            continue  # which others tell
        instance = configuration.instances.get(spec.uuid)
        if instance and instance.primary_node != uuid:
            owner = configuration.nodes.get(instance.primary_node)
            found[spec.name] = owner.name if owner else instance.primary_node
    return found


def spec_of(configuration: Configuration, instance: Instance) -> Imported:
    """The spec of an instance of the configuration.

    :raises InstanceError: if it can't run here.
    """
    if instance.hypervisor not in ("kvm", _XEN):
        text = f"its hypervisor is {instance.hypervisor}, and only kvm and {_XEN} are run here"
        raise InstanceError(instance.name, text)
    hypervisor = configuration.hv_params(instance)
    backend = configuration.be_params(instance)
    common: dict[str, Any] = {
        "name": instance.name,
        "uuid": instance.uuid,
        "admin_state": instance.admin_state,
        "admin_state_source": instance.admin_state_source,
        "tags": list(instance.tags),
        "memory_mib": backend["maxmem"],
        "vcpus": backend["vcpus"],
    }
    if instance.hypervisor == _XEN:
        data = {**common, **_domain(configuration, instance, hypervisor)}
        return Imported(data, tuple(_ignored(hypervisor, _XEN, _XEN_READ)))
    data = {
        **common,
        **{ours: hypervisor[theirs] for theirs, ours in _SAME.items()},
        **_machine(hypervisor),
        **_kernel(hypervisor),
        **_display(hypervisor, instance),
        **_security(hypervisor),
        "rtc": "localtime" if hypervisor["use_localtime"] else "utc",
        "usb_tablet": hypervisor["usb_mouse"] == "tablet",
        "user_shutdown": _user_shutdown(configuration, instance, hypervisor),
        "cdroms": _some(hypervisor["cdrom_image_path"], hypervisor["cdrom2_image_path"]),
        "boot_order": _boot_order(instance, hypervisor),
        "disks": [_disk(instance, disk, hypervisor) for disk in _disks(configuration, instance)],
        "nics": [_nic(configuration, instance, nic, hypervisor) for nic in instance.nics],
    }
    done = _SAME.keys() | _READ | _WITHOUT_EFFECT
    return Imported(data, tuple(_ignored(hypervisor, "kvm", done)))


def keeping_users_will(data: dict[str, Any], before: Spec | None) -> dict[str, Any]:
    """A spec, without its admin_state if the instance was shut down by its user: the configuration
    may not know that yet.

    :param before: the present spec of this node; None if there is none.
    """
    if before is None or before.admin_state_source != Source.USER:
        return data
    left_out = ("admin_state", "admin_state_source")
    return {name: value for name, value in data.items() if name not in left_out}


def _domain(
    configuration: Configuration, instance: Instance, hypervisor: Mapping[str, Any]
) -> dict[str, Any]:
    """The keys of a spec that only domains have."""
    weight = hypervisor["cpu_weight"]
    return {
        "hypervisor": _XEN,
        "reboot_behavior": hypervisor["reboot_behavior"],
        "user_shutdown": _user_shutdown(configuration, instance, hypervisor),
        "cpu_limit_percent": hypervisor["cpu_cap"],
        "cpu_weight": 0 if weight == _USUAL_WEIGHT else weight,
        **_kernel_of_domain(instance, hypervisor),
        "disks": [
            {
                "uuid": one.uuid,
                "path": _path(instance, one),
                "format": "raw",
                "read_only": one.mode == "ro",
            }
            for one in _disks(configuration, instance)
        ],
        "nics": [_vif(configuration, nic) for nic in instance.nics],
    }


def _kernel_of_domain(instance: Instance, hypervisor: Mapping[str, Any]) -> dict[str, Any]:
    if hypervisor["use_bootloader"]:
        program = hypervisor["bootloader_path"]
        if program.rpartition("/")[2] not in ("", _PYGRUB):
            text = f"its bootloader is {program}, and only {_PYGRUB} has a counterpart here"
            raise InstanceError(instance.name, text)
        return {}
    root = hypervisor["root_path"]
    words = _some(f"root={root}" if root else "", hypervisor["kernel_args"])
    return {
        "kernel": hypervisor["kernel_path"],
        "initrd": hypervisor["initrd_path"],
        "append": " ".join(words) if hypervisor["kernel_path"] else "",
    }


def _vif(configuration: Configuration, nic: ConfigNic) -> dict[str, Any]:
    wiring = configuration.nic_params(nic)
    return {
        "uuid": nic.uuid,
        "mac": nic.mac,
        "mode": wiring["mode"],
        "link": "" if wiring["mode"] == "routed" and wiring["link"] == "main" else wiring["link"],
        "vlan": str(wiring["vlan"] or ""),
        "ips": _some(nic.ip),
    }


def _machine(hypervisor: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "machine": hypervisor["machine_version"] or "pc",
        "accel": "tcg" if hypervisor["kvm_flag"] == "disabled" else "kvm",
        "extra_arguments": shlex.split(hypervisor["kvm_extra"]),
    }
    if hypervisor["kvm_path"] != _DEFAULT_PROGRAM:
        found["qemu"] = hypervisor["kvm_path"]
    return found


def _kernel(hypervisor: Mapping[str, Any]) -> dict[str, Any]:
    if not hypervisor["kernel_path"]:
        return {"initrd": ""}  # which it would have no use for
    root = hypervisor["root_path"]
    console = "console=ttyS0,38400" if hypervisor["serial_console"] else ""
    words = _some(f"root={root}" if root else "", hypervisor["kernel_args"], console)
    return {"append": " ".join(words)}


def _display(hypervisor: Mapping[str, Any], instance: Instance) -> dict[str, Any]:
    bind = hypervisor["vnc_bind_address"]
    if not bind:
        return {"vnc_password_file": ""}
    if bind.endswith("/"):
        return {"vnc_bind": f"{bind}{instance.name}.vnc"}
    has_port = not bind.startswith("/") and instance.network_port
    return {"vnc_port": instance.network_port} if has_port else {}


def _security(hypervisor: Mapping[str, Any]) -> dict[str, Any]:
    is_user = hypervisor["security_model"] == SecurityModel.USER
    return {"security_user": hypervisor["security_domain"] if is_user else ""}


def _user_shutdown(
    configuration: Configuration, instance: Instance, hypervisor: Mapping[str, Any]
) -> str:
    """The value of user_shutdown."""
    of_cluster = configuration.cluster.hvparams.get(instance.hypervisor, {})
    said = "user_shutdown" in instance.hvparams or "user_shutdown" in of_cluster
    stays = hypervisor["user_shutdown"]
    if instance.hypervisor != _XEN:
        # For Xen the parameter is Brine's own, and needs no conversion.
        stays = stays or configuration.cluster.enabled_user_shutdown
    return "restart" if said and not stays else "stop"


def _boot_order(instance: Instance, hypervisor: Mapping[str, Any]) -> list[str]:
    first = hypervisor["boot_order"]
    every = ["disk", "cdrom", "network"]
    if first not in every:
        raise InstanceError(instance.name, f"it boots from {first}, which is not done here")
    return [first, *(device for device in every if device != first)]


def _disks(configuration: Configuration, instance: Instance) -> Iterator[ConfigDisk]:
    for uuid in instance.disks:
        disk = configuration.disks.get(uuid)
        if disk is None:
            raise InstanceError(instance.name, f"its disk {uuid} is not in the configuration")
        yield disk


def _disk(instance: Instance, disk: ConfigDisk, hypervisor: Mapping[str, Any]) -> dict[str, Any]:
    cache = hypervisor["disk_cache"]
    return {
        "uuid": disk.uuid,
        "path": _path(instance, disk),
        "format": "raw",
        "interface": _known(instance, "disk_type", hypervisor, _INTERFACES),
        "cache": "none" if cache == "default" else cache,
        "aio": hypervisor["disk_aio"],
        "discard": hypervisor["disk_discard"] != "ignore",
        "read_only": disk.mode == "ro",
    }


def _path(instance: Instance, disk: ConfigDisk) -> str:
    if disk.dev_type == "plain":
        return f"/dev/{disk.logical_id[0]}/{disk.logical_id[1]}"
    if disk.dev_type in ("file", "sharedfile", "blockdev"):
        return str(disk.logical_id[1])
    text = f"disk {disk.uuid} is of the kind {disk.dev_type}, which is not set up here"
    raise InstanceError(instance.name, text)


def _nic(
    configuration: Configuration, instance: Instance, nic: ConfigNic, hypervisor: Mapping[str, Any]
) -> dict[str, Any]:
    wiring = configuration.nic_params(nic)
    model = _known(instance, "nic_type", hypervisor, _MODELS)
    is_virtio = model == "virtio"
    vlan = str(wiring["vlan"] or "")
    return {
        "uuid": nic.uuid,
        "mac": nic.mac,
        "model": model,
        "mode": wiring["mode"],
        "link": "" if wiring["mode"] == "routed" and wiring["link"] == "main" else wiring["link"],
        "vlan": vlan,
        "ips": _some(nic.ip),
        "queues": hypervisor["virtio_net_queues"] if is_virtio else 1,
        "vhost": is_virtio and hypervisor["vhost_net"],
    }


def _known(
    instance: Instance, name: str, hypervisor: Mapping[str, Any], known: Mapping[str, str]
) -> str:
    value = hypervisor[name]
    if value not in known:
        text = f"{name} is {value}, and only {', '.join(known)} are done here"
        raise InstanceError(instance.name, text)
    return str(known[value])


def _ignored(hypervisor: Mapping[str, Any], kind: str, done: Container[str]) -> Iterator[str]:
    usual = params.defaults(params.HYPERVISORS[kind])
    for name, value in hypervisor.items():
        if name not in done and value != usual.get(name):
            yield name


def _some(*values: str | None) -> list[str]:
    return [value for value in values if value]
