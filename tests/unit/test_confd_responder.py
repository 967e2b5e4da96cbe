"""Datagram in, datagram or silence out."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brine.common.config.configuration import Configuration
from brine.confd.answers import Answers
from brine.confd.protocol import (
    ErrorCode,
    Key,
    Refusal,
    RefusedError,
    Reply,
    Request,
    RequestType,
    Status,
    pack_request,
    seal,
    unpack_reply,
)
from brine.confd.responder import Responder
from lab.ganeti_config import ganeti_config, instance_ip, node_ip, node_name

KEY, OTHER, STRANGER = Key(b"a key\n"), Key(b"an older key\n"), Key(b"nobody's")
ANSWERS = Answers(Configuration.from_json(ganeti_config()))
RESPONDER = Responder(ANSWERS, (KEY, OTHER), max_clock_skew_s=300)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def request(kind: int, query: Any = None, *, key: Key = KEY, salt: str = "salt") -> bytes:
    """A request that is sent now."""
    return pack_request(Request(kind, query, salt), key, now_s=time.time())


def signed(message: str) -> bytes:
    """Any message, signed now."""
    return seal(message, str(int(time.time())), KEY)


@pytest.mark.parametrize("key", [KEY, OTHER])
def test_a_reply_is_signed_with_the_key_of_its_request(key: Key) -> None:
    reply, salt = unpack_reply(RESPONDER.respond(request(1, node_name(2), key=key)), (key,))
    assert (reply, salt) == (Reply(Status.OK, 1, 1), "salt")


@pytest.mark.parametrize(
    ("datagram", "refusal"),
    [
        (b"", Refusal.MAGIC),
        (b"plj1{}", Refusal.MAGIC),
        (b"plj0", Refusal.MALFORMED),
        (b"plj0{}", Refusal.MALFORMED),
        (b'plj0{"msg": "", "salt": 5, "hmac": ""}', Refusal.MALFORMED),
        (b'plj0{"msg": "", "salt": "", "hmac": ""}', Refusal.SIGNATURE),
        (request(0, key=STRANGER), Refusal.SIGNATURE),
        (pack_request(Request(0, None, ""), KEY, now_s=time.time() - 100_000), Refusal.TIME),
        (pack_request(Request(0, None, ""), KEY, now_s=time.time() + 100_000), Refusal.TIME),
        (seal("{}", "", KEY), Refusal.TIME),
        (seal("{}", "9" * 10000, KEY), Refusal.TIME),
    ],
)
def test_silence_has_a_reason(datagram: bytes, refusal: Refusal) -> None:
    with pytest.raises(RefusedError) as caught:
        RESPONDER.respond(datagram)
    assert caught.value.refusal is refusal


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_noise_is_refused(noise: bytes, with_magic: bool) -> None:
    with pytest.raises(RefusedError):
        RESPONDER.respond(b"plj0" + noise if with_magic else noise)


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_a_mutated_request_is_refused_unless_it_means_the_same(data: st.DataObject) -> None:
    good = request(1, node_name(2))
    place = data.draw(st.integers(0, len(good) - 1))
    length = data.draw(st.integers(0, 3))
    wrong = good[:place] + data.draw(st.binary(max_size=3)) + good[place + length :]
    try:
        answer = RESPONDER.respond(wrong)
    except RefusedError:
        return
    assert answer == RESPONDER.respond(good)  # blanks between JSON's tokens, say


@settings(max_examples=500, deadline=None)
@given(JSON)
def test_whatever_is_authentic_gets_a_signed_reply(message: Any) -> None:
    datagram = RESPONDER.respond(signed(json.dumps(message)))
    assert unpack_reply(datagram, (KEY,))[0].status == Status.ERROR


@settings(max_examples=1000, deadline=None)
@given(st.integers(-2, 13) | st.integers(99, 103) | JSON, JSON, st.text(max_size=50) | JSON)
def test_whatever_is_asked_gets_a_signed_reply(kind: Any, query: Any, salt: Any) -> None:
    message = {"protocol": 1, "type": kind, "query": query, "rsalt": salt}
    reply, its_salt = unpack_reply(RESPONDER.respond(signed(json.dumps(message))), (KEY,))
    assert reply.status in (Status.OK, Status.ERROR, Status.NOT_IMPLEMENTED)
    assert its_salt == (salt if isinstance(salt, str) else "")


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=200))
def test_any_salt_comes_back(salt: str) -> None:
    assert unpack_reply(RESPONDER.respond(request(0, salt=salt)), (KEY,))[1] == salt


def test_the_same_question_gets_the_same_answer_the_second_time() -> None:
    """The second time from what was kept: for the right type, key, link and IP."""
    responder = Responder(ANSWERS, (KEY,), max_clock_skew_s=300)
    questions: list[tuple[int, Any, Any]] = [
        (RequestType.NODE_ROLE, node_name(1), 0),
        (RequestType.NODE_ROLE, node_name(2), 1),
        (RequestType.NODE_IP_OF_INSTANCE_IP, {"1": instance_ip(1)}, node_ip(1)),
        (RequestType.NODE_IP_OF_INSTANCE_IP, {"1": instance_ip(2)}, node_ip(2)),
        (RequestType.NODE_IP_OF_INSTANCE_IP, {"1": instance_ip(2), "0": "br0"}, node_ip(2)),
        (RequestType.NODE_IP_OF_INSTANCE_IP, {"1": instance_ip(2), "0": "br1"}, 0),
        (RequestType.NODE_IP_OF_INSTANCE_IP, {"2": [instance_ip(2)]}, [[0, node_ip(2), 1]]),
        (RequestType.INSTANCE_IPS, "br1", []),
        (RequestType.NODE_IPS, "br1", [node_ip(number) for number in range(1, 4)]),
    ]
    for _ in range(2):
        for kind, query, answer in questions:
            assert unpack_reply(responder.respond(request(kind, query)), (KEY,))[0].answer == answer


def test_another_protocol_version_is_not_implemented() -> None:
    for _ in range(2):
        for version, status in ((1, Status.OK), (2, Status.NOT_IMPLEMENTED)):
            message = {"protocol": version, "type": 0, "query": None, "rsalt": "x"}
            reply, _salt = unpack_reply(RESPONDER.respond(signed(json.dumps(message))), (KEY,))
            assert reply.status == status


def test_true_is_not_one() -> None:
    """Python takes the one for the other, also as a key of what is kept."""
    responder = Responder(ANSWERS, (KEY,), max_clock_skew_s=300)
    assert unpack_reply(responder.respond(request(1, node_name(2))), (KEY,))[0].status == 0
    for kind in ("true", "1.0"):
        message = f'{{"protocol": 1, "type": {kind}, "query": "{node_name(2)}", "rsalt": ""}}'
        reply, _ = unpack_reply(responder.respond(signed(message)), (KEY,))
        assert reply == Reply(Status.ERROR, ErrorCode.ARGUMENT)


def test_without_a_configuration_everything_is_an_error() -> None:
    responder = Responder(None, (KEY,), max_clock_skew_s=300)
    for kind in RequestType:
        reply, _ = unpack_reply(responder.respond(request(kind)), (KEY,))
        assert reply == Reply(Status.ERROR, ErrorCode.INTERNAL)


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brine.confd.responder._CACHE_LIMIT", 10_000)
    responder = Responder(ANSWERS, (KEY,), max_clock_skew_s=300)
    for number in range(1000):
        responder.respond(request(RequestType.INSTANCE_IPS, f"link{number}"))
        responder.respond(request(RequestType.NODE_ROLE, f"nobody{number}"))
        responder.respond(request(number))
    assert len(responder._ready) < 100
    assert len(responder._errors) < 10
