"""Preparing a start, and becoming the QEMU of an instance.

No process of Brine's stays. What fails before is told in one line, and undone; what QEMU refuses it
tells itself, and the unit's last step undoes the rest.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from typing import Any, NoReturn

from brine.common import paths
from brine.common.files import write_whole
from brine.hotplug.disk import placed_disk
from brine.instance import messages
from brine.instance.confinement import allow_locked_memory, confine_qemu, confine_runner, set_limits
from brine.instance.conflicts import refuse_in_use
from brine.instance.devices import disk_of, nic_of, with_formats_found
from brine.instance.files import clear_last_run
from brine.instance.kvm.command_line import Resources, qemu_args
from brine.instance.kvm.layout import Layout, layout_of, with_slots
from brine.instance.kvm.live_changes import differences, dropped, hot_changes_or_aside
from brine.instance.kvm.resources import check_node, open_resources
from brine.instance.spec import SecurityModel, Spec, to_json

_PROGRAM = "brine-instance"
_RUNTIME_MODE = 0o600
_ANSWER_S = 5.0
_PAUSE_S = 0.02


def with_last_run(spec: Spec) -> Spec:
    """The spec with what was plugged while the instance ran last, which it has from now on. The
    caller is alone with it.

    :raises BrineError: if that can't be known, or a disk looks like another format's image.
    """
    name = spec.name
    changed, aside = hot_changes_or_aside(spec)
    if aside:
        print(f"{_PROGRAM}: warning: {name}: {aside}", file=sys.stderr)
    if gone := dropped(changed):
        text = f"not in its spec, and plugged no more: {', '.join(gone)}"
        print(f"{_PROGRAM}: warning: {name}: {text}", file=sys.stderr)
    if said := differences(spec, changed):
        messages.tell(messages.HOT_CHANGES, name, how=", ".join(said))
    changed = with_formats_found(changed)
    return with_slots(changed, layout_of(changed))


def become_qemu(spec: Spec) -> NoReturn:
    """Prepare all that *spec* needs, and become its QEMU.

    :raises BrineError: what can't be had. Then nothing is left.
    :raises OSError: of QEMU's program, or of a file of ours.
    """
    confine_runner()
    layout = layout_of(spec)
    allow_locked_memory(spec)
    check_node(spec)
    with ExitStack() as stack:
        resources, sizes = open_resources(spec, stack)
        refuse_in_use(spec)
        args = qemu_args(spec, layout, resources)
        set_limits(spec)
        clear_last_run(spec.name)
        _write_runtime(spec, layout, resources, sizes, args)
        if spec.security_model == SecurityModel.POOL and resources.identity:
            messages.tell(messages.UID_GIVEN, spec.name, uid=resources.identity.user)
        confine_qemu(spec)
        os.execv(spec.qemu, args)


def _write_runtime(
    spec: Spec, layout: Layout, given: Resources, sizes: dict[str, int], args: list[str]
) -> None:
    """Write the runtime file of a QEMU that is about to start."""
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
    file = paths.InstanceFiles(spec.name).runtime
    write_whole(file, json.dumps(data, indent=1).encode() + b"\n", mode=_RUNTIME_MODE, alone=True)
