"""Plugging NICs and disks, beside libvirt's commands and beside the bare QMP round trips."""

import contextlib
import fcntl
import json
import os
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from bench import machine
from bench.harness import PYTHON, Plan, Report, Table, TableRow, in_turns, timed, timing
from bench.libvirt import (
    BRIDGE,
    IMAGES,
    SOCKETS,
    VERSIONS_OF,
    disk_xml,
    domain_xml,
    make_image,
    nic_xml,
    prepare,
)
from brine.common.qmp.client import QmpClient
from brine.common.qmp.wire import QmpCommandError, QmpEvent
from brine.hotplug.net.tap import open_tap
from brine.hotplug.net.wiring import unwire, wire
from brine.hotplug.plug_disk import plug_disk_in
from brine.hotplug.plug_nic import plug_nic_in
from brine.hotplug.session import remove_device, working_on
from brine.vm.address import DeviceKind
from brine.vm.disk import Disk
from brine.vm.values import Mode
from brine.vm.vif import Vif
from lab.errors import LabError
from lab.guest import READY
from lab.progress import step
from lab.waiting import wait_for

LIBRARY_LIMIT = 1.3
COMMAND_LIMITS = {DeviceKind.NIC: 1.25, DeviceKind.DISK: 1.4}
"""Commands, beside libvirt's."""
START_LIMIT_MS = 100

SETTLE_S = 0.3
"""A guest is left alone so long after a device was plugged in or out: until it has found a device,
it does not hear that it is to let go of it."""

DOMAIN = "bench"
QMP = SOCKETS / f"{DOMAIN}.qmp"
"""Of the guest that libvirt starts: a monitor besides libvirt's own."""

# ---- a bare tap: tuntap.rst, netdevice(7) and linux/sockios.h

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x2, 0x1000, 0x4000
_IFF_UP = 0x1
_SIOCSIFFLAGS, _SIOCBRADDIF = 0x8914, 0x89A2


def open_bare_tap(name: str) -> int:
    """Make a tap; it ends when the descriptor is closed."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    return descriptor


def connect_tap(name: str, bridge: str) -> None:
    """Make an interface a bridge's port, and put it up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as kernel:
        port = struct.pack("16si20x", bridge.encode(), socket.if_nametoindex(name))
        fcntl.ioctl(kernel, _SIOCBRADDIF, port)
        fcntl.ioctl(kernel, _SIOCSIFFLAGS, struct.pack("16sH22x", name.encode(), _IFF_UP))


# ---- the floor: a QMP client that sends, reads, and does nothing else

DEVICE_DELETED = "DEVICE_DELETED"
NO_ANSWER_S = 60.0
_ASK_AGAIN_S = 2.0


