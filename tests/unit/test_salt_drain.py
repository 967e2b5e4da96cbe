"""The Salt runner that empties, fills and reboots nodes, with the master's own commands, records
and moves; the nodes are stand-ins."""

from __future__ import annotations

import subprocess
import threading
from types import ModuleType
from typing import Any

import pytest

from brine.common import cli, operation, paths
from brine.common.operation import AnswerState, StepAnswer, StepState
from brine.config.model import Configuration, Node
from brine.config.store import ConfigStore
from lab.ganeti_config import ganeti_config, instance_name, node_name, uuid_of
from lab.waiting import wait_for
from offers import offer_of
from unit.test_salt_moves import Nodes, run_here, runner, store

__all__ = ["runner", "store"]  # fixtures

_UNLIKE = "its processor is another one"
N1, N2, N3 = (node_name(number) for number in (1, 2, 3))
I1, I2, I3, I4 = (instance_name(number) for number in (1, 2, 3, 4))


class Fleet(Nodes):
    """Nodes whose instances are those of the configuration.

    :ivar fixed: instances that can't move live, and why; those of *stuck* can't move at all.
    :ivar down: instances that do not run.
    :ivar together: has so many moves begin at the same time, or fails.
    :ivar away: how many more questions a node that reboots does not hear.
    :ivar no_spec: by node, the fault of an instance that runs there without a spec.
    :ivar old_kernel: a node that boots the kernel it had.
    :ivar broken_by_upgrade: nodes whose upgrade ends a daemon for good.
    :ivar mute: nodes whose health is not known.
    :ivar unlike: nodes that take no instance live.
    :ivar was_cold: whether an instance was stopped for its last move.
    :ivar unruly: a node whose states fail unless it is drained.
    :ivar published: each node that got its configuration at the end of a move.
    """

    def __init__(self, store: ConfigStore) -> None:
        super().__init__()
        self.store = store
        self.free_mib = {N1: 6000, N2: 4000, N3: 4000}
        self.fixed: dict[str, str] = {}
        self.stuck: dict[str, str] = {}
        self.down: set[str] = set()
        self.boots = {N1: 0, N2: 0, N3: 0}
        self.away: dict[str, int] = {}
        self.upgraded: list[str] = []
        self.no_spec: dict[str, str] = {}
        self.old_kernel = ""
        self.broken_by_upgrade: set[str] = set()
        self.mute: set[str] = set()
        self.unruly = ""
        self.published: list[str] = []
        self.unlike: set[str] = set()
        self.was_cold: dict[str, bool] = {}
        self.together: threading.Barrier | None = None
        self._alone = threading.Lock()

    def execute(self, tgt: str, fun: str, *rest: Any, **named: Any) -> dict[str, Any]:
        question = (named.get("kwarg") or {}).get("question", {})
        if self.together and question.get("step") == "offer":
            self.together.wait(60)
        with self._alone:
            return super().execute(tgt, fun, *rest, **named)

    def functions(self) -> dict[str, Any]:
        more = {
            "brine.node_facts": self._facts,
            "brine.node_state": self._state,
            "brine.ask": self._asked,
            "brine.health": self._health,
            "pkg.upgrade": self._upgrade,
            "system.reboot": self._reboot,
        }
        return super().functions() | {key: self._heard(one) for key, one in more.items()}

    def _heard(self, function: Any) -> Any:
        def answer(node: str, *arguments: Any, **named: Any) -> Any:
            if self.away.get(node):
                self.away[node] -= 1
                return None
            return function(node, *arguments, **named)

        return answer

    def running(self, node: str) -> list[str]:
        found = self.store.read()
        return [
            one.name
            for one in found.instances.values()
            if found.nodes[one.primary_node].name == node and one.name not in self.down
        ]

    def _list(self, node: str) -> Any:
        found = self.store.read()
        return [
            {
                "name": one.name,
                "uuid": one.uuid,
                "status": "running",
                "oper_state": "down" if one.name in self.down else "running",
                "memory_mib": 1000,
                "volumes": [],
            }
            for one in found.instances.values()
            if found.nodes[one.primary_node].name == node
        ]

    def _facts(self, node: str) -> Any:
        free = self.free_mib[node] - 1084 * len(self.running(node))
        return {"memory_available_mib": free, "units": {}}

    def _asked(self, node: str, *command: str) -> Any:
        if command == ("instance", "list"):
            fault = self.no_spec.get(node)
            return {"said": self._list(node)} | ({"refused": fault} if fault else {})
        return super()._asked(node, *command)

    def _offer(self, node: str, name: str, cold: bool) -> Any:
        why = self.stuck.get(name) or ("" if cold else self.fixed.get(name, ""))
        store = ConfigStore(paths.CONFIG_FILE)
        offer = offer_of(store, name, live=not cold, copies=False)
        return {"obstacles": [why]} if why else offer

    def _step(self, node: str, question: dict[str, Any], wait: float) -> Any:
        facts = question["facts"]
        offer = self._offer(node, facts["instance"], facts["cold"])
        if question["step"] == "offer" and "obstacles" in offer:
            error = offer["obstacles"][0]
            answer = StepAnswer(question["id"], "offer", AnswerState.FAILED, error=error)
            return answer.facts()
        if question["step"] == "prepare":
            if node in self.unlike and not facts["cold"]:
                answer = StepAnswer(question["id"], "prepare", AnswerState.FAILED, error=_UNLIKE)
                return answer.facts()
            self.was_cold[facts["instance"]] = facts["cold"]
        return super()._step(node, question, wait)

    def _check(self, node: str, offer: Any) -> Any:
        unlike = {"obstacles": [{"why": _UNLIKE}]}
        return unlike if node in self.unlike and offer["live"] else super()._check(node, offer)

    def _apply(self, node: str, state: str, test: bool) -> Any:
        if self.unruly:
            is_unruly = node == self.unruly and not self.store.read().node(node).drained
            self.failing = node if is_unruly else ""
        if state == "brine.confd":
            self.published.append(node)
        return super()._apply(node, "brine.confd", test)

    def _state(self, node: str) -> Any:
        kernel = "6.2" if self.boots[node] and node != self.old_kernel else "6.1"
        newest = "6.2" if node in self.upgraded else "6.1"
        daemons = [] if self.store.read().node(node).drained else ["brine-confd.service"]
        is_broken = node in self.upgraded and node in self.broken_by_upgrade
        daemons += [] if is_broken else ["brine-kvmd.path"]
        names = {"daemons": daemons, "failed": []}
        return {"boot_id": f"{self.boots[node]}", "kernel": kernel, "newest": newest, **names}

    def _health(self, node: str) -> Any:
        known = {"serial": {"said": self.store.read().cluster.serial_no}}
        return known if node not in self.mute else "an exception"

    def _upgrade(self, node: str, refresh: bool, dist_upgrade: bool) -> Any:
        assert refresh
        assert dist_upgrade
        self.upgraded.append(node)
        return {"linux": {"old": "6.1", "new": "6.2"}}

    def _reboot(self, node: str) -> Any:
        assert self.running(node) == []
        assert self.store.read().node(node).drained
        assert sum(self.away.values()) == 0
        self.boots[node] += 1
        self.away[node] = 3
        return None


