"""The wire protocol: fixed bytes, and the manual's own examples."""

from __future__ import annotations

import hmac
import json
import re
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    RequestType,
    Role,
    encode_reply,
    open_signed,
    pack_request,
    seal,
    unpack_reply,
)

MANUAL = (Path(__file__).parents[2] / "docs/man/confd-protocol.7.rst").read_text()

SECRET = b"secret\n"
KEY = HmacKey(SECRET)
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


def test_a_reply_of_the_seeds_shape_is_read() -> None:
    message = '{"status": 0,\n "answer": 0,\n "serial": 42,\n "protocol": 1}\n'
    assert unpack_reply(seal(message, SALT, KEY), (KEY,)) == (ConfdReply(0, 0, 42), SALT)


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


@pytest.mark.parametrize(
    ("datagram", "reply"),
    [(GANETI_ANSWER, ConfdReply(0, "192.0.2.3", 1)), (GANETI_ERROR, ConfdReply(1, GANETI_TEXT))],
)
def test_a_reply_of_ganetis_daemon_is_read(datagram: bytes, reply: ConfdReply) -> None:
    assert unpack_reply(datagram, (HmacKey(b"secretkey\n"),)) == (reply, SALT)


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
