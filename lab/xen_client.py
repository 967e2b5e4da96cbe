"""Running a command in a Xen node, by its agent: `python3 xen_client.py ADDRESS-FILE COMMAND..`.

It needs nothing but the standard library, so that it starts quickly. See `xen_agent.py`.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TROUBLE = "xen_client:"
"""How standard error begins when there was no answer."""


@dataclass(frozen=True)
class Reply:
    """The result of a command; `status` is as a shell has it."""

    status: int
    stdout: bytes
    stderr: bytes


@dataclass(frozen=True)
class Address:
    """Where an agent listens, on this host's loopback, and the token that it believes."""

    port: int
    token: str

    def save(self, file: Path) -> None:
        """Write it to a file that only its owner reads."""
        text = json.dumps({"port": self.port, "token": self.token})
        file.touch(mode=0o600)
        file.write_text(text)

    @classmethod
    def load(cls, file: Path) -> Address:
        return cls(**json.loads(file.read_text()))


def call(
    address: Address, args: Sequence[str], stdin: bytes = b"", *, timeout_s: float | None = None
) -> Reply:
    """Run a command in the node to its end.

    Raises ConnectionError when the agent does not answer or the node ends, and TimeoutError.
    """
    where = ("127.0.0.1", address.port)
    with socket.create_connection(where, timeout_s) as connection, connection.makefile("rb") as s:
        request = {"token": address.token, "args": list(args), "stdin": len(stdin)}
        connection.sendall(json.dumps(request).encode() + b"\n" + stdin)
        line = s.readline()
        # QEMU takes connections before the agent listens, and hangs up then.
        if not line:
            raise ConnectionResetError("the Xen node's agent has hung up")
        reply = json.loads(line)
        stdout, stderr = s.read(reply["stdout"]), s.read(reply["stderr"])
    return Reply(reply["status"], stdout, stderr)


def main(address_file: str, *args: str) -> int:
    """Run a command with this process's standard input and output."""
    try:
        reply = call(Address.load(Path(address_file)), args, sys.stdin.buffer.read())
    except ConnectionError as error:
        print(f"{TROUBLE} {error}", file=sys.stderr)
        return 255
    sys.stdout.buffer.write(reply.stdout)
    sys.stderr.buffer.write(reply.stderr)
    return reply.status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
