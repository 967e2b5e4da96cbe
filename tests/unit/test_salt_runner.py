"""The runner of Salt's side: what is done on all nodes, and who has not confirmed it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

RUNNER = Path(__file__).parents[2] / "salt/states/_runners/brine.py"
KEY_FILE = "/etc/brine/hmac.key"
NODES = ("node1.example.com", "node2.example.com", "node3.example.com")
OLD = "the old key"


class Minions:
    """Nodes under a master. Each takes over the keys that the master's file has, as the external
    pillar and the states would have it.

    :ivar silent: the minions that do not answer.
    :ivar failing: the minions whose reload fails.
    :ivar keyless: the minions to which the external pillar gives no key.
    :ivar without: those whose pillar says that they have no brine-confd.
    :ivar own: minions whose pillar's SLS files declare a key.
    """

    def __init__(self, keys_file: Path) -> None:
        self.keys_file = keys_file
        self.silent: set[str] = set()
        self.failing: set[str] = set()
        self.keyless: set[str] = set()
        self.without: set[str] = set()
        self.own: dict[str, str] = {}
        self.keys: dict[str, dict[str, str]] = {}
        self.calls: list[tuple[str, list[str], dict[str, Any]]] = []

    def execute(  # as Salt's runner salt.execute
        self,
        tgt: str,
        fun: str,
        arg: Any = (),
        timeout: int | None = None,
        tgt_type: str = "glob",
        kwarg: Any = None,
    ) -> dict[str, Any]:
        assert tgt_type == "pcre"
        ids = [each for each in (*NODES, "other.example.com") if re.match(tgt, each)]
        self.calls.append((fun, [*arg], kwarg))
        functions: dict[str, Callable[..., Any]] = {
            "state.apply": self._apply,
            "file.get_hash": self._hash,
        }
        function = functions[fun]
        answers: dict[str, Any] = dict.fromkeys(ids, False)
        return answers | {each: function(each, *arg) for each in ids if each not in self.silent}

    def pillar(self, minion: str) -> dict[str, Any]:
        """As Salt's runner pillar.show_pillar."""
        key = self.own.get(minion)
        if key is None and self.keys_file.exists():
            key = json.loads(self.keys_file.read_text())["key"]
        return {"brine": {"confd": {"key": key}}} if key else {}

    def _apply(self, minion: str, state: str) -> Any:
        assert state == "brine.confd"
        if not self.keys_file.exists():
            return {"a": result("brine-ssconf", changes={"ssconf_x": "written"})}
        if minion in self.keyless:
            return {"a": result("brine-config-copied")}
        if minion in self.without:
            return {"a": result("brine-clean-confd-package")}
        keys = json.loads(self.keys_file.read_text())
        keys["key"] = self.own.get(minion, keys["key"])
        self.keys.setdefault(minion, {}).update(keys)
        reloaded = result("brine-confd-reloaded", minion not in self.failing)
        states = [result("brine-confd-key", name=KEY_FILE), reloaded]
        states += [result("brine-config-others", False)]  # which has nothing to do with keys
        if keys["previous_key"]:
            states.append(result("brine-confd-previous-key", name=f"{KEY_FILE}.previous"))
        return {str(number): one for number, one in enumerate(states)}

    def _hash(self, minion: str, path: str, form: str) -> str:
        assert form == "sha256"
        key = "previous_key" if path.endswith(".previous") else "key"
        return hashlib.sha256(f"{self.keys[minion][key]}\n".encode()).hexdigest()


def result(
    state: str, is_ok: bool = True, *, name: str | None = None, changes: Any = None
) -> dict[str, Any]:
    """What Salt tells of a state."""
    told = {"__id__": state, "name": name or state, "result": is_ok, "comment": "comment"}
    return {**told, "changes": changes or {}, "__run_num__": 0}


