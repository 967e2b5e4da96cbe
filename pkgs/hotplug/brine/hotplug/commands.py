"""The verbs of ``brine nic`` and ``brine disk`` that change a VM, or only its runtime file."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from brine.common.cli import undo_when_told_to_end
from brine.common.errors import UsageError, printable
from brine.common.process import spoken_wait
from brine.hotplug import plug_disk, plug_nic
from brine.hotplug.address import (
    Bus,
    DeviceKind,
    is_like_ours,
    new_mac,
    uuid_of_mac,
    uuid_of_path,
)
from brine.hotplug.disk import (
    Disk,
    recorded_disk,
    refuse_disk_of_others,
    refuse_other_format,
    size_of,
)
from brine.hotplug.messages import log_to_journal
from brine.hotplug.nic import Nic, described, nic_from, recorded_nic, with_options
from brine.hotplug.plug_disk import DiskChange
from brine.hotplug.plug_nic import NicChange, nic_of, refuse_taken_mac
from brine.hotplug.qemu import Device
from brine.hotplug.runtime_file import Json, Runtime, RuntimeFileError, change
from brine.hotplug.session import LIMIT_S, working_on
from brine.hotplug.target import find_socket, give_up_privileges, instance_of, runtime_file
from brine.hotplug.vm import Vm, refuse_boot_device

_NO_DIFFERENCE = frozenset(
    {
        "run",
        "noun",
        "qmp",
        "json",
        "timeout",
        "qmp_timeout",
        "lock_timeout",
        "no_hotplug",
        "dry_run",
    }
)


class Removal(Protocol):
    """An operation of the library that removes a device."""

    def __call__(
        self, vm: Vm, device: Device, *, runtime: Path | None, timeout_s: float, dry_run: bool
    ) -> NicChange | DiskChange:
        """Remove it."""


# NICs.


def add_nic(arguments: argparse.Namespace) -> int:
    """``brine nic add``."""
    find_socket(arguments)
    if arguments.instance not in (None, arguments.qmp.stem):
        # The names of a VM's taps come from this name. They must not lead to another VM's taps.
        raise UsageError(
            f"{arguments.qmp}: its VM is called {arguments.qmp.stem}, not {arguments.instance}",
            hint="a QMP socket has its VM's name, with .qmp after it",
        )
    request = _request("add", arguments)
    if not arguments.uuid:
        # A MAC identifies a NIC, so a repeated command does not plug it in twice.
        arguments.mac = arguments.mac or new_mac()
    nic_uuid = arguments.uuid or uuid_of_mac(arguments.mac)
    if arguments.no_hotplug:
        nic = nic_from(arguments, arguments.qmp.stem, nic_uuid)
        record_addition(arguments, DeviceKind.NIC, recorded_nic(nic))
        return 0
    return _run(partial(_add_nic, arguments, nic_uuid, request), DeviceKind.NIC)


def _add_nic(arguments: argparse.Namespace, nic_uuid: str, request: dict[str, Any]) -> int:
    with _alone_with(arguments) as vm:
        nic = nic_from(arguments, vm.name, nic_uuid)
        if finished := vm.was_finished(request):
            done = NicChange.of_pending(finished)
        else:
            done = plug_nic.add_nic(
                vm,
                nic,
                reserved=arguments.reserved_slots,
                runtime=runtime_file(arguments),
                request=request,
                timeout_s=arguments.timeout,
                dry_run=arguments.dry_run,
            )
    _tell_nic(arguments, done, ("plugged in", "would be plugged in"), nic)
    return 0


def _request(verb: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments that identify this request, without a generated MAC."""
    given = {key: value for key, value in vars(arguments).items() if key not in _NO_DIFFERENCE}
    return {"verb": verb, **given, "runtime": str(arguments.runtime or "")}


def modify_nic(arguments: argparse.Namespace) -> int:
    """``brine nic modify``."""
    find_socket(arguments)
    if arguments.no_hotplug:
        instance = arguments.qmp.stem
        record_nic_change(arguments, partial(with_options, arguments), instance=instance)
        return 0
    return _run(partial(_modify_nic, arguments), DeviceKind.NIC)


def _modify_nic(arguments: argparse.Namespace) -> int:
    request = _request("modify", arguments)
    with _alone_with(arguments) as vm:
        if finished := vm.was_finished(request):
            done, nic = NicChange.of_pending(finished), Nic.from_json(finished.device)
        else:
            found = _existing(vm, arguments)
            nic = with_options(arguments, nic_of(found))
            if nic.mac != found.value:
                refuse_taken_mac(vm, nic.mac)
            done = plug_nic.modify_nic(
                vm,
                found,
                nic,
                runtime=runtime_file(arguments),
                request=request,
                timeout_s=arguments.timeout,
                dry_run=arguments.dry_run,
            )
    _tell_nic(arguments, done, ("changed", "would be changed"), nic)
    return 0


