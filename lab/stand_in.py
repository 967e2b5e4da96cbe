"""A real process in QEMU's stead, for code that waits for one and ends it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Self

from lab.waiting import wait_for


class StandIn:
    """It does nothing, until it is ended.

    `deaf`: it does not hear of SIGTERM. `descriptor` is a pidfd of it.
    """

    def __init__(self, *, deaf: bool = False) -> None:
        command = "trap '' TERM; exec sleep 60" if deaf else "exec sleep 60"
        self._child = subprocess.Popen(["sh", "-c", command])
        self.pid = self._child.pid
        self.descriptor = os.pidfd_open(self.pid)
        command_line = Path(f"/proc/{self.pid}/cmdline")
        wait_for("the stand-in", lambda: command_line.read_bytes().startswith(b"sleep"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.kill()
        self._child.wait()
        os.close(self.descriptor)

    def end(self) -> None:
        """It ends, as QEMU does when its guest has shut down, and has ended then."""
        self._child.kill()
        self._child.wait()

    def runs(self) -> bool:
        return self._child.poll() is None

    def status(self) -> int:
        """Its exit status; a signal is a negative number."""
        return self._child.wait(10)
