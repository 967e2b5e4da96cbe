"""``--no-hotplug``: the runtime file changes, for the VM's next start, and nothing else."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from brine.common.errors import UsageError, printable
from brine.hotplug.address import DeviceKind, is_like_ours, new_mac, uuid_of_mac
from brine.hotplug.nic import Nic
from brine.hotplug.runtime_file import Json, Runtime, RuntimeFileError, change
from brine.hotplug.target import runtime_file


def record_addition(
    arguments: argparse.Namespace, kind: DeviceKind, device: Json, *, link: str | None = None
) -> None:
    """Enter a device, for the next start.

    :param link: of a disk, what it is opened as.
    :raises UsageError: if there is no runtime file.
    :raises RuntimeFileError: if it can't be changed, or the UUID or MAC is another device's there.
    """
    uuid = str(device["uuid"])

    def how(runtime: Runtime) -> Runtime:
        nonlocal uuid
        wanted = _as_it_is_there(runtime, device) if kind is DeviceKind.NIC else device
        uuid = str(wanted["uuid"])
        return runtime.with_device(kind, wanted, link=link)

    is_changed = _change(arguments, how)
    _tell(arguments, uuid, is_changed, f"{kind} {uuid} is there at the next start")


def record_nic_change(
    arguments: argparse.Namespace, changed: Callable[[Nic], Nic], *, instance: str
) -> None:
    """Change the NIC that the arguments name, for the next start.

    :param instance: whose NIC it is, where the file does not say.
    :param changed: makes of a NIC as it is recorded the one that is wanted.
    :raises UsageError: if there is no runtime file, or no such NIC in it.
    :raises RuntimeFileError: if it can't be changed, or the new MAC is another NIC's there.
    """
    uuid = arguments.device

    def how(runtime: Runtime) -> Runtime:
        nonlocal uuid
        found = _the_one(runtime, DeviceKind.NIC, arguments.device)
        if found is None:
            known = _known(runtime, DeviceKind.NIC)
            raise UsageError(
                f"no nic is known as {arguments.device}", hint=f"recorded are: {known}"
            )
        uuid = str(found["uuid"])
        before = _recorded_nic(runtime, found, instance)
        nic = changed(before)
        if nic == before:
            return runtime
        for other in runtime.known_as(DeviceKind.NIC, nic.mac) if nic.mac else ():
            if other["uuid"] != uuid:
                text = f"{nic.mac} is the MAC address of NIC {other['uuid']} there"
                raise RuntimeFileError(runtime.file, text, hint="choose another --mac")
        return runtime.with_device(DeviceKind.NIC, nic.to_json())

    is_changed = _change(arguments, how)
    _tell(arguments, uuid, is_changed, f"nic {uuid} is changed at the next start")


def record_removal(arguments: argparse.Namespace, kind: DeviceKind) -> None:
    """Take out the device that the arguments name, for the next start.

    :raises UsageError: if there is no runtime file, or nothing there is, or was, known as that.
    :raises RuntimeFileError: if it can't be changed.
    """
    reference = arguments.device
    uuid = reference

    def how(runtime: Runtime) -> Runtime:
        nonlocal uuid
        found = _the_one(runtime, kind, reference)
        if not found and not is_like_ours(kind, reference):
            known = _known(runtime, kind)
            raise UsageError(f"no {kind} is known as {reference}", hint=f"recorded are: {known}")
        if not found:
            return runtime
        uuid = found["uuid"]
        return runtime.without_device(kind, uuid)

    is_changed = _change(arguments, how)
    _tell(arguments, uuid, is_changed, f"{kind} {uuid} is not there at the next start")


def _the_one(runtime: Runtime, kind: DeviceKind, reference: str) -> Json | None:
    """The device that is known as that, if there is one."""
    found = runtime.known_as(kind, reference)
    if len(found) > 1:
        uuids = ", ".join(one["uuid"] for one in found)
        raise UsageError(f"several are known as {reference}", hint=f"choose one of {uuids}")
    return found[0] if found else None


def _known(runtime: Runtime, kind: DeviceKind) -> str:
    return ", ".join(one["uuid"] for one in runtime.devices[kind]) or "none"


def _recorded_nic(runtime: Runtime, nic: Json, instance: str) -> Nic:
    """A NIC as a file of any form has it; what Ganeti's do not have is as ``nic add`` makes it."""
    params = nic.get("nicparams") or {}
    ips = nic.get("ips") or ([nic["ip"]] if nic.get("ip") else [])
    whole = {
        "model": "virtio",
        "mtu": None,
        "queues": 1,
        "vhost": False,
        "instance": instance,
        "index": None,
        "tags": [],
        "network_variables": {},
        **nic,
        "ips": ips,
        "nicparams": {
            "mode": params.get("mode") or "bridged",
            "link": params.get("link") or "",
            "vlan": params.get("vlan") or "",
        },
    }
    try:
        return Nic.from_json(whole)
    except (KeyError, TypeError, ValueError) as error:
        hint = "record its removal, and then another NIC with the same --uuid"
        text = f"NIC {nic['uuid']} is not as Brine records one: {error}"
        raise RuntimeFileError(runtime.file, text, hint=hint) from error


def _as_it_is_there(runtime: Runtime, nic: Json) -> Json:
    """A NIC with the UUID that its MAC has in the file, unless it was given one, and the MAC that
    its UUID has."""
    if not nic["mac"]:
        there = runtime.find(DeviceKind.NIC, nic["uuid"]) or {}
        return replace(Nic.from_json(nic), mac=str(there.get("mac") or new_mac())).to_json()
    mac = str(nic["mac"])
    for known in runtime.known_as(DeviceKind.NIC, mac):
        if known["uuid"] == nic["uuid"]:
            continue
        if nic["uuid"] != uuid_of_mac(mac):
            hint = "choose another --mac, or leave out --uuid"
            text = f"{mac} is the MAC address of NIC {known['uuid']} there"
            raise RuntimeFileError(runtime.file, text, hint=hint)
        return Nic.from_json({**nic, "uuid": known["uuid"]}).to_json()
    return nic


def _change(arguments: argparse.Namespace, how: Callable[[Runtime], Runtime]) -> bool:
    file = runtime_file(arguments)
    if file is None:
        hint = "name the VM's runtime file with --runtime"
        raise UsageError("--no-hotplug changes a runtime file, and none is named", hint=hint)
    if arguments.dry_run:
        return _would_change(file, how)
    return change(file, how, timeout_s=arguments.lock_timeout)


def _would_change(file: Path, how: Callable[[Runtime], Runtime]) -> bool:
    old = Runtime.load(file)
    return how(old) != old


def _tell(arguments: argparse.Namespace, uuid: str, is_changed: bool, said: str) -> None:
    dry_run = arguments.dry_run
    if arguments.json:
        result: dict[str, Any] = {"uuid": uuid, "recorded": not dry_run, "changed": is_changed}
        print(json.dumps({**result, "dry_run": dry_run}, indent=2))
        return
    word = "would be recorded" if dry_run else "recorded"
    print(f"{word if is_changed else 'unchanged'}: {printable(said)}")
