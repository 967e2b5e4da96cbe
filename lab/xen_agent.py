"""What runs commands in a Xen node, for `xen_client.py`; it is put there and started by systemd.

One connection is one command. A line of JSON asks: `token`, `args`, and the length of `stdin`,
whose bytes follow. A line of JSON answers: `status`, and the lengths of `stdout` and `stderr`,
whose bytes follow. Who hangs up before that ends the command.

It is not sshd, because a fork takes so long where Xen itself is emulated: sshd forks and executes
several times for one command, and takes seconds. Python starts processes by vfork(2).
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Any

PORT = 22


def main(token_file: str) -> None:
    """Serve for ever whoever knows what is in `token_file`."""
    token = Path(token_file).read_text().strip()
    server = socket.create_server(("", PORT), backlog=64)
    while True:
        connection, _ = server.accept()
        threading.Thread(target=_serve, args=(connection, token), daemon=True).start()


def _serve(connection: socket.socket, token: str) -> None:
    # Output goes through files, as in `lab.command`: what a command leaves behind may hold them.
    with (
        connection,
        connection.makefile("rb") as lines,
        tempfile.TemporaryFile(dir="/run") as given,
        tempfile.TemporaryFile(dir="/run") as out,
        tempfile.TemporaryFile(dir="/run") as err,
    ):
        request: dict[str, Any] = json.loads(lines.readline())
        if request["token"] != token:
            return
        given.write(lines.read(request["stdin"]))
        given.seek(0)
        status = _run(request["args"], given, out, err, connection)
        out.seek(0)
        err.seek(0)
        stdout, stderr = out.read(), err.read()
        reply = {"status": status, "stdout": len(stdout), "stderr": len(stderr)}
        connection.sendall(json.dumps(reply).encode() + b"\n" + stdout + stderr)


def _run(
    args: list[str], given: IO[bytes], out: IO[bytes], err: IO[bytes], connection: socket.socket
) -> int:
    """Run a command to its end, or to that of the connection; return its status as a shell does."""
    try:
        process = subprocess.Popen(
            args, stdin=given, stdout=out, stderr=err, cwd="/", start_new_session=True
        )
    except OSError as error:
        err.write(f"{args[0]}: {error.strerror}\n".encode())
        return 127
    ended = os.pidfd_open(process.pid)
    try:
        # Nothing more is to come from the other side: it is readable when that has hung up.
        other_side = connection.fileno()
        readable, _, _ = select.select([ended, other_side], [], [])
    finally:
        os.close(ended)
    if other_side in readable:
        os.killpg(process.pid, signal.SIGKILL)
    status = process.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    main(sys.argv[1])
