"""Journal messages about the question at boot; brine-moves.catalog explains each."""

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
