"""Records of taps: what Brine does for each, written before it is done, so that it can be undone.

A tap ends with its QEMU, and so do its routes. Proxy entries, rules, a port of Open vSwitch and the
work of an operator's script stay. All but the port end with a reboot, as do the records.
"""

from __future__ import annotations

import contextlib
import enum
import json
import logging
import os
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from brine.common import paths
from brine.common.errors import BrineError
from brine.common.files import unfinished, write_whole
from brine.common.locks import LockedError, node_lock
from brine.hotplug.net.netlink import Link, Netlink, Proxy, Rule
from brine.hotplug.net.packet_filter import dropped_packets, is_filtered
from brine.hotplug.net.tap import Holder, held_taps
from brine.vm.values import Mode
from brine.vm.vif import Vif

_WIRING = (
    *(
        "instance",
        "mode",
        "link",
        "vlan",
        "ips",
        "filter",
        "mac",
        "mtu",
        "index",
        "tags",
        "network",
    ),
)

LOCK_TIMEOUT_S = 60.0
"""Each script may take half a minute."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TapRecord:
    """The record of a tap.

    :param index: of the interface; another interface of the same name has another index.
    :param since: when the wiring was begun, in seconds since 1970.
    :param complete: whether the wiring is complete.
    :param namespace: the inode of its network namespace; 0 if not known.
    :param nic: with the number of opened queues.
    :param proxies: the addresses that the node answers for elsewhere.
    """

    name: str
    index: int
    nic: Vif
    since: float
    mtu: int = 0
    complete: bool = False
    table: int = 0
    namespace: int = 0
    uplinks: tuple[str, ...] = ()
    proxies: tuple[Proxy, ...] = ()
    rules: tuple[Rule, ...] = ()

    def is_here(self) -> bool:
        """Whether it is in the network namespace of this thread, or that is not known."""
        return self.namespace in (0, current_namespace())

    def is_of(self, link: Link | None) -> bool:
        """Whether that is its interface, and not another one of the same name, or None."""
        return link is not None and link.index == self.index


def current_namespace() -> int:
    """The inode of this thread's network namespace."""
    return os.stat("/proc/thread-self/ns/net").st_ino


class RecordError(BrineError):
    """A record that can't be read or written."""


