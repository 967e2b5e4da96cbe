"""The external pillar of Salt's side: what each node gets, and that nothing stops a minion."""

from __future__ import annotations

import base64
import importlib.util
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PILLAR = Path(__file__).parents[2] / "salt/states/_pillar/brine.py"
NODE = "node1.example.com"

Say = Callable[..., None]


@pytest.fixture
def pillar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The external pillar, as Salt loads it, on a master without keys."""
    spec = importlib.util.spec_from_file_location("brine_pillar", PILLAR)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "_KEYS", str(tmp_path / "keys.json"))
    vars(module).update(__opts__={"pki_dir": str(tmp_path / "pki"), "cachedir": str(tmp_path)})
    return module


@pytest.fixture
def redistributed(tmp_path: Path) -> Path:
    """The note of the last redistribution, without which the next goes to all nodes."""
    return written(tmp_path / "brine/given", b"7")


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Has the command ``brine`` print something."""
    command = tmp_path / "bin/brine"
    command.parent.mkdir()
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")

    def said(stdout: str, stderr: str = "", status: int = 0) -> None:
        (tmp_path / "stdout").write_text(stdout)
        (tmp_path / "stderr").write_text(stderr)
        wanted = '[ "$1 $2 $4" = "config export-node --json" ] || exit 9'
        text = f"cat {tmp_path}/stdout; cat {tmp_path}/stderr >&2; exit {status}"
        command.write_text(f"#!/bin/sh\n{wanted}\n{text}\n")
        command.chmod(0o755)

    return said


def exported(*files: Path, node: str = NODE) -> str:
    """The output of ``brine config export-node``."""
    return json.dumps(
        {
            "serial": 7,
            "node": node,
            "candidate": True,
            "instances": ["web1"],
            "configuration": '{"serial_no":7}\n',
            "ssconf": {"ssconf_cluster_name": "prod"},
            "files": [str(file) for file in files],
        }
    )


def written(file: Path, data: bytes, mode: int = 0o600) -> Path:
    """A file of the master's."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    file.chmod(mode)
    return file


def test_a_node_gets_its_own_and_the_files_with_their_owners(
    pillar: ModuleType, say: Say, tmp_path: Path
) -> None:
    password = written(tmp_path / "vnc/web1", b"\xff secret\n", 0o640)
    certificate = written(tmp_path / "x509/sub/server.pem", b"PEM")
    users = written(tmp_path / "users", b"")
    say(exported(password, certificate.parents[1]))
    got = pillar.ext_pillar(NODE, {}, files=[str(users)])["brine"]
    files = got["distributed"].pop("files")
    given = {**json.loads(exported()), "unread": []}
    assert got == {"distributed": {key: one for key, one in given.items() if key != "files"}}
    assert files.keys() == {str(password), str(certificate), str(users)}
    assert base64.b64decode(files[str(password)]["contents"]) == b"\xff secret\n"
    assert [files[str(one)]["mode"] for one in (password, users)] == ["0640", "0600"]
    assert files[str(password)]["user"] == password.owner()
    assert files[str(password)]["group"] == password.group()


@pytest.mark.parametrize(
    ("node", "minion", "others", "gets"),
    [
        (NODE, NODE, ["node1.customer.org", "node1"], True),
        (NODE, "node1", ["node2.example.com"], True),
        (NODE, "NODE1", ["NODE1"], True),
        (NODE, "NODE1.example.com", ["NODE1.example.com"], True),
        ("Node1.Example.com", NODE, [NODE], True),
        (NODE, "NODE1.example.com", [NODE, "NODE1.example.com"], False),
        (NODE, "NODE1", ["NODE1", "NODE1.Example.com"], False),
        (NODE, "node1", [NODE], False),
        ("node1", "node1.customer.org", [], True),
        ("node1", "node1.customer.org", ["node1", "node1.example.com"], False),
        ("node1", "node1.customer.org", ["node1.example.com"], None),
        ("node1", "node1", ["node1.customer.org"], True),
        # Of which brine knows the node, too.
        (NODE, "f54bcc82-234c-4a84-ac91-f833715dd9ee", [], False),
        (NODE, "f54bcc82-234c-4a84-ac91-f833715dd9ee.customer.org", [], False),
    ],
)
def test_one_minion_is_the_node(
    pillar: ModuleType,
    say: Say,
    tmp_path: Path,
    node: str,
    minion: str,
    others: list[str],
    gets: bool | None,
) -> None:
    """None: there is no telling, and the minion's states are to fail."""
    for one in [minion, *others]:
        written(tmp_path / "pki/minions" / one, b"its key")
    say(exported(node=node))
    got = pillar.ext_pillar(minion, {}).get("brine", {}).get("distributed", {})
    assert ("serial" in got, "fault" in got) == (gets is True, gets is None)


