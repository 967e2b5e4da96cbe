"""Between a root's tool that nobody watches and a QEMU: a process without privileges, which alone
reads what QEMU says.

It passes on whole messages of QMP's, written anew, and closes the connection at anything else.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
from types import TracebackType
from typing import NoReturn, Self

from brine.common import qmp_wire
from brine.common.errors import BrineError
from brine.common.qmp_wire import LINE_LIMIT, READ_SIZE

NOBODY = 65534
"""The user and the group of the process: Linux's own for who may do nothing."""

_MEMORY = 256 << 20
_MOST_DESCRIPTORS = 16
_MOST_OPEN = 65536


class Relay:
    """At most one such process, which ends with the block.

    Called with a connection to QEMU, it returns the one that is to be used in its place.
    """

    def __init__(self) -> None:
        self._child = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._child:
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)

    def __call__(self, qemu: socket.socket) -> socket.socket:
        """Have the process be there, and QEMU's connection be its own alone.

        :raises BrineError: if it can't be had.
        """
        ours, its = socket.socketpair()
        with its, qemu:
            try:
                self._child = os.fork()
            except OSError as error:
                ours.close()
                raise BrineError(f"no process to talk to QEMU: {error.strerror}") from error
            if self._child == 0:
                ours.close()
                _run(qemu, its)
        ours.setblocking(False)
        return ours


def _run(qemu: socket.socket, client: socket.socket) -> NoReturn:
    status = 1
    try:
        # Locks, above all: they are others' to give back.
        low, high = sorted((qemu.fileno(), client.fileno()))
        for first, last in ((0, low), (low + 1, high), (high + 1, _MOST_OPEN)):
            os.closerange(first, last)
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)  # which gives up all capabilities, too
        qemu.setblocking(True)
        relay(qemu, client)
        status = 0
    finally:
        os._exit(status)


def relay(qemu: socket.socket, client: socket.socket) -> None:
    """Pass on what a client says as it is, with descriptors, and what QEMU says as whole messages;
    until either end closes, or QEMU says something else.

    :raises OSError: or QmpError, at that.
    """
    heard = bytearray()
    poll = select.poll()
    for one in (qemu, client):
        poll.register(one, select.POLLIN)
    while ready := {number for number, _ in poll.poll()}:
        if client.fileno() in ready:
            data, descriptors, _, _ = socket.recv_fds(client, READ_SIZE, _MOST_DESCRIPTORS)
            if not data:
                return
            sent = socket.send_fds(qemu, [data], descriptors) if descriptors else 0
            qemu.sendall(data[sent:])
            for descriptor in descriptors:
                os.close(descriptor)
        if qemu.fileno() in ready:
            data = qemu.recv(READ_SIZE)
            if not data:
                return
            heard += data
            *lines, rest = heard.split(b"\n")
            heard = bytearray(rest)
            for line in lines:
                if qmp_wire.parse(bytes(line)) is not None:
                    client.sendall(json.dumps(json.loads(line)).encode() + b"\n")
            if len(heard) > LINE_LIMIT:
                return
