"""``brine node cpu`` and ``brine node facts``: what this node can give to instances."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from brine.common.cli import print_json, undo_when_told_to_end
from brine.common.errors import BrineError, printable, tell_error
from brine.config.schema import parse_json
from brine.instance.definition import content_of, naming
from brine.instance.kvm.processor import Processor, processor_of
from brine.instance.node_facts import NodeFacts, facts_of
from brine.vm.spec import Spec, known_part, parse


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
