"""The verbs of ``brine nic`` and ``brine disk`` that change a VM, or only its runtime file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from brine.common.cli import undo_when_told_to_end
from brine.common.errors import UsageError, printable
from brine.common.journal import log_command
from brine.hotplug import plug_disk
from brine.hotplug.known_devices import DeviceChange
from brine.hotplug.list_commands import target_of
from brine.hotplug.locked_vm import Vm
from brine.hotplug.next_start import (
    How,
    NextStart,
    with_changed_nic,
    with_disk,
    with_nic,
    without,
)
from brine.hotplug.options import disk_from, nic_from, with_options
from brine.hotplug.session import remove_device, working_on
from brine.hotplug.target import Target, give_up_privileges, waiting
from brine.hotplug.transaction import Pending
from brine.vm.address import DeviceKind, is_like_ours, new_mac, uuid_of_mac
from brine.vm.disk_files import refuse_other_format, size_of
from brine.vm.identities import Identity, identities_of
from brine.vm.vif import Vif

_NO_DIFFERENCE = {
    *("run", "noun", "qmp", "json", "no_hotplug", "dry_run"),
    *("timeout", "qmp_timeout", "lock_timeout"),
}

Result = tuple[dict[str, Any], str]
"""A command's output, as JSON and as text for people."""

# NICs.


def add_nic(arguments: argparse.Namespace) -> int:
    target = target_of(arguments)
    vm_name = target.vm_name()
    if arguments.instance not in (None, vm_name):
        # The names of a VM's taps come from this name. They must not lead to another VM's taps.
        raise UsageError(
            f"{target.qmp}: its VM is called {vm_name}, not {arguments.instance}",
            hint="a QMP socket has its VM's name, with .qmp after it",
        )
    request = _request("add", arguments)
    if not arguments.uuid:
        # A MAC identifies a NIC, so a repeated command does not plug it in twice.
        arguments.mac = arguments.mac or new_mac()
    nic_uuid = arguments.uuid or uuid_of_mac(arguments.mac)
    if arguments.no_hotplug:
        nic = nic_from(arguments, vm_name, nic_uuid)
        how = partial(with_nic, nic.recorded())
        return _record(
            target, arguments, how, "nic {} is there at the next start", nic.identities()
        )

    from brine.hotplug import plug_nic  # with netlink, of which disks need none

    def work(vm: Vm) -> Result:
        nic = nic_from(arguments, vm.name, nic_uuid)
        if vm.dry_run:
            vm.refuse_taken(nic.identities())
        if finished := vm.was_finished(request):
            done = _finished(finished)
        else:
            done = plug_nic.plug_nic_in(vm, nic, reserved=arguments.reserved_slots, request=request)
        return _nic_result(arguments, done, "plugged in", nic)

    return _run(target, arguments, DeviceKind.NIC, work)


def modify_nic(arguments: argparse.Namespace) -> int:
    target = target_of(arguments)
    if arguments.no_hotplug:
        changed = partial(with_options, arguments)
        how = partial(with_changed_nic, target.vm_name(), arguments.device, changed)
        # A NIC that has no new MAC address has no new identity.
        identities = identities_of({"nics": [{"mac": arguments.mac}]})
        return _record(target, arguments, how, "nic {} is changed at the next start", identities)

    from brine.hotplug import plug_nic  # as above

    def work(vm: Vm) -> Result:
        request = _request("modify", arguments)
        if finished := vm.was_finished(request):
            done, nic = _finished(finished), Vif.from_recorded(finished.device)
        else:
            found = vm.find(DeviceKind.NIC, arguments.device)
            if found is None:
                raise _unknown(vm, DeviceKind.NIC, arguments.device)
            nic = with_options(arguments, plug_nic.nic_of(found))
            if vm.dry_run and nic.mac != found.value:
                vm.refuse_taken(nic.identities())
            done = plug_nic.replace_nic(vm, found, nic, request=request)
        return _nic_result(arguments, done, "changed", nic)

    return _run(target, arguments, DeviceKind.NIC, work)


def remove_nic(arguments: argparse.Namespace) -> int:
    return _remove(arguments, DeviceKind.NIC)


