"""Changing the medium in a CD-ROM drive, in the spec and in a running QEMU.

QEMU gets the medium as an open descriptor, as at the start. If the guest has locked the drive, it
is asked to release the medium, as by the button of a real drive.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from brine.common.cli import undo_when_told_to_end
from brine.common.errors import UsageError, printable
from brine.common.paths import InstanceFiles
from brine.common.qmp.wire import QmpCommandError
from brine.hotplug.disk import opened
from brine.hotplug.errors import HotplugError
from brine.hotplug.plug_disk import hand_over
from brine.hotplug.qemu import Machine, fdsets
from brine.hotplug.runtime_file import Runtime, change
from brine.hotplug.session import working_on
from brine.instance import files, messages, store
from brine.instance.conflicts import refuse_shared
from brine.instance.kvm.command_line import cdrom_id, medium_node
from brine.instance.kvm.resources import medium
from brine.instance.observe import Observed, Oper, look
from brine.instance.running_spec import running_spec
from brine.instance.spec import Spec, SpecError
from brine.instance.start import being_stopped
from brine.instance.store import InstanceError

EJECT_TIMEOUT_S = 10.0

_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Drive:
    """A CD-ROM drive of a running instance.

    :param node: QEMU's block node of the medium; None if the drive is empty.
    """

    device_id: str
    node: str | None
    is_open: bool


def change_medium(
    name: str,
    path: str,
    *,
    number: int = 0,
    force: bool = False,
    timeout_s: float = EJECT_TIMEOUT_S,
    dry_run: bool = False,
) -> bool:
    """Change the medium of a CD-ROM drive, or eject it; False if nothing changes.

    :param path: of an image or a block device; empty ejects the medium.
    :param number: of the drive, in the spec's order.
    :param force: open the drive even if the guest does not release the medium.
    :param timeout_s: how long the guest may take to release it.
    :raises BrineError: what failed; then the medium has not changed.
    """
    with store.alone(name):
        files.settle(name)
        seen = look(name)
        spec = _with_medium(seen.spec, number, path)
        is_running = seen.state.oper is Oper.RUNNING
        if seen.state.oper in (Oper.STARTING, Oper.STOPPING):
            raise being_stopped(name) if seen.state.oper is Oper.STOPPING else _starting(name)
        if path:
            with opened(medium(path)):  # or it says why it can't be
                pass
        changed = spec != seen.spec
        if is_running:
            is_known = path == _medium_now(seen, number)
            patience_s = 0.0 if force else timeout_s
            done = _change(
                name, number, path, patience_s, force=force, is_known=is_known, dry_run=dry_run
            )
            changed = done or changed
        if not changed or dry_run:
            return changed
        if is_running:
            _record(name, number, path)
        if spec != seen.spec:
            store.save(spec)
    how = f"{cdrom_id(number)} has {path or 'none'}"
    messages.tell(messages.MEDIUM_CHANGED, name, how=how)
    return True


def _with_medium(spec: Spec, number: int, path: str) -> Spec:
    if spec.is_xen():
        raise InstanceError(spec.name, "is a domain of Xen's, and has no CD-ROM drive")
    if not 0 <= number < len(spec.cdroms):
        count = f"{len(spec.cdroms)} CD-ROM drives" if spec.cdroms else "no CD-ROM drive"
        hint = 'a spec with "cdroms": [""] has an empty one, from the next start on'
        text = f"{spec.name} has {count}, and none with the number {number}"
        raise UsageError(text, hint=hint)
    cdroms = (*spec.cdroms[:number], path, *spec.cdroms[number + 1 :])
    changed = replace(spec, cdroms=cdroms)
    try:
        refuse_shared(changed)
    except SpecError as error:
        raise InstanceError(spec.name, str(error), hint=error.hint) from error
    return changed


def _starting(name: str) -> InstanceError:
    return InstanceError(name, "is starting", hint="try again when it runs")


def _medium_now(seen: Observed, number: int) -> str | None:
    """The last medium that QEMU was given; None if it is not known."""
    running = running_spec(seen)
    cdroms = running.started.get("cdroms") if running else None
    if isinstance(cdroms, list) and number < len(cdroms):
        return str(cdroms[number])
    return None


def _record(name: str, number: int, path: str) -> None:
    """Record the medium of the drive in the runtime file."""

    def how(runtime: Runtime) -> Runtime:
        spec = runtime.rest["spec"]
        cdroms = [*spec["cdroms"][:number], path, *spec["cdroms"][number + 1 :]]
        return replace(runtime, rest={**runtime.rest, "spec": {**spec, "cdroms": cdroms}})

    with contextlib.suppress(KeyError, TypeError):  # it is not of Brine's form
        change(InstanceFiles(name).runtime, how)


def _change(
    name: str,
    number: int,
    path: str,
    timeout_s: float,
    *,
    force: bool,
    is_known: bool,
    dry_run: bool,
) -> bool:
    """Change the medium in QEMU; False if QEMU has it already.

    :param is_known: whether QEMU was given that medium last.
    """
    with working_on(InstanceFiles(name).qmp, only_look=dry_run) as vm:
        machine = vm.machine
        drive = _drive(machine, name, cdrom_id(number))
        if is_known and bool(path) == (drive.node is not None) and not drive.is_open:
            return False
        if dry_run:
            return True
        device = {"id": drive.device_id}
        fdset, node = None, None
        try:
            if path:
                with opened(medium(path)) as files:
                    fdset = hand_over(machine, drive.device_id, files.descriptors)
                    node = f"{drive.device_id}.{fdset}"
                    added = medium_node(node, fdset, is_device=files.is_device)
                    machine.qmp.execute("blockdev-add", added)
            _open(machine, name, drive, timeout_s, force=force)
            machine.qmp.execute("blockdev-remove-medium", device)
            try:
                if node:
                    inserted = {**device, "node-name": node}
                    machine.qmp.execute("blockdev-insert-medium", inserted)
            except QmpCommandError:
                if drive.node:
                    before = {**device, "node-name": drive.node}
                    machine.try_execute("blockdev-insert-medium", before)
                machine.try_execute("blockdev-close-tray", device)
                raise
        except BaseException:
            _forget(machine, node, fdset)
            raise
        machine.qmp.execute("blockdev-close-tray", device)
        if drive.node:
            machine.try_execute("blockdev-del", {"node-name": drive.node})
        for one in fdsets(machine):
            if one.device_id == drive.device_id and one.number != fdset:
                machine.try_execute("remove-fd", {"fdset-id": one.number})
    return True


def _forget(machine: Machine, node: str | None, fdset: int | None) -> None:
    """Close the descriptors in QEMU, if QEMU still runs."""
    with contextlib.suppress(Exception):
        if node:
            machine.try_execute("blockdev-del", {"node-name": node})
        if fdset is not None:
            machine.try_execute("remove-fd", {"fdset-id": fdset})


def _open(machine: Machine, name: str, drive: Drive, timeout_s: float, *, force: bool) -> None:
    """Open a drive, which the guest may have locked.

    :raises HotplugError: if the guest does not release it.
    """
    arguments: dict[str, Any] = {"id": drive.device_id, "force": force}
    if not drive.is_open:
        machine.qmp.execute("blockdev-open-tray", arguments)
    deadline = time.monotonic() + timeout_s
    while not (_drive(machine, name, drive.device_id)).is_open:
        if time.monotonic() >= deadline:
            hint = "unmount it in the guest; or --force takes it away all the same"
            text = f"{name}: its guest keeps {drive.device_id} locked"
            raise HotplugError(text, hint=hint)
        time.sleep(_PAUSE_S)


def _drive(machine: Machine, name: str, device_id: str) -> Drive:
    """QEMU's description of a drive.

    :raises InstanceError: if it has no drive with that id.
    """
    for row in machine.list_of("query-block"):
        if row.get("qdev") in (device_id, f"/machine/peripheral/{device_id}"):
            inserted = row.get("inserted")
            node = inserted.get("node-name") if isinstance(inserted, Mapping) else None
            is_open = row.get("tray_open") is True
            return Drive(device_id, node if isinstance(node, str) else None, is_open)
    hint = f"it has that from its next start on: brine instance reboot {name}"
    raise InstanceError(name, f"runs without the drive {device_id}", hint=hint)


def cdrom(arguments: argparse.Namespace) -> int:
    """``brine instance cdrom``"""
    if (arguments.medium is None) != arguments.eject:
        raise UsageError("what is to be in the drive?", hint="name a medium, or give --eject")
    undo_when_told_to_end()
    messages.log_to_journal("brine")
    name, number, dry_run = arguments.name, arguments.drive, arguments.dry_run
    path = "" if arguments.eject else os.path.abspath(arguments.medium)
    changed = change_medium(
        name,
        path,
        number=number,
        force=arguments.force,
        timeout_s=arguments.timeout or EJECT_TIMEOUT_S,
        dry_run=dry_run,
    )
    if arguments.json:
        result = {"name": name, "drive": number, "medium": path or None}
        print(json.dumps({**result, "changed": changed, "dry_run": dry_run}, indent=2))
        return 0
    what = f"drive {number} of {name} " + (f"has {printable(path)}" if path else "is empty")
    done = f"{'would be ' if dry_run else ''}changed" if changed else "unchanged"
    print(f"{done}: {what}")
    return 0
