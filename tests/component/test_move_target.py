"""The process of a node that takes a guest, on real QEMUs: it goes on after a kill after each of
its acts, and of a drop and a go the first counts."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from brine.common import paths
from brine.common.operation import AnswerState
from brine.common.systemd import ServiceManager
from brine.instance import store
from brine.instance.node_facts import NodeFacts
from brine.moves import arriving, incoming, records, target_service, target_steps
from brine.moves.belongings import Belonging, to_message
from brine.moves.incoming import Incoming
from brine.moves.migration import MoveError
from brine.moves.records import AskedStep, MoveCounts
from brine.moves.target import Fate, TargetMove
from brine.moves.target_service import TargetWork
from brine.vm.claim import Claim
from brine.vm.files import InstanceFiles
from brine.vm.spec import to_json
from component.move_pair import HERE, MIB, NAME, Pair, is_counting
from killing import KilledError, die_after

MOVE_ID = "01760000000000000000-6f0c21aa"
GO = {"told": "go", "serial": 2}
HOLD = {"told": "hold"}
LOG = b"what it has said\n"
BRING = {"told": "bring", "files": to_message({Belonging.CONSOLE_LOG: LOG})}


class World:
    """A guest that is on its way, with the record of the node that takes it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pair = pair = Pair(folder)
        self.started: list[str] = []
        for name in ("MOVES_DIR", "MOVES_STATUS_DIR", "CLAIMS_DIR"):
            monkeypatch.setattr(paths, name, folder / name)
        for module in (incoming, target_service):
            monkeypatch.setattr(module, "monitor_of", lambda _name, **_how: pair.b.connect())
        monkeypatch.setattr(
            target_service, "start_instance", lambda name, **_how: self.started.append(name)
        )
        monkeypatch.setattr(arriving, "await_unit_down", lambda _name: pair.b.end())
        spec = replace(pair.moved_spec, node="n1", claim_serial=1, admin_state="up")
        store.save(spec)
        disk = spec.disks[0]
        node = NodeFacts(
            node="n1", version="", memory_mib=1, memory_available_mib=1, links={}, units={}
        )
        offered: dict[str, Any] = {
            "spec": to_json(spec),
            "node": node.to_json(),
            "live": True,
            "runs": True,
            "disks": [
                {
                    "uuid": disk.uuid,
                    "device_id": pair.disk,
                    "copies": True,
                    "size_bytes": 2 * MIB,
                    "format": "raw",
                    "unit": "",
                }
            ],
            "bitmaps": {},
            "runtime": pair.runtime.file.read_text(),
            "comes_along": ["console_log"],
            "uefi_bytes": 0,
            "cluster_keys": [],
        }
        here = os.uname().nodename
        self.facts = {
            "instance": NAME,
            "uuid": spec.uuid,
            "source": "n1",
            "target": here,
            "target_address": HERE,
            "serial": 2,
        }
        told = {
            **self.facts,
            "wishes": {"plaintext": True},
            "offered": offered,
            "units": {},
            "key": pair.key.text,
            "prepared": {"port": 0, "nbd_port": 0},
        }
        move = TargetMove(
            MOVE_ID, NAME, "n1", 2, is_live=True, copies=True, runs=True, is_prepared=True
        )
        records.begin(move, spec.uuid, told, keeps_out="is being moved here")

    def told(self, message: dict[str, Any]) -> dict[str, Any]:
        """What a new process answers, which finds what the one before has left."""
        record = records.find(NAME)
        assert record
        work = TargetWork(record)
        with contextlib.closing(work), records.working_for(record):
            return work.told(message)

    def step(self) -> bool:
        """Whether a new process has still something to do."""
        record = records.find(NAME)
        if record is None:
            return False
        work = TargetWork(record)
        with contextlib.closing(work), records.working_for(record):
            return work.step()

    def dropped(self) -> AnswerState:
        """The master drops the move."""
        return target_steps.answer(AskedStep(f"{MOVE_ID}-9", "drop", self.facts)).state


