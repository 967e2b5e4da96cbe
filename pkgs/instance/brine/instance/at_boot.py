"""Starting all instances of a node that should be up, as after its own start."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

from brine.common.errors import BrineError
from brine.instance import messages, spec_files, unit
from brine.instance.spec import AdminState
from brine.instance.spec_files import InstanceError
from brine.instance.starting import make_room, start_failure
from brine.instance.state import Oper
from brine.instance.states import Seen, look_at_all
from brine.instance.unit import UnitError


def start_all(*, parallel: int) -> Iterator[tuple[str, BrineError | None]]:
    """Start all instances that should be up and are down, but those that their users shut down.

    Those with a lower ``start_order`` have started, or failed to, before the next ones begin.

    :param parallel: how many start at the same time.
    :returns: the name of each, as it has started, with why it did not; also of specs that can't be
        used.
    :raises UnitError: if systemd can't be asked.
    """
    due = []
    for seen in look_at_all():
        if isinstance(seen, InstanceError):
            yield seen.name, seen
        elif is_due(seen):
            due.append(seen)
    if any(seen.spec.is_xen() for seen in due):
        make_room()
    due.sort(key=lambda seen: (seen.spec.start_order, seen.spec.name))
    with ThreadPoolExecutor(parallel) as pool:
        for _, group in groupby(due, key=lambda seen: seen.spec.start_order):
            several = list(group)
            names = [seen.spec.name for seen in several]
            yield from zip(names, pool.map(_start, several), strict=True)


def is_due(seen: Seen) -> bool:
    """Whether an instance should run and nothing of it does."""
    return seen.spec.admin_state == AdminState.UP and seen.state.oper is Oper.DOWN


def _start(seen: Seen) -> BrineError | None:
    name = seen.spec.name
    try:
        with spec_files.alone(name):  # until it is queued, or who stops it now would miss it
            # Others were started first: somebody may have decided otherwise since.
            if spec_files.load(name).admin_state != AdminState.UP:
                return None
            messages.tell_start_asked(name, messages.who_asks())
            wait = unit.begin_start(name)
        wait()
    except UnitError as error:
        return start_failure(name, error, seen.unit)
    except BrineError as error:
        return error
    return None
