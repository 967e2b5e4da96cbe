"""What ``brine-instance@.service`` runs: prepares all that QEMU needs, and becomes QEMU.

No process of ours stays. What fails before is told in one line, and undone; what QEMU refuses it
tells itself, and the unit's last step undoes the rest.
"""

from __future__ import annotations

import grp
import json
import os
import sys
from contextlib import ExitStack, suppress
from typing import Any, NoReturn

from brine.common import markers, paths
from brine.common.errors import BrineError, die
from brine.common.files import write_whole
from brine.common.markers import MarkerKind
from brine.common.peer import is_listening
from brine.hotplug.disk import placed_disk
from brine.instance import files, messages, store
from brine.instance.control import Control, control_of, domain_file
from brine.instance.devices import disk_of, nic_of, with_formats_found
from brine.instance.intent import offline
from brine.instance.kvm.command_line import Resources, qemu_args
from brine.instance.kvm.layout import Layout, layout_of, with_slots
from brine.instance.kvm.live_changes import differences, dropped, hot_changes_or_aside
from brine.instance.kvm.resources import check_node, missing_paths_of, open_resources
from brine.instance.schema import to_json
from brine.instance.spec import AdminState, SecurityModel, Spec
from brine.instance.store import InstanceError, refuse_elsewhere, refuse_in_use
from brine.instance.unit import (
    UnitError,
    allow_locked_memory,
    confine_qemu,
    confine_runner,
    set_limits,
    wait_for_network,
)

_PROGRAM = "brine-instance"
_RUNTIME_MODE = 0o600


def main() -> NoReturn:
    """Become the QEMU of the instance that is named on the command line, or the xl that makes its
    domain."""
    name = sys.argv[1] if len(sys.argv) == 2 else ""
    messages.log_to_journal(_PROGRAM)
    try:
        spec = _current(name)
        if spec.wait_for_network:
            _wait_for_network(name)
        if spec.is_xen():
            from brine.instance.xen.domain import become_xl, make_room, make_way  # most are QEMU's

            make_room(but=name)
            make_way(spec)
            _clear(name)
            become_xl(spec)
        confine_runner()
        become_qemu(spec)
    except BrineError as error:
        _note_failure(name)
        die(_PROGRAM, error, 1)
    except OSError as error:
        _note_failure(name)
        text = f"{name}: {error.filename or 'the system'}: {error.strerror}"
        die(_PROGRAM, BrineError(text), 1)


def _note_failure(name: str) -> None:
    """Note what of the node this start lacked: the watcher tries again as soon as it is there."""
    try:
        lacks = missing_paths_of(store.load(name))
    except BrineError:
        return  # its spec is the fault, which is told
    try:
        markers.write_marker(MarkerKind.FAILURE, name, run=markers.this_run(), lacks=lacks)
    except OSError as error:
        print(f"{_PROGRAM}: warning: {name}: its failure can't be noted: {error}", file=sys.stderr)


def become_qemu(spec: Spec) -> NoReturn:
    """Prepare all that *spec* needs, and become its QEMU.

    :raises BrineError: what can't be had. Then nothing is left.
    :raises OSError: of QEMU's program, or of a file of ours.
    """
    layout = layout_of(spec)
    allow_locked_memory(spec)
    check_node(spec)
    with ExitStack() as stack:
        resources, sizes = open_resources(spec, stack)
        refuse_in_use(spec)
        args = qemu_args(spec, layout, resources)
        set_limits(spec)
        _clear(spec.name)
        _write_runtime(spec, layout, resources, sizes, args)
        if spec.security_model == SecurityModel.POOL and resources.identity:
            messages.tell(messages.UID_GIVEN, spec.name, uid=resources.identity.user)
        confine_qemu(spec)
        os.execv(spec.qemu, args)


