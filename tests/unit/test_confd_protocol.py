"""Datagrams: fixed bytes, the manual's own examples, and a datagram in, datagram or silence out."""

from __future__ import annotations

import hmac
import json
import re
import textwrap
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brine.confd.answers import Answers
from brine.confd.protocol import (
    LARGEST_DATAGRAM,
    MAGIC,
    MAX_CLOCK_SKEW_S,
    PORT,
    ConfdReply,
    DatagramRefusal,
    ErrorCode,
    HmacKey,
    RefusedError,
    ReplyStatus,
    RequestType,
    Role,
    encode_reply,
    open_request,
    open_signed,
    pack_request,
    seal,
    unpack_reply,
)
from brine.confd.server import LargeAnswers, Responder
from brine.config.model import Configuration
from lab.ganeti_config import ganeti_config, instance_ip, node_ip, node_name

SECRET = b"secret\n"
KEY, OTHER, STRANGER = HmacKey(SECRET), HmacKey(b"an older key\n"), HmacKey(b"nobody's")
MANUAL = (Path(__file__).parents[2] / "docs/man/confd-protocol.7.rst").read_text()

TIME_S = 1249637704.9
SALT = "9aa6ce92-8336-11de-af38-001d093e835f"


def manual_examples() -> list[str]:
    """The literal blocks of the worked example, their lines joined as the manual says."""
    section = MANUAL.split("WORKED EXAMPLE\n")[1].split("A CLIENT IN A FEW LINES")[0]
    blocks = re.findall(r"::\n\n((?:    .*\n)+)", section)
    return [textwrap.dedent(block).rstrip("\n").replace("\n", "") for block in blocks]


def test_the_manuals_worked_bytes_are_what_is_sent() -> None:
    message, signed, signature, datagram, reply, reply_signed, openssl = manual_examples()
    assert (
        pack_request(
            RequestType.NODE_IP_OF_INSTANCE_IP, {"1": "198.51.100.7"}, SALT, KEY, now_s=TIME_S
        )
        == datagram.encode()
    )
    assert len(datagram) == 210
    opened = open_signed(datagram.encode(), (KEY,))
    assert (opened.message, opened.salt) == (message, "1249637704")
    assert signed == "1249637704" + message
    assert KEY.sign(signed.encode()) == signature

    answer = ConfdReply(0, "192.0.2.11", 42)
    assert unpack_reply(reply.encode(), (KEY,)) == (answer, SALT)
    assert len(reply) == 179
    assert encode_reply(answer) == json.loads(reply[4:])["msg"]
    assert reply_signed == SALT + encode_reply(answer)

    assert openssl.endswith(KEY.sign(b"hello"))
    assert f"hexkey:{SECRET.hex()}" in openssl


def test_the_manuals_numbers_are_the_codes() -> None:
    section = MANUAL.split("REQUEST TYPES\n")[1].split("CLIENTS\n")[0]
    listed = {
        int(n): name for n, name in re.findall(r"^\*\*(\d+)\*\* (.+)$", section, re.MULTILINE)
    }
    assert listed == {one.value: one.name.lower().replace("_", " ") for one in RequestType} | {
        2: "node IP of instance IP",
        4: "node IPs",
        5: "master candidate IPs",
        6: "instance IPs",
        7: "node DRBD",
    }
    for role in Role:
        assert re.search(rf"\*\*{role.value}\*\* (master )?{role.name.lower()}", section)
    errors = MANUAL.split("Errors are:\n")[1].split("A reply comes")[0]
    assert [int(n) for n in re.findall(r"^\*\*(\d)\*\*$", errors, re.MULTILINE)] == list(ErrorCode)
    for number in (PORT, LARGEST_DATAGRAM, MAX_CLOCK_SKEW_S):
        assert f" {number}" in MANUAL


