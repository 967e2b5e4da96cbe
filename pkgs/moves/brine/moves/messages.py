"""Journal messages about moves and the question at boot; brine-moves.catalog explains each."""

from __future__ import annotations

from brine.common.message import NOTICE, WARNING, Message

HELD_BACK = Message(
    "d3b458db762e4045b2cb5deb568834c1", "held-back", WARNING, "is held back: {reason}"
)
RELEASED = Message(
    "df36b02cffb64faf82ebf332990fc975",
    "released",
    NOTICE,
    "is this node's still, as the cluster says, and may start",
)

MOVE_BEGUN = Message(
    "8d1c3f0b5a9e4c7fb1f2a64d7c50e913",
    "move-begun",
    NOTICE,
    "is being moved to {node} ({how})",
)
MOVED_AWAY = Message(
    "5e0f4b7d2c6a4913a8d95b1e73f6c0a2",
    "moved-away",
    NOTICE,
    "has moved to {node}, by the claim with serial {serial}",
)
MOVE_FAILED = Message(
    "c49a6e1f8b3d45d09e7752ab3d10f864",
    "move-failed",
    WARNING,
    "is not moved to {node}: {reason}",
)
MOVE_AWAITED = Message(
    "1d7be2c05e6b4b6f9c0fd0f3a0c8b5e4",
    "move-awaited",
    NOTICE,
    "is being moved to this node from {node} ({how})",
)
MOVED_HERE = Message(
    "7a3f52d1c9e84a0db6e1f04c2b98d753",
    "moved-here",
    NOTICE,
    "has moved to this node from {node}, by the claim with serial {serial}",
)
MOVE_DROPPED = Message(
    "e2860b94f71d4c3a8b5ad96cf31e7024",
    "move-dropped",
    NOTICE,
    "does not move to this node: what was made for that is removed, and it is {node}'s still",
)
