"""Journal messages of hotplug; brine-hotplug.catalog explains each.

The records have the fields ``BRINE_INSTANCE=``, ``BRINE_EVENT=`` and, as far as it is known,
``BRINE_DEVICE=`` (QEMU's id), ``BRINE_MAC=``, ``BRINE_SERIAL=``, ``BRINE_TAP=``, ``BRINE_ACTION=``,
``BRINE_NIC=`` and ``BRINE_REASON=``. Without a journal they are dropped.
"""

from __future__ import annotations

import logging

from brine.common.errors import printable
from brine.common.journal import log_command, tell
from brine.common.message import NOTICE, Message
from brine.hotplug.address import DeviceKind

PLUGGED = {
    DeviceKind.NIC: Message("2b4843f6149f44cc92b64f4df1121e6b", "nic-plugged", NOTICE),
    DeviceKind.DISK: Message("92fe5bbf4eab4433b9c8c7e6266e803e", "disk-plugged", NOTICE),
}
UNPLUGGED = {
    DeviceKind.NIC: Message("cf7bbbabd63b466a88c4c5ba22cb5337", "nic-unplugged", NOTICE),
    DeviceKind.DISK: Message("31f171b2bfd24bfeb5364878cd708d7f", "disk-unplugged", NOTICE),
}
# The caller also gets the error.
REFUSED = Message("5ea39ff618ea46cc961baefdc026bb01", "refused-by-guest", NOTICE)
FINISHED = Message("1ab6bcb5f8b944fdbe17dba40249bf4c", "interrupted-finished", NOTICE)
UNDONE = Message("6a35d871357b44e0a43db623b1a9a6af", "interrupted-undone", NOTICE)
LEFTOVER_REMOVED = Message("c8c9b1c82bd14024b11383ccf7077da3", "leftover-removed", NOTICE)

_NAMES = {DeviceKind.NIC: "NIC", DeviceKind.DISK: "disk"}


log = logging.getLogger(__name__)


def log_to_journal() -> None:
    """Send this command's messages to the journal, and warnings also to stderr."""
    log_command("brine")


def tell_plugged(
    instance: str,
    kind: DeviceKind,
    device_id: str,
    *,
    mac: str | None = None,
    serial: str | None = None,
    tap: str | None = None,
) -> None:
    """Report that a device was plugged into a running VM.

    :param instance: the VM's name.
    :param device_id: of QEMU.
    :param mac: of a NIC; so is *tap*, the interface's name.
    :param serial: of a disk, as the guest sees it.
    """
    fields = _fields(device_id, mac=mac, serial=serial, tap=tap)
    tell(log, PLUGGED[kind], f"{_described(kind, fields)} plugged in", instance=instance, **fields)


def tell_unplugged(
    instance: str,
    kind: DeviceKind,
    device_id: str,
    *,
    mac: str | None = None,
    serial: str | None = None,
    tap: str | None = None,
) -> None:
    """Report that a device was unplugged from a running VM; see :func:`tell_plugged`."""
    fields = _fields(device_id, mac=mac, serial=serial, tap=tap)
    text = f"{_described(kind, fields)} unplugged"
    tell(log, UNPLUGGED[kind], text, instance=instance, **fields)


def tell_refused(instance: str, kind: DeviceKind, device_id: str, reason: str) -> None:
    """Report that a guest did not release a device, which is still plugged in."""
    fields = _fields(device_id, reason=reason)
    text = f"{_described(kind, fields)} refused by the guest: {reason}"
    tell(log, REFUSED, text, instance=instance, **fields)


def tell_finished(instance: str, kind: DeviceKind, device_id: str, what: str) -> None:
    """Report that the work of a killed command is complete after all.

    :param what: the work: ``add``, ``remove``, ``modify``.
    """
    fields = _fields(device_id, action=what)
    text = f"{_described(kind, fields)}: {what} was interrupted, and is finished now"
    tell(log, FINISHED, text, instance=instance, **fields)


def tell_undone(instance: str, kind: DeviceKind, device_id: str, what: str) -> None:
    """Report that the work of a killed command was undone.

    :param what: the work: ``add``, ``remove``, ``modify``.
    """
    fields = _fields(device_id, action=what)
    text = f"{_described(kind, fields)}: {what} was interrupted, and is undone now"
    tell(log, UNDONE, text, instance=instance, **fields)


def tell_leftover_removed(instance: str, nic: str, tap: str, what: str, reason: str) -> None:
    """Report that a leftover of a VM was removed.

    :param nic: its UUID or index.
    :param tap: the interface's name.
    :param what: the leftover: ``tap``, ``record``, ``port``.
    """
    fields = {"BRINE_TAP": tap, "BRINE_NIC": nic, "BRINE_REASON": reason}
    text = f"removed {what} {tap} of NIC {printable(nic)}: {reason}"
    tell(log, LEFTOVER_REMOVED, text, instance=instance, **fields)


def _fields(device_id: str, **others: str | None) -> dict[str, str]:
    known = {f"BRINE_{key.upper()}": value for key, value in others.items() if value}
    return {"BRINE_DEVICE": device_id, **known}


def _described(kind: DeviceKind, fields: dict[str, str]) -> str:
    """A device in words."""
    words = {"MAC": "BRINE_MAC", "serial": "BRINE_SERIAL", "tap": "BRINE_TAP"}
    more = [f"{word} {printable(fields[key])}" for word, key in words.items() if key in fields]
    text = f"{_NAMES[kind]} {fields['BRINE_DEVICE']}"
    return f"{text} ({', '.join(more)})" if more else text