def test_a_request_of_the_seeds_shape_is_read() -> None:
    """The 2.1 design's example: a newline after the message, keys in another order."""
    message = f'{{"type": 1, "rsalt": "{SALT}", "protocol": 1, "query": "node1.example.com"}}\n'
    signature = hmac.new(SECRET, f"1249637704{message}".encode(), "sha1").hexdigest()
    pretty = json.dumps({"msg": message, "salt": "1249637704", "hmac": signature}, indent=2)
    opened = open_signed(b"plj0" + pretty.encode(), (KEY,))
    assert json.loads(opened.message)["query"] == "node1.example.com"
    assert opened.salt == "1249637704"


GANETI_ANSWER = (
    rb'plj0{"hmac":"8d6bd6a5d92fa66903c6113c0303a93d4bf7586c",'
    rb'"msg":"{\"protocol\":1,\"status\":0,\"answer\":\"192.0.2.3\",\"serial\":1}",'
    rb'"salt":"9aa6ce92-8336-11de-af38-001d093e835f"}'
)
GANETI_ERROR = (
    rb'plj0{"hmac":"c9feccd489cfe5342ab8e2ff5d6ff3aecbb7dfbf",'
    rb'"msg":"{\"protocol\":1,\"status\":1,\"answer\":\"Instance not found in the configuration: '
    rb'OpPrereqError \\\"Instance name nope not found\\\" ECodeNoEnt\",\"serial\":0}",'
    rb'"salt":"9aa6ce92-8336-11de-af38-001d093e835f"}'
)
"""As Ganeti's daemon 3.0.2 sent them."""
GANETI_TEXT = (
    "Instance not found in the configuration: "
    'OpPrereqError "Instance name nope not found" ECodeNoEnt'
)


GANETIS_KEY = HmacKey(b"secretkey\n")
SEEDS_REPLY = seal(
    '{"status": 0,\n "answer": 0,\n "serial": 42,\n "protocol": 1}\n', SALT, GANETIS_KEY
)


@pytest.mark.parametrize(
    ("datagram", "reply"),
    [
        (GANETI_ANSWER, ConfdReply(0, "192.0.2.3", 1)),
        (GANETI_ERROR, ConfdReply(1, GANETI_TEXT)),
        (SEEDS_REPLY, ConfdReply(0, 0, 42)),
    ],
)
def test_replies_of_ganetis_daemon_and_of_the_seed_are_read(
    datagram: bytes, reply: ConfdReply
) -> None:
    assert unpack_reply(datagram, (GANETIS_KEY,)) == (reply, SALT)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000])
@given(data=st.binary(max_size=200))
def test_signatures_are_hmac_sha1(length: int, data: bytes) -> None:
    secret = bytes(range(256)) * 4
    assert (
        HmacKey(secret[:length]).sign(data) == hmac.new(secret[:length], data, "sha1").hexdigest()
    )


REPLY = seal(encode_reply(ConfdReply(0, "192.0.2.11", 42)), SALT, KEY)


