"""Talking to the service manager: readiness, status, watchdog, stored descriptors.

Everything here does nothing where systemd did not start us (no ``$NOTIFY_SOCKET``), so that a
daemon also runs from a terminal. Sources: :manpage:`sd_notify(3)`, :manpage:`sd_listen_fds(3)`,
:manpage:`sd_watchdog_enabled(3)`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from systemd import daemon

log = logging.getLogger(__name__)


class ServiceManager:
    """systemd, as one daemon sees it."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._present = "NOTIFY_SOCKET" in environment
        self._failing = False
        watched = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        limit = environment.get("WATCHDOG_USEC") if watched else None
        self.watchdog_s = int(limit) / 1e6 if limit else None
        """The longest time between two calls of :meth:`alive`, in seconds; None if none is set."""
        runtime = environment.get("RUNTIME_DIRECTORY")
        self.runtime_dir = Path(runtime.split(":")[0]) if runtime else None
        """The unit's ``RuntimeDirectory=``; None without systemd."""

    def ready(self, status: str) -> None:
        """Say that start or reload is done."""
        self._notify(f"READY=1\nSTATUS={status}")

    def reloading(self) -> None:
        """Say that a reload begins."""
        self._notify("RELOADING=1")

    def stopping(self) -> None:
        """Say that the daemon ends itself."""
        self._notify("STOPPING=1")

    def status(self, status: str) -> None:
        """Show one line in ``systemctl status``."""
        self._notify(f"STATUS={status}")

    def alive(self) -> None:
        """Feed the watchdog."""
        self._notify("WATCHDOG=1")

    def store(self, name: str, descriptor: int) -> None:
        """Have systemd keep a copy of *descriptor* over a restart, a crash or a kill of ours. The
        *name* is printable ASCII without ':', up to 255 characters."""
        # Without FDPOLL=0 systemd drops a connection whose peer ended while we were away: the
        # very one whose last words are still to be read.
        self._notify(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", [descriptor])

    def discard(self, name: str) -> None:
        """Remove a stored descriptor."""
        self._notify(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def stored(self) -> dict[int, str]:
        """The descriptors that were stored before this start, with their names."""
        names: dict[int, str] = {}
        if self._present:
            names = daemon.listen_fds_with_names(unset_environment=True)
        return names

    def _notify(self, message: str, descriptors: Sequence[int] = ()) -> None:
        if not self._present:
            return
        try:
            daemon.notify(message, fds=list(descriptors))
        except OSError as error:
            # Most likely descriptors ran out. Less will be known of us, but VMs come first.
            if not self._failing:
                log.warning("systemd can't be told: %s", error.strerror)
            self._failing = True
        else:
            self._failing = False
