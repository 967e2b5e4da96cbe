"""Specs from the cluster's configuration: this node's instances with all parameters.

In the tables, names on the left are Ganeti's. A parameter without a counterpart is reported.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Container, Mapping, Sequence
from typing import Any

from brine.common import outbox
from brine.common.errors import BrineError, UsageError, warn
from brine.common.own_node import note_node
from brine.config import params
from brine.config.effect import ignored_wishes
from brine.config.model import MOVED_TAG, ConfigNic, Configuration, Instance
from brine.config.nodes import find_node, find_this_node, is_this_host
from brine.config.privileges import privileges_of
from brine.config.runnable import disk_path, place_fault, spec_link, unsupported
from brine.config.store import ConfigStore, read_configuration
from brine.instance import store
from brine.instance.claim_changes import set_aside
from brine.instance.definition import (
    DefinitionResult,
    SpecInput,
    define_as_asked,
    tell_results,
)
from brine.instance.disks.adoption import adopt_disk, unit_of
from brine.instance.intent import ADMIN_STATE
from brine.instance.messages import log_to_journal
from brine.instance.registry import undefine_instance, without_state
from brine.instance.store import InstanceError, is_this_node
from brine.vm.claim import Claim
from brine.vm.rules import vnc_listener
from brine.vm.spec import Spec
from brine.vm.values import BOOT_DEVICES

_SAME = {
    "acpi": "acpi",
    "cpu_cores": "cores",
    "cpu_sockets": "sockets",
    "cpu_threads": "threads",
    "cpu_type": "cpu",
    "initrd_path": "initrd",
    "kernel_path": "kernel",
    "mem_path": "huge_pages",
    "serial_console": "serial_console",
    "use_guest_agent": "guest_agent",
    "vnc_bind_address": "vnc_bind",
    "vnc_password_file": "vnc_password_file",
}
"""Parameters that mean the same under another name."""

_BY_ITSELF = {
    "disk_cache": "none",
    "disk_discard": "unmap",
    "kvm_flag": "enabled",
    "machine_version": "pc",
}
"""Values that ask for what a spec has where the parameter has its default."""
_XEN = "xen-pvm"
_USUAL_WEIGHT = 256


_Parameters = Mapping[str, Any]
"""The hypervisor parameters of an instance."""


def define_all(arguments: argparse.Namespace) -> int:
    if arguments.file is not None:
        hint = "give a file, or -, or --from-config; --config FILE is a configuration's file"
        raise UsageError("several sources of specs are named", hint=hint)
    log_to_journal("brine")
    file = arguments.config
    configuration = read_configuration(file) if file else ConfigStore().read()
    node = _node_of(configuration, arguments)
    left_alone = frozenset(arguments.but)
    every = [one for one in configuration.instances.values() if one.name not in left_alone]
    ours = [one for one in every if one.primary_node == node]
    # The cluster does not know yet what was decided here on their admin_state.
    unheard = {one.instance for one in outbox.events() if one.kind == ADMIN_STATE}
    given = [
        _input_of(configuration, one, claim_of(configuration, one), keeps_state=one.uuid in unheard)
        for one in sorted(ours, key=lambda one: one.name)
    ]
    results = define_as_asked(given, arguments, is_declared=True)
    if not arguments.dry_run:
        _adopt_disks(results)
    others = [one for one in elsewhere(configuration, node) if one[0].name not in left_alone]
    if not arguments.dry_run:
        _set_aside(others)
    gone = removed(configuration, but={*left_alone, *(one.name for one in ours)})
    if not arguments.dry_run:
        gone = _undefined(gone)
    rows = [{"name": spec.name, "node": claim.node} for spec, claim in others]
    dry_run, as_json = arguments.dry_run, arguments.json
    status = tell_results(results, dry_run=dry_run, as_json=as_json, elsewhere=rows, removed=gone)
    if as_json:
        return status
    if not results:
        print("no instance is this node's")
    for name in gone:
        print(
            f"{'would be undefined' if dry_run else 'undefined'}: {name}, which the cluster lacks"
        )
    for spec, claim in others:
        name = spec.name
        warn(
            f"{name}: is defined here, and is {claim.node}'s in the cluster's configuration",
            hint=f"brine instance undefine {name}, unless it is to come back",
        )
    return status


def _set_aside(others: Sequence[tuple[Spec, Claim]]) -> None:
    """Have this node start no instance that is another node's by now, and was its own by a claim
    before. One that never had a claim starts still."""
    for spec, claim in others:
        if not spec.claim_serial:
            continue
        try:
            set_aside(spec.name, spec.uuid, claim)
        except BrineError as error:
            warn(f"{spec.name}: can't be set aside: {error}", hint=error.hint)


def _undefined(names: Sequence[str]) -> list[str]:
    """Undefine instances; returns the names of those that are undefined."""
    done = []
    for name in names:
        try:
            undefine_instance(name)
        except BrineError as error:
            warn(
                f"{name}: the cluster lacks it, and it can't be undefined: {error}", hint=error.hint
            )
        else:
            done.append(name)
    return done


def _adopt_disks(results: Sequence[DefinitionResult]) -> None:
    """Adopt the cluster's disks of instances as they are. What can't be adopted is used all the
    same; one whose name a disk has that was added by hand gets no name."""
    for spec in (one.spec() for one in results if one.defined):
        names = {one.name for one in spec.disks}
        for number, disk in enumerate(spec.disks):
            if disk.unit or disk.by_hand or not unit_of(disk.path):
                continue
            try:
                called = f"disk{number}"
                adopt_disk(spec.name, disk.uuid, called="" if called in names else called)
            except BrineError as error:
                warn(f"{spec.name}: disk {disk.path} is not adopted: {error}", hint=error.hint)


def _node_of(configuration: Configuration, arguments: argparse.Namespace) -> str:
    """The UUID of the node that the options name, or that this host is; this host's is noted."""
    if arguments.node:
        node = find_node(configuration, arguments.node)
        uuid, name, is_here = node.uuid, node.name, is_this_host(configuration, node)
    else:
        found = find_this_node(configuration)
        found.warn_of_names()
        uuid, name, is_here = found.uuid, found.name, True
    if is_here and not arguments.dry_run:
        with contextlib.suppress(OSError):  # the next one may
            note_node(uuid, name)
    return uuid


