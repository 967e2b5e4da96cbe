"""The QEMU Machine Protocol's messages: one line of JSON each (QEMU's qmp-spec).

This module reads and writes single messages. :mod:`brine.common.qmp.client` gives commands, and
``brine.kvmd.connection`` listens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from brine.common.errors import BrineError, printable


class QmpError(BrineError):
    """Talking to a QEMU monitor failed."""


class QmpProtocolError(QmpError):
    """The peer does not speak QMP."""


class QmpCommandError(QmpError):
    """QEMU refused a command.

    :param error_class: QEMU's, such as ``GenericError``, ``CommandNotFound`` or ``DeviceNotFound``.
    """

    def __init__(self, command: str, error_class: str, description: str) -> None:
        super().__init__(f"QEMU refused {command}: {description}")
        self.command = command
        self.error_class = error_class
        self.description = description


class QmpTimeoutError(QmpError):
    """QEMU did not answer in time."""


class QmpClosedError(QmpError):
    """The connection ended."""


LINE_LIMIT = 768 * 1024
"""Of a line that a client takes, in bytes: what QEMU says is not to be trusted, and read as JSON it
takes up to 25 times as much. No command that is given here has a larger answer."""
READ_SIZE = 64 * 1024
"""The most bytes that a client reads at once."""

_LONGEST = 1000  # of what QEMU says of a fault, in characters


def _finite(text: str) -> float:
    """A number of JSON. Python also reads numbers that JSON does not have, and endless ones."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"not a finite number: {text}")
    return number


# json.loads() makes sure of the encoding each time.
_decode = json.JSONDecoder(parse_float=_finite, parse_constant=_finite).decode


@dataclass(frozen=True, slots=True)
class Greeting:
    """The first message of a monitor."""


class QmpEvent(NamedTuple):
    """Something that happened to the VM, such as ``SHUTDOWN``; *time_usec* is QEMU's wall clock,
    microseconds since the epoch, or None if it did not say."""

    name: str
    data: Mapping[str, Any]
    time_usec: int | None


class QmpReply(NamedTuple):
    """The answer to a command, or a *refusal*: QEMU's error class and its description."""

    value: Any = None
    id: Any = None
    refusal: tuple[str, str] | None = None


def message_of(line: bytes) -> Greeting | QmpEvent | QmpReply | None:
    """The message in one line, its end included or not; None if it is of a kind that is not known,
    which later versions of the protocol may send.

    :raises QmpProtocolError: if the line is not a JSON object, or lacks what its kind must have.
    """
    try:
        message = _decode(line.decode())
    except (ValueError, RecursionError) as error:
        raise QmpProtocolError(f"not JSON: {excerpt(line)}") from error
    if not isinstance(message, dict):
        raise QmpProtocolError(f"not a JSON object: {excerpt(line)}")
    if "event" in message:
        name, data = message["event"], message.get("data", {})
        if not isinstance(name, str) or not isinstance(data, dict):
            raise QmpProtocolError(f"not an event: {excerpt(line)}")
        return QmpEvent(name, data, _time_usec(message.get("timestamp")))
    if "return" in message:
        return QmpReply(message["return"], message.get("id"))
    if "error" in message:
        refusal = message["error"]
        if not isinstance(refusal, dict):
            raise QmpProtocolError(f"not an error: {excerpt(line)}")
        kind, text = (printable(str(refusal.get(key)))[:_LONGEST] for key in ("class", "desc"))
        return QmpReply(None, message.get("id"), (kind, text))
    return Greeting() if "QMP" in message else None


def command(
    name: str, arguments: Mapping[str, Any] | None = None, *, number: int | None = None
) -> bytes:
    """A command's line. Its *number* comes back in the answer, as its ``id``."""
    message: dict[str, Any] = {"execute": name}
    if arguments:
        message["arguments"] = arguments
    if number is not None:
        message["id"] = number
    return json.dumps(message).encode() + b"\r\n"


def excerpt(line: bytes, length: int = 60) -> str:
    """The start of a peer's line, fit for a log."""
    text = repr(line[:length])[1:]
    return text if len(line) <= length else f"{text}..."


def _time_usec(timestamp: Any) -> int | None:
    try:
        time_usec = int(timestamp["seconds"]) * 1_000_000 + int(timestamp["microseconds"])
    except (TypeError, KeyError, ValueError, OverflowError):
        return None
    # QEMU says -1 for both when it could not read its clock.
    return time_usec if 0 <= time_usec < 1 << 63 else None