@pytest.fixture
def nodes(store: ConfigStore) -> Fleet:
    return Fleet(store)


@pytest.fixture(autouse=True)
def cluster(store: ConfigStore, runner: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four instances on three nodes: two of the first, which is the master. No thread disturbs
    another's output."""
    with store.writing() as writer:
        writer.write(Configuration.from_json(ganeti_config(nodes=3, instances=4)))
    alone, run = threading.Lock(), run_here(monkeypatch)

    def run_alone(*arguments: Any, **named: Any) -> Any:
        with alone:
            return run(*arguments, **named)

    monkeypatch.setattr(subprocess, "run", run_alone)
    monkeypatch.setattr(runner, "_BOOT_PAUSE_S", 0)
    monkeypatch.setattr(cli, "installed_versions", lambda: {"cluster": "", "config": ""})


def the_node(store: ConfigStore, name: str) -> Node:
    return store.read().node(name)


def test_a_node_is_emptied_and_filled_again(
    runner: ModuleType, nodes: Fleet, store: ConfigStore
) -> None:
    with store.writing() as writer:
        assert writer.current
        data = writer.current.to_json()
        for number in (1, 4):  # so that one node has three, and the master one
            data["instances"][uuid_of("instance", number)]["primary_node"] = uuid_of("node", 2)
        writer.write(Configuration.from_json(data))
    nodes.down = {I1}
    before = the_node(store, N2)
    serial = store.read().serial_no
    told = runner.drain("node2", test=True)
    assert (told["result"], {*told["moved"]}) == (True, {I2, I4})
    assert store.read().serial_no == serial
    nodes.together = threading.Barrier(2)
    told = runner.drain("node2", jobs=2)
    nodes.together = None
    assert (told["result"], {*told["moved"]}, {*told["left"]}) == (True, {I2, I4}, {I1})
    assert nodes.running(N2) == []
    assert the_node(store, N2).drained
    refused = runner.migrate(I3, to="node2")
    assert "drained" in refused["comment"]
    told = runner.fill("node2", test=True)
    assert {*told["moved"]} == {I2, I4}
    assert the_node(store, N2).drained
    told = runner.fill("node2")
    assert (told["result"], {*told["moved"]}) == (True, {I2, I4})
    assert {*nodes.running(N2)} == {I2, I4}
    after = the_node(store, N2)
    assert (after.drained, after.tags) == (False, before.tags)
    assert after.master_candidate == before.master_candidate
    assert operation.pending() == []


def test_moves_that_end_together_give_the_nodes_their_configuration_once(
    runner: ModuleType, nodes: Fleet, store: ConfigStore
) -> None:
    def wait_for_publication() -> bool:
        """Both moves are written into the configuration, and no node has got that."""
        steps = [record.steps[-1] for record in operation.pending() if record.steps]
        return [one.name for one in steps if one.state is StepState.WAITING] == ["publish"] * 2

    told: dict[str, Any] = {}
    with runner._locked("redistribution"):
        drain = threading.Thread(target=lambda: told.update(runner.drain("node1", jobs=2)))
        drain.start()
        wait_for("both moves to be published", wait_for_publication, timeout_s=60)
        assert nodes.published == []
    drain.join()
    assert (told["result"], {*told["moved"]}) == (True, {I1, I4})
    assert sorted(nodes.published) == [N1, N2, N3]


def test_what_can_not_move_holds_up_no_other_and_is_named(
    runner: ModuleType, nodes: Fleet, store: ConfigStore
) -> None:
    nodes.fixed, nodes.stuck = {I1: "its processor is the host's"}, {I4: "it has a USB stick"}
    told = runner.drain("node1")
    assert (told["result"], told["retcode"], told.get("moved")) == (False, 1, None)
    assert "processor" in told["failed"][I1]
    assert "USB" in told["failed"][I4]
    assert not the_node(store, N1).drained  # the master takes instances
    assert N1 in told["notes"][0]
    told = runner.drain("node1", cold=True)
    assert ({*told["moved"]}, {*told["failed"]}) == ({I1}, {I4})
    nodes.stuck = {}
    nodes.without = {N2, N3}
    told = runner.drain("node1")
    assert "there is no command move" in told["failed"][I4]
    nodes.without = {N2}
    told = runner.drain("node1")
    assert (told["result"], told["moved"]) == (True, {I4: N3})
    nodes.fixed = {}
    assert {*runner.fill("node1")["moved"]} == {I1, I4}
    assert {*nodes.running(N1)} == {I1, I4}
    for wrong in runner.drain("node9"), runner.drain("node1", to="node1"), runner.undrain("no"):
        assert wrong["result"] is False
    nodes.away = {N2: 1}
    assert "not known" in runner.drain("node2")["comment"]


@pytest.mark.parametrize("test", [False, True])
def test_only_what_no_node_takes_live_is_stopped(
    runner: ModuleType, nodes: Fleet, store: ConfigStore, test: bool
) -> None:
    nodes.unlike, nodes.fixed = {N3}, {I4: "it has a USB stick"}
    nodes.free_mib = {N1: 6000, N2: 4000, N3: 9000}
    told = runner.drain("node1", cold=True, test=test)
    assert told["result"], told
    if not test:
        assert nodes.was_cold == {I1: False, I4: True}
        assert nodes.running(N2) == [I1, I2]
    nodes.unlike = {N2, N3}
    told = runner.drain("node2", cold=True, to="node3", test=test)
    assert told["result"], told
    if not test:
        assert nodes.was_cold == {I1: True, I2: True, I4: True}


def test_undrain_only_takes_the_mark_away(
    runner: ModuleType, nodes: Fleet, store: ConfigStore
) -> None:
    assert runner.drain("node2")["result"]
    assert runner.undrain("node2")["result"]
    assert not the_node(store, N2).drained
    assert nodes.running(N2) == []
    assert {*runner.fill("node2")["moved"]} == {I2}


def test_nodes_are_rebooted_one_after_another(
    runner: ModuleType, nodes: Fleet, store: ConfigStore
) -> None:
    serial = store.read().serial_no
    told = runner.reboot("node*", test=True, batch=2)
    assert [one["nodes"] for one in told["batches"]] == [[N2, N3]]
    assert told["batches"][0]["moved"] == {I2: N1, I3: N1}
    assert told["left_out"] == [N1]
    assert (store.read().serial_no, operation.pending()) == (serial, [])
    told = runner.reboot("node*", upgrade=True)
    assert told["result"], told
    assert (nodes.upgraded, nodes.boots) == ([N2, N3], {N1: 0, N2: 1, N3: 1})
    assert (nodes.running(N2), nodes.running(N3)) == ([I2], [I3])
    assert not the_node(store, N2).drained
    assert operation.pending() == []
    assert "say which" in runner.reboot()["comment"]
    assert "master" in runner.reboot("node1")["comment"]


def test_a_reboot_stops_at_the_first_doubt_and_goes_on_later(
    runner: ModuleType, nodes: Fleet, store: ConfigStore
) -> None:
    nodes.old_kernel = N2
    told = runner.reboot("node2,node3", upgrade=True, check_timeout=-1)
    assert (told["result"], told["left"]) == (False, [N2, N3])
    assert "kernel" in told["comment"]
    assert the_node(store, N2).drained
    assert operation.pending()[0].kind == "reboot"
    assert "kernel" in operation.pending()[0].waits_for
    assert "pending" in runner.reboot("node3")["comment"]
    nodes.old_kernel = ""
    told = runner.resume(operation.pending()[0].id)
    assert told["result"], told
    assert nodes.boots == {N1: 0, N2: 1, N3: 1}
    nodes.stuck = {I3: "it has a USB stick"}
    assert "USB" in runner.reboot("node3")["comment"]
    assert nodes.boots[N3] == 1
    assert runner.resume(operation.pending()[0].id, abort=True)["result"]
    assert operation.pending() == []
    assert the_node(store, N3).drained


def test_a_reboot_stops_where_a_filled_node_does_not_take_its_states(
    runner: ModuleType, nodes: Fleet
) -> None:
    """Also one to which no instance comes home, which would hear of that."""
    nodes.down, nodes.unruly = {I2}, N2
    told = runner.reboot("node2,node3", upgrade=True, check_timeout=-1)
    assert (told["result"], told["left"]) == (False, [N2, N3])
    assert "the step fill" in told["comment"]
    assert nodes.boots == {N1: 0, N2: 1, N3: 0}
    assert not runner.reboot()["result"]
    nodes.unruly = nodes.failing = ""
    told = runner.reboot()
    assert told["result"], told
    assert nodes.boots == {N1: 0, N2: 1, N3: 1}


def test_a_test_of_a_reboot_that_is_pending_reboots_nothing(
    runner: ModuleType, nodes: Fleet, store: ConfigStore
) -> None:
    nodes.stuck = {I2: "it has a USB stick"}
    assert runner.reboot("node2,node3")["result"] is False
    nodes.stuck = {}
    serial = store.read().serial_no
    told = runner.reboot(test=True)
    assert [one["nodes"] for one in told["batches"]] == [[N2], [N3]]
    with runner._locked("reboot"):  # a reboot is at work
        assert runner.reboot("node2", test=True)["batches"]
        assert "at work" in runner.reboot()["comment"]
    assert "test mode" in runner.reboot(abort=True, test=True)["comment"]
    assert (nodes.boots[N2], store.read().serial_no) == (0, serial)
    assert len(operation.pending()) == 1


def test_a_node_on_which_an_instance_runs_without_a_spec_is_not_emptied_nor_rebooted(
    runner: ModuleType, nodes: Fleet, store: ConfigStore
) -> None:
    nodes.no_spec = {N2: "web9: runs, and has no spec"}
    told = runner.drain("node2")
    assert "web9" in told["comment"]
    assert not the_node(store, N2).drained
    told = runner.reboot("node2", boot_timeout=-1)
    assert "web9" in told["comment"]
    facts = {"nodes": [N2], "before": {N2: nodes._state(N2)}}
    with pytest.raises(runner._RefusedError, match="not known"):
        runner._boot(facts, {"boot_timeout_s": -1, "timeout": None})
    assert nodes.boots[N2] == 0


def test_moves_that_are_pending_go_on_before_a_drain_and_a_fill(
    runner: ModuleType, nodes: Fleet, store: ConfigStore
) -> None:
    nodes.failing = N3  # a candidate that does not get the configuration: publish waits
    left = runner._migrate(I2, N3, patience_s=-1)
    assert left["state"] == "committed"
    assert nodes.running(N2) == []
    told = runner.drain("node2", test=True)
    assert told["moved"] == {I2: N3}
    nodes.failing = ""
    told = runner.drain("node2")
    assert (told["result"], told["moved"], operation.pending()) == (True, {I2: N3}, [])
    # One of what a drain has moved away moves on, and is pending.
    runner.undrain("node2")
    assert {*runner.drain("node3")["moved"]} == {I2, I3}
    at = {name: nodes.running(name) for name in (N1, N2)}
    home = N1 if I3 in at[N1] else N2
    nodes.failing = N2
    other = N2 if home == N1 else N1
    assert runner._migrate(I3, other, patience_s=-1, together=runner._Together())["operation"]
    nodes.failing = ""
    told = runner.fill("node3")
    assert (told["result"], told["moved"][I3], operation.pending()) == (True, N3, [])
    assert I3 in nodes.running(N3)


def test_a_move_that_stays_pending_fails_a_drain(
    runner: ModuleType, nodes: Fleet, store: ConfigStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.failing = N3
    left = runner._migrate(I2, N3, patience_s=-1)
    real = runner._migrate
    monkeypatch.setattr(runner, "_migrate", lambda *a, **b: real(*a, **b, patience_s=-1))
    told = runner.drain("node2")
    assert (told["result"], told.get("moved")) == (False, None)
    assert left["operation"] in told["failed"][I2]


def test_a_node_that_does_not_answer_is_not_filled_and_stays_drained(
    runner: ModuleType, nodes: Fleet, store: ConfigStore
) -> None:
    assert runner.drain("node2")["result"]
    nodes.without = {N2}
    assert "node2" in runner.fill("node2")["comment"]
    assert the_node(store, N2).drained


def test_what_has_come_before_a_node_is_marked_leaves_it_too_and_comes_home(
    runner: ModuleType, nodes: Fleet, store: ConfigStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.down = {I2}
    marked = runner._mark

    def mark(*words: Any) -> None:
        nodes.down = set()  # it was started meanwhile
        marked(*words)

    monkeypatch.setattr(runner, "_mark", mark)
    assert {*runner.drain("node2")["moved"]} == {I2}
    assert {*runner.fill("node2")["moved"]} == {I2}


def test_a_node_that_a_person_has_drained_is_not_rebooted(
    runner: ModuleType, nodes: Fleet, store: ConfigStore
) -> None:
    assert runner.drain("node2")["comment"] == "node2: 1 instance has moved"
    told = runner.reboot("node*", upgrade=True)
    assert (told["result"], told["left_out"]) == (True, [N1, N2])
    assert nodes.boots == {N1: 0, N2: 0, N3: 1}
    assert the_node(store, N2).drained
    assert "drained" in runner.reboot("node2")["comment"]
    nodes.stuck = dict.fromkeys((I1, I2, I3, I4), "it has a USB stick")
    assert runner.undrain("node2")["comment"] == "node2 takes instances again"
    assert runner.reboot("node3", upgrade=True)["result"] is False  # it stays drained by that
    nodes.stuck = {}
    assert (
        runner.reboot("node3", upgrade=True)["result"] is True
    )  # its own mark does not leave it out


@pytest.mark.parametrize("what", ["broken_by_upgrade", "mute"])
def test_a_node_whose_upgrade_has_ended_a_daemon_or_whose_health_is_unknown_is_in_doubt(
    runner: ModuleType, nodes: Fleet, what: str
) -> None:
    getattr(nodes, what).add(N2)
    told = runner.reboot("node2,node3", upgrade=True, check_timeout=-1)
    assert (told["result"], told["left"]) == (False, [N2, N3])
    assert ("no longer active" if what != "mute" else "health is not known") in told["comment"]


def test_what_a_fill_has_left_comes_home_after_another_drain(
    runner: ModuleType, nodes: Fleet, store: ConfigStore
) -> None:
    assert runner.drain("node1", to="node3")["moved"] == {I1: N3, I4: N3}
    nodes.stuck = {I4: "it has a USB stick"}
    told = runner.fill("node1")
    assert ({*told["moved"]}, {*told["failed"]}) == ({I1}, {I4})
    assert runner.drain("node1", to="node2")["moved"] == {I1: N2}
    nodes.stuck = {}
    assert runner.fill("node1")["moved"] == {I1: N1, I4: N1}


def test_a_fill_brings_home_what_drains_have_moved_and_nothing_that_a_person_has(
    runner: ModuleType, nodes: Fleet, store: ConfigStore
) -> None:
    assert runner.drain("node2", to="node3")["moved"] == {I2: N3}
    assert {*runner.drain("node3", to="node1")["moved"]} == {I2, I3}
    assert runner.fill("node3")["moved"] == {I3: N3}
    assert runner.fill("node2")["moved"] == {I2: N2}
    assert runner.drain("node2", to="node3")["moved"] == {I2: N3}
    assert runner.migrate(I2, to="node1")["result"]
    told = runner.fill("node2")
    assert (told["result"], told.get("moved"), the_node(store, N2).drained) == (True, None, False)
    assert I2 in nodes.running(N1)
