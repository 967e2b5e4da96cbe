"""The measuring process's side of the load generator."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from bench import machine
from bench.kvmd import orders
from bench.kvmd.daemons import Daemon


class Load:
    """A generator process for one daemon's control directory."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def send(self, order: orders.Order) -> None:
        """Give an order without waiting for its end."""
        assert self._process.stdin is not None
        orders.write(self._process.stdin, order)

    def connected(self) -> orders.Connected:
        """Wait for the reply to Appear or Serve."""
        reply = self._receive()
        assert isinstance(reply, orders.Connected)
        return reply

    def verdicts(self) -> orders.Verdicts:
        """Wait for the reply to EndEach or EndTogether."""
        reply = self._receive()
        assert isinstance(reply, orders.Verdicts)
        return reply

    def _receive(self) -> orders.Order | orders.Reply:
        assert self._process.stdout is not None
        reply = orders.read(self._process.stdout)
        if reply is None:
            raise RuntimeError("the load generator ended early")
        return reply


@contextlib.contextmanager
def generating(daemon: Daemon, core: int) -> Iterator[Load]:
    """Start a generator on its core, for an empty control directory; it ends with the block."""
    daemon.control_dir.mkdir(parents=True, exist_ok=True)
    with machine.placed(core):
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.kvmd.generator", str(daemon.control_dir), daemon.suffix],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    try:
        yield Load(process)
    finally:
        process.kill()
        process.communicate()
        for file in daemon.control_dir.iterdir():
            file.unlink()
