"""The verbs of moves."""

from __future__ import annotations

from typing import Any

from brine.common.cli import add_verb, seconds
from brine.vm.arguments import instance_name


def add_node_verbs(verbs: Any) -> None:
    """Add verbs to ``brine node``."""
    text = "ask the master candidates which instances belong to this node"
    ask = add_verb(verbs, "ask", "brine.moves.asking:ask", text)
    ask.add_argument("--json", action="store_true", help="print JSON, for programs")
    text = "hold all instances back until the answer, if none has been asked for since the boot"
    ask.add_argument("--boot", action="store_true", help=text)


def add_move_verbs(verbs: Any) -> None:
    """Add the verbs of a node to ``brine move``."""
    commands, offers = "brine.moves.step_commands", "brine.moves.offer_commands"
    text = "do a step of a move that the master asks for, or go on with it: JSON on standard input"
    step = add_verb(verbs, "step", f"{commands}:step", text)
    text = "wait for the end of the step, at most so long (default: do not wait)"
    step.add_argument("--wait", type=seconds, default=0.0, metavar="SECONDS", help=text)
    text = "show what another node needs to take an instance, or why it can't move"
    offer = add_verb(verbs, "offer", f"{offers}:offer", text)
    offer.add_argument("name", metavar="INSTANCE", type=instance_name)
    text = "as for a cold move, for which the guest is stopped"
    offer.add_argument("--cold", action="store_true", help=text)
    text = "show what keeps an instance from this node: its offer is read from standard input"
    check = add_verb(verbs, "check", f"{offers}:check", text)
    text = "list the moves that are pending on this node"
    listing = add_verb(verbs, "list", f"{commands}:list_moves", text)
    text = "show how many moves have ended on this node, and for how long guests stood still"
    status = add_verb(verbs, "status", f"{commands}:show_counts", text)
    text = "go on with the moves that a crash of this node interrupted"
    resume = add_verb(verbs, "resume", f"{commands}:resume", text)
    text = "have a move away from this node go back, if no master asks for that any more"
    cancel = add_verb(verbs, "cancel", f"{commands}:cancel", text)
    text = "remove what was made here for a move that has ended on its source"
    drop = add_verb(verbs, "drop", f"{commands}:drop", text)
    text = "that node's brine move list does not have this move any more"
    drop.add_argument("--source-ended", action="store_true", help=text)
    for each in (cancel, drop):
        each.add_argument("name", metavar="INSTANCE", type=instance_name)
    for each in (step, offer, check, listing, status, resume, cancel, drop):
        each.add_argument("--json", action="store_true", help="print JSON, for programs")
