"""The traces of plugging in a QEMU and on its machine, to compare before and after."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from lab.guest import Guest
from lab.machine import Machine
from lab.qmp import Qmp

_RECORDS = ("/run/brine/taps", "/run/brine/operations")


@dataclass(frozen=True)
class Traces:
    """All that a plug makes.

    :param devices: ids of QEMU's devices.
    :param netdevs: ids of what QEMU has NICs connected to.
    :param block_nodes: names of QEMU's block nodes.
    :param fdsets: what is written on QEMU's sets of descriptors.
    :param descriptors: of QEMU's process, by what they are of, each with how many there are.
    :param taps: interfaces of the machine.
    :param records: files.
    """

    devices: frozenset[str]
    netdevs: frozenset[str]
    block_nodes: frozenset[str]
    fdsets: tuple[str, ...]
    descriptors: frozenset[tuple[str, int]]
    taps: frozenset[str]
    records: frozenset[str]


def differences(found: Any, expected: Any) -> dict[str, tuple[Any, Any]]:
    """The differences of two values of a dataclass: by field, the parts that only one has.

    Of sets it is the members, and of values that are dataclasses themselves, their fields.
    """
    unlike: dict[str, tuple[Any, Any]] = {}
    for each in fields(found):
        one, other = getattr(found, each.name), getattr(expected, each.name)
        if one == other:
            continue
        if is_dataclass(one):
            unlike.update(differences(one, other))
        elif isinstance(one, frozenset):
            unlike[each.name] = (one - other, other - one)
        else:
            unlike[each.name] = (one, other)
    return unlike


def traces(machine: Machine, guest: Guest, *, socket: Path | None = None) -> Traces:
    """The present traces. `socket` is the guest's QMP socket, if not the usual one."""
    with Qmp(socket or guest.qmp_socket) as qmp:
        # What an earlier connection took along is closed once this one is answered.
        listed = qmp.command("qom-list", path="/machine/peripheral")
        network = qmp.command("human-monitor-command", **{"command-line": "info network"})
        nodes = qmp.command("query-named-block-nodes")
        fdsets = qmp.command("query-fdsets")
        descriptors = Counter(_descriptors(guest.pid))
    return Traces(
        devices=frozenset(item["name"] for item in listed if item["type"].startswith("child<")),
        netdevs=frozenset(re.findall(r"(\S+): index=\d+,type=tap", network)),
        block_nodes=frozenset(node["node-name"] for node in nodes),
        fdsets=tuple(each.get("opaque", "") for fdset in fdsets for each in fdset["fds"]),
        descriptors=frozenset(descriptors.items()),
        taps=frozenset(taps(machine)),
        records=frozenset(_records(machine)),
    )


def taps(machine: Machine) -> list[str]:
    """The names of the machine's taps."""
    shown = machine.run(["ip", "-details", "-json", "link", "show"]).stdout
    kinds = {
        link["ifname"]: link.get("linkinfo", {}).get("info_kind") for link in json.loads(shown)
    }
    return sorted(name for name, kind in kinds.items() if kind == "tun")


def descriptor_links(pid: int) -> list[str]:
    """The file of each descriptor of a process, as the kernel names it."""
    links = []
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed since it was listed
            links.append(str(file.readlink()))
    return links


def _descriptors(pid: int) -> list[str]:
    """The file of each descriptor of a process, without the numbers of sockets and the like."""
    return [re.sub(r":\[\d+\]", "", link) for link in descriptor_links(pid)]


def _records(machine: Machine) -> list[str]:
    folders = [machine.path(folder) for folder in _RECORDS]
    return [str(file.relative_to(machine.root)) for each in folders for file in each.glob("*")]
