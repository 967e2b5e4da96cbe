"""How the instances of the demo end, and what should be said of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ending:
    """One instance's end: the action that caused it, and the right report of it.

    `status` is that which it then comes to, and `why` is in the sentence beside that.
    """

    instance: str
    done: str
    verdict: str
    cause: str
    status: str
    why: str = ""


OFF_BY_USER = Ending(
    "web1",
    "its user powers it off",
    "user",
    "guest-shutdown",
    "USER_down",
    "it was shut down by its user",
)
OFF_IN_PILLAR = Ending("web2", "admin_state: down in pillar", "admin", "stopping", "ADMIN_down")
KILLED = Ending("db1", "SIGKILL to its QEMU", "crash", "eof", "running")
PANICKED = Ending("mail1", "its kernel panics", "crash", "guest-panic", "running")
ENDINGS = [OFF_BY_USER, OFF_IN_PILLAR, KILLED, PANICKED]
