"""The process of a node that an instance leaves while it is off, and what the master asks of it."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from brine.common import operation, paths
from brine.common.errors import BrineError
from brine.common.operation import AnswerState, OperationKind, StepAnswer
from brine.instance import observe, store
from brine.moves import (
    channel,
    leaving,
    present,
    records,
    source_service,
    source_steps,
    step_commands,
)
from brine.moves.belongings import Belonging, of_message
from brine.moves.cluster_keys import key_of_move
from brine.moves.migration import MoveError
from brine.moves.move_key import KeyFolder
from brine.moves.prepared import Prepared
from brine.moves.records import AskedStep
from brine.moves.source import SourceMove
from brine.moves.source_service import PATIENCE_S, SourceWork
from brine.moves.talk import Listener
from brine.moves.target import TargetMove
from brine.moves.target_service import Comparison
from brine.storage.volume import VolumeFile
from brine.vm.disk import Disk
from brine.vm.files import InstanceFiles
from cluster_key import SECRET, agreed, give_keys

HERE = "127.0.0.1"
MOVE_ID = "01760000000000000000-6f0c21aa"
EARLIER_ID = "01750000000000000000-6f0c21aa"
LATER_ID = "01770000000000000000-6f0c21aa"
LATEST_ID = "01780000000000000000-6f0c21aa"


class Node:
    """A node with an instance that is off, and a target that says what the test has it say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        time = SimpleNamespace(monotonic=lambda: self.now, sleep=lambda _s: None)
        monkeypatch.setattr(source_service, "time", time)
        self.uuid = store.load("web1").uuid
        self.agreement = agreed()
        key = key_of_move(self.agreement, self.step("copy"))
        self.says: dict[str, Any] = {}
        self.told: list[dict[str, Any]] = []
        socket = channel.listen(HERE)
        self.port = int(socket.getsockname()[1])
        self.listener = Listener(socket, key, self._answered, lambda _memory: None)

    def _answered(self, message: dict[str, Any]) -> dict[str, Any]:
        self.told.append(message)
        return self.says

    def prepared(self) -> dict[str, Any]:
        found = {"address": HERE, "port": self.port, **self.agreement._asdict()}
        return found | {"machine": None, "disks": {}, "nbd_port": None}

    def asked(self, step: str, move_id: str = MOVE_ID, **more: Any) -> StepAnswer:
        """The answer to the master's step."""
        return source_steps.answer(self.step(step, move_id, **{"prepared": self.prepared()} | more))

    def step(self, step: str, move_id: str = MOVE_ID, **more: Any) -> AskedStep:
        """The master's step."""
        facts = {"instance": "web1", "uuid": self.uuid, "serial": 2, "target": "n2"}
        facts |= {"is_live": False, "copies": False, "runs": False, "run": "unknown"}
        facts |= {"source_address": HERE, "wishes": {}, "source": "n1"}
        return AskedStep(f"{move_id}-0", step, facts | more)

    @contextlib.contextmanager
    def working(self) -> Iterator[SourceWork]:
        """The process of the pending move."""
        record = records.find("web1")
        assert record
        service: Any = SimpleNamespace(ready=lambda _text: None)
        with contextlib.closing(SourceWork(record, service)) as work, records.working_for(record):
            yield work

    def move(self) -> SourceMove:
        """The pending move."""
        record = records.find("web1")
        assert record
        return record.as_source()


@pytest.fixture
def node(
    brine: Callable[..., Any], own_node: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Node]:
    for name in ("MOVES_DIR", "MOVES_STATUS_DIR"):
        monkeypatch.setattr(paths, name, own_node / name)
    assert brine("define", "-", stdin={"name": "web1", "memory_mib": 128})[0] == 0
    give_keys()
    found = Node(monkeypatch)
    yield found
    found.listener.close()


def test_the_time_of_the_copies_is_not_that_of_a_target_that_is_silent(node: Node) -> None:
    """A guest is off from *stop* on; the target has to answer from *hand over* on."""
    node.asked("stop")
    node.says = {"word": "wait"}
    with node.working() as work:
        work.step()
        node.now += 2 * PATIENCE_S
        assert node.asked("stop").state is AnswerState.DONE
        node.asked("hand over")
        work.step()
        assert node.move().error == ""
        node.now += 2 * PATIENCE_S
        work.step()
        assert node.move().error == "n2 does not answer"


def test_a_move_that_is_not_known_here_is_cancelled_while_another_is_pending(node: Node) -> None:
    """That other one goes on, though a later one has ended here."""
    node.asked("stop")
    assert node.asked("copy", LATER_ID).state is AnswerState.FAILED
    assert node.asked("cancel", LATER_ID).state is AnswerState.DONE
    with node.working() as work:
        assert work.step()
    assert node.asked("stop").state is AnswerState.DONE
    assert node.move().id == MOVE_ID