@dataclass
class PlayedCommand:
    """A command."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    descriptors: int = 0  # that go with it
    is_refused: bool = False  # QEMU may say no, as it does of something that is not there


@dataclass(frozen=True)
class AwaitedDeletion:
    """The event that a device is gone is waited for here."""

    device: str


Step = PlayedCommand | AwaitedDeletion


class Monitor:
    """A connection to a QMP socket, past its greeting."""

    def __init__(self, path: Path) -> None:
        self._gone: set[str] = set()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(NO_ANSWER_S)
        self._socket.connect(str(path))
        self._buffer = b""
        self._receive()

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def execute(self, order: PlayedCommand, descriptors: Sequence[int] = ()) -> None:
        """Give a command, and read on until its answer."""
        line = json.dumps({"execute": order.name, "arguments": order.arguments}).encode() + b"\n"
        if descriptors:
            line = line[socket.send_fds(self._socket, [line], list(descriptors)) :]
        self._socket.sendall(line)
        while "event" in (message := self._receive()):
            pass
        if "error" in message and not order.is_refused:
            hint = "the bench plays back what the library asked for before"
            raise LabError(f"QEMU refused {order.name}: {message['error']['desc']}", hint=hint)

    def wait_gone(self, device: str) -> None:
        """Read on until the event that a device is gone. As the library does, ask again: a guest
        may have been too busy to hear of it."""
        deadline = time.perf_counter() + NO_ANSWER_S
        while device not in self._gone:
            if time.perf_counter() > deadline:
                raise LabError(f"the guest keeps {device}", hint="is the machine busy? try again")
            self._socket.settimeout(_ASK_AGAIN_S)
            try:
                self._receive()
            except TimeoutError:
                self._socket.settimeout(NO_ANSWER_S)
                # Refused while the guest is in the middle of it.
                self.execute(PlayedCommand("device_del", {"id": device}, is_refused=True))
        self._socket.settimeout(NO_ANSWER_S)

    def _receive(self) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            data = self._socket.recv(64 * 1024)
            if not data:
                raise LabError("QEMU closed the monitor", hint="see libvirt's log of the guest")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        if message.get("event") == DEVICE_DELETED:
            self._gone.add(message["data"].get("device", ""))
        return message


def play(steps: Sequence[Step], descriptors: Sequence[int] = ()) -> tuple[float, float | None]:
    """Connect, give these commands, and disconnect; the descriptors go with them in turn.

    Returns how many seconds that took, and of these the guest from the order to remove a device
    until QEMU said that it is gone.
    """
    left = list(descriptors)
    guest_s, asked_at = None, 0.0
    began_at = time.perf_counter()
    with contextlib.closing(Monitor(QMP)) as monitor:
        for step in steps:
            if isinstance(step, AwaitedDeletion):
                monitor.wait_gone(step.device)
                guest_s = time.perf_counter() - asked_at
                continue
            if step.name == "device_del":
                asked_at = time.perf_counter()
            given, left = left[: step.descriptors], left[step.descriptors :]
            monitor.execute(step, given)
    return time.perf_counter() - began_at, guest_s


# ---- what the library says to QEMU


@dataclass
class Conversation:
    """The library's commands to QEMU in order, and the time that the guest took."""

    steps: list[Step] = field(default_factory=list)
    asked_at: float = 0.0
    looked_at: float = 0.0
    gone_at: float = 0.0

    def guest_s(self) -> float:
        """Between asking for a device and hearing, or seeing, that it is gone."""
        return (self.gone_at or self.looked_at) - self.asked_at


@contextlib.contextmanager
def _noted() -> Iterator[Conversation]:
    """Note what goes through the library's QMP client; that costs a microsecond a command."""
    found = Conversation()
    execute, begin, next_event = QmpClient.execute, QmpClient.begin, QmpClient.next_event

    def noting_execute(
        self: QmpClient, command: str, arguments: Mapping[str, Any] | None = None, **options: Any
    ) -> Any:
        order = PlayedCommand(command, dict(arguments or {}), len(options.get("descriptors", ())))
        found.steps.append(order)
        try:
            answer = execute(self, command, arguments, **options)
        except QmpCommandError:
            order.is_refused = True
            raise
        if command == "qom-list":
            found.looked_at = time.perf_counter()
        return answer

    def noting_begin(
        self: QmpClient, command: str, arguments: Mapping[str, Any] | None = None
    ) -> int:
        found.steps.append(PlayedCommand(command, dict(arguments or {})))
        found.asked_at = found.asked_at or time.perf_counter()
        return begin(self, command, arguments)

    def noting_next_event(self: QmpClient, **options: Any) -> QmpEvent | None:
        event = next_event(self, **options)
        if event and event.name == DEVICE_DELETED and (device := event.data.get("device")):
            found.gone_at = time.perf_counter()
            found.steps.append(AwaitedDeletion(device))
        return event

    noting = mock.patch.multiple(
        QmpClient, execute=noting_execute, begin=noting_begin, next_event=noting_next_event
    )
    with noting:
        yield found


# ---- who plugs the same device into the same guest

LIBRARY, COMMAND, VIRSH = "library", "brine", "virsh"
FLOOR, FLOOR_AND_TAP = "floor", "floor and a bare tap"

