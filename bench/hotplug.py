"""Plugging NICs and disks, beside libvirt's commands and beside the bare QMP round trips."""

import argparse
import contextlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path

from bench.harness import Row, Table, measure_in_node, node_parser, report, rounds_in_node
from bench.libvirt_node import GUEST, LibvirtNode, domain_xml, libvirt_node
from lab.guest import READY
from lab.progress import step
from lab.waiting import wait_for

LIBRARY_LIMIT = 1.3
COMMAND_LIMIT = 2.0
START_LIMIT_MS = 100

DOMAIN = "bench"
# Of the guest that libvirt starts: a monitor besides libvirt's own.
QMP = f"/run/bench/{DOMAIN}.qmp"

# What is measured alone.
USUAL = "import argparse, json, asyncio"
TAP_BARE = "the system calls alone"
TAP_IP = "ip tuntap add; ip link set master ... up"
TAP_LIBRARY = "library: open_tap() and wire()"
WITHOUT_NETLINK = (
    "brine --help",
    "brine disk --help",
    "brine nic --help",
    "brine tap --help",
    "brine disk list --qmp",
    "brine nic list --qmp",
)

_OURS = ("brine-common", "brine-hotplug")
_XML = "/srv/domain.xml"
_LOG = "/run/bench/log"
_BOOT_TIMEOUT_S = 60.0
# Where the kernel shares the processors out by group (sched(7)), these are as far ahead of the
# machine's other work as what measures; see machine.lead_own_group().
_START = f"""
install --directory --owner=libvirt-qemu --group=libvirt-qemu {Path(QMP).parent}
virsh --quiet create {_XML}
for process in $(pidof libvirtd virtlogd qemu-system-x86_64); do
    echo -20 >/proc/$process/autogroup
done 2>/dev/null || :
"""


class Device(StrEnum):
    """What is plugged in."""

    DISK = "disk"
    NIC = "nic"


class Way(StrEnum):
    """How it is plugged in."""

    LIBRARY = "library"
    SAME = "same round trips"
    FEWEST = "fewest round trips"
    SAME_AND_TAP = "same round trips and a bare tap"
    COMMAND = "brine"
    VIRSH = "virsh"


@dataclass(frozen=True)
class Plan:
    """What to measure, how much."""

    rounds: int
    settle_s: float = 0.3  # in which a guest is left alone after a device was plugged in or out


@dataclass(frozen=True)
class Pair:
    """A device plugged in and taken out again, in seconds."""

    add_s: float
    remove_s: float
    guest_s: float | None = None  # of *remove_s*: until the guest let go, where that can be seen

    def both_s(self) -> float:
        """The whole."""
        return self.add_s + self.remove_s

    def without_guest_s(self) -> float:
        """The whole, less the guest's own."""
        return self.both_s() - (self.guest_s or 0.0)


@dataclass
class Results:
    """All samples, in the order of the rounds; pairs, and how many QMP commands they are, by
    :func:`series`, and single times by what was run."""

    pairs: dict[str, list[Pair]] = field(default_factory=dict)
    singles: dict[str, list[float]] = field(default_factory=dict)
    orders: dict[str, int] = field(default_factory=dict)


def series(device: Device, way: Way) -> str:
    """The name of what was measured."""
    return f"{device}: {way}"


def tables(results: Results) -> Iterator[Table]:
    """All that was measured."""
    for device in Device:
        yield Table.of_times(device, [*_in_process(results, device), *_commands(results, device)])
    yield Table.of_times("commands that need no netlink", _starts(results))
    yield Table.of_times("making a tap, on a bridge and up", _taps(results))