def test_an_instance_does_not_move_while_a_disk_of_it_moves(node: Node) -> None:
    """QEMU copies a disk once at a time."""
    with operation.begin(OperationKind("disk-move", {}), store.operation_key("web1")):
        answer = node.asked("stop")
    assert answer.state is AnswerState.FAILED
    assert "disk-move" in answer.error
    assert node.asked("stop").state is AnswerState.RUNNING


def test_an_instance_that_came_here_moves_on_though_its_source_never_said_farewell(
    node: Node,
) -> None:
    came = TargetMove(MOVE_ID, "web1", "n0", 1, is_live=False, copies=False, runs=False)
    record = records.begin(came, node.uuid, {}, keeps_out="")
    assert node.asked("stop", LATER_ID).state is AnswerState.FAILED  # it has not arrived
    records.change(record, arrived=True)
    assert node.asked("stop", LATER_ID).state is AnswerState.RUNNING
    assert node.move().id == LATER_ID
    assert records.has_ended(node.uuid, MOVE_ID)


def test_each_move_that_has_begun_here_counts_once(
    node: Node, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def status() -> Any:
        assert step_commands.show_counts(Namespace(json=True)) == 0
        return json.loads(capsys.readouterr().out)

    nothing = {"done": 0, "failed": 0}
    assert status() == {"out": nothing, "in": nothing, "downtime": {"count": 0, "milliseconds": 0}}
    # The master ends one that has not begun here.
    node.asked("cancel", EARLIER_ID)
    assert status()["out"] == nothing
    # One goes back, and its end is noted by a process that is killed right after that.
    node.asked("stop")
    node.asked("cancel")
    with node.working() as work, monkeypatch.context() as patched:
        patched.setattr(operation, "end", _killed)
        with pytest.raises(KeyboardInterrupt):
            while work.step():
                pass
    assert status()["out"] == {"done": 0, "failed": 1}
    with node.working() as work:
        while work.step():
            pass
    assert status()["out"] == {"done": 0, "failed": 1}
    # Another one comes, and its record ends though the master has ended a later one meanwhile.
    came = TargetMove(LATER_ID, "web1", "n0", 1, is_live=False, copies=False, runs=False)
    record = records.begin(came, node.uuid, {}, keeps_out="")
    records.note_without_record(node.uuid, "web1", LATEST_ID)
    records.end(records.change(record, arrived=True))
    assert (status()["out"], status()["in"]) == ({"done": 0, "failed": 1}, {"done": 1, "failed": 0})
    assert records.has_ended(node.uuid, LATEST_ID)


def _killed(_identity: str) -> None:
    raise KeyboardInterrupt


MACHINE = {"machine": "pc-q35-7.2", "memory": 1 << 27, "vcpus": 1, "devices": {}}


@pytest.mark.parametrize(
    "lie",
    [
        {"port": None},
        {"port": 70_000},
        {"nonce": "no key"},
        {"nonce": "a" * 32},
        {"key_id": "a" * 16},
        {"machine": MACHINE | {"vcpus": "1"}},
        {"machine": None},
        {"nbd_port": None},
        {"disks": []},
        {"disks": {"disk0": True}},
        {"address": 7},
    ],
    ids=str,
)
def test_what_a_target_has_prepared_is_read_before_anything_begins(
    node: Node, lie: dict[str, Any]
) -> None:
    sound = node.prepared() | {"machine": MACHINE, "nbd_port": 7, "disks": {"a": {"copies": True}}}
    Prepared.of(sound, is_live=True)
    answer = node.asked("copy", is_live=True, prepared=sound | lie)
    assert answer.state is AnswerState.FAILED
    assert records.find("web1") is None


def test_a_step_that_is_asked_twice_at_once_begins_one_move(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Salt asks again when an answer takes long: the second question has found no record yet."""
    assert node.asked("stop").state is AnswerState.RUNNING
    find, found = records.find, [None]

    monkeypatch.setattr(records, "find", lambda name: found.pop() if found else find(name))
    assert node.asked("stop").state is AnswerState.RUNNING
    assert not found


def test_a_fault_that_has_gone_is_told_no_more(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The master gives a move up that has had a fault for long."""
    node.asked("stop")
    faults = [OSError(errno.EIO, "Input/output error")]

    def looked(name: str) -> Any:
        if faults:
            raise faults.pop()
        return observe.look(name)

    monkeypatch.setattr(source_service, "look", looked)
    told = []
    with node.working() as work:
        for _ in range(2):
            work.step()
            status = records.read_status("web1", MOVE_ID)
            told.append(status.fault if status else None)
    assert told == ["[Errno 5] Input/output error", ""]


@pytest.fixture
def copies(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cold move with a disk has begun."""
    monkeypatch.setattr(
        source_service, "copy_key", lambda _name: KeyFolder(tmp_path / "key", tmp_path)
    )
    (tmp_path / "a").write_bytes(bytes(512))
    files = {"0": VolumeFile(f"{tmp_path}/a")}
    monkeypatch.setattr(source_service, "files_by_role", lambda _volume: files)
    disk = Disk(uuid=str(UUID(int=1)), path=f"{tmp_path}/a", unit="default")
    store.save(replace(store.load("web1"), disks=(disk,)))
    prepared = node.prepared() | {"disks": {disk.uuid: {"copies": True}}}
    assert node.asked("copy", copies=True, prepared=prepared).state is AnswerState.RUNNING


def test_a_move_is_cancelled_while_the_copies_are_compared(
    node: Node, copies: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_service, "send_file", lambda *_arguments, **_keys: None)
    node.says = {"word": "wait", "port": 7}
    cancelling = threading.Timer(0.5, node.asked, ("cancel",))
    cancelling.start()
    with node.working() as work:
        assert work.step()
        cancelling.join()
        assert [one["told"] for one in node.told][-1] == "copied"
        assert work.step()
    assert "cancelled" in node.move().error


def test_what_takes_long_is_waited_for_in_parts_and_can_be_cancelled() -> None:
    goes_on, looked = threading.Event(), threading.Event()

    def compare(look: Callable[[], None]) -> bool:
        while not goes_on.wait(0.01):
            look()
            looked.set()
        return True

    first, second = Comparison(compare), Comparison(compare)
    assert looked.wait(60)
    assert first.result(0.01) is None
    second.cancel()
    with pytest.raises(MoveError, match="cancelled"):
        second.result(60)
    goes_on.set()
    assert first.result(60)
    first.cancel()


def test_an_answer_that_lacks_something_is_an_error_of_the_move(node: Node, copies: None) -> None:
    node.says = {"word": "done"}  # and no port
    with node.working() as work:
        assert work.step()
    assert "has no port" in node.move().error


def test_what_is_removed_is_what_was_copied(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system that both nodes have is not mounted any more when the guest has left."""
    mounts, removed = tmp_path / "mountinfo", list[str]()
    monkeypatch.setattr(present, "MOUNTS", mounts)
    monkeypatch.setattr(leaving, "volume_in", lambda _unit, uuid: removed.append(uuid))
    monkeypatch.setattr(leaving, "remove_volume", lambda _volume: None)
    shared, own = (
        Disk(uuid=str(UUID(int=number)), path=f"{tmp_path}/{number}/a", unit="default")
        for number in (1, 2)
    )
    store.save(replace(store.load("web1"), disks=(shared, own)))
    mounts.write_text(f"30 1 0:30 / {tmp_path}/1 rw - nfs4 server:/ rw\n")
    prepared = node.prepared() | {
        "disks": {shared.uuid: {"copies": True}, own.uuid: {"copies": True}}
    }
    assert "other disks" in node.asked("stop", copies=True, prepared=prepared).error
    prepared["disks"][shared.uuid]["copies"] = False
    answer = node.asked("hand over", copies=True, prepared=prepared)
    assert answer.state is AnswerState.RUNNING
    mounts.write_text("")
    with node.working() as work:
        for word in ("held", "held", "runs", "runs"):
            node.says = {"word": word}
            work.step()
    assert records.find("web1") is None
    assert not store.load_sound("web1")
    assert removed == [own.uuid]


def test_on_a_full_disk_a_move_of_a_guest_that_is_off_goes_neither_on_nor_back(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The process stays, and says what it waits for."""

    def full(file: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    node.asked("hand over")
    node.says = {"word": "held"}
    with node.working() as work:
        work.step()
        with monkeypatch.context() as patched:
            patched.setattr(store, "write_whole", full)
            patched.setattr(operation, "write_whole", full)
            for _ in range(4):
                node.now += PATIENCE_S
                assert work.step()
        told = [one.message for one in caplog.records if "No space left" in one.message]
        assert len(told) == 2, told
        assert node.move().error == ""
        work.step()
    spec = store.load("web1")
    assert (spec.node, spec.claim_serial) == ("n2", 2)


def test_the_end_of_a_step_is_waited_for(
    node: Node, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = []

    def work() -> None:
        with node.working() as process:
            process.step()

    def begin(name: str) -> None:
        begun.append(name)
        threading.Timer(0.3, work).start()

    def asked(wait_s: float) -> Any:
        data = json.dumps(node.step("stop", prepared=node.prepared())._asdict()).encode()
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
        assert step_commands.step(Namespace(wait=wait_s)) == 0
        return json.loads(capsys.readouterr().out)["state"]

    monkeypatch.setattr(step_commands, "log_to_journal", lambda _program: None)
    monkeypatch.setattr(step_commands, "_AGAIN_S", 3600.0)  # or the process is begun once more
    monkeypatch.setattr(step_commands, "begin_unit", begun.append)
    assert asked(0.0) == "running"
    monkeypatch.setattr(step_commands, "begin_unit", begin)
    assert asked(60.0) == "done"
    assert begun == ["web1", "web1"]


def test_a_move_ends_without_a_master(
    node: Node, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(_name: str) -> None:
        with node.working() as process:
            process.step()

    monkeypatch.setattr(step_commands, "begin_unit", work)
    monkeypatch.setattr(step_commands, "_LOOK_S", 0.0)
    monkeypatch.setattr(step_commands, "log_to_journal", lambda _program: None)
    arguments = Namespace(name="web1", json=False, source_ended=False)
    with pytest.raises(BrineError, match="no move"):
        step_commands.cancel(arguments)
    node.asked("stop")
    with pytest.raises(store.InstanceError), store.alone("web1"):
        pass
    with pytest.raises(BrineError, match="away from"):
        step_commands.drop(arguments)
    assert step_commands.cancel(arguments) == 0
    assert "has ended" in capsys.readouterr().out
    with store.alone("web1"):
        pass
    # A master that comes back hears of it.
    assert node.asked("copy").state is AnswerState.FAILED
    assert node.asked("cancel").state is AnswerState.DONE


def test_a_target_drops_a_move_only_once_its_source_has_ended(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    come = TargetMove(MOVE_ID, "web1", "n0", 1, is_live=False, copies=False, runs=False)
    record = records.begin(come, node.uuid, {}, keeps_out="")
    monkeypatch.setattr(step_commands, "begin_unit", lambda _name: records.end(record))
    monkeypatch.setattr(step_commands, "_LOOK_S", 0.0)
    monkeypatch.setattr(step_commands, "log_to_journal", lambda _program: None)
    arguments = Namespace(name="web1", json=False, source_ended=False)
    with pytest.raises(BrineError, match="must have ended on n0"):
        step_commands.drop(arguments)
    arguments.source_ended = True
    assert step_commands.drop(arguments) == 0


def brought(node: Node) -> dict[str, Any]:
    """What the source has brought, beside its question whether the target holds all."""
    return next(one["files"] for one in node.told if one["told"] == "bring")


def test_what_comes_along_is_brought_when_the_guest_is_off(node: Node, tmp_path: Path) -> None:
    """As it is then: its firmware may write while it shuts down. And no record has it."""
    node.asked("stop")
    (tmp_path / "password").write_text("5ecret\nmore\n")
    spec = store.load("web1")
    store.save(replace(spec, vnc_bind="::1", vnc_password_file=f"{tmp_path}/password"))
    paths.CONSOLE_LOG_DIR.mkdir()
    InstanceFiles("web1").console_log.write_text("one-time word: swordfish\n")
    node.asked("hand over")
    node.says = {"word": "held"}
    with node.working() as work:
        work.step()
    assert [one["told"] for one in node.told] == ["bring", "hold"]
    found = of_message(brought(node))
    assert found[Belonging.VNC_PASSWORD] == b"5ecret"
    assert b"swordfish" in found[Belonging.CONSOLE_LOG]
    record = json.dumps([one.facts for one in operation.pending()])
    assert "5ecret" not in record
    assert "swordfish" not in record


def test_what_a_target_does_not_keep_ends_the_move(node: Node) -> None:
    node.asked("hand over")
    node.says = {"word": "refused", "error": "no such folder"}
    with node.working() as work:
        work.step()
    assert "no such folder" in node.move().error


def test_a_key_of_the_cluster_that_is_replaced_changes_nothing_for_a_move(node: Node) -> None:
    """Neither before the source has begun, while both are valid, nor after."""
    give_keys(b"the key that comes next", SECRET)
    assert node.asked("hand over").state is AnswerState.RUNNING
    give_keys(b"the key that comes next")
    node.says = {"word": "held"}
    with node.working() as work:
        work.step()
    assert [one["told"] for one in node.told] == ["bring", "hold"]


def test_a_move_whose_key_is_forgotten_before_the_source_begins_goes_back(node: Node) -> None:
    give_keys(b"the key that comes next")
    answer = node.asked("hand over")
    assert answer.state is AnswerState.FAILED
    assert "not here any more" in answer.error
    assert records.find("web1") is None