@pytest.fixture
def world(tmp_path: Path, own_node: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    (folder := tmp_path / "pair").mkdir()
    found = World(folder, monkeypatch)
    yield found
    found.pair.close()


GOES = [
    (target_service, "keep_belongings"),
    (Incoming, "stop_serving"),
    (Incoming, "flush"),
    (records, "decided"),
    (target_service, "take"),
    (target_service, "has_arrived"),
    (Incoming, "go"),
    (arriving, "announce_routes"),
    (records, "change"),
]
"""What the process does when the source asks whether it holds all, and says go."""


@pytest.mark.parametrize("owner_and_name", GOES, ids=[name for _, name in GOES])
def test_killed_after(
    world: World, owner_and_name: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = world.pair
    pair.run("await_received")
    assert pair.running() == []
    killed = die_after(monkeypatch, *owner_and_name)
    steps = ((BRING, "held"), (HOLD, "held"), (GO, "runs"), (GO, "runs"))
    for message, word in steps:
        assert store.load(NAME).claim_serial == 1 or message is GO
        try:
            found = world.told(message)
        except KilledError:
            found = world.told(message)
        assert found["word"] == word
    assert killed
    assert store.load(NAME).claim == Claim(os.uname().nodename, 2)
    assert world.dropped() is AnswerState.FAILED
    assert InstanceFiles(NAME).console_log.read_bytes() == LOG
    assert world.told({"told": "cleared"}) == {"word": "done"}
    assert records.counts() == MoveCounts(in_done=1)
    assert records.find(NAME) is None
    assert pair.running() == [pair.b]
    assert is_counting(pair.b)
    pair.never_two()
    assert not world.started


def test_what_is_claimed_goes_forward_without_its_qemu(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after any loss of power, even without the address that the source knows; and what ends
    later is not started again. At boot, the start waits for units that wait for this process."""
    ready = world.started.append
    monkeypatch.setattr(ServiceManager, "ready", lambda *_: ready("is ready"))
    world.pair.run("await_received")
    assert world.told(BRING)["word"] == "held"
    assert world.told(HOLD)["word"] == "held"
    world.pair.b.kill()
    record = records.find(NAME)
    assert record
    records.change(record, target_address="192.0.2.1")
    records.decided(record, Fate.TAKE)  # the process was killed then
    assert world.step()
    assert store.load(NAME).claim_serial == 2
    assert world.told(GO)["word"] == "runs"
    assert world.started == ["is ready", NAME]


def test_a_qemu_that_can_not_run_the_guest_is_given_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a minute it is asked again."""

    def refuses(self: Incoming) -> bool:
        raise MoveError(f"{self.name}: can't go on here")

    world.pair.run("await_received")
    assert world.told(BRING)["word"] == "held"
    assert world.told(HOLD)["word"] == "held"
    monkeypatch.setattr(Incoming, "go", refuses)
    with pytest.raises(MoveError, match="can't go on here"):
        world.told(GO)
    assert world.pair.b.is_alive()
    assert not world.started
    monkeypatch.setattr(target_service, "CONTINUES_S", 0.0)
    assert world.told(GO)["word"] == "runs"
    assert not world.pair.b.is_alive()
    assert world.started == [NAME]
    assert store.load(NAME).claim_serial == 2
    assert world.told({"told": "cleared"}) == {"word": "done"}
    assert records.counts() == MoveCounts(in_done=1)


def test_a_qemu_that_hangs_is_the_administrators(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may run the guest. What to do is told, and once it is done, the guest starts."""
    world.pair.run("await_received")
    assert world.told(BRING)["word"] == "held"
    assert world.told(HOLD)["word"] == "held"
    record = records.find(NAME)
    assert record
    records.decided(record, Fate.TAKE)
    monkeypatch.setattr(target_service, "_RETRY_S", 0.0)
    assert world.pair.b.process
    world.pair.b.process.send_signal(signal.SIGSTOP)
    assert world.step()
    (told,) = [one.message for one in caplog.records if "hangs" in one.message]
    assert f"systemctl kill --signal=KILL brine-instance@{NAME}.service" in told
    status = records.read_status(NAME, MOVE_ID)
    assert status
    assert status.fault == told
    world.pair.b.kill()
    assert world.step()
    assert world.started == [NAME]


def test_what_comes_along_has_to_come_before_the_claim(world: World) -> None:
    """And nothing of it is taken that the source can't have meant."""
    world.pair.run("await_received")
    said = world.told(HOLD)
    assert (said["word"], "has not come" in said["error"]) == ("refused", True)
    assert world.told({"told": "bring", "files": {"vnc_password": ""}})["word"] == "refused"
    assert world.told(BRING)["word"] == "held"
    assert world.told(HOLD)["word"] == "held"
    assert world.told(GO)["word"] == "runs"
    assert world.told(BRING)["word"] == "refused"


DROPS = [(Incoming, "quit"), (arriving, "remove_all"), (store, "remove"), (records, "note_end")]


@pytest.mark.parametrize("owner_and_name", DROPS, ids=[name for _, name in DROPS])
def test_a_dropped_move_leaves_nothing_and_is_never_taken(
    world: World, owner_and_name: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = world.pair
    pair.run("await_received")
    assert world.dropped() is AnswerState.RUNNING
    assert world.told({"told": "hold"})["word"] == "refused"
    assert world.told(GO)["word"] == "refused"
    killed = die_after(monkeypatch, *owner_and_name)
    with contextlib.suppress(KilledError):
        world.step()
    assert killed
    while world.step():
        pass
    assert world.dropped() is AnswerState.DONE
    assert records.counts() == MoveCounts(in_failed=1)
    assert store.names() == []
    assert not pair.b.is_alive()
    assert not (paths.CLAIMS_DIR / f"{pair.spec.uuid}.json").exists()
    assert pair.source.take_back(pair.mirrored)
    assert pair.running() == [pair.a]
    pair.never_two()
