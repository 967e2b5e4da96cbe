"""The Salt runner that moves instances, with the master's own commands and records; the nodes are
stand-ins, which may be silent, late, or lie."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from brine.common import cli, operation, paths
from brine.common.operation import AnswerState, StepAnswer
from brine.config.model import Configuration
from brine.config.store import ConfigStore
from lab.ganeti_config import ganeti_config, instance_name, node_name, uuid_of
from offers import offer_of
from tree_entry_points import of_tree
from unit.salt_loader import be_on

RUNNER = Path(__file__).parents[2] / "salt/states/_runners/brine.py"
WEB1 = instance_name(1)
N1, N2, N3 = (node_name(number) for number in (1, 2, 3))

Change = Callable[[dict[str, Any]], Any]


class Nodes:
    """The nodes of a cluster, as minions.

    :ivar asked: the steps, each with its node.
    :ivar change: by a step's name, what becomes of the answer to it, each time one is due; a node
        gives no answer if that is None, and its own where there is no more change.
    :ivar free_mib: by node.
    :ivar failing: the node whose states fail.
    :ivar without: nodes that lack brine-moves.
    :ivar timeouts: by a step's name, how long nodes got to answer it, each time.
    :ivar obstacles: by node, those of an instance that would move there.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.facts: dict[str, dict[str, Any]] = {}
        self.change: dict[str, list[Change]] = {}
        self.free_mib = {N2: 1000, N3: 2000}
        self.obstacles: dict[str, list[str]] = {}
        self.refused: list[str] = []
        self.applied: list[str] = []
        self.failing = ""
        self.without: set[str] = set()
        self.timeouts: dict[str, list[int | None]] = {}

    def execute(
        self,
        tgt: str,
        fun: str,
        arg: Any = (),
        timeout: int | None = None,
        tgt_type: str = "glob",
        kwarg: Any = None,
    ) -> dict[str, Any]:
        """As Salt's runner salt.execute."""
        ids = [each for each in (N1, N2, N3) if re.match(tgt, each)]
        if fun == "brine.move_step":
            self.timeouts.setdefault(kwarg["question"]["step"], []).append(timeout)
        function = self.functions()[fun]
        answers = {each: function(each, *arg, **kwarg) for each in ids}
        return {each: False if answer is None else answer for each, answer in answers.items()}

    def functions(self) -> dict[str, Callable[..., Any]]:
        return {
            "state.apply": self._apply,
            "brine.move_step": self._step,
            "brine.move_offer": self._offer,
            "brine.move_check": self._check,
            "brine.ask": self._asked,
            "brine.node_facts": lambda each: {"memory_available_mib": self.free_mib[each]},
        }

    def _apply(self, node: str, state: str, test: bool) -> Any:
        assert (state, test) == ("brine.confd", False)
        self.applied.append(node)
        changes = {"name": "key", "result": node != self.failing, "comment": "", "changes": {}}
        return {"a": {**changes, "__id__": "brine-confd-key", "__run_num__": 0}}

    def _asked(self, node: str, *command: str) -> Any:
        assert command == ("move", "list")
        return {"refused": "there is no command move"} if node in self.without else {"said": []}

    def _offer(self, node: str, name: str, cold: bool) -> Any:
        assert name == WEB1
        store = ConfigStore(paths.CONFIG_FILE)
        offer = offer_of(store, name, live=not cold, copies=True)
        return {"obstacles": self.refused} if self.refused else offer

    def _check(self, node: str, offer: Any) -> Any:
        assert offer["runs"]
        return {"obstacles": [{"why": why} for why in self.obstacles.get(node, [])]}

    def _step(self, node: str, question: dict[str, Any], wait: float) -> Any:
        step = question["step"]
        self.facts[step] = question["facts"]
        found: dict[str, Any] = {}
        if step == "offer":
            found = self._offer(node, question["facts"]["instance"], question["facts"]["cold"])
        answer = StepAnswer(question["id"], step, AnswerState.DONE, found=found).facts()
        changes = self.change.get(step, [])
        if changes:
            return changes.pop(0)(answer)
        self.asked.append(f"{step} {node.partition('.')[0]}")
        return answer


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


