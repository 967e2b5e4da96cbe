"""An instance that is off moves with its snapshots between two nodes, by the processes of both. A
kill of either after any of its acts leaves all of it on one of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from brine.common import paths
from brine.instance import store
from brine.instance.disks.snapshots import remove_snapshot, roll_back, snapshots_of, take_snapshot
from brine.instance.registry import define_instance
from brine.moves import (
    arriving,
    leaving,
    records,
    source_service,
    source_steps,
    target_service,
    target_steps,
)
from brine.moves.cluster_keys import ClusterKeys, key_of_move
from brine.moves.copying import FileServer
from brine.moves.move_key import KeyFolder
from brine.moves.offer import make_offer
from brine.moves.records import AskedStep
from brine.moves.source import SourceAct, SourceStep
from brine.moves.source_service import SourceWork
from brine.moves.target import TargetMove
from brine.storage.directory_notes import RECORDS
from brine.storage.file_volume import FileVolume
from brine.storage.volumes import as_it_is, volume_in
from brine.vm.run import Run
from cluster_key import give_keys
from component.test_volumes import write
from killing import KilledError, die_after

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="makes disks as root; ./dev test runs as root"
)

HERE = "127.0.0.1"
NAME = "web1"
MOVE_ID = "01760000000000000000-6f0c21aa"
MOST_STEPS = 500
WAIT_S = 120.0
NODE_DIRS = (
    *("CONTROL_DIR", "MARKS_DIR", "LOCK_DIR", "RUNTIME_DIR", "CONSOLE_DIR", "OUTBOX_DIR"),
    *("CONSOLE_LOG_DIR", "OPERATIONS_DIR", "VOLATILE_OPERATIONS_DIR", "SPECS_DIR", "UEFI_DIR"),
    *("MOVES_DIR", "MOVES_STATUS_DIR", "CLAIMS_DIR"),
)
KILLED = 77


class Elsewhere:
    """Another node: what is done there is done by processes of its own.

    :param dies_after: the owner and the name of a function; the first process that works there ends
        when it has called that.
    """

    def __init__(self, folder: Path, dies_after: tuple[Any, str] | None) -> None:
        self.folder = folder
        self.dies_after = dies_after
        self.has_died = False
        self.process = 0
        for name in NODE_DIRS:
            (folder / name).mkdir(parents=True)

    def ask(self, function: Callable[[], Any]) -> Any:
        """What a function returns there, as JSON."""
        reader, writer = os.pipe()
        process = self._fork(lambda: os.write(writer, json.dumps(function()).encode()))
        os.close(writer)
        with open(reader, "rb") as said:
            text = said.read()
        _, status = os.waitpid(process, 0)
        assert status == 0, status
        return json.loads(text)

    def keep_working(self) -> None:
        """Have a process be there, as systemd does, while there is a move."""
        if self.process:
            ended, status = os.waitpid(self.process, os.WNOHANG)
            if not ended:
                return
            self.has_died |= os.waitstatus_to_exitcode(status) == KILLED
            self.process = 0
        if self.ask(lambda: records.find(NAME) is not None):
            self.process = self._fork(self._work)

    def _work(self) -> None:
        if self.dies_after and not self.has_died:
            owner, name = self.dies_after
            function = getattr(owner, name)

            def call(*arguments: Any, **keys: Any) -> None:
                function(*arguments, **keys)
                os._exit(KILLED)

            setattr(owner, name, call)
        if record := records.find(NAME):
            with records.working_for(record):
                target_service.work(record)

    def _fork(self, function: Callable[[], object]) -> int:
        process = os.fork()
        if process:
            return process
        status = 1
        try:
            for name in NODE_DIRS:
                setattr(paths, name, self.folder / name)
            key = KeyFolder(self.folder / "key", self.folder / "key")
            vars(target_service)["copy_key"] = lambda _name: key
            function()
            status = 0
        finally:
            os._exit(status)

    def close(self) -> None:
        if self.process:
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)


class World:
    """An instance with two disks and a snapshot, which is about to move elsewhere."""

    def __init__(self, folder: Path, units: list[str], dies_after: Any) -> None:
        self.unit, self.other_unit = units
        self.there = Elsewhere(folder / "there", dies_after)
        disks = [
            {"name": name, "unit": self.unit, "size_mib": 4, "format": image}
            for name, image in (("root", "raw"), ("data", "qcow2"))
        ]
        define_instance({"name": NAME, "accel": "tcg", "admin_state": "down", "disks": disks})
        self.write("before")
        take_snapshot(NAME, "one")
        self.write("since")
        spec = store.load(NAME)
        self.uuid, self.disks = spec.uuid, [one.uuid for one in spec.disks]
        self.contents = self.contents_in(self.unit)
        self.taken = [one.snapshot.since for one in snapshots_of(spec)["one"]]
        self.prepared: dict[str, Any] | None = None
        self.prepared = self._prepared()

    def write(self, text: str) -> None:
        for disk in store.load(NAME).disks:
            write(volume_in(disk.unit, disk.uuid), text)

    def contents_in(self, unit: str) -> list[list[str]]:
        """What is in each file of each volume, with what its header names below it."""
        return [
            [_checksum(one.path, one.format) for one in volume_in(unit, uuid).files()]
            for uuid in self.disks
        ]

    def _prepared(self) -> dict[str, Any]:
        """What the target has prepared, when it has recorded the move as for a master's step."""
        offer = json.loads(json.dumps(make_offer(NAME, cold=True)))
        agreement = ClusterKeys.read().agree(offer["cluster_keys"], "n1")
        move = TargetMove(MOVE_ID, NAME, "n1", 2, is_live=False, copies=True, runs=False)
        facts = {
            "source": "n1",
            "target": os.uname().nodename,
            "target_address": HERE,
            "serial": 2,
            "wishes": {},
            "offered": offer,
            "units": dict.fromkeys(self.disks, self.other_unit),
            "agreement": agreement._asdict(),
            "key": key_of_move(agreement, self.asked(SourceStep.STOP)).text,
        }

        def begin() -> None:
            records.begin(move, self.uuid, facts, keeps_out="is being moved to this node")

        def prepared() -> Any:
            record = records.find(NAME)
            return record and record.move.is_prepared and record.facts["prepared"]  # type: ignore[union-attr]

        self.there.ask(begin)
        deadline = time.monotonic() + WAIT_S
        while not (found := self.there.ask(prepared)):
            assert time.monotonic() < deadline
            self.there.keep_working()
            time.sleep(0.1)
        return {**found}

    def asked(self, step: SourceStep) -> AskedStep:
        """What the master asks the source for."""
        facts = {
            "instance": NAME,
            "source": "n1",
            "uuid": self.uuid,
            "serial": 2,
            "source_address": HERE,
            "target": "n2",
            "is_live": False,
            "copies": True,
            "runs": False,
            "run": Run.last(NAME).id,
            "wishes": {},
            "prepared": self.prepared,
        }
        return AskedStep(f"{MOVE_ID}-0", step, facts)

    def work(self) -> None:
        """The source's process, until it waits for the master or has ended."""
        record = records.find(NAME)
        if record is None:
            return
        with contextlib.closing(SourceWork(record)) as work, records.working_for(record):
            for _ in range(MOST_STEPS):
                self.there.keep_working()
                if not work.step() or work._status.act == SourceAct.NOTHING.name:
                    return
        raise AssertionError(work._status)

    def go_all_the_way(self) -> None:
        """What the master does: it has the move go back when it has failed."""
        for step in (SourceStep.STOP, SourceStep.COPY, SourceStep.HAND_OVER):
            source_steps.answer(self.asked(step))
            try:
                self.work()
            except KilledError:
                self.work()
            record = records.find(NAME)
            if record is not None and record.as_source().error:
                break
        if records.find(NAME):
            source_steps.answer(self.asked(SourceStep.CANCEL))
            self.work()
            drop = AskedStep(f"{MOVE_ID}-9", "drop", {"instance": NAME, "uuid": self.uuid})
            drop.facts["serial"] = 2  # type: ignore[index]
            self.there.ask(lambda: target_steps.answer(drop).state)
        assert records.find(NAME) is None
        deadline = time.monotonic() + WAIT_S
        while self.there.process or self.there.ask(lambda: records.find(NAME) is not None):
            assert time.monotonic() < deadline
            self.there.keep_working()
            time.sleep(0.1)

    def is_there(self) -> bool:
        """Whether the instance is on the target alone, or on the source alone; all of it."""
        here, there = store.names(), self.there.ask(store.names)
        assert sorted([*here, *there]) == [NAME]
        unit, empty = self.unit, self.other_unit
        if there:
            unit, empty = empty, unit
        assert self.contents_in(unit) == self.contents
        assert {*os.listdir(empty)} <= {RECORDS}
        assert FileVolume.list(empty) == []
        assert not [*Path(self.there.folder / "key").glob("*")]
        return bool(there)