@pytest.fixture
def minions(tmp_path: Path) -> Minions:
    return Minions(tmp_path / "salt/keys.json")


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minions: Minions) -> ModuleType:
    """The runner, as Salt loads it, on a master whose configuration has three nodes."""
    spec = importlib.util.spec_from_file_location("brine_runner", RUNNER)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    functions = {"salt.execute": minions.execute, "pillar.show_pillar": minions.pillar}
    vars(module).update(__salt__=functions, __context__={})
    (tmp_path / "hmac.key").write_text(f"{OLD}\n")
    monkeypatch.setattr(module, "_KEYS", str(tmp_path / "salt/keys.json"))
    monkeypatch.setattr(module, "_KEY_FILE", str(tmp_path / "hmac.key"))
    give_nodes(tmp_path, monkeypatch)
    return module


def give_nodes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    names: Iterable[str] = NODES,
    offline: str = "",
) -> None:
    """Has the command ``brine`` print the configuration's nodes."""
    nodes = {name: {"name": name, "offline": name == offline} for name in names}
    command = tmp_path / "bin/brine"
    command.parent.mkdir(exist_ok=True)
    command.write_text(f"#!/bin/sh\necho '{json.dumps(nodes)}'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")


@pytest.mark.parametrize("test", [False, True])
def test_all_nodes_get_the_configuration(runner: ModuleType, minions: Minions, test: bool) -> None:
    told = runner.redistribute(test=test)
    assert told["result"] is True
    assert told["nodes"] == {name: {"changed": ["brine-ssconf"], "failed": []} for name in NODES}
    assert {kwargs["test"] for *_, kwargs in minions.calls} == {test}
    assert ("would" in told["comment"]) is test
    assert runner.__context__ == {}


