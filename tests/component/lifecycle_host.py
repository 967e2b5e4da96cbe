"""The handler and owners as processes, from the source tree, below a /run of their own.

The test is what the executor is on a node: it gets the handler's requests, and answers them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from brine.common.process import start_time_of
from brine.vm.markers import MarkerKind, write_marker
from lab.command import ending_with_us
from lab.from_source import from_source
from lab.waiting import wait_for

_PREPARE = """set -e
mount -t tmpfs -o mode=0755 tmpfs /run
mkdir -p /run/brine/lifecycle /run/brine/marks /run/brine-lifecycle /var/lib/brine
mount -t tmpfs -o mode=0755 tmpfs /var/lib/brine
mkdir /var/lib/brine/instances
echo ready
exec sleep infinity
"""


class LifecycleHost:
    """A host with nothing but folders of owners, and what runs there.

    :param pid: of a process in its mount namespace.
    :param log: of the handler.
    """

    def __init__(self, pid: int, log: Path) -> None:
        self._pid = pid
        self.log = log
        self.root = Path(f"/proc/{pid}/root")
        self.folders = self.root / "run/brine/lifecycle"
        self._executor = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._executor.bind(str(self.root / "run/brine/lifecycle-executor"))
        self._executor.listen()
        self._connection: socket.socket | None = None
        self._started: list[subprocess.Popen[bytes]] = []
        self._handler: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        """End everything."""
        for process in self._started:
            process.kill()
            process.wait()
        if self._connection:
            self._connection.close()
        self._executor.close()

    def define(self, name: str, **owner: Any) -> Path:
        """Define an instance with an owner, and make its folder."""
        identity = str(uuid.uuid5(uuid.NAMESPACE_DNS, name))
        spec = {"name": name, "uuid": identity, "owner": {"watchdog_timeout": 8, **owner}}
        file = self.root / f"var/lib/brine/instances/{name}.json"
        # As Brine writes it: whole.
        file.with_suffix(".new").write_text(json.dumps(spec))
        file.with_suffix(".new").rename(file)
        folder = self.folders / name
        folder.mkdir(exist_ok=True)
        return folder

    def undefine(self, name: str) -> None:
        """Remove a spec."""
        (self.root / f"var/lib/brine/instances/{name}.json").unlink()

    def run(
        self, *command: str, capabilities: str = "+all", **options: Any
    ) -> subprocess.Popen[bytes]:
        """Start a command there: one of Brine's, or any other."""
        enter = ["nsenter", "--target", str(self._pid), "--mount", "--wd=/"]
        if capabilities != "+all":
            enter += ["--", "setpriv", f"--bounding-set={capabilities}"]
        arguments, environment = from_source(command)
        environment["RUNTIME_DIRECTORY"] = "/run/brine-lifecycle"
        process = subprocess.Popen(
            [*ending_with_us(), *enter, "--", *arguments], env=environment, **options
        )
        self._started.append(process)
        return process

    def run_instance(self, name: str) -> subprocess.Popen[bytes]:
        """Start a process that stands for an instance's, and note it as its unit does."""
        process = self.run("sleep", "infinity")
        start_time = start_time_of(process.pid)
        (self.folders / name / "pid").write_text(f"{process.pid} {start_time} run1\n")
        marks = self.root / "run/brine/marks"
        write_marker(MarkerKind.START, name, run="run1", folder=marks, pid=process.pid)
        return process

    def end_instance(self, name: str, process: subprocess.Popen[bytes]) -> None:
        """End that process, and clear up as the unit does."""
        process.kill()
        process.wait()
        (self.folders / name / "pid").unlink()

    def start_handler(self, *, capabilities: str = "+all") -> None:
        """Start the handler, and wait until it is ready.

        :param capabilities: that root has there, as setpriv(1) has them.
        """
        with self.log.open("ab") as log:
            self._handler = self.run("brine-lifecycle", capabilities=capabilities, stderr=log)
        clock = self.root / "run/brine-lifecycle/clock"
        before = clock.read_text() if clock.exists() else ""
        wait_for("the handler to work", lambda: clock.exists() and clock.read_text() != before)

    def kill_handler(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End the handler by a signal."""
        assert self._handler
        self._handler.send_signal(number)
        self._handler.wait()
        if self._connection:
            self._connection.close()
            self._connection = None

    def signal_handler(self, number: signal.Signals) -> None:
        """Send the handler a signal."""
        assert self._handler
        self._handler.send_signal(number)

    def cpu_s(self) -> float:
        """The processor time of the handler so far."""
        assert self._handler
        stat = Path(f"/proc/{self._handler.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")

    def request(self, timeout_s: float = 60) -> str:
        """Wait for the handler's next request."""
        while True:
            if self._connection is None:
                self._executor.settimeout(timeout_s)
                self._connection, _ = self._executor.accept()
            self._connection.settimeout(timeout_s)
            if packet := self._connection.recv(4096):
                return packet.decode()
            self._connection.close()
            self._connection = None

    def requests_within(self, seconds: float, *, most: int = 1000) -> list[str]:
        """The requests that come in that time.

        :param most: return as soon as there are so many.
        """
        found: list[str] = []
        deadline = time.monotonic() + seconds
        while len(found) < most and (left_s := deadline - time.monotonic()) > 0:
            try:
                found.append(self.request(left_s))
            except TimeoutError:
                break
        return found

    def answer(self, text: str) -> None:
        """Answer a request."""
        assert self._connection
        self._connection.send(text.encode())

    def logged(self, text: str) -> None:
        """Wait until the handler has logged a text."""
        wait_for(f"a record with {text!r}", lambda: text in self.log.read_text())


@contextmanager
def lifecycle_host() -> Iterator[LifecycleHost]:
    """A host without a handler. What runs there at the end is killed."""
    process = subprocess.Popen(
        [*ending_with_us(), "unshare", "--mount", "sh", "-c", _PREPARE],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    try:
        assert process.stdout.readline() == "ready\n"
        with tempfile.NamedTemporaryFile(prefix="lifecycle-") as log:
            host = LifecycleHost(process.pid, Path(log.name))
            try:
                yield host
            finally:
                host.close()
    finally:
        process.kill()
        process.wait()
