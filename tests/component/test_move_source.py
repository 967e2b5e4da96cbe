"""The process of a node that a guest leaves, on real QEMUs: it does the whole way by itself, and
goes on after a kill before and after each of its acts."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from brine.common import operation, paths
from brine.instance import store
from brine.instance.claims import has_seen, note_claim, note_of
from brine.moves import channel, keys, leaving, records, source_service
from brine.moves.migration import MoveOptions, QemuGoneError
from brine.moves.outgoing import Outgoing
from brine.moves.records import MoveRecord
from brine.moves.source import SourceAct, SourceMove, SourceStep, TargetWord
from brine.moves.source_service import SourceWork
from brine.moves.talk import Listener, Topic
from brine.vm.claim import Claim
from component.move_pair import HERE, NAME, Pair, is_counting
from killing import KilledError, die_after

MOVE_ID = "01760000000000000000-6f0c21aa"
MOST_STEPS = 3000


class Target:
    """The node that the guest goes to."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.is_taken = self.awaits_memory = self.is_over = False
        self.told: list[str] = []
        self.faults: list[str] = []
        pair.target.prepare({})
        self.disks = channel.listen(HERE, callers=[])
        pair.target.serve_disks(self.disks, pair.mirrored)
        self.listener = channel.listen(HERE)
        self.talk = Listener(self.listener, pair.key, self.answer, self.take_memory)

    def prepared(self) -> dict[str, Any]:
        machine = self.pair.target.facts()
        return {
            "address": HERE,
            "port": self.listener.getsockname()[1],
            "key_id": "a" * 16,
            "nonce": "a" * 64,
            "machine": {**machine._asdict(), "devices": dict(machine.devices)},
            "disks": {self.pair.disk: {"copies": True}},
            "nbd_port": self.disks.getsockname()[1],
        }

    def take_memory(self, connection: socket.socket) -> None:
        assert self.awaits_memory
        self.awaits_memory = False
        self.pair.target.receive(connection)

    def refuse_unclaimed(self) -> None:
        """The source has given its claim away before it says so."""
        if not has_seen(NAME, self.pair.spec.uuid, 2):
            self.faults.append("go, without the claim")

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        topic = Topic(message["told"])
        self.told.append(topic)
        if self.is_over and topic is not Topic.CLEARED:
            self.faults.append(f"{topic}, of a move that is over")
        target = self.pair.target
        try:
            if topic is Topic.ADMIT:
                channel.admit(self.disks, [tuple(one) for one in message["ports"]])
            elif topic is Topic.BRING:
                return {"word": "held"}
            elif topic is Topic.RECEIVE:
                self.awaits_memory = True
            elif topic is Topic.HOLD:
                state = target.run_state()
                if state == "inmigrate":
                    return {"word": "wait"}
                target.stop_serving()
                return {"word": "held"}
            elif topic is Topic.GO:
                self.refuse_unclaimed()
                self.is_taken = True
                target.go()
                return {"word": "runs"}
            elif topic is Topic.CLEARED:
                self.is_over = True
            elif topic is Topic.LEAVE and not self.is_taken:
                target.quit()
        except QemuGoneError as error:
            return {"word": "refused", "error": str(error)}
        return {"word": ""}

    def close(self) -> None:
        self.talk.close()
        self.disks.close()