_GUESTS_TAP, _TAP = "bench0", "bench1"
_DISK_UUID = "00000000-0000-4000-8000-0000000000d0"
_NIC_UUID = "00000000-0000-4000-8000-0000000000a0"
_LIBRARYS_MAC = "52:54:00:00:00:01"
_COMMANDS_MAC = "52:54:00:00:00:02"
_VIRSHS_MAC = "52:54:00:00:00:03"
_WARM_UPS = 3


@dataclass(frozen=True)
class Pair:
    """A device plugged in and taken out again, in seconds.

    :param guest_s: until the guest let go of it, where that can be seen.
    """

    both_s: float
    guest_s: float | None = None

    def without_guest_s(self) -> float:
        """The whole, less the guest's own."""
        return self.both_s - (self.guest_s or 0.0)


def _pair(add: Callable[[], float], remove: Callable[[], tuple[float, float | None]]) -> Pair:
    add_s = add()
    time.sleep(SETTLE_S)
    remove_s, guest_s = remove()
    time.sleep(SETTLE_S)
    return Pair(add_s + remove_s, guest_s)


@dataclass
class Library:
    """Brine's library, in this process, which is warm; and what it said to QEMU last."""

    kind: DeviceKind
    device: Disk | Vif
    steps: Sequence[Step] = ()

    def add(self) -> float:
        """Plug it in."""
        with _noted() as found:
            began_at = time.perf_counter()
            with working_on(QMP) as vm:
                if isinstance(self.device, Disk):
                    plug_disk_in(vm, self.device)
                else:
                    plug_nic_in(vm, self.device)
            took_s = time.perf_counter() - began_at
        self.steps = found.steps
        return took_s

    def remove(self) -> tuple[float, float]:
        """Take it out."""
        with _noted() as found:
            began_at = time.perf_counter()
            with working_on(QMP) as vm:
                device = vm.find(self.kind, self.device.uuid)
                if device is None:
                    hint = "is anything else at work there?"
                    raise LabError(f"{self.kind} {self.device.uuid} is not plugged in", hint=hint)
                remove_device(vm, device)
            took_s = time.perf_counter() - began_at
        self.steps = found.steps
        return took_s, found.guest_s()

    def warm_up(self) -> tuple[Sequence[Step], Sequence[Step]]:
        """Plug the device in and out a few times; returns the commands that QEMU got for each.

        While a guest takes its time the library looks after it. Of the shortest removal nothing
        could be left out.
        """
        removals = []
        for _ in range(_WARM_UPS):
            self.add()
            adding = self.steps
            time.sleep(SETTLE_S)
            self.remove()
            time.sleep(SETTLE_S)
            # A client that only waits must know that there is something to wait for.
            if any(isinstance(step, AwaitedDeletion) for step in self.steps):
                removals.append(self.steps)
        if not removals:
            raise LabError("no event said that the guest let go", hint="try again")
        return adding, min(removals, key=len)


@dataclass(frozen=True)
class DeviceContenders:
    """All who plug a device in and take it out, and how many QMP commands that is."""

    kind: DeviceKind
    pairs: Mapping[str, Callable[[], Pair]]
    commands: int


def _contenders(
    device: Disk | Vif,
    xml: str,
    adding: Sequence[str],
    removing: Sequence[str],
    floors: Mapping[str, Callable[[], list[int]]],
) -> DeviceContenders:
    """The library, the same QMP commands by a client that does nothing else, and whole commands.

    :param adding: arguments of the `brine` command that adds the device.
    :param removing: those of the one that removes it.
    :param floors: what opens the descriptors that go with the commands.
    """
    kind = DeviceKind.DISK if isinstance(device, Disk) else DeviceKind.NIC
    library = Library(kind, device)
    steps = library.warm_up()
    file = IMAGES / f"{kind}.xml"
    file.write_text(xml, encoding="utf-8")
    brine = [["brine", kind, *words, "--qmp", str(QMP)] for words in (adding, removing)]
    virsh = [["virsh", f"{verb}-device", DOMAIN, str(file)] for verb in ("attach", "detach")]
    pairs = {LIBRARY: partial(_pair, library.add, library.remove)}
    for name, open_files in floors.items():
        add = partial(_play_adding, steps[0], open_files, counts_opening=name == FLOOR_AND_TAP)
        pairs[name] = partial(_pair, add, partial(play, steps[1]))
    for name, (add_line, remove_line) in ((COMMAND, brine), (VIRSH, virsh)):
        pairs[name] = partial(_command_pair, add_line, remove_line)
    commands = sum(isinstance(step, PlayedCommand) for part in steps for step in part)
    return DeviceContenders(kind, pairs, commands)


