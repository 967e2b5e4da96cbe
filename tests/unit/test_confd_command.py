"""`brine confd`: what it takes, prints and leaves with. Its network is in the component tests."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brine.common import cli, paths
from brine.common.entry_points import EntryPoint
from brine.confd.client import ConfdClient, Peer, PeerReply, Result, Silence
from brine.confd.protocol import ConfdReply, RequestType

MANUAL = (Path(__file__).parents[2] / "docs/man/brine-confd.1.rst").read_text()

Run = Callable[..., tuple[int, str, str]]

WEB = {"uuid": "6d0f", "name": "web1"}
UNKNOWN = ConfdReply(1, 0, 42)


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node that has brine-confd, a key, and no settings."""
    entry = EntryPoint("confd", "brine.confd.cli:COMMAND")
    monkeypatch.setattr(cli, "entry_points", lambda group: [entry] * (group == "brine.commands"))
    monkeypatch.setattr(paths, "ETC_DIR", tmp_path)
    monkeypatch.setattr(paths, "SSCONF_DIR", tmp_path)
    (tmp_path / "hmac.key").write_bytes(b"secret\n")
    (tmp_path / "hmac.key").chmod(0o600)
    (tmp_path / "confd.toml").write_text(
        f'key_file = "{tmp_path}/hmac.key"\nprevious_key_file = "{tmp_path}/hmac.key.previous"\n'
        f'config_file = "{tmp_path}/config.data"\nport = 7\n'
    )
    return tmp_path


class Asked:
    """A stand-in for a client: it notes the questions, and has the replies."""

    def __init__(self, *replies: ConfdReply, silent: int = 0) -> None:
        self.replies = replies
        self.silent = silent

    def query(self, client: Any, kind: int, query: Any, **options: Any) -> Result:
        self.peers = client.peers
        self.asked = kind, query
        self.options = options
        peers = [Peer(f"192.0.2.{n}") for n in range(1, len(self.replies) + self.silent + 1)]
        came = [PeerReply(*pair, 0.001) for pair in zip(peers, self.replies, strict=False)]
        silences = dict.fromkeys(peers[len(self.replies) :], Silence.SILENT)
        return Result(kind, query, tuple(came), silences, Counter())


