"""The replies of several peers to a query, and the choice of the answer.

Sources: "Ganeti Confd" in the Ganeti 2.1 design (the highest serial wins), and
confd-protocol(7).
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from brine.common.errors import BrineError, printable
from brine.confd.protocol import (
    LARGEST_DATAGRAM,
    PORT,
    ConfdReply,
    ErrorCode,
    ReplyStatus,
    RequestType,
)
from brine.config.model import Configuration

# Whom to ask: addresses from a command line, from ssconf, or from the configuration.

_BRACKETED = re.compile(r"\[(?P<host>[^\[\]]+)\](?::(?P<port>.*))?")
_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_.])?")


class PeersError(BrineError):
    """There is nobody to ask, or an address that is none."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A node that may answer.

    :param host: an IPv4 or IPv6 address, or a name that resolves to some.
    :param port: of UDP.
    """

    host: str
    port: int = PORT

    def __str__(self) -> str:
        """As :func:`parse_peer` takes it; the usual port is left out."""
        if self.port == PORT:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_peer(text: str, *, port: int = PORT) -> Peer:
    """``192.0.2.1``, ``2001:db8::1`` or ``node1.example.com``, each perhaps with a port.

    With a port an IPv6 address stands in brackets: ``[2001:db8::1]:1815``.

    :param port: where *text* names none.
    :raises PeersError: if it is none of these.
    """
    if bracketed := _BRACKETED.fullmatch(text):
        host, port_text = bracketed["host"], bracketed["port"]
    elif text.count(":") == 1:
        host, port_text = text.split(":")
    else:
        host, port_text = text, None
    if not (_is_address(host) or (not bracketed and _HOST.fullmatch(host))):
        hint = "try 192.0.2.1, node1.example.com:1814 or [2001:db8::1]:1814"
        raise PeersError(f"not an address: {text!r}", hint=hint)
    if port_text is None:
        return Peer(host, port)
    if not (port_text.isascii() and port_text.isdigit() and 0 < int(port_text[:6]) < 65536):
        raise PeersError(f"not a port, which is from 1 to 65535: {text!r}")
    return Peer(host, int(port_text))


def parse_peers(texts: Iterable[str], *, port: int = PORT) -> tuple[Peer, ...]:
    """Several addresses, each once."""
    return tuple(dict.fromkeys(parse_peer(text, port=port) for text in texts))


def find_peers(*, ssconf_dir: Path, config_file: Path, port: int = PORT) -> tuple[Peer, ...]:
    """The master candidates, as far as this node knows them.

    :param ssconf_dir: every node has one; its ``master_candidates_ips`` has an address a line.
    :param config_file: a master candidate's own configuration, where ssconf is not filled.
    :param port: that all of them listen on.
    :raises PeersError: if neither names one.
    """
    addresses = _from_ssconf(ssconf_dir) or _from_configuration(config_file)
    if not addresses:
        message = f"this node knows no master candidates: neither {ssconf_dir} nor {config_file}"
        hint = "name one or more with --peer; brine config export-ssconf fills the first"
        raise PeersError(message, hint=hint)
    return parse_peers(addresses, port=port)


def _from_ssconf(folder: Path) -> list[str]:
    file = folder / "ssconf_master_candidates_ips"
    try:
        return file.read_text(encoding="ascii").split()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        hint = "name whom to ask with --peer"
        raise PeersError(f"{file}: can't be read: {why}", hint=hint) from error


def _from_configuration(file: Path) -> list[str]:
    try:
        data = file.read_bytes()
    except (FileNotFoundError, PermissionError):  # most users may not read it
        return []
    except OSError as error:
        raise PeersError(f"{file}: can't be read: {error.strerror}") from error

    nodes = Configuration.parse(data).nodes.values()
    return [node.primary_ip for node in nodes if node.master_candidate and not node.offline]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


_UNORDERED = frozenset(
    {
        RequestType.NODE_IPS,
        RequestType.MASTER_CANDIDATE_IPS,
        RequestType.INSTANCE_IPS,
        RequestType.NODE_DRBD,
        RequestType.OFFLINE_NODES,
        RequestType.INSTANCES,
    }
)
"""Types whose answer is a list in no order that means something: daemons differ in it."""


class ConfdError(BrineError):
    """A question that could not be asked, or was not answered."""


class RequestTooLargeError(ConfdError):
    """A question that does not fit a datagram."""


class NoAnswerError(ConfdError):
    """Nobody answered in time."""


class AnswerError(ConfdError):
    """The newest reply says that there is no answer.

    :param code: why; None where the peer gave a text instead, or a code that we don't know.
    :param peer: who said so.
    """

    def __init__(
        self, message: str, *, code: ErrorCode | None, peer: Peer, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.code = code
        self.peer = peer


class Silence(Enum):
    """Why there is no reply of a peer, as far as one can know."""

    SILENT = "silent"
    REFUSED = "refused"  # its kernel said that nothing listens on the port
    UNREACHABLE = "unreachable"  # no route, or a router said so
    UNRESOLVED = "unresolved"  # the name has no address


class Dropped(Enum):
    """Why a datagram that came in was not taken for a reply."""

    SIGNATURE = "signature"  # wrong, or of a key that we don't have
    SALT = "salt"  # authentic, but no answer to this question
    MALFORMED = "malformed"
    DUPLICATE = "duplicate"  # a peer's second reply


class PeerStanding(Enum):
    """A reply beside the newest one."""

    NEWEST = "newest"
    AGREES = "agrees"
    STALE = "stale"  # of a lower serial
    DISAGREES = "disagrees"  # says something else, and not because it is older
    FAILED = "failed"  # could not answer, which says nothing of the configuration


@dataclass(frozen=True, slots=True)
class PeerReply:
    """One peer's reply.

    :param round_trip_s: from the datagram that it answers to its arrival.
    """

    peer: Peer
    reply: ConfdReply
    round_trip_s: float


@dataclass(frozen=True)
class Result:
    """All that came back.

    :param type: what was asked, of :class:`RequestType`.
    :param replies: one a peer, in the order they came.
    :param silences: the peers without a reply.
    :param dropped: how many datagrams were not taken, by reason.
    """

    type: int
    replies: tuple[PeerReply, ...]
    silences: dict[Peer, Silence]
    dropped: Counter[Dropped]

    @property
    def asked(self) -> tuple[Peer, ...]:
        """All peers that were asked."""
        return (*(one.peer for one in self.replies), *self.silences)

    @property
    def needed(self) -> int:
        """How many replies are enough."""
        return needed_replies(len(self.asked))

    @property
    def enough(self) -> bool:
        """Whether so many could answer that the newest is likely to be the cluster's newest."""
        return 0 < self.needed <= sum(not is_failure(one.reply) for one in self.replies)

    @property
    def newest(self) -> PeerReply | None:
        """The reply of the highest serial; an answer before an error, then the first that came.

        That an entry is unknown is a reply with a serial too, so what was removed is not found
        again by asking an older peer. Errors of Ganeti's daemons have the serial 0, though: an
        answer of any age comes before them, and :attr:`disagreement` tells.
        """
        return max(self.replies, key=_age, default=None)

    @cached_property
    def standings(self) -> tuple[PeerStanding, ...]:
        """What each of ``replies`` is beside the newest."""
        newest = self.newest
        if not newest:
            return ()
        answer = _comparable(self.type, newest.reply)
        return tuple(
            PeerStanding.NEWEST
            if one is newest
            else self._standing(one.reply, newest.reply, answer)
            for one in self.replies
        )

    @property
    def disagreement(self) -> bool:
        """Whether a peer contradicts the newest reply, and is not merely older."""
        return PeerStanding.DISAGREES in self.standings

    def with_standing(self, standing: PeerStanding) -> list[PeerReply]:
        """The replies of that standing."""
        pairs = zip(self.replies, self.standings, strict=True)
        return [one for one, its in pairs if its == standing]

    def answer(self) -> Any:
        """The newest answer.

        :raises NoAnswerError: if nobody replied.
        :raises AnswerError: if the newest reply is an error.
        """
        newest = self.newest
        if not newest:
            raise NoAnswerError(f"nobody answered: {_reasons(self)}", hint=_advice(self))
        if newest.reply.status != ReplyStatus.OK:
            raise _answer_error(newest)
        return newest.reply.answer

    def _standing(self, reply: ConfdReply, newest: ConfdReply, answer: Any) -> PeerStanding:
        if is_failure(reply) and not is_failure(newest):
            return PeerStanding.FAILED
        if reply.serial < newest.serial and (reply.serial or reply.status == ReplyStatus.OK):
            return PeerStanding.STALE
        if _comparable(self.type, reply) == answer:
            return PeerStanding.AGREES
        return PeerStanding.DISAGREES


