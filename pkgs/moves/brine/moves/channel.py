"""Connections between the two nodes of a move. They are made here, outside of the instance's unit,
which may have no traffic of its own, and QEMU gets them open.

QEMU takes one connection for a guest's memory, and whatever comes there first is the guest. So a
program that connects has to prove that it has the key of the move before QEMU sees the connection::

    listener   b"brine-move 1\\n"  16 random bytes
    caller     16 random bytes    proof("caller", purpose, the listener's, its own)
    listener   proof("listener", purpose, the caller's, its own)

Then the connection is QEMU's, which may encrypt it.

For disks QEMU itself accepts connections. A caller that says nothing there would hold it up: QEMU
7.2 hangs in ``nbd-server-stop`` until such a caller goes. So the kernel drops what does not come
from the addresses and ports that the source has reserved, by a filter on the listener.

Source: :manpage:`socket(7)` (``SO_ATTACH_FILTER``), and the kernel's filter.rst: a TCP socket's
filter sees a packet from its TCP header on; the IP header is at ``SKF_NET_OFF``.
"""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import logging
import os
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from brine.common.errors import printable
from brine.moves.migration import MoveError
from brine.moves.move_key import MoveKey

log = logging.getLogger(__name__)

MEMORY = b"memory"
"""The purpose of a connection for a guest's memory."""
CONTROL = b"control"
"""The purpose of a connection for messages; see :mod:`brine.moves.talk`."""

_GREETING = b"brine-move 1\n"
_NONCE_BYTES = 16
_PROOF_BYTES = 32
_CALLS = 16  # at a time
_CALLER_S = 5.0
_DEAD_MS = 20_000
_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    # Otherwise a guest whose writes go to a node that is gone would wait for a quarter of an hour.
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_MS),
)


def listen(
    address: str, port: int = 0, *, callers: Sequence[tuple[str, int]] | None = None
) -> socket.socket:
    """Listen at an address of this node, for one move. What is accepted there ends soon after the
    other node is gone.

    :param port: 0 is any that is free.
    :param callers: see :func:`admit`; None is all, who then have to prove that they have the key.
    """
    listener = _socket_of(address)
    where = f"{address} port {port}" if port else address
    with _closed_on_error(listener, f"can't listen at {printable(where)}"):
        if callers is not None:
            admit(listener, callers)
        # After a kill, the connections of the process before hold the port for a minute.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(_CALLS)
    return listener


def admit(listener: socket.socket, callers: Sequence[tuple[str, int]]) -> None:
    """Have the kernel drop what comes to a listener from others than *callers*, addresses and ports
    of :func:`reserve`. It may be QEMU's already; callers before these are admitted no more."""
    program = b"".join(_from_caller(*one) for one in callers) + _BPF.pack(_RETURN, 0, 0, 0)
    buffer = ctypes.create_string_buffer(program)
    count = len(program) // _BPF.size
    option = struct.pack("@HP", count, ctypes.addressof(buffer))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)


_SO_ATTACH_FILTER = 26
_BPF = struct.Struct("@HBBI")  # struct sock_filter: code, jt, jf, k
_WORD, _HALF, _EQUAL, _RETURN = 0x20, 0x28, 0x15, 0x06
_SKF_NET_OFF = 0xFFF0_0000
_SOURCE_AT = {4: 12, 16: 8}  # in an IP header, by the size of an address
_WHOLE = 0xFFFF_FFFF