@pytest.fixture
def store(own_node: Path, monkeypatch: pytest.MonkeyPatch) -> ConfigStore:
    """The cluster's configuration: its first instance is on the first node."""
    monkeypatch.setattr(paths, "CONFIG_FILE", own_node / "config.data")
    monkeypatch.setattr(paths, "CONFIG_LOCK", own_node / "config.lock")
    store = ConfigStore(own_node / "config.data")
    with store.writing() as writer:
        writer.write(Configuration.from_json(ganeti_config()))
    return store


@pytest.fixture
def runner(
    own_node: Path, store: ConfigStore, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> ModuleType:
    """The runner, as Salt loads it. Its ``brine`` runs in this process."""
    spec = importlib.util.spec_from_file_location("brine_runner", RUNNER)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    given = {"__opts__": {"cachedir": str(own_node)}, "__context__": {}}
    vars(module).update(__salt__={"salt.execute": nodes.execute}, **given)
    monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0)
    for place in (cli, operation):
        monkeypatch.setattr(place, "entry_points", of_tree)
    monkeypatch.setattr(subprocess, "run", run_here(monkeypatch))
    monkeypatch.setenv("PATH", str(own_node))  # without brine: there is no brine-lockd
    be_on(N1, monkeypatch)
    return module


def run_here(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def run(command: list[str], *, input: bytes, **_: Any) -> Any:
        said, wrong = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(input)))
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(wrong):
            try:
                status = cli.main(command[1:])
            except SystemExit as end:
                status = int(end.code or 0)
        texts = (one.getvalue().encode() for one in (said, wrong))
        return subprocess.CompletedProcess(command, status, *texts)

    return run


def home(store: ConfigStore) -> str:
    found = store.read()
    return found.nodes[found.instances[uuid_of("instance", 1)].primary_node].name


ALL_STEPS = ["offer node1", "prepare node2", "copy node1", "hand over node1"]


def test_a_move_is_carried_out(runner: ModuleType, nodes: Nodes, store: ConfigStore) -> None:
    told = runner.migrate("instance1", to="node2", rate=1000)
    assert (told["result"], told["target"], told["instance"]) == (True, "node2", WEB1)
    assert (nodes.asked, home(store), operation.pending()) == (ALL_STEPS, N2, [])
    assert nodes.facts["copy"]["wishes"]["rate"] == 1000
    assert {N1, N2} <= {*nodes.applied}
    assert "lock" in told["notes"][0]
    again = runner.migrate("instance1", to="node2")
    assert (again["result"], nodes.asked) == (True, ALL_STEPS)


def test_pillar_that_still_has_the_old_node_holds_no_move_up(
    runner: ModuleType, nodes: Nodes, store: ConfigStore
) -> None:
    nodes.failing = N1  # this host's
    assert runner.migrate(WEB1, to=N2)["result"] is True
    nodes.failing = N2
    told = runner._migrate(WEB1, N3, patience_s=0)
    assert (told["result"], told["state"]) == (False, "committed")
    assert N2 in told["comment"]
    nodes.failing = ""
    assert (runner.migrate(WEB1)["result"], home(store)) == (True, N3)


def _late(answer: dict[str, Any]) -> Any:
    return {**answer, "state": "running", "progress": 0.5, "found": {"text": "5 s left"}}


def _of_another_step(answer: dict[str, Any]) -> Any:
    return {**answer, "id": "01760000000000000000-0123abcd-0"}


@pytest.mark.parametrize("step", ["offer", "prepare", "hand over"])
def test_nodes_that_are_silent_or_late_or_lie_are_asked_again(
    runner: ModuleType, nodes: Nodes, store: ConfigStore, step: str
) -> None:
    lies: list[Change] = [
        lambda _: {},
        lambda _: ["Traceback"],
        lambda one: {**one, "state": "splendid"},
        lambda one: {**one, "found": 5},
    ]
    nodes.change[step] = [lambda _: None, _late, _of_another_step, *lies]
    lines: list[str] = []
    told = runner._migrate(WEB1, N2, tell=lines.append)
    assert (told["result"], nodes.asked, home(store)) == (True, ALL_STEPS, N2)
    text = "\n".join(lines)
    assert "does not answer" in text
    assert "50 % 5 s left" in text
    assert "another step" in text


