"""Metrics of what every node has: its version, its outbox and its operations."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from brine.common import __version__, operation, outbox
from brine.common.metrics import Metric, gauge


def pending_metrics() -> Iterator[Metric]:
    """The entry point of the group ``brine.metrics``."""
    yield gauge("build_info", "The version of Brine.", [({"version": __version__}, 1)])
    now = time.time()
    events = list(outbox.events())
    yield gauge("outbox_events", "Events that the cluster does not know yet.", len(events))
    age_s = max((now - one.time for one in events), default=0.0)
    about = "The age of the oldest event that the cluster does not know yet; 0 without any."
    yield gauge("outbox_age", about, max(age_s, 0.0), unit="seconds")
    pending = operation.pending()
    kinds = Counter((one.kind, str(one.state)) for one in pending)
    about = "Operations that are in progress, or were interrupted, by kind and state."
    rows = [({"kind": kind, "state": state}, n) for (kind, state), n in sorted(kinds.items())]
    yield gauge("operations", about, rows)
    yield gauge("operations_pending", "Pending operations of all kinds.", len(pending))
    interrupted = sum(one.is_interrupted() for one in pending)
    about = "Pending operations that no process works on."
    yield gauge("operations_interrupted", about, interrupted)
    oldest = min((one.since for one in pending), default=now)
    about = "The age of the oldest pending operation; 0 without any."
    yield gauge("operations_age", about, max(now - oldest, 0.0), unit="seconds")
