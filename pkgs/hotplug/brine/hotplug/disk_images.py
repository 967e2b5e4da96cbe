"""Changing the images of a running VM's disks: copies, snapshots, and merged layers.

The work is recorded, as plugging is. What QEMU has shows how far it is: so an interrupted copy is
cancelled, and one that the guest has switched to is finished. The VM is locked only for moments,
and other commands may change it meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Self

from brine.common.operation import Facts, Work, begin
from brine.common.progress import Tell, tell_nothing
from brine.common.qmp.wire import QmpClosedError
from brine.hotplug import block_graph, block_jobs
from brine.hotplug.block_jobs import Job, JobState
from brine.hotplug.device_arguments import fdset_opaque
from brine.hotplug.errors import HotplugError
from brine.hotplug.image_records import IMAGES, settle_images
from brine.hotplug.locked_vm import Vm
from brine.hotplug.session import working_on
from brine.hotplug.transaction import is_running, key_of
from brine.vm.disk import Disk
from brine.vm.disk_files import opened
from brine.vm.spec import to_json

log = logging.getLogger(__name__)

_FIRST_LOOK_S = 0.05
_LAST_LOOK_S = 1.0


class ImageWork(NamedTuple):
    """Recorded work on the images of a VM's disks.

    :param identity: of its QEMU process.
    :param device_ids: by the UUIDs of the disks.
    """

    qmp: Path
    runtime: Path | None
    identity: str
    device_ids: dict[str, str]
    facts: Facts
    work: Work

    @classmethod
    @contextlib.contextmanager
    def begin(
        cls, qmp: Path, runtime: Path | None, disks: Sequence[Disk], what: str
    ) -> Iterator[Self]:
        """Record the work of the block on disks, which are given as they are at its end. An error
        undoes what the guest does not use yet.

        :raises HotplugError: if the VM lacks one of them, or works on one already.
        """
        with working_on(qmp, runtime=runtime) as vm:
            identity = vm.identity
            device_ids = {one.uuid: block_graph.device_of(vm.machine, one.uuid) for one in disks}
            for device_id in device_ids.values():
                block_jobs.refuse_busy(vm.machine, device_id)
        facts: Facts = {
            "qmp": str(qmp.absolute()),
            "runtime": str(runtime) if runtime else "",
            "identity": identity,
            "disks": [{"device_id": device_ids[one.uuid], "disk": to_json(one)} for one in disks],
            "is_paused": False,
            "is_same": False,
        }
        kind = replace(IMAGES, functions={"settle": _settle_by_socket})
        rows = [one.recorded() for one in disks]
        claims = {"instance": qmp.stem, "process": identity.partition("-")[0], "disks": rows}
        with begin(kind, f"vm/{qmp.stem}", key_of(identity), facts=facts) as work:
            work.step(what, facts={"claims": claims}, undo=("settle", facts))
            yield cls(qmp, runtime, identity, device_ids, facts, work)

    @contextlib.contextmanager
    def vm(self) -> Iterator[Vm]:
        """Lock the VM, for the time of the block."""
        with working_on(self.qmp, runtime=self.runtime) as vm:
            if vm.identity != self.identity:
                raise HotplugError(f"{vm.name}: was restarted meanwhile")
            yield vm

    def pause(self, vm: Vm) -> bool:
        """Have the guest's processors stop; False if it does not run."""
        status = vm.machine.qmp.execute("query-status")
        if type(status) is not dict or not status.get("running"):
            return False
        self._note(is_paused=True)
        vm.machine.qmp.execute("stop")
        return True

    def resume(self, vm: Vm) -> None:
        """Have the guest go on, if :meth:`pause` has stopped it."""
        if self.facts["is_paused"]:
            vm.machine.qmp.execute("cont")
            self._note(is_paused=False)

    def agree(self, before_switch: Callable[[], object] = lambda: None) -> None:
        """Call a function before a job is completed that is ready. From then on the job is
        completed, by the next process if this one is killed."""
        self._note(is_same=True)
        try:
            before_switch()
        except BaseException:
            self._note(is_same=False)
            raise

    def _note(self, **known: bool) -> None:
        self.facts.update(known)
        self.work.note()

    def end(self, vm: Vm) -> None:
        """Remove what is not used any more, and record what the VM has now."""
        settle_images(vm, self.facts)
        self.work.over()

    def await_job(self, disk: Disk, tell: Tell, text: str) -> Job:
        """Wait until the job of a disk is ready, or has ended.

        :raises HotplugError: if it has failed, or is gone.
        """
        device_id, pause_s = self.device_ids[disk.uuid], _FIRST_LOOK_S
        while True:
            with self.vm() as vm:
                job = block_jobs.find_job(vm.machine, device_id)
            if job is None:
                raise HotplugError(f"{device_id}: its job was cancelled by another program")
            if job.error:
                raise HotplugError(f"{device_id}: {job.error}")
            tell(job.done, text)
            if job.state is not JobState.RUNNING:
                return job
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LAST_LOOK_S)


def _settle_by_socket(facts: Facts) -> None:
    runtime = Path(facts["runtime"]) if facts["runtime"] else None
    try:
        with working_on(Path(facts["qmp"]), runtime=runtime) as vm:
            if vm.identity == facts["identity"]:
                settle_images(vm, facts)
    except QmpClosedError:
        if is_running(facts["identity"]):
            raise


# A copy, to which the guest is switched.