@pytest.mark.parametrize(
    ("datagram", "refusal"),
    [
        (b"", DatagramRefusal.MAGIC),
        (REPLY[1:], DatagramRefusal.MAGIC),
        (b"plj1" + REPLY[4:], DatagramRefusal.MAGIC),
        (MAGIC, DatagramRefusal.MALFORMED),
        (REPLY[:-1], DatagramRefusal.MALFORMED),
        (REPLY + b"x", DatagramRefusal.MALFORMED),
        (MAGIC + b"[" * 50_000, DatagramRefusal.MALFORMED),
        (MAGIC + b"\xff", DatagramRefusal.MALFORMED),
        (MAGIC + b'["msg", "salt", "hmac"]', DatagramRefusal.MALFORMED),
        (MAGIC + b'{"msg": 1, "salt": "", "hmac": ""}', DatagramRefusal.MALFORMED),
        (MAGIC + b'{"msg": "\\ud800", "salt": "", "hmac": ""}', DatagramRefusal.MALFORMED),
        (MAGIC + '{"msg": "", "salt": "", "hmac": "é"}'.encode(), DatagramRefusal.MALFORMED),
        (REPLY.replace(b"192", b"193"), DatagramRefusal.SIGNATURE),
        (REPLY.replace(b"9aa6", b"9aa7"), DatagramRefusal.SIGNATURE),
        (
            seal("{}", SALT, HmacKey(b"secret")),
            DatagramRefusal.SIGNATURE,
        ),  # a newline is a part of the key
        (seal("no JSON", SALT, KEY), DatagramRefusal.MALFORMED),
        (seal("[]", SALT, KEY), DatagramRefusal.MALFORMED),
        (seal('{"status": 0, "serial": 1}', SALT, KEY), DatagramRefusal.MALFORMED),
        (seal('{"status": true, "answer": 0, "serial": 1}', SALT, KEY), DatagramRefusal.MALFORMED),
        (seal('{"status": 0, "answer": 0, "serial": "1"}', SALT, KEY), DatagramRefusal.MALFORMED),
    ],
)
def test_what_is_no_authentic_reply_is_refused(datagram: bytes, refusal: DatagramRefusal) -> None:
    with pytest.raises(RefusedError) as told:
        unpack_reply(datagram, (KEY,))
    assert told.value.refusal is refusal


# What a worker answers.

ANSWERS = Answers(Configuration.from_json(ganeti_config()))


def responder_of(
    answers: Answers | None, *keys: HmacKey, given: LargeAnswers | None = None
) -> Responder:
    """A worker's responder."""
    return Responder(answers, keys, max_clock_skew_s=300, given=given or LargeAnswers())


RESPONDER = responder_of(ANSWERS, KEY, OTHER)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def request(
    kind: int, query: Any = None, *, key: HmacKey = KEY, salt: str = "salt", age_s: float = 0
) -> bytes:
    """A request that was sent some time ago."""
    return pack_request(kind, query, salt, key, now_s=time.time() - age_s)


def signed(message: str) -> bytes:
    """Any message, signed now."""
    return seal(message, str(int(time.time())), KEY)


@pytest.mark.parametrize("key", [KEY, OTHER])
def test_a_reply_is_signed_with_the_key_of_its_request(key: HmacKey) -> None:
    reply, salt = unpack_reply(RESPONDER.respond(request(1, node_name(2), key=key)), (key,))
    assert (reply, salt) == (ConfdReply(ReplyStatus.OK, 1, 1), "salt")


def test_a_stranger_and_a_wrong_time_meet_silence() -> None:
    now = int(time.time())
    arabic = "".join(chr(ord(digit) - 48 + 0x0660) for digit in str(now))
    unusual = ("", "now", "-1", f"{now}.0", f" {now}", "1" * 5000)
    for salt in (*unusual, f"{now - 320}", f"{now + 320}"):
        with pytest.raises(RefusedError) as caught:
            RESPONDER.respond(seal("{}", salt, KEY))
        assert caught.value.refusal is DatagramRefusal.TIME
    assert RESPONDER.respond(request(0, age_s=280))
    with pytest.raises(RefusedError):
        RESPONDER.respond(seal("{}", arabic, KEY))
    with pytest.raises(RefusedError) as caught:
        RESPONDER.respond(request(0, key=STRANGER))
    assert caught.value.refusal is DatagramRefusal.SIGNATURE


@pytest.mark.parametrize(
    "message", ["[]", "5", "{", '{"rsalt": 5}', '{"rsalt": "\\ud800"}', "[" * 20000]
)
def test_an_authentic_message_that_is_no_request_gets_a_signed_error(message: str) -> None:
    reply = unpack_reply(RESPONDER.respond(signed(message)), (KEY,))
    assert reply == (ConfdReply(ReplyStatus.ERROR, ErrorCode.ARGUMENT), "")


