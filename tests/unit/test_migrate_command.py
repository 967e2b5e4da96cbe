"""``brine instance migrate`` and ``brine operations resume`` and ``abort``: Salt's runner."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brine.cluster.move_operation import MOVE
from brine.common import cli, operation
from tree_entry_points import of_tree

DONE = {"result": True, "comment": "web1 has moved", "instance": "web1", "state": "done"}
FAILED = {"result": False, "retcode": 1, "comment": "web1: it has\nsnapshots", "instance": "web1"}
BLOCKED = FAILED | {"obstacles": ["n2: br1: no such bridge", "n2: no memory"]}
MOVE_FACTS = {"instance": "web1.example.com", "uuid": "u"}

SaltRun = Callable[..., list[str]]


@pytest.fixture
def salt_run(own_node: Path, monkeypatch: pytest.MonkeyPatch) -> SaltRun:
    """Has a ``salt-run`` print this; returns the arguments of its last run."""
    for place in (cli, operation):
        monkeypatch.setattr(place, "entry_points", of_tree)
    monkeypatch.setenv("PATH", f"{own_node / 'bin'}:/usr/bin:/bin")
    (own_node / "bin").mkdir()
    answer, given = own_node / "answer", own_node / "given"

    def install(told: Any = None) -> list[str]:
        if told is not None:
            program = own_node / "bin/salt-run"
            script = f'printf "%s\\n" "$@" >{given}; sleep 0.5; echo unclosed >&2; cat {answer}'
            program.write_text(f"#!/bin/sh\n{script}\n")
            program.chmod(0o755)
            answer.write_text(told if isinstance(told, str) else json.dumps(told))
        return given.read_text().splitlines() if given.exists() else []

    return install


def run(*words: str) -> int:
    try:
        return cli.main([*words])
    except SystemExit as left:
        return int(left.code or 0)


def begun(kind: operation.OperationKind, name: str = "web1") -> str:
    """A move that waits for a node."""
    if kind is MOVE:
        facts = MOVE_FACTS | {
            "instance": f"{name}.example.com",
            "source": "n1",
            "target": "n2",
            "serial": 2,
            "cold": False,
        }
        facts |= {"wishes": {}, "source_address": "", "target_address": ""}
    else:
        facts = {}
    with operation.begin(kind, f"move/{name}.example.com", facts=facts) as work:
        pass
    return work.record.id


@pytest.mark.parametrize(
    ("told", "options", "status", "out", "error"),
    [
        (DONE, [], 0, ["web1 has moved"], ""),
        (DONE | {"notes": ["no locks"]}, [], 0, ["web1 has moved"], "no locks"),
        (FAILED, [], 1, [], r"it has\nsnapshots"),
        (BLOCKED, ["--dry-run"], 1, BLOCKED["obstacles"], "snapshots"),
        ("Exception occurred", [], 1, [], "Exception occurred"),
        ("[1]", [], 1, [], "[1]"),
        ("", [], 1, [], "no answer"),
    ],
)
def test_a_migration_tells_what_the_runner_returns(
    salt_run: SaltRun,
    capsys: pytest.CaptureFixture[str],
    told: Any,
    options: list[str],
    status: int,
    out: list[str],
    error: str,
) -> None:
    salt_run(told)
    assert run("instance", "migrate", "web1", *options) == status
    said = capsys.readouterr()
    assert said.out.splitlines() == out
    assert error in said.err
    assert (error == "") == (said.err == "")


def test_the_options_of_a_migration_and_its_progress(
    salt_run: SaltRun, capsys: pytest.CaptureFixture[str]
) -> None:
    step = operation.find(begun(MOVE))
    assert step
    operation.progressed(step.steps[0].id, 0.25, "copy on n1: 3 GiB left")
    salt_run(DONE)
    words = ["--to", "010", "--cold", "--auto-converge", "--max-downtime", "300", "--rate", "1M"]
    assert run("instance", "migrate", "web1", *words) == 0
    assert capsys.readouterr().err == "web1.example.com: 25 % copy on n1: 3 GiB left\n"
    given = ['instance="web1"', 'to="010"', "cold=true", "auto_converge=true"]
    assert salt_run()[-6:] == [*given, "max_downtime=300", f"rate={1 << 20}"]
    assert run("instance", "migrate", "web1", "--json") == 0
    said = capsys.readouterr()
    assert (json.loads(said.out), said.err) == (DONE, "")


def test_a_drain_shows_each_of_its_moves(
    salt_run: SaltRun, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("web1", "web2"):
        step = operation.find(begun(MOVE, name))
        assert step
        operation.progressed(step.steps[0].id, 0.5, f"copy of {name}")
    salt_run({"result": True, "comment": "n1: 2 instances have moved"})
    assert run("node", "drain", "n1") == 0
    lines = capsys.readouterr().err.splitlines()
    assert sorted(lines) == [f"{one}.example.com: 50 % copy of {one}" for one in ("web1", "web2")]


def test_operations_are_resumed_and_aborted(
    salt_run: SaltRun, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb in ("resume", "abort"):
        assert run("operations", verb, "gone") == 1
        assert "no such operation" in capsys.readouterr().err
    identity = begun(MOVE)
    assert run("operations", "resume", identity) == 1
    assert "salt-run" in capsys.readouterr().err
    salt_run(DONE)
    assert run("operations", "resume", identity) == 0
    assert salt_run()[-2:] == ["brine.resume", f'operation="{identity}"']
    assert run("operations", "abort", identity, "--json") == 0
    assert salt_run()[-1] == "abort=true"