def mirror_disk(
    qmp: Path,
    target: Disk,
    *,
    runtime: Path | None = None,
    rate: int = 0,
    before_switch: Callable[[], object] = lambda: None,
    tell: Tell = tell_nothing,
) -> None:
    """Copy a disk of a running VM to another image, and have the guest use that. Returns when it
    does.

    :param target: the disk as it is then: an image of the same size, which no one uses.
    :param rate: in bytes a second; 0 is no limit.
    :param before_switch: is called when both images are the same, and stay so: what the guest
        writes goes to both. If this process is killed later, the next command switches the
        guest. An error of it cancels the copy, and so does a kill in it.
    :raises HotplugError: if it failed; :func:`image_of` tells which image the guest has.
    """
    with ImageWork.begin(qmp, runtime, [target], f"copy to {target.path}") as work:
        device_id = work.device_ids[target.uuid]
        with work.vm() as vm, opened(target) as files:
            node = block_graph.add_images(vm.machine, device_id, target, files)
            top = block_graph.top_node(vm.machine, device_id)
            block_jobs.begin_mirror(vm.machine, device_id, top, node, rate)
        work.await_job(target, tell, f"copying to {target.path}")
        before_switch()
        work.agree()
        with work.vm() as vm:
            block_jobs.complete_job(vm.machine, device_id)
            work.end(vm)


def image_of(qmp: Path, disk_uuid: str) -> str:
    """The path of the image that a running VM has as a disk.

    :raises HotplugError: if it has no such disk.
    """
    with working_on(qmp) as vm:
        device_id = block_graph.device_of(vm.machine, disk_uuid)
        path = block_graph.recorded_sets(vm.machine)[device_id].path()
    if not path:
        raise HotplugError(f"{device_id}: its path is not known")
    return path


# Snapshots: overlays, and their merging.


class Snapshot(NamedTuple):
    """Overlays that QEMU has opened, and that the guest does not use yet."""

    work: ImageWork
    vm: Vm
    nodes: dict[str, str]

    def pause(self) -> bool:
        """Have the guest's processors stop; False if it does not run."""
        return self.work.pause(self.vm)

    def resume(self) -> None:
        """Have the guest go on, if :meth:`pause` has stopped it."""
        self.work.resume(self.vm)

    def take(self) -> None:
        """Have the guest write to the overlays from now on, to all from the same moment."""
        if self.nodes:
            block_graph.lay_over(self.vm.machine, self.nodes)


@contextlib.contextmanager
def laying_over(
    qmp: Path, before: Sequence[Disk], after: Sequence[Disk], *, runtime: Path | None = None
) -> Iterator[Snapshot]:
    """Open overlays of disks of a running VM, for the time of the block, which takes them into
    use or does not.

    :param before: the disks as they are.
    :param after: the same with their overlays: each is empty, and has the present image below it.
    """
    with ImageWork.begin(qmp, runtime, after, "lay overlays over disks") as work, work.vm() as vm:
        nodes = {}
        for old, new in zip(before, after, strict=True):
            device_id = work.device_ids[new.uuid]
            with opened(old) as files:
                # Without a descriptor for reading, QEMU does not reopen it for that.
                block_graph.record_disk(vm.machine, device_id, old, files)
            with opened(new) as files:
                overlay = block_graph.add_overlay(vm.machine, device_id, new, files)
            nodes[block_graph.top_node(vm.machine, device_id)] = overlay
        snapshot = Snapshot(work, vm, nodes)
        try:
            yield snapshot
        finally:
            snapshot.resume()
        work.end(vm)


def merge_layer(
    qmp: Path,
    number: int,
    after: Disk,
    *,
    runtime: Path | None = None,
    before_stop: Callable[[], object] = lambda: None,
    before_switch: Callable[[], object] = lambda: None,
    tell: Tell = tell_nothing,
    text: str = "",
) -> None:
    """Merge an image of a disk of a running VM into the one below it, while the guest goes on. If
    it was merged before, nothing is done.

    :param number: of the image: 0 is the disk's own, 1 is the first backing file, and so on.
    :param after: the disk as it is then.
    :param before_stop: of the disk's own image: is called before the guest stands still for the
        switch, and takes what locks the caller needs until others know of it.
    :param before_switch: of the disk's own image: is called when the one below it is the same; the
        guest stands still meanwhile, and it must not ask the VM. See :func:`mirror_disk`.
    """
    with ImageWork.begin(qmp, runtime, [after], text or "merge a snapshot") as work:
        device_id = work.device_ids[after.uuid]
        with work.vm() as vm:
            machine = vm.machine
            chain = block_graph.chain_of(machine, device_id)
            if len(chain) == len(after.layers()) + 1:
                work.end(vm)
                return
            if len(chain) != len(after.layers()) + 2:
                raise HotplugError(f"{device_id}: has other images than were expected")
            layer, below = chain[number : number + 2]
            if number == 0 and below.fdset is not None:
                # It tells the disk as it is when that is its own image.
                with opened(after) as files:
                    opaque = fdset_opaque(device_id, after)
                    block_graph.record_set(machine, below.fdset, opaque, files)
            path = after.layers()[number - 1].path if number else after.path
            nodes = (chain[0].node, layer.node, below.node)
            block_jobs.begin_commit(machine, device_id, *nodes, path)
        job = work.await_job(after, tell, text)
        if job.state is JobState.READY:
            before_stop()  # before the VM is locked: others lock it last
        with work.vm() as vm:
            if job.state is JobState.READY:
                work.pause(vm)
                try:
                    block_jobs.await_even(vm.machine, device_id)
                    # A guest that stands still is stopped again: QEMU writes what it holds back.
                    vm.machine.qmp.execute("stop")
                    work.agree(before_switch)
                    block_jobs.complete_job(vm.machine, device_id)
                finally:
                    work.resume(vm)
            else:
                block_jobs.end_job(vm.machine, device_id)
            work.end(vm)
