"""What both sides of a live move have in common: QEMU's migration, and what is told it first.

A side is an object without a memory of its own. QEMU is asked anew at each step, so another process
may do the next one, and a step may be done twice.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from brine.common.errors import BrineError, printable
from brine.common.qmp.client import QmpClient
from brine.common.qmp.wire import QmpClosedError, QmpCommandError, QmpProtocolError, QmpTimeoutError
from brine.hotplug.block_graph import BlockGraph, top_node
from brine.hotplug.qemu import Machine
from brine.instance.kvm.guest import run_state
from brine.moves.move_key import KeyFolder

Connect = Callable[[], contextlib.AbstractContextManager[QmpClient]]
"""Connects to a monitor, for the time of a block. A monitor serves one client at a time, so a side
keeps it for moments only."""

CAPABILITIES = frozenset({"events", "return-path", "dirty-bitmaps"})
"""Of both sides. Without ``return-path`` a source would not hear that the target refuses what it
gets, and both would be down."""

_TLS_ID = "move-key"
_MEMORY_FD = "move-memory"
_HOLD_S = 1.0
_LOOK_S = 0.1
_BETWEEN_S = 0.01
_BITS_IN_MIB_S = 1_000_000 / 8


class MoveError(BrineError):
    """A step of a live move that failed. The text says what became of the guest."""


class QemuGoneError(MoveError):
    """The QEMU of this side has ended, or does not answer any more."""


class MigrationState(StrEnum):
    """A QEMU's migration, by QEMU's names. A source passes ``setup``, ``active``,
    ``pre-switchover``, ``device`` and ``completed``; a target lacks the third and the fourth."""

    NONE = "none"
    SETUP = "setup"
    ACTIVE = "active"
    PRE_SWITCHOVER = "pre-switchover"
    DEVICE = "device"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    OTHER = "other"
    """One that Brine has not asked for."""


ENDED = frozenset({MigrationState.COMPLETED, MigrationState.FAILED, MigrationState.CANCELLED})
IDLE = frozenset({MigrationState.NONE, MigrationState.FAILED, MigrationState.CANCELLED})


class Migration(NamedTuple):
    """What QEMU says of its migration.

    :param error: why it failed; empty if it did not, or did not say.
    :param total: of the guest's memory, in bytes; *remaining* is what is left of it, and *sent*
        counts again what was sent again.
    :param rate: in bytes a second; *dirtied* is how much the guest changes meanwhile.
    :param passes: how often it went through the memory.
    :param downtime_ms: of the guest on a source that has completed.
    """

    state: MigrationState
    error: str = ""
    sent: int = 0
    remaining: int = 0
    total: int = 0
    rate: float = 0.0
    dirtied: float = 0.0
    passes: int = 0
    throttle: int = 0
    downtime_ms: int = 0

    @classmethod
    def read(cls, qmp: QmpClient) -> Migration:
        """Ask QEMU."""
        answer = qmp.execute("query-migrate")
        if type(answer) is not dict:
            raise QmpProtocolError(f"{qmp.path}: no answer to query-migrate: {answer!r:.60}")
        known = set(MigrationState)
        text = str(answer.get("status", "none"))
        state = MigrationState(text) if text in known else MigrationState.OTHER
        ram = answer.get("ram")
        ram = ram if type(ram) is dict else {}
        try:
            return cls(
                state,
                printable(str(answer.get("error-desc") or "")),
                int(ram.get("transferred", 0)),
                int(ram.get("remaining", 0)),
                int(ram.get("total", 0)),
                float(ram.get("mbps", 0)) * _BITS_IN_MIB_S,
                float(ram.get("dirty-pages-rate", 0)) * int(ram.get("page-size", 4096)),
                int(ram.get("dirty-sync-count", 0)),
                int(answer.get("cpu-throttle-percentage", 0)),
                int(answer.get("downtime", 0)),
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise QmpProtocolError(f"{qmp.path}: no answer to query-migrate") from error

    def rest_s(self) -> float | None:
        """How long the rest takes, in seconds; None if it is not known, or has no end."""
        gain = self.rate - self.dirtied
        return self.remaining / gain if self.rate > 0 and gain > 0 else None


class CopyPhase(StrEnum):
    """What of a guest is copied."""

    DISKS = "disks"
    MEMORY = "memory"


class MoveProgress(NamedTuple):
    """How far a move is.

    :param done: of *total*, in bytes; both may grow, as the guest goes on writing.
    :param rate: in bytes a second.
    :param rest_s: in seconds; None is not known, or has no end.
    """

    phase: CopyPhase
    done: int
    total: int
    rate: float
    rest_s: float | None


TellProgress = Callable[[MoveProgress], object]


def tell_no_progress(_progress: MoveProgress) -> None:
    """Tell no one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveOptions:
    """How a guest is moved.

    :param max_downtime_ms: how long it may stand still for the rest of its memory.
    :param auto_converge: slow it down, more and more, if it changes its memory faster than that is
        sent.
    :param rate: of memory, and of each disk, in bytes a second at most; 0 is no limit.
    :param patience: for so many passes, and *patience_s* seconds, the rest may fail to get
        smaller. Then the move is given up.
    """

    max_downtime_ms: int = 300
    auto_converge: bool = False
    rate: int = 0
    patience: int = 10
    patience_s: float = 30.0