def _existing(vm: Vm, arguments: argparse.Namespace) -> Device:
    reference = arguments.device
    found = vm.find(DeviceKind.NIC, reference)
    if found is None:
        refuse_boot_device(vm.machine, DeviceKind.NIC, reference, runtime_file(arguments))
        listed = ", ".join(one.device_id for one in vm.devices(DeviceKind.NIC)) or "none"
        raise UsageError(f"no NIC is known as {reference}", hint=f"plugged in are: {listed}")
    return found


def remove_nic(arguments: argparse.Namespace) -> int:
    """``brine nic remove``."""
    return _remove(arguments, DeviceKind.NIC, plug_nic.remove_nic)


def _tell_nic(
    arguments: argparse.Namespace, done: NicChange, words: tuple[str, str], nic: Nic
) -> None:
    text = f"{done.device_id}, MAC {done.mac}, tap {done.tap}, {described(nic)}"
    _tell(arguments, done, words, text)


# Disks.


def add_disk(arguments: argparse.Namespace) -> int:
    """``brine disk add``."""
    find_socket(arguments)
    disk = _disk(arguments)
    refuse_disk_of_others(disk, instance_of(arguments))
    if arguments.no_hotplug:
        if arguments.format is None:
            refuse_other_format(disk)
        device = recorded_disk(disk, size_of(disk))
        record_addition(arguments, DeviceKind.DISK, device, link=str(disk.path))
        return 0
    return _run(partial(_add_disk, arguments, disk), DeviceKind.DISK)


def _add_disk(arguments: argparse.Namespace, disk: Disk) -> int:
    with _alone_with(arguments) as vm:
        done = plug_disk.add_disk(
            vm,
            disk,
            is_format_said=arguments.format is not None,
            bus=Bus(arguments.bus),
            controller=arguments.controller,
            reserved=arguments.reserved_slots,
            runtime=runtime_file(arguments),
            timeout_s=arguments.timeout,
            dry_run=arguments.dry_run,
        )
    text = f"{done.device_id}, serial {done.serial}"
    _tell(arguments, done, ("plugged in", "would be plugged in"), text)
    return 0


def _disk(arguments: argparse.Namespace) -> Disk:
    if arguments.aio == "native" and arguments.cache not in ("none", "directsync"):
        hint = "choose --cache none or directsync, or --aio threads"
        raise UsageError("--aio native needs a cache mode that is direct", hint=hint)
    if arguments.controller and arguments.bus != Bus.SCSI:
        raise UsageError("--controller is of SCSI", hint="give --bus scsi too")
    file = Path(os.path.abspath(arguments.path))
    # The same path gives the same UUID, so a repeated command does not plug it in twice. The target
    # of a symbolic link such as /dev/vg/lv may differ after a reboot.
    given = arguments.uuid or uuid_of_path(str(file))
    return Disk(
        uuid=given,
        path=file,
        format=arguments.format or "raw",
        cache=arguments.cache,
        aio=arguments.aio,
        read_only=arguments.read_only,
        discard=not arguments.no_discard,
        serial=arguments.serial,
    )


def remove_disk(arguments: argparse.Namespace) -> int:
    """``brine disk remove``."""
    return _remove(arguments, DeviceKind.DISK, plug_disk.remove_disk)


# For NICs and disks.


def _alone_with(arguments: argparse.Namespace) -> AbstractContextManager[Vm]:
    """Lock the VM that the options name."""
    return working_on(
        arguments.qmp,
        lock_timeout_s=arguments.lock_timeout,
        qmp_timeout_s=arguments.qmp_timeout,
        only_look=arguments.dry_run,
        # --timeout is how long the guest may take to release a device.
        limit_s=LIMIT_S + getattr(arguments, "timeout", 0),
    )


def _run(work: Callable[[], int], kind: DeviceKind) -> int:
    """Do the work of a verb. A signal that ends this process makes it undo what it began.

    :param kind: of the device; the process gives up the privileges that it does not need.
    """
    log_to_journal()
    give_up_privileges(kind)
    undo_when_told_to_end()
    patience = spoken_wait("waiting for the VM ...") if sys.stderr.isatty() else None
    with patience or contextlib.nullcontext():
        try:
            return work()
        except KeyboardInterrupt:
            text = "what was begun is undone; a guest may still let go of what it was asked for"
            print(f"brine: interrupted: {text}", file=sys.stderr)
            raise


def _remove(arguments: argparse.Namespace, kind: DeviceKind, operation: Removal) -> int:
    """Remove the device that the options name.

    :param operation: of the library.
    """
    find_socket(arguments)
    if arguments.no_hotplug:
        record_removal(arguments, kind)
        return 0
    return _run(partial(_take_out, arguments, kind, operation), kind)


