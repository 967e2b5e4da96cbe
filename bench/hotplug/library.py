"""Brine's library in a warm process, and what it says to QEMU meanwhile."""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from bench.errors import BenchError
from bench.hotplug.monitor import GONE, Gone, Order, Step, Trip
from brine.common.qmp.client import QmpClient
from brine.common.qmp.wire import QmpCommandError, QmpEvent
from brine.hotplug.address import DeviceKind
from brine.hotplug.disk import Disk
from brine.hotplug.nic import Nic
from brine.hotplug.plug_disk import add_disk, remove_disk
from brine.hotplug.plug_nic import add_nic, remove_nic
from brine.hotplug.session import working_on
from brine.hotplug.vm import Vm


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


def add(qmp: Path, thing: Disk | Nic) -> tuple[Trip, list[Step]]:
    """Plug a device in; returns what it took, and what it took in commands."""
    with _overheard() as heard:
        began_at = time.perf_counter()
        with working_on(qmp) as vm:
            if isinstance(thing, Disk):
                add_disk(vm, thing)
            else:
                add_nic(vm, thing)
        return Trip(time.perf_counter() - began_at), heard.steps


def remove(qmp: Path, thing: Disk | Nic) -> tuple[Trip, list[Step]]:
    """Take it out again."""
    with _overheard() as heard:
        began_at = time.perf_counter()
        with working_on(qmp) as vm:
            _remove(vm, thing)
        total_s = time.perf_counter() - began_at
        return Trip(total_s, heard.guest_s()), heard.steps


def _remove(vm: Vm, thing: Disk | Nic) -> None:
    kind = DeviceKind.DISK if isinstance(thing, Disk) else DeviceKind.NIC
    device = vm.find(kind, thing.uuid)
    if device is None:
        raise BenchError(
            f"{kind} {thing.uuid} is not plugged in", hint="is anything else at work there?"
        )
    if kind is DeviceKind.DISK:
        remove_disk(vm, device)
    else:
        remove_nic(vm, device)


@contextlib.contextmanager
def _overheard() -> Iterator[Heard]:
    """Note what goes through the library's QMP client; that costs a microsecond a command."""
    heard = Heard()
    execute, begin, next_event = QmpClient.execute, QmpClient.begin, QmpClient.next_event

    def noting_execute(
        self: QmpClient,
        command: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        descriptors: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> Any:
        order = Order(command, dict(arguments or {}), len(descriptors))
        heard.steps.append(order)
        try:
            answer = execute(self, command, arguments, descriptors=descriptors, timeout_s=timeout_s)
        except QmpCommandError:
            order.is_refused = True
            raise
        if command == "qom-list":
            heard.looked_at = time.perf_counter()
        return answer

    def noting_begin(
        self: QmpClient, command: str, arguments: Mapping[str, Any] | None = None
    ) -> int:
        heard.steps.append(Order(command, dict(arguments or {}), 0))
        heard.asked_at = heard.asked_at or time.perf_counter()
        return begin(self, command, arguments)

    def noting_next_event(
        self: QmpClient, *, timeout_s: float | None = None, or_answer: int | None = None
    ) -> QmpEvent | None:
        event = next_event(self, timeout_s=timeout_s, or_answer=or_answer)
        if event and event.name == GONE and (device := event.data.get("device")):
            heard.gone_at = time.perf_counter()
            heard.steps.append(Gone(device))
        return event

    with (
        mock.patch.object(QmpClient, "execute", noting_execute),
        mock.patch.object(QmpClient, "begin", noting_begin),
        mock.patch.object(QmpClient, "next_event", noting_next_event),
    ):
        yield heard
