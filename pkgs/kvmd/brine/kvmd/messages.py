"""The kinds of log records that concern an instance; brine-kvmd.catalog explains each."""

import logging

from brine.common.message import KVMD_USER, NOTICE, EventKind, Message
from brine.kvmd.verdict import Who

VERDICTS = {
    Who.USER: Message("85781849e6c14c639f5b388127e67445", "verdict", NOTICE),
    Who.ADMIN: Message("4b63e0ae6d4e4f09b1396edd886c1f9f", "verdict", NOTICE),
    Who.CRASH: Message("49a7db2f370c472b8412db70591c718f", "verdict", logging.WARNING),
}
WATCHING = Message("cb23dbcbe10547679480c9e7c73d7d5c", "watching", logging.INFO)
STOPPING = Message("4f5b7b9386564756aa1f56c280ba8d29", "stopping", NOTICE)
HALTED = Message("8cd4ba1734cc4c1bb42820a3fa568d07", "halted", logging.WARNING)
RESTS = Message("fc2551b77a7c4f39bc8cb064edd83579", "halted", NOTICE)
GOES_ON = Message("e9274f923d404441b21cb87181706f07", "goes-on", NOTICE)
RUNS_AGAIN = Message("12c229543984403bb49e8c4665c6fcc9", "runs-again", NOTICE)
REPLACED = Message("42b82d1d9608482984bacf1f86d340f9", "replaced", logging.WARNING)
NOBODY_LISTENS = Message("0e0f17f029364cb3870eab9633e0708d", "nobody-listens", logging.INFO)
NO_GREETING = Message("2ffa1de397954127948dc10f02fb87f6", "no-greeting", logging.WARNING)
FORBIDDEN = Message("44ffbaf00b084b388c416125fc93d45e", "forbidden", logging.WARNING)
NOT_A_SOCKET = Message("a6253cdde61e4279841c961e9ff696d0", "not-a-socket", logging.WARNING)
BROKEN_PEER = Message("cad10279b30846aaa4123fdd6ec59ec4", "broken-peer", logging.WARNING)
NOT_WRITTEN = Message("ddfd395313624dedbb27bf91ca2f13d3", "not-written", logging.ERROR)
WRITTEN_LATE = Message("30fd4c96eb8c44b1b9e6b60c73bf68c4", "written-late", NOTICE)
NOT_KEPT = Message("0cd94cfb157a4592a79019352fdf3c54", "not-kept", logging.WARNING)

EVENTS = (
    EventKind(VERDICTS[Who.CRASH], "crash", KVMD_USER),
    EventKind(HALTED, "halted", KVMD_USER),
)
"""What operators' programs are told of."""
