"""Metrics of the KVM daemon, from the figures that it writes."""

from __future__ import annotations

from collections.abc import Iterator

from brine.common import paths
from brine.common.figures import FILE_NAME, read_figures
from brine.common.metrics import Metric, counter, gauge, summary


def kvmd_metrics() -> Iterator[Metric]:
    """The entry point of the group ``brine.metrics``. A daemon that does not run watches nothing;
    what it has counted since the boot stays."""
    found = read_figures(paths.KVMD_DIR / FILE_NAME)
    is_up = found is not None and found.is_running
    about = "Whether the KVM daemon runs; where no instance needs it, it need not."
    yield gauge("kvmd_up", about, float(is_up))
    if found is None:
        return
    if is_up:
        yield gauge("kvmd_watched", "VMs that the KVM daemon watches.", found.number("watched"))
        about = "VMs that have sent no greeting yet."
        yield gauge("kvmd_waiting", about, found.number("waiting"))
        about = "VMs whose event sockets can't be reached."
        yield gauge("kvmd_out_of_reach", about, found.number("out_of_reach"))
        about = "VMs of others than root that are left out, as there are too many."
        yield gauge("kvmd_left_out", about, found.number("left_out"))
        about = "By how much the KVM daemon was late at worst, in the last minute."
        yield gauge("kvmd_lag", about, found.number("lag_s"), unit="seconds")
    about = "Ends of VMs, by who ended them and the cause, since the boot."
    rows = found.rows("verdicts", 2)
    yield counter("verdicts", about, [({"verdict": one[0], "cause": one[1]}, n) for one, n in rows])
    about = "How long after the end of a VM its verdict was given."
    delays, delay_s = int(found.number("delays")), found.number("delay_s")
    yield summary("verdict_delay", about, delays, delay_s, unit="seconds")
    about = "How often QEMU has stopped a VM by itself, by its state and reason, since the boot."
    rows = found.rows("halts", 2)
    yield counter("halts", about, [({"state": one[0], "reason": one[1]}, n) for one, n in rows])