def claim_of(configuration: Configuration, instance: Instance) -> Claim:
    """The node that may run an instance, by the configuration."""
    node = configuration.nodes.get(instance.primary_node)
    return Claim(node.name if node else instance.primary_node, instance.serial_no)


def _input_of(
    configuration: Configuration, instance: Instance, claim: Claim, *, keeps_state: bool
) -> SpecInput:
    """The spec of an instance.

    :param claim: of the node that it is defined on; one that has no name of this host's is left
        out, as the admin has named that node.
    :param keeps_state: whether its admin_state stays, unless it is to be offline.
    """
    name = instance.name
    try:
        data, ignored = spec_of(configuration, instance)
        _keep_places(data)
        if is_this_node(claim.node):
            data |= {"node": claim.node, "claim_serial": claim.serial}
    except BrineError as error:
        return SpecInput(name, name, fault=error)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        # Loading a configuration checks no parameters.
        text = f"the configuration has something of it that can't be: {error}"
        fault = InstanceError(name, text, hint="brine config verify tells where")
        return SpecInput(name, name, fault=fault)
    if keeps_state:
        data = without_state(data)
    return SpecInput(name, name, data, ignored=ignored)


def _keep_places(data: dict[str, Any]) -> None:
    """Have disks that were adopted stay where they are: they may have been moved since."""
    before = store.load_sound(data["name"])
    adopted = {one.uuid for one in before.disks if one.unit} if before else set()
    for row in data["disks"]:
        if row["uuid"] in adopted:
            del row["path"], row["format"]


def elsewhere(configuration: Configuration, node: str) -> list[tuple[Spec, Claim]]:
    """Instances that are defined here and belong to another node now, with its claim.

    They are found by their UUIDs; instances that are not in the configuration are left alone.

    :param node: the UUID of this node.
    """
    found = []
    for spec in store.load_all():
        if isinstance(spec, InstanceError):
            continue  # which others tell
        instance = configuration.instances.get(spec.uuid)
        if instance and instance.primary_node != node:
            found.append((spec, claim_of(configuration, instance)))
    return found


