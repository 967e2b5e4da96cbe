"""Journal messages about programs that events start; brine-common.catalog explains each."""

from __future__ import annotations

from brine.common.message import WARNING, Message

PROGRAM_REFUSED = Message("6f1d9a40c2b84e7d9d1f0a5f4be2c731", "event-program-refused", WARNING)
PROGRAM_FAILED = Message("b07c3e52e7a14f0c8f9b6d2a1c54e8f3", "event-program-failed", WARNING)
EVENTS_LEFT_OUT = Message("2ac48f7be0d5436f9c3e1b78d6a90f14", "events-left-out", WARNING)