def _command_pair(adding: Sequence[str], removing: Sequence[str]) -> Pair:
    return _pair(lambda: timed(adding), lambda: (timed(removing), None))


def _play_adding(
    steps: Sequence[Step], open_files: Callable[[], list[int]], *, counts_opening: bool
) -> float:
    began_at = time.perf_counter()
    descriptors = open_files()
    opened_s = time.perf_counter() - began_at
    try:
        played_s, _ = play(steps, descriptors)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return played_s + (opened_s if counts_opening else 0.0)


def _open_tap() -> list[int]:
    return [open_bare_tap(_GUESTS_TAP)]


def _open_connected_tap() -> list[int]:
    descriptor = open_bare_tap(_GUESTS_TAP)
    connect_tap(_GUESTS_TAP, BRIDGE)
    return [descriptor]


def of_disks() -> DeviceContenders:
    """All who plug a disk in."""
    image = make_image("brine")

    def open_image() -> list[int]:
        return [os.open(image, access | os.O_CLOEXEC) for access in (os.O_RDWR, os.O_RDONLY)]

    adding = ["add", "--path", str(image), "--uuid", _DISK_UUID]
    xml = disk_xml(make_image("libvirt"))
    disk = Disk(uuid=_DISK_UUID, path=str(image))
    return _contenders(disk, xml, adding, ["remove", _DISK_UUID], {FLOOR: open_image})


def of_nics() -> DeviceContenders:
    """All who plug a NIC in."""
    nic = Vif(instance=DOMAIN, uuid=_NIC_UUID, mode=Mode.BRIDGED, link=BRIDGE, mac=_LIBRARYS_MAC)
    adding, removing = ["add", "--link", BRIDGE, "--mac", _COMMANDS_MAC], ["remove", _COMMANDS_MAC]
    floors = {FLOOR: _open_tap, FLOOR_AND_TAP: _open_connected_tap}
    return _contenders(nic, nic_xml(_VIRSHS_MAC), adding, removing, floors)


# ---- what is measured alone

USUAL = "import argparse, json, asyncio"
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


def of_starts() -> dict[str, Callable[[], float]]:
    """How long interpreters and commands take that do nothing, or little."""
    lines: dict[str, Sequence[str]] = {USUAL: [PYTHON, "-c", USUAL]}
    for line in WITHOUT_NETLINK:
        lines[line] = [*line.split(), str(QMP)] if line.endswith("--qmp") else line.split()
    return timing(lines)


def of_taps() -> dict[str, Callable[[], float]]:
    """How long it takes to make a tap, a port of the bridge, and up; its end does not count."""
    wiring = Vif(instance=_TAP, uuid="0", mode=Mode.BRIDGED, link=BRIDGE)

    def library() -> float:
        began_at = time.perf_counter()
        with open_tap(_TAP) as tap:
            wire(tap, wiring)
            took_s = time.perf_counter() - began_at
            unwire(tap)
        return took_s

    def ip() -> float:
        took_s = timed(
            ["ip", "tuntap", "add", _TAP, "mode", "tap"],
            ["ip", "link", "set", _TAP, "master", BRIDGE, "up"],
        )
        timed(["ip", "link", "delete", _TAP])
        return took_s

    return {TAP_LIBRARY: library, TAP_IP: ip}


# ---- the rounds and the tables

_BOOT_TIMEOUT_S = 60.0
_SERIAL = """<serial type='unix'><source mode='bind' path='{folder}/serial'/>
<log file='{folder}/log'/></serial>"""


