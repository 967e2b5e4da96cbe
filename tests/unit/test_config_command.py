"""``brine config`` and ``brine uidpool``, as a person uses them."""

from __future__ import annotations

import errno
import grp
import io
import json
import os
import pwd
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest

from brine.common import cli, own_node, paths
from brine.common.entry_points import EntryPoint
from brine.common.locks import locked
from brine.config import nodes, ssconf
from brine.config.model import Configuration
from brine.config.ssconf import Ssconf
from brine.instance.from_config import spec_of
from lab.ganeti_config import ganeti_config, instance_name, node_name, uuid_of

Run = Callable[..., tuple[int, str, str]]

POOL = "/cluster/uid_pool"


@pytest.fixture
def brine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Runs ``brine`` on a node of its own: status, output, errors."""
    nouns = [
        EntryPoint("config", "brine.config.cli:COMMAND"),
        EntryPoint("uidpool", "brine.config.cli:UIDPOOL_COMMAND"),
    ]
    monkeypatch.setattr(cli, "entry_points", lambda group: nouns * (group == "brine.commands"))
    monkeypatch.setattr(paths, "CONFIG_FILE", tmp_path / "config.data")
    monkeypatch.setattr(paths, "CONFIG_LOCK", tmp_path / "config.lock")
    monkeypatch.setattr(paths, "SSCONF_DIR", tmp_path / "ssconf")
    monkeypatch.setattr(paths, "NODE_FILE", tmp_path / "node.json")
    monkeypatch.setattr(pwd, "getpwall", list)

    def run(*arguments: str, stdin: object = None) -> tuple[int, str, str]:
        data = io.BytesIO(json.dumps(stdin).encode())
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=data))
        try:
            status = cli.main(arguments)
        except SystemExit as end:
            status = int(str(end.code))
        output = capsys.readouterr()
        return status, output.out, output.err

    return run


@pytest.fixture
def filled(brine: Run) -> Run:
    """The same, on a master whose pool is 4000-4099."""
    assert brine("config", "apply", "-", stdin=ganeti_config())[0] == 0
    return brine


def test_apply_says_what_it_did(filled: Run) -> None:
    change = {"instances": {instance_name(1): {"admin_state": "down"}}}
    line = f'~ /instances/{instance_name(1)}/admin_state: "up" -> "down"\n'
    assert filled("config", "apply", "-", "--dry-run", stdin=change) == (
        0,
        f"{line}would apply: 1 change\n",
        "",
    )
    applied = f"{line}applied: serial 42 -> 43, 1 change\n"
    assert filled("config", "apply", "-", stdin=change) == (0, applied, "")
    assert filled("config", "apply", "-", stdin=change) == (0, "no changes: serial 43\n", "")


def test_apply_for_programs(filled: Run) -> None:
    status, output, _ = filled(
        "config", "apply", "-", "--json", stdin={"instances": {instance_name(1): None}}
    )
    result = json.loads(output)
    assert (status, result["old_serial"], result["new_serial"]) == (0, 42, 43)
    removed = {"change": "removed", "pointer": ANY, "old": None, "new": None, "note": ""}
    assert result["changes"] == [
        removed | {"pointer": f"/instances/{instance_name(1)}"},
        removed | {"note": f"disk 0 of {instance_name(1)}"},
    ]


def test_mistakes_are_one_line_each_and_change_nothing(filled: Run) -> None:
    status, output, errors = filled(
        "config", "apply", "-", stdin={"node": {}, "instance": 5, "clust": {}}
    )
    assert (status, output) == (1, "")
    assert errors.splitlines()[0] == "brine: error: /node: is not known; did you mean nodes?"
    assert errors.splitlines()[1].startswith("  /clust: is not known; did you mean cluster?")
    assert filled("config", "show", "/serial_no")[1] == "42\n"


def test_keys_with_line_ends_are_told_in_one_line(filled: Run, tmp_path: Path) -> None:
    given = {"cluster": {"a\nb": 1, "data_collectors": {"\n\x1b[31m": []}}, "nodes": {"n\n1": {}}}
    _, _, error = filled("config", "apply", "-", stdin=given)
    lines = error.splitlines()
    assert lines[0] == r"brine: error: /cluster/a\nb: is not known"
    assert lines[1] == r"  /cluster/data_collectors/\n\x1b[31m: must be an object, but is a list"
    assert [line for line in lines[2:-1] if not line.startswith(r"  /nodes/n\n1/")] == []
    data = json.loads((tmp_path / "config.data").read_text())
    data["cluster"] |= {"x\ny": 1}
    file = tmp_path / "other.data"
    file.write_text(json.dumps(data))
    assert r"/cluster/x\ny: is not known" in filled("config", "verify", str(file))[1].splitlines()
    assert r"+ /cluster/x\ny: 1" in filled("config", "diff", "42", str(file))[1].splitlines()
    data["cluster"]["data_collectors"] = {"\n": []}
    file.write_text(json.dumps(data))
    status, _, error = filled("config", "check-copy", str(file))
    assert (status, error.splitlines()[0]) == (
        1,
        rf"brine: error: {file}: /cluster/data_collectors/\n: must be an object, but is a list",
    )


def test_show_takes_names(filled: Run) -> None:
    assert filled("config", "show", "/instances/instance1/nics/0/ip") == (0, '"10.0.0.1"\n', "")
    assert (
        filled("config", "show", f"/instances/{uuid_of('instance', 1)}/name")[1]
        == f'"{instance_name(1)}"\n'
    )
    assert json.loads(filled("config", "show")[1]) == ganeti_config()
    assert filled("config", "show", "/cluster/uid_pol")[2] == (
        "brine: error: there is no /cluster/uid_pol\nbrine: hint: did you mean uid_pool?\n"
    )
    status, _, errors = filled("config", "show", "cluster/tags")
    assert status == 1
    assert errors.splitlines() == [
        "brine: error: cluster/tags is no JSON pointer",
        "brine: hint: a pointer begins with a slash: /cluster/tags",
    ]
    assert "~ is written ~0" in filled("config", "show", "/cluster/a~b")[2]


def test_a_copy_may_come_by_standard_input(filled: Run) -> None:
    data = ganeti_config()
    assert filled("config", "check-copy", "-", stdin=data)[0] == 0
    data["cluster"]["serial_no"] -= 1
    status, _, error = filled("config", "check-copy", "-", stdin=data)
    assert status == 1
    assert error.startswith("brine: error: standard input: serial ")
    assert " is older than " in error
    status, _, error = filled("config", "check-copy", "-", stdin=5)
    assert (status, error.startswith("brine: error: standard input: ")) == (1, True)


def test_a_copy_must_be_sound_and_not_older(filled: Run, brine: Run, tmp_path: Path) -> None:
    current, copy = tmp_path / "config.data", tmp_path / "copy"
    data = json.loads(current.read_text())
    serial = data["cluster"]["serial_no"]

    def check(text: str) -> tuple[int, str, str]:
        copy.write_text(text)
        return brine("config", "check-copy", "--json", str(copy))

    status, output, _ = check(current.read_text())
    assert (status, json.loads(output)) == (0, {"serial": serial, "current_serial": serial})
    for damaged in ("", current.read_text()[:-20], "{}"):
        status, output, error = check(damaged)
        assert (status, output) == (1, "")
        assert error.startswith(f"brine: error: {copy}: ")
    data["cluster"]["serial_no"] = serial - 1
    status, output, error = check(json.dumps(data))
    assert (status, output) == (1, "")
    assert f"{copy}: serial {serial - 1} is older than {serial}, which {current} has" in error
    current.write_text("{")
    assert check(json.dumps(data))[0] == 0
    current.unlink()
    assert check(json.dumps(data))[0] == 0


def test_verify_ends_with_one_if_there_are_faults(filled: Run, tmp_path: Path) -> None:
    assert filled("config", "verify") == (0, "no faults\n", "")
    data = ganeti_config()
    data["cluster"]["master_node"] = "x"
    other = tmp_path / "other"
    other.write_text(json.dumps(data))
    status, output, _ = filled("config", "verify", str(other))
    assert (status, output) == (1, "/cluster/master_node: there is no node 'x'\n1 fault\n")
    assert json.loads(filled("config", "verify", str(other), "--json")[1])[0]["kind"] == "dangling"


def test_an_older_file_is_told_and_gone_on_from(filled: Run, tmp_path: Path) -> None:
    config = tmp_path / "config.data"
    older = config.read_bytes()
    for number in range(3):
        filled("config", "apply", "-", stdin={"cluster": {"tags": [f"{number}"]}})
    config.unlink()
    config.write_bytes(older)

    fault = "/serial_no: 42 is older than kept version 44"
    assert filled("config", "verify") == (1, f"{fault}\n1 fault\n", "")
    assert json.loads(filled("config", "verify", "--json")[1])[0]["kind"] == "older"

    told = "serial 42, which is older than kept version 44: serial numbers go on"
    status, would, _ = filled("config", "apply", "-", "--dry-run", stdin={})
    assert status == 0
    assert would.splitlines()[0] == "~ /serial_no: 42 -> 46"
    assert f"note: {config} has {told}" in would
    rehearsed = filled("config", "restore", "44", "--dry-run")[1]
    assert "~ /serial_no: 42 -> 46\n" in rehearsed
    assert "note: " in rehearsed
    assert rehearsed.endswith("would restore: the content of serial 44, as 46\n")
    assert filled("config", "show", "/serial_no")[1] == "42\n"

    done = json.loads(filled("config", "apply", "-", "--json", stdin={})[1])
    assert (done["old_serial"], done["new_serial"]) == (42, 46)
    assert [change["pointer"] for change in done["changes"]] == ["/serial_no"]
    (note,) = done["notes"]
    assert note.startswith(f"{config} had {told}")
    (aside,) = tmp_path.glob("config.data.older-*")
    assert note.endswith(f"that file is kept as {aside}")
    assert aside.read_bytes() == older
    assert filled("config", "verify")[0] == 0
    assert filled("config", "apply", "-", stdin={}) == (0, "no changes: serial 46\n", "")


def test_apply_does_not_begin_anew_where_a_configuration_was_lost(
    filled: Run, tmp_path: Path
) -> None:
    filled("config", "apply", "-", stdin={"cluster": {"tags": ["blue"]}})
    (tmp_path / "config.data").unlink()
    for options in ([], ["--dry-run"]):
        status, output, errors = filled("config", "apply", "-", *options, stdin=ganeti_config())
        assert (status, output) == (1, "")
        assert "there is no configuration, but versions of one are kept" in errors
        assert "brine config restore 42" in errors
        assert f"move {tmp_path / 'config.versions'} away" in errors
    assert "brine config restore 42" in filled("config", "show")[2]
    assert not (tmp_path / "config.data").exists()
    (tmp_path / "config.versions").rename(tmp_path / "away")
    assert filled("config", "apply", "-", stdin=ganeti_config())[0] == 0


def test_a_change_is_seen_and_undone(filled: Run) -> None:
    assert filled("config", "diff")[0] == 1
    filled("config", "apply", "-", stdin={"cluster": {"tags": ["blue"]}})
    line = '~ /cluster/tags: [] -> ["blue"]\n'
    assert filled("config", "diff") == (0, f"{line}serial 42 -> 43: 1 change\n", "")
    assert [
        version["serial"] for version in json.loads(filled("config", "versions", "--json")[1])
    ] == [42]
    status, output, _ = filled("config", "restore", "42")
    assert (status, output.splitlines()[-1]) == (0, "restored: the content of serial 42, as 44")
    assert filled("config", "diff", "42", "44")[1] == "serial 42 -> 44: no changes\n"
    assert filled("config", "show", "/cluster/tags")[1] == "[]\n"


def test_a_restore_is_rehearsed_and_told_to_programs(filled: Run) -> None:
    filled("config", "apply", "-", stdin={"cluster": {"tags": ["blue"]}})
    line = '~ /cluster/tags: ["blue"] -> []\n'
    would = f"{line}would restore: the content of serial 42, as 44\n"
    assert filled("config", "restore", "42", "--dry-run") == (0, would, "")
    rehearsed = json.loads(filled("config", "restore", "42", "--dry-run", "--json")[1])
    assert (rehearsed["dry_run"], rehearsed["new_serial"]) == (True, None)
    assert filled("config", "show", "/serial_no")[1] == "43\n"
    done = json.loads(filled("config", "restore", "42", "--json")[1])
    assert done == rehearsed | {"dry_run": False, "new_serial": 44}
    assert [change["pointer"] for change in done["changes"]] == ["/cluster/tags"]


def test_export_says_what_it_wrote(filled: Run, tmp_path: Path) -> None:
    folder = tmp_path / "ssconf"
    assert "would write" in filled("config", "export-ssconf", str(folder), "--dry-run")[1]
    would = json.loads(filled("config", "export-ssconf", "--json", str(folder), "--dry-run")[1])
    assert (would["dry_run"], would["removed"]) == (True, [])
    assert "master_node" in would["written"]
    assert not folder.exists()
    assert "+ ssconf_master_node\n" in filled("config", "export-ssconf", str(folder))[1]
    assert filled("config", "export-ssconf", str(folder))[1] == "no changes\n"


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_export_makes_one_folder_only(filled: Run, tmp_path: Path, options: list[str]) -> None:
    folder = tmp_path / "mistyped" / "ssconf"
    status, output, errors = filled("config", "export-ssconf", str(folder), *options)
    assert (status, output) == (1, "")
    assert f"{folder}: there is no folder {folder.parent}" in errors
    assert f"mkdir --parents {folder.parent}" in errors
    assert not folder.parent.exists()


def test_a_file_that_is_not_json_is_named(brine: Run, tmp_path: Path) -> None:
    file = tmp_path / "input"
    file.write_text("cluster: {}\n")
    errors = brine("config", "apply", str(file))[2]
    assert "input: not valid JSON at byte 0" in errors
    assert "the state brine.config" in errors
    file.write_text('{"cluster": {"tags": ["a"], "tags": ["b"]}}')
    errors = brine("config", "apply", str(file))[2]
    assert "input: not usable JSON: the key 'tags' is twice in one object" in errors
    assert "there is no configuration" in brine("config", "show")[2]


@pytest.mark.parametrize(
    "arguments", [["apply"], ["restore", "x"], ["--lock-timeout", "-1", "apply", "-"], ["sow"]]
)
def test_a_wrong_command_line_ends_with_two(brine: Run, arguments: list[str]) -> None:
    assert brine("config", *arguments)[0] == 2


def test_extra_files_are_a_line_each(brine: Run, tmp_path: Path) -> None:
    web = instance_name(1)
    data = ganeti_config()
    data["cluster"]["hvparams"]["kvm"]["vnc_x509_path"] = "/etc/pki/vnc"
    data["instances"][uuid_of("instance", 1)]["hvparams"] = {"vnc_password_file": "/etc/brine/web"}
    (tmp_path / "config.data").write_text(json.dumps(data))
    assert brine("config", "extra-files") == (0, "/etc/brine/web\n/etc/pki/vnc\n", "")
    one, other = json.loads(brine("config", "extra-files", "--json")[1])
    assert one == {
        "path": "/etc/brine/web",
        "used_by": [
            {
                "pointer": f"/instances/{web}/hvparams/vnc_password_file",
                "instance": web,
                "hypervisor": "kvm",
                "parameter": "vnc_password_file",
            }
        ],
    }
    assert other["used_by"][0]["instance"] is None


# What a node gets, and what it tells.

PRIVATE = "private, and none of others' business"


@pytest.fixture
def private(brine: Run, tmp_path: Path) -> Run:
    """A cluster with secrets; instance 1 is on node 1, and instance 2 on node 2, no candidate."""
    data = ganeti_config()
    data["cluster"]["osparams_private_cluster"] = {"noop": {"token": PRIVATE}}
    data["cluster"]["hvparams"]["kvm"]["vnc_x509_path"] = "/etc/pki/vnc"
    data["cluster"]["os_hvp"] = {"other": {"kvm": {"vnc_password_file": "/etc/brine/other"}}}
    data["nodes"][uuid_of("node", 2)]["master_candidate"] = False
    for number in (1, 2):
        instance = data["instances"][uuid_of("instance", number)]
        instance["osparams_private"] = {"token": PRIVATE}
        instance["hvparams"] = {"vnc_password_file": f"/etc/brine/web{number}"}
        instance["serial_no"] = 6 + number
    (tmp_path / "config.data").write_text(json.dumps(data))
    return brine


def test_a_candidate_gets_the_file_itself(private: Run, tmp_path: Path) -> None:
    status, output, _ = private("config", "export-node", node_name(1), "--json")
    exported = json.loads(output)
    assert (status, exported["serial"], exported["candidate"]) == (0, 42, True)
    assert exported["configuration"] == (tmp_path / "config.data").read_text()
    assert exported["files"] == ["/etc/brine/web1", "/etc/pki/vnc"]
    private("config", "export-ssconf", str(tmp_path / "ssconf"))
    written = {file.name: file.read_text() for file in (tmp_path / "ssconf").iterdir()}
    assert written == {
        name: f"{value}\n" if value else "" for name, value in exported["ssconf"].items()
    }


def test_another_node_gets_what_its_specs_are_made_of(private: Run, tmp_path: Path) -> None:
    exported = json.loads(private("config", "export-node", "node2")[1])
    assert (exported["node"], exported["candidate"]) == (node_name(2), False)
    assert exported["instances"] == [instance_name(2)]
    assert exported["files"] == ["/etc/brine/web2", "/etc/pki/vnc"]
    text = exported["configuration"]
    for unwanted in (PRIVATE, "/etc/brine/web1", "/etc/brine/other", uuid_of("disk", 1)):
        assert unwanted not in text
    whole = Configuration.parse((tmp_path / "config.data").read_bytes())
    part = Configuration.parse(text.encode())
    assert (part.serial_no, part.cluster.name) == (42, "cluster.example.com")
    key = uuid_of("instance", 2)
    assert spec_of(part, part.instances[key]) == spec_of(whole, whole.instances[key])
    theirs = part.instances[uuid_of("instance", 1)].to_json()
    assert {key for key, value in theirs.items() if value} >= {"uuid", "name", "primary_node"}
    # Which says how new that is.
    assert theirs["serial_no"] == 7
    assert "nics" not in theirs


@pytest.mark.parametrize("reference", ["node3", "node3.example.com", "short.example.com"])
def test_a_node_is_known_by_its_short_name(private: Run, tmp_path: Path, reference: str) -> None:
    if reference.startswith("short"):
        data = json.loads((tmp_path / "config.data").read_text())
        data["nodes"][uuid_of("node", 3)]["name"] = "short"
        (tmp_path / "config.data").write_text(json.dumps(data))
    assert json.loads(private("config", "export-node", reference)[1])["candidate"] is True


def test_a_node_that_there_is_not_gets_nothing(private: Run) -> None:
    for verb in (["export-node", "node9"], ["record", "--node", "node9", "-"]):
        status, output, error = private("config", *verb, stdin=[])
        assert (status, output) == (1, "")
        assert error.splitlines()[0] == "brine: error: there is no node 'node9'"


def event(number: int, admin_state: str = "down", source: str = "user", **other: Any) -> Any:
    """An event of node 1's outbox."""
    return {
        "id": f"{1_700_000_000_000_000_000 + number:020}-0123abcd",
        "time": 1_700_000_000.0,
        "kind": "admin-state",
        "instance": uuid_of("instance", number),
        "name": instance_name(number),
        "data": {"admin_state": admin_state, "source": source},
    } | other