def _current(name: str) -> Spec:
    """The spec with what was plugged while it ran last, which it has from now on."""
    with store.alone(name):
        files.settle(name)
        spec = store.load(name)
        _refuse_running(spec, control_of(name))
        if spec.admin_state == AdminState.OFFLINE:
            raise offline(name)  # whoever asks, as systemd does
        refuse_elsewhere(spec)
        if spec.is_xen():  # nothing is plugged into it
            if (found := with_formats_found(spec)) != spec:
                store.save(found)
            return found
        changed, aside = hot_changes_or_aside(spec)
        if aside:
            print(f"{_PROGRAM}: warning: {name}: {aside}", file=sys.stderr)
        if gone := dropped(changed):
            text = f"not in its spec, and plugged no more: {', '.join(gone)}"
            print(f"{_PROGRAM}: warning: {name}: {text}", file=sys.stderr)
        if said := differences(spec, changed):
            messages.tell(messages.HOT_CHANGES, name, how=", ".join(said))
        changed = with_formats_found(changed)
        changed = with_slots(changed, layout_of(changed))
        if changed != spec:
            store.save(changed)
    return changed


def _wait_for_network(name: str) -> None:
    try:
        wait_for_network()
    except UnitError as error:
        # Whether its disks and bridges are there is seen by themselves.
        print(f"{_PROGRAM}: warning: {name}: the node's network: {error}", file=sys.stderr)


def _refuse_running(spec: Spec, control: Control) -> None:
    """Leave alone a VM of that name which runs without us."""
    if not is_listening(control.qmp):
        return
    text = f"{control.qmp}: a VM of that name runs already, and not as this unit"
    raise InstanceError(spec.name, text)


def _clear(name: str) -> None:
    """Remove what the last run has left."""
    control = control_of(name)
    folder = control.qmp.parent
    if not folder.is_dir():
        folder.mkdir(parents=True)
        # As systemd-tmpfiles makes it: for the group, whose the files in it are.
        with suppress(KeyError):
            os.chown(folder, -1, grp.getgrnam(paths.CONTROL_GROUP).gr_gid)
        folder.chmod(0o2770)
    control.unit.parent.mkdir(mode=0o700, exist_ok=True)
    for file in (*control.sockets(), control.stopping, control.shutdown):
        markers.clear_way(file)
    # Whatever becomes of this start, it is not what the last one has made.
    domain_file(name).unlink(missing_ok=True)
    _mark_start(name)


def _mark_start(name: str) -> None:
    """Have it be known which run begins: others know QEMU by the number of this process. What was
    said of the last one explains nothing from now on."""
    markers.write_marker(MarkerKind.START, name, run=markers.this_run(), pid=os.getpid())
    for kind in (MarkerKind.SHUTDOWN, MarkerKind.REBOOT, MarkerKind.ASKED, MarkerKind.FAILURE):
        markers.remove_marker(kind, name)


def _write_runtime(
    spec: Spec, layout: Layout, given: Resources, sizes: dict[str, int], args: list[str]
) -> None:
    """Have the runtime file say what QEMU is about to have."""
    disks = []
    for each in spec.disks:
        if placed := layout.disks.get(each.uuid):
            size_mib = sizes[each.uuid]
            disk = disk_of(each)
            disks.append(placed_disk(disk, size_mib, placed.slot, placed.bus, placed.device_id))
    nics = []
    if spec.nics:
        from brine.hotplug.nic import recorded_nic

        nics = [recorded_nic(nic_of(spec, nic), layout.nics[nic.uuid].slot) for nic in spec.nics]
    data: dict[str, Any] = {
        "spec": to_json(spec),
        "command": args,
        "user": given.identity.user if given.identity else None,
        "nics": nics,
        "disks": disks,
    }
    paths.RUNTIME_DIR.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = paths.RUNTIME_DIR / f"{spec.name}.json"
    write_whole(file, json.dumps(data, indent=1).encode() + b"\n", mode=_RUNTIME_MODE, alone=True)


if __name__ == "__main__":
    main()
