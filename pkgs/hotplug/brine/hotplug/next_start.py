"""Changes of a runtime file alone, for the VM's next start: what ``--no-hotplug`` does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from brine.common.errors import UsageError
from brine.hotplug.target import Target
from brine.vm.address import DeviceKind, is_like_ours, new_mac, uuid_of_mac
from brine.vm.conflicts import identities_lock, refuse_taken
from brine.vm.identities import Identity
from brine.vm.runtime_file import Json, Runtime, RuntimeFileError, change_file, in_brines_form
from brine.vm.vif import Vif

How = Callable[[Runtime], tuple[Runtime, str]]
"""Changes the content of a runtime file; returns the UUID of the device, too."""


@dataclass(frozen=True, slots=True)
class NextStart:
    """A runtime file to be changed.

    :param target: the VM that has it.
    :param dry_run: change nothing, and only refuse what would be refused.
    """

    target: Target
    dry_run: bool
    lock_timeout_s: float

    def record(self, how: How, identities: Iterable[Identity] = ()) -> tuple[str, bool]:
        """Change the file; returns the UUID of the device, and whether anything changes.

        :param identities: what the VM gets that no other instance may have.
        :raises UsageError: if the VM has no runtime file.
        """
        file = self.target.runtime_file()
        if file is None:
            hint = "name the VM's runtime file with --runtime"
            raise UsageError("--no-hotplug changes a runtime file, and none is named", hint=hint)
        uuid = ""

        def changed(runtime: Runtime) -> Runtime:
            nonlocal uuid
            new, uuid = how(runtime)
            return new

        check = partial(refuse_taken, self.target.instance(), list(identities))
        with contextlib.nullcontext() if self.dry_run else identities_lock(check):
            if self.dry_run:
                check()
                old = Runtime.load(file)
                is_changed = changed(old) != old
            else:
                is_changed = change_file(file, changed, timeout_s=self.lock_timeout_s)
        return uuid, is_changed


def with_disk(disk: Json, runtime: Runtime) -> tuple[Runtime, str]:
    """Add a disk, or change it."""
    return runtime.with_device(DeviceKind.DISK, disk, link=disk["path"]), disk["uuid"]


def with_nic(nic: Json, runtime: Runtime) -> tuple[Runtime, str]:
    """Add a NIC, completed from the file: the UUID that its MAC has there, or the MAC of its
    UUID."""
    uuid, mac = nic["uuid"], nic["mac"]
    if not mac:
        there = runtime.find(DeviceKind.NIC, uuid) or {}
        nic = {**nic, "mac": str(there.get("mac") or new_mac())}
    elif taken := _other_with(runtime, mac, uuid):
        if uuid != uuid_of_mac(mac):
            raise _taken(runtime, mac, taken, "choose another --mac, or leave out --uuid")
        # With another UUID, its tap has another name.
        nic = Vif.from_recorded({**nic, "uuid": taken}).recorded()
    return runtime.with_device(DeviceKind.NIC, nic), nic["uuid"]


def _other_with(runtime: Runtime, mac: str, uuid: str) -> str | None:
    """The UUID of another NIC with that MAC."""
    uuids = [one["uuid"] for one in runtime.known_as(DeviceKind.NIC, mac)] if mac else []
    return next((one for one in uuids if one != uuid), None)


def _taken(runtime: Runtime, mac: str, uuid: str, hint: str) -> RuntimeFileError:
    text = f"{mac} is the MAC address of NIC {uuid} there"
    return RuntimeFileError(runtime.file, text, hint=hint)


def with_changed_nic(
    vm_name: str, reference: str, changed: Callable[[Vif], Vif], runtime: Runtime
) -> tuple[Runtime, str]:
    """Change a NIC.

    :param vm_name: the instance of the NIC, if the file does not name it.
    :param reference: names the NIC.
    """
    found = _recorded(runtime, DeviceKind.NIC, reference, must=True) or {}
    before = _nic_of(runtime, found, vm_name)
    nic = changed(before)
    if nic == before:
        return runtime, nic.uuid
    if taken := _other_with(runtime, nic.mac, nic.uuid):
        raise _taken(runtime, nic.mac, taken, "choose another --mac")
    return runtime.with_device(DeviceKind.NIC, nic.recorded()), nic.uuid


def without(kind: DeviceKind, reference: str, runtime: Runtime) -> tuple[Runtime, str]:
    """Remove the device that a reference names, if it is there."""
    found = _recorded(runtime, kind, reference, must=not is_like_ours(kind, reference))
    if found is None:
        return runtime, reference
    return runtime.without_device(kind, found["uuid"]), found["uuid"]


def _recorded(runtime: Runtime, kind: DeviceKind, reference: str, *, must: bool) -> Json | None:
    """The device that a reference names, which there must be, or may be."""
    found = runtime.known_as(kind, reference)
    if must and not found:
        known = ", ".join(one["uuid"] for one in runtime.devices[kind]) or "none"
        raise UsageError(f"no {kind} is known as {reference}", hint=f"recorded are: {known}")
    if len(found) > 1:
        uuids = ", ".join(one["uuid"] for one in found)
        raise UsageError(f"several are known as {reference}", hint=f"choose one of {uuids}")
    return found[0] if found else None


def _nic_of(runtime: Runtime, nic: Json, instance: str) -> Vif:
    """A NIC of a file of any form; what Ganeti's form lacks is as ``nic add`` makes it.

    :param instance: the instance of the NIC, if the file does not name it.
    """
    usual = Vif(instance=instance, uuid=nic["uuid"]).recorded()
    try:
        return Vif.from_recorded(in_brines_form(nic, usual))
    except (KeyError, TypeError, ValueError) as error:
        hint = "record its removal, and then another NIC with the same --uuid"
        text = f"NIC {nic['uuid']} is not as Brine records one: {error}"
        raise RuntimeFileError(runtime.file, text, hint=hint) from error
