"""What a node needs to run an instance of the configuration: the rules of specs, which ``brine
instance define --from-config`` makes of them, on a configuration's values.

Values of single parameters are checked by :mod:`brine.config.params`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from brine.common.errors import UsageError
from brine.common.schema import shown
from brine.config import params
from brine.config.model import ConfigDisk, ConfigNic, Configuration, Instance
from brine.config.params import Mistake
from brine.config.schema import ip_fault, is_uuid, mac_fault, name_fault
from brine.vm.address import short_uuid
from brine.vm.connection import check_connection
from brine.vm.rules import (
    KeyFault,
    disk_faults,
    security_faults,
    topology_fault,
    vnc_listener,
    vnc_port_fault,
    xen_nic_faults,
)
from brine.vm.slots import MOST_XEN_DISKS, slots_fault
from brine.vm.values import (
    line_fault,
    listener_fault,
    new_name_fault,
    path_fault,
    tidy_path,
    vm_mac_fault,
)

RUN_HERE = ("kvm", "xen-pvm")
"""The hypervisors of a configuration whose instances Brine runs."""

_XEN = "xen-pvm"
_VOLUMES, _FILES = ("plain",), ("file", "sharedfile", "blockdev")
_PYGRUB = "pygrub"  # of whose guests GRUB itself finds the kernel, too
UNSUPPORTED = "unsupported"
"""The kind of a fault in an instance that Brine does not run, and Ganeti may."""

# Parameters in a configuration, by the keys of a spec.
_PARAMETERS = {
    "aio": "disk_aio",
    "read_only": "disk_type",
    "security_user": "security_domain",
}


def unsupported(configuration: Configuration, instance: Instance) -> str | None:
    """Why Brine runs no such instance, which may be right for Ganeti; None if it does."""
    kind = instance.hypervisor
    if kind not in RUN_HERE:
        return f"its hypervisor is {kind}, and only {' and '.join(RUN_HERE)} are run here"
    for uuid in instance.disks:
        disk = configuration.disks.get(uuid)
        if disk and disk.dev_type not in (*_VOLUMES, *_FILES):
            return f"disk {uuid} is of the kind {disk.dev_type}, which is not set up here"
    if kind == _XEN:
        hv = configuration.hv_params(instance)
        program = str(hv["bootloader_path"])
        if hv["use_bootloader"] and program.rpartition("/")[2] not in ("", _PYGRUB):
            return f"its bootloader is {program}, and only {_PYGRUB} has a counterpart here"
    return None


def disk_path(disk: ConfigDisk) -> str:
    """The path of a disk on its node; of a kind that :func:`unsupported` does not name."""
    if disk.dev_type in _VOLUMES:
        return f"/dev/{disk.logical_id[0]}/{disk.logical_id[1]}"
    return str(disk.logical_id[1])


def spec_link(mode: str, link: str) -> str:
    """The link of a NIC in a spec, which is empty for the main routing table."""
    return "" if (mode, link) == ("routed", "main") else link


class NodeRules:
    """Finds what keeps nodes from running the instances of a configuration.

    :ivar _users: instances by node and path, with the places of their disks, and whether they only
        read these.
    """

    def __init__(self, configuration: Configuration) -> None:
        self._config = configuration
        self._users: dict[tuple[str, str], list[tuple[Instance, str, bool]]] = {}
        self._sound: dict[tuple[str, str], bool] = {}

    def faults(
        self, instance: Instance, where: str, nics: Sequence[tuple[str, ConfigNic]]
    ) -> Iterator[Mistake]:
        """What is wrong with one more instance, beside its single parameters.

        :param where: its JSON pointer.
        :param nics: its NICs, each with its JSON pointer.
        """
        if instance.hypervisor not in params.HYPERVISORS:
            return  # which its rule tells
        if fault := unsupported(self._config, instance):
            yield Mistake(where, fault, UNSUPPORTED)
            return
        if not name_fault(instance.name) and (fault := new_name_fault(instance.name)):
            yield Mistake(f"{where}/name", fault, "name")
        if fault := _uuid_fault(instance.uuid):
            yield Mistake(f"{where}/uuid", fault, "value")
        known = self._config.disks
        disks = [known[one] for one in instance.disks if one in known]
        for index, disk in enumerate(disks):
            if fault := _uuid_fault(disk.uuid) or place_fault(disk):
                yield Mistake(f"{where}/disks/{index}", fault, "value")
        for place, nic in nics:
            yield from self._nic(instance, nic, place)
        yield from _twins("disk", [(f"{where}/disks/{i}", one) for i, one in enumerate(disks)])
        yield from _twins("NIC", nics)
        if self._is_sound(instance):
            hv, backend = self._config.hv_params(instance), self._config.be_params(instance)
            check = _domain_faults if instance.hypervisor == _XEN else _machine_faults
            yield from check(instance, hv, backend, disks, where)
            yield from self._shared(instance, hv, where)

    def _is_sound(self, instance: Instance) -> bool:
        """Whether all parameters of an instance are valid. Their own level names the faults."""
        cluster, hypervisor = self._config.cluster, instance.hypervisor
        component = params.HYPERVISORS[hypervisor]
        levels = (hypervisor, instance.os)
        if levels not in self._sound:
            of_system = cluster.os_hvp.get(instance.os, {}).get(hypervisor, {})
            self._sound[levels] = (
                _are_sound(params.BACKEND, cluster.beparams.get("default", {}))
                and _are_sound(component, cluster.hvparams.get(hypervisor, {}))
                and _are_sound(component, of_system)
            )
        return (
            self._sound[levels]
            and _are_sound(component, instance.hvparams)
            and _are_sound(params.BACKEND, instance.beparams)
        )

    def _nic(self, instance: Instance, nic: ConfigNic, where: str) -> Iterator[Mistake]:
        if fault := _uuid_fault(nic.uuid):
            yield Mistake(f"{where}/uuid", fault, "value")
        if nic.mac and not mac_fault(nic.mac) and (fault := vm_mac_fault(nic.mac)):
            yield Mistake(f"{where}/mac", fault, "mac")
        of_cluster = self._config.cluster.nicparams.get("default", {})
        if ip_fault(nic.ip) or not all(
            _are_sound(params.NIC, level) for level in (of_cluster, nic.nicparams)
        ):
            return
        wiring = self._config.nic_params(nic)
        mode, vlan = wiring["mode"], wiring["vlan"]
        link = spec_link(mode, wiring["link"])
        for key in ("vlan", "filter") if instance.hypervisor == _XEN else ():
            if wiring[key]:
                text = f"{key} means nothing to the hypervisor {_XEN}"
                yield Mistake(f"{where}/nicparams/{key}", text, "nic")
        if instance.hypervisor == _XEN:
            of_xen = xen_nic_faults(mode=mode, link=link)
            yield from _mistakes(f"{where}/nicparams", of_xen, kind="nic")
        try:
            ips, is_filtered = [nic.ip] if nic.ip else [], wiring["filter"]
            check_connection(mode, link, vlan, ips, is_filtered=is_filtered)
        except UsageError as error:
            # Ganeti has routed NICs without an address of their own, in a network.
            is_of_network = mode == "routed" and nic.network and not nic.ip
            yield Mistake(where, str(error), UNSUPPORTED if is_of_network else "nic")

    def _shared(self, instance: Instance, hv: Mapping[str, Any], where: str) -> Iterator[Mistake]:
        """The disks that another instance of the node, or the same one, has too."""
        for place, path, reads in self._uses_of(instance, hv, where):
            users = self._users.setdefault((instance.primary_node, tidy_path(path)), [])
            for other, its_place, only_reads in users:
                if other is instance:  # a spec has no disk twice, whatever is done with it
                    are_disks = "/disks/" in place and "/disks/" in its_place
                    is_wrong = are_disks or not (reads and only_reads)
                else:
                    states = {instance.admin_state, other.admin_state}
                    is_wrong = not (reads and only_reads) and states != {"offline"}
                if is_wrong:
                    text = f"{path} is also {its_place}, on one node"
                    yield Mistake(place, text, "duplicate-disk")
                    break
            users.append((instance, place, reads))

    def _uses_of(
        self, instance: Instance, hv: Mapping[str, Any], where: str
    ) -> Iterator[tuple[str, str, bool]]:
        """The place and path of each disk and medium, and whether the instance only reads it."""
        for index, uuid in enumerate(instance.disks):
            disk = self._config.disks.get(uuid)
            if disk and not place_fault(disk):
                yield f"{where}/disks/{index}", disk_path(disk), disk.mode == "ro"
        for name in ("cdrom_image_path", "cdrom2_image_path"):
            if instance.hypervisor != _XEN and hv[name]:
                yield f"{where}/hvparams/{name}", hv[name], True


def _are_sound(component: params.Component, values: Mapping[str, Any]) -> bool:
    return not any(fault.kind == "parameter" for fault in params.validate(component, values, ""))


def _uuid_fault(text: str) -> str | None:
    return None if is_uuid(text) else f"{shown(text)} is no UUID"


def place_fault(disk: ConfigDisk) -> str | None:
    """The fault in the identity of a disk, of which its path is made; None if there is none."""
    parts = disk.logical_id
    noun = "a volume group and a volume" if disk.dev_type in _VOLUMES else "a driver and a path"
    if len(parts) < 2 or not all(type(one) is str and one for one in parts[:2]):
        return f"its logical_id must name {noun}"
    if disk.dev_type in _VOLUMES and any("/" in one or one in (".", "..") for one in parts[:2]):
        return f"its logical_id must name {noun}, and has a path"
    path = disk_path(disk)
    if fault := path_fault(path) or line_fault(path):
        return f"the path in its logical_id {fault}"
    return None


def _twins(noun: str, devices: Sequence[tuple[str, ConfigNic | ConfigDisk]]) -> Iterator[Mistake]:
    """The devices, each with its JSON pointer, that would have the name of another in QEMU."""
    seen: set[str] = set()
    for where, device in devices:
        if (short := short_uuid(device.uuid)) in seen:
            text = f"begins as another {noun}'s UUID does, {short}"
            yield Mistake(f"{where}/uuid", text, "value")
        seen.add(short)


def _mistakes(where: str, faults: Iterable[KeyFault], kind: str = "parameter") -> Iterator[Mistake]:
    """The faults of a spec's keys, each at the parameter below *where* that the key is made of."""
    for key, text, _ in faults:
        yield Mistake(f"{where}/{_PARAMETERS.get(key, key)}", text, kind)


