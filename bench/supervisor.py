"""Stands in for systemd and journald: takes, and keeps, what a service sends to them.

A daemon pays for each message and each descriptor it hands over; without somebody at the other end
it would look faster than it is. Run as `python3 -m bench.supervisor`.
"""

import array
import contextlib
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench import machine

JOURNAL_SOCKET = Path("/run/systemd/journal/socket")
"""Fixed: libsystemd has it compiled in. In the sandbox, /run is ours."""
_NOTIFY_SOCKET = Path("/run/bench/notify")
_LONGEST_MESSAGE = 64 * 1024


@contextlib.contextmanager
def supervised(runtime_dir: Path, core: int, watchdog_s: int) -> Iterator[Mapping[str, str]]:
    """Be there for a service; yields the environment that systemd would give it."""
    runtime_dir.mkdir(parents=True, exist_ok=True)
    with machine.placed(core, priority=2):  # a daemon must not wait until the load has gone idle
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.supervisor"], stdout=subprocess.PIPE, text=True
        )
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("the stand-in for systemd did not start")
        yield {
            "NOTIFY_SOCKET": str(_NOTIFY_SOCKET),
            "RUNTIME_DIRECTORY": str(runtime_dir),
            "WATCHDOG_USEC": str(watchdog_s * 1_000_000),
        }
    finally:
        process.kill()
        process.communicate()
        for file in (JOURNAL_SOCKET, _NOTIFY_SOCKET, *runtime_dir.iterdir()):
            file.unlink(missing_ok=True)


def _listen(path: Path) -> socket.socket:
    path.parent.mkdir(parents=True, exist_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    listener.bind(str(path))
    return listener


def _take_notice(listener: socket.socket, stored: dict[str, list[int]]) -> None:
    size = array.array("i").itemsize
    message, ancillary, _, _ = listener.recvmsg(_LONGEST_MESSAGE, socket.CMSG_SPACE(size))
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % size])
    fields = dict(line.partition("=")[::2] for line in message.decode().splitlines())
    name = fields.get("FDNAME", "stored")
    if "FDSTORE" in fields:
        stored.setdefault(name, []).extend(descriptors)
    elif "FDSTOREREMOVE" in fields:
        for descriptor in stored.pop(name, []):
            os.close(descriptor)


def main() -> None:
    """Serve both sockets until killed."""
    journal, notify = _listen(JOURNAL_SOCKET), _listen(_NOTIFY_SOCKET)
    stored: dict[str, list[int]] = {}
    poll = select.epoll()
    poll.register(journal, select.EPOLLIN)
    poll.register(notify, select.EPOLLIN)
    print("ready", flush=True)
    while True:
        for descriptor, _ in poll.poll():
            with contextlib.suppress(BlockingIOError):
                while True:
                    if descriptor == journal.fileno():
                        journal.recv(_LONGEST_MESSAGE)
                    else:
                        _take_notice(notify, stored)


if __name__ == "__main__":
    main()
