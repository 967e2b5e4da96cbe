"""What this node can give to instances."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from typing import Any

from brine.common import __version__
from brine.common.errors import BrineError
from brine.common.own_node import own_name
from brine.hotplug.net.netlink import Netlink
from brine.hotplug.net.ovs import bridges, installed
from brine.instance.kvm.processor import (
    Processor,
    ProcessorError,
    known_processor_of,
)
from brine.instance.kvm.resources import check_node
from brine.instance.kvm.uefi import find_uefi
from brine.instance.usage import memory_of_node
from brine.instance.xen import xl
from brine.instance.xen.config import kernel_of
from brine.instance.xen.xl import XlError
from brine.storage.commands import volume_units
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
    memory_mib, available_mib = memory.total // _MIB, memory.available // _MIB
    try:
        if of_xen := xl.memory():
            memory_mib, available_mib = of_xen
    except XlError as error:
        faults.append(error)
    return NodeFacts(
        node=own_name(),
        version=__version__,
        cpu=cpu,
        cpu_fault=cpu_fault,
        memory_mib=memory_mib,
        memory_available_mib=available_mib,
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
    return {
        one.name: UnitFacts(free_mib=one.free // _MIB, allocatable=one.allocatable, why=one.why)
        for one in volume_units(faults)
    }


def _faults_of(spec: Spec) -> Iterator[str]:
    """Why an instance could not start here, beside all that the facts have."""
    if spec.is_xen():
        yield from _faults_of_domain(spec)
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


def _faults_of_domain(spec: Spec) -> Iterator[str]:
    if not xl.runs():
        yield "Xen does not run"
    for path in filter(None, (kernel_of(spec), spec.initrd, *spec.cdroms)):
        if not os.path.exists(path):
            yield f"{path}: there is no such file"


def _is_here(address: str) -> bool:
    """Whether a program can listen at an address."""
    family = socket.AF_INET6 if ip_address(address).version == 6 else socket.AF_INET
    with socket.socket(family) as tried:
        try:
            tried.bind((address, 0))
        except OSError:
            return False
    return True
