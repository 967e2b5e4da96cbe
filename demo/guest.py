"""The guest of an instance, as its user has it: at the other end of the serial line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from typing import TypeVar

from lab.errors import LabError
from lab.guest import result_in, run_order
from lab.node import Node
from lab.qmp import Qmp
from node.instance_on_node import order, serial_line, wait_ready

T = TypeVar("T")

CONTROL_DIR = "/run/brine/ctrl"
_COMMAND_TIMEOUT_S = 60.0
_ASKED_AGAIN_S = 5.0
_MARKS = count()


class Guest:
    """A guest that obeys orders, once it is ready; see guest-init.sh."""

    def __init__(self, node: Node, name: str) -> None:
        self.name = name
        self._node = node

    def wait_ready(self) -> None:
        """Wait until it obeys. Raises LabError when it ends or takes too long."""
        with self._reached():
            wait_ready(self._node, self.name)

    def run(self, command: str) -> str:
        """Run a shell command in it, and return what that wrote.

        Raises LabError when the command fails, and when the guest ends or is silent for too long.
        """
        mark = f"demo-{next(_MARKS)}"
        result = self._answer(run_order(mark, command), partial(result_in, mark=mark))
        status, text = result
        if status != 0:
            raise LabError(f"guest {self.name}: {command}: failed with {status}\n{text}")
        return text

    def power_off(self) -> None:
        """Shut it down from inside, as its user does."""
        with self._reached():
            order(self._node, self.name, "poweroff")

    def panic(self) -> None:
        """Have its kernel panic."""
        with self._reached():
            order(self._node, self.name, "crash")

    def reboot(self) -> None:
        """Reboot it from inside, and return when it begins to boot."""
        socket = self._node.path(f"{CONTROL_DIR}/{self.name}.qmp")
        with Qmp(socket, timeout_s=_COMMAND_TIMEOUT_S) as qmp:
            self._answer("reboot", lambda heard: b"guest: obeys reboot\n" in heard)
            qmp.wait_event("RESET")

    def _answer(self, order: str, answer_in: Callable[[bytes], T | None]) -> T:
        """What it answers to an order, which it is given until it does."""
        heard = b""
        deadline = time.monotonic() + _COMMAND_TIMEOUT_S
        with self._reached(), serial_line(self._node, self.name) as line:
            line.settimeout(_ASKED_AGAIN_S)
            while time.monotonic() < deadline:
                # Who had the line before may have left half an order on it.
                line.sendall(f"\n{order}\n".encode())
                with suppress(TimeoutError):
                    while not (answer := answer_in(heard.replace(b"\r\n", b"\n"))):
                        said = line.recv(4096)
                        if not said:
                            raise LabError(f"guest {self.name} has ended; it said {heard!r}")
                        heard += said
                    return answer
        raise LabError(f"guest {self.name}: {order}: no answer, but {heard!r}")

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Raise LabError where its serial line is not there, or takes nothing more."""
        try:
            yield
        except OSError as error:
            raise LabError(f"guest {self.name}: its serial line fails: {error}") from error
