"""How long plugging waits, in seconds, unless a command says otherwise."""

from __future__ import annotations

from typing import NamedTuple

LOCK_TIMEOUT_S = 60.0
QMP_TIMEOUT_S = 15.0
UNPLUG_TIMEOUT_S = 30.0
"""How long the guest may take to release a device."""


class Waits(NamedTuple):
    """How long a command waits: for a guest that releases a device, for other commands on its VM,
    and for its monitor. See :func:`brine.hotplug.session.working_on`."""

    timeout_s: float = UNPLUG_TIMEOUT_S
    lock_timeout_s: float = LOCK_TIMEOUT_S
    qmp_timeout_s: float = QMP_TIMEOUT_S