@settings(max_examples=1000, deadline=None)
@given(st.integers(-2, 13) | st.integers(99, 103) | JSON, JSON, st.text(max_size=50) | JSON)
def test_whatever_is_asked_gets_a_signed_reply(kind: Any, query: Any, salt: Any) -> None:
    """And a message that is no request, too."""
    datagram = RESPONDER.respond(signed(json.dumps([kind, query, salt])))
    assert unpack_reply(datagram, (KEY,))[0].status == ReplyStatus.ERROR
    message = {"protocol": 1, "type": kind, "query": query, "rsalt": salt}
    reply, its_salt = unpack_reply(RESPONDER.respond(signed(json.dumps(message))), (KEY,))
    assert reply.status in (ReplyStatus.OK, ReplyStatus.ERROR, ReplyStatus.NOT_IMPLEMENTED)
    assert its_salt == (salt if isinstance(salt, str) else "")


def test_the_same_question_gets_the_same_answer_the_second_time() -> None:
    """The second time from what was kept: for the right type, key, link and IP."""
    responder = responder_of(ANSWERS, KEY)
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
        for version, status in ((1, ReplyStatus.OK), (2, ReplyStatus.NOT_IMPLEMENTED)):
            message = {"protocol": version, "type": 0, "query": None, "rsalt": "x"}
            reply, _salt = unpack_reply(RESPONDER.respond(signed(json.dumps(message))), (KEY,))
            assert reply.status == status


def test_true_is_not_one() -> None:
    """Python takes the one for the other, also as a key of what is kept."""
    responder = responder_of(ANSWERS, KEY)
    assert unpack_reply(responder.respond(request(1, node_name(2))), (KEY,))[0].status == 0
    for kind in ("true", "1.0"):
        message = f'{{"protocol": 1, "type": {kind}, "query": "{node_name(2)}", "rsalt": ""}}'
        reply, _ = unpack_reply(responder.respond(signed(message)), (KEY,))
        assert reply == ConfdReply(ReplyStatus.ERROR, ErrorCode.ARGUMENT)


def test_without_a_configuration_everything_is_an_error() -> None:
    responder = responder_of(None, KEY)
    for kind in RequestType:
        reply, _ = unpack_reply(responder.respond(request(kind)), (KEY,))
        assert reply == ConfdReply(ReplyStatus.ERROR, ErrorCode.INTERNAL)


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brine.confd.server._CACHE_LIMIT", 10_000)
    responder = responder_of(ANSWERS, KEY)
    tracemalloc.start()
    try:
        for number in range(1000):
            responder.respond(request(RequestType.INSTANCE_IPS, f"link{number}"))
            responder.respond(request(RequestType.NODE_ROLE, f"nobody{number}"))
            responder.respond(request(number))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 100_000


# What strangers can make it do.


def forged(message: bytes) -> bytes:
    """A datagram of now, by somebody without the key."""
    return b'plj0{"msg": "%b", "salt": "%d", "hmac": "%b"}' % (message, time.time(), b"0" * 40)


LARGE = 60_000


