"""What is made on a node for an instance that moves there, and what is removed of it if the move is
given up. Each function may be called again after it was killed at any place."""

from __future__ import annotations

import os
import time
from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from brine.common.errors import BrineError, warn
from brine.common.progress import Tell
from brine.hotplug.net.announce import announce
from brine.hotplug.net.wiring import wire
from brine.instance import store, unit
from brine.instance.awaited import forget_awaited, note_awaited
from brine.instance.conflicts import refuse_conflicts
from brine.instance.disks.volumes import request_of
from brine.instance.kvm.runtime_devices import devices_now
from brine.instance.start import forget_tries, start_failure
from brine.instance.store import InstanceError, is_here, telling
from brine.instance.supervisor import supervisor
from brine.instance.unit import UnitError
from brine.moves.copying import remove_volume
from brine.moves.migration import MoveError
from brine.moves.offered import OfferedDisk, ReceivedOffer
from brine.storage.unit import UnitStatus
from brine.storage.volume import Wipe
from brine.storage.volumes import as_it_is, volume_in
from brine.vm.conflicts import NONE_PLANNED, identities_lock
from brine.vm.disk import Disk
from brine.vm.spec import Spec
from brine.vm.values import Mode
from brine.vm.vif import Vif

_PROGRAM = "brine-move"
_ENDS_S = 60.0


def make_volumes(offer: ReceivedOffer, units: Mapping[str, str], tell: Tell) -> Spec:
    """Make the volumes of an instance, empty; returns its spec with them.

    :param units: by the UUID of the disk, as it was recorded before.
    :raises BrineError: which one can't be made.
    """
    spec, offered = offer.spec_here(units), {one.uuid: one for one in offer.copied()}
    disks = [
        _with_volume(spec.name, disk, offered[disk.uuid], tell) if disk.uuid in units else disk
        for disk in spec.disks
    ]
    return replace(spec, disks=tuple(disks))


def _with_volume(name: str, disk: Disk, offered: OfferedDisk, tell: Tell) -> Disk:
    volume = volume_in(disk.unit, disk.uuid)
    if volume.status().status is UnitStatus.MISSING:
        # The source writes all of it.
        request = request_of(volume, disk, size=offered.size, owner=name, wipe=Wipe.ENDS)
        request = replace(request, is_exact=True, snapshots=offered.snapshots)
        volume.create(request, tell)
    size = volume.status().size
    if size != offered.size:
        text = f"{disk.path}: has {size} bytes, and the source's {offered.size}"
        raise MoveError(text, hint="two volume groups need extents of one size for that")
    return as_it_is(disk)


def define(spec: Spec, source: str) -> Spec:
    """Have an instance be known here as the source's, so that nothing starts it.

    :param source: the name of its node.
    :raises BrineError: if another instance here has its UUID, a MAC address or a disk of it.
    """
    spec = replace(spec, node=source)
    with store.alone(spec.name):
        if store.load_sound(spec.name) != spec:
            with identities_lock(partial(refuse_conflicts, spec, None, NONE_PLANNED)):
                store.save(spec)
    return spec


def keep_tries(offer: ReceivedOffer) -> None:
    """Have the watcher know the tries of an instance.

    :raises BrineError: if these are none.
    """
    if offer.tries:
        supervisor().keep(offer.name, offer.tries)


def start_waiting(offer: ReceivedOffer, spec: Spec) -> None:
    """Start the QEMU that waits for the guest, in the instance's unit.

    :raises InstanceError: why it does not start.
    """
    runtime = offer.runtime_here(spec)
    if runtime is None:
        raise InstanceError(spec.name, "does not run on its node")
    note_awaited(spec.name, runtime)
    before, since_us = unit.find_unit(spec.name), time.monotonic_ns() // 1000
    try:
        unit.begin_start(spec.name, slice_name=spec.slice)()
    except UnitError as error:
        raise start_failure(spec.name, error, before, since_us=since_us) from error
    forget_awaited(spec.name)  # of a start that was underway already, after a kill