def recorded(brine: Run, *events: Any, node: str = "node1") -> tuple[int, int, list[Any]]:
    """Record events: the old and new serial numbers, and what became of each event: whether it was
    recorded, and changed something, and why not."""
    status, output, _ = brine("config", "record", "--node", node, "-", "--json", stdin=[*events])
    assert status == 0
    told = json.loads(output)
    rows = [(one["recorded"], one["changed"], one["reason"]) for one in told["events"]]
    assert [one["id"] for one in told["events"] if one["recorded"]] == [
        one["id"] for one, (is_recorded, *_) in zip(events, rows, strict=True) if is_recorded
    ]
    return told["old_serial"], told["new_serial"], rows


def states(brine: Run) -> list[tuple[str, str]]:
    """admin_state and source of all instances."""
    instances = json.loads(brine("config", "show", "/instances")[1])
    return [
        (one["admin_state"], one["admin_state_source"])
        for one in (instances[uuid_of("instance", number)] for number in range(1, 5))
    ]


def test_events_are_recorded_in_one_write_and_once(filled: Run) -> None:
    both = event(1), event(4)
    assert recorded(filled, *both) == (42, 43, [(True, True, ""), (True, True, "")])
    assert states(filled) == [("down", "user"), ("up", "admin"), ("up", "admin"), ("down", "user")]
    assert recorded(filled, *both) == (43, 43, [(True, False, ""), (True, False, "")])
    # What pillar says of an instance that its user shut down does not start it.
    filled("config", "apply", "-", stdin={"instances": {instance_name(1): {"admin_state": "up"}}})
    assert recorded(filled, event(4, "up", "admin"))[2] == [(True, True, "")]
    assert states(filled)[::3] == [("down", "user"), ("up", "admin")]


