"""Which VM it is: a QEMU process, whatever the socket that it is reached by."""

from __future__ import annotations

import os
from pathlib import Path

from brine.common.qmp import QmpClient


def identity_of(qmp: QmpClient) -> str:
    """A name for the QEMU behind a connection, as no other ever has: ``PID-START``.

    Where its process can't be seen, as from another PID namespace, its socket stands for it.
    """
    process = qmp.peer_process()
    started = _started(process) if process else None
    if started is None:
        return f"socket-{os.stat(qmp.path).st_ino}"
    return f"{process}-{started}"


def is_running(identity: str) -> bool:
    """Whether that QEMU still runs, as far as can be seen."""
    process, _, started = identity.partition("-")
    return not process.isdecimal() or _started(int(process)) == started


def _started(process: int) -> str | None:
    """When a process started, in clock ticks after boot (:manpage:`proc(5)`)."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()[19]