def settle_copies(units: Mapping[str, str]) -> None:
    """Have volumes whose files were copied be like those that were made here.

    :param units: by the UUID of the disk.
    """
    for uuid, unit_of_it in units.items():
        volume_in(unit_of_it, uuid).settle_copy()


@contextmanager
def synced(spec: Spec, uuids: Container[str]) -> Iterator[None]:
    """Have the volumes of an instance survive a loss of power, with all that the block has written.

    They are opened before the block: of an error of writing that the kernel has told to one
    program, those that open the file later hear nothing.

    :param uuids: of their disks.
    :raises InstanceError: if one has not been written.
    """
    with ExitStack() as stack:
        found: list[tuple[str, int]] = []
        for disk in spec.disks:
            if disk.uuid not in uuids:
                continue
            for path in (disk.path, *(one.path for one in disk.layers())):
                with telling(spec.name, f"{path}: can't be synced"):
                    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                stack.callback(os.close, descriptor)
                found.append((path, descriptor))
        yield
        for path, descriptor in found:
            with telling(spec.name, f"{path}: can't be synced"):
                os.fsync(descriptor)


def route(name: str) -> None:
    """Have the node's network lead to a guest with routed NICs, whose addresses led to its former
    node. What fails is a warning: the guest is to go on."""
    for nic in _routed(name):
        try:
            wire(nic.tap_name(), nic)
        except BrineError as error:
            warn(f"{name}: NIC {nic.mac} is not reached: {error}", program=_PROGRAM)


def announce_routes(name: str) -> None:
    """Tell the neighbours of this node that they reach the addresses of routed NICs here."""
    for nic in _routed(name):
        try:
            announce(nic.tap_name())
        except (BrineError, OSError) as error:
            warn(f"{name}: NIC {nic.mac} is not announced: {error}", program=_PROGRAM)


def _routed(name: str) -> list[Vif]:
    try:
        if store.load(name).is_xen():
            return []  # the start of its domain has made them
        spec = devices_now(name).now
    except BrineError as error:
        warn(f"{name}: its NICs: {error}", program=_PROGRAM)
        return []
    nics = [Vif.of(spec, nic) for nic in spec.nics]
    return [nic for nic in nics if nic.mode == Mode.ROUTED]


def await_unit_down(name: str) -> None:
    """Wait until the unit of an instance whose QEMU has been told to end is down; end it if that
    takes too long.

    :raises MoveError: if it does not end.
    """
    for attempt in (False, True):
        found = unit.find_unit(name)
        if found is None:
            return
        if attempt:
            unit.stop_unit(name)
        if unit.wait_ended(found.run, timeout_s=_ENDS_S):
            return
    raise MoveError(f"{name}: the QEMU that waits for its guest does not end")


def remove_all(offer: ReceivedOffer, units: Mapping[str, str], *, made_password: bool) -> None:
    """Remove what was made for an instance that does not come. Its QEMU has ended before.

    :param units: by the UUID of the disk, as it was recorded before.
    :param made_password: whether this node did not have the file with the password of VNC.
    """
    name = offer.name
    forget_awaited(name)
    with store.alone(name):
        spec = store.load_sound(name)
        if spec and (spec.uuid != offer.spec.uuid or is_here(spec)):
            raise MoveError(f"{name}: is another instance here, or this node's by now")
        store.remove(name)
        store.forget(name)
    forget_tries(name)
    for uuid, unit_of_it in units.items():
        remove_volume(volume_in(unit_of_it, uuid))
    if made_password:
        file = offer.spec.vnc_password_file
        others = (one for one in store.load_all() if isinstance(one, Spec))
        if all(one.vnc_password_file != file for one in others):
            Path(file).unlink(missing_ok=True)
    unit.forget_failure(name)
    with suppress(UnitError):  # the next start of that name does it
        unit.forget_slice(name)