def test_the_latest_event_counts(filled: Run) -> None:
    later = f"{1_800_000_000_000_000_000:020}-0123abcd"
    recorded(filled, event(1, "up", "admin", id=later), event(1))
    assert states(filled)[0] == ("up", "admin")


def test_a_user_does_not_undo_offline(filled: Run) -> None:
    change = {"instances": {instance_name(1): {"admin_state": "offline"}}}
    filled("config", "apply", "-", stdin=change)
    reason = f"{instance_name(1)} is offline in the configuration, and stays so"
    assert recorded(filled, event(1)) == (43, 43, [(True, False, reason)])


HOSTILE: list[tuple[Any, str]] = [
    (event(2), f"/instance: {instance_name(2)} is not an instance of {node_name(1)}"),
    (event(1, instance="x" * 9999), "/instance: there is no instance 'xxx"),
    (event(1, instance={}), "/instance: must be a string, but is an object"),
    (event(1, kind="reboot\nnow"), "/kind: must be admin-state, but is 'reboot\\nnow'"),
    (event(1, id="../../x"), "/id: '../../x' is no id of an event"),
    (event(1, id=7), "/id: must be a string, but is 7"),
    (event(1, time=10**400), "/time: is too large a number"),
    ({**event(1), "more\n" * 9999: 1}, "/more\\nmore"),
    (event(1, "running"), "/data/admin_state: must be one of up, down, offline, but is 'running'"),
    (event(1, "up"), "/data/admin_state: a user can only shut an instance down, but this is up"),
    (event(1, source="root"), "/data/source: must be one of admin, user"),
    (event(1, data={"admin_state": ["down"], "source": "user"}), "must be a string, but is a list"),
    (event(1, data={}), "/data: has no admin_state"),
    (event(1, data=None), "/data: must be an object, but is null"),
    ("text", "must be an object, but is 'text'"),
    ([[]], "must be an object, but is a list"),
]


