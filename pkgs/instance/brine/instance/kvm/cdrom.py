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
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from brine.common.cli import undo_when_told_to_end
from brine.common.errors import UsageError, printable
from brine.hotplug.block_graph import hand_over
from brine.hotplug.errors import HotplugError
from brine.hotplug.qemu import Machine
from brine.hotplug.session import working_on
from brine.instance import messages, store
from brine.instance.conflicts import refuse_conflicts
from brine.instance.kvm.command_line import medium_node
from brine.instance.kvm.layout import cdrom_id
from brine.instance.kvm.resources import medium
from brine.instance.observe import Observed, Oper, look
from brine.instance.running_spec import running_spec
from brine.instance.start import being_stopped
from brine.instance.store import InstanceError
from brine.vm.conflicts import IdentityKeys, identities_lock, refuse_taken
from brine.vm.disk_files import opened
from brine.vm.files import InstanceFiles
from brine.vm.identities import Identity, IdentityKind
from brine.vm.runtime_file import Runtime, change_file
from brine.vm.spec import Spec, SpecError

EJECT_TIMEOUT_S = 10.0

_PAUSE_S = 0.1


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
        seen = look(name)
        new = _new_medium(seen.spec, number, path)
        if seen.state.oper is Oper.STOPPING:
            raise being_stopped(name)
        if seen.state.oper is Oper.STARTING:
            raise InstanceError(name, "is starting", hint="try again when it runs")
        if path:
            with opened(medium(path)):  # or it says why it can't be
                pass
        if seen.state.oper is Oper.RUNNING:
            limit_s = 0.0 if force else timeout_s
            has_changed = _change_running(seen, new, limit_s, force=force, dry_run=dry_run)
        else:
            has_changed = new.spec != new.before
            if has_changed and not dry_run:
                with identities_lock(new.refuse_conflicts):
                    store.save(new.spec)
    if has_changed and not dry_run:
        how = f"{cdrom_id(number)} has {path or 'none'}"
        messages.tell(messages.MEDIUM_CHANGED, name, how=how)
    return has_changed


@dataclass(frozen=True, slots=True)
class _NewMedium:
    """Another medium for a drive, in the spec.

    :param path: empty for none.
    """

    before: Spec
    spec: Spec
    number: int
    path: str

    def refuse_conflicts(self, keys: IdentityKeys | None = None) -> None:
        """Refuse a medium that the instance or another one writes."""
        name = self.before.name
        try:
            refuse_conflicts(self.spec, self.before, keys=keys)
        except SpecError as error:
            raise InstanceError(name, str(error), hint=error.hint) from error
        if self.path:
            refuse_taken(name, [Identity(IdentityKind.DISK, self.path, read_only=True)], keys)


def _new_medium(spec: Spec, number: int, path: str) -> _NewMedium:
    if spec.is_xen():
        raise InstanceError(spec.name, "is a domain of Xen's, and has no CD-ROM drive")
    if not 0 <= number < len(spec.cdroms):
        count = f"{len(spec.cdroms)} CD-ROM drives" if spec.cdroms else "no CD-ROM drive"
        hint = 'a spec with "cdroms": [""] has an empty one, from the next start on'
        text = f"{spec.name} has {count}, and none with the number {number}"
        raise UsageError(text, hint=hint)
    changed = replace(spec, cdroms=tuple(_replaced(spec.cdroms, number, path)))
    new = _NewMedium(spec, changed, number, path)
    new.refuse_conflicts()
    return new


def _change_running(
    seen: Observed, new: _NewMedium, limit_s: float, *, force: bool, dry_run: bool
) -> bool:
    """Change the medium of a running QEMU, and of the spec; False if nothing changes."""
    name, number, path = seen.name, new.number, new.path
    cdroms = _media_of_run(seen)
    last = cdroms[number : number + 1]
    with working_on(InstanceFiles(name).qmp, dry_run=dry_run) as vm, ExitStack() as undo:
        drive = _Drive(vm.machine, name, cdrom_id(number))
        changes_drive = last != [path] or not drive.is_closed_with(path)
        has_changed = changes_drive or new.spec != new.before
        if dry_run or not has_changed:
            return has_changed
        if changes_drive:
            before = str(last[0]) if last else ""
            # QEMU gets no medium that the instance has not claimed. If this command is killed, the
            # run keeps both, and the drive has none by name.
            with identities_lock(new.refuse_conflicts):
                _record(name, [*_replaced(cdroms, number, ""), before, path])
            undo.callback(_record, name, cdroms)
            drive.change(path, limit_s, force=force)
            undo.callback(drive.change, before, 0.0, force=True)
        with identities_lock(new.refuse_conflicts):  # the guest may have taken its time
            _record(name, _replaced(cdroms, number, path))
            if new.spec != new.before:
                store.save(new.spec)
        undo.pop_all()
    return True


