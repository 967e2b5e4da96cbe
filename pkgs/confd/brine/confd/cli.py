"""``brine confd``: ask the cluster's daemons, see whether they are there, make them a key."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brine.common import paths
from brine.common.cli import Command, table
from brine.common.errors import BrineError, printable
from brine.confd.kinds import FIELDS, KINDS, QueryCommand
from brine.confd.protocol import ConfdReply, ErrorCode, ReplyStatus, RequestType, Role
from brine.confd.questions import DrbdMinor, NodeInstances
from brine.confd.replies import Dropped, PeerReply, PeerStanding, Result, is_failure

if TYPE_CHECKING:
    from brine.confd.replies import AnswerError
    from brine.confd.settings import ConfdSettings


# Asking takes asyncio, and more: modules that are not needed for --help are imported where used.

_NO_ANSWER = 3
_TOO_FEW_ANSWERS = 4
_LONGEST_S = 3600.0
_PING_TIMEOUT_S = 3.0
_QUERY_TIMEOUT_S = 10.0
_EVERY_PEER = sys.maxsize


@dataclass(frozen=True)
class _Asking:
    """Whom to ask and with which key: what the command line says, and settings for the rest."""

    arguments: argparse.Namespace

    @cached_property
    def _settings(self) -> ConfdSettings:
        from brine.confd.settings import load_settings

        return load_settings(paths.settings_file("confd"), required=False)

    def ask(self, request_type: int, query: Any, *, coverage: int | None, patient: bool) -> Result:
        """Ask, with this command line's peers, key and limit."""
        from brine.confd.client import BlockingConfdClient
        from brine.confd.keys import find_keys, load_key
        from brine.confd.replies import find_peers, parse_peers

        given = self.arguments
        port = given.port or self._settings.port
        if given.peer:
            peers = parse_peers(given.peer, port=port)
        else:
            peers = find_peers(
                ssconf_dir=paths.SSCONF_DIR, config_file=self._settings.config_file, port=port
            )
        if given.key:
            keys = [load_key(given.key)]
        else:
            settings = self._settings
            found = find_keys(settings.key_file, settings.previous_key_file, {})
            keys = [key.secret for key in found]
        return BlockingConfdClient(peers, keys).query(
            request_type, query, coverage=coverage, patient=patient, timeout_s=given.timeout
        )


def _query(arguments: argparse.Namespace) -> int:
    from brine.confd.client import decode
    from brine.confd.replies import AnswerError, NoAnswerError, is_failure

    kind = KINDS[arguments.type]
    question = kind.build(arguments)
    coverage = arguments.coverage
    result = _Asking(arguments).ask(
        question.type, question.query, coverage=coverage, patient=coverage is not None
    )
    status = 0
    try:
        if arguments.json:
            _print([json.dumps(result_object(result), indent=2)])
            result.answer()
        else:
            answer = decode(question, result)
            several_ips = kind.many and isinstance(answer, dict)
            _print(ip_lines(answer) if several_ips else lines(answer))
    except NoAnswerError as error:
        _tell("error", error)
        return _NO_ANSWER
    except AnswerError as error:
        _tell("error", _explained(error, kind, arguments))
        status = 1
    for warning in warnings(result):
        _tell("warning", BrineError(warning))
    if result.newest and is_failure(result.newest.reply):
        return 1
    return status if result.enough else _TOO_FEW_ANSWERS


