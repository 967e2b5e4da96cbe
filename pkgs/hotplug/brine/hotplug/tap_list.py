"""The taps of this node, as a person or a script wants to see them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from brine.hotplug import tap_records
from brine.hotplug.links import Netlink
from brine.hotplug.network import Link
from brine.hotplug.tap_records import PLACES, Places, Record
from brine.hotplug.taps import Holder, held_taps
from brine.hotplug.wanted import owner_of


class State(enum.StrEnum):
    """How a tap is."""

    OPEN = "open"
    """Somebody has it open: a VM, mostly."""
    WAITING = "waiting"
    """It stays, and nobody has it open."""
    UNWIRED = "unwired"
    """It is connected to nothing, or not known to be."""
    UNKNOWN = "unknown"
    """This user may not read what was done for it."""
    GONE = "gone"
    """Its interface is gone, and something was left behind."""


@dataclass(frozen=True)
class Entry:
    """A tap of ours, as ``--json`` shows it.

    :param mode: None, as all that follows, where it is not known.
    """

    name: str
    instance: str
    nic: str
    state: State
    mode: str | None
    link: str | None
    vlan: str | None
    ips: list[str]
    mtu: int | None
    holders: list[Holder]


def list_taps(*, places: Places = PLACES) -> list[Entry]:
    """All taps of ours, by name, and what is left of those that are gone."""
    with Netlink() as netlink:
        links = {
            link.name: link
            for link in netlink.links()
            if link.kind == "tun" and owner_of(link.alias)
        }
    records = tap_records.load_all(places)
    held = held_taps()
    entries = [
        _entry(name, links.get(name), records.get(name), held.get(name, []))
        for name in sorted(links.keys() | records.keys())
    ]
    return [
        replace(one, state=State.UNKNOWN) if tap_records.is_hidden(places, one.name) else one
        for one in entries
    ]


def _entry(name: str, link: Link | None, record: Record | None, holders: list[Holder]) -> Entry:
    if link and record and record.index != link.index:
        record = None
    owner = owner_of(link.alias) if link else None
    if record:
        owner = record.wiring.instance, record.wiring.nic
    assert owner
    wiring = record.wiring if record else None
    return Entry(
        name=name,
        instance=owner[0],
        nic=owner[1],
        state=_state(link, record),
        mode=wiring.mode.value if wiring else None,
        link=wiring.link if wiring else None,
        vlan=wiring.vlan if wiring else None,
        ips=list(wiring.ips) if wiring else [],
        mtu=link.mtu if link else None,
        holders=holders if link else [],
    )


def _state(link: Link | None, record: Record | None) -> State:
    if link is None:
        return State.GONE
    if record is None or not record.complete:
        return State.UNWIRED
    return State.OPEN if link.carrier else State.WAITING