@pytest.mark.parametrize(("hostile", "reason"), HOSTILE)
def test_a_hostile_event_is_refused_and_no_other(filled: Run, hostile: Any, reason: str) -> None:
    old, new, rows = recorded(filled, hostile, event(1))
    assert (old, new, rows[1]) == (42, 43, (True, True, ""))
    assert rows[0][:2] == (False, False)
    assert reason in rows[0][2]
    assert len(rows[0][2]) <= 300
    assert rows[0][2].isprintable()
    status, output, error = filled("config", "record", "--node", "node1", "-", stdin=[hostile])
    assert (status, output) == (0, "no changes: serial 43\n")
    assert error.startswith("brine: warning: event ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("stdin", "error"),
    [
        (float("nan"), "-: not usable JSON: NaN is no JSON number"),
        ({"local": []}, "must be a list of events, but is an object"),
        (["x" * (8 * 1024 * 1024)], "-: is larger than 8388608 bytes"),
        ([0] * 1001, "has 1001 events, and an outbox keeps 1000"),
    ],
)
def test_what_is_no_list_of_events_is_refused_whole(filled: Run, stdin: Any, error: str) -> None:
    status, output, errors = filled("config", "record", "--node", "node1", "-", stdin=stdin)
    assert (status, output) == (1, "")
    assert errors.splitlines()[0] == f"brine: error: {error}"


