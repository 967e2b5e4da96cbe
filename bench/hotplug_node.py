"""`bench hotplug`'s measuring process, in the node."""

import contextlib
import fcntl
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from bench import machine
from bench.harness import PYTHON, in_turns, timed, timing
from bench.hotplug import (
    DOMAIN,
    QMP,
    TAP_BARE,
    TAP_IP,
    TAP_LIBRARY,
    USUAL,
    WITHOUT_NETLINK,
    Device,
    Pair,
    Plan,
    Results,
    Way,
    series,
)
from bench.libvirt_node import BRIDGE, IMAGES, disk_xml, nic_xml
from brine.common.qmp.client import QmpClient
from brine.common.qmp.wire import QmpCommandError, QmpEvent
from brine.hotplug.address import DeviceKind
from brine.hotplug.choices import Mode
from brine.hotplug.disk import Disk
from brine.hotplug.net.tap import open_tap
from brine.hotplug.net.wiring import unwire, wire
from brine.hotplug.nic import Nic
from brine.hotplug.plug_disk import add_disk
from brine.hotplug.plug_nic import add_nic
from brine.hotplug.session import remove_device, working_on
from lab.errors import LabError

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

GONE = "DEVICE_DELETED"
NO_ANSWER_S = 60.0
_ASK_AGAIN_S = 2.0


@dataclass
class Order:
    """A command."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    descriptors: int = 0  # that go with it
    is_refused: bool = False  # QEMU may say no, as it does of something that is not there


@dataclass(frozen=True)
class Gone:
    """The event that a device is gone is waited for here."""

    device: str


Step = Order | Gone


@dataclass
class Trip:
    """One connection to a monitor, and how much of its time was the guest's."""

    total_s: float = 0.0
    guest_s: float | None = None  # from asking for the device's removal until QEMU says it is gone


class Monitor:
    """A connection to a QMP socket, past its greeting."""

    def __init__(self, path: Path) -> None:
        self._events: list[dict[str, Any]] = []
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(NO_ANSWER_S)
        self._socket.connect(str(path))
        self._buffer = b""
        self._receive()

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def execute(self, order: Order, descriptors: Sequence[int] = ()) -> None:
        """Give a command, and read on until its answer."""
        line = json.dumps({"execute": order.name, "arguments": order.arguments}).encode() + b"\n"
        if descriptors:
            line = line[socket.send_fds(self._socket, [line], list(descriptors)) :]
        self._socket.sendall(line)
        while "event" in (message := self._receive()):
            self._events.append(message)
        if "error" in message and not order.is_refused:
            hint = "the bench plays back what the library asked for before"
            raise LabError(f"QEMU refused {order.name}: {message['error']['desc']}", hint=hint)

    def wait_gone(self, device: str) -> None:
        """Read on until the event that a device is gone. As the library does, ask again: a guest
        may have been too busy to hear of it."""
        deadline = time.perf_counter() + NO_ANSWER_S
        while not self._is_gone(device):
            if time.perf_counter() > deadline:
                raise LabError(f"the guest keeps {device}", hint="is the machine busy? try again")
            # Refused while the guest is in the middle of it.
            self.execute(Order("device_del", {"id": device}, is_refused=True))

    def _is_gone(self, device: str) -> bool:
        self._socket.settimeout(_ASK_AGAIN_S)
        try:
            while True:
                while self._events:
                    event = self._events.pop(0)
                    if event["event"] == GONE and event["data"].get("device") == device:
                        return True
                self._events.append(self._receive())
        except TimeoutError:
            return False
        finally:
            self._socket.settimeout(NO_ANSWER_S)

    def _receive(self) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            data = self._socket.recv(64 * 1024)
            if not data:
                raise LabError("QEMU closed the monitor", hint="see libvirt's log of the guest")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message