def test_this_hosts_node_comes_first(
    runner: ModuleType, minions: Minions, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Uname:
        nodename = "node2"

    monkeypatch.setattr(os, "uname", Uname)
    assert len(runner.redistribute()["nodes"]) == 3
    assert len(minions.calls) == 2


def test_those_that_do_not_answer_are_named(
    runner: ModuleType, minions: Minions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_nodes(tmp_path, monkeypatch, offline=NODES[2])
    minions.silent = {NODES[2]}
    told = runner.redistribute()
    assert (told["result"], told["offline"]) == (True, [NODES[2]])
    minions.silent = {NODES[1], NODES[2]}
    told = runner.redistribute()
    assert (told["result"], told["not_answered"]) == (False, [NODES[1]])
    assert runner.__context__["retcode"] == 1


def test_a_master_without_a_configuration_says_so(runner: ModuleType, tmp_path: Path) -> None:
    text = "brine: error: config.data: there is no configuration"
    (tmp_path / "bin/brine").write_text(f"#!/bin/sh\necho '{text}' >&2\nexit 1\n")
    for function in (runner.redistribute, runner.rotate_key):
        assert function() == {"result": False, "comment": text}


def test_a_rotation_goes_by_steps_that_all_confirm(
    runner: ModuleType, minions: Minions, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[str, str, str]] = []
    replace = os.rename

    def renamed(old: str, new: str) -> None:
        keys = json.loads(Path(old).read_text())
        assert Path(old).stat().st_mode & 0o777 == 0o600
        steps.append((keys["step"], keys["key"], keys["previous_key"]))
        replace(old, new)

    monkeypatch.setattr(os, "rename", renamed)
    assert runner.rotate_key()["result"] is True
    new = minions.keys[NODES[0]]["key"]
    assert steps == [("accept", OLD, new), ("sign", new, OLD), ("drop", new, ""), ("done", new, "")]
    assert len(new) == 64
    assert {keys["key"] for keys in minions.keys.values()} == {new}
    assert runner.rotate_key()["result"] is True
    assert minions.keys[NODES[0]]["key"] not in (new, OLD)


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_rotation_that_was_killed_continues_with_its_step(
    runner: ModuleType, minions: Minions, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    replace = os.rename
    count = 0

    def killed(old: str, new: str) -> None:
        nonlocal count
        count += 1
        if count == step:
            raise KeyboardInterrupt
        replace(old, new)

    monkeypatch.setattr(os, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        runner.rotate_key()
    before = json.loads(minions.keys_file.read_text()) if step > 1 else None
    assert runner.rotate_key()["result"] is True
    keys = json.loads(minions.keys_file.read_text())
    assert keys["step"] == "done"
    assert before is None or keys["key"] in before.values()


@pytest.mark.parametrize("kind", ["silent", "failing"])
def test_a_rotation_stops_and_names_those_that_have_not_confirmed(
    runner: ModuleType, minions: Minions, kind: str
) -> None:
    setattr(minions, kind, {NODES[1]})
    told = runner.rotate_key()
    assert (told["result"], told["step"], [*told["not_confirmed"]]) == (False, "accept", [NODES[1]])
    assert json.loads(minions.keys_file.read_text())["key"] == OLD
    assert runner.__context__["retcode"] == 1
    new = json.loads(minions.keys_file.read_text())["previous_key"]
    setattr(minions, kind, set())
    assert runner.rotate_key()["result"] is True
    assert json.loads(minions.keys_file.read_text())["key"] == new


def test_a_rotation_stops_where_a_node_gets_no_key(runner: ModuleType, minions: Minions) -> None:
    minions.keyless = {NODES[1]}
    told = runner.rotate_key()
    assert (told["result"], told["step"], [*told["not_confirmed"]]) == (False, "accept", [NODES[1]])
    assert "gets no key" in told["not_confirmed"][NODES[1]]
    minions.keyless, minions.without = set(), {NODES[1]}
    assert runner.rotate_key()["result"] is True


@pytest.mark.parametrize("kind", ["keyless", "without"])
def test_a_rotation_that_reaches_no_node_says_what_to_look_at(
    runner: ModuleType, minions: Minions, kind: str
) -> None:
    setattr(minions, kind, {*NODES})
    told = runner.rotate_key()
    assert told["result"] is False
    assert "is the external pillar brine in the master's configuration" in told["comment"]


def test_a_node_that_is_added_during_a_rotation_is_waited_for(
    runner: ModuleType,
    minions: Minions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give_nodes(tmp_path, monkeypatch, names=NODES[:2])
    minions.silent = {NODES[2]}
    apply = minions._apply

    def added(minion: str, state: str) -> Any:
        give_nodes(tmp_path, monkeypatch)
        return apply(minion, state)

    monkeypatch.setattr(minions, "_apply", added)
    told = runner.rotate_key()
    assert (told["result"], told["step"], [*told["not_confirmed"]]) == (False, "sign", [NODES[2]])


def test_a_rotation_stops_where_a_node_answers_nonsense(
    runner: ModuleType, minions: Minions, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = minions._apply

    def answered(minion: str, state: str) -> Any:
        answer = apply(minion, state)
        return {**answer, "z": "rubbish"} if minion == NODES[1] else answer

    monkeypatch.setattr(minions, "_apply", answered)
    told = runner.rotate_key()
    assert (told["result"], [*told["not_confirmed"]]) == (False, [NODES[1]])
    assert "rubbish" in told["not_confirmed"][NODES[1]]


def test_a_node_that_is_offline_is_not_waited_for(
    runner: ModuleType, minions: Minions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_nodes(tmp_path, monkeypatch, offline=NODES[1])
    minions.silent = {NODES[1]}
    told = runner.rotate_key()
    assert (told["result"], told["offline"]) == (True, [NODES[1]])


def test_a_declared_key_is_not_rotated(runner: ModuleType, minions: Minions) -> None:
    minions.own = {NODES[2]: "declared"}
    told = runner.rotate_key()
    assert told["result"] is False
    assert f"pillar of {NODES[2]} declares brine:confd:key" in told["comment"]
    assert "declared" not in str(told).replace("declares", "")
    assert not minions.keys_file.exists()


def test_the_first_key_is_made_where_there_is_none(
    runner: ModuleType, minions: Minions, tmp_path: Path
) -> None:
    (tmp_path / "hmac.key").unlink()
    assert runner.rotate_key()["result"] is True
    assert {len(keys["key"]) for keys in minions.keys.values()} == {64}


@pytest.mark.parametrize("text", ["", "[]", '{"key": "", "previous_key": "", "step": "done"}'])
def test_a_damaged_file_of_keys_is_left_alone(
    runner: ModuleType, minions: Minions, text: str
) -> None:
    minions.keys_file.parent.mkdir()
    minions.keys_file.write_text(text)
    assert "is damaged" in runner.rotate_key()["comment"]
    assert minions.keys_file.read_text() == text