def test_nothing_is_recorded_where_there_is_no_configuration(brine: Run) -> None:
    status, _, error = brine("config", "record", "--node", "node1", "-", stdin=[event(1)])
    assert status == 1
    assert "there is no configuration" in error


# The pool of user ids.


def test_what_is_added_and_removed_is_said(filled: Run) -> None:
    assert filled("uidpool", "show") == (0, "4000-4099\n", "")
    status, output, errors = filled("uidpool", "add", "5000,6000-6009")
    assert (status, errors) == (0, "")
    assert output.splitlines() == [
        f"~ {POOL}: [[4000, 4099]] -> [[4000, 4099], [5000, 5000], [6000, 6009]]",
        "applied: serial 42 -> 43, 1 change",
    ]
    assert filled("uidpool", "remove", "4050", "6000-6009")[0] == 0
    assert filled("uidpool", "show") == (0, "4000-4049,4051-4099,5000\n", "")
    stored = json.loads(filled("config", "show", POOL)[1])
    assert stored == [[4000, 4049], [4051, 4099], [5000, 5000]]
    assert filled("config", "versions", "--json")[1].count('"serial"') == 2
    shown = filled("uidpool", "show")[1]
    assert filled("uidpool", "set", "7000")[0] == 0
    assert filled("uidpool", "set", shown)[0] == 0
    assert filled("uidpool", "show")[1] == shown


def test_an_emptied_pool_is_told_but_not_as_ranges(filled: Run) -> None:
    assert filled("uidpool", "remove", "4000-4099")[0] == 0
    told = "the pool is empty: no user ids are given out\n"
    assert filled("uidpool", "show") == (0, "", told)
    assert json.loads(filled("uidpool", "show", "--json")[1])["count"] == 0
    assert filled("uidpool", "set", "") == (0, "no changes: serial 43\n", "")


def test_ids_that_are_there_already_change_nothing(filled: Run) -> None:
    assert filled("uidpool", "add", "4010-4020") == (0, "no changes: serial 42\n", "")
    assert filled("uidpool", "set", "4000-4099") == (0, "no changes: serial 42\n", "")
    touching = {"cluster": {"uid_pool": "4000-4049,4050-4099"}}
    assert filled("config", "apply", "-", stdin=touching)[0] == 0
    assert filled("uidpool", "set", "4000-4099") == (0, "no changes: serial 43\n", "")
    # What is declared in pillar and what is done by hand do not take turns.
    assert filled("config", "apply", "-", stdin=touching)[1] == "no changes: serial 43\n"


def test_a_change_of_the_pool_is_rehearsed(filled: Run, tmp_path: Path) -> None:
    ssconf.write(tmp_path / "ssconf", ssconf.all_values(Configuration.from_json(ganeti_config())))

    def written() -> dict[Path, tuple[int, int]]:
        found = {file: file.stat() for file in tmp_path.rglob("*")}
        return {file: (status.st_ino, status.st_mtime_ns) for file, status in found.items()}

    before = written()
    status, output, _ = filled("uidpool", "add", "--dry-run", "5000")
    assert status == 0
    assert output.endswith(
        f"note: {tmp_path}/ssconf would be brought up to date\nwould apply: 1 change\n"
    )
    assert written() == before


def test_the_pool_for_programs(filled: Run, tmp_path: Path) -> None:
    assert json.loads(filled("uidpool", "show", "--json")[1]) == {
        "uid_pool": "4000-4099",
        "ranges": [[4000, 4099]],
        "count": 100,
        "source": str(tmp_path / "config.data"),
    }
    done = json.loads(filled("uidpool", "add", "4100", "--json")[1])
    assert done == {
        "dry_run": False,
        "old_serial": 42,
        "new_serial": 43,
        "changes": [
            {
                "change": "changed",
                "pointer": POOL,
                "old": [[4000, 4099]],
                "new": [[4000, 4100]],
                "note": "",
            }
        ],
        "notes": [],
        "uid_pool": "4000-4100",
    }
    assert json.loads(filled("uidpool", "set", "", "--json", "--dry-run")[1])["uid_pool"] == ""


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["add", "alice"], "'alice' is no range of user ids, such as 4000-4099"),
        (["set", "0-99"], "user id 0 is root's, which can't be in a pool"),
        (["remove", "5-1"], "[5, 1] is no range of user ids"),
        (["add", "5000,5000"], "the range 5000-5000 overlaps the one before"),
        (["add", ""], "no user ids are given"),
        (["remove", ","], "no user ids are given"),
        (["add"], "the following arguments are required: RANGES"),
        (["grow", "5"], "invalid choice: 'grow'"),
        (["--lock-timeout", "-1", "add", "5"], "--lock-timeout must be"),
    ],
)
def test_a_wrong_pool_ends_with_two(filled: Run, arguments: list[str], error: str) -> None:
    status, output, errors = filled("uidpool", *arguments)
    assert (status, output) == (2, "")
    assert error in errors.splitlines()[0]
    assert filled("config", "show", "/serial_no")[1] == "42\n"