def _request(verb: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments that identify this request, without a generated MAC."""
    given = {key: value for key, value in vars(arguments).items() if key not in _NO_DIFFERENCE}
    return {"verb": verb, **given, "runtime": str(arguments.runtime or "")}


def _finished(pending: Pending) -> DeviceChange:
    """The result of a command that was killed before it could print it."""
    mac, slot = pending.device["mac"], pending.device["pci"]
    return DeviceChange(pending.kind, pending.device_id, pending.uuid, mac, slot, pending.tap)


def _nic_result(arguments: argparse.Namespace, done: DeviceChange, word: str, nic: Vif) -> Result:
    text = f"{done.device_id}, MAC {done.value}, tap {done.tap}, {nic.described()}"
    return _result(arguments, done, word, text)


# Disks.


def add_disk(arguments: argparse.Namespace) -> int:
    if arguments.path is None:
        raise UsageError("which disk?", hint="give --path")
    target = target_of(arguments)
    disk = disk_from(arguments)
    if arguments.no_hotplug:
        if not disk.is_format_said():
            refuse_other_format(disk)
        how = partial(with_disk, disk.entry(size_of(disk)))
        return _record(
            target, arguments, how, "disk {} is there at the next start", disk.identities()
        )

    def work(vm: Vm) -> Result:
        if vm.dry_run:
            vm.refuse_taken(disk.identities())
        done = plug_disk.plug_disk_in(
            vm,
            disk,
            controller=arguments.controller,
            reserved=arguments.reserved_slots,
        )
        text = f"{done.device_id}, serial {done.value}"
        return _result(arguments, done, "plugged in", text)

    return _run(target, arguments, DeviceKind.DISK, work)


def remove_disk(arguments: argparse.Namespace) -> int:
    return _remove(arguments, DeviceKind.DISK)


# For NICs and disks.


def _run(
    target: Target, arguments: argparse.Namespace, kind: DeviceKind, work: Callable[[Vm], Result]
) -> int:
    """Do the work of a verb on a VM, and lock it meanwhile.

    A signal that ends this process makes it undo what it began.

    :param kind: of the device; the process gives up the privileges that it does not need.
    """
    log_command("brine")
    give_up_privileges(kind)
    undo_when_told_to_end()
    session = working_on(
        target.qmp,
        runtime=target.runtime_file(),
        timeout_s=arguments.timeout,
        dry_run=arguments.dry_run,
        lock_timeout_s=arguments.lock_timeout,
        qmp_timeout_s=arguments.qmp_timeout,
    )
    try:
        with waiting(), session as vm:
            result = work(vm)
    except KeyboardInterrupt:
        text = "begun changes are undone; a guest may still let go of a requested device"
        print(f"brine: interrupted: {text}", file=sys.stderr)
        raise
    return _tell(arguments, result)


def _remove(arguments: argparse.Namespace, kind: DeviceKind) -> int:
    target = target_of(arguments)
    if arguments.no_hotplug:
        how = partial(without, kind, arguments.device)
        return _record(target, arguments, how, f"{kind} {{}} is not there at the next start")

    def work(vm: Vm) -> Result:
        found = vm.find(kind, arguments.device)
        if found is None:
            return _not_there(arguments, vm, kind)
        known_as = "MAC" if kind is DeviceKind.NIC else "serial"
        text = f"{found.device_id}, {known_as} {found.value}"
        return _result(arguments, remove_device(vm, found), "unplugged", text)

    return _run(target, arguments, kind, work)


def _not_there(arguments: argparse.Namespace, vm: Vm, kind: DeviceKind) -> Result:
    """The result if there is no such device; refuse a device that can't be removed."""
    reference = arguments.device
    if not is_like_ours(kind, reference):
        raise _unknown(vm, kind, reference)
    vm.refuse_boot_device(kind, reference)
    result = {"device": reference, "changed": False, "dry_run": arguments.dry_run}
    return result, f"unchanged: {reference} is not plugged in"


def _unknown(vm: Vm, kind: DeviceKind, reference: str) -> UsageError:
    """The error if there is no such device; refuse one that the VM was started with."""
    vm.refuse_boot_device(kind, reference)
    known = ", ".join(one.device_id for one in vm.devices(kind)) or "none"
    return UsageError(f"no {kind} is known as {reference}", hint=f"plugged in are: {known}")


def _result(arguments: argparse.Namespace, done: DeviceChange, word: str, text: str) -> Result:
    """The output of a command.

    :param word: for a change.
    :param text: for people.
    """
    word = f"would be {word}" if arguments.dry_run else word
    result = {**done.to_json(), "dry_run": arguments.dry_run}
    return result, f"{word if done.changed else 'unchanged'}: {printable(text)}"


def _tell(arguments: argparse.Namespace, result: Result) -> int:
    data, text = result
    print(json.dumps(data, indent=2) if arguments.json else text)
    return 0


def _record(
    target: Target,
    arguments: argparse.Namespace,
    how: How,
    said: str,
    identities: Iterable[Identity] = (),
) -> int:
    """Change the runtime file alone, and print the result.

    :param said: what happens at the next start, with braces for the UUID.
    :param identities: what the VM gets that no other instance may have.
    """
    dry_run = arguments.dry_run
    next_start = NextStart(target, dry_run, arguments.lock_timeout)
    uuid, is_changed = next_start.record(how, identities)
    result = {"uuid": uuid, "recorded": not dry_run, "changed": is_changed, "dry_run": dry_run}
    word = "would be recorded" if dry_run else "recorded"
    text = printable(said.format(uuid))
    return _tell(arguments, (result, f"{word if is_changed else 'unchanged'}: {text}"))
