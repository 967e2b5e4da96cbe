"""Since when nobody has a tap open: what a look found, compared with the looks before.

The kernel does not tell, only how often a tap was opened and closed. So each look is kept for the
next, and a tap whose VM is just being restarted is not taken for one that was left behind.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from brine.hotplug.network import Link
from brine.hotplug.tap_records import Places

_FILE = "idle"  # beside the records, whose names end in .json


@dataclass(frozen=True)
class Idle:
    """A tap that nobody has open.

    :param index: of the interface.
    :param carrier_changes: of the interface; another number means that somebody had it open.
    :param since_s: when it was first found so, by the clock that begins with the boot.
    """

    index: int
    carrier_changes: int
    since_s: float

    def is_still(self, link: Link) -> bool:
        """Whether nobody has had it open meanwhile."""
        return (self.index, self.carrier_changes) == (link.index, link.carrier_changes)


def idle_times(places: Places, links: Iterable[Link], *, note: bool) -> dict[str, float]:
    """For how many seconds each of these taps is known to be idle.

    :param links: taps that nobody has open now.
    :param note: keep what was found for the next look.
    """
    before, now = _load(places), time.monotonic()
    found = {}
    for link in links:
        known = before.get(link.name)
        since_s = known.since_s if known and known.is_still(link) else now
        found[link.name] = Idle(link.index, link.carrier_changes, since_s)
    if note and found != before:
        _save(places, found)
    return {name: now - idle.since_s for name, idle in found.items()}


def _load(places: Places) -> dict[str, Idle]:
    try:
        data = json.loads((places.records / _FILE).read_bytes())
        return {name: Idle(**idle) for name, idle in data.items()}
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        return {}  # then all are idle as of now


def _save(places: Places, idle: dict[str, Idle]) -> None:
    file = places.records / _FILE
    if not idle:
        file.unlink(missing_ok=True)
        return
    places.records.mkdir(parents=True, exist_ok=True, mode=0o755)
    data = json.dumps({name: asdict(one) for name, one in idle.items()}).encode()
    file.write_bytes(data)  # half of it is as good as none
