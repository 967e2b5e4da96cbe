"""The changes that ``brine instance define --live`` makes to a running instance's disks and NICs.

The spec in the runtime file has the declared devices that the instance has by now. A device that
could not be changed is not as the spec has it there, so it waits for a restart, and the next such
command tries again. A device that is in no spec was plugged in by hand, and stays.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from brine.common.errors import BrineError
from brine.hotplug.transaction import Pending, being_released
from brine.instance.kvm.layout import SCSI_CONTROLLER
from brine.instance.kvm.live_changes import KEYS, DevicesNow, as_asked, devices_now
from brine.instance.observe import Observed, Oper
from brine.instance.running_spec import running_spec
from brine.vm.files import InstanceFiles
from brine.vm.spec import DiskSpec, Interface, NicSpec, Spec, to_json


@dataclass(frozen=True, slots=True)
class LiveResult:
    """The changes that were made to a running instance.

    :param spec: with the slots of what was plugged in.
    :param attached: the devices that were plugged in. A NIC that was changed is also *detached*.
    :param pending: the keys of the spec that the instance gets at its next start.
    :param errors: of each device that could not be changed.
    """

    spec: Spec
    attached: tuple[DiskSpec | NicSpec, ...] = ()
    detached: tuple[DiskSpec | NicSpec, ...] = ()
    pending: tuple[str, ...] = ()
    errors: tuple[BrineError, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """It as ``--json`` shows it."""
        return {
            "attached": [_named(one) for one in self.attached],
            "detached": [_named(one) for one in self.detached],
            "restart_pending": list(self.pending),
            "live_errors": [f"{one}; {one.hint}" if one.hint else str(one) for one in self.errors],
        }


def _named(device: DiskSpec | NicSpec) -> dict[str, str]:
    if isinstance(device, NicSpec):
        return {"kind": "nic", "uuid": device.uuid, "mac": device.mac, "link": device.link}
    return {"kind": "disk", "uuid": device.uuid, "path": device.path}


def in_words(device: DiskSpec | NicSpec) -> str:
    return f"NIC {device.mac}" if isinstance(device, NicSpec) else f"disk {device.path}"


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """The way of a device from what the instance has to what its spec has.

    :param old: what it has; None if it has no such device. So is *new*.
    :param is_live: whether it can be done while the instance runs.
    """

    key: str
    old: DiskSpec | NicSpec | None
    new: DiskSpec | NicSpec | None
    is_live: bool

    @property
    def verb(self) -> str:
        """The name of this change."""
        if self.old and self.new:
            return "modify"
        return "attach" if self.new else "detach"


def steps_of(
    spec: Spec, before: Spec | None, devices: DevicesNow, leaving: Collection[Pending] = ()
) -> list[DeviceStep]:
    """All steps, those first that free a slot, a disk or an address.

    :param before: the former spec: what it has too is declared.
    :param leaving: the work on devices that the guest may still release. A device of these that
        the spec has gets a step, which plugs it in again if it is gone by then.
    """
    command = devices.runtime.rest.get("command") or ()
    has_scsi = any(
        str(word).startswith(f"virtio-scsi-pci,id={SCSI_CONTROLLER}") for word in command
    )

    def step(key: str, old: Any, new: Any) -> DeviceStep:
        ends = [one for one in (old, new) if isinstance(one, DiskSpec)]
        is_fixed = any(one.interface == Interface.IDE for one in ends) or len(ends) > 1
        lacks_bus = new in ends and new.interface == Interface.SCSI and not has_scsi
        return DeviceStep(key, old, new, is_live=not (is_fixed or lacks_bus))

    steps = []
    for key in KEYS:
        now = {one.uuid: one for one in getattr(devices.now, key)}
        wanted = {one.uuid: one for one in getattr(spec, key)}
        declared = [*getattr(devices.declared, key), *(getattr(before, key) if before else ())]
        for uuid in {one.uuid: None for one in declared if one.uuid not in wanted}:
            if uuid in now:
                steps.append(step(key, now[uuid], None))
        for uuid, new in wanted.items():
            old = now.get(uuid)
            if old and is_for_next_start(old):
                old = None
            if old is None or as_asked(old) != as_asked(new):
                steps.append(step(key, old, new))
            elif any(one.is_of(uuid) for one in leaving):
                steps.append(DeviceStep(key, old, new, is_live=True))
    return sorted(steps, key=lambda one: ("detach", "modify", "attach").index(one.verb))


def is_for_next_start(device: DiskSpec | NicSpec) -> bool:
    """Whether a device of the runtime file is only recorded there, by ``--no-hotplug``."""
    is_fixed = isinstance(device, DiskSpec) and device.interface == Interface.IDE
    return device.slot < 0 and not is_fixed


def change_live(
    spec: Spec, before: Spec | None, seen: Observed | None, *, dry_run: bool
) -> LiveResult:
    """Make the disks and NICs of a running instance as its spec has them, as far as possible.

    :param spec: which is stored by now, unless it is a dry run.
    :param before: the former spec.
    :param seen: the instance as it was observed; None if it does not run.
    """
    running = running_spec(replace(seen, spec=spec)) if seen else None
    pending = running.pending if running else ()
    if seen is None or spec.is_xen() or seen.state.oper is not Oper.RUNNING:
        return LiveResult(spec, pending=pending)
    try:
        devices = devices_now(spec.name)
        steps = steps_of(spec, before, devices, being_released(InstanceFiles(spec.name).qmp))
    except BrineError as error:
        is_same = before and (before.disks, before.nics) == (spec.disks, spec.nics)
        return LiveResult(spec, pending=pending, errors=() if is_same else (error,))
    if not steps and (dry_run or rows_of(devices.declared) == rows_of(spec)):
        return LiveResult(spec, pending=tuple(key for key in pending if key not in KEYS))
    from brine.instance.kvm.live_work import LiveWork

    work = LiveWork(spec, before, steps, dry_run=dry_run)
    if any(step.is_live for step in steps):
        work.do_all()
    if not dry_run:
        work.record()
    waits = {*(set(pending) - set(KEYS)), *work.undone_keys()}
    return LiveResult(
        work.spec,
        tuple(step.new for step in work.done if step.new),
        tuple(step.old for step in work.done if step.old),
        tuple(key for key in to_json(spec) if key in waits),
        tuple(work.errors),
    )


def rows_of(spec: Spec) -> dict[str, list[dict[str, Any]]]:
    """The devices of a spec that may change live, as JSON."""
    return {key: [to_json(one) for one in getattr(spec, key)] for key in KEYS}