class MachineFacts(NamedTuple):
    """What both QEMUs of a move must have in common, as JSON has it.

    :param machine: its versioned type.
    :param memory: in bytes; *vcpus* are those that are plugged in.
    :param devices: the type and the slot of each, by its QOM path.
    """

    machine: str
    memory: int
    vcpus: int
    devices: Mapping[str, str]

    @classmethod
    def read(cls, machine: Machine) -> MachineFacts:
        """Ask QEMU."""
        qmp = machine.qmp
        kind = qmp.execute("qom-get", {"path": "/machine", "property": "type"})
        memory = qmp.execute("query-memory-size-summary")
        if type(memory) is not dict:
            raise QmpProtocolError(f"{qmp.path}: no answer to query-memory-size-summary")
        devices = {
            f"{folder}/{name}": f"{type_} at {_place_of(machine, folder, name)}"
            for folder in ("/machine/peripheral", "/machine/peripheral-anon")
            for name, type_ in machine.devices(folder).items()
        }
        vcpus = len(machine.list_of("query-cpus-fast"))
        size = sum(int(memory.get(key) or 0) for key in ("base-memory", "plugged-memory"))
        return cls(str(kind).removesuffix("-machine"), size, vcpus, devices)

    def differences(self, target: MachineFacts) -> list[str]:
        """What differs on a target, in words. QEMU itself would take a target with a further
        device, and tells of a missing one only when all memory is sent."""
        found = []
        for noun, own, other in (
            ("machine type", self.machine, target.machine),
            ("bytes of memory", self.memory, target.memory),
            ("vCPUs", self.vcpus, target.vcpus),
        ):
            if own != other:
                found.append(f"{noun}: {own} here, {other} there")
        for path in sorted({*self.devices, *target.devices}):
            own_one, other_one = self.devices.get(path), target.devices.get(path)
            if own_one != other_one:
                name = path.rpartition("/")[2]
                text = f"{own_one or 'nothing'} here, {other_one or 'nothing'} there"
                found.append(printable(f"{name}: {text}"))
        return found


_PLACE = ("addr", "channel", "scsi-id", "lun", "unit", "port", "nr", "iobase")


def _place_of(machine: Machine, folder: str, name: str) -> str:
    """The slot of a device, in QEMU's words: its bus, and its numbers on that."""
    known = {
        str(one.get("name")) for one in machine.list_of("qom-list", {"path": f"{folder}/{name}"})
    }
    words = []
    if "parent_bus" in known:
        words.append(str(machine.property(name, "parent_bus", folder)))
    words += [f"{key}={machine.property(name, key, folder)}" for key in _PLACE if key in known]
    return " ".join(words)


