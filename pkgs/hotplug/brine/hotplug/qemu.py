"""A running QEMU: its monitor, its properties, and the commands that change its devices."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from brine.common.errors import BrineError, printable
from brine.common.qmp.client import QmpClient
from brine.common.qmp.wire import QmpCommandError, QmpProtocolError, QmpTimeoutError
from brine.hotplug.errors import HotplugError, RefusedByGuestError
from brine.vm import slots
from brine.vm.address import Bus, DeviceKind, DeviceName
from brine.vm.peer import stranger_check
from brine.vm.slots import Slot

_PERIPHERAL = "/machine/peripheral"  # the QOM path of the devices with an id
_NAMELESS = "/machine/peripheral-anon"
_FOLDERS = (_PERIPHERAL, _NAMELESS, "/machine/unattached")
_TYPES = {
    DeviceKind.NIC: re.compile(r".*(net|e1000|rtl8139|ne2k|pcnet|i82[58]|igb|tulip|sungem)"),
    DeviceKind.DISK: re.compile(r"(virtio-blk|scsi-|ide-|nvme|usb-storage)"),
}
_ROOT_PORTS = ("pcie-root-port", "ioh3420", "xio3130-downstream")
_SCSI_CONTROLLER = re.compile(r"virtio-scsi-pci(-(non-)?transitional)?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_LONGEST_VALUE = 1024
_CHILD = re.compile(r"child<(?P<type>[^<>]+)>")
_NOT_FOUND = re.compile(r"not found|[Ff]ailed to find|[Cc]annot find")
_LET_GO_S = 5.0
_PAUSE_S = 0.02


class FdSet(NamedTuple):
    """A descriptor of a set that QEMU was given, with its text: *disk* is JSON."""

    number: int
    device_id: str
    uuid: str
    disk: str

    def path(self) -> str | None:
        """The path of the disk; None if another program gave QEMU the descriptor."""
        try:
            path = json.loads(self.disk)["path"]
        except (ValueError, TypeError, KeyError):
            return None
        return printable(path) if isinstance(path, str) else None


class Machine:
    """The machine behind a QMP connection. Answers of its QEMU are checked."""

    def __init__(self, qmp: QmpClient) -> None:
        self.qmp = qmp

    def vm_name(self) -> str:
        """The name of the VM, which is the name of its socket."""
        name = self.qmp.path.stem
        if not _NAME.fullmatch(name):
            raise QmpProtocolError(f"{self.qmp.path}: no VM can be called {printable(name)!r}")
        answer = self.qmp.execute("query-name")
        said = answer.get("name", name) if type(answer) is dict else None
        if said != name:
            raise QmpProtocolError(
                f"{self.qmp.path}: QEMU calls itself {said!r:.80}, and not {name}",
                hint="a QMP socket has its VM's name, with .qmp after it",
            )
        return name

    def list_of(self, command: str, arguments: dict[str, Any] | None = None) -> list[Any]:
        """The answer of a command that lists objects."""
        answer = self.qmp.execute(command, arguments)
        if type(answer) is not list or any(type(item) is not dict for item in answer):
            raise QmpProtocolError(f"{self.qmp.path}: no answer to {command}: {answer!r:.60}")
        return answer

    def devices(self, folder: str = _PERIPHERAL) -> dict[str, str]:
        """The types of the devices with an id, by id."""
        found = {}
        for item in self.list_of("qom-list", {"path": folder}):
            if match := _CHILD.fullmatch(str(item.get("type"))):
                found[str(item.get("name"))] = match["type"]
        return found

    def has_device(self, device_id: str) -> bool:
        return device_id in self.devices()

    def property(self, device_id: str, name: str, folder: str = _PERIPHERAL) -> Any:
        """A property of a device, such as its serial: a string of some length, or a number."""
        value = self.qmp.execute("qom-get", {"path": f"{folder}/{device_id}", "property": name})
        if type(value) not in (str, int, bool) or len(str(value)) > _LONGEST_VALUE:
            raise QmpProtocolError(f"{self.qmp.path}: no {name} of {device_id}: {value!r:.60}")
        return value

    def fdsets(self) -> list[FdSet]:
        """All descriptors that QEMU has in sets, of Brine and of other programs."""
        try:
            answer = self.list_of("query-fdsets")
        except QmpCommandError as error:
            if error.error_class != "CommandNotFound":
                raise
            return []  # this QEMU has none
        found = []
        try:
            for fdset in answer:
                for each in fdset["fds"]:
                    device_id, _, rest = str(each.get("opaque", "")).partition(" ")
                    uuid, _, text = rest.partition(" ")
                    found.append(FdSet(int(fdset["fdset-id"]), device_id, printable(uuid), text))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise QmpProtocolError(f"{self.qmp.path}: no answer to query-fdsets") from error
        return found

    def was_started_with(self, kind: DeviceKind, reference: str) -> bool:
        """Whether the VM has a device of that id, MAC or serial that Brine did not plug in."""
        for folder in _FOLDERS:
            for name, type_ in self.devices(folder).items():
                ours = DeviceName.parse(name)
                if not _TYPES[kind].match(type_) or (ours and ours.kind is kind):
                    continue
                try:
                    value = str(self.property(name, kind.key, folder))
                except QmpCommandError:
                    value = ""  # not every type has it
                if reference.lower() in (name.lower(), value.lower()):
                    return True
        return False

    def slot_of(self, device_id: str, name: DeviceName) -> Slot:
        """The slot of a device, whose number is in its id."""
        bus = self._bus_of(device_id)
        if name.bus is Bus.SCSI:
            return slots.lun_slot(bus, name.slot)
        return slots.pci_slot(name.slot) if bus == "pci.0" else slots.port_slot(bus, name.slot)

    def free_slot(self, *, reserved: int) -> Slot:
        """A free slot for a device on PCI: of a q35 machine, a root port."""
        if "q35" in str(self.qmp.execute("qom-get", {"path": "/machine", "property": "type"})):
            return slots.free_root_port(self._root_ports())
        buses = self.list_of("query-pci")
        try:
            return slots.free_pci_slot(buses, reserved=reserved)
        except (KeyError, TypeError) as error:
            raise QmpProtocolError(f"{self.qmp.path}: no answer to query-pci") from error

    def free_lun(self, controller: str | None) -> Slot:
        """A free LUN of a virtio-scsi controller; None is the first."""
        known = [name for name, kind in self.devices().items() if _SCSI_CONTROLLER.fullmatch(kind)]
        controller = controller or next(iter(known), None)
        if controller not in known:
            missing = f"there is no virtio-scsi controller {controller or 'with an id'}"
            hint = "start the VM with one: -device virtio-scsi-pci,id=scsi0"
            raise HotplugError(missing, hint=hint)
        bus = f"{controller}.0"
        taken = []
        for folder in (_PERIPHERAL, _NAMELESS):
            for name, kind in self.devices(folder).items():
                if kind.startswith("scsi-") and self._bus_of(name, folder) == bus:
                    taken.append(self._number(self.property(name, "lun", folder)))
        return slots.free_lun(bus, taken)

    def _bus_of(self, device_id: str, folder: str = _PERIPHERAL) -> str:
        return str(self.property(device_id, "parent_bus", folder)).rpartition("/")[2]

    def _root_ports(self) -> dict[str, tuple[int, bool]]:
        """The PCIe root ports with an id, see :func:`brine.vm.slots.free_root_port`.

        query-pci shows the device in a port only after the guest's firmware has configured it.
        """
        ports = {}
        for name, kind in self.devices().items():
            if kind in _ROOT_PORTS:
                bus = self.list_of("qom-list", {"path": f"{_PERIPHERAL}/{name}/{name}"})
                taken = any(str(item.get("name")).startswith("child[") for item in bus)
                # A number with slot and function, or a hexadecimal text such as 02.0 or 2.
                place = self.property(name, "addr")
                is_number = isinstance(place, int)
                slot = place >> 3 if is_number else self._number(str(place).split(".")[0], 16)
                ports[name] = slot, taken
        return ports

    def _number(self, value: Any, base: int = 10) -> int:
        try:
            return int(str(value), base)
        except ValueError:
            raise QmpProtocolError(f"{self.qmp.path}: no number: {value!r:.60}") from None

    def remove(self, command: str, arguments: dict[str, Any]) -> None:
        """Give a command that removes something, which may already be gone or just be going."""
        deadline = time.monotonic() + _LET_GO_S
        while True:
            try:
                self.qmp.execute(command, arguments)
                return
            except QmpCommandError as error:
                if error.error_class == "DeviceNotFound" or _NOT_FOUND.search(error.description):
                    return
                if "in use" not in error.description or time.monotonic() > deadline:
                    raise
            time.sleep(_PAUSE_S)

    def try_execute(self, command: str, arguments: dict[str, Any]) -> None:
        """Give a command that undoes something, which QEMU may refuse."""
        with contextlib.suppress(QmpCommandError):
            self.qmp.execute(command, arguments)


# Unplugging a device: the guest is asked, and has to agree.

_ASK_AGAIN_S = (0.5, 1.0, 2.0)  # and so on
_LOOK_S = 0.5
_TRANSIENT = ("busy", "in the process of unplug")


def unplug_device(machine: Machine, device_id: str, *, timeout_s: float) -> None:
    """Remove a device, and return when it is gone; at once if there is none.

    QEMU answers ``device_del`` before the guest does. The event of the removal may come before that
    answer, after it, instead of it, or not on this connection at all: it only says when to look. A
    guest that has just got the device may be too busy to see the request, so the request is
    repeated. (QEMU refuses a repetition that the guest would take as a cancellation.)

    :raises RefusedByGuestError: if the guest refused, or did nothing in time. The device is still
        completely plugged in.
    :raises brine.common.qmp.client.QmpError: if QEMU refused, or the connection fails.
    """
    qmp = machine.qmp
    deadline = time.monotonic() + timeout_s
    pauses = itertools.chain(_ASK_AGAIN_S, itertools.repeat(_ASK_AGAIN_S[-1]))
    ask_again = time.monotonic()
    asked: int | None = None
    is_first = True
    while machine.has_device(device_id):
        now = time.monotonic()
        if now >= deadline:
            raise RefusedByGuestError(device_id, _why(machine, timeout_s))
        if asked is not None and _is_answered(qmp, asked):
            asked = None
        if now >= ask_again and asked is None:
            ask_again = now + next(pauses)
            if is_first:
                # Events up to now, with the answer above, belong to earlier requests.
                qmp.drop_events()
                is_first = False
            asked = qmp.begin("device_del", {"id": device_id})
        wait_s = min(_LOOK_S, max(ask_again - now, 0.001), deadline - now)
        _hear(qmp, device_id, wait_s, asked)


def _is_answered(qmp: QmpClient, asked: int) -> bool:
    """Whether QEMU has accepted the request, or refused it for now."""
    try:
        return qmp.answer(asked, "device_del") is not None
    except QmpCommandError as error:
        is_gone = error.error_class == "DeviceNotFound"
        if not is_gone and not any(text in error.description for text in _TRANSIENT):
            raise
        return True


def _hear(qmp: QmpClient, device_id: str, timeout_s: float, asked: int | None) -> None:
    """Wait for an event of the device, or for QEMU's answer, until the timeout."""
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(QmpTimeoutError):
        while event := qmp.next_event(timeout_s=deadline - time.monotonic(), or_answer=asked):
            if event.data.get("device") == device_id:
                if event.name == "DEVICE_UNPLUG_GUEST_ERROR":
                    raise RefusedByGuestError(device_id, "it said no")
                return


