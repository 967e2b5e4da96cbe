"""Devices as Ganeti's runtime files have them: it refuses a file with keys that it does not know.

Source: ``FromDict`` of Ganeti's ``objects.py``, and what its KVM hypervisor keeps in ``hvinfo``.
"""

from __future__ import annotations

from typing import Any

from brine.hotplug.device_names import Kind

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
