"""Operations on instances, with a fake QEMU and a scripted systemd; each is complete or undone."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from brine.common import outbox, paths, process, progress
from brine.common.errors import BrineError
from brine.common.locks import LockedError
from brine.common.qmp.wire import QmpEvent, QmpTimeoutError
from brine.instance import failed_starts, operations, stop, store, unit
from brine.instance.clone import clone_instance
from brine.instance.hypervisor_choice import hypervisor_of
from brine.instance.intent import keep_users_will, put_event, stays_off
from brine.instance.kvm import guest
from brine.instance.kvm.runtime_devices import hot_changes_or_aside
from brine.instance.listing import row, summary
from brine.instance.observe import Oper, Status, look
from brine.instance.operations import (
    pause_instance,
    reboot_instance,
    reset_instance,
    resume_instance,
)
from brine.instance.registry import define_instance, rename_instance, undefine_instance
from brine.instance.start import (
    Started,
    StillStartingError,
    start_all,
    start_failure,
    start_instance,
    storage_of,
)
from brine.instance.stop import Stopped, stop_instance
from brine.instance.store import InstanceError
from brine.instance.unit import UnitError
from brine.instance.validate import completed
from brine.vm import stored_spec
from brine.vm.files import InstanceFiles
from brine.vm.markers import (
    UNKNOWN_RUN,
    MarkerKind,
    file_of,
    held_marker,
    read_marker,
    write_marker,
)
from brine.vm.run import Run
from brine.vm.spec import AdminState, Spec, SpecError, to_json
from brine.vm.unit_name import unit_of
from brine.watcher import restart_counter
from brine.watcher.restart_counter import Tries
from lab.fake_qemu import FakeQemu, FakeQemus
from lab.runtime_file import write_runtime_file
from lab.scripted_systemctl import ScriptedSystemctl
from lab.stand_in import StandIn
from lab.waiting import wait_for

UNIT = unit_of("web1")
_ORDERS = ("stop", "cont", "system_wakeup")


def is_to_reboot(name: str) -> bool:
    """Whether it should be up and is down, in the middle of a reboot."""
    seen = look(name)
    is_down = seen.state.oper is Oper.DOWN and seen.spec.admin_state == AdminState.UP
    return is_down and seen.run.awaits_reboot()


@pytest.fixture(autouse=True)
def systemctl(own_node: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedSystemctl:
    """The systemctl of a node of its own."""
    monkeypatch.setattr(stop, "_GONE_S", 1.0)
    monkeypatch.setattr(process, "TERM_TIMEOUT_S", 1.0)
    monkeypatch.setattr(guest, "_QMP_TIMEOUT_S", 1.0)
    return ScriptedSystemctl(own_node / "systemctl", monkeypatch)


@pytest.fixture
def events(caplog: pytest.LogCaptureFixture) -> Callable[[], list[tuple[str, str]]]:
    """The events since the last call, and their instances."""
    caplog.set_level("INFO")

    def found() -> list[tuple[str, str]]:
        fields = [record.__dict__["fields"] for record in caplog.records]
        caplog.clear()
        return [(one["BRINE_EVENT"], one["BRINE_INSTANCE"]) for one in fields]

    return found


Events = Callable[[], list[tuple[str, str]]]


def note(name: str, tries: Tries) -> None:
    with restart_counter.changed() as record:
        record[name] = tries


def defined(name: str = "web1", **keys: Any) -> Spec:
    spec = completed({"name": name, **keys})
    store.save(spec)
    return spec


def wanted(name: str = "web1") -> tuple[str, str]:
    spec = store.load(name)
    return spec.admin_state, spec.admin_state_source


class Running:
    """An instance that runs: a process, a unit, and a monitor."""

    def __init__(
        self, systemctl: ScriptedSystemctl, qemus: FakeQemus, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.qemu = StandIn()
        self.obeys = True
        self.at_reset: Callable[[], object] = lambda: None
        self.at_cont: Callable[[], object] = lambda: None
        self.status = "running"
        self._systemctl = systemctl
        pid = str(self.qemu.pid)
        systemctl.unit(UNIT, ActiveState="active", MainPID=pid, InvocationID="a")
        # The monitor is this process's.
        ours = (self.qemu.pid, os.getpid())
        monkeypatch.setattr(process, "runs_in", lambda pid, unit: pid in ours and unit == UNIT)
        answers = {
            "query-status": lambda: {"status": self.status},
            "query-chardev": [],
            "system_powerdown": self._powerdown,
            "system_reset": self._reset,
            "cont": self._cont,
        }
        self.monitor: FakeQemu = qemus.start(InstanceFiles("web1").qmp, answers=answers)

    def _powerdown(self) -> dict[str, str]:
        if self.obeys:
            self.end()
        return {}

    def _reset(self) -> dict[str, str]:
        self.at_reset()
        return {}

    def _cont(self) -> dict[str, str]:
        self.at_cont()
        return {}

    def end(self) -> None:
        self._systemctl.unit(UNIT, ActiveState="inactive", Result="success", InvocationID="a")
        self.qemu.end()


def test_the_same_on_another_node_is_the_same_machine_and_two_are_not() -> None:
    given: dict[str, Any] = {"name": "new", "nics": [{"link": "br0"}, {"link": "br1"}]}
    first = define_instance(given).spec
    undefine_instance("new")
    again = define_instance(given).spec
    assert (again.uuid, again.nics) == (first.uuid, first.nics)
    assert len({nic.mac for nic in first.nics}) == 2
    rename_instance("new", "old")
    other = define_instance(given).spec  # by that name there is another one now
    assert other.uuid != first.uuid
    assert not {nic.mac for nic in other.nics} & {nic.mac for nic in first.nics}


def test_another_nodes_instance_is_neither_defined_nor_started() -> None:
    with pytest.raises(SpecError, match="/node: is elsewhere.example.com's, and this is"):
        define_instance({"name": "new", "node": "elsewhere.example.com"})
    store.save(completed({"name": "new", "node": "elsewhere.example.com"}))
    with pytest.raises(InstanceError, match="is elsewhere.example.com's, and this is"):
        start_instance("new")
    define_instance({"name": "new", "node": os.uname().nodename})


def test_a_newer_spec_runs_as_far_as_it_is_known_and_is_not_defined() -> None:
    file = paths.SPECS_DIR / "new.json"
    spec = define_instance({"name": "new", "nics": [{"link": "br0"}]}).spec
    newer = to_json(spec) | {"version": 2, "wings": 4}
    newer["nics"][0]["colour"] = "red"
    file.write_text(json.dumps(newer))
    loaded = store.load("new")
    assert replace(loaded, version=1) == spec
    store.save(replace(loaded, admin_state="up"))
    assert json.loads(file.read_text()) == newer | {"admin_state": "up"}
    for given in (newer, {"name": "new"}):
        with pytest.raises(SpecError, match="this Brine knows 1"):
            define_instance(given)


def test_an_image_is_defined_as_raw_only_if_the_spec_says_so(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(b"QFI\xfb".ljust(512, b"\0"))
    with pytest.raises(SpecError, match="/disks/0/format: .*is a qcow2 file") as caught:
        define_instance({"name": "new", "disks": [{"path": str(image)}]})
    assert '"format": "qcow2"' in str(caught.value.hint)
    define_instance({"name": "new", "disks": [{"path": str(image), "format": "raw"}]})


def test_an_overlay_is_not_defined(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(b"QFI\xfb\0\0\0\3" + (65536).to_bytes(8, "big") + bytes(496))
    with pytest.raises(SpecError, match="/disks/0/format: .*has a backing file") as caught:
        define_instance({"name": "new", "disks": [{"path": str(image), "format": "qcow2"}]})
    assert '"backing": {"path"' in str(caught.value.hint)
    disk: dict[str, Any] = {"path": str(image), "format": "qcow2"}
    define_instance(
        {"name": "new", "disks": [{**disk, "backing": {"path": "/base", "format": "raw"}}]}
    )
    image.write_bytes(b"QFI\xfb\0\0\0\3" + bytes(504))
    disk["backing"] = {"path": str(tmp_path / "base"), "format": "raw"}
    with pytest.raises(SpecError, match="/disks/0: .*has no backing file, but .*base is named"):
        define_instance({"name": "new", "disks": [disk]})
    with pytest.raises(SpecError, match="/disks/0/backing: a disk of the format raw"):
        define_instance({"name": "new", "disks": [{**disk, "format": "raw"}]})


@pytest.fixture
def running(
    systemctl: ScriptedSystemctl, qemus: FakeQemus, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Running]:
    """web1, which should run and does."""
    defined(admin_state="up")
    it = Running(systemctl, qemus, monkeypatch)
    with it.qemu:
        yield it


# define


@pytest.mark.parametrize("left", ["{", None])
def test_without_a_sound_spec_it_stays_the_machine_that_it_was_started_as(
    running: Running, left: str | None
) -> None:
    given: dict[str, Any] = {"name": "web1", "nics": [{"link": "br0"}], "disks": [{"path": "/d"}]}
    spec = completed({**given, "uuid": str(uuid.uuid4()), "admin_state": "up"}, cluster="of old")
    write_runtime_file(spec)
    file = paths.SPECS_DIR / "web1.json"
    file.unlink() if left is None else file.write_text(left)
    other = define_instance({**given, "uuid": str(uuid.uuid4())}, dry_run=True).spec
    assert (other.uuid != spec.uuid, other.nics != spec.nics) == (True, True)
    assert define_instance(given).spec == spec
    assert look("web1").state.status == "running"


def test_what_was_stopped_without_a_spec_stays_down() -> None:
    spec = completed({"name": "web1", "admin_state": "up"})
    write_runtime_file(spec)
    write_marker(MarkerKind.STOP, "web1", run=UNKNOWN_RUN)
    assert define_instance({"name": "web1"}).spec == replace(spec, admin_state="down")


def test_one_that_can_not_be_read_now_is_not_called_damaged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    defined()
    file = paths.SPECS_DIR / "web1.json"

    def fail(path: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error", str(path))

    with monkeypatch.context() as faulty:
        faulty.setattr(stored_spec, "read_regular", fail)
        for work in (lambda: define_instance({"name": "web1"}), lambda: undefine_instance("web1")):
            with pytest.raises(InstanceError, match="can't be read: Input/output error"):
                work()
    assert [one.name for one in paths.SPECS_DIR.iterdir()] == [file.name]


# undefine, rename


@pytest.mark.parametrize(
    "change",
    [
        lambda: undefine_instance("web1"),
        lambda: rename_instance("web1", "web2"),
        lambda: clone_instance("web1", "web2"),
        lambda: define_instance({"name": "web1", "hypervisor": "xen-pvm", "kernel": "/k"}),
    ],
    ids=["undefine", "rename", "clone", "define"],
)
def test_what_a_vm_may_still_use_that_is_not_its_units_stays_its(
    qemus: FakeQemus, change: Callable[[], object]
) -> None:
    """Such as a QEMU that storage keeps from ending. Another start would not find it."""
    before = defined()
    runtime = InstanceFiles("web1").runtime
    runtime.write_text("{}")
    qemus.start(InstanceFiles("web1").qmp)
    with pytest.raises(InstanceError, match="^web1: ") as caught:
        change()
    assert str(InstanceFiles("web1").qmp) in (caught.value.hint or "")
    assert (store.names(), store.load("web1")) == (["web1"], before)
    assert runtime.exists()


def marked(name: str) -> list[str]:
    return [kind for kind in (MarkerKind.STOP, MarkerKind.SHUTDOWN) if file_of(kind, name).exists()]


def with_files(name: str) -> None:
    """An instance that its user has shut down, after a run."""
    write_marker(MarkerKind.SHUTDOWN, name, run=UNKNOWN_RUN)
    (paths.RUNTIME_DIR / f"{name}.json").write_text("{}")
    write_marker(MarkerKind.REBOOT, name, run=UNKNOWN_RUN, until=time.time())


@pytest.mark.parametrize("damaged", [False, True])
def test_nothing_of_an_undefined_one_is_left(
    systemctl: ScriptedSystemctl, *, damaged: bool
) -> None:
    defined()
    with_files("web1")
    write_marker(MarkerKind.STOP, "web1", run=UNKNOWN_RUN)
    if damaged:
        (paths.SPECS_DIR / "web1.json").write_text("{")
    undefine_instance("web1")
    for folder in (paths.CONTROL_DIR, paths.MARKS_DIR, paths.RUNTIME_DIR, paths.SPECS_DIR):
        assert list(folder.iterdir()) == []
    assert systemctl.asked("reset-failed") == [["--", UNIT]]


@pytest.mark.parametrize(
    "work", [undefine_instance, lambda name: rename_instance(name, "web2")], ids=["gone", "renamed"]
)
def test_its_unit_is_forgotten_before_another_of_its_name_can_start(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[str], object]
) -> None:
    defined()
    forgotten = []

    def forget_slice(name: str) -> None:
        with pytest.raises(LockedError), store.alone(name, timeout_s=0):
            pass
        forgotten.append(name)

    monkeypatch.setattr(unit, "forget_slice", forget_slice)
    work("web1")
    assert forgotten == ["web1"]


def test_what_others_have_put_in_the_way_keeps_nobody_from_undefining_it() -> None:
    defined()
    for file in (InstanceFiles("web1").shutdown, InstanceFiles("web1").stopping):
        (file / "in").mkdir(parents=True)
    undefine_instance("web1")
    assert store.names() == []


def test_a_damaged_one_that_runs_is_not_undefined(running: Running) -> None:
    (paths.SPECS_DIR / "web1.json").write_text("{")
    with pytest.raises(InstanceError, match="web1: is running") as told:
        undefine_instance("web1")
    assert told.value.hint == "brine instance stop web1, then undefine it"
    assert (paths.SPECS_DIR / "web1.json").exists()


def test_a_renamed_one_is_the_same_in_all_but_its_name() -> None:
    before = defined(admin_state="up", nics=[{"link": "br0"}])
    with_files("web1")
    assert look("web1").state.status == "USER_down"
    after = rename_instance("web1", "web2")
    assert after == replace(before, name="web2")
    assert store.names() == ["web2"]
    assert [file.name for file in paths.RUNTIME_DIR.iterdir()] == ["web2.json"]
    assert sorted(paths.MARKS_DIR.iterdir()) == [
        file_of(kind, "web2") for kind in (MarkerKind.REBOOT, MarkerKind.SHUTDOWN)
    ]
    # Or it would be started, which its user does not want.
    assert look("web2").state.status == "USER_down"
    assert marked("web1") == []


def test_a_renamed_one_keeps_its_files_over_a_power_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its new name must not be there without them: those of the old name are removed then."""
    defined()
    with_files("web1")
    synced, rename = set[int](), os.rename
    monkeypatch.setattr(os, "fsync", lambda file: synced.add(os.fstat(file).st_ino))

    def renamed(file: Path, new_file: Path, **options: Any) -> None:
        if new_file == InstanceFiles("web2").spec and file == InstanceFiles("web1").spec:
            assert paths.RUNTIME_DIR.stat().st_ino in synced
            synced.add(0)
        rename(file, new_file, **options)

    monkeypatch.setattr(os, "rename", renamed)
    rename_instance("web1", "web2")
    assert 0 in synced