def measure(plan: Plan) -> Report:
    """Plug disks and NICs into one guest; then what is measured alone."""
    machine.lead_own_group()
    prepare()
    with step("starting a guest"):
        _start_guest()
    both = (of_disks(), of_nics())
    plugging = {f"{one.kind}: {way}": run for one in both for way, run in one.pairs.items()}
    pairs = in_turns("plugging", plan.rounds, plugging)
    alone = in_turns("alone", plan.rounds, {**of_starts(), **of_taps()})
    tables = []
    for one in both:
        mine = {way: pairs[f"{one.kind}: {way}"] for way in one.pairs}
        tables.append(
            Table(one.kind, [*_in_process(mine, one.commands), *_commands(mine, one.kind)])
        )
    usual = TableRow.of_times(f"python3 -c '{USUAL}'", alone[USUAL])
    starts = [TableRow.of_times(name, alone[name]) for name in WITHOUT_NETLINK]
    starts = [row.beside(usual, "those imports").within(START_LIMIT_MS) for row in starts]
    tables.append(Table("commands that need no netlink", [usual, *starts]))
    ip = TableRow.of_times(TAP_IP, alone[TAP_IP])
    library = TableRow.of_times(TAP_LIBRARY, alone[TAP_LIBRARY]).beside(ip, "ip")
    tables.append(Table("making a tap, on a bridge and up", [ip, library]))
    heads = [*machine.description(*VERSIONS_OF), f"emulated guest; rounds: {plan.rounds}"]
    return Report(heads, tables, {**pairs, **alone})


def _start_guest() -> None:
    xml, log = IMAGES / "domain.xml", SOCKETS / "log"
    xml.write_text(domain_xml(DOMAIN, _SERIAL.format(folder=SOCKETS), qmp=QMP), encoding="utf-8")
    timed(["virsh", "--quiet", "create", str(xml)])
    # Where the kernel shares the processors out by group, these are as far ahead as we are.
    machine.favour("libvirtd", "virtlogd", "qemu-system-x86_64")
    wait_for(
        "the guest to be ready",
        lambda: log.exists() and READY in log.read_text(errors="replace"),
        timeout_s=_BOOT_TIMEOUT_S,
    )


def _in_process(pairs: Mapping[str, Sequence[Pair]], commands: int) -> Iterator[TableRow]:
    """The library beside the floor."""
    floor = _row(f"floor: all {commands} QMP commands", pairs[FLOOR])
    yield floor
    yield _row(LIBRARY, pairs[LIBRARY]).beside(floor, "the floor").at_most(LIBRARY_LIMIT)
    for way in (FLOOR, FLOOR_AND_TAP):
        if way in pairs:
            floor = _row(f"{way}, without the guest's own time", pairs[way], Pair.without_guest_s)
            yield floor
            title = "library, without the guest's own time"
            yield _row(title, pairs[LIBRARY], Pair.without_guest_s).beside(floor, "the floor")


def _commands(pairs: Mapping[str, Sequence[Pair]], of: DeviceKind) -> Iterator[TableRow]:
    """Whole commands beside libvirt's."""
    virsh = _row("virsh attach-device + detach-device", pairs[VIRSH])
    yield virsh
    ours = _row(f"brine {of} add + remove", pairs[COMMAND])
    yield ours.beside(virsh, "virsh").at_most(COMMAND_LIMITS[of])
    # What the guest usually takes to let go, where that can be seen.
    seen = [pair.guest_s for way in pairs.values() for pair in way if pair.guest_s is not None]
    guest_s = statistics.median(seen)

    def less(pair: Pair) -> float:
        return pair.both_s - guest_s

    virsh = _row(f"  virsh, less the guest's own {guest_s * 1e3:.0f} ms", pairs[VIRSH], less)
    yield virsh
    yield _row(f"  brine {of}, less the same", pairs[COMMAND], less).beside(virsh, "virsh")


def _row(
    title: str,
    pairs: Sequence[Pair],
    value: Callable[[Pair], float] = lambda pair: pair.both_s,
) -> TableRow:
    return TableRow.of_times(title, [value(pair) for pair in pairs])