def test_a_node_that_is_too_busy_to_answer_is_asked_less_often_and_waited_for_longer(
    runner: ModuleType, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.change["offer"] = [lambda _: None] * 5
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(runner, "_FIRST_PAUSE_S", 1)
    assert runner.migrate(WEB1, to=N2, timeout=7)["result"] is True
    assert pauses[:5] == [2, 4, 8, 15, 15]
    assert nodes.timeouts["offer"] == [7, 10, 20, 40, 60, 60]
    assert nodes.timeouts["prepare"] == [7]


def test_a_move_that_fails_goes_back_and_says_why(
    runner: ModuleType, nodes: Nodes, store: ConfigStore
) -> None:
    nodes.change["copy"] = [lambda one: {**one, "state": "failed", "error": "no\nspace"}]
    told = runner.migrate(WEB1, to=N2)
    assert (told["result"], told["retcode"]) == (False, 1)
    assert r"no\nspace" in told["comment"]
    assert nodes.asked[2:] == ["cancel node1", "drop node2"]
    assert (home(store), operation.pending()) == (N1, [])


def test_a_node_that_stays_silent_has_the_move_go_back_or_stay_pending(
    runner: ModuleType, nodes: Nodes, store: ConfigStore
) -> None:
    silent: list[Change] = [lambda _: None] * 9
    nodes.change = {"copy": silent[:3], "drop": silent[:3]}
    told = runner._migrate(WEB1, N2, patience_s=0)
    assert (told["result"], told["target"], home(store)) == (False, N2, N1)
    assert nodes.asked[-1] == "cancel node1"
    assert [one.id for one in operation.pending()] == [told["operation"]]
    nodes.change = {}
    assert runner.resume(told["operation"])["result"] is False
    assert (nodes.asked[-1], operation.pending()) == ("drop node2", [])


class _KilledError(BaseException):
    """The end of a process."""


@pytest.mark.parametrize(
    ("step", "by"),
    [
        ("offer", "migrate"),
        ("offer", "abort"),
        ("prepare", "migrate"),
        ("copy", "abort"),
        ("hand over", "resume"),
    ],
)
def test_another_call_goes_on_after_a_kill(
    runner: ModuleType, nodes: Nodes, store: ConfigStore, step: str, by: str
) -> None:
    def kill(_: object) -> Any:
        raise _KilledError

    nodes.change[step] = [kill]
    with pytest.raises(_KilledError):
        runner.migrate(WEB1, to=N2)
    (record,) = operation.pending()
    assert runner.migrate(WEB1, to=N3)["result"] is False  # it moves to another node
    if by == "migrate":
        told = runner.migrate(WEB1)
    else:
        told = runner.resume(record.id, abort=by == "abort")
    assert (told["result"], told["state"]) == (True, "undone" if by == "abort" else "done")
    assert (home(store), operation.pending()) == (N1 if by == "abort" else N2, [])


def test_a_target_is_chosen_by_its_free_memory_among_those_that_can(
    runner: ModuleType, nodes: Nodes, store: ConfigStore
) -> None:
    told = runner.migrate(WEB1, test=True)
    assert (told["result"], told["target"]) == (True, N3)
    nodes.obstacles[N3] = ["br1: no such bridge", "64 MiB are free"]
    assert runner.migrate(WEB1)["target"] == N2
    assert home(store) == N2


def test_test_mode_names_each_obstacle_and_changes_nothing(
    runner: ModuleType, nodes: Nodes, store: ConfigStore
) -> None:
    nodes.obstacles[N2] = ["br1: no such bridge", "64 MiB are free"]
    before = store.path.read_bytes()
    told = runner.migrate(WEB1, to="node2", test=True)
    assert told["obstacles"] == [f"{N2}: br1: no such bridge", f"{N2}: 64 MiB are free"]
    nodes.refused = ["it has snapshots"]
    for to in (None, "node2"):
        told = runner.migrate(WEB1, to=to, test=True)
        assert (told["result"], told["obstacles"]) == (False, [f"{N1}: it has snapshots"])
    assert (nodes.asked, operation.pending(), nodes.applied) == ([], [], [])
    assert store.path.read_bytes() == before


@pytest.mark.parametrize(("name", "to"), [("web9", "node2"), (WEB1, "node9"), (WEB1, "../x")])
def test_what_is_not_in_the_configuration_does_not_move(
    runner: ModuleType, name: str, to: str
) -> None:
    for test in (True, False):
        told = runner.migrate(name, to=to, test=test)
        assert (told["result"], operation.pending()) == (False, [])


def test_a_copy_of_the_configuration_is_moved_by_nobody(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_on(N2, monkeypatch)
    told = runner.migrate(WEB1, to=N2)
    assert told["result"] is False
    assert "master" in told["comment"]


def test_the_locks_are_held_while_a_move_goes_on(
    runner: ModuleType, nodes: Nodes, own_node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, trace = own_node / "bin/brine", own_node / "trace"
    command.parent.mkdir()
    # brine lock run LOCKS -- COMMAND
    command.write_text(
        f'#!/bin/bash\necho "$@" | /usr/bin/tee -a {trace} >&2\n'
        'while [[ $1 != -- ]]; do shift; done; shift; "$@"\n'
        f"echo freed >>{trace}\n"
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}:/usr/bin:/bin")
    nodes.change["copy"] = [lambda one: one if "freed" not in trace.read_text() else {}]
    told = runner.migrate(WEB1, to=N2)
    assert (told["result"], "notes" in told) == (True, False)
    outer, inner, *ends = trace.read_text().splitlines()
    assert f"--instance {WEB1} --timeout 300" in outer
    assert f"--shared --node {N1} --node {N2} --timeout 300" in inner
    assert ends == ["freed", "freed"]


def test_a_move_goes_on_without_locks_that_others_keep_and_its_record_says_what_it_waits_for(
    runner: ModuleType, nodes: Nodes, own_node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = own_node / "bin/brine"
    command.parent.mkdir()
    command.write_text("#!/bin/bash\necho waits for web1 >&2\nread -t 1 </dev/zero\nexit 1\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}:/usr/bin:/bin")
    lines: list[str] = []
    texts: list[str] = []

    def look(line: str) -> None:
        lines.append(line)
        texts.extend(one.progress.get("text", "") for one in operation.pending())

    told = runner._migrate(WEB1, N2, tell=look)
    assert told["result"] is True
    assert "waits for web1" in told["notes"][0]
    assert "waits for web1" in lines[0]
    assert any("waits for web1" in text for text in texts)


def test_no_secret_is_in_what_a_move_returns(runner: ModuleType, nodes: Nodes) -> None:
    secret = {"key": "5ecret"}
    nodes.change["prepare"] = [
        lambda one: {**one, "id": "other", "found": secret},
        lambda one: {**one, "found": secret},
    ]
    lines: list[str] = []
    told = runner._migrate(WEB1, N2, tell=lines.append)
    assert nodes.facts["copy"]["prepared"] == secret
    assert "5ecret" not in json.dumps([told, lines])


@pytest.mark.parametrize("to", [N2, N1])
def test_a_move_that_another_call_has_ended_is_a_success_where_the_instance_is_on_its_node(
    runner: ModuleType, nodes: Nodes, store: ConfigStore, to: str
) -> None:
    def end(answer: dict[str, Any]) -> Any:
        (record,) = operation.pending()
        assert runner.resume(record.id, abort=to == N1)["result"] is True
        return None

    nodes.change["copy"] = [end]
    told = runner.migrate(WEB1, to=N2)
    assert (told["state"], told["result"], home(store)) == ("ended", to == N2, to)
    assert WEB1 in told["comment"]
    assert to in told["comment"]
    assert runner.resume("01764000000000000000-0123abcd")["result"] is False


def test_a_node_that_takes_part_in_no_moves_is_no_target_and_fails_a_move_at_once(
    runner: ModuleType, nodes: Nodes, store: ConfigStore
) -> None:
    nodes.without = {N2}
    told = runner.migrate(WEB1, to="node2")
    assert "there is no command move" in told["comment"]
    assert (nodes.asked, operation.pending()) == ([], [])
    nodes.without = set()
    lacks = "'brine.move_step' is not available."
    nodes.change["offer"] = [lambda _: lacks]
    told = runner.migrate(WEB1, to="node2")
    assert (told["state"], nodes.asked, operation.pending()) == ("undone", [], [])
    assert "not available" in told["comment"]
    # It has begun no more than the preparation: the target may never drop that.
    nodes.change = {step: [lambda _: lacks] * 4 for step in ("prepare", "drop")}
    told = runner._migrate(WEB1, N2, patience_s=-1)
    assert (told["state"], home(store)) == ("undoing", N1)
    told = runner.resume(told["operation"], abort=True)
    assert (told["result"], told["state"], operation.pending()) == (True, "undone", [])
    assert "node2" in told["notes"][0]
    nodes.change = {}
    assert runner.migrate(WEB1, to=N3)["result"] is True


@pytest.mark.parametrize(
    "more",
    [
        {"state": "failed", "error": "this node has taken the claim"},
        {"state": "running", "error": "its disk is full"},
        {"state": "running", "found": {"fault": "its disk is full"}},
    ],
)
def test_a_step_that_does_not_go_on_is_not_asked_for_again_for_ever(
    runner: ModuleType, nodes: Nodes, store: ConfigStore, more: dict[str, Any]
) -> None:
    nodes.change["prepare"] = [lambda one: {**one, "state": "failed", "error": "no bridge"}]
    nodes.change["drop"] = [lambda one: {**one, **more}] * 9
    lines: list[str] = []
    told = runner._migrate(WEB1, N2, patience_s=0, tell=lines.append)
    assert (told["result"], told["state"]) == (False, "undoing")
    assert (more.get("error") or more["found"]["fault"]) in lines[-1]
    (record,) = operation.pending()
    assert more.get("error", "") in record.progress["text"]


def test_what_keeps_a_move_from_its_publication_is_said_and_waited_for(
    runner: ModuleType, nodes: Nodes, store: ConfigStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_PUBLISH_S", 0)
    lines: list[str] = []
    with runner._locked("redistribution"):
        told = runner._migrate(WEB1, N2, patience_s=0, tell=lines.append)
        (record,) = operation.pending()
        assert "another redistribution" in record.progress["text"]
    assert (told["state"], home(store)) == ("committed", N2)
    assert "another redistribution" in lines[-1]
    assert runner.resume(told["operation"])["result"] is True


def test_a_candidate_that_is_silent_is_waited_for_once(
    runner: ModuleType, nodes: Nodes, store: ConfigStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.failing = N3
    together = runner._Together()
    runner._migrate(WEB1, N2, patience_s=0, together=together)
    assert together.spent == {"publish"}
    told = runner._migrate(WEB1, N2, patience_s=9e9, together=together)
    assert (told["result"], told["state"]) == (False, "committed")


def test_an_offer_that_the_configuration_contradicts_moves_nowhere(
    runner: ModuleType, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source in bad hands would have another node's root run its words. --dry-run tells it."""
    sound = nodes._offer

    def false(node: str, name: str, cold: bool) -> Any:
        offer = sound(node, name, cold)
        return {**offer, "spec": {**offer["spec"], "extra_arguments": ["-blockdev", "x"]}}

    monkeypatch.setattr(nodes, "_offer", false)
    would = runner.migrate(WEB1, to=N2, test=True)
    assert would["result"] is False
    assert "extra_arguments" in str(would)
    told = runner.migrate(WEB1, to=N2)
    assert (told["result"], told["state"]) == (False, "undone")
    assert "extra_arguments" in told["comment"]
    assert nodes.asked == ["offer node1"]
