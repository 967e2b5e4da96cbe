"""What the unit runs beside xl at its start: it counts as started when its domain runs."""

from __future__ import annotations

import time

from brine.instance.process import Process
from brine.instance.spec import Spec
from brine.instance.spec_files import InstanceError
from brine.instance.xen import started, xl
from brine.instance.xen.domains import Domain
from brine.instance.xen.state import how_it_ended

TIMEOUT_S = 150.0
"""One domain is made at a time, so some wait for others."""

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


def wait_running(
    spec: Spec, waiter: Process | None, pid: int, *, timeout_s: float = TIMEOUT_S
) -> Domain:
    """Return when the domain of an instance has been made, and runs.

    :param waiter: the process that becomes the xl that makes it; None if it has ended.
    :param pid: of that process.
    :raises InstanceError: if xl has ended, or does not come to an end in time.
    :raises XlError: if Xen can't be asked.
    """
    name = spec.name
    deadline = time.monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S
    while True:
        has_ended = waiter is None or waiter.ended(pause_s)
        domain = xl.domain_of(spec.uuid)
        # One of an earlier xl's is what the runner is about to remove, or to refuse.
        is_new = domain is not None and started.is_by(name, pid)
        if has_ended:
            raise InstanceError(name, _fault(domain if is_new else None))
        if domain and is_new and domain.lives() and not domain.has("p"):
            return domain
        if time.monotonic() >= deadline:
            raise InstanceError(name, f"xl has not made its domain within {timeout_s:g} s")
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)


def _fault(domain: Domain | None) -> str:
    if domain and domain.has_ended():
        return f"ended as soon as it ran: {how_it_ended(domain)}"
    return "xl has ended; see what it said above"
