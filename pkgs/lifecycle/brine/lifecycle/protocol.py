"""The requests of the handler to the executor, which does what needs root.

The executor listens at a socket that only the handler may use. Each packet is a request,
``NAME end CAUSE`` or ``NAME start``; the answer is a packet ``NAME VERB RESULT TEXT``.
"""

from __future__ import annotations

from enum import StrEnum

from brine.common import paths

SOCKET = paths.LIFECYCLE_DIR.parent / "lifecycle-executor"
LONGEST_PACKET = 4096


class Verb(StrEnum):
    """A request."""

    END = "end"
    START = "start"


class Outcome(StrEnum):
    """An answer. ``IDLE``: there was nothing to do."""

    DONE = "done"
    IDLE = "idle"
    FAILED = "failed"


class EndReason(StrEnum):
    """Why an instance is ended: the cause of its verdict."""

    REQUEST = "owner-request"
    GONE = "owner-gone"
    SPEC_GONE = "spec-gone"
