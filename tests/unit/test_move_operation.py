"""The operation of a move on the master: records and configuration on a disk."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from brine.cluster.move_operation import (
    MoveStatus,
    abort_move,
    answer_step,
    begin_move,
    move_status,
)
from brine.common import cli, operation, paths
from brine.common.entry_points import EntryPoint
from brine.common.operation import AnswerState, OperationError, StepAnswer
from brine.config.model import Configuration, Instance, Node
from brine.config.privileges import fault_of_offer
from brine.config.schema import ConfigError
from brine.config.store import ConfigStore, move_key
from killing import each_step
from lab.ganeti_config import ganeti_config, uuid_of
from offers import offer_of


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


def offer() -> dict[str, Any]:
    """A live move with local volumes."""
    store = ConfigStore(paths.CONFIG_FILE)
    return offer_of(store, the_instance(store).name, live=True, copies=True)


def answer_all(status: MoveStatus) -> tuple[list[str], str]:
    """All nodes do what they are asked for; returns that, and how the move ends."""
    asked = []
    while step := status.step:
        asked.append(step.name)
        running = StepAnswer(step.id, step.name, AnswerState.RUNNING)
        assert answer_step(running).step == step
        done = StepAnswer(step.id, step.name, AnswerState.DONE, found=offer())
        status = answer_step(done)
    return asked, status.state


def test_the_configuration_follows_with_the_serial_of_the_claim(store: ConfigStore) -> None:
    before, to = the_instance(store), node_of(store, other=True)
    status = move_status(begin_move(before.name, to))
    assert answer_all(status) == (["offer", "prepare", "copy", "hand over", "publish"], "done")
    assert move_status(status.id).state == "ended"
    after = the_instance(store)
    assert node_of(store) == to
    assert after.serial_no == before.serial_no + 1
    assert operation.pending() == []
    disks = [store.read().disks[uuid] for uuid in after.disks]
    assert all(before.primary_node not in disk.nodes for disk in disks)


def test_an_instance_that_moves_can_not_change_otherwise(store: ConfigStore) -> None:
    before, to = the_instance(store), node_of(store, other=True)
    identity = begin_move(before.name, to)
    assert begin_move(before.name, to) == identity
    with pytest.raises(ConfigError, match=identity):
        tag(store)
    with pytest.raises(OperationError, match=identity):
        begin_move(before.name, node_of(store))
    assert the_instance(store) == before
    status = abort_move(identity, "aborted")
    assert (status.step, status.state, status.error) == (None, "undone", "aborted")
    assert (the_instance(store), operation.pending()) == (before, [])
    tag(store)
    assert the_instance(store).serial_no == before.serial_no + 1
    with pytest.raises(OperationError, match="no such operation"):
        abort_move(identity, "aborted")


def test_a_move_that_is_aborted_after_its_preparation_began_goes_back(store: ConfigStore) -> None:
    name, to = the_instance(store).name, node_of(store, other=True)
    step = move_status(begin_move(name, to)).step
    assert step
    assert (step.name, step.node) == ("offer", node_of(store))
    addresses = [node.secondary_ip for node in store.read().nodes.values() if node.name == to]
    assert [step.facts["target_address"]] == addresses
    answer_step(StepAnswer(step.id, step.name, AnswerState.DONE, found=offer()))
    status = abort_move(begin_move(name, to), "aborted")
    assert (status.state, status.error) == ("undoing", "aborted")
    assert status.step
    assert status.step.name == "drop"
    # A target that will never drop its part holds up no other move.
    status = abort_move(status.id, "aborted")
    assert (status.state, status.error, operation.pending()) == ("undone", "aborted", [])


def test_what_a_step_waits_for_is_in_its_record(store: ConfigStore) -> None:
    step = move_status(begin_move(the_instance(store).name, node_of(store, other=True))).step
    assert step
    found = {"text": "volumes are made"}
    known = StepAnswer(step.id, step.name, AnswerState.RUNNING, error="no space", found=found)
    answer_step(known)
    (record,) = operation.pending()
    assert "no space" in record.progress["text"]


def test_killed_at_any_step_a_move_ends_at_its_node(store: ConfigStore) -> None:
    """With the next answers of the nodes, which come to another process."""
    name, to = the_instance(store).name, node_of(store, other=True)
    original = store.path.read_bytes()

    def work() -> None:
        answer_all(move_status(begin_move(name, to)))

    def prepare() -> None:
        shutil.rmtree(store.versions_dir, ignore_errors=True)
        store.path.write_bytes(original)

    ends = set()
    for _ in each_step(work, prepare):
        operation.settle(move_key(name))
        is_begun = [answer_all(move_status(one.id)) for one in operation.pending()] != []
        assert operation.pending() == []
        assert not is_begun or node_of(store) == to
        ends.add(node_of(store))
    assert len(ends) == 2


@pytest.mark.parametrize(("to", "match"), [("nowhere", "nowhere"), ("", "already")])
def test_a_move_to_nowhere_or_to_its_own_node_is_refused(
    store: ConfigStore, to: str, match: str
) -> None:
    to = to or node_of(store)
    with pytest.raises(ConfigError, match=match):
        begin_move(the_instance(store).name, to)
    with pytest.raises(ConfigError, match="no-such"):
        begin_move("no-such", to)
    assert operation.pending() == []


@pytest.mark.parametrize("lacks", ["offline", "drained", "vm_capable"])
def test_a_node_that_takes_no_instances_is_no_target(store: ConfigStore, lacks: str) -> None:
    to = node_of(store, other=True)
    with store.writing() as writer:
        assert writer.current
        node = next(one for one in writer.current.nodes.values() if one.name == to)
        data = asdict(node) | {"master_candidate": False, lacks: lacks != "vm_capable"}
        writer.write(
            replace(writer.current, nodes=writer.current.nodes | {node.uuid: Node(**data)})
        )
    with pytest.raises(ConfigError, match=lacks):
        begin_move(the_instance(store).name, to)


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Any]:
    """Run a command of ``brine move`` or ``brine operations``, and return its JSON."""
    entries = {
        "brine.commands": [EntryPoint("operations", "brine.common.cli:OPERATIONS")],
        "brine.verbs": [EntryPoint("move", "brine.cluster.cli:add_move_verbs")],
        "brine.operations": [EntryPoint("move", "brine.cluster.move_operation:MOVE")],
    }
    for module in (cli, operation):
        monkeypatch.setattr(module, "entry_points", entries.__getitem__)

    def run(*words: str, stdin: object = None) -> Any:
        text = io.BytesIO(json.dumps(stdin).encode())
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(text))
        assert cli.main([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_a_move_by_commands_shows_no_secret_in_the_list_of_operations(
    store: ConfigStore, command: Callable[..., Any]
) -> None:
    name, to = the_instance(store).name, node_of(store, other=True)
    wishes = json.dumps({"rate": 1000})
    identity = command("move", "begin", name, "--to", to, "--wishes", wishes)["id"]
    found = {"prepare": {"key": "s3cret-key"}, "offer": offer() | {"runtime_note": "s3cret"}}
    told = command("move", "next", identity)
    assert told["step"]["facts"]["wishes"]["rate"] == 1000
    asked = []
    while step := told["step"]:
        asked.append(step["step"])
        answer = StepAnswer(step["id"], step["step"], AnswerState.DONE)
        facts = answer.facts() | {"found": found.get(step["step"], {})}
        told = command("move", "answer", stdin=facts)
        assert "s3cret" not in json.dumps(command("operations", "list"))
        if step["step"] == "prepare":
            assert told["step"]["facts"]["prepared"] == found["prepare"]
    assert (told["state"], asked[-1]) == ("done", "publish")
    assert command("move", "next", identity)["state"] == "ended"


@pytest.mark.parametrize("wishes", ["[]", "{", '{"rate": 0}', '{"haste": true}'])
def test_wishes_that_are_none_are_refused(command: Callable[..., Any], wishes: str) -> None:
    with pytest.raises(SystemExit) as left:
        command("move", "begin", "web1", "--to", "n2", "--wishes", wishes)
    assert left.value.code == 2
    assert operation.pending() == []


def test_a_record_of_a_move_that_can_not_be_read_is_named(store: ConfigStore) -> None:
    name, to = the_instance(store).name, node_of(store, other=True)
    identity = begin_move(name, to)
    file = paths.OPERATIONS_DIR / f"{identity}.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 99}))
    with pytest.raises(OperationError, match="newer Brine"):
        begin_move(name, to)


LIES: list[dict[str, Any]] = [
    {"extra_arguments": ["-blockdev", "driver=file,filename=/etc/shadow,node-name=x"]},
    {"qemu": "/bin/sh"},
    {"security_model": "user", "security_user": "root"},
    {"chroot": True},
    {"hypervisor": "xen-pvm"},
]


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: next(iter(lie)))
@pytest.mark.parametrize("where", ["spec", "runtime", "cold"])
def test_an_offer_is_not_believed_that_the_configuration_contradicts(
    store: ConfigStore, lie: dict[str, Any], where: str
) -> None:
    """No node is asked for anything after that, and the error names what differs."""
    name = the_instance(store).name
    sound = offer_of(store, name, live=where != "cold", copies=True)
    false = {**sound["spec"], **lie}
    told = sound | {"spec": false if where != "runtime" else sound["spec"]}
    if where == "runtime":
        told["runtime"] = json.dumps({"nics": [], "disks": [], "spec": false})
    status = move_status(begin_move(name, node_of(store, other=True), cold=where == "cold"))
    step = status.step
    assert step
    status = answer_step(StepAnswer(step.id, step.name, AnswerState.DONE, found=told))
    assert (status.step, status.state) == (None, "undone")
    assert all(key in status.error for key in lie)
    assert "\n" not in status.error
    assert operation.pending() == []


@pytest.mark.parametrize(
    "lie",
    [
        {"spec": None},
        {"spec": {"chroot": "yes"}},
        {"runtime": "{"},
        {"runtime": "[]"},
        {"runtime": "[" * 100_000},
    ],
    ids=lambda lie: str(lie)[:40],
)
def test_what_can_not_be_compared_does_not_move(store: ConfigStore, lie: dict[str, Any]) -> None:
    name = the_instance(store).name
    told = offer_of(store, name, live=True, copies=True) | lie
    assert "can't be compared" in fault_of_offer(store.read(), name, told)


def test_what_the_configuration_gives_an_instance_moves(store: ConfigStore) -> None:
    """Also words for QEMU of its own: only what differs is refused."""
    found, given = the_instance(store), {"kvm_extra": "-device 'vfio a'", "use_chroot": True}
    with store.writing() as writer:
        assert writer.current
        changed = replace(found, hvparams=found.hvparams | given)
        instances = writer.current.instances | {changed.uuid: changed}
        writer.write(replace(writer.current, instances=instances))
    told = offer_of(store, found.name, live=False, copies=True)
    assert told["spec"]["extra_arguments"] == ["-device", "vfio a"]
    assert fault_of_offer(store.read(), found.name, told) == ""
    told["spec"]["cpu"] = told["spec"]["append"] = "anything else"
    assert fault_of_offer(store.read(), found.name, told) == ""
