"""The host with a network and a /run of its own: what is done there stays there."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.command import Arguments, ending_with_us
from lab.errors import LabError
from lab.machine import Host, require_commands, require_root

# Operators' scripts on the host are none of the test's business.
_PREPARE = """set -e
mount -t tmpfs -o mode=0755 tmpfs /run
if [ -d /etc/brine ]; then mount -t tmpfs -o mode=0755 tmpfs /etc/brine; fi
mkdir -p /run/brine/ctrl
ip link set lo up
echo ready
exec sleep infinity
"""


class PrivateHost(Host):
    """All of the host's files and programs, in a network namespace of its own."""

    name = "private host"

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.root = Path(f"/proc/{pid}/root")

    def command(self, args: Arguments) -> list[str]:
        # The root, too: this machine's may be another than that of its mounts.
        enter = ["nsenter", "--target", str(self._pid), "--net", "--mount", "--root", "--wd"]
        return [*enter, "--", *(str(arg) for arg in args)]


@contextmanager
def private_host() -> Iterator[PrivateHost]:
    """The host, with no network but a loopback, and an empty /run."""
    require_root("a private host")
    require_commands("a private host", ["ip", "nsenter", "unshare"])
    process = subprocess.Popen(
        [*ending_with_us(), "unshare", "--net", "--mount", "sh", "-c", _PREPARE],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    assert process.stderr
    try:
        if process.stdout.readline() != "ready\n":
            raise LabError(f"no private host: {process.stderr.read()}")
        yield PrivateHost(process.pid)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