def _explained(error: AnswerError, kind: QueryCommand, arguments: argparse.Namespace) -> BrineError:
    """An error answer, told in the words of the question."""
    if error.code == ErrorCode.UNKNOWN_ENTRY:
        words = {key: value for key, value in vars(arguments).items() if value is not None}
        if kind.many:
            words["argument"] = ", ".join(arguments.argument)
        words.setdefault("link", "the default link")
        hint = None
        if kind.argument in ("NODE", "INSTANCE"):
            hint = "name it whole, by UUID, or by a short name that no other has"
        elif "link" in kind.options and arguments.link is None:
            hint = "where it is on another link: --link LINK"
        return BrineError(kind.missing.format(**words), hint=hint)
    if error.code == ErrorCode.ARGUMENT and arguments.type == RequestType.CONFIG:
        message = f"nothing in the configuration is at {arguments.argument!r}"
        return BrineError(message, hint="a JSON pointer (RFC 6901) is such as /cluster/mac_prefix")
    if error.code == ErrorCode.TOO_LARGE and arguments.type == RequestType.INSTANCES:
        hint = "--after '' prints the first page, --after NAME those that follow"
        return BrineError(str(error), hint=hint)
    return error


def _ping(arguments: argparse.Namespace) -> int:
    from brine.confd.protocol import ReplyStatus
    from brine.confd.replies import NoAnswerError

    result = _Asking(arguments).ask(RequestType.PING, None, coverage=_EVERY_PEER, patient=True)
    if arguments.json:
        _print([json.dumps(ping_object(result), indent=2)])
    else:
        _print(ping_table(result))
    if not result.replies:
        try:
            result.answer()
        except NoAnswerError as error:
            _tell("error", error)
        return _NO_ANSWER
    if result.silences:
        return _TOO_FEW_ANSWERS
    return int(any(one.reply.status != ReplyStatus.OK for one in result.replies))


def _new_key(arguments: argparse.Namespace) -> int:
    from brine.confd.keys import forget_old, new_key
    from brine.confd.settings import load_settings

    if arguments.key:
        path = arguments.key
        previous = path.with_name(f"{path.name}.previous")
    else:
        settings = load_settings(paths.settings_file("confd"), required=False)
        path, previous = settings.key_file, settings.previous_key_file
    reload = "systemctl reload-or-restart brine-confd"
    if arguments.forget_old:
        if forget_old(path, previous):
            _print([f"removed: {previous}", f"next: the same on every node, and there: {reload}"])
        else:
            _print([f"there is no previous key: {previous}"])
        return 0
    replaced = new_key(path, previous, replace=arguments.replace)
    if replaced:
        _print(
            [
                f"replaced: {path}; the old key stays valid as {previous}",
                f"next: copy both to every node, and run there: {reload}",
                "when all have it: brine confd new-key --forget-old, and reload, on each of them",
            ]
        )
    else:
        _print([f"made: {path}", f"next: copy it to every node, and run there: {reload}"])
    return 0


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def _tell(word: str, error: BrineError) -> None:
    print(f"brine: {word}: {error}", file=sys.stderr)
    if error.hint:
        print(f"brine: hint: {error.hint}", file=sys.stderr)


# The command line.


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text[:6]) < 65536):
        raise argparse.ArgumentTypeError(f"must be from 1 to 65535, but is {text!r}")
    return int(text)


def _coverage(text: str) -> int:
    if text == "all":
        return _EVERY_PEER
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"must be a number from 1, or all, but is {text!r}")
    return int(text)


