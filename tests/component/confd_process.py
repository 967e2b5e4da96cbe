"""confd as a process of its own, from the source tree, under a stand-in for systemd."""

from __future__ import annotations

import itertools
import json
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from brine.confd.protocol import ConfdReply, HmacKey, pack_request, unpack_reply
from component.daemon_process import DaemonProcess
from component.udp_ports import free_port
from lab.service_manager import ServiceManager

SECRET = b"a secret of this test\n"
KEY = HmacKey(SECRET)
_SALTS = itertools.count()


class Client:
    """A socket that asks, and believes what is signed for it.

    :param host: where the daemon listens.
    """

    def __init__(
        self, host: str, port: int, key: HmacKey = KEY, *, timeout_s: float = 30.0
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.key = key
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.settimeout(timeout_s)
        self._socket.connect((host, port))

    def close(self) -> None:
        """Give the socket up."""
        self._socket.close()

    def send(self, datagram: bytes) -> None:
        """Send whatever it is."""
        self._socket.send(datagram)

    def receive(self) -> bytes:
        """The next datagram that comes."""
        return self._socket.recv(65536)

    def ask(self, request_type: int, query: Any = None) -> ConfdReply:
        """Ask, and wait for the answer; anything else that comes fails."""
        salt = f"salt {next(_SALTS)}"
        self.send(pack_request(request_type, query, salt, self.key, now_s=time.time()))
        reply, its_salt = unpack_reply(self.receive(), (self.key,))
        assert its_salt == salt
        return reply

    def expect_silence(self, *datagrams: bytes) -> None:
        """Send these, and see that the next answer is that to a ping after them.

        One socket's datagrams go to one worker, in order.
        """
        for datagram in datagrams:
            self.send(datagram)
        assert self.ask(0).status == 0


class Confd(DaemonProcess):
    """A running confd, its configuration and keys."""

    reloaded = "settings and keys reloaded"

    def __init__(self, folder: Path, manager: ServiceManager) -> None:
        super().__init__(folder, manager, module="brine.confd.main", part="confd")
        self.config = folder / "config.data"
        self.key_file = folder / "hmac.key"
        self.previous_key_file = folder / "hmac.key.previous"
        self.port = free_port()
        self._clients = ExitStack()

    def defaults(self) -> dict[str, object]:
        """Its own port, configuration and keys."""
        return {
            "bind": "127.0.0.1",
            "port": self.port,
            "config_file": self.config,
            "key_file": self.key_file,
            "previous_key_file": self.previous_key_file,
        }

    def write_config(self, configuration: dict[str, Any] | bytes) -> None:
        """Put a configuration, or what is none, in the place of the one that there is."""
        data = (
            configuration
            if isinstance(configuration, bytes)
            else json.dumps(configuration).encode()
        )
        new = self.config.with_name("new")
        new.write_bytes(data)
        new.rename(self.config)

    def write_key(self, path: Path, secret: bytes) -> None:
        """Put a key into a file, for its owner only."""
        path.touch(mode=0o600)
        path.write_bytes(secret)

    def client(
        self, host: str = "127.0.0.1", key: HmacKey = KEY, port: int | None = None
    ) -> Client:
        """A new client of this daemon."""
        client = Client(host, port or self.port, key)
        self._clients.callback(client.close)
        return client

    def ask(self, request_type: int, query: Any = None) -> ConfdReply:
        """Ask once, from a new port."""
        return self.client().ask(request_type, query)

    def workers(self) -> list[int]:
        """The process ids of its workers."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return [int(pid) for pid in children.split()]

    def close_clients(self) -> None:
        """Give up all clients' sockets."""
        self._clients.close()


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@contextmanager
def confd_process(
    configuration: dict[str, Any] | None = None, **settings: object
) -> Iterator[Confd]:
    """A confd that is configured but not started; whatever runs at the end is killed."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="confd-"))
        manager = stack.enter_context(ServiceManager(Path(folder)))
        confd = Confd(Path(folder), manager)
        confd.state.mkdir()
        confd.write_key(confd.key_file, SECRET)
        if configuration is not None:
            confd.write_config(configuration)
        confd.configure(**settings)
        try:
            yield confd
        finally:
            confd.close_clients()
            confd.kill_if_running()
