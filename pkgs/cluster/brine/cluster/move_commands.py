"""``brine move begin``, ``next`` and ``answer``: the master's side of a move, for programs.

What carries the questions to nodes and the answers back is Salt, by its runner ``brine``.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from brine.cluster.move_operation import (
    MoveStatus,
    abort_move,
    answer_step,
    begin_move,
    move_status,
)
from brine.cluster.moves import Wishes
from brine.common import paths
from brine.common.errors import UsageError
from brine.common.operation import StepAnswer
from brine.common.schema import SchemaError, parse
from brine.config.privileges import fault_of_offer
from brine.config.schema import read_input
from brine.config.store import ConfigStore

_LONGEST_ANSWER = 16 * 1024 * 1024  # in bytes
_OFFER_HINT = "brine move offer INSTANCE --json makes an offer"
_ANSWER_HINT = "the answer of brine move step"


def begin(arguments: argparse.Namespace) -> int:
    """``brine move begin``."""
    wishes = parse_wishes(arguments.wishes)
    identity = begin_move(
        arguments.name,
        arguments.to,
        cold=arguments.cold,
        wishes=asdict(wishes),
        keeps_home=arguments.keeps_home,
    )
    print(json.dumps({"id": identity}))
    return 0


def parse_wishes(text: str) -> Wishes:
    """:raises UsageError: if the text is no JSON of wishes."""
    try:
        return parse(Wishes, json.loads(text), noun="wish")
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--wishes: is no JSON: {error}") from None
    except SchemaError as error:
        raise UsageError(f"--wishes: {error}", hint=error.hint) from None


def tell_next(arguments: argparse.Namespace) -> int:
    """``brine move next``."""
    return _tell(move_status(arguments.id))


def answer(_: argparse.Namespace) -> int:
    """``brine move answer``: the node's answer is on standard input."""
    data = read_input("-", _ANSWER_HINT, most=_LONGEST_ANSWER)
    return _tell(answer_step(StepAnswer.of(data)))


def compare(arguments: argparse.Namespace) -> int:
    """``brine move compare``: the node's offer is on standard input."""
    offer = read_input("-", _OFFER_HINT, most=_LONGEST_ANSWER)
    configuration = ConfigStore(paths.CONFIG_FILE).read()
    fault = fault_of_offer(configuration, arguments.name, offer)
    print(json.dumps({"fault": fault}))
    return 0


def abort(arguments: argparse.Namespace) -> int:
    """``brine move abort``."""
    return _tell(abort_move(arguments.id, arguments.why))


def _tell(status: MoveStatus) -> int:
    print(json.dumps(status.to_json()))
    return 0
