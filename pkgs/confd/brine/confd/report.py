"""How results are shown: lines for people, objects for programs. See brine-confd(1)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import astuple
from typing import Any

from brine.common.printable import printable
from brine.common.table import table
from brine.confd.protocol import ErrorCode, Reply, Role, Status
from brine.confd.questions import DrbdMinor, NodeInstances
from brine.confd.result import Dropped, PeerReply, Result, Standing, is_failure

_SHORT = 60


def lines(answer: Any) -> Iterator[str]:
    """A typed answer as text: a list's items one a line, an object as JSON."""
    if isinstance(answer, dict):
        yield json.dumps(answer, indent=2)
    elif isinstance(answer, (list, tuple)):
        for item in answer:
            yield _item(item)
    elif isinstance(answer, NodeInstances):
        for word, instances in (("primary", answer.primary), ("secondary", answer.secondary)):
            for instance in instances:
                yield f"{word} {_item(instance.get('name'))}"
    else:
        yield _item(answer)


def ip_lines(answer: dict[str, str | None]) -> Iterator[str]:
    """An instance's IP and its node's IP a line."""
    for ip, node_ip in answer.items():
        yield f"{ip} {'unknown' if node_ip is None else printable(node_ip)}"


def result_object(result: Result) -> dict[str, Any]:
    """A result as ``brine confd query --json`` prints it."""
    newest = result.newest.reply if result.newest else None
    return {
        "answer": newest.answer if newest else None,
        "serial": newest.serial if newest else None,
        "status": newest.status if newest else None,
        "replies": [
            {
                "peer": str(one.peer),
                "answer": one.reply.answer,
                "serial": one.reply.serial,
                "status": one.reply.status,
                "standing": standing.value,
                "round_trip_ms": _milliseconds(one),
            }
            for one, standing in zip(result.replies, result.standings, strict=True)
        ],
        "silent": [
            {"peer": str(peer), "reason": reason.value} for peer, reason in result.silences.items()
        ],
        "asked": len(result.asked),
        "needed": result.needed,
        "enough": result.enough,
        "disagreement": result.disagreement,
        "dropped": {reason.value: result.dropped[reason] for reason in Dropped},
    }


def warnings(result: Result) -> Iterator[str]:
    """What there is to doubt about the newest answer."""
    if not result.newest:
        return
    serial = result.newest.reply.serial
    for one in result.with_standing(Standing.STALE):
        yield f"{one.peer} has an older configuration: serial {one.reply.serial}, not {serial}"
    for one in result.with_standing(Standing.DISAGREES):
        yield f"{one.peer} disagrees with {result.newest.peer}: it says {_in_short(one.reply)}"
    for one in result.with_standing(Standing.FAILED):
        yield f"{one.peer} can't answer: {_in_short(one.reply)}"
    if not result.enough and not is_failure(result.newest.reply):
        could = sum(not is_failure(one.reply) for one in result.replies)
        silent = "".join(f"; {peer} {why.value}" for peer, why in result.silences.items())
        yield f"{could} of {result.needed} needed answers came, it may be an old one{silent}"


def ping_object(result: Result) -> dict[str, Any]:
    """A result as ``brine confd ping --json`` prints it."""
    answered = [
        {
            "peer": str(one.peer),
            "answer": one.reply.answer,
            "status": one.reply.status,
            "trouble": None if one.reply.status == Status.OK else "error",
            "round_trip_ms": _milliseconds(one),
        }
        for one in result.replies
    ]
    silent = [
        {
            "peer": str(peer),
            "answer": None,
            "status": None,
            "trouble": reason.value,
            "round_trip_ms": None,
        }
        for peer, reason in result.silences.items()
    ]
    return {
        "peers": sorted([*answered, *silent], key=lambda row: str(row["peer"])),
        "asked": len(result.asked),
        "answered": len(answered),
    }


def ping_table(result: Result) -> Iterator[str]:
    """A peer a line: what it answered, and after how long."""
    rows = []
    for one in result.replies:
        good = one.reply.status == Status.OK
        said = f"version {_item(one.reply.answer)}" if good else f"error: {_in_short(one.reply)}"
        rows.append((str(one.peer), said, f"{one.round_trip_s * 1e3:.1f} ms"))
    rows += [(str(peer), reason.value, "-") for peer, reason in result.silences.items()]
    return table([("PEER", "ANSWER", "ROUND TRIP"), *sorted(rows)])


def _item(item: Any) -> str:
    if isinstance(item, str):
        return printable(item)
    if isinstance(item, Role):
        return item.name.lower()
    if isinstance(item, DrbdMinor):
        return " ".join(_item(part) for part in astuple(item))
    return json.dumps(item)


def _in_short(reply: Reply) -> str:
    if reply.status == Status.NOT_IMPLEMENTED:
        return "not implemented"
    if reply.status != Status.OK and reply.answer in list(ErrorCode):
        return ErrorCode(reply.answer).name.lower().replace("_", " ")
    text = _item(reply.answer)
    return text if len(text) <= _SHORT else f"{text[:_SHORT]}..."


def _milliseconds(one: PeerReply) -> float:
    return round(one.round_trip_s * 1e3, 3)
