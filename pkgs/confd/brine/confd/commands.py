"""The verbs of ``brine confd``: query, ping, new-key and check-key."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from typing import Any

from brine.common import paths
from brine.common.errors import printable, tell_error, warn
from brine.common.settings import load
from brine.common.tables import print_table
from brine.confd.cli import EVERY_PEER
from brine.confd.client import (
    AnswerError,
    ConfdClient,
    Dropped,
    NoAnswerError,
    PeerReply,
    PeerStanding,
    Result,
    find_peers,
)
from brine.confd.keys import SHORTEST, find_keys, forget_old, load_key, new_key
from brine.confd.protocol import ConfdReply, ErrorCode, ReplyStatus, RequestType, Role
from brine.confd.questions import QUERY_COMMANDS, DrbdMinor, NodeInstances
from brine.confd.settings import ConfdSettings

_NO_ANSWER = 3
_TOO_FEW_ANSWERS = 4
_NOTHING = {"answer": None, "serial": None, "status": None}
_SHORT = 60
"""The most characters of an answer in a warning."""


def _ask(
    arguments: argparse.Namespace, request_type: int, query: Any, coverage: int | None
) -> Result:
    """Ask the peers that the command line names, with its key; settings say the rest."""

    @cache
    def settings() -> ConfdSettings:
        return load(ConfdSettings, paths.settings_file("confd"))

    peers = arguments.peer
    if not peers:
        peers = find_peers(ssconf_dir=paths.SSCONF_DIR, config_file=settings().config_file)
    if arguments.key:
        keys = [load_key(arguments.key)]
    else:
        found = find_keys(settings().key_file, settings().previous_key_file, {})
        keys = [key.secret for key in found]
    client = ConfdClient(peers, keys, port=arguments.port or settings().port)
    return client.query(
        request_type,
        query,
        coverage=coverage,
        patient=coverage is not None,
        timeout_s=arguments.timeout,
    )


def query(arguments: argparse.Namespace) -> int:
    """``brine confd query``"""
    command = QUERY_COMMANDS[arguments.type]
    given = [arguments.argument] if command.argument else []
    options = {option: getattr(arguments, option) for option in command.options}
    question = command.ask(*given, **options)
    result = _ask(arguments, question.type, question.query, arguments.coverage)
    status = 0
    try:
        if arguments.json:
            print(json.dumps(_result_object(result), indent=2))
            result.answer()
        else:
            for line in _lines(result.decoded(question), question.type):
                print(line)
    except NoAnswerError as error:
        tell_error(error)
        return _NO_ANSWER
    except AnswerError as error:
        tell_error(error)
        status = 1
    for warning in _warnings(result):
        warn(warning)
    if result.newest and result.newest.is_failure:
        return 1
    return status if result.enough else _TOO_FEW_ANSWERS


def ping(arguments: argparse.Namespace) -> int:
    """``brine confd ping``"""
    result = _ask(arguments, RequestType.PING, None, EVERY_PEER)
    if arguments.json:
        print(json.dumps(_ping_object(result), indent=2))
    else:
        print_table(("PEER", "ANSWER", "ROUND TRIP"), sorted(_ping_rows(result)), none="")
    if not result.replies:
        try:
            result.answer()
        except NoAnswerError as error:
            tell_error(error)
        return _NO_ANSWER
    if result.silences:
        return _TOO_FEW_ANSWERS
    return int(any(one.reply.status != ReplyStatus.OK for one in result.replies))


def make_key(arguments: argparse.Namespace) -> int:
    """``brine confd new-key``"""
    if arguments.key:
        path = arguments.key
        previous = path.with_name(f"{path.name}.previous")
    else:
        settings = load(ConfdSettings, paths.settings_file("confd"))
        path, previous = settings.key_file, settings.previous_key_file
    reload = "systemctl reload-or-restart brine-confd"
    if arguments.forget_old:
        if forget_old(path, previous):
            print(f"removed: {previous}")
            print(f"next: the same on every node, and there: {reload}")
        else:
            print(f"there is no previous key: {previous}")
    elif new_key(path, previous, replace=arguments.replace):
        print(f"replaced: {path}; the old key stays valid as {previous}")
        print(f"next: copy both to every node, and run there: {reload}")
        print("when all have it: brine confd new-key --forget-old, and reload, on each of them")
    else:
        print(f"made: {path}")
        print(f"next: copy it to every node, and run there: {reload}")
    return 0


def check_key(arguments: argparse.Namespace) -> int:
    """``brine confd check-key``"""
    size = len(load_key(arguments.file))
    if arguments.json:
        print(json.dumps({"file": str(arguments.file), "bytes": size}))
    else:
        print(f"{arguments.file}: the key is good: {size} bytes")
    if size < SHORTEST:
        text = f"{arguments.file} has {size} bytes only"
        warn(text, hint=f"{SHORTEST} bytes or more are safe")
    return 0


# How results are shown: lines for people, objects for programs. See brine-confd(1).


def _lines(answer: Any, request_type: int) -> Iterator[str]:
    """A typed answer as text: a list's items one a line, an object as JSON."""
    if isinstance(answer, NodeInstances):
        for word, instances in zip(("primary", "secondary"), answer, strict=True):
            for instance in instances:
                yield f"{word} {_item(instance.get('name'))}"
    elif isinstance(answer, dict) and request_type == RequestType.NODE_IP_OF_INSTANCE_IP:
        for ip, node_ip in answer.items():
            yield f"{ip} {'unknown' if node_ip is None else printable(node_ip)}"
    elif isinstance(answer, dict):
        yield json.dumps(answer, indent=2)
    elif isinstance(answer, (list, tuple)):
        yield from map(_item, answer)
    else:
        yield _item(answer)