def _why(machine: Machine, timeout_s: float) -> str:
    try:
        status = machine.qmp.execute("query-status")
    except QmpCommandError:
        status = {}
    if type(status) is dict and status and not status.get("running"):
        return f"the VM does not run ({printable(str(status.get('status')))})"
    return f"it did nothing within {timeout_s:g} s"


# The clients of a VM's monitor. It serves one at a time, and does not say which.


@contextlib.contextmanager
def monitor(
    qmp_path: Path,
    *,
    timeout_s: float,
    limit_s: float,
    through: Callable[[socket.socket], socket.socket] | None = None,
) -> Iterator[QmpClient]:
    """Connect to a VM's monitor, for the time of the block; see :meth:`QmpClient.connect`.

    :param timeout_s: for the connection, and for each answer.
    :raises HotplugError: if another client holds the monitor.
    """
    client = QmpClient.connect(
        qmp_path,
        timeout_s=timeout_s,
        limit_s=limit_s,
        check_peer=stranger_check(qmp_path),
        through=through,
    )
    with contextlib.ExitStack() as stack:
        try:
            qmp = stack.enter_context(client)
        except QmpTimeoutError as error:
            raise _silence_of(qmp_path, timeout_s) from error
        yield qmp


def _silence_of(qmp_path: Path, timeout_s: float) -> BrineError:
    """The error of a monitor that did not answer within the timeout."""
    if holders := _monitor_holders(qmp_path):
        return HotplugError(
            f"{qmp_path}: the monitor is in use, still after {timeout_s:g} s: {', '.join(holders)}",
            hint="it serves one client at a time: end that client, or use another socket",
        )
    # A process in another network namespace, such as the KVM daemon, is not visible here.
    if qmp_path.suffix == ".kvmd":
        hint = f"that is the KVM daemon's; tools use {qmp_path.with_suffix('.qmp').name} beside it"
    else:
        hint = "no process is seen at its monitor: see whether QEMU hangs or is stopped"
    text = f"{qmp_path}: QEMU does not answer within {timeout_s:g} s"
    return QmpTimeoutError(text, hint=hint)


