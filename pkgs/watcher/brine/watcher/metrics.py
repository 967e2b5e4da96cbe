"""Metrics of the watcher: those of ``brine watcher status``, and what its passes have counted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from brine.common.errors import BrineError
from brine.common.figures import Figures, read_figures
from brine.common.metrics import Labels, Metric, counter, gauge
from brine.instance import store
from brine.instance.store import InstanceError
from brine.watcher import restart_counter
from brine.watcher.pass_figures import FILE
from brine.watcher.restart_counter import paused_until
from brine.watcher.settings import load_settings
from brine.watcher.volume_watch import VolumeFault, told_faults


def watcher_metrics() -> Iterator[Metric]:
    """The entry point of the group ``brine.metrics``."""
    yield from _of_volumes()
    if found := read_figures(FILE):
        yield from _of_passes(found)
    tries = sorted(restart_counter.load().items())
    about = "Starts that the watcher has tried since an instance last stayed up."
    yield gauge("watcher_tries", about, [({"name": name}, one.count) for name, one in tries])
    about = "Instances that are tried rarely, as too many tries have failed; always 1."
    given_up = [name for name, one in tries if one.given_up]
    yield gauge("instance_given_up", about, [({"name": name}, 1) for name in given_up])
    about = "The number of instances that are given up."
    yield gauge("instances_given_up", about, len(given_up))
    about = "The seconds between two passes, by its settings."
    yield gauge("watcher_interval", about, load_settings().interval, unit="seconds")
    try:
        until = paused_until(time.time())
    except BrineError as error:
        raise BrineError(f"whether it is paused is unknown: {error}", hint=error.hint) from error
    yield gauge("watcher_paused", "Whether the watcher is paused.", float(until is not None))


def _of_passes(found: Figures) -> Iterator[Metric]:
    if last := found.number("last"):
        about = "When the watcher last looked at all instances."
        yield gauge("watcher_last_pass_timestamp", about, last, unit="seconds")
        about = "How long the last look at all instances took."
        yield gauge("watcher_last_pass_duration", about, found.number("took_s"), unit="seconds")
    about = "Starts of instances by the watcher, since the boot."
    rows = found.rows("restarts", 2)
    restarts = [({"name": one[0], "result": one[1]}, n) for one, n in rows]
    yield counter("restarts", about, restarts)
    about = "What the watcher has done, since the boot; see brine-watcher(8)."
    actions = [({"action": one[0]}, n) for one, n in found.rows("actions", 1)]
    yield counter("watcher_actions", about, actions)
    about = "Passes of the watcher by result, since the boot."
    passes = [({"result": one[0]}, n) for one, n in found.rows("passes", 1)]
    yield counter("watcher_passes", about, passes)


def _of_volumes() -> Iterator[Metric]:
    """The faults that the last pass has told."""
    faults = told_faults()
    by_fault = Counter(faults.values())
    rows: list[tuple[Labels, float]] = [({"fault": one}, by_fault[one]) for one in VolumeFault]
    yield gauge("volume_faults", "Volumes and snapshots with a fault, by the fault.", rows)
    if not faults:
        return
    of_disks = {
        (disk.unit, disk.uuid): spec.name
        for spec in store.load_all()
        if not isinstance(spec, InstanceError)
        for disk in spec.disks
    }
    about = "The fault of a volume, or of its snapshot; always 1."
    each: list[tuple[Labels, float]] = [
        (
            {
                "name": of_disks.get((one.unit, one.uuid), ""),
                "unit": one.unit,
                "disk": one.uuid,
                "snapshot": one.snapshot,
                "fault": fault,
            },
            1,
        )
        for one, fault in sorted(faults.items())
    ]
    yield gauge("volume_fault", about, each)
