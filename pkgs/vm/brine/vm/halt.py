"""How a QEMU stands still without its administrator's doing: what brine-kvmd notes of it in the
marker ``halted``, and what commands say of it.

Source: RunState in QEMU's ``qapi/run-state.json``, and BLOCK_IO_ERROR in ``qapi/block-core.json``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from brine.common.errors import printable
from brine.vm.markers import Marker

GOING_STATES = frozenset(
    {
        "running",
        "colo",
        # A state of a moment, or of a machine that its command line has not begun yet.
        *("inmigrate", "preconfig", "prelaunch", "restore-vm", "save-vm", "finish-migrate"),
    }
)
"""The RunStates in which QEMU does what it was told."""

PAUSED = "paused"
SUSPENDED = "suspended"
IO_ERROR = "io-error"

_LONGEST = 80  # of what QEMU says, in characters
_HARMLESS = frozenset({PAUSED, SUSPENDED})
_WHYS = {
    PAUSED: "another program has paused it",
    SUSPENDED: "its guest has suspended itself",
    "shutdown": "its guest has shut down, and QEMU stays (shutdown)",
    "postmigrate": "its guest was moved to another QEMU (postmigrate)",
}


class Halt(NamedTuple):
    """A QEMU that stands still: in which RunState, and why, in QEMU's words.

    :param device: the block node that had the error.
    :param no_space: whether its storage was full.
    :param since: when that was noted, in seconds since 1970; 0 if it is not known.
    """

    state: str
    reason: str = ""
    device: str = ""
    no_space: bool = False
    since: float = 0.0

    @classmethod
    def of(cls, marker: Marker | None) -> Halt | None:
        """What a marker says; None without one, or if it says nothing of the kind."""
        facts = marker.facts if marker else {}
        state = facts.get("state")
        if marker is None or not isinstance(state, str) or not state:
            return None
        reason, device = (printable_excerpt(facts.get(key)) for key in ("reason", "device"))
        no_space = facts.get("no_space") is True
        return cls(printable_excerpt(state), reason, device, no_space, marker.made_at)

    def facts(self) -> dict[str, Any]:
        """What a marker says of it."""
        found = {"state": self.state, "reason": self.reason, "device": self.device}
        return {key: value for key, value in found.items() if value} | (
            {"no_space": True} if self.no_space else {}
        )

    @property
    def is_fault(self) -> bool:
        """Whether an administrator should look: no guest and no program has wanted it."""
        return self.state not in _HARMLESS

    def why(self, place: str = "") -> str:
        """It in words.

        :param place: where the error was, if the caller knows better than QEMU.
        """
        text = _WHYS.get(self.state, f"QEMU has stopped it: {self.state}")
        place = place or self.device
        details = [self.reason, f"at {place}" if place else ""]
        return ", ".join([text, *filter(None, details)])


def printable_excerpt(text: Any) -> str:
    """What QEMU says, fit for one line; empty if it is no text. An excerpt of it is the same."""
    return printable(text[:_LONGEST])[:_LONGEST] if isinstance(text, str) else ""