@pytest.mark.parametrize("is_unit", [True, False])
@pytest.mark.parametrize(
    "give",
    [
        lambda name: rename_instance("web1", name),
        lambda name: clone_instance("web1", name),
        lambda name: define_instance({"name": name}, is_new=True),
    ],
    ids=["rename", "clone", "import"],
)
def test_no_other_gets_the_name_of_what_runs_without_a_spec(
    systemctl: ScriptedSystemctl, qemus: FakeQemus, give: Callable[[str], object], *, is_unit: bool
) -> None:
    defined()
    if is_unit:
        systemctl.unit(unit_of("web2"), ActiveState="active", MainPID="1")
    else:
        qemus.start(InstanceFiles("web2").qmp)
    with pytest.raises(InstanceError, match="^web2: ") as caught:
        give("web2")
    assert "runs" in str(caught.value)
    assert caught.value.hint
    assert store.names() == ["web1"]


def test_marks_of_one_that_had_the_new_name_are_not_its() -> None:
    defined(admin_state="up")
    write_marker(MarkerKind.SHUTDOWN, "web2", run=UNKNOWN_RUN)
    rename_instance("web1", "web2")
    assert look("web2").state.status == "ERROR_down"


@contextmanager
def no_room() -> Iterator[None]:
    """Have each write of a file of more than a few KiB fail."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * 1024, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_one_whose_new_name_can_not_be_written_keeps_its_name() -> None:
    defined("old")
    with no_room(), pytest.raises(InstanceError, match="can't be written"):
        rename_instance("old", "new")
    assert store.names() == ["old"]
    assert json.loads((paths.SPECS_DIR / "old.json").read_text())["name"] == "old"
    assert not list(paths.SPECS_DIR.glob(".*"))
    rename_instance("old", "new")


@pytest.mark.parametrize("force", [False, True])
def test_one_that_could_not_start_again_is_not_ended_for_a_reboot(
    running: Running, force: bool
) -> None:
    with no_room(), pytest.raises(InstanceError, match="could not be written by its next start"):
        reboot_instance("web1", force=force)
    assert "system_powerdown" not in running.monitor.received
    assert look("web1").state.oper is Oper.RUNNING
    assert not list(paths.RUNTIME_DIR.glob(".*"))


def test_one_that_ends_at_its_reset_button_is_not_reset_if_it_could_not_start_again(
    running: Running,
) -> None:
    define_instance({"name": "web1", "reboot_behavior": "exit"})
    with no_room(), pytest.raises(InstanceError, match="could not be written by its next start"):
        reset_instance("web1")
    assert "system_reset" not in running.monitor.received


def test_no_name_is_given_twice() -> None:
    one, other = defined("web1"), defined("web2")
    with pytest.raises(InstanceError, match="web2: there is an instance of that name already"):
        rename_instance("web1", "web2")
    assert (store.load("web1"), store.load("web2")) == (one, other)


# start


def test_a_start_is_queued_before_anybody_else_can_stop_it(monkeypatch: pytest.MonkeyPatch) -> None:
    defined()
    begin = unit.begin_start
    others = []

    def begin_start(name: str, **options: str) -> Callable[[], None]:
        waits = begin(name, **options)
        try:
            with store.alone(name, timeout_s=0):
                others.append("came in between")
        except LockedError:
            others.append("wait")
        return waits

    monkeypatch.setattr(unit, "begin_start", begin_start)
    assert start_instance("web1") is Started.STARTED
    assert list(start_all(parallel=1)) == [("web1", None)]
    assert others == ["wait", "wait"]


def test_a_guest_that_obeys_a_stop_later_starts_again_after_start(
    running: Running, systemctl: ScriptedSystemctl
) -> None:
    write_marker(MarkerKind.START, "web1", run="a", pid=running.qemu.pid)
    running.obeys = False
    with pytest.raises(InstanceError, match="did not shut down within"):
        stop_instance("web1", timeout_s=0.2)
    assert not file_of(MarkerKind.REBOOT, "web1").exists()
    assert start_instance("web1") is Started.NOTED
    assert wanted() == ("up", "admin")
    running.qemu.end()
    systemctl.unit(UNIT, ActiveState="inactive", InvocationID="a")
    assert is_to_reboot("web1")


@pytest.mark.parametrize(("source", "starts"), [("admin", False), ("user", True)])
def test_who_stops_it_while_a_start_waits_for_its_end_comes_after_that(
    running: Running, systemctl: ScriptedSystemctl, source: str, starts: bool
) -> None:
    before = defined(admin_state="down")
    write_marker(MarkerKind.START, "web1", run="a", pid=running.qemu.pid)
    running.qemu.end()

    def others() -> None:
        wait_for("start to want it", lambda: wanted()[0] == "up")
        with store.alone("web1"):
            # An admin stops it, or its user's shutdown is noted, which was before this start.
            store.save(replace(before, admin_state="down", admin_state_source=source))
        systemctl.unit(UNIT, ActiveState="inactive", InvocationID="a")

    thread = threading.Thread(target=others)
    thread.start()
    if starts:
        assert start_instance("web1") is Started.STARTED
    else:
        with pytest.raises(InstanceError, match="admin_state changed") as told:
            start_instance("web1")
        assert told.value.hint == "brine instance start web1"
    thread.join()
    assert systemctl.asked("start") == [["--", UNIT]] * starts
    assert wanted()[0] == ("up" if starts else "down")


def test_a_start_has_the_watcher_begin_anew_whatever_its_record_is_like(
    systemctl: ScriptedSystemctl, own_node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    defined()
    systemctl.becomes("start", UNIT, ActiveState="active", InvocationID="b")
    for name in ("web1", "web2"):
        note(name, Tries(5, 1.0, given_up=True))
    assert start_instance("web1") is Started.STARTED
    assert restart_counter.load().keys() == {"web2"}
    note("web1", Tries(2, 1.0))
    assert start_instance("web1", keeps_tries=True) is Started.STARTED
    assert restart_counter.load()["web1"] == Tries(2, 1.0)
    restart_counter.FILE.unlink()
    restart_counter.FILE.mkdir()
    assert start_instance("web1") is Started.STARTED
    assert "brine: warning: " in capsys.readouterr().err


@pytest.mark.parametrize(("begun_us", "said"), [(2, "no such disk"), (1, "Job failed")])
def test_what_an_earlier_run_said_is_not_why_this_one_failed(
    systemctl: ScriptedSystemctl, monkeypatch: pytest.MonkeyPatch, begun_us: int, said: str
) -> None:
    defined()
    failed = {"ActiveState": "failed", "InvocationID": "a"}
    systemctl.unit(UNIT, InactiveExitTimestampMonotonic=str(begun_us), **failed)
    reason = failed_starts.StartFailure("no such disk")
    monkeypatch.setattr("brine.instance.start.why_not_started", lambda *_: reason)
    error = start_failure("web1", UnitError("Job failed"), since_us=2)
    assert said in str(error)


# stop


def test_a_guest_that_does_not_obey_runs_on_and_its_end_is_its_users_again(
    running: Running,
    events: Events,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(progress, "_SILENT_S", 0.01)
    running.obeys = False
    with pytest.raises(InstanceError, match="did not shut down within 0.2 s, and runs on") as told:
        stop_instance("web1", timeout_s=0.2)
    assert "--force" in (told.value.hint or "")
    waits = "brine: web1: waiting for its guest to shut down, at most 0.2 s\n"
    assert waits in capsys.readouterr().err
    assert running.qemu.runs()
    assert marked("web1") == []
    assert look("web1").state.status == "ERROR_up"
    assert events() == [("stop-asked", "web1"), ("not-in-time", "web1")]
    running.obeys = True
    stop_instance("web1")
    assert events() == [("stop-asked", "web1")]


@pytest.mark.parametrize("state", ["active", "activating", "deactivating"])
def test_force_ends_it_whatever_systemd_does(
    running: Running, systemctl: ScriptedSystemctl, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """Another command or systemctl may be stopping it with more patience."""
    running.obeys = False
    pid = str(running.qemu.pid)
    systemctl.unit(UNIT, ActiveState=state, MainPID=pid, InvocationID="a")

    def signalled(self: process.Process, number: Any) -> None:
        assert file_of(MarkerKind.STOP, "web1").exists()
        running.end()

    monkeypatch.setattr(process.Process, "signal", signalled)
    with held_marker(MarkerKind.STOP, "web1", run="a"):
        assert stop_instance("web1", force=True, timeout_s=0.2) is Stopped.STOPPED
    assert not running.qemu.runs()
    assert systemctl.asked("stop") == [["--no-block", "--", UNIT]] * (state == "activating")


@pytest.mark.parametrize("state", ["active", "activating"])
@pytest.mark.parametrize("has_left", [False, True])
def test_the_cause_of_a_stop_is_noted_also_where_a_killed_stop_has_left_another(
    running: Running,
    systemctl: ScriptedSystemctl,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    has_left: bool,
) -> None:
    running.obeys = False
    monkeypatch.setattr(process.Process, "signal", lambda *_: running.end())
    pid = str(running.qemu.pid)
    systemctl.unit(UNIT, ActiveState=state, MainPID=pid, InvocationID="a")
    if has_left:
        write_marker(MarkerKind.STOP, "web1", run="a")
    stopped = stop_instance("web1", force=True, timeout_s=0.2, cause="owner-gone")
    assert stopped is Stopped.STOPPED
    mark = read_marker(MarkerKind.STOP, "web1", run="a")
    assert mark
    assert mark.facts == {"cause": "owner-gone"}


def test_the_cause_of_a_stop_in_progress_stays(running: Running) -> None:
    with held_marker(MarkerKind.STOP, "web1", run="a"):
        assert stop_instance("web1", cause="owner-gone", timeout_s=5) is Stopped.STOPPED
    mark = read_marker(MarkerKind.STOP, "web1", run="a")
    assert mark
    assert mark.facts == {}


def test_who_does_not_wait_any_more_stops_it_no_more(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the guest takes its time."""
    running.obeys = False

    def interrupt(*_: object, **__: object) -> bool:
        assert file_of(MarkerKind.STOP, "web1").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(guest.QemuGuest, "ask", interrupt)
    with pytest.raises(KeyboardInterrupt):
        stop_instance("web1")
    assert marked("web1") == []