def test_accounts_of_the_node_are_told_of(filled: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    users = [SimpleNamespace(pw_uid=1000 + n, pw_name=f"user{n}") for n in range(7)]
    groups = [SimpleNamespace(gr_gid=n, gr_name="staff") for n in (1000, 1050)]
    monkeypatch.setattr(pwd, "getpwall", lambda: users)
    monkeypatch.setattr(grp, "getgrall", lambda: groups)
    output = filled("uidpool", "add", "1006-1100")[1]
    said = "1006 (user6), 1050 (group staff)"
    assert f"note: accounts of this node have some of these, and keep them: {said}\n" in output
    (note,) = json.loads(filled("uidpool", "set", "1000-1100", "--json")[1])["notes"]
    assert note.endswith(
        " 1000 (user0), 1001 (user1), 1002 (user2), 1003 (user3), 1004 (user4) and 3 more"
    )
    assert "note" not in filled("uidpool", "remove", "1000-1100")[1]
    assert "note" not in filled("uidpool", "add", "999,1007")[1]


@pytest.mark.parametrize(
    ("arguments", "said", "status"),
    [
        (("verify", "/nosuch"), "/nosuch: there is no such file\n", 1),
        (("diff", "/nosuch"), "/nosuch: there is no such file\n", 1),
        (("restore", "x"), "'x' is no serial number; brine config versions lists them\n", 2),
    ],
)
def test_a_file_or_version_that_is_not_there(
    filled: Run, arguments: tuple[str, ...], said: str, status: int
) -> None:
    left, _, errors = filled("config", *arguments)
    assert (left, said in errors) == (status, True)
    assert "brine config apply" not in errors


def test_ssconf_is_kept_in_step(filled: Run, tmp_path: Path) -> None:
    (tmp_path / "ssconf").mkdir()
    assert (
        f"note: {tmp_path}/ssconf is up to date; the other nodes need a copy of it\n"
        in (filled("uidpool", "add", "5000")[1])
    )
    assert Ssconf(tmp_path / "ssconf").uid_pool() == [[4000, 4099], [5000, 5000]]
    assert filled("config", "export-ssconf", str(tmp_path / "ssconf"))[1] == "no changes\n"
    note = f"note: {tmp_path}/ssconf is up to date"
    pool = {"cluster": {"uid_pool": "7000"}}
    would = filled("config", "apply", "--dry-run", "-", stdin=pool)
    assert f"note: {tmp_path}/ssconf would be brought up to date\n" in would[1]
    assert Ssconf(tmp_path / "ssconf").uid_pool() == [[4000, 4099], [5000, 5000]]
    assert note in filled("config", "apply", "-", stdin=pool)[1]
    assert Ssconf(tmp_path / "ssconf").uid_pool() == [[7000, 7000]]
    # It was missed once: then the next one makes up for it.
    (tmp_path / "ssconf" / "ssconf_uid_pool").write_text("")
    assert note in filled("uidpool", "add", "7000")[1]
    assert Ssconf(tmp_path / "ssconf").uid_pool() == [[7000, 7000]]
    assert filled("uidpool", "add", "7000") == (0, "no changes: serial 44\n", "")
    assert note in filled("config", "restore", "43")[1]
    assert Ssconf(tmp_path / "ssconf").uid_pool() == [[4000, 4099], [5000, 5000]]


def test_ssconf_that_can_not_be_written_is_told(
    filled: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ssconf").mkdir()

    def full(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ssconf, "write_whole", full)
    status, _, errors = filled("uidpool", "add", "5000")
    assert status == 1
    assert "No space left on device" in errors.splitlines()[0]
    assert errors.splitlines()[1] == (
        f"brine: hint: the configuration has it; then brine config export-ssconf {tmp_path}/ssconf"
    )
    assert filled("uidpool", "show")[1] == "4000-4099,5000\n"


def test_values_that_can_not_be_leave_all_as_it_was(brine: Run, tmp_path: Path) -> None:
    data = ganeti_config()
    data["cluster"]["tags"] = ["two\nlines"]
    (tmp_path / "config.data").write_text(json.dumps(data))
    (tmp_path / "ssconf").mkdir()
    status, _, errors = brine("uidpool", "add", "5000")
    assert status == 1
    assert "ssconf cluster_tags: 'two\\nlines' is more than one line" in errors
    assert brine("uidpool", "show")[1] == "4000-4099\n"


def test_the_configuration_of_another_cluster_leaves_ssconf_alone(
    filled: Run, tmp_path: Path
) -> None:
    (tmp_path / "ssconf").mkdir()
    other = tmp_path / "other.data"
    other.write_bytes((tmp_path / "config.data").read_bytes())
    assert filled("uidpool", "--config", str(other), "add", "5000")[0] == 0
    assert filled("uidpool", "show")[1] == "4000-4099\n"
    assert list((tmp_path / "ssconf").iterdir()) == []


def test_a_node_without_configuration_shows_what_it_was_told(brine: Run, tmp_path: Path) -> None:
    data = ganeti_config()
    data["cluster"]["uid_pool"] = [[4000, 4099], [5000, 5000]]
    ssconf.write(tmp_path / "ssconf", ssconf.all_values(Configuration.from_json(data)))
    assert brine("uidpool", "show") == (0, "4000-4099,5000\n", "")
    shown = json.loads(brine("uidpool", "show", "--json")[1])
    assert shown["source"] == str(tmp_path / "ssconf/ssconf_uid_pool")
    assert shown["ranges"] == [[4000, 4099], [5000, 5000]]

    status, output, errors = brine("uidpool", "add", "6000")
    assert (status, output) == (1, "")
    assert errors == (
        f"brine: error: {tmp_path}/config.data: there is no configuration\n"
        "brine: hint: the pool is changed on the master, node1.example.com\n"
    )
    # But a file that was asked for has to be there.
    assert brine("uidpool", "--config", str(tmp_path / "other"), "show")[0] == 1


def test_a_node_that_knows_nothing_says_so(brine: Run, tmp_path: Path) -> None:
    status, output, errors = brine("uidpool", "show")
    assert (status, output) == (1, "")
    assert "there is no" in errors
    assert "brine config export-ssconf makes it" in errors
    status, _, errors = brine("uidpool", "set", "4000")
    assert status == 1
    assert "brine config apply FILE makes one" in errors
    (tmp_path / "config.versions").mkdir()
    (tmp_path / "config.versions/42").write_text(json.dumps(ganeti_config()))
    assert "brine config restore 42" in brine("uidpool", "add", "6000")[2]
    assert not (tmp_path / "config.data").exists()


def test_it_waits_for_another_writer_but_not_for_ever(filled: Run, tmp_path: Path) -> None:
    with locked(tmp_path / "config.lock", timeout_s=0):
        status, _, errors = filled("uidpool", "--lock-timeout", "0", "add", "5000")
        assert status == 1
        assert "config.lock: locked by process" in errors
        assert filled("uidpool", "show")[0] == 0
    assert filled("uidpool", "add", "5000")[0] == 0


def test_a_pool_with_a_fault_can_only_be_replaced(brine: Run, tmp_path: Path) -> None:
    data = ganeti_config()
    data["cluster"]["uid_pool"] = [[0, 99]]
    file = tmp_path / "config.data"
    file.write_text(json.dumps(data))
    for arguments in (["show"], ["add", "4000"], ["remove", "50"]):
        status, output, errors = brine("uidpool", *arguments)
        assert (status, output) == (1, "")
        assert errors == (
            f"brine: error: {file}: uid_pool: user id 0 is root's, which can't be in a pool\n"
            "brine: hint: brine uidpool set RANGES, on the master, replaces it\n"
        )
    assert brine("uidpool", "set", "1-99")[0] == 0
    assert brine("uidpool", "show")[1] == "1-99\n"


@pytest.mark.parametrize("encoding", ["ascii", "iso-8859-1", "utf-8"])
def test_all_output_has_a_place_in_every_locale(
    filled: Run, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """Standard output has the encoding of the locale: of LC_ALL=C, ASCII."""
    tags = ["K\u00fcche", "\u53f0\u6240"]
    outputs = {}
    for verb in (["apply", "-"], ["show", "/cluster/tags"], ["diff"]):
        written = io.BytesIO()
        output = io.TextIOWrapper(written, encoding=encoding, write_through=True)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", output)
            assert filled("config", *verb, stdin={"cluster": {"tags": tags}})[0] == 0
        outputs[verb[0]] = written.getvalue().decode(encoding)
    assert json.loads(outputs["show"]) == tags
    assert (tags[0] in outputs["show"]) == (encoding == "utf-8")
    assert (tags[0] in outputs["diff"]) == (encoding != "ascii")
    assert outputs["apply"].startswith("~ /cluster/tags: ")


@pytest.mark.parametrize("number", ["9" * 4000, "9" * 5000, "-" + "9" * 20])
@pytest.mark.parametrize("verb", ["apply", "verify"])
def test_a_number_that_nothing_can_have_is_one_line(
    filled: Run, tmp_path: Path, verb: str, number: str
) -> None:
    data = json.dumps(ganeti_config()).replace('"candidate_pool_size": 10', "%s")
    assert "%s" in data
    file = tmp_path / "input"
    file.write_text(data % f'"candidate_pool_size": {number}')
    status, out, err = filled("config", verb, str(file))
    assert status == 1
    told = err or out
    assert "Traceback" not in told
    assert max(map(len, told.splitlines())) < 200


def test_case_does_not_count_in_names_of_hosts(filled: Run) -> None:
    """A minion's id, a query, and a declaration may have capitals."""
    node, web = node_name(1), instance_name(1)
    uuid = uuid_of("instance", 1)
    config = ("config", "show")
    for name in (web.upper(), web.partition(".")[0].title(), uuid.upper()):
        assert json.loads(filled(*config, f"/instances/{name}")[1])["name"] == web
    for name in (node.upper(), "NODE1", "Node1.Example.COM"):
        assert json.loads(filled("config", "export-node", name)[1])["node"] == node
    event = {
        "id": f"{1_700_000_000_000_000_000:020}-0123abcd",
        "time": 1.0,
        "kind": "admin-state",
        "instance": uuid,
        "name": web,
        "data": {"admin_state": "down", "source": "user"},
    }
    status, out, err = filled("config", "record", "--node", "NODE1", "-", "--json", stdin=[event])
    assert (status, json.loads(out)["events"][0]["reason"], err) == (0, "", "")
    change = {
        "cluster": {"master": "NODE1"},
        "nodes": {node.upper(): {"tags": ["a"]}},
        "instances": {web.upper(): {"tags": ["b"], "primary_node": "NODE1"}},
    }
    status, out, err = filled("config", "apply", "-", stdin=change)
    assert (status, err) == (0, "")
    lines = [line for line in out.splitlines() if line[0] in "+-~"]
    assert [line.partition(":")[0] for line in lines] == [
        f"~ /nodes/{node}/tags",
        f"~ /instances/{web}/tags",
    ]
    assert filled("config", "verify")[0] == 0
    assert filled("config", "apply", "-", stdin={"instances": {web.upper(): None}})[0] == 0
    assert filled(*config, f"/instances/{web}")[0] == 1
    assert filled(*config, f"/instances/{instance_name(2)}")[0] == 0


def be_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this host be called so."""
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename=name))


def be_machine(machine_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this host have another machine-id(5)."""
    file = tmp_path / "machine-id"
    file.write_text(f"{machine_id}\n")
    monkeypatch.setattr(own_node, "MACHINE_ID_FILE", file)


def test_a_host_with_another_name_is_still_its_node(
    brine: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_machine("1" * 32, tmp_path, monkeypatch)
    be_host("NODE1", monkeypatch)
    assert brine("config", "apply", "-", stdin=ganeti_config())[0] == 0
    status, out, err = brine("config", "this-node", "--json")
    found = {
        "name": node_name(1),
        "uuid": uuid_of("node", 1),
        "host": "NODE1",
        "is_renamed": False,
        "is_master": True,
    }
    assert (status, json.loads(out), err) == (0, found, "")
    be_host("alpha.example.com", monkeypatch)
    renamed = found | {"host": "alpha.example.com", "is_renamed": True}
    status, out, err = brine("config", "this-node", "--json")
    assert (status, json.loads(out)) == (0, renamed)
    assert f"brine config rename-node {node_name(1)} alpha.example.com" in err
    assert brine("config", "this-node")[1] == f"{node_name(1)}, the master\n"
    be_machine("2" * 32, tmp_path, monkeypatch)  # a copy of the host is another one
    assert brine("config", "this-node")[0] == 1
    be_machine("1" * 32, tmp_path, monkeypatch)
    be_host(node_name(2), monkeypatch)  # its name counts more
    assert json.loads(brine("config", "this-node", "--json")[1])["uuid"] == uuid_of("node", 2)


@pytest.mark.parametrize("note", ["", "{", "[]", '{"uuid": 5}', '{"uuid": "x"}'])
def test_a_damaged_note_of_the_node_counts_as_none(
    filled: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, note: str
) -> None:
    (tmp_path / "node.json").write_text(note)
    be_host("alpha", monkeypatch)
    status, out, err = filled("config", "this-node")
    assert (status, out) == (1, "")
    assert err.startswith("brine: error: there is no node 'alpha'")


def test_a_node_gets_another_name_and_stays_itself(
    filled: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, uuid = node_name(1), "alpha.example.com", uuid_of("node", 1)
    (tmp_path / "ssconf").mkdir()
    assert filled("config", "export-ssconf", str(tmp_path / "ssconf"))[0] == 0
    before = filled("config", "show")[1]
    rename = ("config", "rename-node", "node1", new)
    status, out, err = filled(*rename, "--dry-run", "--json")
    told = json.loads(out)
    assert (status, err, told["dry_run"], told["node"]) == (
        0,
        "",
        True,
        {"uuid": uuid, "name": new},
    )
    assert filled("config", "show")[1] == before
    status, out, err = filled(*rename, "--json")
    told = json.loads(out)
    assert (status, err) == (0, "")
    assert [one["pointer"] for one in told["changes"]] == [f"/nodes/{new}/name"]
    assert any(old in note and new in note and "pillar" in note for note in told["notes"])
    assert Ssconf(tmp_path / "ssconf").master_node() == new
    for file in (tmp_path / "ssconf").iterdir():
        assert old not in file.read_text(), file
    assert old not in filled("config", "show")[1]
    assert filled("config", "verify") == (0, "no faults\n", "")
    assert json.loads(filled("config", "show", f"/nodes/{new}")[1])["uuid"] == uuid
    again = json.loads(filled(*rename[:2], new, new, "--json")[1])
    assert (again["changes"], again["new_serial"]) == ([], told["new_serial"])


def test_a_host_whose_node_gets_another_name_first_is_still_that_node(
    filled: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_machine("1" * 32, tmp_path, monkeypatch)
    be_host(node_name(1), monkeypatch)
    (tmp_path / "node.json").unlink(missing_ok=True)  # as before the first apply of this version
    rename = ("config", "rename-node", "node1", "alpha.example.com")
    assert filled(*rename, "--dry-run")[0] == 0
    assert not (tmp_path / "node.json").exists()
    assert filled(*rename)[0] == 0
    _, out, err = filled("config", "this-node", "--json")
    found = json.loads(out)
    assert (found["name"], found["uuid"]) == ("alpha.example.com", uuid_of("node", 1))
    assert "; or name the host alpha.example.com" in err


def test_references_by_name_follow_a_rename() -> None:
    data = ganeti_config(nodes=3, instances=10)
    old, uuid = node_name(2), uuid_of("node", 2)
    names = json.loads(json.dumps(data).replace(f'"{uuid}"', f'"{old}"'))
    names["nodes"][uuid] = names["nodes"].pop(old) | {"uuid": uuid}
    configuration = Configuration.from_json(names)
    made = nodes.with_new_name(configuration, configuration.nodes[uuid], "alpha")
    data["nodes"][uuid]["name"] = "alpha"
    assert made.to_json() == Configuration.from_json(data).to_json()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("node9", "alpha", "there is no node"),
        ("node1", "NODE2.example.com", "there is a node node2.example.com already"),
        ("node1", "a b", "is no name"),
        ("node1", "x\n", "is no name"),
        ("node1", "", "is no name"),
        ("node1", uuid_of("node", 5), "must not look like a UUID"),
    ],
)
def test_a_new_name_that_can_not_be_is_refused(filled: Run, old: str, new: str, said: str) -> None:
    before = filled("config", "show")[1]
    status, out, err = filled("config", "rename-node", old, new)
    assert (status, out) == (1, "")
    assert said in err.splitlines()[0]
    assert filled("config", "show")[1] == before
