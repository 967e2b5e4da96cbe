"""``brine instance define --live``: giving a running instance the disks and NICs of its new spec.

The spec in the runtime file has the declared devices that the instance has by now. A device that
could not be changed is not as the spec has it there, so it waits for a restart, and the next such
command tries again. A device that is in no spec was plugged in by hand, and stays.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from brine.common.errors import BrineError
from brine.common.progress import spoken_wait
from brine.common.qmp.wire import QmpClosedError, QmpTimeoutError
from brine.hotplug import plug_disk, plug_nic
from brine.hotplug.locked_vm import Vm
from brine.hotplug.session import remove_device, working_on
from brine.hotplug.timeouts import Waits
from brine.hotplug.transaction import Pending, being_released
from brine.instance import store
from brine.instance.kvm.layout import SCSI_CONTROLLER
from brine.instance.kvm.runtime_devices import KEYS, DevicesNow, as_asked, devices_now
from brine.instance.observe import Observed, Oper
from brine.instance.running_spec import running_spec
from brine.vm.address import DeviceKind
from brine.vm.disk import Disk, Interface, without_empty
from brine.vm.files import InstanceFiles
from brine.vm.nic import Nic
from brine.vm.runtime_file import change_file
from brine.vm.spec import Spec, to_json
from brine.vm.values import RESERVED_SLOTS
from brine.vm.vif import Vif

_WAITS = Waits()
_WORDS = {"attach": "plugged in", "detach": "taken out", "modify": "changed"}


@dataclass(frozen=True, slots=True)
class LiveResult:
    """The changes that were made to a running instance.

    :param spec: with the slots of what was plugged in.
    :param attached: the devices that were plugged in. A NIC that was changed is also *detached*.
    :param pending: the keys of the spec that the instance gets at its next start.
    :param errors: of each device that could not be changed.
    """

    spec: Spec
    attached: tuple[Disk | Nic, ...] = ()
    detached: tuple[Disk | Nic, ...] = ()
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


def _named(device: Disk | Nic) -> dict[str, str]:
    if isinstance(device, Nic):
        return {"kind": "nic", "uuid": device.uuid, "mac": device.mac, "link": device.link}
    return {"kind": "disk", "uuid": device.uuid, "path": device.path}


def in_words(device: Disk | Nic) -> str:
    return f"NIC {device.mac}" if isinstance(device, Nic) else f"disk {device.path}"


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """The way of a device from what the instance has to what its spec has.

    :param old: what it has; None if it has no such device. So is *new*.
    :param is_live: whether it can be done while the instance runs.
    """

    key: str
    old: Disk | Nic | None
    new: Disk | Nic | None
    is_live: bool

    @property
    def uuid(self) -> str:
        """The UUID of the device."""
        return (self.new or self.old or Disk(path="")).uuid

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
    controller = f"virtio-scsi-pci,id={SCSI_CONTROLLER}"
    has_scsi = any(word.startswith(controller) for word in devices.runtime.command())

    def step(key: str, old: Any, new: Any) -> DeviceStep:
        ends = [one for one in (old, new) if isinstance(one, Disk)]
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


def is_for_next_start(device: Disk | Nic) -> bool:
    """Whether a device of the runtime file is only recorded there, by ``--no-hotplug``."""
    is_fixed = isinstance(device, Disk) and device.interface == Interface.IDE
    return device.slot < 0 and not is_fixed


def change_live(
    spec: Spec,
    before: Spec | None,
    seen: Observed | None,
    *,
    dry_run: bool,
    only: str = "",
    reserved: int = RESERVED_SLOTS,
    waits: Waits = _WAITS,
) -> LiveResult:
    """Make the disks and NICs of a running instance as its spec has them, as far as possible.

    :param spec: which is stored by now, unless it is a dry run.
    :param before: the former spec.
    :param seen: the instance as it was observed; None if it does not run.
    :param only: the UUID of the one device that is changed; empty is all.
    :param reserved: slots of ``pci.0`` that new disks leave free.
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
    work = _LiveWork(
        spec, before, steps, dry_run=dry_run, only=only, reserved=reserved, waits=waits
    )
    if any(step.is_live for step in steps):
        work.do_all()
    if not dry_run:
        work.record()
    left = {*(set(pending) - set(KEYS)), *work.undone_keys()}
    return LiveResult(
        work.spec,
        tuple(step.new for step in work.done if step.new),
        tuple(step.old for step in work.done if step.old),
        tuple(key for key in to_json(spec) if key in left),
        tuple(work.errors),
    )


def rows_of(spec: Spec) -> dict[str, list[dict[str, Any]]]:
    """The devices of a spec that may change live, as JSON."""
    return {key: [to_json(one) for one in getattr(spec, key)] for key in KEYS}


