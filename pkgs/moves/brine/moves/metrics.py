"""Metrics of moves: those of ``brine move status``."""

from __future__ import annotations

from collections.abc import Iterator

from brine.common.metrics import Metric, counter, gauge, summary
from brine.moves import records


def moves_metrics() -> Iterator[Metric]:
    """The entry point of the group ``brine.metrics``."""
    found = records.counts()
    ended = (
        ("out", "done", found.out_done),
        ("out", "failed", found.out_failed),
        ("in", "done", found.in_done),
        ("in", "failed", found.in_failed),
    )
    rows = [({"way": way, "result": result}, count) for way, result, count in ended]
    about = "Moves of instances that have ended on this node, out of it and into it."
    yield counter("moves", about, rows)
    about = "For how long guests stood still that have left this node while they ran."
    yield summary("move_downtime", about, found.measured, found.downtime_ms / 1e3, unit="seconds")
    pending = sum(1 for _ in records.pending())
    yield gauge("moves_pending", "Moves in progress on this node, or interrupted.", pending)