def load(name: str) -> TapRecord | None:
    """The record of a tap, or None if there is none.

    :raises RecordError: if it is damaged.
    """
    file = _file(name)
    try:
        return _parse(json.loads(file.read_text()))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecordError(f"{file}: can't be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        hint = f"remove {file}, then the tap: ip link delete {name}"
        raise RecordError(f"{file}: damaged: {error}", hint=hint) from error


def load_all() -> dict[str, TapRecord]:
    """All records, by name; a damaged one is reported and left out."""
    found = {}
    for file in sorted(paths.TAPS_DIR.glob("*.json")):
        try:
            if record := load(file.stem):
                found[record.name] = record
        except RecordError as error:
            log.warning("%s", error)
    return found


def save(record: TapRecord, **changes: Any) -> None:
    """Write a record, with changes.

    :raises RecordError: if that fails.
    """
    record = replace(record, **changes)
    file = _file(record.name)
    data = json.dumps(_to_json(record), indent=1).encode()
    try:
        paths.TAPS_DIR.mkdir(parents=True, exist_ok=True, mode=0o755)
        # It need not survive a power cut, because the tap does not.
        write_whole(file, data + b"\n", mode=0o600, alone=True, durable=False)
    except OSError as error:
        raise RecordError(f"{file}: can't be written: {error.strerror}") from error


def remove(name: str) -> None:
    """Remove a record; succeeds if there is none."""
    file = _file(name)
    file.unlink(missing_ok=True)
    unfinished(file).unlink(missing_ok=True)


def remove_unfinished() -> None:
    """Remove unfinished files of killed writers."""
    for file in paths.TAPS_DIR.glob(unfinished(_file("*")).name):
        name = file.name.removeprefix(".").partition(".json")[0]
        with contextlib.suppress(LockedError), one_at_a_time(name, timeout_s=0):
            file.unlink(missing_ok=True)


def one_at_a_time(name: str, *, timeout_s: float | None = None) -> AbstractContextManager[None]:
    """Hold the lock of a tap of that name, as :func:`brine.common.locks.node_lock` does.

    :param timeout_s: how long to wait for it; None is :data:`LOCK_TIMEOUT_S`.
    """
    timeout_s = LOCK_TIMEOUT_S if timeout_s is None else timeout_s
    return node_lock(f"tap-{name}", timeout_s=timeout_s)


def _file(name: str) -> Path:
    return paths.TAPS_DIR / f"{name}.json"


def _to_json(record: TapRecord) -> dict[str, Any]:
    data, nic = asdict(record), record.nic
    del data["nic"]
    wiring = {"nic": nic.uuid, **{name: getattr(nic, name) for name in _WIRING}}
    wiring["mtu"] = nic.mtu or None
    return {**data, "queues": nic.queues, "vhost": nic.vhost, "wiring": wiring}


def _parse(data: dict[str, Any]) -> TapRecord:
    wiring = data.pop("wiring")
    wiring |= {"mode": Mode(wiring["mode"]).value, "uuid": wiring.pop("nic")}
    wiring["mtu"] = wiring["mtu"] or 0
    wiring.setdefault("filter", False)  # Brine 0.2.0 had none
    wiring |= {key: tuple(wiring[key]) for key in ("ips", "tags")}
    data["nic"] = Vif(queues=data.pop("queues"), vhost=data.pop("vhost"), **wiring)
    data["uplinks"] = tuple(data["uplinks"])
    data["proxies"] = tuple(Proxy(**one) for one in data["proxies"])
    data["rules"] = tuple(Rule(**one) for one in data["rules"])
    return TapRecord(**data)


# The taps of this node, for a list.


class TapState(enum.StrEnum):
    OPEN = "open"  # a process, mostly a QEMU, has it open
    WAITING = "waiting"  # it is persistent, and no process has it open
    UNWIRED = "unwired"  # it has no complete record
    UNKNOWN = "unknown"  # this user may not read its record
    GONE = "gone"  # its interface is gone, and its record remains


class FilterState(enum.StrEnum):
    NONE = "none"  # it is to have none
    ON = "on"
    MISSING = "missing"  # another program has removed it


@dataclass(frozen=True)
class Entry:
    """A tap of Brine's, as ``--json`` shows it.

    :param mode: None if it is not known, as are all that follow.
    :param drops: the packets that the filter has dropped; None if there is no filter, too.
    """

    name: str
    instance: str
    nic: str
    state: TapState
    mode: str | None
    link: str | None
    vlan: str | None
    ips: list[str]
    mtu: int | None
    filter: FilterState | None
    drops: int | None
    holders: list[Holder]


def list_taps() -> list[Entry]:
    """All taps of Brine's, by name, and the leftovers of those that are gone."""
    with Netlink() as netlink:
        links = {link.name: link for link in netlink.links() if link.owner()}
    records, held = load_all(), held_taps()
    drops: dict[str, int] | None = {}
    if any(is_filtered(record.nic) for record in records.values()):
        try:
            drops = dropped_packets()
        except BrineError as error:
            log.debug("%s", error)  # a user who is not root may not ask
            drops = None
    return [
        _entry(name, links.get(name), records.get(name), held.get(name, []), drops)
        for name in sorted(links.keys() | records.keys())
    ]


def _entry(
    name: str,
    link: Link | None,
    record: TapRecord | None,
    holders: list[Holder],
    drops: dict[str, int] | None,
) -> Entry:
    if link and record and not record.is_of(link):
        record = None
    nic = record.nic if record else None
    owner = (nic.instance, nic.uuid) if nic else link.owner() if link else None
    assert owner
    state = TapState.GONE
    if _is_hidden(name):
        state = TapState.UNKNOWN
    elif link and not (record and record.complete):
        state = TapState.UNWIRED
    elif link:
        state = TapState.OPEN if link.carrier else TapState.WAITING
    filtered: FilterState | None = None
    if nic and not is_filtered(nic):
        filtered = FilterState.NONE
    elif nic and drops is not None:
        filtered = FilterState.ON if name in drops else FilterState.MISSING
    return Entry(
        name=name,
        instance=owner[0],
        nic=owner[1],
        state=state,
        mode=nic.mode if nic else None,
        link=nic.link if nic else None,
        vlan=nic.vlan if nic else None,
        ips=list(nic.ips) if nic else [],
        mtu=link.mtu if link else None,
        filter=filtered,
        drops=(drops or {}).get(name) if filtered is FilterState.ON else None,
        holders=holders if link else [],
    )


def _is_hidden(name: str) -> bool:
    """Whether this user may not read the record of a tap."""
    file = _file(name)
    return not all(os.access(path, os.R_OK) for path in (paths.TAPS_DIR, file) if path.exists())
