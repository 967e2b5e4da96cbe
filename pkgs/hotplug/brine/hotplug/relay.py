"""A process without privileges between a tool of root's that runs unattended and a QEMU.

It alone reads what QEMU sends.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
from typing import NoReturn, Self

from brine.common.errors import BrineError
from brine.common.qmp import wire
from brine.common.qmp.wire import LINE_LIMIT, READ_SIZE

_NOBODY = 65534  # the user and the group: Linux's own, without any rights
_MEMORY = 256 << 20
_MOST_DESCRIPTORS = 16
_MOST_OPEN = 65536


class Relay:
    """At most one such process, which ends with the block.

    Called with a connection to QEMU, it returns the connection to use instead.
    """

    def __init__(self) -> None:
        self._child = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child:
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)

    def __call__(self, qemu: socket.socket) -> socket.socket:
        """Start the process, and hand it QEMU's connection."""
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
        return ours


def _run(qemu: socket.socket, client: socket.socket) -> NoReturn:
    status = 1
    try:
        # Above all locks, which this process must not hold.
        low, high = sorted((qemu.fileno(), client.fileno()))
        for first, last in ((0, low), (low + 1, high), (high + 1, _MOST_OPEN)):
            os.closerange(first, last)
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)  # which gives up all capabilities, too
        qemu.setblocking(True)
        _relay(qemu, client)
        status = 0
    finally:
        os._exit(status)


def _relay(qemu: socket.socket, client: socket.socket) -> None:
    """Relay the client's bytes and descriptors unchanged, and QEMU's answers as whole messages.

    This returns when either end closes.
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
                if wire.message_of(bytes(line)) is not None:
                    client.sendall(json.dumps(json.loads(line)).encode() + b"\n")
            if len(heard) > LINE_LIMIT:
                return