def play(steps: Iterable[Step], descriptors: Sequence[int]) -> Trip:
    """Connect, give these commands, and disconnect; the descriptors go with them in turn."""
    left = list(descriptors)
    trip = Trip()
    asked_at = 0.0
    began_at = time.perf_counter()
    with contextlib.closing(Monitor(Path(QMP))) as monitor:
        for step in steps:
            if isinstance(step, Gone):
                monitor.wait_gone(step.device)
                trip.guest_s = time.perf_counter() - asked_at
                continue
            if step.name == "device_del":
                asked_at = time.perf_counter()
            given, left = left[: step.descriptors], left[step.descriptors :]
            monitor.execute(step, given)
    trip.total_s = time.perf_counter() - began_at
    return trip


# ---- what the library says to QEMU


@dataclass
class Heard:
    """What the library said to QEMU, in that order, and how long the guest took."""

    steps: list[Step] = field(default_factory=list)
    asked_at: float = 0.0
    looked_at: float = 0.0
    gone_at: float = 0.0

    def guest_s(self) -> float:
        """Between asking for a device and hearing, or seeing, that it is gone."""
        return (self.gone_at or self.looked_at) - self.asked_at


@contextlib.contextmanager
def _overheard() -> Iterator[Heard]:
    """Note what goes through the library's QMP client; that costs a microsecond a command."""
    heard = Heard()
    execute, begin, next_event = QmpClient.execute, QmpClient.begin, QmpClient.next_event

    def noting_execute(
        self: QmpClient, command: str, arguments: Mapping[str, Any] | None = None, **options: Any
    ) -> Any:
        order = Order(command, dict(arguments or {}), len(options.get("descriptors", ())))
        heard.steps.append(order)
        try:
            answer = execute(self, command, arguments, **options)
        except QmpCommandError:
            order.is_refused = True
            raise
        if command == "qom-list":
            heard.looked_at = time.perf_counter()
        return answer

    def noting_begin(
        self: QmpClient, command: str, arguments: Mapping[str, Any] | None = None
    ) -> int:
        heard.steps.append(Order(command, dict(arguments or {})))
        heard.asked_at = heard.asked_at or time.perf_counter()
        return begin(self, command, arguments)

    def noting_next_event(self: QmpClient, **options: Any) -> QmpEvent | None:
        event = next_event(self, **options)
        if event and event.name == GONE and (device := event.data.get("device")):
            heard.gone_at = time.perf_counter()
            heard.steps.append(Gone(device))
        return event

    noting = mock.patch.multiple(
        QmpClient, execute=noting_execute, begin=noting_begin, next_event=noting_next_event
    )
    with noting:
        yield heard


# ---- who plugs the same device into the same guest

_IMAGE_BYTES = 64 * 2**20
_GUESTS_TAP, _TAP = "bench0", "bench1"
_DISK_UUID = "00000000-0000-4000-8000-0000000000d0"
_NIC_UUID = "00000000-0000-4000-8000-0000000000a0"
_LIBRARYS_MAC = "52:54:00:00:00:01"
_COMMANDS_MAC = "52:54:00:00:00:02"
_VIRSHS_MAC = "52:54:00:00:00:03"
_WARM_UPS = 3


@dataclass(frozen=True)
class Contender:
    """What plugs a device in, and takes it out again; *orders* counts QMP commands played back."""

    add: Callable[[], Trip]
    remove: Callable[[], Trip]
    orders: int = 0