def test_who_gives_up_stopping_it_leaves_others_to_it(running: Running) -> None:
    running.obeys = False
    mark = file_of(MarkerKind.STOP, "web1")
    with held_marker(MarkerKind.STOP, "web1", run="a"):
        with pytest.raises(InstanceError, match="runs on"):
            stop_instance("web1", timeout_s=0.2)
        assert mark.exists()


def test_a_unit_starts_in_the_slice_of_its_spec(systemctl: ScriptedSystemctl) -> None:
    drop_ins = unit.DROP_INS / f"{UNIT}.d"
    defined(slice="ci-job1.slice")
    systemctl.unit(UNIT, ActiveState="inactive", Slice="ci-job1.slice")
    start_instance("web1")
    (drop_in,) = drop_ins.iterdir()
    assert drop_in.read_text().splitlines()[1:] == ["[Service]", "Slice=ci-job1.slice"]
    assert drop_in.stat().st_mode & 0o777 == 0o644
    assert systemctl.asked("daemon-reload") == []
    # Another drop-in says otherwise, or systemd has not read this one yet.
    systemctl.unit(UNIT, ActiveState="inactive", Slice="machine.slice")
    with pytest.raises(InstanceError, match="its unit would be in machine.slice, and its spec"):
        start_instance("web1")
    assert systemctl.asked("daemon-reload") == [[]]
    assert len(systemctl.asked("start")) == 1
    # It goes with the slice, and with the name.
    define_instance({"name": "web1"})
    start_instance("web1")
    assert not drop_ins.exists()
    systemctl.unit(UNIT, ActiveState="inactive", Slice="ci-job1.slice")
    for go in (lambda: rename_instance("web1", "web2"), lambda: undefine_instance("web1")):
        defined(slice="ci-job1.slice")
        start_instance("web1")
        assert drop_ins.exists()
        go()
        assert not drop_ins.exists()


