"""The QMP monitor of an instance's own QEMU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partial

from brine.common.errors import printable
from brine.common.paths import InstanceFiles
from brine.common.peer import refuse_stranger
from brine.common.qmp.client import LIMIT_S, QmpClient
from brine.common.qmp.wire import QmpProtocolError


@contextlib.contextmanager
def monitor_of(
    name: str, *, timeout_s: float = 10, answer_timeout_s: float = 10, of_unit: bool = False
) -> Iterator[QmpClient]:
    """Connect to an instance's QEMU; disconnect when the block ends.

    :param of_unit: at the socket for what the unit runs, which only root reaches. A QEMU that an
        older version of Brine has started has none; then it is the one for everybody.

    Other parameters, and errors, are those of :meth:`brine.common.qmp.client.QmpClient.connect`.

    :raises brine.common.peer.StrangerError: if who listens is not of the instance's
        unit. It was told nothing then.
    """
    control = InstanceFiles(name)
    path = control.unit if of_unit and os.path.exists(control.unit) else control.qmp
    check = partial(refuse_stranger, name=name, socket=path)
    with QmpClient.connect(
        path,
        timeout_s=timeout_s,
        answer_timeout_s=answer_timeout_s,
        limit_s=LIMIT_S,
        check_peer=check,
    ) as qmp:
        yield qmp


def run_state(qmp: QmpClient) -> str:
    """The state of the guest by QEMU, such as ``running`` or ``paused``.

    :raises QmpError: if it does not say so.
    """
    answer = qmp.execute("query-status")
    state = answer.get("status") if type(answer) is dict else None
    if type(state) is not str:
        raise QmpProtocolError(f"{qmp.path}: no answer to query-status: {answer!r:.60}")
    return printable(state)
