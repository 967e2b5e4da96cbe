"""A daemon as a process of its own, from the source tree, under a stand-in for systemd."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from lab.service_manager import ServiceManager
from lab.waiting import wait_for

ROOT = Path(__file__).parents[2]


class DaemonProcess:
    """A daemon, its settings and what it has logged.

    :param module: what ``python3 -m`` runs.
    :param part: its folder under pkgs/.
    """

    reloaded = "settings reloaded"
    """What it logs when it goes on with other settings."""

    def __init__(self, folder: Path, manager: ServiceManager, *, module: str, part: str) -> None:
        self.manager = manager
        self.folder = folder
        self.state = folder / "state"
        self.settings = folder / f"{part}.toml"
        self._module = module
        self._part = part
        self._log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The daemon's process."""
        assert self._process
        return self._process.pid

    def defaults(self) -> dict[str, object]:
        """The settings that each test has."""
        return {}

    def configure(self, **settings: object) -> None:
        """Write the settings file."""
        values = {**self.defaults(), **settings}
        # A JSON string or number or boolean is TOML's, too.
        lines = [f"{key} = {json.dumps(value, default=str)}" for key, value in values.items()]
        self.settings.write_text("\n".join(lines) + "\n")

    def start(self, **environment: str) -> None:
        """Start the daemon and wait until it is ready.

        *environment* adds to what it finds there.
        """
        ready, logged = self.manager.heard("READY"), len(self.log())
        self.launch(environment)
        wait_for("the daemon to start", lambda: self.manager.heard("READY") > ready)
        # It logs its status next, and then has no descriptor any more with which it said so.
        status = [message["STATUS"] for message in self.manager.messages if "READY" in message][-1]
        wait_for(
            "the daemon to log its status",
            lambda: any(line.endswith(status) for line in self.log()[logged:]),
        )

    def launch(
        self,
        environment: dict[str, str],
        *,
        python: str = sys.executable,
        tree: Path = ROOT,
        user: int | None = None,
    ) -> None:
        """Start the daemon, and don't wait."""
        parts = ("common", "vm", "config", self._part)
        everything = {
            **os.environ,
            "PYTHONPATH": ":".join(f"{tree}/pkgs/{part}" for part in parts),
            "RUNTIME_DIRECTORY": str(self.state),
            **environment,
        }
        command = [python, "-m", self._module, "--config", str(self.settings)]
        with self._log.open("ab") as log:
            self._process = self.manager.start(command, everything, log=log, user=user)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End the daemon; returns its exit status."""
        assert self._process
        self._process.send_signal(number)
        return self.wait_ended()

    def wait_ended(self) -> int:
        """Wait until the daemon has ended by itself; returns its exit status."""
        assert self._process
        status = self._process.wait(60)
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

    def reload_whole(self, **settings: object) -> None:
        """The same, with these settings if there are any, and wait until it goes on with them."""
        if settings:
            self.configure(**settings)
        before = len(self.log(self.reloaded))
        self.reload()
        self.wait_logged(self.reloaded, before + 1)

    def restart(self, **settings: object) -> None:
        """End the daemon, and start it with other settings."""
        self.configure(**settings)
        self.stop()
        self.start()

    def status(self) -> str:
        """The last status that it sent to systemd."""
        messages = [message["STATUS"] for message in self.manager.messages if "STATUS" in message]
        return messages[-1]

    def log(self, about: str = "") -> list[str]:
        """The lines logged so far that contain *about*."""
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        return [line for line in text.splitlines() if about in line]

    def wait_logged(self, text: str, times: int = 1, *, timeout_s: float = 60) -> str:
        """Wait until *text* was logged so often; returns the last such line."""
        wait_for(
            f"the daemon to log {text!r}",
            lambda: len(self.log(text)) >= times,
            timeout_s=timeout_s,
        )
        return self.log(text)[-1]

    def descriptors(self) -> int:
        """How many descriptors the daemon has open."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def cpu_ticks(self) -> int:
        """Processor time used so far, in ticks of 10 ms."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    def resident_kib(self) -> int:
        """Memory in RAM, KiB."""
        return memory_kib(self.pid, "VmRSS")


def memory_kib(pid: int, key: str) -> int:
    """A line of /proc/PID/status such as VmRSS, in KiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split(f"{key}:")[1].split()[0])