class MoveSide:
    """A QEMU in a live move, whichever side it is.

    :param name: of the instance, for errors.
    :param connect: to its monitor.
    :param key: by which both sides know each other, and which encrypts; None sends all in the
        clear.
    """

    def __init__(self, name: str, connect: Connect, key: KeyFolder | None) -> None:
        self.name = name
        self._connect = connect
        self._key = key

    def facts(self) -> MachineFacts:
        """What the other side must have, too."""
        with self._machine() as machine:
            return MachineFacts.read(machine)

    def migration(self) -> Migration:
        """How far QEMU is."""
        with self._machine() as machine:
            return Migration.read(machine.qmp)

    def run_state(self) -> str:
        """The state of the guest by QEMU, such as ``running`` or ``postmigrate``."""
        with self._machine() as machine:
            return run_state(machine.qmp)

    def quit(self, *, timeout_s: float = 30.0) -> None:
        """End this QEMU. Succeeds if it has ended before.

        :raises MoveError: if it has not ended in time.
        """
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(QemuGoneError), self._machine() as machine:
            machine.qmp.execute("quit")
            while time.monotonic() < deadline:  # until the connection ends
                with contextlib.suppress(QmpTimeoutError):
                    machine.qmp.next_event(timeout_s=max(deadline - time.monotonic(), _BETWEEN_S))
            raise MoveError(f"{self.name}: QEMU does not end")

    @contextlib.contextmanager
    def _machine(self) -> Iterator[Machine]:
        """Connect to the monitor, for the time of the block."""
        try:
            with self._connect() as qmp:
                yield Machine(qmp)
        except QmpClosedError as error:
            raise QemuGoneError(f"{self.name}: its QEMU has ended: {error}") from error

    def _await(
        self, is_over: Callable[[Machine, Migration], bool], timeout_s: float, what: str
    ) -> Migration:
        """Look at the migration until something is so. Between looks other clients get the
        monitor.

        :raises MoveError: if it is not in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with self._machine() as machine:
                let_go = min(time.monotonic() + _HOLD_S, deadline)
                while True:
                    machine.qmp.drop_events()
                    found = Migration.read(machine.qmp)
                    if is_over(machine, found):
                        return found
                    if time.monotonic() >= let_go:
                        break
                    with contextlib.suppress(QmpTimeoutError):
                        machine.qmp.next_event(timeout_s=_LOOK_S)
            if time.monotonic() >= deadline:
                text = f"{self.name}: {what} within {timeout_s:g} s: it is {found.state}"
                raise MoveError(text)
            time.sleep(_BETWEEN_S)

    def _set_up(
        self,
        machine: Machine,
        capabilities: frozenset[str],
        endpoint: str,
        bitmaps: Mapping[str, Sequence[str]],
        **parameters: Any,
    ) -> None:
        """Have QEMU use these capabilities and no others, the key of this move, and names of disks
        that both sides know."""
        qmp = machine.qmp
        known = machine.list_of("query-migrate-capabilities")
        names = [str(one.get("capability")) for one in known]
        if missing := capabilities.difference(names):
            raise MoveError(f"{self.name}: this QEMU is too old: it has no {min(missing)}")
        rows = [{"capability": name, "state": name in capabilities} for name in names]
        nodes = _image_nodes(machine, bitmaps)
        mapping = [
            {
                "node-name": nodes[device_id],
                "alias": device_id,
                "bitmaps": [{"name": name, "alias": name} for name in names_of_it],
            }
            for device_id, names_of_it in bitmaps.items()
            if names_of_it
        ]
        # It can't be exchanged while the parameters name it.
        qmp.execute("migrate-set-parameters", {"tls-creds": ""})
        machine.remove("object-del", {"id": _TLS_ID})
        tls = {}
        if self._key:
            qmp.execute("object-add", {"id": _TLS_ID, **self._key.credentials(endpoint)})
            tls = {"tls-creds": _TLS_ID, "tls-hostname": self.name}
        qmp.execute("migrate-set-capabilities", {"capabilities": rows})
        parameters = {**parameters, **tls, "block-bitmap-mapping": mapping}
        qmp.execute("migrate-set-parameters", parameters)

    def _tls(self) -> dict[str, str]:
        """The argument of a command that makes a connection of its own for disks."""
        return {"tls-creds": _TLS_ID} if self._key else {}

    def _clear_key(self, machine: Machine) -> None:
        """Have QEMU forget the key of this move."""
        machine.qmp.execute("migrate-set-parameters", {"tls-creds": ""})
        machine.remove("object-del", {"id": _TLS_ID})


def bitmaps_of(machine: Machine, device_ids: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The names of the dirty bitmaps of disks, by device id. Damaged ones are no use to anyone."""
    graph = BlockGraph.read(machine)
    found = {}
    for device_id, node in _image_nodes(machine, device_ids).items():
        rows = graph.nodes[node].get("dirty-bitmaps") or []
        names = [
            str(one["name"]) for one in rows if one.get("name") and not one.get("inconsistent")
        ]
        found[device_id] = tuple(names)
    return found


def _image_nodes(machine: Machine, device_ids: Iterable[str]) -> dict[str, str]:
    """The nodes of disks' images: those of jobs may be above them."""
    if not (tops := {device_id: top_node(machine, device_id) for device_id in device_ids}):
        return {}
    graph = BlockGraph.read(machine)
    return {device_id: graph.chain(top)[0].node for device_id, top in tops.items()}


def hand_over_socket(machine: Machine, name: str, connection: socket.socket) -> None:
    """Give QEMU a socket, under a name."""
    machine.qmp.execute("getfd", {"fdname": name}, descriptors=[connection.fileno()])


@contextlib.contextmanager
def given_memory_socket(machine: Machine, connection: socket.socket) -> Iterator[str]:
    """Give QEMU the connection for a guest's memory, for a command in the block, at whose end it is
    closed here. Yields where QEMU has it.

    With a socket that blocks, QEMU stands still until the other side has answered to TLS. It has
    any socket block that it receives, and shares that flag with whoever has it, too.
    """
    with connection:
        hand_over_socket(machine, _MEMORY_FD, connection)
        connection.setblocking(False)
        try:
            yield f"fd:{_MEMORY_FD}"
        except QmpCommandError:
            take_back_socket(machine, _MEMORY_FD)
            raise


def take_back_socket(machine: Machine, name: str) -> None:
    """Have QEMU close a socket that it did not come to use."""
    with contextlib.suppress(QmpCommandError):
        machine.qmp.execute("closefd", {"fdname": name})
