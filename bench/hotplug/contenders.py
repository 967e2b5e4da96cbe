"""Who plugs the same device into the same guest, each in his own way."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.commands import timed
from bench.errors import BenchError
from bench.hotplug import bare_tap, library, monitor
from bench.hotplug.monitor import Gone, Order, Step, Trip
from bench.hotplug.results import Device, Plan, Way
from brine.hotplug.choices import Mode
from brine.hotplug.disk import Disk
from brine.hotplug.nic import Nic

_IMAGE_BYTES = 64 * 2**20
_TAP = "bench0"
_DISK_UUID = "00000000-0000-4000-8000-0000000000d0"
_NIC_UUID = "00000000-0000-4000-8000-0000000000a0"
_LIBRARYS_MAC = "52:54:00:00:00:01"
_COMMANDS_MAC = "52:54:00:00:00:02"
_VIRSHS_MAC = "52:54:00:00:00:03"
_WARM_UPS = 3

_DISK_XML = """<disk type='file' device='disk'>
<driver name='qemu' type='raw' cache='none' io='threads' discard='unmap'/>
<source file='{image}'/><target dev='vda' bus='virtio'/></disk>
"""
# QEMU moves the frames itself, as it does for ours.
_NIC_XML = """<interface type='bridge'><mac address='{mac}'/><source bridge='{bridge}'/>
<model type='virtio'/><driver name='qemu'/></interface>
"""


class Contender(Protocol):
    """Something that plugs a device in, and takes it out again."""

    def add(self) -> Trip:
        """Plug it in."""

    def remove(self) -> Trip:
        """Take it out."""


@dataclass(frozen=True)
class Library:
    """Brine's library, in this process, which is warm."""

    qmp: Path
    thing: Disk | Nic

    def add(self) -> Trip:
        trip, _ = library.add(self.qmp, self.thing)
        return trip

    def remove(self) -> Trip:
        trip, _ = library.remove(self.qmp, self.thing)
        return trip

    def warm_up(self, settle_s: float) -> tuple[list[Step], list[Step]]:
        """Do it a few times; returns what QEMU is told to add and to remove.

        While a guest takes its time the library looks after it. Of the shortest removal nothing
        could be left out.
        """
        found = []
        for _ in range(_WARM_UPS):
            _, added = library.add(self.qmp, self.thing)
            time.sleep(settle_s)
            _, removed = library.remove(self.qmp, self.thing)
            time.sleep(settle_s)
            # A client that only waits must know that there is something to wait for.
            if any(isinstance(step, Gone) for step in removed):
                found.append(removed)
        if not found:
            raise BenchError("no event said that the guest let go", hint="try again")
        return added, min(found, key=len)


@dataclass(frozen=True)
class Playback:
    """The same commands, by a client that does nothing else.

    :param open_files: gives the descriptors that go with them.
    :param counts: whether that is a part of what is measured.
    """

    qmp: Path
    adding: Sequence[Step]
    removing: Sequence[Step]
    open_files: Callable[[], list[int]]
    counts: bool = False

    def add(self) -> Trip:
        began_at = time.perf_counter()
        descriptors = self.open_files()
        opened_s = time.perf_counter() - began_at
        try:
            trip = monitor.play(self.qmp, self.adding, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return Trip(trip.total_s + opened_s) if self.counts else trip

    def remove(self) -> Trip:
        return monitor.play(self.qmp, self.removing, ())


@dataclass(frozen=True)
class Command:
    """Whole commands."""

    adding: Sequence[str]
    removing: Sequence[str]

    def add(self) -> Trip:
        return Trip(timed(self.adding))

    def remove(self) -> Trip:
        return Trip(timed(self.removing))


def of_disks(plan: Plan) -> dict[Way, Contender]:
    """All who plug a disk in."""
    qmp = Path(plan.qmp)
    image, virshs_image = (_image(plan, name) for name in ("brine", "libvirt"))

    def open_image() -> list[int]:
        return [os.open(image, access | os.O_CLOEXEC) for access in (os.O_RDWR, os.O_RDONLY)]

    warm = Library(qmp, Disk(_DISK_UUID, image))
    adding, removing = warm.warm_up(plan.settle_s)
    command = Command(
        _brine(plan, Device.DISK, "add", "--path", str(image), "--uuid", _DISK_UUID),
        _brine(plan, Device.DISK, "remove", _DISK_UUID),
    )
    return {
        Way.LIBRARY: warm,
        Way.SAME: Playback(qmp, adding, removing, open_image),
        Way.FEWEST: Playback(qmp, _needed(adding), _needed(removing), open_image),
        Way.COMMAND: command,
        Way.VIRSH: _virsh(plan, Device.DISK, _DISK_XML.format(image=virshs_image)),
    }


def of_nics(plan: Plan) -> dict[Way, Contender]:
    """All who plug a NIC in."""
    qmp = Path(plan.qmp)

    def open_tap() -> list[int]:
        return [bare_tap.open_tap(_TAP)]

    def open_connected() -> list[int]:
        descriptor = bare_tap.open_tap(_TAP)
        bare_tap.connect(_TAP, plan.bridge)
        return [descriptor]

    wiring = Nic(plan.domain, _NIC_UUID, Mode.BRIDGED, plan.bridge, mac=_LIBRARYS_MAC)
    warm = Library(qmp, wiring)
    adding, removing = warm.warm_up(plan.settle_s)
    command = Command(
        _brine(plan, Device.NIC, "add", "--link", plan.bridge, "--mac", _COMMANDS_MAC),
        _brine(plan, Device.NIC, "remove", _COMMANDS_MAC),
    )
    xml = _NIC_XML.format(mac=_VIRSHS_MAC, bridge=plan.bridge)
    return {
        Way.LIBRARY: warm,
        Way.SAME: Playback(qmp, adding, removing, open_tap),
        Way.FEWEST: Playback(qmp, _needed(adding), _needed(removing), open_tap),
        Way.SAME_AND_TAP: Playback(qmp, adding, removing, open_connected, counts=True),
        Way.COMMAND: command,
        Way.VIRSH: _virsh(plan, Device.NIC, xml),
    }


def _needed(steps: Sequence[Step]) -> list[Step]:
    """Without those that only ask, and those that had nothing to do."""
    return [
        step
        for step in steps
        if not isinstance(step, Order)
        or not (step.is_refused or step.name.startswith(("query-", "qom-")))
    ]


def _image(plan: Plan, name: str) -> Path:
    image = Path(plan.folder, f"{name}.img")
    with image.open("wb") as file:
        file.truncate(_IMAGE_BYTES)
    return image


def _brine(plan: Plan, device: Device, verb: str, *options: str) -> list[str]:
    return ["brine", device, verb, "--qmp", plan.qmp, *options]


def _virsh(plan: Plan, device: Device, xml: str) -> Command:
    file = Path(plan.folder, f"{device}.xml")
    file.write_text(xml, encoding="utf-8")
    of = [plan.domain, str(file)]
    return Command(["virsh", "attach-device", *of], ["virsh", "detach-device", *of])