def test_what_can_not_be_read_is_left_out_and_logged(
    pillar: ModuleType, say: Say, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(tmp_path / "pipe")
    large = written(tmp_path / "large", b"x" * (1024 * 1024 + 1))
    sound = written(tmp_path / "sound", b"x")
    missing, pipe = tmp_path / "missing", tmp_path / "pipe"
    say(exported(missing, pipe, large, sound))
    with caplog.at_level(logging.ERROR):
        got = pillar.ext_pillar(NODE, {})["brine"]["distributed"]
    assert list(got["files"]) == [str(sound)]
    # A node that has them from before keeps them.
    assert got["unread"] == [str(large), str(missing), str(pipe)]
    assert len(caplog.messages) == 3


def test_specs_of_the_nodes_own_pillar_count_too(
    pillar: ModuleType, say: Say, tmp_path: Path
) -> None:
    password = written(tmp_path / "db1", b"secret")
    specs: dict[str, Any] = {
        "db1": {"vnc_password_file": str(password)},
        "db2": {"vnc_password_file": str(tmp_path / "managed-by-hand")},
        "db3": None,
        "db4": {"vnc_password_file": 7},
    }
    say(exported())
    got = pillar.ext_pillar(NODE, {"brine": {"instance": {"instances": specs}}})
    assert list(got["brine"]["distributed"]["files"]) == [str(password)]
    # The node may have it of an earlier time, when the master had it.
    assert got["brine"]["distributed"]["unread"] == [str(tmp_path / "managed-by-hand")]


@pytest.mark.parametrize("brine", [None, "text", {"instance": "text"}, {"confd": 5}])
def test_a_pillar_that_is_wrong_stops_nothing(pillar: ModuleType, say: Say, brine: Any) -> None:
    say(exported())
    assert pillar.ext_pillar(NODE, {"brine": brine})["brine"]["distributed"]["serial"] == 7


@pytest.mark.parametrize(
    ("options", "is_merged"),
    [
        ({}, True),
        ({"pillar_source_merging_strategy": "smart", "renderer": "jinja|yaml"}, True),
        ({"pillar_source_merging_strategy": "recurse", "renderer": "jinja|yamlex"}, True),
        ({"pillar_source_merging_strategy": "smart", "renderer": "jinja|yamlex"}, False),
        ({"pillar_source_merging_strategy": "overwrite"}, False),
        ({"pillar_source_merging_strategy": "list"}, False),
        ({"pillar_source_merging_strategy": "aggregate"}, False),
    ],
)
def test_a_strategy_that_keeps_one_of_two_pillars_is_told_in_place_of_ours(
    pillar: ModuleType, say: Say, options: dict[str, str], is_merged: bool
) -> None:
    say(exported())
    vars(pillar)["__opts__"] |= options
    got = pillar.ext_pillar(NODE, {"brine": {"kvmd": {}}})
    assert list(got) == ["brine" if is_merged else "brine_fault"]
    if not is_merged:
        assert f"strategy: {options['pillar_source_merging_strategy']}" in got["brine_fault"]
        assert "brine" in pillar.ext_pillar(NODE, {"other": 1})  # nothing to merge
        vars(pillar)["__opts__"]["ext_pillar_first"] = True
        assert "brine_fault" in pillar.ext_pillar(NODE, {})
    say("", "brine: error: there is no node 'x'\n", 1)
    assert pillar.ext_pillar(NODE, {"brine": {}}) == {}


def test_keys_that_the_runner_keeps_are_given(
    pillar: ModuleType, say: Say, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    say(exported())
    written(tmp_path / "keys.json", json.dumps({"key": "new", "previous_key": "old"}).encode())
    got = pillar.ext_pillar(NODE, {})["brine"]
    assert got["confd"] == {"key": "new", "previous_key": "old"}
    got = pillar.ext_pillar(NODE, {"brine": {"confd": {"key": "declared"}}})["brine"]
    assert "confd" not in got
    assert "declared" not in caplog.text


@pytest.mark.parametrize(
    ("said", "is_given"),
    [
        ("there is no node 'x'\nbrine: hint: known are: y\n", True),
        ("config.data: there is no configuration\nbrine: hint: brine config apply FILE\n", False),
    ],
)
def test_what_is_no_node_gets_nothing(
    pillar: ModuleType,
    say: Say,
    caplog: pytest.LogCaptureFixture,
    redistributed: Path,
    said: str,
    is_given: bool,
) -> None:
    say("", f"brine: error: {said}", 1)
    with caplog.at_level(logging.INFO):
        assert pillar.ext_pillar(NODE, {}) == {}
    assert caplog.messages == []
    assert redistributed.exists() is is_given


def test_without_brine_the_last_redistribution_is_forgotten(
    pillar: ModuleType, monkeypatch: pytest.MonkeyPatch, redistributed: Path
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for _ in range(2):
        assert pillar.ext_pillar(NODE, {}) == {}
        assert not redistributed.exists()


@pytest.mark.parametrize(
    ("said", "logged"),
    [
        (
            ("", "brine: error: config.data: is damaged\n", 1),
            "brine: error: config.data: is damaged",
        ),
        (("secret", "", 0), "Expecting value: line 1 column 1 (char 0)"),
        (("[]", "", 0), ""),
        (("", "", 1), "it failed"),
    ],
)
def test_a_node_is_told_that_what_it_is_to_have_is_not_known(
    pillar: ModuleType,
    say: Say,
    caplog: pytest.LogCaptureFixture,
    said: tuple[str, str, int],
    logged: str,
) -> None:
    say(*said)
    assert list(pillar.ext_pillar(NODE, {})["brine"]["distributed"]) == ["fault"]
    (message,) = caplog.messages
    assert message.startswith(f"brine: no pillar for {NODE}: {logged}")
    assert "secret" not in message
    assert "\n" not in message


@pytest.mark.parametrize("files", ["/etc/brine/users", ["/"], ["//."], ["users"], [7], {"a": 1}])
def test_files_that_nobody_can_mean_are_refused(
    pillar: ModuleType, say: Say, caplog: pytest.LogCaptureFixture, files: Any
) -> None:
    say(exported())
    got = pillar.ext_pillar(NODE, {}, files=files)
    assert list(got["brine"]["distributed"]) == ["fault"]
    assert "give brine {} or {files: [/PATH, ...]}" in caplog.text


def test_files_need_their_key(pillar: ModuleType, say: Say) -> None:
    say(exported())
    got = pillar.ext_pillar(NODE, {}, "/etc/brine/users")
    assert list(got["brine"]["distributed"]) == ["fault"]


def test_a_folder_of_too_many_files_is_refused(
    pillar: ModuleType, say: Say, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1001):
        (tmp_path / str(number)).touch()
    say(exported())
    got = pillar.ext_pillar(NODE, {}, files=[str(tmp_path)])
    assert list(got["brine"]["distributed"]) == ["fault"]
    assert caplog.messages == [f"brine: no pillar for {NODE}: there are more than 1000 files"]


def test_a_master_without_brine_gives_nothing(
    pillar: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert pillar.ext_pillar(NODE, {}) == {}