def _machine_faults(
    instance: Instance,
    hv: Mapping[str, Any],
    backend: Mapping[str, Any],
    disks: Sequence[ConfigDisk],
    where: str,
) -> Iterator[Mistake]:
    """What QEMU, or Brine, could not do."""
    place = f"{where}/hvparams"
    topology = [hv[f"cpu_{part}"] for part in ("sockets", "cores", "threads")]
    if fault := topology_fault(backend["vcpus"], *topology):
        yield Mistake(f"{where}/beparams/vcpus", fault)
    interface, cache = params.DISK_INTERFACES[hv["disk_type"]], hv["disk_cache"]
    faults = {
        fault
        for disk in disks
        for fault in disk_faults(
            interface=interface,
            cache="none" if cache == "default" else cache,
            aio=hv["disk_aio"],
            is_read_only=disk.mode == "ro",
        )
    }
    model = hv["security_model"]
    user = hv["security_domain"] if model == "user" else ""
    yield from _mistakes(place, [*sorted(faults), *security_faults(model, user)])
    listener = vnc_listener(hv["vnc_bind_address"], instance.name)
    if listener and (fault := listener_fault(listener)):
        yield Mistake(f"{place}/vnc_bind_address", f"{listener} {fault}", "value")
    has_port = listener and not listener.startswith("/")
    if has_port and (fault := vnc_port_fault(instance.network_port or 0)):
        yield Mistake(f"{where}/network_port", fault, "value")
    drives = sum(bool(hv[name]) for name in ("cdrom_image_path", "cdrom2_image_path"))
    by_interface = dict.fromkeys(params.DISK_INTERFACES.values(), 0)
    by_interface[interface] = len(disks)
    fault_of_slots = slots_fault(
        hv["machine_version"],
        nics=len(instance.nics),
        virtio=by_interface["virtio"],
        scsi=by_interface["scsi"],
        ide=by_interface["ide"] + drives,
    )
    if fault_of_slots:
        yield Mistake(where, fault_of_slots[0], "value")


def _domain_faults(
    _instance: Instance,
    hv: Mapping[str, Any],
    _backend: Mapping[str, Any],
    disks: Sequence[ConfigDisk],
    where: str,
) -> Iterator[Mistake]:
    """What Xen, or Brine, could not do."""
    if len(disks) > MOST_XEN_DISKS:
        text = f"has {len(disks)}, and a domain may have {MOST_XEN_DISKS}"
        yield Mistake(f"{where}/disks", text, "value")
    has_kernel = hv["kernel_path"] and not hv["use_bootloader"]
    if not disks and not has_kernel:
        yield Mistake(f"{where}/hvparams/kernel_path", "must be there, where no disk has one")