def _from_caller(address: str, port: int) -> bytes:
    """A part of a filter: takes a packet of that caller; any other goes on to the next part."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    bits = socket.inet_pton(family, address)
    at = _SKF_NET_OFF + _SOURCE_AT[len(bits)]
    checks = [
        (_WORD, at + offset, int.from_bytes(bits[offset : offset + 4], "big"))
        for offset in range(0, len(bits), 4)
    ]
    checks.append((_HALF, 0, port))
    length = 2 * len(checks) + 1
    program = b""
    for number, (load, where, value) in enumerate(checks):
        left = length - 2 * number - 2
        program += _BPF.pack(load, 0, 0, where) + _BPF.pack(_EQUAL, 0, left, value)
    return program + _BPF.pack(_RETURN, 0, 0, _WHOLE)


def reserve(address: str) -> socket.socket:
    """A socket at an address of this node, whose port no other caller has; its ``getsockname()``
    is what the other node has to admit. It is for :func:`connect_bare`."""
    reserved = _socket_of(address)
    with _closed_on_error(reserved, f"can't call from {printable(address)}"):
        reserved.bind((address, 0))
    return reserved


def _socket_of(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    for option in _OPTIONS:
        found.setsockopt(*option)
    return found


@contextlib.contextmanager
def _closed_on_error(connection: socket.socket, text: str) -> Iterator[None]:
    """Close a socket if the block fails; the error begins with *text*."""
    try:
        yield
    except OSError as error:
        connection.close()
        why = "it does not answer" if isinstance(error, TimeoutError) else error.strerror
        raise MoveError(f"{text}: {why}") from error
    except BaseException:
        connection.close()
        raise


class Call(NamedTuple):
    """A connection whose both ends have the key of the move.

    :param session: names it: no other connection has the same.
    """

    connection: socket.socket
    purpose: bytes
    session: bytes


def connect(
    address: str, port: int, *, key: MoveKey, purpose: bytes = MEMORY, timeout_s: float = 10.0
) -> socket.socket:
    """Connect to the other node, where a process is in :func:`accept_call` or will soon be.

    :raises MoveError: if none is, or it does not have the key.
    """
    return call(address, port, key=key, purpose=purpose, timeout_s=timeout_s).connection


def call(address: str, port: int, *, key: MoveKey, purpose: bytes, timeout_s: float = 10.0) -> Call:
    """The same, with the name of the connection."""
    connection, text = _socket_of(address), f"{printable(address)} port {port}"
    connect_bare(connection, address, port, timeout_s=timeout_s)
    with _closed_on_error(connection, text):
        connection.settimeout(timeout_s)
        own = os.urandom(_NONCE_BYTES)
        greeting = _received(connection, len(_GREETING) + _NONCE_BYTES)
        if len(greeting) < len(_GREETING) + _NONCE_BYTES:
            raise MoveError(f"{text}: the connection has ended before the other node's greeting")
        if not greeting.startswith(_GREETING):
            raise MoveError(f"{text}: another program than Brine's listens there")
        theirs = greeting[len(_GREETING) :]
        connection.sendall(own + key.proof(b"caller", purpose, theirs, own))
        proof = _received(connection, _PROOF_BYTES)
        if len(proof) < _PROOF_BYTES:
            raise MoveError(f"{text}: the other node has refused the key of this move")
        if not hmac.compare_digest(proof, key.proof(b"listener", purpose, own, theirs)):
            raise MoveError(f"{text}: the other node does not have the key of this move")
        connection.settimeout(None)
    return Call(connection, purpose, theirs + own)


def connect_bare(
    reserved: socket.socket, address: str, port: int, *, timeout_s: float = 10.0
) -> None:
    """Connect to the other node's QEMU, for a disk. It ends soon after that node is gone.

    :param reserved: of :func:`reserve`; it is closed if this fails.
    """
    with _closed_on_error(reserved, f"{printable(address)} port {port}"):
        reserved.settimeout(timeout_s)
        reserved.connect((address, port))
        reserved.settimeout(None)


class _Caller(NamedTuple):
    """A connection that has proved nothing yet."""

    connection: socket.socket
    nonce: bytes
    said: bytearray
    until: float


def accept_call(
    listener: socket.socket, *, key: MoveKey, purposes: Sequence[bytes], timeout_s: float = 30.0
) -> Call:
    """Wait for a caller that has the key, and one of some purposes. Others are disconnected, and
    hold no one up.

    :raises MoveError: if none came in time.
    """
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)
        callers: dict[int, _Caller] = {}
        stack.callback(_close, callers)
        deadline, strangers = time.monotonic() + timeout_s, 0
        while (now := time.monotonic()) < deadline:
            for number, one in list(callers.items()):
                if one.until < now:
                    strangers += _drop(selector, callers, number)
            for key_of, _ in selector.select(min(deadline - now, 1.0)):
                if key_of.fileobj is listener:
                    _take_call(listener, selector, callers)
                    continue
                caller = callers.get(key_of.fd)
                if caller is None:  # it went for the one that was just taken
                    continue
                if (purpose := _hear(caller, key, purposes)) is None:
                    continue
                if purpose:
                    selector.unregister(caller.connection)
                    del callers[key_of.fd]
                    caller.connection.setblocking(True)
                    session = caller.nonce + bytes(caller.said[:_NONCE_BYTES])
                    return Call(caller.connection, purpose, session)
                strangers += _drop(selector, callers, key_of.fd)
        text = f"the other node has not connected within {timeout_s:g} s"
        raise MoveError(f"{text}; {strangers} strangers have" if strangers else text)


def _close(callers: dict[int, _Caller]) -> None:
    for one in callers.values():
        one.connection.close()


def _take_call(
    listener: socket.socket, selector: selectors.BaseSelector, callers: dict[int, _Caller]
) -> None:
    with contextlib.suppress(OSError):
        connection, _ = listener.accept()
        connection.setblocking(False)
        if len(callers) >= _CALLS:  # the one that has been silent for longest goes
            _drop(selector, callers, min(callers, key=lambda number: callers[number].until))
        nonce = os.urandom(_NONCE_BYTES)
        try:
            connection.send(_GREETING + nonce)
        except OSError:
            connection.close()
            return
        until = time.monotonic() + _CALLER_S
        callers[connection.fileno()] = _Caller(connection, nonce, bytearray(), until)
        selector.register(connection, selectors.EVENT_READ)


def _hear(caller: _Caller, key: MoveKey, purposes: Sequence[bytes]) -> bytes | None:
    """The purpose of a caller that has the key, and empty of one that has not; None if it has not
    said all yet."""
    whole = _NONCE_BYTES + _PROOF_BYTES
    try:
        # Not one byte more: what follows is QEMU's.
        data = caller.connection.recv(whole - len(caller.said))
        caller.said.extend(data)
        if not data:
            return b""
        if len(caller.said) < whole:
            return None
        theirs, proof = bytes(caller.said[:_NONCE_BYTES]), bytes(caller.said[_NONCE_BYTES:])
        for purpose in purposes:
            if hmac.compare_digest(proof, key.proof(b"caller", purpose, caller.nonce, theirs)):
                caller.connection.send(key.proof(b"listener", purpose, theirs, caller.nonce))
                return purpose
    except BlockingIOError:
        return None
    except OSError:
        pass
    return b""


def _drop(selector: selectors.BaseSelector, callers: dict[int, _Caller], number: int) -> int:
    caller = callers.pop(number)
    selector.unregister(caller.connection)
    with contextlib.suppress(OSError):
        log.warning("a stranger at the port of a move: %s", caller.connection.getpeername()[0])
    caller.connection.close()
    return 1


def _received(connection: socket.socket, size: int) -> bytes:
    """So many bytes; fewer if the connection ends before."""
    found = b""
    while len(found) < size:
        try:
            data = connection.recv(size - len(found))
        except ConnectionResetError:
            data = b""
        if not data:
            break
        found += data
    return found
