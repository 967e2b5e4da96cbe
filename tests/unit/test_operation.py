"""Work of several steps: recorded, undone, completed, and settled after a kill."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from brine.common import cli, operation, paths
from brine.common.files import unfinished
from brine.common.operation import (
    AnswerState,
    Elsewhere,
    Facts,
    Following,
    Operation,
    OperationError,
    OperationKind,
    OperationState,
    StepAnswer,
    answered,
    awaited,
    begin,
    pending,
    settle,
)
from killing import each_step, killed_at
from lab.tree import TREE

KEY = "toy/a"
SETTLE = ["operations", "settle"]


def _remove(facts: Facts) -> None:
    Path(facts["path"]).unlink(missing_ok=True)


def _note(facts: Facts) -> None:
    with Path(facts["path"]).open("a") as file:
        file.write(f"{facts['text']}\n")


def _refuse(facts: Facts) -> None:
    if not Path(facts["path"]).exists():
        raise OSError(errno.EIO, "the storage is dead")


def _following(record: Operation) -> Following:
    """Copy on node2, which may fail; then a note here, or the copy's removal on node2."""
    last = record.steps[-1] if record.steps else None
    if last is None:
        return Following(OperationState.BEGUN, Elsewhere("copy", {}, "node2"))
    if last.name != "copy":
        return Following(record.state, None)
    if last.answer["state"] == AnswerState.FAILED:
        step = Elsewhere("drop", {}, "node2")
        return Following(OperationState.UNDOING, step, last.answer["error"])
    note = {"path": record.facts["path"], "text": last.id}
    return Following(OperationState.COMMITTED, ("note", note))


TOY = OperationKind("toy", {"remove": _remove, "note": _note, "refuse": _refuse})


LED = OperationKind("led", {"note": _note}, following=_following)


