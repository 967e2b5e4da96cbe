"""Single QMP messages: good ones, odd ones, and anything at all."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brine.common.qmp.wire import (
    Greeting,
    QmpEvent,
    QmpProtocolError,
    QmpReply,
    command,
    excerpt,
    message_of,
)

SHUTDOWN = (
    b'{"timestamp": {"seconds": 1700000000, "microseconds": 250000}, "event": "SHUTDOWN",'
    b' "data": {"guest": true, "reason": "guest-shutdown"}}\r\n'
)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"QMP": {"version": {"qemu": {"major": 7}}, "capabilities": ["oob"]}}', Greeting()),
        (b'{"QMP": null}', Greeting()),
        (
            SHUTDOWN,
            QmpEvent(
                "SHUTDOWN", {"guest": True, "reason": "guest-shutdown"}, 1_700_000_000_250_000
            ),
        ),
        (b'{"event": "STOP"}', QmpEvent("STOP", {}, None)),
        (
            b'{"event": "STOP", "timestamp": {"seconds": -1, "microseconds": -1}}',
            QmpEvent("STOP", {}, None),
        ),
        (b'{"event": "STOP", "timestamp": {"seconds": "x"}}', QmpEvent("STOP", {}, None)),
        (b'{"event": "STOP", "timestamp": 5}', QmpEvent("STOP", {}, None)),
        (b'{"return": {}, "id": 7}', QmpReply({}, 7)),
        (b'{"return": [1]}\n', QmpReply([1], None)),
        (
            b'{"error": {"class": "GenericError", "desc": "no"}, "id": 1}',
            QmpReply(None, 1, ("GenericError", "no")),
        ),
        (b'{"something": "new"}', None),
    ],
)
def test_messages_are_recognised(line: bytes, expected: object) -> None:
    assert message_of(line) == expected


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"hello",
        b"[]",
        b"1",
        b"\xff\xfe",
        b'{"event": 1}',
        b'{"event": "X", "data": []}',
        b'{"error": "text"}',
        b"[" * 60_000,
        b'{"a":' * 10_000,
        b'{"return": 1e999}',
        b'{"return": [NaN]}',
        b'{"return": -Infinity}',
    ],
)
def test_what_is_no_message_is_refused(line: bytes) -> None:
    with pytest.raises(QmpProtocolError) as caught:
        message_of(line)
    assert "\n" not in str(caught.value)


@given(st.binary())
def test_no_line_does_worse_than_be_refused(line: bytes) -> None:
    with contextlib.suppress(QmpProtocolError):
        message_of(line)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
keys = st.sampled_from(["QMP", "event", "return", "error", "timestamp", "data", "id"])


@given(st.dictionaries(keys, json_values))
def test_no_json_does_worse_than_be_refused(message: dict[str, object]) -> None:
    with contextlib.suppress(QmpProtocolError):
        message_of(json.dumps(message).encode())


def test_a_command_is_one_line() -> None:
    line = command("netdev_add", {"id": "a\nb"}, number=3)
    assert line.endswith(b"}\r\n")
    assert line.count(b"\n") == 1
    assert json.loads(line) == {"execute": "netdev_add", "arguments": {"id": "a\nb"}, "id": 3}
    assert json.loads(command("quit")) == {"execute": "quit"}


def test_an_excerpt_is_short_and_printable() -> None:
    assert excerpt(b"ab\n\x00") == r"'ab\n\x00'"
    assert excerpt(b"x" * 100) == f"'{'x' * 60}'..."
