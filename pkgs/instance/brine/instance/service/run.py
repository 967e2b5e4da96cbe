"""ExecStart of an instance's unit: prepares a start, and becomes QEMU or xl.

No process of Brine's stays. An error before that is reported in one line, and undone; the unit's
last step undoes the rest.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any, NoReturn

from brine.common.errors import BrineError, die, warn
from brine.common.process import slice_of
from brine.common.unix_socket import is_listening
from brine.instance import messages, store
from brine.instance.awaited import take_awaited
from brine.instance.claims import refuse_barred
from brine.instance.devices import missing_paths_of
from brine.instance.hypervisor_choice import hypervisor_of
from brine.instance.intent import offline
from brine.instance.owner import note_process, refuse_without_owner
from brine.instance.store import InstanceError
from brine.instance.unit import UnitError, wait_for_network
from brine.vm import markers
from brine.vm.files import InstanceFiles
from brine.vm.markers import MarkerKind
from brine.vm.runtime_file import Runtime
from brine.vm.spec import AdminState, Spec
from brine.vm.values import vm_name_fault

_PROGRAM = "brine-instance"


def main() -> NoReturn:
    """Become the QEMU of the instance that is named on the command line, or the xl that makes its
    domain."""
    name = sys.argv[1] if len(sys.argv) == 2 else ""
    messages.log_to_journal(_PROGRAM)
    messages.tell_people_in_journal(_PROGRAM)
    try:
        spec, awaited = _prepared(name)
        if spec.wait_for_network:
            try:
                wait_for_network()
            except UnitError as error:  # its disks and bridges may be there all the same
                warn(f"{name}: the node's network: {error}", program=_PROGRAM)
        if any(disk.unit for disk in spec.disks):
            from brine.instance.disks.states import prepare_volumes  # most have no volume

            prepare_volumes(spec)
        note_process(spec)
        hypervisor_of(spec).exec(spec, awaited)
    except (BrineError, OSError) as error:
        if isinstance(error, OSError):
            text = f"{name}: {os.fsdecode(error.filename or 'the system')}: {error.strerror}"
            error = BrineError(text)
        _note_failure(name, error)
        die(_PROGRAM, error, 1)


def _prepared(name: str) -> tuple[Spec, Runtime | None]:
    """The spec with the devices that were plugged during the last run, which it keeps; or that of a
    guest on another node, which its QEMU waits for, with its runtime file."""
    with store.held(name):  # its move keeps out all others, but has asked for this
        spec = store.load(name)
        _refuse_stray(name)
        if awaited := take_awaited(spec):
            _refuse_other_slice(spec)
            return awaited
    with store.alone(name):
        spec = store.load(name)
        _refuse_stray(name)
        if spec.admin_state == AdminState.OFFLINE:
            raise offline(name)  # also if systemd alone starts the unit
        refuse_barred(spec)
        refuse_without_owner(spec)
        _refuse_other_slice(spec)
        prepared = hypervisor_of(spec).prepared(spec)
        if prepared != spec:
            store.save(prepared)
    return prepared, None


def _refuse_stray(name: str) -> None:
    """Refuse to start beside a QEMU of the same name that is not this unit's."""
    monitor = InstanceFiles(name).qmp
    if is_listening(monitor):
        text = f"{monitor}: a VM of that name runs already, and not as this unit"
        hint = f"ss --unix --listening --processes src {monitor} names its process"
        raise InstanceError(name, text, hint=hint)


def _refuse_other_slice(spec: Spec) -> None:
    """Refuse a start outside of the slice of the spec: systemd alone knows that slice only after a
    start by Brine."""
    found = slice_of(os.getpid())
    if spec.slice and found != spec.slice:
        text = f"its unit is in {found or 'no slice'}, and its spec says {spec.slice}"
        raise InstanceError(spec.name, text, hint=f"brine instance start {spec.name}")


def _note_failure(name: str, error: BrineError) -> None:
    """Note why this start failed, for the command that waits for it, and what it lacked: the
    watcher tries again as soon as it is there."""
    if vm_name_fault(name):
        return
    facts: dict[str, Any] = {"reason": str(error).removeprefix(f"{name}: ")}
    if error.hint:
        facts["hint"] = error.hint
    with suppress(BrineError):  # its spec is the fault
        facts["lacks"] = missing_paths_of(store.load(name))
    try:
        markers.write_marker(MarkerKind.FAILURE, name, run=markers.this_run(), **facts)
    except OSError as fault:
        warn(f"{name}: its failure can't be noted: {fault}", program=_PROGRAM)


if __name__ == "__main__":
    main()
