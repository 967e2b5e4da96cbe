"""The Salt runner: its work on all nodes, and the nodes that did not confirm it."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from brine.common import cli, operation, paths
from brine.common.entry_points import EntryPoint
from unit.salt_loader import be_on

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
    :ivar busy: how often minions say that they are just applying states.
    :ivar at_work: what happens while states are applied; once.
    :ivar own: minions whose pillar's SLS files declare a key.
    :ivar cpus: what ``brine node cpu --json`` prints.
    :ivar healths: what the function ``brine.health`` returns.
    :ivar declared: the whole pillar of minions.
    """

    def __init__(self, keys_file: Path) -> None:
        self.keys_file = keys_file
        self.silent: set[str] = set()
        self.failing: set[str] = set()
        self.keyless: set[str] = set()
        self.without: set[str] = set()
        self.busy: dict[str, int] = {}
        self.at_work: Callable[[], None] | None = None
        self.own: dict[str, str] = {}
        self.declared: dict[str, dict[str, Any]] = {}
        self.keys: dict[str, dict[str, str]] = {}
        self.cpus: dict[str, Any] = {}
        self.healths: dict[str, Any] = {}
        self.applied: list[str] = []
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
            "brine.node_cpu": lambda each: self.cpus[each],
            "brine.health": lambda each: self.healths[each],
        }
        function = functions[fun]
        answers: dict[str, Any] = dict.fromkeys(ids, False)
        return answers | {each: function(each, *arg) for each in ids if each not in self.silent}

    def pillar(self, minion: str) -> dict[str, Any]:
        """As Salt's runner pillar.show_pillar."""
        if minion in self.declared:
            return self.declared[minion]
        key = self.own.get(minion)
        if key is None and self.keys_file.exists():
            key = json.loads(self.keys_file.read_text())["key"]
        return {"brine": {"confd": {"key": key}}} if key else {}

    def _apply(self, minion: str, state: str) -> Any:
        if self.busy.get(minion):
            self.busy[minion] -= 1
            if self.busy[minion] % 2:
                text = "expected str, bytes or os.PathLike object, not list"
                return f"Passed invalid arguments to state.apply: {text}"
            return ['The function "state.apply" is running as PID 7 and was started at ...']
        self.applied.append(minion)
        if self.at_work:
            work, self.at_work = self.at_work, None
            work()
        if state == "brine":
            is_ok = minion not in self.failing
            return {"a": result("brine-ssconf", is_ok, changes={"ssconf_x": "written"})}
        assert state == "brine.confd"
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
    """Salt's report about a state."""
    told = {"__id__": state, "name": name or state, "result": is_ok, "comment": "comment"}
    return {**told, "changes": changes or {}, "__run_num__": 0}


@pytest.fixture
def minions(tmp_path: Path) -> Minions:
    return Minions(tmp_path / "salt/keys.json")


@pytest.fixture
def runner(own_node: Path, monkeypatch: pytest.MonkeyPatch, minions: Minions) -> ModuleType:
    """The runner, as Salt loads it, on a master whose configuration has three nodes."""
    tmp_path = own_node
    spec = importlib.util.spec_from_file_location("brine_runner", RUNNER)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    functions = {"salt.execute": minions.execute, "pillar.show_pillar": minions.pillar}
    given = {"__opts__": {"cachedir": str(tmp_path)}, "__context__": {}}
    vars(module).update(__salt__=functions, **given)
    (tmp_path / "hmac.key").write_text(f"{OLD}\n")
    monkeypatch.setattr(paths, "SALT_KEYS_FILE", minions.keys_file)
    monkeypatch.setattr(paths, "KEY_FILE", tmp_path / "hmac.key")
    give_nodes(tmp_path, monkeypatch)
    rotate_here(monkeypatch)
    return module


