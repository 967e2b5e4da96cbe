"""Journal messages of hotplug; brine-hotplug.catalog explains each.

The records have the fields ``BRINE_INSTANCE=``, ``BRINE_EVENT=`` and, as far as it is known,
``BRINE_DEVICE=`` (QEMU's id), ``BRINE_MAC=``, ``BRINE_SERIAL=``, ``BRINE_TAP=``, ``BRINE_ACTION=``,
``BRINE_NIC=`` and ``BRINE_REASON=``. Without a journal they are dropped.
"""

from __future__ import annotations

import logging

from brine.common import journal
from brine.common.errors import printable
from brine.common.message import NOTICE, Message
from brine.vm.address import DeviceKind

_PLUGGED, _UNPLUGGED = "{device} plugged in", "{device} unplugged"
PLUGGED = {
    DeviceKind.NIC: Message("2b4843f6149f44cc92b64f4df1121e6b", "nic-plugged", NOTICE, _PLUGGED),
    DeviceKind.DISK: Message("92fe5bbf4eab4433b9c8c7e6266e803e", "disk-plugged", NOTICE, _PLUGGED),
}
UNPLUGGED = {
    DeviceKind.NIC: Message(
        "cf7bbbabd63b466a88c4c5ba22cb5337", "nic-unplugged", NOTICE, _UNPLUGGED
    ),
    DeviceKind.DISK: Message(
        "31f171b2bfd24bfeb5364878cd708d7f", "disk-unplugged", NOTICE, _UNPLUGGED
    ),
}
# The caller also gets the error.
REFUSED = Message(
    "5ea39ff618ea46cc961baefdc026bb01",
    "refused-by-guest",
    NOTICE,
    "{device} refused by the guest: {reason}",
)
FINISHED = Message(
    "1ab6bcb5f8b944fdbe17dba40249bf4c",
    "interrupted-finished",
    NOTICE,
    "{device}: {action} was interrupted, and is finished now",
)
UNDONE = Message(
    "6a35d871357b44e0a43db623b1a9a6af",
    "interrupted-undone",
    NOTICE,
    "{device}: {action} was interrupted, and is undone now",
)
LEFTOVER_REMOVED = Message("c8c9b1c82bd14024b11383ccf7077da3", "leftover-removed", NOTICE)

log = logging.getLogger(__name__)


def tell(
    message: Message, instance: str, kind: DeviceKind, device_id: str, **known: str | None
) -> None:
    """Report what happened to a device of a running VM.

    :param device_id: of QEMU.
    :param known: ``mac`` and ``tap`` of a NIC, ``serial`` of a disk, as the guest sees it;
        ``reason``, and the interrupted ``action``: ``add``, ``remove`` or ``modify``.
    """
    fields = {f"BRINE_{key.upper()}": value for key, value in known.items() if value}
    words = {"MAC": known.get("mac"), "serial": known.get("serial"), "tap": known.get("tap")}
    more = ", ".join(f"{word} {printable(value)}" for word, value in words.items() if value)
    device = f"{'NIC' if kind is DeviceKind.NIC else 'disk'} {device_id}"
    text = message.text.format(device=f"{device} ({more})" if more else device, **known)
    journal.tell(log, message, text, instance=instance, BRINE_DEVICE=device_id, **fields)


def tell_leftover_removed(instance: str, nic: str, tap: str, what: str, reason: str) -> None:
    """Report that a leftover of a VM was removed.

    :param nic: its UUID or index.
    :param what: the leftover: ``tap``, ``record``, ``port``.
    """
    fields = {"BRINE_TAP": tap, "BRINE_NIC": nic, "BRINE_REASON": reason}
    text = f"removed {what} {tap} of NIC {printable(nic)}: {reason}"
    journal.tell(log, LEFTOVER_REMOVED, text, instance=instance, **fields)
