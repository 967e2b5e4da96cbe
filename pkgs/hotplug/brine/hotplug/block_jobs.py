"""Block jobs of a running QEMU: a disk is copied to another image, or layers are merged.

A disk has at most one job, named for its device, and otherwise if a move to another node is at
work: see :func:`of_move`. QEMU keeps a job that has ended until it is dismissed, so that its end is
not lost with a connection.

Source: "Live Block Device Operations" in QEMU's documentation.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple

from brine.common.errors import printable
from brine.common.qmp.wire import QmpCommandError, QmpProtocolError
from brine.hotplug.errors import HotplugError
from brine.hotplug.qemu import Machine

_ENDS_S = 60.0
_FIRST_LOOK_S, _LOOK_S = 0.001, 0.02


class JobState(StrEnum):
    RUNNING = "running"
    READY = "ready"
    """All is copied, and what is written goes to both: it may be completed."""
    CONCLUDED = "concluded"


class Job(NamedTuple):
    """A job.

    :param done: from 0 to 1.
    :param is_even: nothing is left to copy now.
    :param error: why it failed; empty if it did not, or has not ended.
    :param copied: in bytes, of so many as *size* says now: it grows as the guest writes.
    """

    state: JobState
    done: float
    is_even: bool
    error: str
    copied: int = 0
    size: int = 0


def job_id(device_id: str) -> str:
    return f"job-{device_id}"


def of_move(device_id: str) -> str:
    """What a move to another node gives these functions in the place of a disk's device. So neither
    it nor other work on the disk ever takes the job that the other has left for its own: to
    complete that of a move would have the guest use the other node's image."""
    return f"{device_id}.move"


def find_job(machine: Machine, device_id: str) -> Job | None:
    """The job of a disk; None if it has none."""
    for one in machine.list_of("query-jobs"):
        if one.get("id") == job_id(device_id):
            return _job_in(machine, one)
    return None


def refuse_busy(machine: Machine, device_id: str) -> None:
    """Refuse a disk that QEMU is copying or merging."""
    if find_job(machine, device_id) or find_job(machine, of_move(device_id)):
        hint = "brine operations list shows that work"
        raise HotplugError(f"{device_id}: is being copied, or merged", hint=hint)


def _job_in(machine: Machine, data: dict[str, Any]) -> Job:
    try:
        done, total = int(data["current-progress"]), int(data["total-progress"])
        state = str(data["status"])
    except (KeyError, TypeError, ValueError) as error:
        raise QmpProtocolError(f"{machine.qmp.path}: no answer to query-jobs") from error
    names = {"ready": JobState.READY, "standby": JobState.READY, "concluded": JobState.CONCLUDED}
    at = names.get(state, JobState.RUNNING)
    part = 1.0 if at is not JobState.RUNNING else done / total if total else 0.0
    is_even = at is JobState.READY and done == total
    fault = printable(str(data.get("error") or ""))
    return Job(at, min(part, 1.0), is_even, fault, done, total)


def begin_mirror(machine: Machine, device_id: str, top: str, target: str, rate: int = 0) -> None:
    """Copy a disk to another image. Once all is copied, the guest's writes are done when both
    have them.

    :param top: the disk's top node; *target* is that of the other image.
    :param rate: in bytes a second; 0 is no limit.
    """
    _begin(
        machine,
        "blockdev-mirror",
        device_id,
        {
            "device": top,
            "target": target,
            "sync": "full",
            "copy-mode": "write-blocking",
            "speed": rate,
        },
    )


def begin_commit(
    machine: Machine, device_id: str, top: str, layer: str, base: str, path: str
) -> None:
    """Merge a layer of a disk into the one below it. The job of the top layer gets ready, and
    must be completed; that of another layer ends by itself.

    :param top: the disk's top node; *layer* is merged into *base*.
    :param path: of *base*, for the header of the image above *layer*: QEMU knows no path.
    """
    arguments = {"device": top, "base-node": base}
    if layer != top:
        arguments |= {"top-node": layer, "backing-file": path}
    _begin(machine, "block-commit", device_id, arguments)


def _begin(machine: Machine, command: str, device_id: str, arguments: dict[str, Any]) -> None:
    given = {"job-id": job_id(device_id), "auto-dismiss": False, **arguments}
    try:
        machine.qmp.execute(command, given)
    except QmpCommandError as error:
        raise HotplugError(f"{device_id}: QEMU refuses it: {error.description}") from error


def set_rate(machine: Machine, device_id: str, rate: int) -> None:
    """Have a running job copy at most so many bytes a second; 0 is no limit."""
    machine.qmp.execute("block-job-set-speed", {"device": job_id(device_id), "speed": rate})


def complete_job(machine: Machine, device_id: str) -> None:
    """Have a job that is ready end, and the guest use the other image from then on.

    :raises HotplugError: if it failed: then nothing is switched.
    """
    machine.qmp.execute("job-complete", {"id": job_id(device_id)})
    end_job(machine, device_id)


def leave_copy(machine: Machine, device_id: str) -> None:
    """Have a mirror that is ready end, with both images the same, while the guest keeps its own.
    If there is no job any more, nothing is done.

    :raises HotplugError: if it failed, or is not ready: then the other image is no copy.
    """
    if not (job := find_job(machine, device_id)):
        return
    if job.state is JobState.RUNNING:
        raise HotplugError(f"{device_id}: is not copied yet")
    if job.state is JobState.READY:
        # Forced, or by job-cancel, it would end at once, whatever is still being written.
        machine.qmp.execute("block-job-cancel", {"device": job_id(device_id), "force": False})
    end_job(machine, device_id)


def end_job(machine: Machine, device_id: str) -> None:
    """Wait for the end of a job that is ending, and dismiss it.

    :raises HotplugError: if it failed.
    """
    job = _wait(machine, device_id, lambda job: job.state is JobState.CONCLUDED)
    if job:
        machine.qmp.execute("job-dismiss", {"id": job_id(device_id)})
        if job.error:
            raise HotplugError(f"{device_id}: {job.error}")


def await_even(machine: Machine, device_id: str) -> None:
    """Wait until a job that is ready has nothing left to copy, while the guest writes nothing.

    :raises HotplugError: if the job has failed, or is gone.
    """
    job = _wait(machine, device_id, lambda job: job.is_even or job.state is not JobState.READY)
    if job is None or not job.is_even:
        raise HotplugError(f"{device_id}: {job.error if job and job.error else 'its job is gone'}")


def cancel_job(machine: Machine, device_id: str) -> None:
    """Have a job end now, if there is one, whatever it has done; the guest's disk stays the same,
    unless the job has switched it before."""
    if not (job := find_job(machine, device_id)):
        return
    if job.state is not JobState.CONCLUDED:
        machine.try_execute("job-cancel", {"id": job_id(device_id)})
    _wait(machine, device_id, lambda job: job.state is JobState.CONCLUDED)
    machine.try_execute("job-dismiss", {"id": job_id(device_id)})


def _wait(machine: Machine, device_id: str, until: Callable[[Job], bool]) -> Job | None:
    """Wait for a state of a job; None if there is no job any more."""
    deadline, pause_s = time.monotonic() + _ENDS_S, _FIRST_LOOK_S
    while job := find_job(machine, device_id):
        if until(job):
            return job
        if time.monotonic() > deadline:
            raise HotplugError(f"{device_id}: its job did not end within {_ENDS_S:g} s")
        time.sleep(pause_s)  # a guest may stand still meanwhile
        pause_s = min(2 * pause_s, _LOOK_S)
    return None