@pytest.fixture(autouse=True)
def kinds(own_node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, loaded in (
        (operation, "toy", TOY),
        (cli, "operations", cli.OPERATIONS),
    ):
        entry = SimpleNamespace(name=name, load=lambda loaded=loaded: loaded)
        led = SimpleNamespace(name="led", load=lambda: LED)
        known = {"brine.operations": [entry, led], "brine.commands": [entry], "brine.verbs": []}
        monkeypatch.setattr(module, "entry_points", known.__getitem__)


def make_two(folder: Path, then: Callable[[], object] = lambda: None) -> None:
    """Make the files a and b, and a note of it."""
    with begin(TOY, KEY, facts={"folder": str(folder)}) as work:
        for name in ("a", "b"):
            path = folder / name
            work.step(f"make {name}", undo=("remove", {"path": str(path)}))
            path.write_text(name)
        then()
        work.commit(("note", {"path": str(folder / "note"), "text": "made"}))


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    return tmp_path / "files"


def left() -> list[Path]:
    found = [*paths.LOCK_DIR.glob("operation-*")]
    return found + ([*paths.OPERATIONS_DIR.iterdir()] if paths.OPERATIONS_DIR.exists() else [])


def fail() -> None:
    raise OperationError("no more")


def test_all_is_done_and_no_record_is_left(folder: Path) -> None:
    make_two(folder)
    assert files(folder) == ["a", "b", "note"]
    assert (folder / "note").read_text() == "made\n"
    assert left() == []


def test_an_error_undoes_the_steps_in_reverse_order(folder: Path) -> None:
    with pytest.raises(OperationError, match="no more"):
        make_two(folder, fail)
    assert (files(folder), left()) == ([], [])
    with pytest.raises(OperationError), begin(TOY, KEY) as work:
        for text in ("first", "second"):
            work.step(text, undo=("note", {"path": str(folder / "note"), "text": text}))
        fail()
    assert (folder / "note").read_text() == "second\nfirst\n"


@pytest.mark.parametrize("how", ["the next command", "at boot"])
def test_killed_at_any_step_it_ends_whole_or_undone(
    own_node: Path, folder: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    seen = set()

    def prepare() -> None:
        for file in folder.iterdir():
            file.unlink()

    for number in each_step(lambda: make_two(folder), prepare):
        if how == "at boot":
            for lock in paths.LOCK_DIR.iterdir():
                lock.unlink()
            assert cli.main(SETTLE) == 0
        else:
            settle(KEY)
            operation.remove_unfinished()
        seen.add(tuple(files(folder)))
        assert files(folder) in ([], ["a", "b", "note"]), number
        assert [file for file in left() if file.suffix != ".lock"] == [], number
    assert len(seen) == 2
    assert number > 10
    assert "settled: " in capsys.readouterr().out or how != "at boot"


def test_what_can_not_be_undone_stays_recorded_with_all_before_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = folder / "storage"
    with pytest.raises(OperationError, match="no more"), begin(TOY, KEY, "toy/b") as work:
        work.step("make a", undo=("remove", {"path": str(folder / "a")}))
        (folder / "a").touch()
        work.step("use storage", undo=("refuse", {"path": str(storage)}))
        fail()
    assert "the storage is dead" in capsys.readouterr().err
    for _ in range(2):
        (record,) = pending("toy/b")
        assert (record.state, record.error) == (OperationState.UNDOING, "no more")
        assert "the storage is dead" in record.waits_for
        assert files(folder) == ["a"]
        with pytest.raises(OperationError, match="the storage is dead") as caught:
            settle(KEY)
        assert record.id in (caught.value.hint or "")
    assert cli.main([*SETTLE, record.id]) == 1
    assert cli.main([*SETTLE, "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["id"], row["result"]) == (record.id, "waiting")
    storage.touch()
    settle(KEY)
    assert (files(folder), left()) == (["storage"], [])


SERVICE = "brine-operations.service"


@pytest.mark.parametrize("is_able", [True, False])
def test_a_unit_that_may_not_write_to_storage_has_another_one_settle(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_able: bool
) -> None:
    assert killed_at(10, lambda: make_two(folder))
    (record,) = pending(KEY)
    systemctl = tmp_path / "systemctl"
    work = f"rm {paths.OPERATIONS_DIR}/*.json" if is_able else "exit 1"
    systemctl.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\n{work}\n')
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("BRINE_SETTLED_BY", SERVICE)
    assert (before := files(folder))
    with nullcontext() if is_able else pytest.raises(OperationError, match=SERVICE):
        settle(KEY)
    assert (tmp_path / "asked").read_text() == f"--no-ask-password start -- {SERVICE}\n"
    assert files(folder) == before  # it has not tried itself
    assert pending(KEY) == ([] if is_able else [record])
    if is_able:  # then there is nothing to ask for
        settle(KEY)
        assert (tmp_path / "asked").read_text().count("\n") == 1


def test_each_unit_that_works_on_instances_and_not_on_storage_says_what_settles() -> None:
    found = {file.name: file.read_text() for file in TREE.glob("pkgs/*/system/*.service")}
    strict = {name for name, text in found.items() if "ReadWritePaths=/run -/var/lib/brine" in text}
    # These take no lock of an instance.
    strict -= {"brine-events.service", "brine-moves.service", "brine-stopper.service"}
    # The folders are all that its service writes; a move may write to storage, and no more.
    strict |= {"brine-lifecycle-folders.service", "brine-move@.service"}
    assert len(strict) > 5
    said = {name for name, text in found.items() if f"BRINE_SETTLED_BY={SERVICE}" in text}
    assert said == strict
    # Those that may load no modules themselves, and have LVM make snapshots, or activate them.
    of_lvm = {name for name, text in found.items() if "DeviceAllow=block-* rw" in text}
    of_lvm -= {"brine-move@.service"}  # no volume with snapshots moves
    assert of_lvm == {SERVICE, "brine-instance@.service"}
    for name in of_lvm:
        for key in ("Wants", "After"):
            assert f"{key}=modprobe@dm_snapshot.service" in found[name].splitlines(), name


def test_what_is_committed_is_completed_later(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = folder / "storage"
    with begin(TOY, KEY) as work:
        work.step("make a", undo=("remove", {"path": str(folder / "a")}))
        (folder / "a").touch()
        work.commit(("refuse", {"path": str(storage)}))
    assert "not completed yet" in capsys.readouterr().err
    assert pending()[0].state is OperationState.COMMITTED
    storage.touch()
    settle(KEY)
    assert (files(folder), left()) == (["a", "storage"], [])


def test_a_commit_that_can_not_be_recorded_undoes_and_nothing_follows_it(folder: Path) -> None:
    """Else a kill after that would undo what has replaced the old already."""
    (folder / "old").touch()
    with pytest.raises(OperationError, match="can't be written"), begin(TOY, KEY) as work:
        work.step("make new", undo=("remove", {"path": str(folder / "new")}))
        (folder / "new").touch()
        in_the_way = unfinished(paths.OPERATIONS_DIR / f"{work.record.id}.json")
        in_the_way.mkdir()
        work.commit(("remove", {"path": str(folder / "old")}))
    assert files(folder) == ["old"]
    in_the_way.rmdir()
    settle(KEY)
    assert (files(folder), pending()) == (["old"], [])


def test_a_command_that_is_told_to_end_before_its_commit_is_recorded_undoes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told_to_end(*_: object, **__: object) -> None:
        raise SystemExit(143)

    (folder / "old").touch()
    with pytest.raises(SystemExit), begin(TOY, KEY) as work:
        work.step("make new", undo=("remove", {"path": str(folder / "new")}))
        (folder / "new").touch()
        with monkeypatch.context() as patched:
            patched.setattr(os, "rename", told_to_end)
            work.commit(("remove", {"path": str(folder / "old")}))
    assert (files(folder), pending()) == (["old"], [])


def test_how_far_it_is_survives_a_power_cut_and_is_no_reason_to_fail(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = set[int]()
    monkeypatch.setattr(os, "fsync", lambda file: synced.add(os.fstat(file).st_ino))
    with begin(TOY, KEY) as work:
        work.progress(0.5, "half")
        record = paths.OPERATIONS_DIR / f"{work.record.id}.json"
        assert record.stat().st_ino in synced
        in_the_way = unfinished(record)
        in_the_way.mkdir()
        monkeypatch.setattr(operation, "_PROGRESS_S", 0.0)
        work.progress(0.6)
        in_the_way.rmdir()
    assert pending() == []


def test_what_is_in_progress_is_left_alone_and_listed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    goes_on, is_there = threading.Event(), threading.Event()

    def wait() -> None:
        is_there.set()
        assert goes_on.wait(60)

    worker = threading.Thread(target=make_two, args=(folder, wait))
    worker.start()
    assert is_there.wait(60)
    settle(KEY)
    assert cli.main(["operations", "list", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["in_progress"], row["kind"], row["key"], row["state"]) == (
        True,
        "toy",
        KEY,
        "begun",
    )
    assert [one["name"] for one in row["steps"]] == ["make a", "make b"]
    assert cli.main([*SETTLE, row["id"], "gone", "../x"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"unchanged: {row['id']} is in progress",
        "unchanged: gone is not pending",
        "unchanged: ../x is not pending",
    ]
    assert cli.main(["operations", "list"]) == 0
    assert "make b" in capsys.readouterr().out
    goes_on.set()
    worker.join()
    assert (files(folder), left()) == (["a", "b", "note"], [])
    assert cli.main(["operations", "list"]) == 0
    assert "no operation is pending" in capsys.readouterr().out


def record_of(folder: Path) -> tuple[Path, Facts]:
    """The record of an operation that was killed after its first step."""
    for _ in each_step(lambda: make_two(folder, fail), lambda: None):
        if found := [one for one in pending() if one.steps]:
            file = paths.OPERATIONS_DIR / f"{found[0].id}.json"
            return file, json.loads(file.read_text())
    raise AssertionError


@pytest.mark.parametrize(
    "change",
    [
        *({"version": 2}, {"kind": "other"}, {"steps": 3}, {"state": "?"}, {"since": "x"}),
        *({"also": 3}, {"progress": []}, {"id": "that-of-another"}),
    ],
)
def test_a_record_that_this_version_does_not_know_is_left_alone_and_named(
    folder: Path, capsys: pytest.CaptureFixture[str], change: Facts
) -> None:
    file, data = record_of(folder)
    file.write_text(json.dumps({**data, **change}))
    before = file.read_bytes()
    assert cli.main(SETTLE) == 1
    assert data["id"] in capsys.readouterr().err
    assert cli.main(["operations", "list", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["id"], row["in_progress"]) == (data["id"], False)
    with pytest.raises(OperationError, match=data["id"]):
        settle(KEY)  # a command on that key does not work beside it
    assert file.read_bytes() == before


def test_nothing_begins_that_can_not_be_recorded(folder: Path) -> None:
    paths.OPERATIONS_DIR.write_text("no folder")
    with pytest.raises(OperationError, match="can't be written"):
        make_two(folder)
    assert (files(folder), [*paths.LOCK_DIR.glob("operation-*")]) == ([], [])


def test_a_step_on_another_node_has_an_id_an_answer_and_a_deadline(folder: Path) -> None:
    with begin(TOY, KEY, deadline_s=60) as work:
        step = work.step("copy", node="node2", facts={"disk": "a"})
        work.progress(0.5, "half")
        work.answer(step, {"state": "done"})
        (record,) = pending(KEY)
        assert record.deadline > record.since
        assert record.progress == {"done": 0.5, "text": "half"}
        (there,) = record.steps
        assert (there.id, there.node, there.answer) == (step.id, "node2", {"state": "done"})
        work.record.deadline = 1.0
        with pytest.raises(OperationError, match="its time is over"):
            work.step("another")


def test_what_follows_a_step_elsewhere_waits_for_its_answer(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with begin(TOY, KEY) as work:
        note = {"path": str(folder / "note"), "text": "copied"}
        work.commit(Elsewhere("copy", {"disk": "a"}, "node2"), ("note", note))
    (record,) = pending(KEY)
    step = awaited(record)
    assert step
    assert (step.name, step.node, step.facts) == ("copy", "node2", {"disk": "a"})
    assert "node2" in record.waits_for
    assert cli.main(SETTLE) == 0  # as at a boot
    assert capsys.readouterr().err == ""
    assert files(folder) == []
    answered(step.id[:-1] + "7", {"state": "done"})  # no step of it
    assert pending(KEY)
    for _ in range(2):
        answered(step.id, {"state": "done"})
        assert (files(folder), left()) == (["note"], [])


def test_a_step_elsewhere_keeps_its_answer_while_what_follows_waits(folder: Path) -> None:
    with begin(TOY, KEY) as work:
        work.commit(Elsewhere("copy", {}, "node2"), ("refuse", {"path": str(folder / "none")}))
    (record,) = pending(KEY)
    step = awaited(record)
    assert step
    with pytest.raises(OperationError):
        answered(step.id, {"state": "done"})
    (record,) = pending(KEY)
    assert (record.steps[0].answer, awaited(record)) == ({"state": "done"}, None)


def answer_awaited(state: AnswerState, error: str = "") -> None:
    """Answer the step that node2 is asked for, twice, as a message may come twice."""
    (record,) = pending(KEY)
    step = awaited(record)
    assert step
    assert (step.node, record.waits_for) == ("node2", f"{step.name}: node2")
    for _ in range(2):
        answered(step.id, StepAnswer(step.id, step.name, state, error=error).facts())


def test_answers_decide_which_steps_follow(folder: Path) -> None:
    with begin(LED, KEY, facts={"path": str(folder / "note")}):
        pass
    (record,) = pending(KEY)
    assert (record.state, record.is_interrupted()) == (OperationState.BEGUN, True)
    settle(KEY)  # as at a boot: it waits for the same answer
    answer_awaited(AnswerState.DONE)
    assert (files(folder), left()) == (["note"], [])


def test_an_answer_that_a_step_failed_leads_back(folder: Path) -> None:
    with begin(LED, KEY, facts={"path": str(folder / "note")}):
        pass
    answer_awaited(AnswerState.FAILED, "no space")
    (record,) = pending(KEY)
    assert (record.state, record.error) == (OperationState.UNDOING, "no space")
    answer_awaited(AnswerState.DONE)
    assert (files(folder), left()) == ([], [])


def test_killed_at_any_step_what_follows_is_done_at_the_next_answer(folder: Path) -> None:
    def work() -> None:
        with begin(LED, KEY, facts={"path": str(folder / "note")}):
            pass
        answer_awaited(AnswerState.DONE)

    seen = set()
    for _ in each_step(work, lambda: (folder / "note").unlink(missing_ok=True)):
        settle(KEY)
        if pending(KEY):
            answer_awaited(AnswerState.DONE)
        assert pending(KEY) == []
        seen.add(tuple(files(folder)))
    assert seen == {(), ("note",)}  # it had not begun, or it is whole


@pytest.mark.parametrize(
    "change",
    [{"state": "perhaps"}, {"id": 3}, {"progress": "half"}, {"found": []}, {"error": None}],
)
def test_what_is_no_answer_to_a_step_is_refused(change: Facts) -> None:
    data = StepAnswer("1-0", "copy", AnswerState.RUNNING, 0.5).facts()
    assert StepAnswer.of(json.loads(json.dumps(data))).progress == 0.5
    with pytest.raises(OperationError, match="no answer"):
        StepAnswer.of(data | change)
    with pytest.raises(OperationError, match="no answer"):
        StepAnswer.of([data])