def rotate_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the runner's ``brine config rotate-key`` run in this process, so that a test can kill
    it at one of its steps."""
    run = subprocess.run

    def run_here(command: list[str], **how: Any) -> Any:
        if command[:3] != ["brine", "config", "rotate-key"]:
            return run(command, **how)
        said, said_wrong = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said_wrong):
            try:
                status = cli.main(command[1:])
            except SystemExit as end:
                status = int(end.code or 0)
        texts = (one.getvalue().encode() for one in (said, said_wrong))
        return subprocess.CompletedProcess(command, status, *texts)

    monkeypatch.setattr(subprocess, "run", run_here)
    entry = EntryPoint("config", "brine.config.cli:COMMAND")
    monkeypatch.setattr(cli, "entry_points", lambda group: [entry] * (group == "brine.commands"))


def give_nodes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    names: Iterable[str] = NODES,
    offline: str = "",
) -> None:
    """Has the command ``brine`` print the configuration's nodes, and the serial of a file."""
    nodes = {name: {"name": name, "offline": name == offline} for name in names}
    serial = tmp_path / "serial"
    serial.write_text("7")
    command = tmp_path / "bin/brine"
    command.parent.mkdir(exist_ok=True)
    shown = f"/nodes) echo '{json.dumps(nodes)}';; /cluster/serial_no) cat {serial};; *) exit 9"
    command.write_text(f"#!/bin/sh\ncase $3 in {shown};; esac\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")


@pytest.mark.parametrize("test", [False, True])
def test_all_nodes_get_the_configuration(runner: ModuleType, minions: Minions, test: bool) -> None:
    told = runner.redistribute(test=test)
    assert told["result"] is True
    assert told["nodes"] == {name: {"changed": ["brine-ssconf"], "failed": []} for name in NODES}
    assert {kwargs["test"] for *_, kwargs in minions.calls} == {test}
    assert ("would" in told["comment"]) is test
    assert "retcode" not in told