def needed_replies(asked: int) -> int:
    """How many of *asked* peers must reply: of few all, or all but one; then a majority."""
    if asked < 3:
        return asked
    if asked < 5:
        return asked - 1
    return asked // 2 + 1


def is_failure(reply: ConfdReply) -> bool:
    """Whether the peer could not look for an answer: it has no configuration, or is too old."""
    if reply.status == ReplyStatus.ERROR:
        return reply.answer is not True and reply.answer == ErrorCode.INTERNAL
    return reply.status != ReplyStatus.OK


def _age(one: PeerReply) -> tuple[bool, int, bool]:
    return not is_failure(one.reply), one.reply.serial, one.reply.status == ReplyStatus.OK


def _comparable(request_type: int, reply: ConfdReply) -> Any:
    """Equal for replies that say the same."""
    answer = reply.answer
    if reply.status != ReplyStatus.OK:
        return "error"  # peers word them differently
    if not isinstance(answer, list):
        return answer
    if request_type in _UNORDERED:
        return _in_order(answer)
    if request_type == RequestType.NODE_INSTANCES:
        return [_in_order(part) if isinstance(part, list) else part for part in answer]
    return answer


def _in_order(items: list[Any]) -> list[Any]:
    return sorted(items, key=lambda item: json.dumps(item, sort_keys=True))


