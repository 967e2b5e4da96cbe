"""Which VM it is: a QEMU process, whatever the socket that it is reached by."""

from __future__ import annotations

import os
from pathlib import Path

from brine.common.qmp import QmpClient


def identity_of(qmp: QmpClient) -> str:
    """A name for the QEMU behind a connection, as no other ever has: ``PID-START-NAMESPACE``.

    Where its process can't be seen, as from another PID namespace, its socket stands for it.
    """
    process = qmp.peer_process()
    started = _started(process) if process else None
    if started is None:
        return f"socket-{os.stat(qmp.path).st_ino}"
    return f"{process}-{started}-{_namespace()}"


def is_running(identity: str) -> bool:
    """Whether that QEMU still runs, as far as can be seen."""
    process, _, rest = identity.partition("-")
    started, _, namespace = rest.partition("-")
    if not process.isdecimal() or namespace != _namespace():
        return True
    found = _started(int(process))
    return found == started if found else _exists(int(process))


def _exists(process: int) -> bool:
    """Whether there is a process, which may be hidden from us."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _namespace() -> str:
    """Of the PIDs that this process sees: others see other numbers."""
    return str(os.stat("/proc/self/ns/pid").st_ino)


def _started(process: int) -> str | None:
    """When a process started, in clock ticks after boot (:manpage:`proc(5)`)."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()[19]
