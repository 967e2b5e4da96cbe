"""kvmd as a process of its own, from the source tree, under a stand-in for systemd."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from component.daemon_process import ROOT, DaemonProcess
from lab.service_manager import ServiceManager
from lab.waiting import wait_for

_NOBODY = 65534


class Kvmd(DaemonProcess):
    """A running kvmd, its control directory and what it has logged."""

    def __init__(self, folder: Path, manager: ServiceManager) -> None:
        super().__init__(folder, manager, module="brine.kvmd.main", part="kvmd")
        self.control = folder / "ctrl"
        self.marks = folder / "marks"

    def defaults(self) -> dict[str, object]:
        """Its own control directory, and marks of its own."""
        return {"control_dir": str(self.control), "marks_dir": str(self.marks)}

    def start_as_nobody(self) -> None:
        """Start the daemon as a user without any rights."""
        # That user may not enter the tree, or may not use its Python.
        copy = self.settings.with_name("tree")
        for part in ("common", "vm", "kvmd"):
            shutil.copytree(ROOT / "pkgs" / part, copy / "pkgs" / part)
        ready = self.manager.heard("READY")
        self.launch({}, python="/usr/bin/python3", tree=copy, user=_NOBODY)
        wait_for("kvmd to start", lambda: self.manager.heard("READY") > ready)

    def watches(self, name: str, times: int = 1) -> None:
        """Wait until the instance is watched."""
        self.wait_logged(f": {name}: watching", times)

    def watched(self) -> int:
        """How many instances were found so far."""
        return sum(line.endswith(": watching") for line in self.log())

    def verdict(self, name: str, times: int = 1) -> str:
        """Wait for the instance's verdict: ``who, cause``."""
        return self.wait_logged(f": {name}: ended: ", times).split("ended: ")[1]

    def wait_verdict_kept(self) -> None:
        """Wait until a verdict would outlast the daemon, which is a moment after it was logged."""
        wait_for("a verdict to be kept", self._keeps_verdict)

    def _keeps_verdict(self) -> bool:
        records = [json.loads(file.read_bytes()) for file in self.state.glob("*.json")]
        return any(record["verdict"] for record in records)

    def shut_down_by_user(self, name: str) -> bool:
        """Whether the shutdown file is there."""
        return (self.control / f"{name}.shutdown").exists()


@contextmanager
def kvmd_process() -> Iterator[Kvmd]:
    """A kvmd that is configured but not started; whatever runs at the end is killed."""
    # Not pytest's folder: a socket's path has at most 107 bytes.
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvmd-"))
        manager = stack.enter_context(ServiceManager(Path(folder)))
        kvmd = Kvmd(Path(folder), manager)
        kvmd.control.mkdir()
        kvmd.marks.mkdir()
        kvmd.state.mkdir()
        kvmd.configure()
        try:
            yield kvmd
        finally:
            kvmd.kill_if_running()