def removed(configuration: Configuration, *, but: Container[str] = ()) -> list[str]:
    """The names of instances that are defined here by a configuration of the cluster, which has
    them no more, and that this node is not to start: they are offline, or another node's since.

    Another instance that the cluster has removed stays, as it may run, or be wanted. So does one
    that was not the cluster's.

    :param but: names of the cluster's instances of this node.
    """
    return [
        spec.name
        for spec in store.load_all()
        if not isinstance(spec, InstanceError)
        and spec.claim_serial
        and spec.uuid not in configuration.instances
        and spec.name not in but
        and (spec.admin_state == "offline" or not is_this_node(spec.node))
    ]


def spec_of(configuration: Configuration, instance: Instance) -> tuple[dict[str, Any], list[str]]:
    """The spec of an instance of the configuration, as people write it, and the parameters that are
    set and have no effect.

    :raises InstanceError: if it can't run here.
    """
    kind = instance.hypervisor
    if fault := unsupported(configuration, instance):
        raise InstanceError(instance.name, fault)
    hv, usual = configuration.hv_params(instance), params.defaults(params.HYPERVISORS[kind])
    data = _data_of(configuration, instance, hv)
    ignored = []
    for name in hv:
        other = {**usual, **hv, name: usual.get(name)}
        is_set = hv[name] != other[name] and not _repeats(name, hv)
        if is_set and not _differs(configuration, instance, other, data):
            ignored.append(name)
    ignored += ignored_wishes(configuration, instance)
    return {**data, "ignored": ignored}, ignored


def _repeats(name: str, hv: _Parameters) -> bool:
    """Whether a parameter may say the same as another key of the configuration, or as Brine does by
    itself: a domain without a kernel has the bootloader that is supported."""
    if name in ("use_bootloader", "bootloader_path"):
        return bool(hv["use_bootloader"])
    return name == "user_shutdown" or (name in _BY_ITSELF and hv[name] == _BY_ITSELF[name])


def _differs(
    configuration: Configuration, instance: Instance, hv: _Parameters, data: dict[str, Any]
) -> bool:
    """Whether other hypervisor parameters would make another spec than *data*."""
    try:
        return _data_of(configuration, instance, hv) != data
    except BrineError:
        return True


def _data_of(configuration: Configuration, instance: Instance, hv: _Parameters) -> dict[str, Any]:
    """The spec of an instance that has these hypervisor parameters."""
    backend = configuration.be_params(instance)
    data: dict[str, Any] = {
        "name": instance.name,
        "uuid": instance.uuid,
        "admin_state": instance.admin_state,
        "admin_state_source": instance.admin_state_source,
        # What a move has noted is the configuration's: the node that it came to would only learn
        # of it by its next definition, which changes nothing else.
        "tags": [one for one in instance.tags if not one.startswith(MOVED_TAG)],
        "memory_mib": backend["maxmem"],
        "vcpus": backend["vcpus"],
        "reboot_behavior": hv["reboot_behavior"],
        "user_shutdown": _user_shutdown(configuration, instance, hv),
        "disks": [_disk(configuration, instance, uuid) for uuid in instance.disks],
        "nics": [_nic(configuration, nic) for nic in instance.nics],
    }
    if instance.hypervisor == _XEN:
        return data | _domain(instance, hv)
    data |= _machine(instance, hv)
    _add_devices(instance, hv, data)
    return data


def _user_shutdown(configuration: Configuration, instance: Instance, hv: _Parameters) -> str:
    of_cluster = configuration.cluster.hvparams.get(instance.hypervisor, {})
    said = "user_shutdown" in instance.hvparams or "user_shutdown" in of_cluster
    stays = hv["user_shutdown"]
    if instance.hypervisor != _XEN:
        # For Xen the parameter is Brine's own, and needs no conversion.
        stays = stays or configuration.cluster.enabled_user_shutdown
    return "restart" if said and not stays else "stop"


