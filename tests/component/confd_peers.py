"""UDP peers that a test plays confd on by hand, to do what no daemon would do on demand."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from brine.confd.protocol import ConfdReply, HmacKey, RefusedError, encode_reply, open_signed, seal
from component.udp_ports import free_port

SECRET = b"the cluster's key\n"

Script = Callable[["Heard"], Iterable[bytes]]
"""From what a peer heard to the datagrams that it sends back."""


class Heard:
    """One authentic request that came to a peer.

    :param secret: the peer's key.
    :raises RefusedError: if another key signed it.
    """

    def __init__(self, datagram: bytes, secret: bytes) -> None:
        message, time, _ = open_signed(datagram, (HmacKey(secret),))
        self.secret = secret
        self.time_s = int(time)
        self.content: dict[str, Any] = json.loads(message)

    def reply(
        self,
        answer: Any,
        serial: int = 0,
        *,
        status: int = 0,
        salt: str | None = None,
        secret: bytes | None = None,
    ) -> bytes:
        """An honest reply, but for what is given."""
        text = encode_reply(ConfdReply(status, answer, serial))
        salt = self.content["rsalt"] if salt is None else salt
        return seal(text, salt, HmacKey(secret or self.secret))


class ScriptedPeer:
    """A socket and what it does with each request. Its ``address`` is as a client takes it.

    :param replies_from: another address that it sends from, as a node with several may.
    """

    def __init__(
        self, script: Script, address: str, secret: bytes, replies_from: str | None
    ) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_DGRAM)
        self.socket.bind((address, 0))
        host, port = self.socket.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._sender = self.socket
        if replies_from:
            self._sender = socket.socket(family, socket.SOCK_DGRAM)
            self._sender.bind((replies_from, 0))
        self.heard: list[Heard] = []
        self._script = script
        self._secret = secret
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            datagram, sender = self.socket.recvfrom(65536)
            if not datagram:
                return
            try:
                heard = Heard(datagram, self._secret)
            except RefusedError:
                continue
            self.heard.append(heard)
            for answer in self._script(heard):
                self._sender.sendto(answer, sender)

    def end(self) -> None:
        family = self.socket.family
        with socket.socket(family, socket.SOCK_DGRAM) as waker:
            waker.sendto(b"", self.socket.getsockname())
        self._thread.join()
        self.socket.close()
        self._sender.close()


@contextmanager
def peers(
    *scripts: Script,
    address: str = "127.0.0.1",
    secret: bytes = SECRET,
    replies_from: str | None = None,
) -> Iterator[list[ScriptedPeer]]:
    """A peer for each script."""
    running: list[ScriptedPeer] = []
    try:
        for script in scripts:
            running.append(ScriptedPeer(script, address, secret, replies_from))
        yield running
    finally:
        for peer in running:
            peer.end()


def says(answer: Any, serial: int = 42, *, status: int = 0) -> Script:
    """An honest peer with one answer."""
    return lambda heard: [heard.reply(answer, serial, status=status)]


def silent(_heard: Heard) -> Iterable[bytes]:
    """A peer that is there, and does not answer."""
    return []


def once(script: Script) -> Script:
    """A peer that plays *script* to the first request only: a client that was slow asks again."""
    played = threading.Event()

    def play(heard: Heard) -> Iterable[bytes]:
        if played.is_set():
            return []
        played.set()
        return script(heard)

    return play


def closed_port() -> str:
    """An address on which nothing listens."""
    return f"127.0.0.1:{free_port()}"