def _checksum(path: str, image: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        command = ["qemu-img", "convert", "-f", image, "-O", "raw", path, f"{folder}/raw"]
        subprocess.run(command, check=True)
        return subprocess.run(
            ["sha256sum", f"{folder}/raw"], check=True, capture_output=True, text=True
        ).stdout.split()[0]


@pytest.fixture
def make(tmp_path: Path, own_node: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(paths, "ETC_DIR", tmp_path / "etc")
    for name in ("MOVES_DIR", "MOVES_STATUS_DIR", "CLAIMS_DIR"):
        monkeypatch.setattr(paths, name, tmp_path / name)
    key = KeyFolder(tmp_path / "key", tmp_path / "key")
    monkeypatch.setattr(source_service, "copy_key", lambda _name: key)
    (tmp_path / "etc").mkdir()
    give_keys()
    Path("/srv").mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        folder = tempfile.TemporaryDirectory
        units = [stack.enter_context(folder(prefix="brine-moves-", dir="/srv")) for _ in "ab"]
        (tmp_path / "etc/storage.toml").write_text(f"directories = {units!r}\n")

        def made(dies_after: tuple[Any, str] | None = None) -> World:
            world = World(tmp_path, units, dies_after)
            stack.callback(world.there.close)
            return world

        yield made


def test_an_instance_has_its_snapshots_on_another_node(make: Any) -> None:
    world = make()
    world.go_all_the_way()
    assert world.is_there()

    def found() -> Any:
        spec = store.load(NAME)
        assert spec.disks == tuple(map(as_it_is, spec.disks))
        taken = snapshots_of(spec)
        roll_back(NAME, "one")
        remove_snapshot(NAME, "one")
        return [list(taken), [one.snapshot.since for one in taken["one"]], spec.claim_serial]

    assert world.there.ask(found) == [["one"], world.taken, 2]
    (root,), (data,) = world.contents_in(world.other_unit)
    assert [root, data] == [one[0] for one in world.contents]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        pytest.param(source_service, "send_file", marks=pytest.mark.long),
        (SourceWork, "_copy_files"),
        pytest.param(source_service, "give_away", marks=pytest.mark.long),
        pytest.param(leaving, "remove_volume", marks=pytest.mark.long),
        (leaving, "undefine_instance"),
    ],
)
def test_the_source_is_killed_after(
    make: Any, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make()
    killed = die_after(monkeypatch, owner, name)
    world.go_all_the_way()
    assert killed
    assert world.is_there()


@pytest.mark.parametrize(
    ("owner", "name", "goes_on"),
    [
        pytest.param(FileVolume, "_make_overlay", True, marks=pytest.mark.long),
        pytest.param(FileServer, "serve", False, marks=pytest.mark.long),
        (target_service, "end_copy", False),
        (arriving, "settle_copies", True),
        pytest.param(target_service, "take", True, marks=pytest.mark.long),
    ],
)
def test_the_target_is_killed_after(make: Any, owner: Any, name: str, goes_on: bool) -> None:
    world = make((owner, name))
    world.go_all_the_way()
    assert world.there.has_died
    assert world.is_there() is goes_on
