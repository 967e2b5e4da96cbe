"""``brine move offer`` and ``brine move check``: what an instance would bring along, and
whether it could come to this node."""

from __future__ import annotations

import argparse
import sys

from brine.common.cli import print_json
from brine.common.errors import BrineError, UsageError
from brine.config.schema import parse_json
from brine.moves.offer import make_offer
from brine.moves.offered import ReceivedOffer

_LARGEST = 64 << 20


def offer(arguments: argparse.Namespace) -> int:
    """``brine move offer``."""
    print_json(make_offer(arguments.name, cold=arguments.cold))
    return 0


def check(arguments: argparse.Namespace) -> int:
    """``brine move check``: 0 whenever there is an answer."""
    try:
        received = ReceivedOffer(parse_json(sys.stdin.buffer.read(_LARGEST)))
    except BrineError as error:
        text = f"standard input: {error}"
        raise UsageError(text, hint="brine move offer INSTANCE --json makes an offer") from None
    found = received.obstacles()
    if arguments.json:
        print_json({"obstacles": [one.to_json() for one in found]})
    else:
        print("\n".join(one.why for one in found) or f"{received.name} can move to this node")
    return 0