@pytest.mark.parametrize(
    ("datagram", "refusal"),
    [
        (forged(rb"[{}]," * (LARGE // 5)), DatagramRefusal.SIGNATURE),
        (forged(rb"\"," * (LARGE // 3)), DatagramRefusal.SIGNATURE),
        (forged(rb"\\" * (LARGE // 2)), DatagramRefusal.SIGNATURE),
        (forged(rb"\u0041" * (LARGE // 6)), DatagramRefusal.SIGNATURE),
        (forged(b'{"a":[' * (LARGE // 6)), DatagramRefusal.SIGNATURE),
        (b"plj0[" + b"[{}]," * (LARGE // 5) + b"0]", DatagramRefusal.MALFORMED),
        (b'plj0{"msg": [' + b"[{}]," * (LARGE // 5) + b'0], "salt": "", "hmac": ""}', None),
        (b'plj0{"salt": ' + b'{"":' * (LARGE // 4), DatagramRefusal.MALFORMED),
        (b'plj0{"more": [' + b"[{}]," * 700 + b'0], "msg": "", "salt": "", "hmac": ""}', None),
        (b"plj0{" + b'"x": "y", ' * 1500 + b'"msg": "", "salt": "", "hmac": ""}', None),
        (b"plj0" + b" " * LARGE + b"{}", DatagramRefusal.MALFORMED),
        (b'plj0{"msg": "' + b"x" * 65_000, DatagramRefusal.MALFORMED),
    ],
)
def test_no_parser_sees_what_a_stranger_sends(
    datagram: bytes, refusal: DatagramRefusal | None
) -> None:
    """A parser would make thousands of objects of these; what is made is but the text once more."""
    with pytest.raises(RefusedError):
        RESPONDER.respond(datagram)
    tracemalloc.start()
    try:
        with pytest.raises(RefusedError) as told:
            RESPONDER.respond(datagram)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert told.value.refusal is (refusal or DatagramRefusal.MALFORMED)
    assert most < 4 * len(datagram) + 20_000


@pytest.mark.parametrize(
    "message",
    [
        json.dumps({"2": [f"10.0.{n // 250}.{n % 250}" for n in range(3000)]}),
        json.dumps({"2": [f"10.0.{n // 250}.{n % 250}" for n in range(3000)]}) + "\n",
        json.dumps({"0": "br\u00e9", "2": [f"10.0.0.{n % 250}" for n in range(700)]}),
        json.dumps("br\u00e9" + "x" * 20_000),
        json.dumps("\u00e9\U0001f40b\u00e9" + "x" * 20_000, ensure_ascii=False),
        json.dumps("x" * 50_000),
        json.dumps(["a/b"] * 3000, separators=(",", ":")),
    ],
)
@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("order", [("msg", "salt", "hmac"), ("hmac", "salt", "msg")])
def test_a_large_request_is_read(message: str, ascii_only: bool, order: tuple[str, ...]) -> None:
    salt = str(int(time.time()))
    parts = {"msg": message, "salt": salt, "hmac": KEY.sign((salt + message).encode())}
    ordered = {name: parts[name] for name in order}
    for indent in (None, 2):
        text = json.dumps(ordered, ensure_ascii=ascii_only, indent=indent)
        opened = open_request(b"plj0" + text.encode(), (OTHER, KEY))
        assert (opened.message, opened.salt, opened.key) == (message, salt, KEY)


def test_the_answer_to_a_long_list_of_addresses() -> None:
    ips = [instance_ip(number) for number in range(1, 5)] * 500
    reply, _ = unpack_reply(RESPONDER.respond(request(2, {"2": ips})), (KEY,))
    assert [answer for _, answer, _ in reply.answer] == [node_ip(n) for n in (1, 2, 3, 1)] * 500


def test_a_large_answer_is_given_once_a_datagram() -> None:
    large = Answers(Configuration.from_json(ganeti_config(nodes=60)))
    given = LargeAnswers()
    workers = [responder_of(large, KEY, given=given) for _ in range(2)]
    recorded = request(RequestType.NODE_IPS)
    assert len(workers[0].respond(recorded)) > 3 * len(recorded)
    for worker in workers:
        with pytest.raises(RefusedError) as told:
            worker.respond(recorded)
        assert told.value.refusal is DatagramRefusal.REPEATED
    with pytest.raises(RefusedError):  # the same, written another way
        workers[0].respond(recorded.replace(b'", "', b'" , "'))
    workers[0].respond(request(RequestType.NODE_IPS, salt="another"))
    point = request(RequestType.NODE_ROLE, node_name(2))
    assert workers[0].respond(point) == workers[0].respond(point) == workers[1].respond(point)


def test_the_memory_of_large_answers_is_bounded_and_long() -> None:
    given = LargeAnswers()
    signatures = [KEY.sign(b"%d" % number) for number in range(200_000)]
    assert all(given.add(one) for one in signatures)
    recent = signatures[-20_000:]
    assert not any(given.add(one) for one in recent)
