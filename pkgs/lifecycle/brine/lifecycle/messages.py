"""The handler's log messages; brine-lifecycle.catalog explains each."""

from __future__ import annotations

import logging
import time

from brine.common.journal import tell
from brine.common.message import ERROR, INFO, NOTICE, WARNING, Message
from brine.lifecycle.owner_watch import OwnerWatch

OWNER_THERE = Message("5d0c4d0a3fd84c0ab4b21d0f6d3a7c11", "owner-there", INFO, "its owner is there")
OWNER_GONE = Message(
    "b6d5f2a0c1f54d64a8b7a7d2f0f9e4c2", "owner-gone", WARNING, "its owner is gone: {reason}"
)
OWNER_REQUEST = Message(
    "0e9c7f7d5d6a4b7f8d3f7b1f52c6a9d3", "owner-request", NOTICE, "its owner has asked for its end"
)
SPEC_GONE = Message(
    "f1a6c8f3e49b4d0c9c5b4c8e6b7d2a34",
    "spec-gone",
    WARNING,
    "it has an owner, and no spec any more",
)
CONFIRMED = Message(
    "9f2b64a5c7de4c1a8e0d3b5f7a916c45",
    "request-confirmed",
    NOTICE,
    "has ended, and its owner may, too",
)
DROPPED = Message(
    "bd24c962a12342b8a93f5f68d662f9ed",
    "request-dropped",
    NOTICE,
    "its owner has asked for the end of another run, which is over: nothing is done",
)
NOT_ENDED = Message(
    "2c8f5e7b9a0d4f3c8b6a1d4e5f7092b6",
    "not-ended",
    ERROR,
    "it was not ended, trying again: {reason}",
)
OWNER_BACK = Message(
    "7b1d9c3e5f2a4b6c8d0e1f3a5b7c9d67", "owner-back", NOTICE, "has started, as its owner is back"
)
FAULT = Message("c4e6a8b0d2f44e1c9a3b5d7f90a1c2e8", "owner-fault", WARNING, "{reason}")

log = logging.getLogger(__name__)


def tell_instance(message: Message, name: str, reason: str | None = None) -> None:
    """Log a message about an instance."""
    fields = {} if reason is None else {"BRINE_REASON": reason}
    tell(log, message, message.text.format(reason=reason), instance=name, **fields)


def tell_fault(owned: OwnerWatch, reason: str) -> None:
    """Tell the fault of an owner's files, which may be read each second."""
    if owned.is_to_tell(reason, time.monotonic()):
        tell_instance(FAULT, owned.name, reason)
