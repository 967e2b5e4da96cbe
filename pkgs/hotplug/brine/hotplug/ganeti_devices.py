"""Devices as Ganeti's runtime files have them: it refuses a file with keys that it does not know.

Source: ``FromDict`` of Ganeti's ``objects.py``, and what its KVM hypervisor keeps in ``hvinfo``.
"""

from __future__ import annotations

import json
from typing import Any

from brine.hotplug.device_names import Kind, uuid_of_mac

Json = dict[str, Any]


def to_ganeti(kind: Kind, device: Json, *, index: int) -> Json:
    """A device of ours in Ganeti's words.

    :param index: its place among those of its kind, from 0.
    """
    place: Json = {key: device[key] for key in ("pci", "hvinfo") if key in device}
    inner = _nic(device) if kind is Kind.NIC else _disk(device, index)
    return {"uuid": device["uuid"], "name": None, **inner, **place}


def _nic(device: Json) -> Json:
    known = ("mac", "ip", "nicparams")
    return {**{key: device.get(key) for key in known}, "network": None, "netinfo": None}


def _disk(device: Json, index: int) -> Json:
    is_device = device["path"].startswith("/dev/")
    return {
        "dev_type": "blockdev" if is_device else "file",
        "logical_id": ["manual" if is_device else "loop", device["path"]],
        "children": [],
        "nodes": [],
        "iv_name": f"disk/{index}",
        "size": device.get("size_mib", 0),
        "mode": "ro" if device.get("read_only") else "rw",
        "params": {},
        "spindles": None,
    }


def with_uuid(kind: Kind, device: Json) -> Json:
    """A device of Ganeti's with a UUID. Before 2.8 they had none; Ganeti, too, makes some up.

    It is the same each time, and a NIC's that which :program:`brine nic` gives to its MAC.

    :raises TypeError: or AttributeError, if it is no device.
    """
    if device.get("uuid") is not None:
        return device
    if kind is Kind.NIC and isinstance(device.get("mac"), str):
        return {**device, "uuid": uuid_of_mac(device["mac"])}
    told = json.dumps(device.get("logical_id") or device, sort_keys=True)
    import uuid  # takes long to load, and only old files need it

    return {**device, "uuid": str(uuid.uuid5(uuid.NAMESPACE_OID, told))}


def path_of_disk(device: Json) -> str | None:
    """The path of a disk that :func:`to_ganeti` made; None of another one."""
    match device.get("logical_id"):
        case ["manual" | "loop", str(path)]:
            return path
    return None