def _reasons(result: Result) -> str:
    return ", ".join(f"{peer} {silence.value}" for peer, silence in result.silences.items())


def _advice(result: Result) -> str:
    """What to do where nobody answers: daemons are silent to whom they don't trust."""
    reasons = set(result.silences.values())
    if result.dropped[Dropped.SIGNATURE]:
        return "replies came with another signature: compare hmac.key with that of the peers"
    if reasons == {Silence.REFUSED}:
        return "is brine-confd running there, and on that port?"
    if reasons == {Silence.UNRESOLVED}:
        return "name IP addresses instead"
    return (
        "peers are silent to a request with another key or another time: "
        "compare hmac.key and the clocks; is UDP let through?"
    )


def _answer_error(newest: PeerReply) -> AnswerError:
    reply, peer = newest.reply, newest.peer
    if reply.status != ReplyStatus.ERROR:
        return AnswerError(f"{peer} does not know this question", code=None, peer=peer)
    if type(reply.answer) is str:  # Ganeti's daemon explains
        said = printable(" ".join(reply.answer.split()))
        return AnswerError(f"{peer} says: {said}", code=None, peer=peer)
    try:
        code = ErrorCode(reply.answer)
    except ValueError:
        message = f"{peer} answers with an unknown error: {reply.answer!r:.80}"
        return AnswerError(message, code=None, peer=peer)
    hint = None
    if code == ErrorCode.UNKNOWN_ENTRY:
        message = "there is no such entry in the configuration"
    elif code == ErrorCode.INTERNAL:
        message = f"{peer} can't answer at present"
        hint = "see the journal there: journalctl -u brine-confd"
    elif code == ErrorCode.TOO_LARGE:
        message = f"the answer does not fit a datagram of {LARGEST_DATAGRAM} bytes"
        hint = "ask for a part of it"
    else:
        message = f"{peer} does not take this question's argument"
    return AnswerError(message, code=code, peer=peer, hint=hint)