def test_this_hosts_node_comes_first(
    runner: ModuleType, minions: Minions, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_on("Node2", monkeypatch)  # case does not count
    told = runner.redistribute()
    assert (len(told["nodes"]), told["serial"]) == (3, 7)
    assert minions.applied == [NODES[1], NODES[0], NODES[2]]


def test_a_bell_has_all_other_nodes_get_what_has_changed(
    runner: ModuleType, minions: Minions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_on("node1", monkeypatch)
    # The first time, this host's pillar may have been rendered without a configuration, too.
    for serial, concerned in (("7", NODES), ("8", NODES[1:])):
        (tmp_path / "serial").write_text(serial)
        told = runner.redistribute(if_changed=True)
        assert (told["result"], told["serial"]) == (True, int(serial))
        assert minions.applied == [*concerned]
        minions.applied.clear()
        told = runner.redistribute(if_changed=True)
        assert (told["comment"], minions.applied) == ("all is distributed already", [])
    runner.redistribute()
    assert minions.applied == [*NODES]


@pytest.mark.parametrize("if_changed", [False, True])
def test_bells_during_a_redistribution_are_one_more(
    runner: ModuleType,
    minions: Minions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    if_changed: bool,
) -> None:
    be_on("node3", monkeypatch)
    others = [*NODES[:2]]
    (tmp_path / "brine").mkdir()
    (tmp_path / "brine/given").write_text("6")

    def ring() -> None:
        (tmp_path / "serial").write_text("9")
        for _ in range(5):
            assert runner.redistribute(if_changed=True)["result"] is True

    minions.at_work = ring
    told = runner.redistribute(if_changed=if_changed)
    # What the writer's own run changes, the others get at once.
    assert minions.applied == ([*others, *others] if if_changed else [NODES[2], *others])
    assert told["serial"] == 9


def test_a_node_that_fails_or_is_away_is_named_in_the_log_and_not_tried_for_ever(
    runner: ModuleType, minions: Minions, caplog: pytest.LogCaptureFixture
) -> None:
    minions.silent, minions.failing = {NODES[1]}, {NODES[2]}
    told = runner.redistribute(if_changed=True)
    assert (told["result"], told["not_answered"]) == (False, [NODES[1]])
    text = "is not as the configuration says"
    assert caplog.messages == [
        f"brine.redistribute: {NODES[2]} {text}: brine-ssconf: comment",
        f"brine.redistribute: {NODES[1]} {text}: it has not answered",
    ]
    minions.applied.clear()
    runner.redistribute(if_changed=True)
    assert minions.applied == []


def test_a_redistribution_that_was_killed_is_made_up_for(
    runner: ModuleType, minions: Minions
) -> None:
    def killed() -> None:
        raise KeyboardInterrupt

    minions.at_work = killed
    with pytest.raises(KeyboardInterrupt):
        runner.redistribute(if_changed=True)
    minions.applied.clear()
    runner.redistribute(if_changed=True)
    assert minions.applied == [*NODES]


def test_a_node_that_applies_states_just_now_is_waited_for(
    runner: ModuleType, minions: Minions, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    minions.busy = {NODES[1]: 6}
    assert runner.redistribute()["result"] is True
    assert minions.applied == [NODES[0], NODES[2], NODES[1]]
    assert [one for one in pauses if one >= 1] == [1, 2, 4, 8, 15, 15]  # others wait for brine
    minions.busy = {NODES[1]: 10**9 + 1}
    monkeypatch.setattr(runner, "_BUSY_TIMEOUT_S", 0)
    told = runner.redistribute()
    assert told["result"] is False
    assert "is running as PID 7" in told["nodes"][NODES[1]]["failed"][0]


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
    assert (told["retcode"], runner.__context__["retcode"]) == (1, 1)
    # The reactor calls it with the same context.
    minions.silent = set()
    assert "retcode" not in runner.redistribute()
    assert runner.__context__["retcode"] == 0


def test_a_master_without_a_configuration_says_so(runner: ModuleType, tmp_path: Path) -> None:
    lines = "brine: warning: old", "brine: error: there is none", "brine: hint: make one"
    said = "\n".join(lines)
    (tmp_path / "bin/brine").write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    for function in (runner.redistribute, runner.rotate_key):
        told = function()
        assert told == {"result": False, "comment": "there is none; make one", "retcode": 1}


def test_a_rotation_goes_by_steps_that_all_confirm(
    runner: ModuleType, minions: Minions, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[str, str, str]] = []
    replace = os.rename

    def renamed(old: Path, new: Path, **how: Any) -> None:
        if new == minions.keys_file:
            keys = json.loads(old.read_text())
            assert old.stat().st_mode & 0o777 == 0o600
            steps.append((keys["step"], keys["key"], keys["previous_key"]))
        replace(old, new, **how)

    monkeypatch.setattr(os, "rename", renamed)
    assert runner.rotate_key()["result"] is True
    new = minions.keys[NODES[0]]["key"]
    assert steps == [("accept", OLD, new), ("sign", new, OLD), ("drop", new, ""), ("done", new, "")]
    assert len(new) == 64
    assert {keys["key"] for keys in minions.keys.values()} == {new}
    assert not operation.pending()
    assert runner.rotate_key()["result"] is True
    assert minions.keys[NODES[0]]["key"] not in (new, OLD)


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_rotation_that_was_killed_continues_with_its_step(
    runner: ModuleType, minions: Minions, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    replace = os.rename
    count = 0

    def killed(old: Path, new: Path, **how: Any) -> None:
        nonlocal count
        count += new == minions.keys_file
        if count == step:
            raise KeyboardInterrupt
        replace(old, new, **how)

    monkeypatch.setattr(os, "rename", killed)
    runner.rotate_key()  # the command ends, and says so
    before = json.loads(minions.keys_file.read_text()) if step > 1 else None
    count = -9
    assert runner.rotate_key()["result"] is True
    keys = json.loads(minions.keys_file.read_text())
    assert keys["step"] == "done"
    assert before is None or keys["key"] in before.values()


@pytest.mark.parametrize("step", ["accept", "sign", "drop"])
def test_a_rotation_that_0_2_0_began_continues_with_its_step(
    runner: ModuleType, minions: Minions, step: str
) -> None:
    new = "e" * 64
    keys = {"accept": (OLD, new), "sign": (new, OLD), "drop": (new, "")}[step]
    minions.keys_file.parent.mkdir()
    content = {"key": keys[0], "previous_key": keys[1], "step": step}
    minions.keys_file.write_text(json.dumps(content))
    minions.silent = {NODES[1]}
    told = runner.rotate_key()
    assert (told["result"], told["step"]) == (False, step)
    assert json.loads(minions.keys_file.read_text()) == content
    minions.silent = set()
    assert runner.rotate_key()["result"] is True
    assert {one["key"] for one in minions.keys.values()} == {new}


def test_a_rotation_that_waits_is_listed_and_a_boot_changes_nothing(
    runner: ModuleType,
    minions: Minions,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    minions.silent = {NODES[1]}
    runner.rotate_key()
    before = minions.keys_file.read_text()
    entry = EntryPoint("operations", "brine.common.cli:OPERATIONS")
    with monkeypatch.context() as patch:
        patch.setattr(cli, "entry_points", lambda group: [entry] * (group == "brine.commands"))
        assert cli.main(["operations", "settle"]) == 0
        assert cli.main(["operations", "list"]) == 0
    said = capsys.readouterr().out
    assert "salt-run brine.rotate_key" in said
    assert not any(key in said for key in json.loads(before).values() if len(key) > 6)
    assert minions.keys_file.read_text() == before
    minions.silent = set()
    assert runner.rotate_key()["result"] is True


def test_keys_that_were_replaced_by_hand_end_a_rotation(
    runner: ModuleType, minions: Minions
) -> None:
    minions.silent = {NODES[1]}
    runner.rotate_key()
    minions.silent = set()
    minions.keys_file.write_text('{"key": "by hand", "previous_key": "", "step": "done"}')
    assert runner.rotate_key()["result"] is True
    assert len(json.loads(minions.keys_file.read_text())["key"]) == 64
    assert not operation.pending()


@pytest.mark.parametrize("kind", ["silent", "failing"])
def test_a_rotation_stops_and_names_those_that_have_not_confirmed(
    runner: ModuleType, minions: Minions, kind: str
) -> None:
    setattr(minions, kind, {NODES[1]})
    told = runner.rotate_key()
    assert (told["result"], told["step"], [*told["not_confirmed"]]) == (False, "accept", [NODES[1]])
    assert json.loads(minions.keys_file.read_text())["key"] == OLD
    assert told["retcode"] == 1
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


# The processor of all nodes.

CPUS = Path(__file__).parent / "processors"
SKYLAKE, ICELAKE = "Skylake-Server-v4", "Icelake-Server-v6"


def cpu(model: str) -> dict[str, Any]:
    """The answer of a node whose processor is exactly that model of QEMU's."""
    data: dict[str, Any] = json.loads((CPUS / "kvm-7.2.json").read_text())
    return {**data, "flags": data["models"][model]["flags"]}


@pytest.fixture
def config(own_node: Path, monkeypatch: pytest.MonkeyPatch, runner: ModuleType) -> Path:
    """A real configuration, on its master: two groups, an instance with a processor of its own."""
    entries = {
        "brine.commands": [EntryPoint("config", "brine.config.cli:COMMAND")],
        "brine.verbs": [EntryPoint("config", "brine.cluster.cli:add_config_verbs")],
    }
    monkeypatch.setattr(cli, "entry_points", lambda group: entries.get(group, []))
    monkeypatch.setattr(cli, "installed_versions", lambda: dict.fromkeys(("config", "cluster"), ""))

    def run_here(command: list[str], *, input: bytes, **_: Any) -> Any:
        said, said_wrong = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(input)))
        arguments = [*command[1:]]
        if arguments[0] == "config":
            arguments[1:1] = ["--config", str(file)]
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said_wrong):
            try:
                status = cli.main(arguments)
            except SystemExit as end:
                status = int(end.code or 0)
        texts = (one.getvalue().encode() for one in (said, said_wrong))
        return subprocess.CompletedProcess(command, status, *texts)

    file = own_node / "config.data"
    monkeypatch.setattr(subprocess, "run", run_here)
    monkeypatch.setattr(os, "uname", lambda: Uname(nodename=NODES[0]))
    nodes = {
        name: {"primary_ip": f"192.0.2.{number}", "group": "rest" if number == 3 else "default"}
        for number, name in enumerate(NODES, start=1)
    }
    declared = {
        "cluster": {
            "name": "prod.example.com",
            "master": NODES[0],
            "hvparams": {"kvm": {"acpi": False}},
        },
        "nodegroups": {"default": {}, "rest": {}},
        "nodes": nodes,
        "instances": {
            "web1": {"primary_node": NODES[1], "hvparams": {"cpu_type": "Haswell"}},
            "web2": {"primary_node": NODES[1]},
        },
    }
    done = run_here(
        ["brine", "config", "apply", "-", "--json"], input=json.dumps(declared).encode()
    )
    assert done.returncode == 0, done.stderr
    return file


class Uname(NamedTuple):
    """The part of os.uname() that names the host."""

    nodename: str


def written(file: Path) -> Any:
    """The parameters of KVM in a configuration."""
    return json.loads(file.read_text())["cluster"]["hvparams"]["kvm"]


def test_the_processor_of_all_becomes_the_default(
    runner: ModuleType, minions: Minions, config: Path
) -> None:
    minions.cpus = {NODES[0]: cpu(ICELAKE), NODES[1]: cpu(SKYLAKE), NODES[2]: cpu(ICELAKE)}
    before = config.read_text()
    told = runner.cpu_baseline(test=True)
    assert (told["result"], told["cpu_type"]) == (True, SKYLAKE)
    assert "would" in told["comment"]
    assert config.read_text() == before
    assert minions.applied == []
    told = runner.cpu_baseline()
    assert (told["result"], told["cpu_type"], told["own"]) == (True, SKYLAKE, ["web1"])
    assert "avx512vnni" in told["lacking"][NODES[1]]
    assert written(config) == {"acpi": False, "cpu_type": SKYLAKE}
    assert {*minions.applied} == {*NODES}
    assert {*told["nodes"]} == {*NODES}
    again = runner.cpu_baseline()
    assert (again["result"], again["before"]) == (True, SKYLAKE)
    assert "already" in again["comment"]


def test_a_group_has_its_own_nodes_asked(
    runner: ModuleType, minions: Minions, config: Path
) -> None:
    minions.cpus = {NODES[0]: cpu(SKYLAKE), NODES[1]: cpu(SKYLAKE), NODES[2]: cpu(ICELAKE)}
    told = runner.cpu_baseline("rest", test=True)
    assert told["cpu_type"] == ICELAKE
    assert told["other_nodes"] == [*NODES[:2]]
    assert runner.cpu_baseline("default", test=True)["cpu_type"] == SKYLAKE
    told = runner.cpu_baseline("none", test=True)
    assert told["result"] is False
    assert "default, rest" in told["comment"]


@pytest.mark.parametrize("answer", [None, "brine node cpu --json failed", [], {"accel": "kvm"}])
def test_a_processor_that_is_not_known_changes_nothing(
    runner: ModuleType, minions: Minions, config: Path, answer: Any
) -> None:
    minions.cpus = {NODES[0]: cpu(SKYLAKE), NODES[1]: answer, NODES[2]: cpu(SKYLAKE)}
    if answer is None:
        minions.silent = {NODES[1]}
    before = config.read_text()
    told = runner.cpu_baseline()
    assert (told["result"], told["retcode"]) == (False, 1)
    assert NODES[1] in told["comment"]
    assert config.read_text() == before
    assert minions.applied == []


def test_vendors_that_differ_are_named(runner: ModuleType, minions: Minions, config: Path) -> None:
    minions.cpus = dict.fromkeys(NODES, cpu(SKYLAKE))
    minions.cpus[NODES[2]] = {**cpu(SKYLAKE), "vendor": "AuthenticAMD"}
    told = runner.cpu_baseline()
    assert told["result"] is False
    assert f"AuthenticAMD on {NODES[2]}" in told["comment"]
    assert "cpu_type" not in written(config)


def test_a_master_without_brine_cluster_is_told_so(
    runner: ModuleType, minions: Minions, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    minions.cpus = dict.fromkeys(NODES, cpu(SKYLAKE))
    only = EntryPoint("config", "brine.config.cli:COMMAND")
    monkeypatch.setattr(cli, "entry_points", lambda group: [only] * (group == "brine.commands"))
    monkeypatch.setattr(cli, "installed_versions", lambda: {"config": "0.3.0"})
    told = runner.cpu_baseline()
    assert told["result"] is False
    assert "brine-cluster" in told["comment"]


def test_a_declared_processor_is_not_written_over(
    runner: ModuleType, minions: Minions, config: Path
) -> None:
    """The next run of the master's states would put it back."""
    minions.cpus = dict.fromkeys(NODES, cpu(SKYLAKE))
    declared: Any = {"brine": {"cluster": {"hvparams": {"kvm": {"cpu_type": "Haswell"}}}}}
    minions.declared = {NODES[0]: declared}
    for test in (True, False):
        told = runner.cpu_baseline(test=test)
        assert told["result"] is False
        assert SKYLAKE in told["comment"]
        assert "brine:cluster:hvparams:kvm:cpu_type" in told["comment"]
    assert "cpu_type" not in written(config)
    declared["brine"]["cluster"]["hvparams"]["kvm"]["cpu_type"] = SKYLAKE
    assert runner.cpu_baseline()["result"] is True


# Figures of the cluster.


def test_metrics_tell_serials_apart_and_nodes_away(
    runner: ModuleType, minions: Minions, tmp_path: Path
) -> None:
    openmetrics = pytest.importorskip("prometheus_client.openmetrics.parser")
    hostile = 'ERROR_"up\\\n'
    rows = [{"name": "web1", "status": "running"}, {"name": "web2", "status": hostile}]
    minions.healths = {
        NODES[0]: {"serial": {"said": 7}, "instances": {"said": rows}},
        NODES[1]: {"serial": {"said": 6}, "instances": {"refused": "brine can't be run"}},
    }
    minions.silent = {NODES[2]}
    text = runner.metrics()
    found = {
        (sample.name.removeprefix("brine_cluster_"), *sample.labels.values()): sample.value
        for family in openmetrics.text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found == {
        ("nodes",): 3,
        ("nodes_away",): 1,
        ("node_answers", NODES[0]): 1,
        ("node_answers", NODES[1]): 1,
        ("node_answers", NODES[2]): 0,
        ("serial",): 7,
        ("serials_apart",): 1,
        ("node_serial", NODES[0]): 7,
        ("node_serial", NODES[1]): 6,
        ("instances", NODES[0], "running"): 1,
        ("instances", NODES[0], hostile): 1,
    }
    file = tmp_path / "cluster.prom"
    assert runner.metrics(textfile=str(file))["result"]
    assert file.read_text() == text
    assert not runner.metrics(textfile=str(tmp_path / "none/cluster.prom"))["result"]