def _item(item: Any) -> str:
    if isinstance(item, str):
        return printable(item)
    if isinstance(item, Role):
        return item.name.lower()
    if isinstance(item, DrbdMinor):
        return " ".join(map(_item, item))
    return json.dumps(item)


def _result_object(result: Result) -> dict[str, Any]:
    """A result as ``brine confd query --json`` prints it."""
    newest = asdict(result.newest.reply) if result.newest else _NOTHING
    replies = []
    for one, standing in zip(result.replies, result.standings, strict=True):
        its = {"peer": str(one.peer), **asdict(one.reply), "standing": standing}
        replies.append({**its, "round_trip_ms": _milliseconds(one)})
    return {
        **newest,
        "replies": replies,
        "silent": [{"peer": str(peer), "reason": why} for peer, why in result.silences.items()],
        "asked": len(result.asked),
        "needed": result.needed,
        "enough": result.enough,
        "disagreement": result.disagreement,
        "dropped": {reason: result.dropped[reason] for reason in Dropped},
    }


def _warnings(result: Result) -> Iterator[str]:
    """Doubts about the newest answer."""
    if not result.newest:
        return
    serial = result.newest.reply.serial
    for one in result.with_standing(PeerStanding.STALE):
        yield f"{one.peer} has an older configuration: serial {one.reply.serial}, not {serial}"
    for one in result.with_standing(PeerStanding.DISAGREES):
        yield f"{one.peer} disagrees with {result.newest.peer}: it says {_in_short(one.reply)}"
    for one in result.with_standing(PeerStanding.FAILED):
        yield f"{one.peer} can't answer: {_in_short(one.reply)}"
    if not result.enough and not result.newest.is_failure:
        could = sum(not one.is_failure for one in result.replies)
        silent = "".join(f"; {peer} {why}" for peer, why in result.silences.items())
        yield f"{could} of {result.needed} needed answers came, it may be an old one{silent}"


def _ping_object(result: Result) -> dict[str, Any]:
    """A result as ``brine confd ping --json`` prints it."""
    rows: list[dict[str, Any]] = []
    for one in result.replies:
        trouble = None if one.reply.status == ReplyStatus.OK else "error"
        reply = {"answer": one.reply.answer, "status": one.reply.status, "trouble": trouble}
        rows.append({"peer": str(one.peer), **reply, "round_trip_ms": _milliseconds(one)})
    for peer, why in result.silences.items():
        nothing = {"answer": None, "status": None, "trouble": why, "round_trip_ms": None}
        rows.append({"peer": str(peer), **nothing})
    return {
        "peers": sorted(rows, key=lambda row: str(row["peer"])),
        "asked": len(result.asked),
        "answered": len(result.replies),
    }


def _ping_rows(result: Result) -> Iterator[tuple[str, str, str]]:
    """A row for each peer: its answer, and the time that took."""
    for one in result.replies:
        good = one.reply.status == ReplyStatus.OK
        said = f"version {_item(one.reply.answer)}" if good else f"error: {_in_short(one.reply)}"
        yield str(one.peer), said, f"{one.round_trip_s * 1e3:.1f} ms"
    for peer, why in result.silences.items():
        yield str(peer), why, "-"


def _in_short(reply: ConfdReply) -> str:
    if reply.status == ReplyStatus.NOT_IMPLEMENTED:
        return "not implemented"
    if reply.status != ReplyStatus.OK and reply.answer in list(ErrorCode):
        return ErrorCode(reply.answer).name.lower().replace("_", " ")
    text = _item(reply.answer)
    return text if len(text) <= _SHORT else f"{text[:_SHORT]}..."


def _milliseconds(one: PeerReply) -> float:
    return round(one.round_trip_s * 1e3, 3)