def _disk(configuration: Configuration, instance: Instance, uuid: str) -> dict[str, Any]:
    disk = configuration.disks.get(uuid)
    if disk is None:
        raise InstanceError(instance.name, f"its disk {uuid} is not in the configuration")
    if fault := place_fault(disk):
        raise InstanceError(instance.name, f"disk {uuid}: {fault}")
    path, is_read_only = disk_path(disk), disk.mode == "ro"
    return {"uuid": uuid, "path": path, "format": "raw", "read_only": is_read_only}


def _nic(configuration: Configuration, nic: ConfigNic) -> dict[str, Any]:
    wiring = configuration.nic_params(nic)
    mode = wiring["mode"]
    return {
        "uuid": nic.uuid,
        "mac": nic.mac,
        "mode": mode,
        "link": spec_link(mode, wiring["link"]),
        "vlan": str(wiring["vlan"] or ""),
        "ips": _some(nic.ip),
        "filter": wiring["filter"],
    }


def _domain(instance: Instance, hv: _Parameters) -> dict[str, Any]:
    """The keys of a spec that only domains have."""
    weight, kernel, root = hv["cpu_weight"], hv["kernel_path"], hv["root_path"]
    data = {
        "hypervisor": _XEN,
        "cpu_limit_percent": hv["cpu_cap"],
        "cpu_weight": 0 if weight == _USUAL_WEIGHT else weight,
    }
    if hv["use_bootloader"] or not kernel:
        return data
    append = " ".join(_some(root and f"root={root}", hv["kernel_args"]))
    return {**data, "kernel": kernel, "initrd": hv["initrd_path"], "append": append}


def _machine(instance: Instance, hv: _Parameters) -> dict[str, Any]:
    """The keys of a spec that only QEMU has."""
    data: dict[str, Any] = {ours: hv[theirs] for theirs, ours in _SAME.items()}
    root, words, first = hv["root_path"], hv["kernel_args"], hv["boot_order"]
    data |= privileges_of(hv) | {
        "machine": hv["machine_version"] or "pc",
        "accel": "tcg" if hv["kvm_flag"] == "disabled" else "kvm",
        "rtc": "localtime" if hv["use_localtime"] else "utc",
        "usb_tablet": hv["usb_mouse"] == "tablet",
        "cdroms": _some(hv["cdrom_image_path"], hv["cdrom2_image_path"]),
        "boot_order": [first, *(device for device in BOOT_DEVICES if device != first)],
    }
    if data["kernel"]:
        console = f"console=ttyS0,{hv['serial_speed']}" if data["serial_console"] else ""
        data["append"] = " ".join(_some(root and f"root={root}", words, console))
    else:
        data["initrd"] = ""  # which it would have no use for
    bind = data["vnc_bind"]
    data["vnc_bind"] = vnc_listener(bind, instance.name)
    if not bind:
        data["vnc_password_file"] = ""
    elif not bind.startswith("/") and instance.network_port:
        data["vnc_port"] = instance.network_port
    return data


def _add_devices(instance: Instance, hv: _Parameters, data: dict[str, Any]) -> None:
    """Add what QEMU gives its disks and NICs."""
    interface, model, cache = hv["disk_type"], hv["nic_type"], hv["disk_cache"]
    aio, discard = hv["disk_aio"], hv["disk_discard"] != "ignore"
    queues, vhost = hv["virtio_net_queues"], hv["vhost_net"]
    for disk in data["disks"]:
        disk["interface"] = _known(instance, "disk_type", interface, params.DISK_INTERFACES)
        disk["cache"] = "none" if cache == "default" else cache
        disk |= {"aio": aio, "discard": discard}
    for nic in data["nics"]:
        nic["model"] = _known(instance, "nic_type", model, params.NIC_MODELS)
        if nic["model"] == "virtio":
            nic |= {"queues": queues, "vhost": vhost}


def _known(instance: Instance, name: str, value: str, known: Mapping[str, str]) -> str:
    if value not in known:
        text = f"{name} is {value}, and only {', '.join(known)} are done here"
        raise InstanceError(instance.name, text)
    return known[value]


def _some(*values: str | None) -> list[str]:
    return [value for value in values if value]
