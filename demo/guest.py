"""The guest of an instance, as its user has it: at the other end of the serial line."""

from __future__ import annotations

from lab.node import Node
from lab.qmp import Qmp
from lab.waiting import wait_for
from node.instance_on_node import answer, order, run_in_guest, wait_ready

_START_TIMEOUT_S = 300.0


class Guest:
    """A guest that obeys orders, once it is ready; see guest-init.sh. LabError if it does not."""

    def __init__(self, node: Node, name: str) -> None:
        self.name = name
        self._node = node

    def wait_ready(self) -> None:
        """Wait until it runs and obeys."""
        serial = self._node.path(f"/run/brine/ctrl/{self.name}.serial")
        wait_for(f"{self.name} to run", serial.exists, timeout_s=_START_TIMEOUT_S)
        wait_ready(self._node, self.name)

    def run(self, command: str) -> str:
        """Run a shell command in it, and return what that wrote."""
        return run_in_guest(self._node, self.name, command)

    def power_off(self) -> None:
        """Shut it down from inside, as its user does."""
        order(self._node, self.name, "poweroff")

    def panic(self) -> None:
        """Have its kernel panic."""
        order(self._node, self.name, "crash")

    def reboot(self) -> None:
        """Reboot it from inside, and return when it begins to boot."""
        with Qmp(self._node.path(f"/run/brine/ctrl/{self.name}.qmp"), timeout_s=60) as qmp:
            is_obeyed = b"guest: obeys reboot\n"
            answer(self._node, self.name, "reboot", lambda heard: is_obeyed in heard)
            qmp.wait_event("RESET")
