"""Claims: the one node that may run an instance, with the serial of the configuration that says so.

The serial is that of the instance's object in the cluster's configuration, and rises with each of
its changes. So of two claims the one with the higher serial counts, whichever was heard of first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Claim(NamedTuple):
    """The node that may run an instance.

    :param node: its name; empty is any node that has the instance's spec.
    :param serial: 0 is a claim that no configuration has made.
    """

    node: str = ""
    serial: int = 0

    def fault(self, seen: Claim, is_here: Callable[[str], bool]) -> str | None:
        """Why a node may not run an instance by this claim, in words that follow the name of the
        instance; None if it may.

        :param seen: another claim of the same instance that the node knows.
        :param is_here: whether a node's name is this node's.
        """
        if self.node and not is_here(self.node):
            return self._in_words()
        if self.serial > seen.serial or not seen.serial:
            return None
        if self.serial in (0, seen.serial):
            return None if is_here(seen.node) else seen._in_words()
        text = f"serial {self.serial} of the configuration is old:"
        return f"{text} by serial {seen.serial} it is {seen.node}'s"

    def _in_words(self) -> str:
        by = f" by serial {self.serial} of the configuration" if self.serial else ""
        return f"is {self.node}'s{by}"


UNCLAIMED = Claim()
"""Of an instance that only its spec ties to a node."""