@pytest.mark.parametrize("runs", [False, True])
def test_a_start_forgets_what_a_killed_stop_has_left(
    request: pytest.FixtureRequest, runs: bool
) -> None:
    """Else its user's next shutdown would be taken for the admin's."""
    if runs:
        request.getfixturevalue("running")
    else:
        defined("web1", admin_state="up")
    write_marker(MarkerKind.STOP, "web1", run=UNKNOWN_RUN)
    start_instance("web1")
    assert not file_of(MarkerKind.STOP, "web1").exists()


def test_who_starts_what_another_has_just_started_does_not_have_it_count_as_never_started(
    running: Running, systemctl: ScriptedSystemctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "has_process", lambda self: self.pid == running.qemu.pid)
    run = {"MainPID": str(running.qemu.pid), "InvocationID": "a"}
    systemctl.unit(UNIT, ActiveState="activating", **run)
    systemctl.becomes("start", UNIT, ActiveState="active", **run)
    write_marker(MarkerKind.START, "web1", run="a", pid=running.qemu.pid)
    write_marker(MarkerKind.STARTED, "web1", run="a")
    assert start_instance("web1") is Started.STARTED
    assert Run.last("web1").has_come_up()


def test_a_start_that_fails_is_not_its_users_will(systemctl: ScriptedSystemctl) -> None:
    defined("web1", admin_state="up")
    write_marker(MarkerKind.SHUTDOWN, "web1", run=UNKNOWN_RUN)
    systemctl.refuse("start", "Job failed.\n")
    with pytest.raises(InstanceError, match="did not start"):
        start_instance("web1")
    assert look("web1").state.status == "ERROR_down"
    assert not stays_off(look("web1"))


