"""kvmd as a process of its own, from the source tree, under a stand-in for systemd."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lab.service_manager import ServiceManager
from lab.waiting import wait_for

ROOT = Path(__file__).parents[2]
_NOBODY = 65534


class Kvmd:
    """A running kvmd, its control directory and what it has logged."""

    def __init__(self, folder: Path, manager: ServiceManager) -> None:
        self.manager = manager
        self.control = folder / "ctrl"
        self.state = folder / "state"
        self.settings = folder / "kvmd.toml"
        self._log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The daemon's process."""
        assert self._process
        return self._process.pid

    def configure(self, **settings: object) -> None:
        """Write the settings file."""
        values = {"control_dir": str(self.control), **settings}
        lines = [
            f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}"
            for key, value in values.items()
        ]
        self.settings.write_text("\n".join(lines) + "\n")

    def start(self, **environment: str) -> None:
        """Start the daemon and wait until it has looked at its control directory.

        *environment* adds to what it finds there.
        """
        self._start(sys.executable, ROOT, environment)

    def start_as_nobody(self) -> None:
        """Start the daemon as a user without any rights."""
        # That user may not enter the tree, or may not use its Python.
        copy = self.settings.with_name("tree")
        for part in ("common", "kvmd"):
            shutil.copytree(ROOT / "pkgs" / part, copy / "pkgs" / part)
        self._start("/usr/bin/python3", copy, {}, user=_NOBODY)

    def _start(
        self, python: str, tree: Path, environment: dict[str, str], *, user: int | None = None
    ) -> None:
        ready = self.manager.heard("READY")
        everything = {
            **os.environ,
            "PYTHONPATH": f"{tree}/pkgs/common:{tree}/pkgs/kvmd",
            "RUNTIME_DIRECTORY": str(self.state),
            **environment,
        }
        command = [python, "-m", "brine.kvmd", "--config", str(self.settings)]
        with self._log.open("ab") as log:
            self._process = self.manager.start(command, everything, log=log, user=user)
        wait_for("kvmd to start", lambda: self.manager.heard("READY") > ready)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End the daemon; returns its exit status."""
        assert self._process
        self._process.send_signal(number)
        status = self._process.wait(10)
        self._process = None
        return status

    def kill_if_running(self) -> None:
        """Leave no process behind."""
        if self._process:
            self._process.kill()
            self._process.wait()

    def reload(self) -> None:
        """Have the settings read again."""
        os.kill(self.pid, signal.SIGHUP)

    def status(self) -> str:
        """What it last had systemd show."""
        messages = [message["STATUS"] for message in self.manager.messages if "STATUS" in message]
        return messages[-1]

    def log(self, about: str = "") -> list[str]:
        """The lines logged so far that contain *about*."""
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        return [line for line in text.splitlines() if about in line]

    def wait_logged(self, text: str, times: int = 1, *, timeout_s: float = 10) -> str:
        """Wait until *text* was logged so often; returns the last such line."""
        wait_for(f"kvmd to log {text!r}", lambda: len(self.log(text)) >= times, timeout_s=timeout_s)
        return self.log(text)[-1]

    def watches(self, name: str, times: int = 1) -> None:
        """Wait until the instance is watched."""
        self.wait_logged(f": {name}: watching", times)

    def watched(self) -> int:
        """How many instances were found so far."""
        return sum(line.endswith(": watching") for line in self.log())

    def verdict(self, name: str, times: int = 1) -> str:
        """Wait for the instance's verdict: ``who, cause``."""
        return self.wait_logged(f": {name}: ended: ", times).split("ended: ")[1]

    def shut_down_by_user(self, name: str) -> bool:
        """Whether the shutdown file is there."""
        return (self.control / f"{name}.shutdown").exists()

    def descriptors(self) -> int:
        """How many descriptors the daemon has open."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def cpu_s(self) -> float:
        """Processor time used so far, seconds."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_kib(self) -> int:
        """Memory in RAM, KiB."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0])


@contextmanager
def kvmd_process() -> Iterator[Kvmd]:
    """A kvmd that is configured but not started; whatever runs at the end is killed."""
    # Not pytest's folder: a socket's path has at most 107 bytes.
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvmd-"))
        manager = stack.enter_context(ServiceManager(Path(folder)))
        kvmd = Kvmd(Path(folder), manager)
        kvmd.control.mkdir()
        kvmd.state.mkdir()
        kvmd.configure()
        try:
            yield kvmd
        finally:
            kvmd.kill_if_running()