def _timeout(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not 0 < seconds <= _LONGEST_S:  # also what is not a number
        message = f"must be seconds, more than 0 and up to {_LONGEST_S:g}, but is {text!r}"
        raise argparse.ArgumentTypeError(message)
    return seconds


def _add_options(parser: argparse.ArgumentParser, timeout_s: float) -> None:
    group = parser.add_argument_group("whom to ask, and how")
    group.add_argument(
        "--peer",
        action="append",
        metavar="ADDRESS",
        help="ask this one, perhaps with :PORT; may be repeated; default: the master candidates "
        "that this node knows of",
    )
    group.add_argument("--port", type=_port, metavar="N", help="port of peers; default: 1814")
    group.add_argument(
        "--key", type=Path, metavar="FILE", help=f"the cluster's key; default: {paths.KEY_FILE}"
    )
    group.add_argument(
        "--timeout",
        type=_timeout,
        default=timeout_s,
        metavar="S",
        help=f"wait so many seconds at most; default: {timeout_s:g}",
    )
    group.add_argument("--json", action="store_true", help="print a JSON object")


def _configure_query(parser: argparse.ArgumentParser) -> None:
    types = parser.add_subparsers(title="types", metavar="TYPE", required=True)
    for request_type, kind in KINDS.items():
        name = request_type.name.lower().replace("_", "-")
        one = types.add_parser(
            name, help=kind.help, description=f"Asks for {kind.help}.", allow_abbrev=False
        )
        one.set_defaults(run=_query, type=request_type)
        if kind.argument:
            one.add_argument("argument", metavar=kind.argument, nargs="+" if kind.many else None)
        if "link" in kind.options:
            one.add_argument("--link", metavar="LINK", help="default: the cluster's default link")
        if "field" in kind.options:
            one.add_argument(
                "--field",
                action="append",
                choices=tuple(FIELDS),
                metavar="NAME",
                help=f"print this instead: {', '.join(FIELDS)}; may be repeated",
            )
        if "after" in kind.options:
            one.add_argument(
                "--after", metavar="NAME", help="a page of those that follow NAME; '' for the first"
            )
        one.add_argument(
            "--coverage",
            type=_coverage,
            metavar="N",
            help="ask N peers, or all, and wait for each; default: ask six, until enough answer",
        )
        _add_options(one, _QUERY_TIMEOUT_S)


def _configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    query = verbs.add_parser(
        "query",
        help="ask several master candidates, print the newest answer",
        description="Asks several master candidates and prints the newest answer. "
        "See brine confd query TYPE --help for a type's options.",
        allow_abbrev=False,
    )
    _configure_query(query)
    ping = verbs.add_parser(
        "ping",
        help="show which daemons answer",
        description="Asks every master candidate whether its daemon answers.",
        allow_abbrev=False,
    )
    _add_options(ping, _PING_TIMEOUT_S)
    ping.set_defaults(run=_ping)
    key = verbs.add_parser(
        "new-key",
        help="make the cluster's key",
        description="Makes a new random key, once for a cluster; every node gets a copy.",
        allow_abbrev=False,
    )
    change = key.add_mutually_exclusive_group()
    change.add_argument(
        "--replace", action="store_true", help="replace a key, which stays valid as the previous"
    )
    change.add_argument(
        "--forget-old", action="store_true", help="remove the previous key, once no node needs it"
    )
    key.add_argument(
        "--key", type=Path, metavar="FILE", help=f"where it goes; default: {paths.KEY_FILE}"
    )
    key.set_defaults(run=_new_key)


COMMAND = Command("ask the cluster's configuration daemons", _configure)


# How results are shown: lines for people, objects for programs. See brine-confd(1).

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
    for one in result.with_standing(PeerStanding.STALE):
        yield f"{one.peer} has an older configuration: serial {one.reply.serial}, not {serial}"
    for one in result.with_standing(PeerStanding.DISAGREES):
        yield f"{one.peer} disagrees with {result.newest.peer}: it says {_in_short(one.reply)}"
    for one in result.with_standing(PeerStanding.FAILED):
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
            "trouble": None if one.reply.status == ReplyStatus.OK else "error",
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
        good = one.reply.status == ReplyStatus.OK
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


def _in_short(reply: ConfdReply) -> str:
    if reply.status == ReplyStatus.NOT_IMPLEMENTED:
        return "not implemented"
    if reply.status != ReplyStatus.OK and reply.answer in list(ErrorCode):
        return ErrorCode(reply.answer).name.lower().replace("_", " ")
    text = _item(reply.answer)
    return text if len(text) <= _SHORT else f"{text[:_SHORT]}..."


def _milliseconds(one: PeerReply) -> float:
    return round(one.round_trip_s * 1e3, 3)
