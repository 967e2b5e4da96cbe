"""The verbs of moves."""

from __future__ import annotations

from typing import Any

from brine.common.cli import add_verb


def add_node_verbs(verbs: Any) -> None:
    """Add verbs to ``brine node``."""
    text = "ask the master candidates whose the instances of this node are"
    ask = add_verb(verbs, "ask", "brine.moves.asking:ask", text)
    ask.add_argument("--json", action="store_true", help="print JSON, for programs")
    text = "hold all instances back until the answer, if none has been asked for since the boot"
    ask.add_argument("--boot", action="store_true", help=text)
