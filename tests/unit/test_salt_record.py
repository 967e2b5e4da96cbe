"""The runner of Salt's side: what outboxes tell, and what there is in the whole cluster."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from unit.salt_loader import load

NODES = ("node1.example.com", "node2.example.com", "node3.example.com")
WEB1 = {"name": "web1.example.com", "uuid": "u1", "status": "running", "admin_state": "up"}


class Minions:
    """The minions of three nodes, of which node1's writes the configuration.

    :ivar outboxes: the ids of the events of each node. Those that begin with "bad" are refused.
    :ivar recorded: what the configuration was told, in order.
    """

    def __init__(self) -> None:
        self.outboxes: dict[str, Any] = {name: [] for name in NODES}
        self.silent: set[str] = set()
        self.writers = [NODES[0]]
        self.serials = {NODES[0]: 7}
        self.recorded: list[tuple[str, list[str]]] = []
        self.applied: list[str] = []
        self.at_work: Any = None

    def execute(  # as Salt's runner salt.execute
        self,
        tgt: str,
        fun: str | list[str],
        arg: Any = (),
        timeout: int | None = None,
        tgt_type: str = "glob",
        kwarg: Any = None,
    ) -> dict[str, Any]:
        if tgt_type == "compound":
            assert tgt == "I@brine:config:apply:true"
            ids = self.writers
        else:
            assert tgt_type == "pcre"
            ids = [each for each in NODES if re.match(tgt, each)]
        ids = [each for each in ids if each not in self.silent]
        if isinstance(fun, list):
            return {
                each: {
                    one: self._call(each, one, *given) for one, given in zip(fun, arg, strict=True)
                }
                for each in ids
            }
        return {each: self._call(each, fun, *arg, **(kwarg or {})) for each in ids}

    def _call(self, minion: str, function: str, *arguments: str, **given: Any) -> Any:
        if function == "brine.ask" and arguments[:2] == ("config", "record"):
            return self._record(arguments[3], json.loads(given["stdin"]))
        if function == "brine.ask":
            serial = self.serials.get(minion)
            return {"said": serial} if serial else {"refused": "no configuration"}
        if function == "brine.outbox_list":
            events = self.outboxes[minion]
            return [{"id": one} for one in events] if isinstance(events, list) else events
        if function == "brine.outbox_acknowledge":
            self.outboxes[minion] = [one for one in self.outboxes[minion] if one not in arguments]
            return []
        if function == "brine.list":
            return [WEB1] if minion == NODES[1] else []
        if function == "grains.get":
            return "0.2.0"
        assert (function, arguments) == ("state.apply", ("brine.confd",))
        self.applied.append(minion)
        return {"a": {"name": "a", "result": True, "changes": {}, "__run_num__": 0}}

    def _record(self, node: str, events: list[dict[str, str]]) -> Any:
        if self.at_work:
            work, self.at_work = self.at_work, None
            work()
        ids = [one["id"] for one in events]
        self.recorded.append((node, ids))
        done = [
            {"id": one, "recorded": one[:3] != "bad", "changed": True, "reason": "why"}
            for one in ids
        ]
        return {"said": {"events": done}}


@pytest.fixture
def minions() -> Minions:
    return Minions()


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minions: Minions) -> ModuleType:
    """The runner, on a master whose configuration has three nodes, the first two candidates."""
    nodes = {name: {"name": name, "master_candidate": name != NODES[2]} for name in NODES}
    command = tmp_path / "bin/brine"
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\necho '{json.dumps(nodes)}'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    given = {"__opts__": {"cachedir": str(tmp_path)}, "__context__": {}}
    return load("runners", "brine", __salt__={"salt.execute": minions.execute}, **given)


def test_an_outbox_is_recorded_redistributed_and_acknowledged(
    runner: ModuleType, minions: Minions
) -> None:
    minions.outboxes[NODES[2]] = ["a", "b"]
    told = runner.record(NODES[2])
    assert told == {
        "result": True,
        "comment": "2 events are recorded",
        "nodes": {NODES[2]: {"recorded": 2, "refused": []}},
    }
    assert minions.recorded == [(NODES[2], ["a", "b"])]
    assert minions.outboxes[NODES[2]] == []
    assert sorted(minions.applied) == sorted(NODES)
    minions.applied.clear()
    # Of a candidate, only candidates hear.
    minions.outboxes[NODES[1]] = ["c"]
    runner.record("node2")
    assert sorted(minions.applied) == sorted(NODES[:2])


def test_an_empty_outbox_changes_nothing(runner: ModuleType, minions: Minions) -> None:
    assert runner.record()["nodes"] == {key: {"recorded": 0, "refused": []} for key in NODES}
    assert (minions.recorded, minions.applied) == ([], [])


def test_what_is_refused_stays_and_stops_no_other(runner: ModuleType, minions: Minions) -> None:
    minions.outboxes = {NODES[0]: {"a": 1}, NODES[1]: ["bad1", "c"], NODES[2]: "it failed"}
    told = runner.record()["nodes"]
    assert told[NODES[1]] == {"recorded": 1, "refused": ["bad1: why"]}
    assert told[NODES[2]]["refused"] == ["its outbox is not known: it failed"]
    assert minions.outboxes[NODES[1]] == ["bad1"]
    assert minions.recorded == [(NODES[1], ["bad1", "c"])]


@pytest.mark.parametrize("minion", ["node9", "*", "..", "", "node1.example.com|node2"])
def test_a_stranger_is_refused(runner: ModuleType, minions: Minions, minion: str) -> None:
    told = runner.record(minion)
    assert (told["result"], minions.recorded) == (False, [])
    assert f"{minion} is no node" in told["comment"]


@pytest.mark.parametrize("writers", [[], [*NODES[:2]]])
def test_without_one_writer_nothing_is_acknowledged(
    runner: ModuleType, minions: Minions, writers: list[str]
) -> None:
    minions.outboxes[NODES[1]] = ["a"]
    minions.writers = writers
    told = runner.record(NODES[1])
    assert not told["result"]
    assert "brine:config:apply" in told["comment"]
    assert minions.outboxes[NODES[1]] == ["a"]
    # The next call takes up what this one has left.
    minions.writers = [NODES[0]]
    assert runner.record(NODES[2])["nodes"][NODES[1]]["recorded"] == 1


def test_one_call_works_at_a_time_and_takes_what_comes_meanwhile(
    runner: ModuleType, minions: Minions
) -> None:
    minions.outboxes.update({NODES[1]: ["a"], NODES[2]: ["b"]})
    left: list[Any] = []

    def meanwhile() -> None:
        left.extend(runner.record(node) for node in (NODES[2], NODES[2]))

    minions.at_work = meanwhile
    told = runner.record(NODES[1])
    assert [one["comment"] for one in left] == ["left to another call, which is at work"] * 2
    assert minions.recorded == [(NODES[1], ["a"]), (NODES[2], ["b"])]
    assert told["comment"] == "2 events are recorded"
    # A burst is one redistribution.
    assert sorted(minions.applied) == sorted(NODES)


def test_the_instances_of_all_nodes(runner: ModuleType, minions: Minions) -> None:
    minions.silent = {NODES[2]}
    assert runner.list_() == {
        NODES[0]: {},
        NODES[1]: {"web1.example.com": "running"},
        NODES[2]: "has not answered",
    }
    for name in ("web1", "web1.example.com", "u1"):
        told = runner.find(name)
        assert told["comment"] == f"{name} is on node2.example.com"
        assert told["nodes"][NODES[1]]["status"] == "running"
        assert told["unknown"] == {NODES[2]: "has not answered"}
    assert not runner.find("web")["result"]


def test_health(runner: ModuleType, minions: Minions) -> None:
    minions.outboxes[NODES[1]] = ["bad1"]
    told = runner.health()
    assert told["result"] is True
    of_node2 = {"serial": None, "instances": {"running": 1}, "not_recorded": 1}
    assert told["nodes"][NODES[1]] == {"version": "0.2.0", **of_node2}
    assert told["nodes"][NODES[0]]["serial"] == 7
    minions.serials[NODES[1]] = 6
    told = runner.health()
    assert (told["result"], told["stale"]) == (False, {NODES[1]: ["serial 6; the newest is 7"]})
    minions.serials[NODES[1]] = 7
    minions.silent = {NODES[2]}
    told = runner.health()
    assert (told["result"], told["not_answered"]) == (False, [NODES[2]])
    assert "stale" not in told
