"""A stand-in for systemd as one daemon knows it: notifications, and stored descriptors.

Nodes have the real one. This is for what would take long there or can't be had on demand: a daemon
that is killed at a chosen moment, hundreds of times.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Self

from lab.command import ending_with_us
from lab.errors import LabError

# Moves the descriptors that it was given to where sd_listen_fds(3) looks, and becomes the daemon.
_LAUNCHER = """
import fcntl, os, sys
given = [int(number) for number in sys.argv[1].split(",") if number]
high = [fcntl.fcntl(number, fcntl.F_DUPFD, 3 + len(given)) for number in given]
for position, number in enumerate(high):
    os.dup2(number, 3 + position)
os.closerange(3 + len(given), max([*given, *high, 2]) + 1)
os.environ["LISTEN_PID"] = str(os.getpid())
os.execvp(sys.argv[2], sys.argv[2:])
"""
_LONGEST_MESSAGE = 4096
_OUR_MARK = b"OUR_MARK=1"


class ServiceManager:
    """Starts a daemon, hears what it says, and keeps its descriptors for its next start.

    :param folder: for the notification socket.
    """

    def __init__(self, folder: Path) -> None:
        self.messages: list[dict[str, str]] = []
        self.stored: dict[str, list[int]] = {}
        self._path = folder / "notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._marked = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="service-manager", daemon=True)

    def __enter__(self) -> Self:
        self._socket.bind(str(self._path))
        self._path.chmod(0o666)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._say(b"")
        self._thread.join()
        self._socket.close()
        for descriptors in self.stored.values():
            for descriptor in descriptors:
                os.close(descriptor)

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        log: IO[bytes],
        user: int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a daemon with the descriptors that an earlier one has stored.

        `user` is the number of the user that it is to be, if not the caller.
        """
        self._catch_up()
        given = [(name, number) for name, all_ in self.stored.items() for number in all_]
        numbers = [number for _, number in given]
        names = ":".join(name for name, _ in given)
        listen = {"LISTEN_FDS": str(len(given)), "LISTEN_FDNAMES": names} if given else {}
        return subprocess.Popen(
            [
                *ending_with_us(),
                sys.executable,
                "-c",
                _LAUNCHER,
                ",".join(map(str, numbers)),
                *command,
            ],
            pass_fds=numbers,
            stderr=log,
            user=user,
            env={**environment, **listen, "NOTIFY_SOCKET": str(self._path)},
        )

    def adopt(self, name: str, descriptor: int) -> None:
        """Keep a copy of a descriptor as if the daemon had stored it."""
        self.stored.setdefault(name, []).append(os.dup(descriptor))

    def heard(self, key: str) -> int:
        """How many messages had this key."""
        return sum(key in message for message in self.messages)

    def _catch_up(self) -> None:
        """Wait until all is heard that a daemon has said, which may have been killed since."""
        self._marked.clear()
        self._say(_OUR_MARK)
        if not self._marked.wait(60):
            raise LabError("what was said to the service manager was not heard")

    def _say(self, message: bytes) -> None:
        """Send that to ourselves, after what others have sent."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(message, str(self._path))

    def _listen(self) -> None:
        while True:
            data, ancillary, *_ = self._socket.recvmsg(_LONGEST_MESSAGE, socket.CMSG_SPACE(64))
            if not data:
                return
            if data == _OUR_MARK:
                self._marked.set()
                continue
            message = dict(line.partition("=")[::2] for line in data.decode().splitlines())
            numbers = array.array("i")
            for _, _, payload in ancillary:
                numbers.frombytes(payload)
            if "FDSTORE" in message:
                self.stored.setdefault(message["FDNAME"], []).extend(numbers)
            elif "FDSTOREREMOVE" in message:
                for number in self.stored.pop(message["FDNAME"], []):
                    with contextlib.suppress(OSError):
                        os.close(number)
            self.messages.append(message)
