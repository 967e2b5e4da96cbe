"""The offer of an instance: all that another node needs to take it, or why it can't move.

It is made by reading alone. The other node compares itself with it before it does anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from brine.common.errors import BrineError
from brine.common.mounts import MOUNTS
from brine.common.operation import AnswerState, StepAnswer
from brine.hotplug.block_graph import size_of_disk
from brine.hotplug.qemu import Machine
from brine.instance.disks.states import DiskState
from brine.instance.kvm.guest import monitor_of
from brine.instance.movable import ObstacleId, disks_on_network
from brine.instance.node_facts import facts_of
from brine.instance.observe import Observed, Oper, look
from brine.instance.report import details
from brine.instance.store import InstanceError, is_here
from brine.instance.supervisor import supervisor
from brine.moves.belongings import Belonging, belongings_of
from brine.moves.cluster_keys import ClusterKeys
from brine.moves.migration import MoveError, bitmaps_of
from brine.moves.present import device_ids, present_spec, state_of
from brine.moves.records import AskedStep
from brine.storage.unit import StorageError
from brine.storage.volume import VolumeFile
from brine.storage.volumes import volume_in
from brine.vm.disk import Disk
from brine.vm.files import InstanceFiles
from brine.vm.run import Run
from brine.vm.spec import to_json


def answer(asked: AskedStep) -> StepAnswer:
    """Answer the step of the source that only reads: what the node has *found* is the offer."""
    try:
        found = make_offer(asked.instance, cold=bool(asked.facts.get("cold")))
    except BrineError as error:
        return asked.answer(AnswerState.FAILED, str(error))
    return asked.answer(AnswerState.DONE, progress=1.0, found=found)


def make_offer(name: str, *, cold: bool) -> dict[str, Any]:
    """Offer an instance to another node.

    :param cold: it is moved while it does not run, even if it does now.
    :returns: as JSON: the ``spec``, with the devices that it has now; whether it ``runs``, is moved
        ``live``, and has disks that are copied (``copies``); its ``runtime`` file, if it is moved
        live; the facts of this ``node``; its ``disks``; what else of it ``comes_along``; and the
        ids of this node's ``cluster_keys``. There is no secret in it.
    :raises BrineError: why it can't move.
    """
    seen = look(name)
    if not is_here(seen.spec):
        raise InstanceError(name, f"is {seen.spec.node}'s, and not this node's to give")
    if seen.is_going and seen.state.oper is not Oper.RUNNING:
        raise InstanceError(name, f"is {seen.state.oper}", hint="wait until it runs, or is down")
    is_live = seen.is_going and not cold
    _refuse_obstacles(seen, is_live=is_live)
    spec = present_spec(seen)
    on_network = disks_on_network(spec.disks, MOUNTS.read_text(errors="replace"))
    ids = device_ids(spec) if is_live else {}
    sizes, bitmaps = _of_qemu(name, ids) if is_live else ({}, {})
    copied = [one for one in spec.disks if one.uuid not in on_network]
    layers = {} if is_live else {one.uuid: _files(name, one) for one in copied}
    disks = [
        _disk(one, ids, sizes, layers.get(one.uuid, ()), is_copied=one in copied)
        for one in spec.disks
    ]
    along = belongings_of(spec)
    return {
        "spec": to_json(spec),
        "runs": seen.is_going,
        "live": is_live,
        "copies": any(one["copies"] for one in disks),
        "run": Run.last(name).id,
        "state": state_of(seen),
        "runtime": InstanceFiles(name).runtime.read_text() if is_live else None,
        "node": facts_of(spec.qemu, None, []).to_json(),
        "disks": disks,
        "bitmaps": bitmaps,
        "comes_along": list(along),
        "uefi_bytes": len(along.get(Belonging.UEFI_VARIABLES, b"")),
        "cluster_keys": ClusterKeys.read().ids(),
        "tries": supervisor().record(name),
    }


def _refuse_obstacles(seen: Observed, *, is_live: bool) -> None:
    """Refuse an instance that no other node could take."""
    found = details(seen)
    way = "live" if is_live else "cold"
    # Of its processor, only the other node can tell whether that is in the way.
    reasons = [
        one["why"]
        for one in found["obstacles"]
        if way in one["blocks"] and one["id"] != ObstacleId.CPU
    ]
    if reasons:
        can_cold = is_live and not any("cold" in one["blocks"] for one in found["obstacles"])
        hint = "move it with --cold: it is stopped, moved and started" if can_cold else None
        raise MoveError(f"{seen.name}: can't move: {'; '.join(reasons)}", hint=hint)


def _of_qemu(
    name: str, ids: Mapping[str, str]
) -> tuple[dict[str, int], dict[str, tuple[str, ...]]]:
    """The sizes of disks, in bytes, and their dirty bitmaps, by device id."""
    with monitor_of(name) as qmp:
        machine = Machine(qmp)
        sizes = {one: size_of_disk(machine, one) for one in ids.values()}
        return sizes, bitmaps_of(machine, list(ids.values()))


def _disk(
    disk: Disk,
    ids: Mapping[str, str],
    sizes: Mapping[str, int],
    files: Sequence[VolumeFile],
    *,
    is_copied: bool,
) -> dict[str, Any]:
    """A disk of the offer.

    :param files: that are copied as they are, the lowest first; none of a guest that runs.
    """
    device_id = ids.get(disk.uuid, "")
    size = sizes.get(device_id) or DiskState.of(disk).made.size
    return {
        "uuid": disk.uuid,
        "device_id": device_id,
        "copies": is_copied,
        "size_bytes": size,
        "format": (files[0].format if files else "") or disk.format,
        "unit": disk.unit,
        "snapshots": [
            {"name": one.name, "since": one.since, "used_bytes": one.used}
            for file in files
            if (one := file.snapshot)
        ],
    }


def _files(name: str, disk: Disk) -> Sequence[VolumeFile]:
    """The files of a disk's volume, the lowest first."""
    try:
        return volume_in(disk.unit, disk.uuid).files()
    except StorageError as error:
        text = f"disk {disk.name or disk.uuid} can't be copied: {error}"
        raise MoveError(f"{name}: can't move: {text}", hint=error.hint) from error