class _LiveWork:
    """The work on one instance: *done* are the steps that have changed something."""

    def __init__(
        self,
        spec: Spec,
        before: Spec | None,
        steps: list[DeviceStep],
        *,
        dry_run: bool,
        only: str,
        reserved: int,
        waits: Waits,
    ) -> None:
        self.spec = spec
        self.done: list[DeviceStep] = []
        self.errors: list[BrineError] = []
        self._before = before
        self._undone = steps
        self._dry_run = dry_run
        self._only = only
        self._reserved = reserved
        self._waits = waits

    def undone_keys(self) -> set[str]:
        """The keys of devices that are not as the spec has them."""
        return {step.key for step in self._undone}

    def do_all(self) -> None:
        """Do all steps that can be done. One that fails stops no other, unless QEMU is silent."""
        name = self.spec.name
        files = InstanceFiles(name)
        how = self._waits._asdict()
        session = working_on(files.qmp, runtime=files.runtime, dry_run=self._dry_run, **how)
        wait = f"{name}: waiting for its guest, at most {self._waits.timeout_s:g} s a device"
        try:
            with spoken_wait(wait), session as vm:
                if not self._dry_run:
                    self.spec = store.load(name)  # another command may have changed it meanwhile
                # Interrupted work is completed or undone by now.
                leaving = being_released(files.qmp)
                steps = steps_of(self.spec, self._before, devices_now(name), leaving)
                self._undone = list(steps)
                for step in steps:
                    is_chosen = not self._only or self._only == step.uuid
                    if step.is_live and is_chosen and not self._try(vm, step):
                        break
        except BrineError as error:
            self.errors.append(BrineError(f"{name}: {error}", hint=error.hint))
        except OSError as error:
            self.errors.append(store.system_error(name, error))

    def _try(self, vm: Vm, step: DeviceStep) -> bool:
        """Do a step; False if QEMU does not answer."""
        device = step.new or step.old
        assert device
        try:
            has_changed = self._do(vm, step)
        except BrineError as error:
            text = f"{vm.name}: {in_words(device)} is not {_WORDS[step.verb]}: {error}"
            self.errors.append(BrineError(text, hint=error.hint))
            return not isinstance(error, QmpTimeoutError | QmpClosedError)
        except OSError as error:
            text = f"{in_words(device)} is not {_WORDS[step.verb]}: {error.strerror}"
            self.errors.append(BrineError(f"{vm.name}: {text}"))
            return True
        self._undone.remove(step)
        if has_changed:
            self.done.append(step)
        return True

    def _do(self, vm: Vm, step: DeviceStep) -> bool:
        if self._dry_run and (self._replaces_one(step) or _is_to_be_made(step)):
            return True
        if step.new is None:
            assert step.old
            return _take_out(vm, _kind(step), step.old)
        if isinstance(step.new, Disk):
            return self._plug_disk(vm, step.new)
        nic = Vif.of(self.spec, step.new)
        if step.old and (found := vm.find(DeviceKind.NIC, nic.uuid)):
            nic = replace(nic, network=plug_nic.nic_of(found).network)
            return plug_nic.replace_nic(vm, found, nic).changed
        return plug_nic.plug_nic_in(vm, nic).changed

    def _replaces_one(self, step: DeviceStep) -> bool:
        """Whether a device that comes with a UUID of its own has the path or address of one that
        has gone before; but in a dry run that is still there."""
        gone = [in_words(one.old) for one in self.done if one.old and not one.new]
        return step.old is None and step.new is not None and in_words(step.new) in gone

    def _plug_disk(self, vm: Vm, disk: Disk) -> bool:
        controller = SCSI_CONTROLLER if disk.interface == Interface.SCSI else None
        plugged = plug_disk.plug_disk_in(vm, disk, controller=controller, reserved=self._reserved)
        return plugged.changed

    def record(self) -> None:
        """Record which declared devices the instance has, and the slots that they have got."""
        name = self.spec.name
        try:
            placed = self._placed(devices_now(name).now)
            if placed != self.spec:
                with store.alone(name):
                    stored = store.load(name)
                    if rows_of(stored) == rows_of(self.spec):
                        store.save(replace(stored, disks=placed.disks, nics=placed.nics))
                self.spec = placed
            rows = {key: list(self._had(key)) for key in KEYS}
            change_file(InstanceFiles(name).runtime, lambda runtime: runtime.with_started(**rows))
        except BrineError as error:
            self.errors.append(BrineError(f"{name}: {error}", hint=error.hint))
        except OSError as error:
            self.errors.append(store.system_error(name, error))

    def _undone_of(self, key: str) -> tuple[set[str], list[Disk | Nic]]:
        """The UUIDs of devices that are not as the spec has them, and what the instance has of
        them."""
        undone = [step for step in self._undone if step.key == key]
        uuids = {step.new.uuid for step in undone if step.new}
        return uuids, [step.old for step in undone if step.old]

    def _placed(self, now: Spec) -> Spec:
        """The spec, with the slots that QEMU's devices have got where the spec names none."""
        placed: dict[str, Any] = {}
        for key in KEYS:
            slots = {one.uuid: one.slot for one in getattr(now, key)}
            undone, _ = self._undone_of(key)
            placed[key] = tuple(
                replace(one, slot=slots.get(one.uuid, -1))
                if one.slot < 0 and one.uuid not in undone
                else one
                for one in getattr(self.spec, key)
            )
        return replace(self.spec, **placed)

    def _had(self, key: str) -> Iterator[dict[str, Any]]:
        """The declared devices that the instance has, as JSON."""
        undone, old = self._undone_of(key)
        had = [one for one in getattr(self.spec, key) if one.uuid not in undone]
        yield from (without_empty(to_json(one)) for one in (*had, *old))


def _is_to_be_made(step: DeviceStep) -> bool:
    """Whether a disk's volume is not there yet; it is made before it is plugged in."""
    disk = step.new
    return isinstance(disk, Disk) and bool(disk.unit) and not os.path.exists(disk.path)


def _kind(step: DeviceStep) -> DeviceKind:
    return DeviceKind.DISK if step.key == "disks" else DeviceKind.NIC


def _take_out(vm: Vm, kind: DeviceKind, device: Disk | Nic) -> bool:
    found = vm.find(kind, device.uuid)
    if found:
        return remove_device(vm, found).changed
    if not is_for_next_start(device):
        vm.refuse_boot_device(kind, device.uuid)
    elif vm.runtime and not vm.dry_run:
        change_file(vm.runtime, lambda runtime: runtime.without_device(kind, device.uuid))
    return False
