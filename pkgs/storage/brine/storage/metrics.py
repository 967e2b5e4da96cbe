"""Metrics of storage units: those of ``brine storage list``."""

from __future__ import annotations

from collections.abc import Iterator

from brine.common.errors import BrineError
from brine.common.metrics import Labels, Metric, gauge
from brine.storage.commands import volume_units


def storage_metrics() -> Iterator[Metric]:
    """The entry point of the group ``brine.metrics``: the units that volumes can be in."""
    faults: list[BrineError] = []
    units = list(volume_units(faults))
    labels: list[Labels] = [{"type": one.type, "unit": one.name} for one in units]

    def of_each(name: str, about: str, values: list[float], unit: str = "") -> Metric:
        return gauge(name, about, list(zip(labels, values, strict=True)), unit=unit)

    yield of_each(
        "storage_size", "The size of a storage unit.", [one.size for one in units], "bytes"
    )
    about = "What is free in a storage unit for new volumes."
    yield of_each("storage_free", about, [one.free for one in units], "bytes")
    about = "Whether new volumes may be made in a storage unit."
    yield of_each("storage_allocatable", about, [float(one.allocatable) for one in units])
    statuses: list[tuple[Labels, float]] = [
        ({**name, "status": one.status}, 1) for name, one in zip(labels, units, strict=True)
    ]
    about = "The status of a storage unit: ok, degraded or missing; always 1."
    yield gauge("storage_status", about, statuses)
    if faults:
        raise faults[-1]
