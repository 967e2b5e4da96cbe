"""``--no-hotplug``: the runtime file changes, for the VM's next start, and nothing else."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from brine.common.errors import UsageError
from brine.common.printable import printable
from brine.hotplug.device_names import Kind, new_mac, uuid_of_mac
from brine.hotplug.plug_options import runtime_file
from brine.hotplug.recording import change
from brine.hotplug.references import is_like_ours
from brine.hotplug.runtime import Json, Runtime, RuntimeFileError


def record_addition(
    arguments: argparse.Namespace, kind: Kind, device: Json, *, link: str | None = None
) -> None:
    """Enter a device, for the next start.

    :param link: of a disk, what it is opened as.
    :raises UsageError: if there is no runtime file.
    :raises RuntimeFileError: if it can't be changed, or the UUID or MAC is another device's there.
    """
    uuid = str(device["uuid"])

    def how(runtime: Runtime) -> Runtime:
        nonlocal uuid
        wanted = _as_it_is_there(runtime, device) if kind is Kind.NIC else device
        uuid = str(wanted["uuid"])
        return runtime.with_device(kind, wanted, link=link)

    is_changed = _change(arguments, how)
    _tell(arguments, uuid, is_changed, f"{kind} {uuid} is there at the next start")


def record_removal(arguments: argparse.Namespace, kind: Kind) -> None:
    """Take out the device that the arguments name, for the next start.

    :raises UsageError: if there is no runtime file, or nothing there is, or was, known as that.
    :raises RuntimeFileError: if it can't be changed.
    """
    reference = arguments.device
    uuid = reference

    def how(runtime: Runtime) -> Runtime:
        nonlocal uuid
        found = runtime.known_as(kind, reference)
        if len(found) > 1:
            uuids = ", ".join(one["uuid"] for one in found)
            raise UsageError(f"several are known as {reference}", hint=f"choose one of {uuids}")
        if not found and not is_like_ours(kind, reference):
            known = ", ".join(one["uuid"] for one in runtime.devices[kind]) or "none"
            raise UsageError(f"no {kind} is known as {reference}", hint=f"recorded are: {known}")
        if not found:
            return runtime
        uuid = found[0]["uuid"]
        return runtime.without_device(kind, uuid)

    is_changed = _change(arguments, how)
    _tell(arguments, uuid, is_changed, f"{kind} {uuid} is not there at the next start")


def _as_it_is_there(runtime: Runtime, nic: Json) -> Json:
    """A NIC with the UUID that its MAC has in the file, unless it was given one, and the MAC that
    its UUID has."""
    from brine.hotplug.wish import Wish

    if not nic["mac"]:
        there = runtime.find(Kind.NIC, nic["uuid"]) or {}
        return Wish.from_json(nic).with_mac(str(there.get("mac") or new_mac())).to_json()
    mac = str(nic["mac"])
    for known in runtime.known_as(Kind.NIC, mac):
        if known["uuid"] == nic["uuid"]:
            continue
        if nic["uuid"] != uuid_of_mac(mac):
            hint = "choose another --mac, or leave out --uuid"
            text = f"{mac} is the MAC address of NIC {known['uuid']} there"
            raise RuntimeFileError(runtime.file, text, hint=hint)
        return Wish.from_json({**nic, "uuid": known["uuid"]}).to_json()
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