@dataclass
class Library:
    """Brine's library, in this process, which is warm; and what it said to QEMU last."""

    thing: Disk | Nic
    steps: list[Step] = field(default_factory=list)

    def add(self) -> Trip:
        """Plug it in."""
        with _overheard() as heard:
            began_at = time.perf_counter()
            with working_on(Path(QMP)) as vm:
                if isinstance(self.thing, Disk):
                    add_disk(vm, self.thing)
                else:
                    add_nic(vm, self.thing)
            total_s = time.perf_counter() - began_at
        self.steps = heard.steps
        return Trip(total_s)

    def remove(self) -> Trip:
        """Take it out."""
        kind = DeviceKind.DISK if isinstance(self.thing, Disk) else DeviceKind.NIC
        with _overheard() as heard:
            began_at = time.perf_counter()
            with working_on(Path(QMP)) as vm:
                device = vm.find(kind, self.thing.uuid)
                if device is None:
                    hint = "is anything else at work there?"
                    raise LabError(f"{kind} {self.thing.uuid} is not plugged in", hint=hint)
                remove_device(vm, device)
            total_s = time.perf_counter() - began_at
        self.steps = heard.steps
        return Trip(total_s, heard.guest_s())

    def warm_up(self, settle_s: float) -> tuple[list[Step], list[Step]]:
        """Do it a few times; returns what QEMU is told to add and to remove.

        While a guest takes its time the library looks after it. Of the shortest removal nothing
        could be left out.
        """
        found = []
        for _ in range(_WARM_UPS):
            self.add()
            added = self.steps
            time.sleep(settle_s)
            self.remove()
            time.sleep(settle_s)
            # A client that only waits must know that there is something to wait for.
            if any(isinstance(step, Gone) for step in self.steps):
                found.append(self.steps)
        if not found:
            raise LabError("no event said that the guest let go", hint="try again")
        return added, min(found, key=len)


