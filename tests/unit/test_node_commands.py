"""``brine node plan``, ``mark``, ``reboot-step`` and their faces, on a master's configuration."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from brine.common import cli, operation, paths
from brine.common.entry_points import EntryPoint
from brine.config.model import Configuration
from brine.config.store import ConfigStore
from lab.ganeti_config import ganeti_config, instance_name, node_name, uuid_of

Node = Callable[..., tuple[int, Any, str]]
FIRST, SECOND, THIRD = map(node_name, (1, 2, 3))
_FACTS = {"memory_available_mib": 4000, "units": {}}
_STATE = {"boot_id": "one", "kernel": "6.1", "newest": "6.2", "daemons": ["a"], "failed": []}


@pytest.fixture
def store(own_node: Path, monkeypatch: pytest.MonkeyPatch) -> ConfigStore:
    """A configuration of three nodes, of which the first is the master."""
    monkeypatch.setattr(paths, "CONFIG_FILE", own_node / "config.data")
    monkeypatch.setattr(paths, "CONFIG_LOCK", own_node / "config.lock")
    store = ConfigStore(own_node / "config.data")
    with store.writing() as writer:
        writer.write(Configuration.from_json(ganeti_config(nodes=3, instances=6)))
    return store


@pytest.fixture
def node(
    store: ConfigStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Node:
    """Runs ``brine node``: status, its JSON (or text), and errors."""
    kinds = [EntryPoint("reboot", "brine.cluster.rebooting:REBOOT")]
    verbs = [EntryPoint("node", "brine.cluster.cli:add_node_verbs")]
    known = {"brine.verbs": verbs, "brine.operations": kinds}
    for module in cli, operation:
        monkeypatch.setattr(module, "entry_points", lambda group: known.get(group, []))

    def run(*arguments: str, stdin: Any = None) -> tuple[int, Any, str]:
        data = json.dumps({} if stdin is None else stdin).encode()
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
        try:
            status = cli.main(["node", *arguments])
        except SystemExit as end:
            status = int(str(end.code))
        said = capsys.readouterr()
        return status, json.loads(said.out) if said.out[:1] == "{" else said.out, said.err

    return run


def row(number: int, memory_mib: int = 1000) -> Any:
    names = {"name": instance_name(number), "uuid": uuid_of("instance", number)}
    return {**names, "memory_mib": memory_mib, "oper_state": "running", "volumes": []}


def test_a_plan_is_of_what_the_nodes_have_said(node: Node) -> None:
    question = {
        "verb": "drain",
        "nodes": [SECOND.partition(".")[0]],
        "rows": {SECOND: [row(2), row(5, 9000)]},
        "facts": {FIRST: _FACTS, THIRD: "no answer"},
    }
    status, told, _ = node("plan", "--json", stdin=question)
    assert (status, told["nodes"], told["is_whole"]) == (0, [SECOND], False)
    assert [(one["instance"], one["target"]) for one in told["moves"]] == [
        (instance_name(2), FIRST)
    ]
    assert "no answer" in told["stays"][0]["why"]
    for wrong in {"verb": "dance"}, {"nodes": ["n9"]}, {"to": "n9"}, {"jobs": 0}, {"more": 1}:
        status, _, errors = node("plan", "--json", stdin=question | wrong)
        assert status == 1
        assert errors.startswith("brine: error: ")
        assert errors.count("\n") <= 2


def test_a_batch_has_as_many_nodes_as_the_others_can_hold_the_guests_of(node: Node) -> None:
    question = {"verb": "batch", "nodes": [SECOND, THIRD], "batch": 2}
    rows = {SECOND: [row(2, 1500)], THIRD: [row(3, 1500)]}
    facts = dict.fromkeys((FIRST, SECOND, THIRD), _FACTS)
    told = node("plan", stdin={**question, "rows": rows, "facts": facts})[1]
    assert told["nodes"] == [SECOND, THIRD]
    rows[THIRD] = [row(3, 2500)]
    told = node("plan", stdin={**question, "rows": rows, "facts": facts})[1]
    assert told["nodes"] == [SECOND]
    rows[SECOND] = [row(2, 5000)]
    told = node("plan", stdin={**question, "rows": rows, "facts": facts})[1]
    assert told["nodes"] == []
    assert told["stays"][0]["instance"] == instance_name(2)


def test_marks_are_written_into_the_configuration(node: Node, store: ConfigStore) -> None:
    uuid = uuid_of("instance", 2)
    status, told, _ = node("mark", "drained", stdin={"nodes": {SECOND: [uuid]}})
    assert (status, told["nodes"]) == (0, {SECOND: "it is drained"})
    assert told["serial"] == store.read().cluster.serial_no
    found = store.read().node(SECOND)
    assert found.drained
    assert f"brine:home:{uuid}" in found.tags
    question = {"verb": "drain", "nodes": [THIRD], "to": SECOND, "rows": {THIRD: []}}
    assert "drained" in node("plan", stdin=question)[2]
    assert node("mark", "undrained", stdin={"nodes": {SECOND: []}})[1]["nodes"] == {SECOND: ""}
    assert "brine:undrained" in store.read().node(SECOND).tags
    assert node("mark", "filling", stdin={"nodes": {SECOND: []}})[1]["nodes"] == {SECOND: ""}
    assert node("mark", "home", stdin={"nodes": {SECOND: []}})[0] == 0
    assert not store.read().node(SECOND).tags
    assert node("mark", "drained", stdin={"nodes": {"n9": []}})[0] == 1


def test_a_reboot_goes_on_after_a_doubt_and_the_masters_death(node: Node) -> None:
    def answered(now: Any, **more: Any) -> Any:
        step = {"id": now["step"]["id"], "step": now["step"]["step"], "progress": 1.0}
        usual = {"state": "done", "error": "", "found": {}}
        return node("reboot-step", "answer", stdin={**step, **usual, **more})[1]

    assert node("reboot-step", "next")[1]["step"] is None
    assert "master" in node("reboot-step", "begin", stdin={"nodes": [FIRST, SECOND]})[2]
    now = node("reboot-step", "begin", stdin={"nodes": [SECOND, THIRD], "upgrade": True})[1]
    assert "pending" in node("reboot-step", "begin", stdin={"nodes": [THIRD]})[2]
    assert now["step"]["facts"] == {"nodes": [SECOND, THIRD], "batch": 1}
    unfit: list[Any] = [{}, {"nodes": []}, {"nodes": [FIRST]}, {"nodes": 7}]
    for found in unfit:
        answered(now, found=found)
        assert node("reboot-step", "next")[1]["step"] == now["step"]
    now = answered(now, found={"nodes": [SECOND]})
    assert (now["step"]["step"], now["step"]["facts"]["nodes"]) == ("drain", [SECOND])
    now = answered(now, state="failed", error="web1 has no place")
    assert (now["step"]["step"], now["doubt"]) == ("drain", "web1 has no place")
    assert "web1 has no place" in operation.pending()[0].waits_for
    now = answered(node("reboot-step", "next")[1])
    answered(now, found={"before": {SECOND: {}}})
    now = answered(now, found={"before": {SECOND: _STATE}})
    assert (now["step"]["step"], now["doubt"]) == ("reboot", "")
    assert now["step"]["facts"]["before"] == {SECOND: _STATE}
    before = answered(now)
    now = answered(answered(before))
    assert (now["step"]["step"], now["left"]) == ("choose", [THIRD])
    assert node("reboot-step", "abort")[1]["step"] is None
    assert operation.pending() == []


def test_nodes_that_reboot_are_looked_at(node: Node) -> None:
    asked: dict[str, Any] = {"before": {SECOND: _STATE, THIRD: _STATE}, "now": {SECOND: _STATE}}
    told = node("reboot-step", "look", stdin={**asked, "running": {SECOND: ["web1"]}})[1]
    assert {name: one["act"] for name, one in told.items()} == {SECOND: "doubt", THIRD: "wait"}
    asked["now"] = {SECOND: {**_STATE, "boot_id": "two"}, THIRD: "has not answered"}
    told = node("reboot-step", "look", stdin={**asked, "running": {}})[1]
    assert {name: one["act"] for name, one in told.items()} == {SECOND: "done", THIRD: "wait"}
    told = node("reboot-step", "look", stdin={**asked, "check": True})[1]
    assert "6.2" in told[SECOND]["faults"][0]
    assert told[THIRD]["faults"] == ["it does not answer"]
    unfit: list[Any] = [{}, {"before": {SECOND: {}}, "now": {}}, {"before": [], "now": {}}]
    for wrong in unfit:
        status, _, errors = node("reboot-step", "look", stdin=wrong)
        assert status == 1
        assert errors.startswith("brine: error: ")


def put_salt_run(folder: Path, told: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ``salt-run`` that says this; the file ``asked`` beside its folder has its arguments."""
    program = folder / "bin/salt-run"
    program.parent.mkdir(exist_ok=True)
    (folder / "told").write_text(json.dumps(told))
    program.write_text(f'#!/bin/sh\necho "$@" > {folder}/asked\ncat {folder}/told\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return program


def test_people_reboot_nodes_by_a_command(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [
        {"nodes": ["n2", "n3"], "moved": {"web1": "n1"}, "left": {"web3": "it does not run"}},
        {"nodes": ["n4"], "failed": {"web2": "n1: no room"}},
    ]
    told = {"result": True, "comment": "3 nodes would be", "batches": batches, "left_out": ["n1"]}
    put_salt_run(tmp_path, told, monkeypatch)
    status, out, _ = node("reboot", "n*", "n9", "--upgrade", "--batch", "2", "--dry-run")
    asked = (tmp_path / "asked").read_text().split(maxsplit=2)[2]
    assert asked.strip() == 'brine.reboot nodes=["n*", "n9"] upgrade=true batch=2 test=true'
    assert (status, out.splitlines()) == (
        0,
        [
            "would reboot: n2, n3",
            "would move: web1 to n1",
            "stays: web3: it does not run",
            "would reboot: n4",
            "can't move: web2: n1: no room",
            "left out: n1",
            "3 nodes would be",
        ],
    )
    told = {"result": False, "comment": "stopped at n2", "hint": "mend it", "retcode": 1}
    put_salt_run(tmp_path, told, monkeypatch)
    status, out, errors = node("reboot")
    assert (tmp_path / "asked").read_text().split()[2:] == ["brine.reboot"]
    assert (status, out) == (1, "")
    assert errors.splitlines() == ["brine: error: stopped at n2", "brine: hint: mend it"]


def test_people_drain_and_fill_by_a_command(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"result": False, "comment": "1 stays", "moved": {"web1": "n2"}}
    told |= {"failed": {"web2": "n2: no room"}, "left": {"web3": "it does not run"}}
    told["notes"] = ["n1 is the master"]
    program, asked = put_salt_run(tmp_path, told, monkeypatch), tmp_path / "asked"
    status, out, errors = node("drain", "n1", "--to", "n2", "--cold", "--jobs", "2", "--dry-run")
    assert status == 1
    given = ('node="n1"', 'to="n2"', "cold=true", "jobs=2", "test=true")
    assert asked.read_text().split()[2:] == ["brine.drain", *given]
    words = ["would move", "can't move", "stays"]
    assert [line.partition(":")[0] for line in out.splitlines()] == words
    assert "1 stays" in errors
    assert "the master" in errors
    assert node("fill", "n1", "--json")[1]["failed"] == told["failed"]
    assert asked.read_text().split()[2:] == ["brine.fill", 'node="n1"']
    program.write_text("#!/bin/sh\necho Exception occurred\nexit 1\n")
    assert "Exception" in node("undrain", "n1")[2]
    program.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "salt-run" in node("undrain", "n1")[2]
