"""The operation of a move on the master: records and configuration on a disk."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from brine.cluster.move_operation import abort_move, answer_step, awaited_step, begin_move
from brine.common import operation, paths
from brine.common.operation import AnswerState, OperationError, StepAnswer
from brine.config.model import Configuration, Instance
from brine.config.schema import ConfigError
from brine.config.store import ConfigStore, move_key
from killing import each_step
from lab.ganeti_config import ganeti_config, uuid_of


@pytest.fixture(autouse=True)
def store(own_node: Path, monkeypatch: pytest.MonkeyPatch) -> ConfigStore:
    """The cluster's configuration, whose first instance is on the first node."""
    monkeypatch.setattr(paths, "CONFIG_FILE", own_node / "config.data")
    monkeypatch.setattr(paths, "CONFIG_LOCK", own_node / "config.lock")
    store = ConfigStore(own_node / "config.data")
    with store.writing() as writer:
        writer.write(Configuration.from_json(ganeti_config()))
    return store


def the_instance(store: ConfigStore) -> Instance:
    return store.read().instances[uuid_of("instance", 1)]


def node_of(store: ConfigStore, *, other: bool = False) -> str:
    """The name of the instance's node, or of another one."""
    found = store.read()
    nodes = sorted(one.name for one in found.nodes.values())
    home = found.nodes[the_instance(store).primary_node].name
    return next(one for one in nodes if one != home) if other else home


def tag(store: ConfigStore) -> None:
    """Change the instance."""
    with store.writing() as writer:
        assert writer.current
        changed = replace(the_instance(store), tags=["changed"])
        instances = writer.current.instances | {changed.uuid: changed}
        writer.write(replace(writer.current, instances=instances))


def answer_all(identity: str) -> list[str]:
    """All nodes do what they are asked for; returns that."""
    asked = []
    while step := awaited_step(identity):
        asked.append(step.name)
        answer_step(StepAnswer(step.id, step.name, AnswerState.RUNNING))
        answer_step(StepAnswer(step.id, step.name, AnswerState.DONE))
    return asked


def test_the_configuration_follows_with_the_serial_of_the_claim(store: ConfigStore) -> None:
    before, to = the_instance(store), node_of(store, other=True)
    identity = begin_move(before.name, to, is_live=True, copies=True)
    assert answer_all(identity) == ["prepare", "copy", "hand over", "publish"]
    after = the_instance(store)
    assert node_of(store) == to
    assert after.serial_no == before.serial_no + 1
    assert operation.pending() == []
    disks = [store.read().disks[uuid] for uuid in after.disks]
    assert all(before.primary_node not in disk.nodes for disk in disks)


def test_an_instance_that_moves_can_not_change_otherwise(store: ConfigStore) -> None:
    before, to = the_instance(store), node_of(store, other=True)
    identity = begin_move(before.name, to, is_live=True, copies=False)
    with pytest.raises(ConfigError, match=identity):
        tag(store)
    with pytest.raises(OperationError, match=identity):
        begin_move(before.name, to, is_live=True, copies=False)
    assert the_instance(store) == before
    abort_move(identity, "aborted")
    assert answer_all(identity) == ["drop"]
    assert (the_instance(store), operation.pending()) == (before, [])
    tag(store)
    assert the_instance(store).serial_no == before.serial_no + 1
    with pytest.raises(OperationError, match="no such operation"):
        abort_move(identity, "aborted")


def test_killed_at_any_step_a_move_ends_at_its_node(store: ConfigStore) -> None:
    """With the next answers of the nodes, which come to another process."""
    name, to = the_instance(store).name, node_of(store, other=True)
    original = store.path.read_bytes()

    def work() -> None:
        answer_all(begin_move(name, to, is_live=True, copies=False))

    def prepare() -> None:
        shutil.rmtree(store.versions_dir, ignore_errors=True)
        store.path.write_bytes(original)

    ends = set()
    for _ in each_step(work, prepare):
        operation.settle(move_key(name))
        is_begun = [answer_all(one.id) for one in operation.pending()] != []
        assert operation.pending() == []
        assert not is_begun or node_of(store) == to
        ends.add(node_of(store))
    assert len(ends) == 2


@pytest.mark.parametrize(("to", "match"), [("nowhere", "no such node"), ("", "already")])
def test_a_move_to_nowhere_or_to_its_own_node_is_refused(
    store: ConfigStore, to: str, match: str
) -> None:
    to = to or node_of(store)
    with pytest.raises(ConfigError, match=match):
        begin_move(the_instance(store).name, to, is_live=True, copies=True)
    with pytest.raises(ConfigError, match="no such instance"):
        begin_move("no-such", to, is_live=True, copies=True)
    assert operation.pending() == []
