"""The work of ``brine instance define --live`` on one instance that runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from brine.common.errors import BrineError
from brine.common.progress import spoken_wait
from brine.common.qmp.wire import QmpClosedError, QmpTimeoutError
from brine.hotplug import plug_disk, plug_nic
from brine.hotplug.session import Vm, remove_device, working_on
from brine.hotplug.timeouts import UNPLUG_TIMEOUT_S
from brine.hotplug.transaction import being_released
from brine.instance import store
from brine.instance.devices import disk_of, nic_of
from brine.instance.kvm.layout import SCSI_CONTROLLER
from brine.instance.kvm.live_changes import KEYS, devices_now
from brine.instance.kvm.live_definition import (
    DeviceStep,
    in_words,
    is_for_next_start,
    rows_of,
    steps_of,
)
from brine.vm.address import Bus, DeviceKind
from brine.vm.files import InstanceFiles
from brine.vm.runtime_file import Runtime, change
from brine.vm.spec import DiskSpec, FormatSource, Interface, NicSpec, Spec, to_json

_WORDS = {"attach": "plugged in", "detach": "taken out", "modify": "changed"}


class LiveWork:
    """The work on one instance: *done* are the steps that have changed something."""

    def __init__(
        self, spec: Spec, before: Spec | None, steps: list[DeviceStep], *, dry_run: bool
    ) -> None:
        self.spec = spec
        self.done: list[DeviceStep] = []
        self.errors: list[BrineError] = []
        self._before = before
        self._undone = steps
        self._dry_run = dry_run

    def undone_keys(self) -> set[str]:
        """The keys of devices that are not as the spec has them."""
        return {step.key for step in self._undone}

    def do_all(self) -> None:
        """Do all steps that can be done. One that fails stops no other, unless QEMU is silent."""
        name = self.spec.name
        files = InstanceFiles(name)
        session = working_on(files.qmp, runtime=files.runtime, dry_run=self._dry_run)
        wait = f"{name}: waiting for its guest, at most {UNPLUG_TIMEOUT_S:g} s a device"
        try:
            with spoken_wait(wait), session as vm:
                if not self._dry_run:
                    self.spec = store.load(name)  # another command may have changed it meanwhile
                # What was interrupted is completed or undone by now.
                leaving = being_released(files.qmp)
                steps = steps_of(self.spec, self._before, devices_now(name), leaving)
                self._undone = list(steps)
                for step in steps:
                    if step.is_live and not self._try(vm, step):
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
        if self._dry_run and self._replaces_one(step):
            return True
        if step.new is None:
            assert step.old
            return _take_out(vm, _kind(step), step.old)
        if isinstance(step.new, DiskSpec):
            return self._plug_disk(vm, step.new)
        nic = nic_of(self.spec, step.new)
        if step.old and (found := vm.find(DeviceKind.NIC, nic.uuid)):
            nic = replace(nic, network=plug_nic.nic_of(found).network)
            return plug_nic.modify_nic(vm, found, nic).changed
        return plug_nic.add_nic(vm, nic).changed

    def _replaces_one(self, step: DeviceStep) -> bool:
        """Whether a device that comes with a UUID of its own has the path or address of one that
        has gone before; but in a dry run that is still there."""
        gone = [in_words(one.old) for one in self.done if one.old and not one.new]
        return step.old is None and step.new is not None and in_words(step.new) in gone

    def _plug_disk(self, vm: Vm, spec: DiskSpec) -> bool:
        disk, is_scsi = disk_of(spec), spec.interface == Interface.SCSI
        return plug_disk.add_disk(
            vm,
            disk,
            is_format_said=spec.format_source != FormatSource.DEFAULT,
            bus=Bus.SCSI if is_scsi else Bus.PCI,
            controller=SCSI_CONTROLLER if is_scsi else None,
        ).changed

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

            def how(runtime: Runtime) -> Runtime:
                spec = {**runtime.rest["spec"], **rows}
                return runtime._replace(rest={**runtime.rest, "spec": spec})

            change(InstanceFiles(name).runtime, how)
        except BrineError as error:
            self.errors.append(BrineError(f"{name}: {error}", hint=error.hint))
        except OSError as error:
            self.errors.append(store.system_error(name, error))

    def _undone_of(self, key: str) -> tuple[set[str], list[DiskSpec | NicSpec]]:
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
        yield from (to_json(one) for one in getattr(self.spec, key) if one.uuid not in undone)
        yield from map(to_json, old)


def _kind(step: DeviceStep) -> DeviceKind:
    return DeviceKind.DISK if step.key == "disks" else DeviceKind.NIC


def _take_out(vm: Vm, kind: DeviceKind, device: DiskSpec | NicSpec) -> bool:
    found = vm.find(kind, device.uuid)
    if found:
        return remove_device(vm, found).changed
    if not is_for_next_start(device):
        vm.refuse_boot_device(kind, device.uuid)
    elif vm.runtime and not vm.dry_run:
        change(vm.runtime, lambda runtime: runtime.without_device(kind, device.uuid))
    return False
