"""The records of work on the images of a running VM's disks, and how such work is settled."""

from __future__ import annotations

import logging
from pathlib import Path

from brine.common.operation import Facts, OperationKind
from brine.hotplug import block_graph, block_jobs
from brine.hotplug.block_jobs import JobState
from brine.hotplug.locked_vm import Vm
from brine.vm.disk import Disk
from brine.vm.disk_files import opened
from brine.vm.runtime_file import RuntimeFileError, change_file
from brine.vm.spec import parse

log = logging.getLogger(__name__)

IMAGES = OperationKind("disk-images", {}, is_volatile=True)
"""Such work ends with the VM; :mod:`brine.hotplug.session` settles it."""


def settle_images(vm: Vm, facts: Facts) -> None:
    """Complete what was about to be switched, cancel what else is not done, remove what the guest
    does not use, and record what it uses: all by what QEMU has.

    :param facts: of the work, with each disk as it is when the work is done.
    """
    for one in facts["disks"]:
        device_id, disk = str(one["device_id"]), parse(Disk, one["disk"], "/disk")
        job = block_jobs.find_job(vm.machine, device_id)
        if job and job.state is JobState.READY and facts["is_same"]:
            block_jobs.complete_job(vm.machine, device_id)
        block_jobs.cancel_job(vm.machine, device_id)
        block_graph.remove_unused(vm.machine, device_id)
        if vm.machine.has_device(device_id) and _is_now(vm, device_id, disk):
            with opened(disk) as files:
                block_graph.record_disk(vm.machine, device_id, disk, files)
                _record(vm, facts, disk, files.size_mib)
    if facts["is_paused"]:
        # It may run by now: then QEMU does nothing.
        vm.machine.qmp.execute("cont")


def _is_now(vm: Vm, device_id: str, disk: Disk) -> bool:
    """Whether the guest has a disk as it is when the work is done."""
    chain = block_graph.chain_of(vm.machine, device_id)
    path = block_graph.path_of(vm.machine, chain[0]) if chain else ""
    return path == disk.path and len(chain) == len(disk.layers()) + 1


def _record(vm: Vm, facts: Facts, disk: Disk, size_mib: int) -> None:
    runtime = vm.runtime or (Path(facts["runtime"]) if facts["runtime"] else None)
    if runtime:
        try:
            change_file(runtime, lambda known: known.with_image(disk, size_mib))
        except RuntimeFileError as error:
            log.warning("%s", error)