class World:
    """A guest that is to move, with a record of that."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **how: Any) -> None:
        self.pair = Pair(folder, **how)
        self.target = Target(self.pair)
        monkeypatch.setattr(paths, "RUNTIME_DIR", folder / "a" / "runtime")
        for name in ("MOVES_DIR", "MOVES_STATUS_DIR", "CLAIMS_DIR"):
            monkeypatch.setattr(paths, name, folder / name)
        patched: dict[str, Any] = {
            "look": lambda _name: self._seen(),
            "monitor_of": lambda _name, **_how: self.pair.a.connect(),
        }
        for name, value in patched.items():
            monkeypatch.setattr(source_service, name, value)
        monkeypatch.setattr(keys, "key_folder", lambda _name: self.pair.source_key)
        monkeypatch.setattr(leaving, "_end_qemu", lambda _move, outgoing: outgoing.quit())
        monkeypatch.setattr(leaving, "undefine_instance", _undefine)
        spec = replace(self.pair.spec, node=os.uname().nodename, claim_serial=1)
        store.save(spec)
        move = SourceMove(
            MOVE_ID,
            NAME,
            "n2",
            2,
            is_live=True,
            copies=True,
            run="unknown",
            runs=True,
            asked=SourceStep.COPY,
        )
        facts = {
            "source_address": HERE,
            "wishes": {"plaintext": not how.get("encrypted")},
            "prepared": self.target.prepared(),
            "key": self.pair.key.text,
            "copied": {},
        }
        self.uuid = spec.uuid
        records.begin(move, spec.uuid, facts, keeps_out="is being moved to n2")

    def _seen(self) -> Any:
        is_going = self.pair.a.is_alive()
        return SimpleNamespace(is_going=is_going)

    @property
    def record(self) -> MoveRecord | None:
        return records.find(NAME)

    def asks(self, step: SourceStep) -> None:
        """The master asks for a step."""
        if record := self.record:
            records.change(record, lambda move: move.asked_for(step))

    def work(self, until: Callable[[SourceWork], bool] = lambda _work: False) -> None:
        """The process runs, until the record has ended, or until something is so."""
        record = self.record
        if record is None:
            return
        work = SourceWork(record)
        with contextlib.closing(work), records.working_for(record):
            for _ in range(MOST_STEPS):
                if not work.step() or until(work):
                    return
        raise AssertionError(work._status)

    def go_all_the_way(self) -> None:
        """The process runs, and the master asks for what follows; if the move fails, to go back."""
        self.work(has_nothing_to_do)
        self.asks(SourceStep.HAND_OVER)
        self.work(has_nothing_to_do)
        if self.record:
            self.asks(SourceStep.CANCEL)
            self.work()

    def is_given(self) -> bool:
        note = note_of(self.uuid)
        spec = store.load_sound(NAME)
        return (note is not None and note.node == "n2") or (spec is not None and spec.node == "n2")

    def close(self) -> None:
        self.target.close()
        self.pair.close()


def has_nothing_to_do(work: SourceWork) -> bool:
    return work._status.act == SourceAct.NOTHING.name


def _undefine(name: str) -> None:
    note_claim(store.load(name))
    store.remove(name)


@pytest.fixture
def make(tmp_path: Path, own_node: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:

        def made(**keys: Any) -> World:
            (folder := tmp_path / "pair").mkdir()
            world = World(folder, monkeypatch, **keys)
            stack.callback(world.close)
            return world

        yield made


def test_the_whole_way(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make()
    pair = world.pair
    monkeypatch.setattr(source_service, "sync_folder", lambda _: world.target.told.append("sync"))
    pair.write(pair.a, 3)
    world.work(has_nothing_to_do)
    pair.write(pair.a, 4)  # to both
    world.asks(SourceStep.HAND_OVER)
    world.work()
    assert pair.a.end() == 0
    assert pair.running() == [pair.b]
    assert is_counting(pair.b)
    assert pair.reads(pair.b, 4)
    pair.never_two()
    assert world.record is None
    assert records.has_ended(world.uuid, MOVE_ID)
    note = note_of(world.uuid)
    assert note
    assert note.claim == Claim("n2", 2)
    counts = records.counts()
    assert (counts.out_done, counts.measured) == (1, 1)
    assert counts.downtime_ms > 0
    told = world.target.told
    # That the claim is given away survives a loss of power before the target hears of it.
    assert told.index(Topic.RECEIVE) < told.index(Topic.HOLD) < told.index("sync")
    assert told.index("sync") < told.index(Topic.GO)


AFTER = [
    (SourceWork, "_prepare"),
    (Outgoing, "mirror"),
    (Outgoing, "await_mirrors"),
    (SourceWork, "_connected"),
    (Outgoing, "send"),
    (Outgoing, "leave_mirrors"),
    (Outgoing, "switch_over"),
    (SourceWork, "_ask"),
    (source_service, "give_away"),
    (SourceWork, "_go"),
    (leaving, "_end_qemu"),
    (leaving, "undefine_instance"),
    (records, "note_end"),
]
"""What the process does in the course of a move, in its order."""


@pytest.mark.parametrize("owner_and_name", AFTER, ids=[name for _, name in AFTER])
def test_killed_after(
    make: Any, owner_and_name: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process goes on with what there is: one of both nodes has the guest, and never
    two."""
    world = make(encrypted=owner_and_name[1] in ("_prepare", "await_mirrors"))
    pair = world.pair
    killed = die_after(monkeypatch, *owner_and_name)
    for step in (SourceStep.COPY, SourceStep.HAND_OVER):
        world.asks(step)
        try:
            world.work(has_nothing_to_do)
        except KilledError:
            world.work(has_nothing_to_do)
    assert killed
    if world.record:
        world.asks(SourceStep.CANCEL)
        world.work()
    assert world.record is None
    (there,) = pair.running()
    assert there is (pair.b if world.is_given() else pair.a)
    assert is_counting(there)
    pair.never_two()
    assert not world.target.faults
    counts = records.counts()
    assert (counts.out_done, counts.out_failed) == ((1, 0) if there is pair.b else (0, 1))