@pytest.fixture
def brine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``brine confd``, which gets the replies of *asked*: status, output, errors."""

    def run(*arguments: str, asked: Asked | None = None) -> tuple[int, str, str]:
        if asked:
            monkeypatch.setattr(ConfdClient, "query", lambda *a, **k: asked.query(*a, **k))
        try:
            status = cli.main(["confd", *arguments])
        except SystemExit as left:
            status = int(str(left.code))
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def query(brine: Run) -> Run:
    """Runs ``brine confd query`` to 192.0.2.9."""
    return lambda asked, *rest: brine("query", *rest, "--peer", "192.0.2.9", asked=asked)


IP = "node-ip-of-instance-ip"


@pytest.mark.parametrize(
    ("arguments", "asked", "answer", "printed"),
    [
        (["ping"], (0, None), 3000000, "3000000\n"),
        (["node-role", "n"], (1, "n"), 3, "drained\n"),
        ([IP, "10.0.0.1"], (2, {"1": "10.0.0.1"}), "192.0.2.7", "192.0.2.7\n"),
        ([IP, "2001:DB8::0:1"], (2, {"1": "2001:db8::1"}), "192.0.2.7", "192.0.2.7\n"),
        ([IP, "10.0.0.1", "--link", "br1"], (2, {"1": "10.0.0.1", "0": "br1"}), "x", "x\n"),
        (
            [IP, "10.0.0.1", "10.0.0.2"],
            (2, {"2": ["10.0.0.1", "10.0.0.2"]}),
            [[0, "192.0.2.7", 42], [1, 0, 42]],
            "10.0.0.1 192.0.2.7\n10.0.0.2 unknown\n",
        ),
        (["cluster-master"], (3, None), "node1", "node1\n"),
        (
            ["cluster-master", "--field", "master-node-ip", "--field", "name"],
            (3, {"3": [2, 0]}),
            ["192.0.2.1", "node1"],
            "192.0.2.1\nnode1\n",
        ),
        (["node-ips"], (4, None), ["192.0.2.1", "192.0.2.2"], "192.0.2.1\n192.0.2.2\n"),
        (["master-candidate-ips"], (5, None), [], ""),
        (["instance-ips", "--link", "br1"], (6, "br1"), ["10.0.0.1"], "10.0.0.1\n"),
        (
            ["node-drbd", "n"],
            (7, "n"),
            [["n", 0, "web1", "disk/0", "primary", "m"]],
            "n 0 web1 disk/0 primary m\n",
        ),
        (["node-instances", "n"], (8, "n"), [[WEB], [WEB]], "primary web1\nsecondary web1\n"),
        (["instance-disks", "i"], (9, "i"), [{"size": 1}], '{"size": 1}\n'),
        (["config", "/a"], (10, "/a"), "aa:00", "aa:00\n"),
        (["config", "/a"], (10, "/a"), None, "null\n"),
        (["config", "/a"], (10, "/a"), {"b": [1]}, '{\n  "b": [\n    1\n  ]\n}\n'),
        (["config", "/a"], (10, "/a"), "\x1b[2J\ud800", "\\x1b[2J\\ud800\n"),
        (["data-collectors"], (11, None), {}, "{}\n"),
        (["offline-nodes"], (100, None), ["n"], "n\n"),
        (["instances"], (101, None), ["i"], "i\n"),
        (["instances", "--after", ""], (101, ""), ["i"], "i\n"),
        (["instance-primary-node", "i"], (102, "i"), "n", "n\n"),
    ],
)
def test_a_question_is_asked_and_its_answer_printed(
    arguments: list[str],
    asked: tuple[int, Any],
    answer: Any,
    printed: str,
    query: Run,
) -> None:
    asking = Asked(ConfdReply(0, answer, 42))
    assert query(asking, *arguments) == (0, printed, "")
    assert asking.asked == asked


@pytest.mark.parametrize(
    ("arguments", "reply", "said"),
    [
        (["node-role", "n"], UNKNOWN, "there is no node n"),
        (["instance-disks", "{n}"], UNKNOWN, "there is no instance {n}"),
        ([IP, "10.0.0.1"], UNKNOWN, "no instance has the IP 10.0.0.1 on the default link"),
        ([IP, "10.0.0.1", "--link", "b"], UNKNOWN, "no instance has the IP 10.0.0.1 on b"),
        (["config", "/x"], ConfdReply(1, 2, 42), "nothing in the configuration is at '/x'"),
        (["instances"], ConfdReply(1, 3, 42), "does not fit a datagram"),
        (["node-role", "n"], ConfdReply(1, "no such\nnode"), "192.0.2.1 says: no such node"),
        (["node-role", "n"], ConfdReply(1, "x\x1b[2J"), "192.0.2.1 says: x\\x1b[2J"),
        (["node-role", "n"], ConfdReply(1, 77), "unknown error: 77"),
        (["node-role", "n"], ConfdReply(1, {"odd": True}), "unknown error"),
        (["node-role", "n"], ConfdReply(1, 2, 42), "this question's argument"),
        (["cluster-master"], UNKNOWN, "there is no such entry"),
        (["node-role", "n"], ConfdReply(1, 1), "192.0.2.1 can't answer at present"),
        (["offline-nodes"], ConfdReply(2, 2, 42), "192.0.2.1 does not know this question"),
    ],
)
def test_an_error_is_one_line(
    arguments: list[str], reply: ConfdReply, said: str, query: Run
) -> None:
    status, out, err = query(Asked(reply), *arguments)
    assert (status, out) == (1, "")
    error, *hint = err.splitlines()
    assert error.startswith("brine: error: ")
    assert said in error
    assert len(hint) <= 1


def test_an_ip_may_be_on_another_link(query: Run) -> None:
    hint = "brine: hint: where it is on another link: --link LINK"
    assert query(Asked(UNKNOWN), IP, "10.0.0.1")[2].splitlines()[1:] == [hint]
    assert "hint" not in query(Asked(UNKNOWN), IP, "10.0.0.1", "--link", "b")[2]


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        (Asked(ConfdReply(0, 1, 42), ConfdReply(0, 1, 42)), 0),
        (Asked(ConfdReply(0, 1, 42), ConfdReply(0, 1, 42), silent=1), 0),
        (Asked(ConfdReply(0, 1, 42), ConfdReply(0, 2, 41)), 0),
        (Asked(UNKNOWN, UNKNOWN), 1),
        (Asked(UNKNOWN, ConfdReply(0, 1, 41)), 1),
        (Asked(ConfdReply(1, 1), ConfdReply(1, 1)), 1),
        (Asked(silent=3), 3),
        (Asked(ConfdReply(0, 1, 42), silent=1), 4),
        (Asked(ConfdReply(0, 1, 42), ConfdReply(1, 1)), 4),
        (Asked(UNKNOWN, silent=1), 4),
    ],
)
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_exit_statuses(asked: Asked, status: int, options: list[str], query: Run) -> None:
    assert query(asked, "node-role", "n", *options)[0] == status


def test_doubts_are_told_beside_the_answer(query: Run) -> None:
    replies = [
        ConfdReply(0, 1, 42),
        ConfdReply(0, 2, 42),
        ConfdReply(0, 1, 41),
        ConfdReply(1, 0, 42),
        ConfdReply(1, 1),
    ]
    _, out, err = query(Asked(*replies, silent=4), "node-role", "n")
    assert out == "candidate\n"
    assert err.splitlines() == [
        "brine: warning: 192.0.2.3 has an older configuration: serial 41, not 42",
        "brine: warning: 192.0.2.2 disagrees with 192.0.2.1: it says 2",
        "brine: warning: 192.0.2.4 disagrees with 192.0.2.1: it says unknown entry",
        "brine: warning: 192.0.2.5 can't answer: internal",
        "brine: warning: 4 of 5 needed answers came, it may be an old one; "
        + "; ".join(f"192.0.2.{n} silent" for n in (6, 7, 8, 9)),
    ]


def test_json_is_one_object_with_the_documented_keys(query: Run) -> None:
    asked = Asked(ConfdReply(0, 2, 41), ConfdReply(0, 1, 42), silent=1)
    shown = json.loads(query(asked, "node-role", "n", "--json")[1])
    section = MANUAL.split("JSON\n====")[1].split("**ping --json**")[0]
    documented = re.findall(
        r"\*\*(\w+)\*\*", "".join(re.findall(r"^\*\*.+$", section, re.MULTILINE))
    )
    assert sorted(shown) == sorted(documented)
    both = {"round_trip_ms": 1.0, "status": 0}
    assert shown == {
        "answer": 1,
        "serial": 42,
        "status": 0,
        "replies": [
            {"peer": "192.0.2.1", "answer": 2, "serial": 41, "standing": "stale", **both},
            {"peer": "192.0.2.2", "answer": 1, "serial": 42, "standing": "newest", **both},
        ],
        "silent": [{"peer": "192.0.2.3", "reason": "silent"}],
        "asked": 3,
        "needed": 2,
        "enough": True,
        "disagreement": False,
        "dropped": {"signature": 0, "salt": 0, "malformed": 0, "duplicate": 0},
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["query"], "required: TYPE"),
        (["query", "node-rule", "n"], "node-rule"),
        (["query", "node-role"], "required: NODE"),
        (["query", "node-role", "a", "b"], "unrecognized arguments: b"),
        (["query", "node-role", "a", "--link", "b"], "--link"),
        (["query", "cluster-master", "--field", "colour"], "colour"),
        (["query", IP, "10.0.0.256"], "not an IP address: '10.0.0.256'"),
        (["query", "config", "cluster/tags"], "not a JSON pointer: 'cluster/tags'"),
        (["query", "ping", "--port", "0"], "--port"),
        (["query", "ping", "--timeout", "0"], "--timeout"),
        (["query", "ping", "--timeout", "nan"], "--timeout"),
        (["query", "ping", "--coverage", "0"], "--coverage"),
        (["new-key", "--dry-run"], "--dry-run"),
        (["new-key", "--replace", "--forget-old"], "--forget-old"),
    ],
)
def test_a_wrong_command_line_leaves_with_2(arguments: list[str], said: str, brine: Run) -> None:
    status, _, errors = brine(*arguments)
    assert status == 2
    assert errors.startswith("brine")
    assert said in errors.splitlines()[0]


def test_options_reach_the_client(query: Run) -> None:
    asked = Asked(ConfdReply(0, 1, 42))
    options = ["--peer", "[2001:db8::1]:99", "--port", "9", "--timeout", "1.5", "--coverage", "2"]
    query(asked, "node-ips", "--json", *options)
    assert asked.peers == (Peer("2001:db8::1", 99), Peer("192.0.2.9", 9))
    assert asked.options == {"coverage": 2, "patient": True, "timeout_s": 1.5}


def test_who_names_nobody_asks_the_candidates_at_the_port_of_the_settings(
    installed: Path, brine: Run
) -> None:
    (installed / "ssconf_master_candidates_ips").write_text("192.0.2.1\n192.0.2.2\n")
    asked = Asked(ConfdReply(0, [], 42))
    assert brine("query", "node-ips", asked=asked)[0] == 0
    assert asked.peers == (Peer("192.0.2.1", 7), Peer("192.0.2.2", 7))
    assert asked.options == {"coverage": None, "patient": False, "timeout_s": 10.0}
    brine("ping", asked=asked)
    assert asked.options["patient"]
    assert asked.options["coverage"] >= 2


@pytest.mark.parametrize(
    ("remove", "said"), [("hmac.key", "no such key"), ("ssconf", "no master candidates")]
)
def test_what_a_node_lacks_is_told(installed: Path, remove: str, said: str, brine: Run) -> None:
    if remove == "hmac.key":
        (installed / "hmac.key").unlink()
        (installed / "ssconf_master_candidates_ips").write_text("192.0.2.1\n")
    status, _, errors = brine("query", "node-ips")
    error, hint = errors.splitlines()
    assert status == 1
    assert said in error
    assert hint.startswith("brine: hint: ")


def test_a_new_key_is_made_once_and_replaced_when_asked_to(installed: Path, brine: Run) -> None:
    key = installed / "hmac.key"
    key.unlink()
    status, output, _ = brine("new-key")
    made, then = output.splitlines()
    assert (status, made) == (0, f"made: {key}")
    assert "copy it to every node" in then
    secret = key.read_bytes()

    status, _, errors = brine("new-key")
    assert status == 1
    assert "--replace" in errors
    assert key.read_bytes() == secret

    status, *said = brine("new-key", "--replace")
    assert status == 0
    assert (installed / "hmac.key.previous").read_bytes() == secret
    assert key.read_bytes() != secret
    assert secret.decode().strip() not in "".join(said)


def test_the_old_key_is_forgotten_when_no_node_needs_it(installed: Path, brine: Run) -> None:
    current, previous = installed / "hmac.key", installed / "hmac.key.previous"
    assert brine("new-key", "--replace")[0] == 0
    secret = current.read_bytes()
    status, output, _ = brine("new-key", "--forget-old")
    removed, then = output.splitlines()
    assert (status, removed) == (0, f"removed: {previous}")
    assert "systemctl reload-or-restart brine-confd" in then
    assert not previous.exists()
    assert current.read_bytes() == secret
    told = f"there is no previous key: {previous}\n"
    assert brine("new-key", "--forget-old") == (0, told, "")
    assert brine("new-key", "--replace")[0] == 0


def test_the_only_key_that_is_left_is_not_forgotten(installed: Path, brine: Run) -> None:
    (installed / "hmac.key").rename(installed / "hmac.key.previous")
    status, _, errors = brine("new-key", "--forget-old")
    assert status == 1
    assert "there is no such key" in errors
    assert (installed / "hmac.key.previous").exists()


def test_a_key_is_checked(tmp_path: Path, brine: Run) -> None:
    key = tmp_path / "key"
    key.write_text("00112233445566778899aabbccddeeff\n")
    status, output, _ = brine("check-key", "--json", str(key))
    assert (status, json.loads(output)) == (0, {"file": str(key), "bytes": 33})
    key.write_text("short\n")
    status, _, errors = brine("check-key", str(key))
    assert status == 0
    assert "has 6 bytes only" in errors
    key.write_text(" \n")
    status, _, errors = brine("check-key", str(key))
    assert status == 1
    assert f"brine: error: {key}: is blank\n" in errors


def test_help_lists_every_type_with_a_line(brine: Run) -> None:
    status, out, _ = brine("query", "--help")
    assert status == 0
    for kind in RequestType:
        name = kind.name.lower().replace("_", "-")
        assert re.search(rf"^    {name}\s+\w+", out, re.MULTILINE)
        assert f"**{name}**" in MANUAL
