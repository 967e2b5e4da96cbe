"""Devices that an administrator has added by hand. A declaration, which is made by a program from
pillar or the cluster's configuration, leaves them where they are; an operator's own spec does not.

A declaration that names such a device, by its UUID, MAC address, path or name, has it from then on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from brine.instance.kvm.runtime_devices import KEYS, DevicesNow, as_asked
from brine.vm.disk import Disk, Interface
from brine.vm.identities import rows_in
from brine.vm.nic import Nic
from brine.vm.spec import Spec, SpecError, to_json
from brine.vm.values import tidy_path

Device = Disk | Nic


@dataclass(frozen=True, slots=True)
class DevicesByHand:
    """The devices of an instance that were added by hand.

    :param kept: by the key of the spec: those of its spec, as they are now, that were not taken out
        by hand since.
    :param plugged: those that only its QEMU has, which its next start would add to the spec if that
        has the same devices then.
    """

    kept: Mapping[str, Sequence[Device]]
    plugged: Mapping[str, Sequence[Device]]

    @classmethod
    def of(cls, before: Spec, now: DevicesNow | None) -> DevicesByHand:
        """Those of an instance.

        :param before: its spec.
        :param now: what it was started with last, and has by now; None if that is not known.
        """
        kept = {key: list(_kept(getattr(before, key), now, key)) for key in KEYS}
        plugged = {key: list(_plugged(getattr(before, key), now, key)) for key in KEYS}
        return cls(kept, plugged)


def _kept(devices: Sequence[Device], now: DevicesNow | None, key: str) -> Iterator[Device]:
    started = _by_uuid(now.declared, key) if now else {}
    there = _by_uuid(now.now, key) if now else {}
    for one in devices:
        if not one.by_hand or (one.uuid in started and one.uuid not in there):
            continue
        was, by_now = started.get(one.uuid), there.get(one.uuid)
        if isinstance(by_now, Nic) and was and as_asked(was) == as_asked(one):
            one = replace(by_now, by_hand=True)  # it may have been changed by hand
        yield replace(one, slot=-1)  # a definition keeps that of the spec


def _plugged(devices: Sequence[Device], now: DevicesNow | None, key: str) -> Iterator[Device]:
    if now:
        known = {one.uuid for one in devices} | _by_uuid(now.declared, key).keys()
        yield from (one for uuid, one in _by_uuid(now.now, key).items() if uuid not in known)


def _by_uuid(spec: Spec, key: str) -> dict[str, Device]:
    return {one.uuid: one for one in getattr(spec, key)}


def unnamed(
    data: dict[str, Any], devices: Mapping[str, Sequence[Device]]
) -> dict[str, list[Device]]:
    """The devices that a declaration, as people write it, does not name."""
    return {
        key: [one for one in more if not any(_names(row, one) for row in rows_in(data, key))]
        for key, more in devices.items()
    }


def with_devices(data: dict[str, Any], devices: Mapping[str, Sequence[Device]]) -> dict[str, Any]:
    """A declaration with further devices after its own."""
    found = dict(data)
    for key, more in devices.items():
        given = data.get(key, [])
        if more and isinstance(given, list):  # or it is no spec, which is told later
            found[key] = [*given, *map(to_json, more)]
    return found


def _names(row: Mapping[str, Any], device: Device) -> bool:
    """Whether a row of a declaration names a device."""
    keys = ("uuid", "name") if isinstance(device, Disk) else ("uuid", "mac")
    given = {key: str(row.get(key) or "").lower() for key in keys}
    if any(value and value == getattr(device, key) for key, value in given.items()):
        return True
    path = row.get("path")
    if not (isinstance(device, Disk) and isinstance(path, str)):
        return False
    below = [layer.path for layer in device.layers()] if device.unit else []
    return tidy_path(path) in (device.path, *below)


def clear_of_their_slots(spec: Spec, added: Collection[str], data: dict[str, Any]) -> Spec:
    """A spec in which no declared device is in the slot of one that was added by hand, whose guest
    must find it there again: a slot that a device had before, and that is taken by now, is none.

    :param spec: with both.
    :param added: the UUIDs of the latter.
    :param data: the declaration.
    :raises SpecError: which slot is declared, and taken.
    """
    taken = {
        (_bus(one), one.slot): one
        for key in KEYS
        for one in getattr(spec, key)
        if one.uuid in added and one.slot >= 0
    }
    found: dict[str, Any] = {}
    for key in KEYS:
        rows, devices = list(rows_in(data, key)), list(getattr(spec, key))
        for index, one in enumerate(devices):
            other = taken.get((_bus(one), one.slot))
            if not other or one.uuid in added:
                continue
            if index < len(rows) and rows[index].get("slot", -1) == one.slot:
                what = f"disk {other.path}" if isinstance(other, Disk) else f"NIC {other.mac}"
                text = f"{one.slot} is that of the {what}, which was added by hand"
                where = f"/{key}/{index}/slot"
                raise SpecError(text, where=where, hint="leave it out, or give another one")
            devices[index] = replace(one, slot=-1)
            found[key] = tuple(devices)
    return replace(spec, **found) if found else spec


def _bus(device: Device) -> str:
    if isinstance(device, Nic) or device.interface == Interface.VIRTIO:
        return "pci"
    return device.interface