def _media_of_run(seen: Observed) -> list[Any]:
    """The media that QEMU was given last, by drive."""
    running = running_spec(seen)
    found = running.started.get("cdroms") if running else None
    return found if isinstance(found, list) else []


def _replaced(cdroms: Any, number: int, path: str) -> list[str]:
    return [*cdroms[:number], path, *cdroms[number + 1 :]]


def _record(name: str, cdroms: list[Any]) -> None:
    """Record the media of the drives, and what else the run has as media, in the runtime
    file."""

    def how(runtime: Runtime) -> Runtime:
        has_drives = "cdroms" in (runtime.started_with() or {})
        return runtime.with_started(cdroms=cdroms) if has_drives else runtime

    change_file(InstanceFiles(name).runtime, how)


class _Drive:
    """A CD-ROM drive of a running QEMU."""

    def __init__(self, machine: Machine, name: str, device_id: str) -> None:
        self._machine = machine
        self._name = name
        self._id = device_id

    def is_closed_with(self, path: str) -> bool:
        """Whether the drive is closed, and has a medium if one is named."""
        node, is_open = self._look()
        return bool(path) == (node is not None) and not is_open

    def change(self, path: str, timeout_s: float, *, force: bool) -> None:
        """Change the medium. An error leaves the one before in the drive."""
        before, is_open = self._look()
        execute, fdset = self._machine.qmp.execute, None
        with ExitStack() as undo:
            if path:
                with opened(medium(path)) as image:
                    fdset = hand_over(self._machine, self._id, image.descriptors)
                    undo.callback(self._try, "remove-fd", {"fdset-id": fdset})
                    node = {"node-name": f"{self._id}.{fdset}"}
                    added = medium_node(node["node-name"], fdset, is_device=image.is_device)
                    execute("blockdev-add", added)
                    undo.callback(self._try, "blockdev-del", node)
            self._open(timeout_s, is_open=is_open, force=force)
            execute("blockdev-remove-medium", {"id": self._id})
            if path:
                undo.callback(self._try, "blockdev-close-tray", {"id": self._id})
                if before:
                    inserted = {"id": self._id, "node-name": before}
                    undo.callback(self._try, "blockdev-insert-medium", inserted)
                execute("blockdev-insert-medium", {"id": self._id, **node})
            undo.pop_all()
        execute("blockdev-close-tray", {"id": self._id})
        if before:
            self._machine.try_execute("blockdev-del", {"node-name": before})
        for one in self._machine.fdsets():
            if one.device_id == self._id and one.number != fdset:
                self._machine.try_execute("remove-fd", {"fdset-id": one.number})

    def _try(self, command: str, arguments: dict[str, Any]) -> None:
        with contextlib.suppress(Exception):  # QEMU may have ended
            self._machine.try_execute(command, arguments)

    def _open(self, timeout_s: float, *, is_open: bool, force: bool) -> None:
        """Open the drive, which the guest may have locked."""
        if not is_open:
            self._machine.qmp.execute("blockdev-open-tray", {"id": self._id, "force": force})
        deadline = time.monotonic() + timeout_s
        while not self._look()[1]:
            if time.monotonic() >= deadline:
                hint = "unmount it in the guest; or --force takes it away all the same"
                text = f"{self._name}: its guest keeps {self._id} locked"
                raise HotplugError(text, hint=hint)
            time.sleep(_PAUSE_S)

    def _look(self) -> tuple[str | None, bool]:
        """The block node of its medium, None if it is empty; and whether it is open."""
        for row in self._machine.list_of("query-block"):
            if row.get("qdev") in (self._id, f"/machine/peripheral/{self._id}"):
                inserted = row.get("inserted")
                node = inserted.get("node-name") if isinstance(inserted, Mapping) else None
                return node if isinstance(node, str) else None, row.get("tray_open") is True
        hint = f"it has that from its next start on: brine instance reboot {self._name}"
        raise InstanceError(self._name, f"runs without the drive {self._id}", hint=hint)


def cdrom(arguments: argparse.Namespace) -> int:
    if (arguments.medium is None) != arguments.eject:
        raise UsageError("no medium is named", hint="name a medium, or give --eject")
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