def test_the_target_ends_before_it_holds_all(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guest that has left, and that no node has claimed, goes on here."""
    world = make()
    pair = world.pair
    world.work(has_nothing_to_do)
    world.asks(SourceStep.HAND_OVER)
    world.work(lambda work: work._status.act == SourceAct.SWITCH.name)
    pair.b.kill()
    world.go_all_the_way()
    assert not world.is_given()
    assert pair.running() == [pair.a]
    assert is_counting(pair.a)
    assert store.load(NAME).claim_serial == 1


def test_the_target_goes_away_for_good(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_service, "PATIENCE_S", 1.0)
    world = make()
    pair = world.pair
    world.work(has_nothing_to_do)
    world.asks(SourceStep.HAND_OVER)
    world.work(lambda work: work._status.act == SourceAct.SWITCH.name)
    world.target.close()
    world.go_all_the_way()
    assert not world.is_given()
    assert pair.running() == [pair.a]
    pair.never_two()


def test_where_nothing_can_be_recorded_the_guest_does_not_stand_still_for_long(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk is full once the target holds all. The guest goes on here, and whatever happens
    then, it is never given away."""
    monkeypatch.setattr(source_service, "PATIENCE_S", 1.0)
    world = make()
    pair = world.pair
    world.work(has_nothing_to_do)
    world.asks(SourceStep.HAND_OVER)
    world.work(lambda work: work._word is TargetWord.HELD)

    def full(file: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    with monkeypatch.context() as patched:
        patched.setattr(store, "write_whole", full)
        patched.setattr(operation, "write_whole", full)
        world.work(lambda _work: pair.running() == [pair.a])
        assert is_counting(pair.a)
        record = world.record
        assert record
        assert record.as_source().error == ""
        world.work(lambda work: work._status.act == SourceAct.FAIL.name)  # a new process
        assert not world.is_given()
    assert any("No space left" in one.message for one in caplog.records)
    world.go_all_the_way()
    assert not world.is_given()
    assert world.record is None
    assert pair.running() == [pair.a]
    assert Topic.GO not in world.target.told
    pair.never_two()


def test_the_master_goes_back_while_disks_are_copied(make: Any) -> None:
    world = make(options=MoveOptions())
    pair = world.pair
    world.work(has_nothing_to_do)
    world.asks(SourceStep.CANCEL)
    world.work()
    assert pair.running() == [pair.a]
    assert not pair.source.look([pair.disk]).mirrors
    assert records.has_ended(world.uuid, MOVE_ID)
    pair.write(pair.a, 5)


def test_others_leave_the_instance_alone_meanwhile(make: Any) -> None:
    world = make()
    with pytest.raises(store.InstanceError, match="is being moved to n2"), store.alone(NAME):
        pass
    world.asks(SourceStep.CANCEL)
    world.work()
    with store.alone(NAME):
        pass
