"""The QMP monitor of an instance's own QEMU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

from brine.common.instance_units import refuse_stranger
from brine.common.qmp_blocking import BlockingQmpClient
from brine.instance.control import control_of


@contextlib.contextmanager
def monitor_of(
    name: str, *, timeout_s: float = 10, answer_timeout_s: float = 10
) -> Iterator[BlockingQmpClient]:
    """Connect to an instance's QEMU; disconnect when the block ends.

    Parameters and errors are those of :meth:`brine.common.qmp.QmpClient.connect`.

    :raises brine.common.instance_units.StrangerError: if who listens is not of the instance's
        unit. It was told nothing then.
    """
    path = control_of(name).qmp
    check = partial(refuse_stranger, name=name, socket=path)
    with BlockingQmpClient.connect(
        path, timeout_s=timeout_s, answer_timeout_s=answer_timeout_s, check_peer=check
    ) as qmp:
        yield qmp
