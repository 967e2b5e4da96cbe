"""Metrics of the configuration daemon, from the figures that it writes."""

from __future__ import annotations

from collections.abc import Iterator

from brine.common import paths
from brine.common.figures import FILE_NAME, read_figures
from brine.common.metrics import Metric, counter, gauge


def confd_metrics() -> Iterator[Metric]:
    """The entry point of the group ``brine.metrics``. A daemon that does not run has told
    nothing: its counts begin with it."""
    found = read_figures(paths.CONFD_DIR / FILE_NAME)
    is_up = found is not None and found.is_running
    about = "Whether the configuration daemon runs; a node that is no candidate needs none."
    yield gauge("confd_up", about, float(is_up))
    if found is None:
        return
    if is_up and "serial" in found.values:
        about = "The serial number of the configuration that the daemon answers from."
        yield gauge("confd_serial", about, found.number("serial"))
        about = "The instances in the configuration that the daemon answers from."
        yield gauge("confd_instances", about, found.number("instances"))
        about = "The nodes in the configuration that the daemon answers from."
        yield gauge("confd_nodes", about, found.number("nodes"))
    if is_up:
        about = "Whether the daemon has no configuration, or can't use the newest."
        yield gauge("confd_in_trouble", about, found.number("in_trouble"))
        yield gauge("confd_keys", "Keys that are valid: 2 in a rotation.", found.number("keys"))
    about = "Queries that were answered."
    yield counter("confd_queries", about, found.number("answered"))
    about = "Datagrams that were not answered, by reason."
    rows = found.rows("refused", 1)
    yield counter("confd_refusals", about, [({"reason": one[0]}, n) for one, n in rows])