def _playback(
    adding: Sequence[Step],
    removing: Sequence[Step],
    open_files: Callable[[], list[int]],
    *,
    counts: bool = False,
) -> Contender:
    """The same commands, by a client that does nothing else.

    :param open_files: gives the descriptors that go with them.
    :param counts: whether that is a part of what is measured.
    """

    def add() -> Trip:
        began_at = time.perf_counter()
        descriptors = open_files()
        opened_s = time.perf_counter() - began_at
        try:
            trip = play(adding, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return Trip(trip.total_s + opened_s) if counts else trip

    orders = sum(isinstance(step, Order) for step in (*adding, *removing))
    return Contender(add, partial(play, removing, ()), orders)


def _commands(adding: Sequence[str], removing: Sequence[str]) -> Contender:
    """Whole commands."""
    return Contender(lambda: Trip(timed(adding)), lambda: Trip(timed(removing)))


def _in_process(
    plan: Plan,
    thing: Disk | Nic,
    open_files: Callable[[], list[int]],
    open_connected: Callable[[], list[int]] | None = None,
) -> dict[Way, Contender]:
    """The library, and the floors beneath it."""
    library = Library(thing)
    adding, removing = library.warm_up(plan.settle_s)
    found = {
        Way.LIBRARY: Contender(library.add, library.remove),
        Way.SAME: _playback(adding, removing, open_files),
        Way.FEWEST: _playback(_needed(adding), _needed(removing), open_files),
    }
    if open_connected:
        found[Way.SAME_AND_TAP] = _playback(adding, removing, open_connected, counts=True)
    return found


def _needed(steps: Sequence[Step]) -> list[Step]:
    """Without those that only ask, and those that had nothing to do."""
    return [
        step
        for step in steps
        if not isinstance(step, Order)
        or not (step.is_refused or step.name.startswith(("query-", "qom-")))
    ]


def of_disks(plan: Plan) -> dict[Way, Contender]:
    """All who plug a disk in."""
    image, virshs_image = (Path(IMAGES, f"{name}.img") for name in ("brine", "libvirt"))
    for path in (image, virshs_image):
        path.touch()
        os.truncate(path, _IMAGE_BYTES)

    def open_image() -> list[int]:
        return [os.open(image, access | os.O_CLOEXEC) for access in (os.O_RDWR, os.O_RDONLY)]

    adding = _brine(Device.DISK, "add", "--path", str(image), "--uuid", _DISK_UUID)
    return {
        **_in_process(plan, Disk(_DISK_UUID, image), open_image),
        Way.COMMAND: _commands(adding, _brine(Device.DISK, "remove", _DISK_UUID)),
        Way.VIRSH: _virsh(Device.DISK, disk_xml(virshs_image)),
    }


def of_nics(plan: Plan) -> dict[Way, Contender]:
    """All who plug a NIC in."""

    def open_tap() -> list[int]:
        return [open_bare_tap(_GUESTS_TAP)]

    def open_connected() -> list[int]:
        descriptor = open_bare_tap(_GUESTS_TAP)
        connect_tap(_GUESTS_TAP, BRIDGE)
        return [descriptor]

    nic = Nic(DOMAIN, _NIC_UUID, Mode.BRIDGED, BRIDGE, mac=_LIBRARYS_MAC)
    adding = _brine(Device.NIC, "add", "--link", BRIDGE, "--mac", _COMMANDS_MAC)
    return {
        **_in_process(plan, nic, open_tap, open_connected),
        Way.COMMAND: _commands(adding, _brine(Device.NIC, "remove", _COMMANDS_MAC)),
        Way.VIRSH: _virsh(Device.NIC, nic_xml(_VIRSHS_MAC, BRIDGE)),
    }


def _brine(device: Device, verb: str, *options: str) -> list[str]:
    return ["brine", device, verb, "--qmp", QMP, *options]


def _virsh(device: Device, xml: str) -> Contender:
    file = Path(IMAGES, f"{device}.xml")
    file.write_text(xml, encoding="utf-8")
    of = [DOMAIN, str(file)]
    return _commands(["virsh", "attach-device", *of], ["virsh", "detach-device", *of])


# ---- what is measured alone


def of_starts() -> dict[str, Callable[[], float]]:
    """How long interpreters and commands take that do nothing, or little."""
    lines: dict[str, Sequence[str]] = {USUAL: [PYTHON, "-c", USUAL]}
    for line in WITHOUT_NETLINK:
        lines[line] = [*line.split(), QMP] if line.endswith("--qmp") else line.split()
    return timing(lines)


def of_taps() -> dict[str, Callable[[], float]]:
    """How long it takes to make a tap, a port of the bridge, and up; its end does not count."""
    wiring = Nic(_TAP, "0", Mode.BRIDGED, BRIDGE)

    def library() -> float:
        began_at = time.perf_counter()
        with open_tap(_TAP) as tap:
            wire(tap, wiring)
            took_s = time.perf_counter() - began_at
            unwire(tap)
        return took_s

    def bare() -> float:
        began_at = time.perf_counter()
        descriptor = open_bare_tap(_TAP)
        try:
            connect_tap(_TAP, BRIDGE)
            return time.perf_counter() - began_at
        finally:
            os.close(descriptor)

    def ip() -> float:
        took_s = timed(
            ["ip", "tuntap", "add", _TAP, "mode", "tap"],
            ["ip", "link", "set", _TAP, "master", BRIDGE, "up"],
        )
        timed(["ip", "link", "delete", _TAP])
        return took_s

    return {TAP_LIBRARY: library, TAP_BARE: bare, TAP_IP: ip}


# ---- the rounds


def measure(plan: Plan) -> Results:
    """Run all rounds."""
    machine.lead_own_group()
    plugging = {series(Device.DISK, way): one for way, one in of_disks(plan).items()}
    plugging |= {series(Device.NIC, way): one for way, one in of_nics(plan).items()}
    pairs = {name: partial(_pair, one, plan.settle_s) for name, one in plugging.items()}
    return Results(
        pairs=in_turns("plugging", plan.rounds, pairs),
        singles=in_turns("alone", plan.rounds, {**of_starts(), **of_taps()}),
        orders={name: one.orders for name, one in plugging.items() if one.orders},
    )


def _pair(contender: Contender, settle_s: float) -> Pair:
    added = contender.add()
    # Until the guest has found the device, it does not hear that it is to let go of it.
    time.sleep(settle_s)
    removed = contender.remove()
    time.sleep(settle_s)
    return Pair(added.total_s, removed.total_s, removed.guest_s)