@pytest.mark.parametrize("state", ["activating", "deactivating"])
def test_who_stops_what_has_no_guest_to_ask_waits_as_long_as_was_said(
    running: Running, systemctl: ScriptedSystemctl, state: str
) -> None:
    pid = str(running.qemu.pid)
    systemctl.unit(UNIT, ActiveState=state, MainPID=pid, InvocationID="a")
    with pytest.raises(InstanceError, match="did not stop within 0.2 s") as told:
        stop_instance("web1", timeout_s=0.2)
    assert told.value.hint == "brine instance stop --force web1 ends it"
    assert running.qemu.runs()
    assert marked("web1") == []


def test_a_stop_is_known_before_anybody_can_want_it_up(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[BrineError] = []

    def end(_: object, run: Run, **__: object) -> bool:
        # The first that is done when others may change the spec again.
        with pytest.raises(InstanceError, match="is just being stopped") as caught:
            start_instance(run.name)
        told.append(caught.value)
        running.end()
        return True

    monkeypatch.setattr(stop, "shut_down", end)
    assert stop_instance("web1") is Stopped.STOPPED
    assert told
    assert wanted() == ("down", "admin")
    assert file_of(MarkerKind.STOP, "web1").exists()


def test_a_reboot_starts_nothing_that_somebody_has_stopped_meanwhile(
    running: Running, systemctl: ScriptedSystemctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_: object, **__: object) -> bool:
        running.end()
        assert stop_instance("web1") is Stopped.NOTED
        return True

    monkeypatch.setattr(stop, "shut_down", end)
    with pytest.raises(InstanceError, match="admin_state changed"):
        reboot_instance("web1")
    assert wanted() == ("down", "admin")
    assert systemctl.asked("start") == []


def test_one_that_crashed_is_to_start_again_by_its_new_name_too(
    systemctl: ScriptedSystemctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"panicked": "crash", "killed": "admin", "left": "user"}

    for name, result in {"core": "core-dump", **dict.fromkeys(told, "success")}.items():
        defined(name, admin_state="up")
        run = "0d" * 16
        for kind in (MarkerKind.START, MarkerKind.STARTED):
            write_marker(kind, name, run=run)
        if name in told:
            write_marker(MarkerKind.VERDICT, name, run=run, who=told[name], cause="")
        active = "inactive" if result == "success" else "failed"
        systemctl.unit(unit_of(name), ActiveState=active, Result=result, InvocationID="a")
        rename_instance(name, f"new-{name}")
    has_run = {name: look(f"new-{name}").has_run for name in ("core", *told)}
    assert has_run == {"core": False, "panicked": False, "killed": True, "left": True}


def test_a_namesake_is_not_born_given_up() -> None:
    for name in ("web1", "web2"):
        defined(name)
        note(name, Tries(5, 1.0, given_up=True))
    undefine_instance("web1")
    rename_instance("web2", "web1")
    assert restart_counter.load() == {}


def test_an_admin_who_wants_otherwise_than_the_user_is_heard_by_the_cluster() -> None:
    for verb in (
        lambda: start_instance("web1"),
        lambda: stop_instance("web1"),
        lambda: define_instance({"name": "web1", "admin_state": "up"}),
    ):
        defined("web1", admin_state="up")
        write_marker(MarkerKind.SHUTDOWN, "web1", run=UNKNOWN_RUN)
        assert keep_users_will("web1")
        (his,) = [dict(event.data) for event in outbox.events()]
        assert his == {"admin_state": "down", "source": "user"}
        verb()
        (theirs,) = [dict(event.data) for event in outbox.events()]
        assert theirs == dict(zip(("admin_state", "source"), wanted(), strict=True))
        # What is still to be told must not be what is so no more.
        define_instance({"name": "web1", "admin_state": "offline"})
        *_, last = [dict(event.data) for event in outbox.events()]
        assert last == {"admin_state": "offline", "source": "admin"}
        define_instance({"name": "web1", "admin_state": "down"})
        for event in outbox.events():
            outbox.acknowledge(event.id)
        stop_instance("web1")
        start_instance("web1")
        assert list(outbox.events()) == []


def test_as_long_as_somebody_stops_it_it_is_stopping(running: Running) -> None:
    before = (paths.SPECS_DIR / "web1.json").read_bytes()
    with held_marker(MarkerKind.STOP, "web1", run="a"):
        seen = look("web1")
        assert (seen.state.status, seen.run.is_being_stopped()) == ("stopping", True)
        for change in (start_instance, reboot_instance, reset_instance):
            with pytest.raises(InstanceError, match="web1: is just being stopped") as told:
                change("web1")
            assert "brine instance stop --force web1" in (told.value.hint or "")
    assert (paths.SPECS_DIR / "web1.json").read_bytes() == before
    assert running.qemu.runs()
    assert look("web1").state.status == "running"


def test_what_systemd_stops_is_not_wanted_up_meanwhile(systemctl: ScriptedSystemctl) -> None:
    defined(admin_state="down")
    write_marker(MarkerKind.STOP, "web1", run=UNKNOWN_RUN)
    systemctl.unit(UNIT, ActiveState="deactivating")
    with pytest.raises(InstanceError, match="is just being stopped"):
        start_instance("web1")
    assert wanted() == ("down", "admin")
    assert systemctl.asked("start") == []


@pytest.mark.parametrize("content", ["{", None])
@pytest.mark.parametrize("force", [False, True])
def test_what_runs_is_stopped_without_a_sound_spec(
    running: Running, *, content: str | None, force: bool
) -> None:
    file = paths.SPECS_DIR / "web1.json"
    file.unlink()
    if content:
        file.write_text(content)
    with pytest.raises(InstanceError, match=r"web1.json: |runs, and has no spec"):
        start_instance("web1")
    assert stop_instance("web1", force=force) is Stopped.STOPPED
    assert not running.qemu.runs()
    with pytest.raises(InstanceError, match="web1.json: |there is no such instance"):
        stop_instance("web1", force=force)
    assert file.exists() == bool(content)


def test_without_a_spec_its_guest_has_the_time_that_it_was_started_with(running: Running) -> None:
    running.obeys = False
    write_runtime_file(defined(shutdown_timeout=1))
    (paths.SPECS_DIR / "web1.json").unlink()
    with pytest.raises(InstanceError, match="did not shut down within 1 s, and runs on"):
        stop_instance("web1")


def test_one_that_runs_and_is_defined_anew_keeps_its_files(running: Running) -> None:
    (paths.SPECS_DIR / "web1.json").unlink()
    with_files("web1")
    define_instance({"name": "web1"})
    assert (paths.RUNTIME_DIR / "web1.json").exists()


def test_a_unit_that_does_not_stop_is_told(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "_GONE_S", 0.2)
    monkeypatch.setattr(Running, "end", lambda self: self.qemu.end())  # and systemd does not notice
    with pytest.raises(InstanceError, match="its unit has not stopped within 0.2 s"):
        stop_instance("web1")


@pytest.mark.parametrize("state", ["active", "activating", "deactivating"])
def test_a_stop_waits_for_the_run_that_it_stops_and_for_no_later_one(
    running: Running, systemctl: ScriptedSystemctl, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """Another command starts it as soon as its former run has ended."""
    monkeypatch.setattr(stop, "_GONE_S", 30.0)
    next_run = {"ActiveState": "active", "MainPID": str(os.getpid()), "InvocationID": "b"}
    pid = str(running.qemu.pid)
    systemctl.unit(UNIT, ActiveState=state, MainPID=pid, InvocationID="a")
    systemctl.becomes("stop", UNIT, **next_run)

    def end(self: Running) -> None:
        self.qemu.end()
        systemctl.unit(UNIT, **next_run)

    monkeypatch.setattr(Running, "end", end)
    assert stop_instance("web1") is Stopped.STOPPED
    now = unit.find_unit("web1")
    assert now
    assert (now.active, now.invocation) == ("active", "b")


def test_a_start_that_waits_is_called_off(systemctl: ScriptedSystemctl) -> None:
    defined(admin_state="up")
    systemctl.queues(UNIT)
    systemctl.becomes("stop", UNIT, ActiveState="inactive", Result="success")
    assert stop_instance("web1") is Stopped.STOPPED


def test_a_reboot_waits_for_no_later_run(
    running: Running, systemctl: ScriptedSystemctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "_GONE_S", 30.0)

    def end(self: Running) -> None:
        self.qemu.end()
        systemctl.unit(UNIT, ActiveState="active", MainPID=str(os.getpid()), InvocationID="b")

    monkeypatch.setattr(Running, "end", end)
    reboot_instance("web1")
    assert systemctl.asked("start") == []


# reboot


def test_a_reboot_that_the_guest_does_not_follow_is_none(
    running: Running,
    systemctl: ScriptedSystemctl,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(progress, "_SILENT_S", 0.01)
    running.obeys = False
    with pytest.raises(InstanceError, match="did not shut down") as told:
        reboot_instance("web1", timeout_s=0.2)
    waits = "brine: web1: waiting for its guest to shut down, at most 0.2 s\n"
    assert waits in capsys.readouterr().err
    assert told.value.hint == "brine instance reboot --force web1 ends it"
    assert running.qemu.runs()
    assert systemctl.asked("start") == []
    assert wanted() == ("up", "admin")
    assert marked("web1") == []
    # It may follow later, when nobody waits for that any more.
    assert not is_to_reboot("web1")
    running.end()
    assert is_to_reboot("web1")
    stop_instance("web1")
    define_instance({"name": "web1", "admin_state": "up"})
    assert not is_to_reboot("web1")


def test_whoever_waits_for_a_reboot_makes_the_rest_of_it(
    running: Running, systemctl: ScriptedSystemctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def watched(name: str) -> bool:
        seen.append(is_to_reboot(name))
        return start_instance(name) is Started.STARTED

    monkeypatch.setattr(operations, "start_instance", watched)
    systemctl.refuse("start", "Connection timed out\n")
    with pytest.raises(InstanceError, match="Connection timed out"):
        reboot_instance("web1")
    assert seen == [False]
    assert is_to_reboot("web1")


@pytest.mark.parametrize(
    ("act", "status", "told"),
    [
        (pause_instance, "running", "stop"),
        (pause_instance, "paused", None),
        (resume_instance, "paused", "cont"),
        (resume_instance, "prelaunch", "cont"),
        (resume_instance, "running", None),
        (resume_instance, "watchdog", "cont"),
        (resume_instance, "guest-panicked", "cont"),
        (resume_instance, "suspended", "system_wakeup"),
    ],
)
def test_its_processors_stand_still_or_go_on(
    running: Running, act: Callable[[str], bool], status: str, told: str | None
) -> None:
    running.status = status
    assert act("web1") == (told is not None)
    orders = [one for one in running.monitor.received if one in _ORDERS]
    assert orders == ([told] if told else [])


@pytest.mark.parametrize(
    ("act", "status", "said"),
    [
        (resume_instance, "internal-error", "can't be continued: .* internal-error"),
        (resume_instance, "shutdown", "can't be continued"),
        (resume_instance, "postmigrate", "can't be continued"),
        (resume_instance, "io-error", "has stopped it again: io-error"),
        (pause_instance, "io-error", "can't be paused: .* io-error"),
        (pause_instance, "suspended", "can't be paused: .* suspended"),
    ],
)
def test_what_can_not_go_on_or_be_paused_says_so(
    running: Running, act: Callable[[str], bool], status: str, said: str
) -> None:
    running.status = status
    with pytest.raises(InstanceError, match=said):
        act("web1")


@pytest.mark.parametrize("status", ["internal-error", "guest-panicked"])
def test_a_guest_that_will_never_hear_is_not_waited_for(running: Running, status: str) -> None:
    running.status = status
    with pytest.raises(InstanceError, match=f"can't be asked to shut down: .*{status}") as caught:
        stop_instance("web1", timeout_s=1000)
    assert caught.value.hint == "brine instance stop --force web1 ends it"
    assert "system_powerdown" not in running.monitor.received


@pytest.mark.parametrize("status", ["paused", "io-error"])
def test_a_guest_that_another_node_has_is_continued_by_nothing(
    running: Running, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one whose move is not decided: it would run twice."""
    running.status = status
    store.save(replace(store.load("web1"), node="n2.example.com", claim_serial=7))
    seen = look("web1")
    assert seen.state.status is Status.ERROR_UP
    write_marker(MarkerKind.AWAITS, "web1", run="a", node="n2.example.com")
    write_marker(MarkerKind.START, "web1", run="a")
    assert look("web1").state.status is Status.INCOMING
    for act in (resume_instance, reset_instance):
        with pytest.raises(InstanceError, match="is n2"):
            act("web1")
    with pytest.raises(InstanceError, match="is n2"):
        hypervisor_of(seen.spec).set_paused(seen, "a", paused=False)
    with pytest.raises(InstanceError, match="can't be asked to shut down"):
        stop_instance("web1", timeout_s=1000)
    assert not {"cont", "system_powerdown", "system_reset"} & set(running.monitor.received)


def test_a_full_disk_is_continued_until_the_guest_can_shut_down(running: Running) -> None:
    running.status = "io-error"
    has_room = iter([False, False, True])

    def go_on() -> None:
        running.status = "running" if next(has_room) else "io-error"

    running.at_cont = go_on
    assert stop_instance("web1", timeout_s=60) is Stopped.STOPPED
    assert running.monitor.received.count("cont") == 3


def test_a_reset_sets_a_guest_going_that_qemu_has_stopped(running: Running) -> None:
    running.status = "internal-error"
    events: list[asyncio.Task[int]] = []

    def reset() -> None:
        told = running.monitor.tell("RESET")
        events.append(asyncio.get_running_loop().create_task(told))

    running.at_reset = reset
    reset_instance("web1")
    assert running.monitor.received[-2:] == ["system_reset", "cont"]


def test_a_qemu_that_talks_without_end_is_left_after_a_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Clock:
        now_s = 0.0

        def monotonic(self) -> float:
            return self.now_s

    clock = Clock()

    class Talking:
        def execute(self, _: str) -> dict[str, str]:
            return {"status": "internal-error"}

        def next_event(self, *, timeout_s: float) -> QmpEvent:
            if timeout_s <= 0:
                raise QmpTimeoutError("no event in time")
            clock.now_s += 1
            return QmpEvent("STOP", {}, None)

    monkeypatch.setattr(guest, "time", clock)
    talking: Any = Talking()
    with pytest.raises(QmpTimeoutError):
        guest.press_reset(talking)


def test_a_list_shows_what_is_paused(running: Running) -> None:
    def shown() -> tuple[str, object]:
        seen = look("web1")
        return row(seen)[1], summary(seen)["paused"]

    assert shown() == ("running", False)
    pause_instance("web1")
    running.status = "paused"
    assert shown() == ("running (paused)", True)
    running.status = "running"  # somebody else has resumed it
    assert shown() == ("running", False)
    running.status = "paused"
    resume_instance("web1")
    assert shown() == ("running", False)


@pytest.mark.parametrize("change", [reboot_instance, reset_instance])
def test_one_that_could_not_start_again_is_not_ended(
    running: Running, change: Callable[[str], object]
) -> None:
    defined(admin_state="offline", reboot_behavior="exit")
    with pytest.raises(InstanceError, match="is offline"):
        change("web1")
    assert not {"system_reset", "system_powerdown"} & set(running.monitor.received)
    assert running.qemu.runs()


def test_who_stops_it_while_it_is_reset_comes_after_that(
    running: Running, systemctl: ScriptedSystemctl
) -> None:
    spec = defined(admin_state="up", reboot_behavior="exit")

    def reset() -> None:
        store.save(replace(spec, admin_state="down"))
        running.end()

    running.at_reset = reset
    with pytest.raises(InstanceError, match="admin_state changed"):
        reset_instance("web1")
    assert systemctl.asked("start") == []
    assert wanted() == ("down", "admin")


# When the node starts


def started(systemctl: ScriptedSystemctl) -> list[str]:
    return [name.split("@")[1].removesuffix(".service") for (_, name) in systemctl.asked("start")]


def test_those_that_should_run_are_started_in_their_order(systemctl: ScriptedSystemctl) -> None:
    for name, order in (("c", 1), ("a", 2), ("b", 2), ("z", 0)):
        defined(name, admin_state="up", start_order=order)
    for name in ("down", "offline"):
        defined(name, admin_state=name)
    defined("user", admin_state="up")
    write_marker(MarkerKind.SHUTDOWN, "user", run=UNKNOWN_RUN)
    defined("runs", admin_state="up")
    systemctl.unit(unit_of("runs"), ActiveState="active")
    assert list(start_all(parallel=1)) == [(name, None) for name in ("z", "c", "a", "b")]
    assert started(systemctl) == ["z", "c", "a", "b"]


def test_the_next_order_waits_for_the_one_before(systemctl: ScriptedSystemctl) -> None:
    for number in range(8):
        defined(f"i{number}", admin_state="up", start_order=number // 4)
    assert len(list(start_all(parallel=8))) == 8
    names = started(systemctl)
    assert set(names[:4]) == {"i0", "i1", "i2", "i3"}


def test_what_is_decided_otherwise_meanwhile_is_not_started(systemctl: ScriptedSystemctl) -> None:
    for number in range(2):
        defined(f"web{number}", admin_state="up", start_order=number)
    found = start_all(parallel=1)
    next(found)
    defined("web1", admin_state="offline", start_order=1)
    list(found)
    assert started(systemctl) == ["web0"]


@pytest.mark.parametrize("fault", ["none", "systemd", "journal"])
def test_one_that_fails_or_is_damaged_keeps_nobody_else(
    systemctl: ScriptedSystemctl, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def damaged(*_: object) -> None:
        raise OSError(errno.EBADMSG, "Bad message")

    for number in range(3):
        defined(f"web{number}", admin_state="up", start_order=number)
    (paths.SPECS_DIR / "bad.json").write_text("{")
    systemctl.refuse("start", "Job failed.\n")
    found = start_all(parallel=2)
    first = next(found)  # by when all have been looked at
    begun = {"InactiveExitTimestampMonotonic": "1", "InvocationID": "a"}
    for number in range(3):
        systemctl.unit(unit_of(f"web{number}"), ActiveState="failed", **begun)
    # What goes wrong in telling why keeps nobody either.
    if fault == "systemd":
        systemctl.refuse("show", "Connection timed out\n")
    elif fault == "journal":
        monkeypatch.setattr("brine.instance.start.why_not_started", damaged)
    results = dict([first, *found])
    assert set(results) == {"bad", "web0", "web1", "web2"}
    said = "did not start: systemctl start: Job failed."
    assert [str(results[f"web{number}"]) for number in range(3)] == [
        f"web{number}: {said}" for number in range(3)
    ]
    with pytest.raises(InstanceError, match=f"web1: {said}"):
        start_instance("web1")


class Storage:
    """Of which some does not answer: starts of instances that have a disk there hang."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.mended = threading.Event()
        monkeypatch.setattr(unit, "begin_start", self._begin)

    def _begin(self, name: str, **_: str) -> Callable[[], None]:
        self.begun.append(name)

        def wait() -> None:
            if name.startswith("dead") and not self.mended.wait(60):
                raise UnitError("Job timed out")

        return wait


@pytest.fixture
def storage(systemctl: ScriptedSystemctl, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    storage = Storage(monkeypatch)
    yield storage
    storage.mended.set()


def with_disk(name: str, path: str, **keys: Any) -> None:
    defined(name, admin_state="up", disks=[{"path": path, "format": "raw"}], **keys)


def test_starts_that_hang_hold_up_nobody(storage: Storage) -> None:
    dead = [f"dead{number}" for number in range(8)]
    for name in dead:
        with_disk(name, f"/dev/dead/{name}", start_order=0)
    good = [f"good{number}" for number in range(5)]
    for name in good:
        with_disk(name, f"/dev/good/{name}", start_order=1)
    results = dict(start_all(parallel=4, slot_s=2))
    # All others on that storage come later.
    assert set(storage.begun[:4]) == set(dead[:4])
    assert sorted(storage.begun[4:9]) == good
    assert set(storage.begun[9:]) == set(dead[4:])
    assert {name for name, error in results.items() if error is None} == set(good)
    late = [error for error in results.values() if error]
    assert {type(error) for error in late} == {StillStartingError}
    assert str(late[0]).startswith("dead0: is still starting after 2 s")


def test_a_start_that_takes_long_and_succeeds_is_one(storage: Storage) -> None:
    with_disk("dead1", "/dev/dead/1")
    with_disk("good1", "/dev/good/1")
    found = start_all(parallel=1, slot_s=0.1)
    assert next(found) == ("good1", None)
    storage.mended.set()
    with_disk("good2", "/dev/good/2")
    last = dict(found)
    assert last["dead1"] is None or isinstance(last["dead1"], StillStartingError)


def test_what_failed_last_comes_last(systemctl: ScriptedSystemctl) -> None:
    for name, order in (("a", 0), ("b", 1), ("c", 2), ("d", 1)):
        defined(name, admin_state="up", start_order=order)
    for name in ("a", "b"):
        note(name, Tries(1, 1.0))
    list(start_all(parallel=1))
    assert started(systemctl) == ["d", "c", "a", "b"]
    restart_counter.FILE.write_text("{")
    list(start_all(parallel=1))
    assert started(systemctl)[4:] == ["a", "b", "d", "c"]


def test_disks_are_on_the_same_storage_by_mount_point_or_volume_group() -> None:
    paths_of = ["/dev/vg0/a", "/dev/mapper/x", "/dev/sda", "/proc/1/disk", "/no/such/disk"]
    disks = [{"path": path, "format": "raw"} for path in paths_of]
    found = storage_of(completed({"name": "web1", "disks": disks}))
    assert found == {"/dev/vg0", "/dev/mapper/x", "/dev/sda", "/proc", "/"}


Work = Callable[[], object]


@pytest.mark.parametrize("verb", ["define", "start", "stop", "undefine"])
def test_a_spec_has_one_writer_at_a_time(monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    spec = defined()
    work: dict[str, Work] = {
        "define": lambda: define_instance({**to_json(spec), "vcpus": 2}),
        "start": lambda: start_instance("web1"),
        "stop": lambda: stop_instance("web1"),
        "undefine": lambda: undefine_instance("web1"),
    }
    alone = store.alone
    monkeypatch.setattr(store, "alone", lambda name: alone(name, timeout_s=0.05))
    with alone("web1"), pytest.raises(LockedError):
        work[verb]()
    assert store.load("web1") == spec


# What the journal is told, and what must not happen on the way


def test_each_change_is_told(events: Events, caplog: pytest.LogCaptureFixture) -> None:
    define_instance({"name": "web1"}, dry_run=True)
    assert events() == []
    define_instance({"name": "web1"})
    assert events() == [("defined", "web1")]
    define_instance({"name": "web1"})
    assert events() == []
    define_instance({"name": "web1", "vcpus": 2, "tags": ["a"]})
    assert caplog.records[0].__dict__["fields"]["BRINE_KEYS"] == "tags vcpus"
    assert events() == [("changed", "web1")]
    rename_instance("web1", "web2")
    assert events() == [("renamed", "web2")]
    start_instance("web2")
    assert events() == [("start-asked", "web2")]
    undefine_instance("web2")
    assert events() == [("undefined", "web2")]


def test_a_reboot_and_a_reset_are_told(
    running: Running, systemctl: ScriptedSystemctl, events: Events
) -> None:
    reset_instance("web1")
    assert events() == [("reset", "web1")]
    systemctl.becomes("start", UNIT, ActiveState="active", MainPID="1", InvocationID="b")
    reboot_instance("web1")
    assert [event for event, _ in events()] == ["stop-asked", "start-asked", "rebooted"]


def test_a_runtime_file_that_can_not_be_used_is_told_to_who_starts_it(
    monkeypatch: pytest.MonkeyPatch, events: Events, capsys: pytest.CaptureFixture[str]
) -> None:
    one = defined()
    (paths.RUNTIME_DIR / "web1.aside").write_text("")
    (paths.RUNTIME_DIR / "web1.json").write_text("{")
    said: list[object] = []

    def runner(_: str, **__: str) -> Callable[[], None]:
        said.append(hot_changes_or_aside(one)[1])
        return lambda: None

    monkeypatch.setattr(unit, "begin_start", runner)
    assert start_instance("web1") is Started.STARTED
    warned = capsys.readouterr().err
    assert warned.startswith(f"brine: warning: web1: {said[0]}")
    assert "not valid JSON" in warned
    assert events() == [("start-asked", "web1"), ("runtime-aside", "web1")]


def test_that_of_a_vm_which_runs_by_itself_is_left_alone(
    qemus: FakeQemus, capsys: pytest.CaptureFixture[str]
) -> None:
    """The unit refuses to start, and says so."""
    defined()
    file = paths.RUNTIME_DIR / "web1.json"
    file.write_text("{")
    qemus.start(InstanceFiles("web1").qmp)
    start_instance("web1")
    assert capsys.readouterr().err == ""
    assert file.exists()


@pytest.mark.parametrize("is_outbox", [False, True])
def test_a_full_disk_keeps_nobody_from_stopping_it(
    running: Running, monkeypatch: pytest.MonkeyPatch, is_outbox: bool
) -> None:
    def full(*_: object, **__: object) -> None:
        raise BrineError("can't be written: No space left on device")

    put_event(store.load("web1"))
    monkeypatch.setattr(*((outbox, "put") if is_outbox else (store, "save")), full)
    with pytest.raises(InstanceError, match="but its admin_state could not be set: .* No space"):
        stop_instance("web1")
    assert not running.qemu.runs()
    with pytest.raises(BrineError, match="can't be written"):
        stop_instance("web1")


@pytest.mark.parametrize("change", [reboot_instance, reset_instance])
def test_who_may_not_change_it_does_not_reach_its_guest(
    running: Running, monkeypatch: pytest.MonkeyPatch, change: Callable[[str], object]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(guest.QemuGuest, "ask", pytest.fail)
    monkeypatch.setattr(store, "locked", refuse)
    with pytest.raises(InstanceError, match="can't be locked"):
        change("web1")
    assert running.qemu.runs()


UUID = "6f1b5c1e-8a3b-4a50-9d0e-0d6f1c2b3a4f"
MAC = "52:54:00:00:00:01"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"uuid": UUID}, f"/uuid: {UUID} is the UUID of web1"),
        ({"nics": [{"mac": MAC, "link": "br1"}]}, f"/nics/0/mac: {MAC} is the MAC address of web1"),
    ],
)
def test_no_two_instances_are_taken_for_each_other(keys: dict[str, Any], said: str) -> None:
    first = {"name": "web1", "uuid": UUID, "nics": [{"mac": MAC, "link": "br0"}]}
    define_instance(first)
    with pytest.raises(SpecError, match=said) as told:
        define_instance({"name": "web2", **keys})
    assert "take it from web1" in (told.value.hint or "")
    assert store.names() == ["web1"]
    define_instance({**first, "memory_mib": 64})
    define_instance({**first, "admin_state": "offline"})
    define_instance({"name": "web2", **keys})