def _take_out(arguments: argparse.Namespace, kind: DeviceKind, operation: Removal) -> int:
    with _alone_with(arguments) as vm:
        file = runtime_file(arguments)
        found = vm.find(kind, arguments.device)
        if found is None:
            _tell_unknown(vm, kind, arguments, file)
            return 0
        dry_run = arguments.dry_run
        done = operation(vm, found, runtime=file, timeout_s=arguments.timeout, dry_run=dry_run)
    known_as = "MAC" if kind is DeviceKind.NIC else "serial"
    text = f"{found.device_id}, {known_as} {found.value}"
    _tell(arguments, done, ("unplugged", "would be unplugged"), text)
    return 0


def _tell_unknown(
    vm: Vm, kind: DeviceKind, arguments: argparse.Namespace, file: Path | None
) -> None:
    """Report that there is no such device; refuse a device that can't be removed.

    :raises brine.hotplug.errors.HotplugError: if the VM was started with it.
    :raises UsageError: if the reference can't be that of a device.
    """
    reference = arguments.device
    refuse_boot_device(vm.machine, kind, reference, file)
    if not is_like_ours(kind, reference):
        known = ", ".join(one.device_id for one in vm.devices(kind)) or "none"
        raise UsageError(f"no {kind} is known as {reference}", hint=f"plugged in are: {known}")
    if arguments.json:
        result = {"device": reference, "changed": False, "dry_run": arguments.dry_run}
        print(json.dumps(result, indent=2))
    else:
        print(f"unchanged: {reference} is not plugged in")


def _tell(
    arguments: argparse.Namespace, done: NicChange | DiskChange, words: tuple[str, str], text: str
) -> None:
    """Print the result.

    :param words: for a change, and for a dry run.
    :param text: for people.
    """
    if arguments.json:
        print(json.dumps({**asdict(done), "dry_run": arguments.dry_run}, indent=2))
    else:
        word = words[arguments.dry_run] if done.changed else "unchanged"
        print(f"{word}: {printable(text)}")


# What ``--no-hotplug`` does: it changes the runtime file alone, for the next start.


def record_addition(
    arguments: argparse.Namespace, kind: DeviceKind, device: Json, *, link: str | None = None
) -> None:
    """Record a device for the next start.

    :param link: of a disk, the path by which QEMU opens it.
    :raises UsageError: if there is no runtime file.
    :raises RuntimeFileError: if it can't be changed, or another device there has the UUID or MAC.
    """
    uuid = str(device["uuid"])

    def how(runtime: Runtime) -> Runtime:
        nonlocal uuid
        wanted = _as_it_is_there(runtime, device) if kind is DeviceKind.NIC else device
        uuid = str(wanted["uuid"])
        return runtime.with_device(kind, wanted, link=link)

    is_changed = _change(arguments, how)
    _tell_recorded(arguments, uuid, is_changed, f"{kind} {uuid} is there at the next start")


def record_nic_change(
    arguments: argparse.Namespace, changed: Callable[[Nic], Nic], *, instance: str
) -> None:
    """Change the NIC that the arguments name, for the next start.

    :param instance: the instance of the NIC, if the file does not name it.
    :param changed: returns the requested NIC for the recorded one.
    :raises UsageError: if there is no runtime file, or no such NIC in it.
    :raises RuntimeFileError: if it can't be changed, or another NIC there has the new MAC.
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
    _tell_recorded(arguments, uuid, is_changed, f"nic {uuid} is changed at the next start")


def record_removal(arguments: argparse.Namespace, kind: DeviceKind) -> None:
    """Remove the device that the arguments name, for the next start.

    :raises UsageError: if there is no runtime file, or the reference can't be that of a device.
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
    _tell_recorded(arguments, uuid, is_changed, f"{kind} {uuid} is not there at the next start")


def _the_one(runtime: Runtime, kind: DeviceKind, reference: str) -> Json | None:
    """The device that a reference names, if there is one."""
    found = runtime.known_as(kind, reference)
    if len(found) > 1:
        uuids = ", ".join(one["uuid"] for one in found)
        raise UsageError(f"several are known as {reference}", hint=f"choose one of {uuids}")
    return found[0] if found else None


def _known(runtime: Runtime, kind: DeviceKind) -> str:
    return ", ".join(one["uuid"] for one in runtime.devices[kind]) or "none"


def _recorded_nic(runtime: Runtime, nic: Json, instance: str) -> Nic:
    """A NIC of a file of any form; what Ganeti's form lacks is as ``nic add`` makes it."""
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
    """A NIC, completed from the file: the UUID that its MAC has there, or the MAC of its UUID."""
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


def _tell_recorded(arguments: argparse.Namespace, uuid: str, is_changed: bool, said: str) -> None:
    dry_run = arguments.dry_run
    if arguments.json:
        result: dict[str, Any] = {"uuid": uuid, "recorded": not dry_run, "changed": is_changed}
        print(json.dumps({**result, "dry_run": dry_run}, indent=2))
        return
    word = "would be recorded" if dry_run else "recorded"
    print(f"{word if is_changed else 'unchanged'}: {printable(said)}")