def _monitor_holders(qmp_path: Path) -> list[str]:
    """The other processes that are connected to a socket, as far as this user may see them, such
    as ``process 123 (socat)``."""
    clients = _clients_of(qmp_path)
    found = []
    for process in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):
        folder = Path(f"/proc/{process}")
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            if process != os.getpid() and clients & set(map(_target, (folder / "fd").iterdir())):
                command = (folder / "comm").read_text().strip()
                found.append(f"process {process} ({command})")
    return found


def _clients_of(path: Path) -> set[str]:
    """Clients' sockets, as /proc shows them. Source: :manpage:`sock_diag(7)`."""
    # It takes long to load, and only a silent monitor needs it.
    from pyroute2 import DiagSocket
    from pyroute2.netlink.diag import UDIAG_SHOW_PEER, UDIAG_SHOW_VFS

    inode, found = os.stat(path).st_ino & 0xFFFFFFFF, set()
    with DiagSocket() as kernel:
        kernel.bind()
        show = UDIAG_SHOW_PEER | UDIAG_SHOW_VFS
        for row in kernel.get_sock_stats(family=socket.AF_UNIX, show=show):
            peer, file = row.get_attr("UNIX_DIAG_PEER"), row.get_attr("UNIX_DIAG_VFS")
            if peer and file and file["udiag_vfs_ino"] == inode:
                found.add(f"socket:[{peer}]")
    return found


def _target(link: Path) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(link)
    return ""
