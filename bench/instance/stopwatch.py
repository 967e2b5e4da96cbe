"""One start, watched from outside: by the kernel's word, QEMU's, and the command's end."""

import contextlib
import os
import select
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.commands import ENVIRONMENT
from bench.errors import BenchError
from bench.instance.exec_watch import ExecWatch
from bench.instance.results import Start

LIMIT_S = 60.0
_PAUSE_S = 0.001


@dataclass
class _Greeted:
    """A QMP client that takes whatever is needed to learn whether QEMU answers, and never waits.

    :param path: where QEMU will listen; nothing does yet.
    """

    path: Path
    connection: socket.socket | None = None
    _heard: bytes = b""

    def connect(self) -> None:
        """Connect, if QEMU listens by now."""
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)
        try:
            connection.connect(str(self.path))
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            return
        self.connection = connection

    def answered(self) -> bool:
        """Read what there is; whether QEMU has answered a command."""
        assert self.connection
        data = self.connection.recv(64 * 1024)
        if not data:
            raise BenchError(f"{self.path}: QEMU has ended", hint="see its log in the node")
        is_greeting = b"\n" not in self._heard and b"\n" in self._heard + data
        self._heard += data
        if is_greeting:
            self.connection.sendall(b'{"execute": "qmp_capabilities"}\n')
        return b'"return"' in self._heard

    def close(self) -> None:
        if self.connection:
            self.connection.close()


def timed_start(
    command: Sequence[str], program: ExecWatch, qmp: Path | None, *, returns: bool = True
) -> tuple[Start, subprocess.Popen[bytes]]:
    """Run a command that starts something, and watch; returns the command's process, too.

    :param program: what it is to execute in the end; the last time counts before QEMU answers, as
        the one before may only have asked for QEMU's version.
    :param qmp: a socket of QEMU's that is for us alone; None if there is no QEMU.
    :param returns: whether it comes back; else it is the program itself, and stays.
    :raises BenchError: if it fails, or takes too long.
    """
    program.heard()
    if qmp:
        qmp.unlink(missing_ok=True)
    with contextlib.ExitStack() as stack:
        output: Any = stack.enter_context(tempfile.TemporaryFile())
        began_at = time.perf_counter()
        process = subprocess.Popen(
            command, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        ended = stack.enter_context(_ended(process.pid))
        client = _Greeted(qmp) if qmp else None
        if client:
            stack.callback(client.close)
        exec_s = answers_s = returned_s = None
        while exec_s is None or (client and answers_s is None) or (returns and returned_s is None):
            wanted: list[Any] = [program]
            if returned_s is None:
                wanted.append(ended)
            if client and client.connection and answers_s is None:
                wanted.append(client.connection)
            # A socket that is not there yet can't be waited for.
            is_polling = client and not client.connection and exec_s is not None
            news, _, _ = select.select(wanted, [], [], _PAUSE_S if is_polling else LIMIT_S)
            now_s = time.perf_counter() - began_at
            if program in news and program.heard() and answers_s is None:
                exec_s = now_s
            if ended in news:
                returned_s = now_s
                if process.wait() != 0 or not returns:
                    raise _failed(command, output)
            if client and client.connection in news and client.answered():
                answers_s = now_s
            if is_polling and client:
                client.connect()
            if now_s > LIMIT_S:
                raise _failed(command, output)
        return Start(exec_s, answers_s, returned_s), process


@contextlib.contextmanager
def _ended(pid: int) -> Iterator[int]:
    """A descriptor that is readable when a process has ended."""
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _failed(command: Sequence[str], output: Any) -> BenchError:
    output.seek(0)
    said = output.read().decode(errors="replace").strip()
    text = f"{' '.join(command[:4])} failed, or took too long: {said}"
    return BenchError(text, hint="is it busy? try again")
