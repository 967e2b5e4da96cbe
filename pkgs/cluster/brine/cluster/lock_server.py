"""``brine-lockd.service``: the cluster's locks, on its master.

One process has one table. An owner is a connection, and its end frees what it holds. The table is
in memory: locks are gone with the process, and clients say so. Nothing's safety rests on them.

Messages are lines of JSON, both ways; see :mod:`brine.cluster.lock_client`.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from functools import partial
from typing import Any

from brine.cluster.lock_table import ClaimState, LockClaim, LockName, LockTable
from brine.common.errors import printable
from brine.common.locks import LockError
from brine.common.unix_socket import peer_process

LONGEST_LINE = 1 << 20

_LISTENER = 3  # the first descriptor that systemd passes (sd_listen_fds(3))
_IDLE_S = 60.0
_LONGEST_PURPOSE = 200
_LONGEST_TIMEOUT_S = 1e6
_MOST_UNSENT = 4 << 20
_FULL_S = 0.05
_DECODER = json.JSONDecoder()
_GRANTED, _TIMED_OUT, _RELEASED = (
    b'{"granted": true}\n',
    b'{"timed_out": true}\n',
    b'{"released": true}\n',
)


class _BadMessageError(LockError):
    """A message that is not of this protocol."""


class _Connection:
    """An owner of locks."""

    def __init__(self, connection: socket.socket, epoll: select.epoll) -> None:
        connection.setblocking(False)
        self.socket = connection
        self._epoll = epoll
        self._epoll.register(connection, select.EPOLLIN)
        self.pid = peer_process(connection)
        self.purpose = ""
        self.waits: LockClaim | None = None
        self._heard = b""
        self._unsent = b""

    def messages(self) -> list[Any]:
        """The messages that have come.

        :raises EOFError: if the client is gone.
        """
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return []
        if not data:
            raise EOFError
        *lines, self._heard = (self._heard + data).split(b"\n")
        if len(self._heard) > LONGEST_LINE:
            raise _BadMessageError("a message is too long")
        try:
            return [_DECODER.decode(line.decode()) for line in lines]
        except (ValueError, RecursionError):
            raise _BadMessageError("a message is no JSON") from None

    def send(self, **message: Any) -> None:
        """Send a message, or as much of it as the client takes now.

        :raises EOFError: if the client is gone, or does not read.
        """
        self.send_line(json.dumps(message).encode() + b"\n")

    def send_line(self, line: bytes) -> None:
        """Send a message that is JSON already."""
        if self._unsent:
            self._unsent += line
        else:
            self._unsent = line
            self.flush()
            if self._unsent:
                self._epoll.modify(self.socket, select.EPOLLIN | select.EPOLLOUT)
        if len(self._unsent) > _MOST_UNSENT:
            raise EOFError

    def flush(self) -> None:
        """Send what the client has not taken yet.

        :raises EOFError: if the client is gone.
        """
        try:
            self._unsent = self._unsent[self.socket.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError:
            raise EOFError from None

    def has_room(self) -> None:
        """Go on where the client had taken no more."""
        self.flush()
        if not self._unsent:
            self._epoll.modify(self.socket, select.EPOLLIN)


class LockServer:
    """Serves a table of locks to the clients of a listening socket."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._epoll = select.epoll()
        self._epoll.register(listener, select.EPOLLIN)
        self._table = LockTable()
        self._connections: dict[int, _Connection] = {}

    def serve(self, *, idle_s: float) -> None:
        """Serve until there has been no client for so many seconds."""
        while True:
            end = self._table.next_end()
            wait_s = max(0.0, end - time.monotonic()) if end is not None else None
            if not self._connections:
                wait_s = idle_s
            ready = self._epoll.poll(wait_s)
            if not ready and not self._connections:
                return
            self._table.advance(time.monotonic())
            for descriptor, events in ready:
                if client := self._connections.get(descriptor):
                    self._serve(client, events)
                elif descriptor == self._listener.fileno():
                    self._accept()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it is gone already; or there is no descriptor for it
            time.sleep(_FULL_S)
            return
        self._connections[connection.fileno()] = _Connection(connection, self._epoll)

    def _serve(self, client: _Connection, events: int) -> None:
        try:
            if events & select.EPOLLOUT:
                client.has_room()
            for message in client.messages():
                try:
                    self._obey(client, message)
                except _BadMessageError:
                    raise
                except LockError as error:
                    client.send(error=str(error), hint=error.hint)
        except _BadMessageError as error:
            with contextlib.suppress(EOFError):
                client.send(error=str(error), hint=error.hint)
            self._drop(client)
        except (EOFError, OSError):
            self._drop(client)

    def _drop(self, client: _Connection) -> None:
        self._connections.pop(client.socket.fileno(), None)
        client.socket.close()
        client.waits = None
        self._table.release(client, now=time.monotonic())

    def _obey(self, client: _Connection, message: Any) -> None:
        match message:
            case {"claim": list(names)}:
                self._claim(client, names, message)
            case {"release": True}:
                client.waits = None
                self._table.release(client, now=time.monotonic())
                client.send_line(_RELEASED)
            case {"list": True}:
                client.send(locks=self._rows())
            case _:
                raise _BadMessageError("a message has no meaning")

    def _claim(self, client: _Connection, names: list[Any], message: dict[str, Any]) -> None:
        if client.waits:
            raise _BadMessageError("a client waits for one claim at a time")
        client.purpose = printable(str(message.get("purpose", "")))[:_LONGEST_PURPOSE]
        timeout, priority = message.get("timeout_s"), message.get("priority", 0)
        if not isinstance(priority, int):
            raise _BadMessageError("a claim's priority is a whole number")
        if timeout is None:
            pass
        elif not isinstance(timeout, int | float):
            raise _BadMessageError("a claim's timeout_s is a number")
        elif not 0 <= timeout <= _LONGEST_TIMEOUT_S:
            raise _BadMessageError(f"a claim's timeout_s is 0 to {_LONGEST_TIMEOUT_S:g}")
        claim = self._table.claim(
            client,
            [LockName.parse(str(name)) for name in names],
            now=time.monotonic(),
            shared=message.get("shared") is True,
            timeout=timeout,
            priority=priority,
            settled=partial(self._settled, client),
        )
        if claim.state is ClaimState.GRANTED:
            client.send_line(_GRANTED)
        else:
            client.waits = claim
            self._tell_wait(client, claim)

    def _settled(self, client: _Connection) -> None:
        """Tell a client that waited; the answer of a claim tells of what came at once."""
        claim, client.waits = client.waits, None
        if claim:
            is_granted = claim.state is ClaimState.GRANTED
            with contextlib.suppress(EOFError):  # epoll(7) tells of that
                client.send_line(_GRANTED if is_granted else _TIMED_OUT)

    def _tell_wait(self, client: _Connection, claim: LockClaim) -> None:
        if name := claim.lock_waited_for():
            holders = [_row(one) for one in self._table.holders(name)]
            client.send(waits_for=str(name), holders=holders)

    def _rows(self) -> list[dict[str, Any]]:
        return [_row(claim) for claim in self._table.claims()]


def _row(claim: LockClaim) -> dict[str, Any]:
    """A claim, for people and programs."""
    client = claim.owner
    assert isinstance(client, _Connection)
    waits_for = claim.lock_waited_for()
    return {
        "pid": client.pid,
        "purpose": client.purpose,
        "shared": claim.is_shared,
        "locks": [str(name) for name in claim.names],
        "holds": [str(name) for name in claim.held],
        "waits_for": str(waits_for) if waits_for else None,
        "seconds": round(time.monotonic() - claim.since, 1),
    }


def main() -> None:
    """Serve until there has been no client for a minute."""
    with socket.socket(fileno=_LISTENER) as listener:
        LockServer(listener).serve(idle_s=_IDLE_S)


if __name__ == "__main__":
    main()
