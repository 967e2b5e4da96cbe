"""``brine node cpu`` and ``brine node facts``: what this node can give to instances."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from typing import Any

from brine.common import __version__
from brine.common.cli import print_json, undo_when_told_to_end
from brine.common.errors import BrineError, printable, tell_error
from brine.common.own_node import noted_node
from brine.config.schema import parse_json
from brine.hotplug.net.netlink import Netlink
from brine.hotplug.net.ovs import bridges, installed
from brine.instance.definition import content_of, naming
from brine.instance.kvm.processor import (
    Processor,
    ProcessorError,
    known_processor_of,
    processor_of,
)
from brine.instance.kvm.resources import check_node
from brine.instance.kvm.uefi import find_uefi
from brine.instance.usage import memory_of_node
from brine.storage.commands import VOLUME_TYPES
from brine.vm.spec import UEFI, Spec, known_part, parse

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFacts:
    """A storage unit that volumes can be in."""

    free_mib: int
    allocatable: bool = True
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What it takes of a node to know what could run there: ``brine node facts --json``.

    :param cpu: None where QEMU can't be asked, for the reason *cpu_fault*.
    :param links: the bridges, by name: ``bridge``, or ``openvswitch``.
    :param units: by name; of folders their paths.
    :param unfit: why the instance that the node was asked about can't start there.
    """

    node: str
    version: str
    cpu: Processor | None = None
    cpu_fault: str = ""
    memory_mib: int
    memory_available_mib: int
    huge_pages_free_mib: int = 0
    links: dict[str, str]
    units: dict[str, UnitFacts]
    unfit: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """It as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> NodeFacts:
        """The inverse, of this or another version.

        :raises SchemaError: what is wrong.
        """
        known = known_part(cls, data)
        if isinstance(known, dict) and isinstance(known.get("units"), dict):
            known["units"] = {
                name: known_part(UnitFacts, one) for name, one in known["units"].items()
            }
        return parse(cls, known)


def print_cpu(arguments: argparse.Namespace) -> int:
    """``brine node cpu``."""
    undo_when_told_to_end()
    found = processor_of(arguments.qemu)
    if arguments.json:
        print_json(found.to_json())
    else:
        print("\n".join(_cpu_lines(found)))
    return 0


def print_facts(arguments: argparse.Namespace) -> int:
    """``brine node facts``: 1 if something is not known; it is then left out."""
    undo_when_told_to_end()
    spec = _spec_in(arguments.spec) if arguments.spec else None
    faults: list[BrineError] = []
    found = facts_of(spec.qemu if spec else arguments.qemu, spec, faults)
    for fault in faults:
        tell_error(fault)
    if arguments.json:
        print_json(found.to_json())
    else:
        print("\n".join(_facts_lines(found)))
    return 1 if faults else 0


def facts_of(qemu: str, spec: Spec | None, faults: list[BrineError]) -> NodeFacts:
    """The facts of this node.

    :param spec: an instance that may move here; None asks about none.
    :param faults: gains the reasons why something is not known.
    """
    cpu, cpu_fault = None, ""
    if not (spec and spec.is_xen()):
        try:
            cpu = known_processor_of(qemu)
        except ProcessorError as error:
            cpu_fault = str(error)
    memory = memory_of_node()
    noted = noted_node()
    return NodeFacts(
        node=noted.name if noted else os.uname().nodename,
        version=__version__,
        cpu=cpu,
        cpu_fault=cpu_fault,
        memory_mib=memory.total // _MIB,
        memory_available_mib=memory.available // _MIB,
        huge_pages_free_mib=memory.huge_pages_free // _MIB,
        links=_links(faults),
        units=_units(faults),
        unfit=tuple(_faults_of(spec)) if spec else (),
    )


def _links(faults: list[BrineError]) -> dict[str, str]:
    found = {}
    try:
        with Netlink() as netlink:
            found = {one.name: one.kind for one in netlink.links() if one.kind == "bridge"}
        if installed():
            found |= dict.fromkeys(bridges(), "openvswitch")
    except BrineError as error:
        faults.append(error)
    return found


def _units(faults: list[BrineError]) -> dict[str, UnitFacts]:
    found = {}
    for kind in VOLUME_TYPES:
        try:
            for unit in kind.list():
                found[unit.name] = UnitFacts(
                    free_mib=unit.free // _MIB, allocatable=unit.allocatable, why=unit.why
                )
        except BrineError as error:
            faults.append(error)
    return found


def _faults_of(spec: Spec) -> Iterator[str]:
    """Why an instance could not start here, beside all that the facts have."""
    if spec.is_xen():
        return
    try:
        check_node(spec)
        if spec.firmware == UEFI:
            find_uefi(spec)
    except BrineError as error:
        yield str(error).removeprefix(f"{spec.name}: ")
    for path in filter(None, spec.cdroms):
        if not os.path.exists(path):
            yield f"{path}: there is no such image"
    address = spec.vnc_bind
    if address and not address.startswith("/") and not _is_here(address):
        yield f"VNC listens at {address}, which is not there"


def _is_here(address: str) -> bool:
    """Whether a program can listen at an address."""
    family = socket.AF_INET6 if ip_address(address).version == 6 else socket.AF_INET
    with socket.socket(family) as tried:
        try:
            tried.bind((address, 0))
        except OSError:
            return False
    return True


def _spec_in(file: str) -> Spec:
    """The spec of an instance that may be another node's."""
    with naming(file, BrineError):
        return parse(Spec, known_part(Spec, parse_json(content_of(file), unique_keys=True)))


def _cpu_lines(found: Processor) -> Iterator[str]:
    numbers = f"family {found.family}, model {found.model}, stepping {found.stepping}"
    of_kernel = [found.model_name or found.vendor, found.vendor, numbers]
    of_kernel += [f"microcode {found.microcode}"] if found.microcode else []
    how = "with KVM" if found.accel == "kvm" else "which emulates the processor"
    whole = [name for name, one in found.models.items() if one.flags and not one.missing]
    yield f"Processor:  {printable(', '.join(of_kernel))}"
    yield f"QEMU:       {found.qemu_version}, {how} ({printable(found.qemu)})"
    yield f"Models:     {', '.join(whole) or 'none that it has as a whole'}"
    yield f"Flags:      {', '.join(found.flags)}"


def _facts_lines(found: NodeFacts) -> Iterator[str]:
    yield f"Node:       {printable(found.node)}, Brine {found.version}"
    if found.cpu:
        yield from _cpu_lines(found.cpu)
    elif found.cpu_fault:
        yield f"QEMU:       {found.cpu_fault}"
    yield f"Memory:     {found.memory_available_mib} of {found.memory_mib} MiB available"
    yield f"Bridges:    {', '.join(map(printable, sorted(found.links))) or 'none'}"
    for name, unit in sorted(found.units.items()):
        state = f"{unit.free_mib} MiB free" if unit.allocatable else f"no volumes: {unit.why}"
        yield f"Unit:       {printable(f'{name}, {state}')}"
    for fault in found.unfit:
        yield f"Unfit:      {printable(fault)}"