def _in_process(results: Results, device: Device) -> Iterator[Row]:
    """The library beside the floor."""
    row = partial(_of_pairs, results, device)
    count = {way: results.orders[series(device, way)] for way in (Way.FEWEST, Way.SAME)}
    title = f"the {count[Way.FEWEST]} QMP commands that change something"
    yield row(title, Way.FEWEST, Pair.both_s)
    floor = row(f"floor: all {count[Way.SAME]} QMP commands", Way.SAME, Pair.both_s)
    yield floor
    library = row("library", Way.LIBRARY, Pair.both_s)
    yield library.beside(floor, "the floor").at_most(LIBRARY_LIMIT)
    library = row("library, without the guest's own time", Way.LIBRARY, Pair.without_guest_s)
    floors = {"floor": Way.SAME}
    if device is Device.NIC:
        floors["floor and a bare tap"] = Way.SAME_AND_TAP
    for name, way in floors.items():
        floor = row(f"{name}, without the guest's own time", way, Pair.without_guest_s)
        yield floor
        yield library.beside(floor, "the floor")


def _commands(results: Results, device: Device) -> Iterator[Row]:
    """Whole commands beside libvirt's."""
    row = partial(_of_pairs, results, device)
    virsh = row("virsh attach-device + detach-device", Way.VIRSH, Pair.both_s)
    yield virsh
    ours = row(f"brine {device} add + remove", Way.COMMAND, Pair.both_s)
    yield ours.beside(virsh, "virsh").at_most(COMMAND_LIMIT)
    guest_s = _guest_s(results, device)
    alone = virsh.less(f"  virsh, less the guest's own {guest_s * 1e3:.0f} ms", guest_s)
    yield alone
    yield ours.less(f"  brine {device}, less the same", guest_s).beside(alone, "virsh")


def _of_pairs(
    results: Results, device: Device, title: str, way: Way, value: Callable[[Pair], float]
) -> Row:
    return Row.of_times(title, [value(pair) for pair in results.pairs[series(device, way)]])


def _guest_s(results: Results, device: Device) -> float:
    """What the guest usually takes to let go, where that can be seen."""
    pairs = [pair for way in Way for pair in results.pairs.get(series(device, way), ())]
    return statistics.median(pair.guest_s for pair in pairs if pair.guest_s is not None)


def _starts(results: Results) -> Iterator[Row]:
    usual = Row.of_times(f"python3 -c '{USUAL}'", results.singles[USUAL])
    yield usual
    for name in WITHOUT_NETLINK:
        row = Row.of_times(name, results.singles[name])
        yield row.beside(usual, "those imports").within(START_LIMIT_MS)


def _taps(results: Results) -> Iterator[Row]:
    ip = Row.of_times(TAP_IP, results.singles[TAP_IP])
    yield Row.of_times(TAP_BARE, results.singles[TAP_BARE])
    yield ip
    yield Row.of_times(TAP_LIBRARY, results.singles[TAP_LIBRARY]).beside(ip, "ip")


def run(options: argparse.Namespace) -> bool:
    """Measure and print."""
    plan = Plan(rounds_in_node(options))
    with _hypervisor() as found:
        results = measure_in_node(found.node, "hotplug_node", plan)
    heads = [f"{found.versions}, emulated guest", f"{plan.rounds} rounds"]
    report(heads, list(tables(results)), options.json, plan=plan, results=results)
    return True


@contextlib.contextmanager
def _hypervisor() -> Iterator[LibvirtNode]:
    """The node with a guest of libvirt's, which is ready; gone when the block ends."""
    serial = f"""<serial type='unix'>
    <source mode='bind' path='/run/bench/serial'/>
    <log file='{_LOG}'/>
  </serial>"""
    with libvirt_node(_OURS) as found:
        node = found.node
        with step("starting a guest"):
            node.write(_XML, domain_xml(DOMAIN, serial, guest=GUEST, qmp=QMP))
            node.shell(_START)
            log = node.path(_LOG)
            wait_for(
                "the guest to be ready",
                lambda: log.exists() and READY in log.read_text(errors="replace"),
                timeout_s=_BOOT_TIMEOUT_S,
            )
        yield found


def parser() -> argparse.ArgumentParser:
    """The command line."""
    description = "Measure brine nic and brine disk beside libvirt and the bare QMP commands."
    return node_parser("hotplug", description)
