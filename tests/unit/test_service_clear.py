"""The unit's last step: it removes an instance's leftovers and notes the verdict."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

import pytest

from brine.common import paths
from brine.common.errors import BrineError
from brine.hotplug.net import records
from brine.instance import store
from brine.instance.service import clear
from brine.instance.service.clear import note_failure, note_stop, note_unknown_end, tell_watcher
from brine.instance.validate import completed
from brine.vm.files import InstanceFiles
from brine.vm.markers import (
    BELIEVED_S,
    UNKNOWN_RUN,
    MarkerKind,
    file_of,
    held_marker,
    read_marker,
    write_marker,
)
from brine.vm.run import Run
from brine.vm.unit_name import unit_of
from lab.scripted_systemctl import ScriptedSystemctl

UNIT = unit_of("web1")
RUN = "0d" * 16
STOPPING_UNIT = {"ActiveState": "deactivating", "Job": "7", "InactiveExitTimestampMonotonic": "5"}
UP, NOT_UP = "6", "4"
TIMEOUT_S = 60


@pytest.fixture
def systemctl(own_node: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedSystemctl:
    """The systemctl of a node of its own, where web1 is defined."""
    store.save(completed({"name": "web1", "shutdown_timeout": TIMEOUT_S}))
    monkeypatch.setenv("INVOCATION_ID", RUN)
    monkeypatch.setattr(paths, "TAPS_DIR", own_node / "taps")
    monkeypatch.setattr(sys, "argv", ["clear", "web1"])
    return ScriptedSystemctl(own_node / "systemctl", monkeypatch)


# What is left of it


@pytest.fixture
def control(systemctl: ScriptedSystemctl) -> InstanceFiles:
    """The files of web1."""
    return InstanceFiles("web1")


def test_what_is_left_of_it_is_cleared(control: InstanceFiles) -> None:
    control.unit.parent.mkdir()
    for file in (*control.sockets(), control.stopping, control.shutdown):
        file.touch()
    clear.main()
    assert not control.unit.exists()
    left = sorted(file.name for file in paths.CONTROL_DIR.iterdir())
    assert left == ["web1.shutdown", "web1.stopping"]  # which say how it ended
    clear.main()


def test_the_sockets_of_a_vm_that_runs_on_stay(control: InstanceFiles) -> None:
    """One that is not the unit's, or whose process waits for the kernel: the next start sees it."""
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(control.qmp))
        other.listen()
        control.events.touch()
        clear.main()
        assert control.qmp.exists()
        assert not control.events.exists()
    clear.main()
    assert not control.qmp.exists()


def test_what_somebody_has_put_in_a_sockets_place_is_moved_aside(control: InstanceFiles) -> None:
    for file in control.sockets():
        (file / "in the way").mkdir(parents=True)
    clear.main()
    assert not any(os.path.lexists(file) for file in control.sockets())
    assert len(list(control.qmp.parent.glob(".web1.*.aside-*/in the way"))) == 4


def test_a_socket_for_vnc_that_qemu_could_not_remove_goes(
    control: InstanceFiles, tmp_path: Path
) -> None:
    """It sees another root than the one that the socket is in."""
    bound, other = tmp_path / "web1.vnc", tmp_path / "no-socket"
    other.touch()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(bound))
        listener.listen()
        started(control, vnc_bind=str(bound))
        clear.main()
        assert bound.exists()  # which is somebody's
    clear.main()
    assert not bound.exists()
    for bind in (str(other), "127.0.0.1", 5, "/a\0b", None):
        started(control, vnc_bind=bind)
        clear.main()
    assert other.exists()


def started(control: InstanceFiles, **keys: object) -> None:
    """Have the runtime file say with which spec it was started, and as which user."""
    data = {"spec": {"security_model": "none", **keys}, "user": 4000}
    control.runtime.write_text(json.dumps(data))


@pytest.mark.parametrize(
    "content", ["", "[" * 100_000, "5", "{}", '{"spec": {"security_model": "pool"}}']
)
def test_a_runtime_file_that_says_nothing_of_a_user(
    control: InstanceFiles, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    control.runtime.write_text(content)
    clear.main()
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("brine-instance: warning: web1: its ")


def test_a_user_id_that_is_given_back_is_told_once(
    control: InstanceFiles, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    lock = paths.LOCK_DIR / "uid-4000.lock"
    lock.touch()
    started(control, security_model="pool")
    clear.main()
    assert not lock.exists()
    clear.main()  # after a start that failed
    events = [record.__dict__["fields"]["BRINE_EVENT"] for record in caplog.records]
    assert events == ["uid-returned"]


def test_what_fails_of_the_clearing_keeps_the_rest_from_nothing(
    control: InstanceFiles, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(what: object) -> None:
        raise BrineError(f"{what}: no")

    monkeypatch.setattr(records, "load_all", lambda: fail("records"))
    monkeypatch.setattr(clear, "release_uid", fail)
    started(control, security_model="pool")
    clear.main()
    assert capsys.readouterr().err.splitlines() == [
        "brine-instance: warning: web1: its taps: records: no",
        "brine-instance: warning: web1: its user id: 4000: no",
    ]


# Who has ended it, as far as that can be told


@pytest.fixture
def ended(systemctl: ScriptedSystemctl, monkeypatch: pytest.MonkeyPatch) -> ScriptedSystemctl:
    """web1 had come up and has ended in order, and brine-kvmd waits for the first VM."""
    monkeypatch.setenv("EXIT_CODE", "exited")
    monkeypatch.setenv("EXIT_STATUS", "0")
    monkeypatch.setattr(clear, "_VERDICT_S", 0.2)
    write_marker(MarkerKind.START, "web1", run=RUN)
    systemctl.unit(UNIT, ActiveEnterTimestampMonotonic=UP, **STOPPING_UNIT)
    systemctl.unit("brine-kvmd.path", ActiveState="active", Job="0")
    return systemctl


def verdict() -> object:
    found = read_marker(MarkerKind.VERDICT, "web1", run=RUN)
    return found.facts["who"] if found else ""


@pytest.mark.parametrize(
    ("up", "who", "job", "is_admins"),
    [
        (NOT_UP, "", "stop", True),
        (NOT_UP, "", "restart", True),
        (NOT_UP, "", "start", False),  # which has failed
        (UP, "crash", "stop", True),  # the step that marks it has failed
        (UP, "crash", "restart", True),
        (UP, "crash", "", False),  # earlyoom's signal, say
        (UP, "user", "stop", False),  # who was faster
        (UP, "", "stop", True),
        (UP, "", "", False),
    ],
)
def test_a_stop_that_only_systemd_knows_of_is_the_admins(
    ended: ScriptedSystemctl, up: str, who: str, job: str, is_admins: bool
) -> None:
    if who:
        write_marker(MarkerKind.VERDICT, "web1", run=RUN, who=who, cause="as QEMU says")
    if job:
        ended.queues(UNIT, job)
    ended.unit(UNIT, ActiveEnterTimestampMonotonic=up, **STOPPING_UNIT)
    note_stop("web1")
    assert (read_marker(MarkerKind.STOP, "web1", run=RUN) is not None) is is_admins


@pytest.mark.parametrize("age_s", [60, 86400])
def test_also_where_the_mark_of_the_stop_before_is_still_there(
    systemctl: ScriptedSystemctl, age_s: float
) -> None:
    write_marker(MarkerKind.STOP, "web1", run="the run before")
    mark = file_of(MarkerKind.STOP, "web1")
    os.utime(mark, (time.time() - age_s, time.time() - age_s))
    systemctl.queues(UNIT, "stop")
    systemctl.unit(UNIT, ActiveEnterTimestampMonotonic=NOT_UP, **STOPPING_UNIT)
    note_stop("web1")
    assert read_marker(MarkerKind.STOP, "web1", run=Run.last("web1").id)
    assert Run.last("web1").id == RUN


@pytest.mark.parametrize(("more_s", "is_admins"), [(-5, True), (5, False)])
def test_an_end_long_after_a_stop_that_was_broken_off_is_not_the_admins(
    systemctl: ScriptedSystemctl, more_s: float, is_admins: bool
) -> None:
    write_marker(MarkerKind.STOP, "web1", run=UNKNOWN_RUN)
    mark = file_of(MarkerKind.STOP, "web1")
    made_s = time.time() - TIMEOUT_S - BELIEVED_S - more_s
    os.utime(mark, (made_s, made_s))
    # Who stops it may have more patience than its spec.
    with held_marker(MarkerKind.STOP, "web1", run=UNKNOWN_RUN):
        os.utime(mark, (made_s, made_s))
        note_stop("web1")
        assert mark.exists()
    note_stop("web1")
    assert mark.exists() is is_admins


@pytest.mark.parametrize(("more_s", "stays"), [(-5, True), (5, False)])
def test_an_end_long_after_a_reboot_that_was_given_up_is_none(
    systemctl: ScriptedSystemctl, more_s: float, stays: bool
) -> None:
    until_s = time.time() - BELIEVED_S - more_s
    write_marker(MarkerKind.REBOOT, "web1", run=UNKNOWN_RUN, until=until_s)
    note_stop("web1")
    assert (read_marker(MarkerKind.REBOOT, "web1") is not None) is stays


def test_what_can_not_be_noted_is_told(
    systemctl: ScriptedSystemctl, capsys: pytest.CaptureFixture[str]
) -> None:
    systemctl.refuse("show", "Connection timed out\n")
    note_stop("web1")
    assert "web1: its end can't be noted: systemctl show: Conn" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "service", "job", "who"),
    [
        ("inactive", "inactive", "0", "unknown"),
        ("active", "inactive", "0", ""),
        ("inactive", "active", "0", ""),
        ("inactive", "inactive", "5", ""),  # it is just started again
        ("inactive", "failed", "0", ""),
        ("failed", "inactive", "0", ""),
    ],
)
def test_who_ended_it_is_unknown_where_kvmd_is_off(
    ended: ScriptedSystemctl, path: str, service: str, job: str, who: str
) -> None:
    ended.unit("brine-kvmd.path", ActiveState=path, Job="0")
    ended.unit("brine-kvmd.service", ActiveState=service, Job=job)
    note_unknown_end("web1")
    assert verdict() == who


@pytest.mark.parametrize(
    ("kind", "run", "status", "who"),
    [
        (MarkerKind.VERDICT, RUN, "0", "user"),
        (MarkerKind.STOP, RUN, "0", ""),
        (MarkerKind.START, RUN, "1", ""),  # a failure
        (MarkerKind.START, "another", "0", ""),
    ],
)
def test_what_is_known_is_not_unknown(
    ended: ScriptedSystemctl,
    monkeypatch: pytest.MonkeyPatch,
    kind: MarkerKind,
    run: str,
    status: str,
    who: str,
) -> None:
    ended.unit("brine-kvmd.path", ActiveState="inactive")
    write_marker(kind, "web1", run=run, who="user")
    monkeypatch.setenv("EXIT_STATUS", status)
    note_unknown_end("web1")
    assert verdict() == who


# What the watcher hears of at once


@pytest.mark.parametrize(
    ("marks", "is_told"),
    [
        ([MarkerKind.STARTED], True),
        ([MarkerKind.STARTED, MarkerKind.STOP], False),
        ([MarkerKind.STARTED, MarkerKind.STOP, MarkerKind.REBOOT], True),
        ([], False),  # a start that failed, which is tried again later
    ],
)
def test_the_watcher_hears_at_once_of_what_ended_by_itself(
    ended: ScriptedSystemctl, marks: list[MarkerKind], is_told: bool
) -> None:
    for kind in marks:
        write_marker(kind, "web1", run=RUN)
    for kind in set(MarkerKind) - set(marks):
        write_marker(kind, "web1", run="the run before")
    paths.ENDED_DIR.mkdir()
    tell_watcher("web1")
    assert (paths.ENDED_DIR / "web1").exists() is is_told


def test_where_there_is_no_watcher_nobody_is_told(
    ended: ScriptedSystemctl, capsys: pytest.CaptureFixture[str]
) -> None:
    write_marker(MarkerKind.STARTED, "web1", run=RUN)
    tell_watcher("web1")
    assert capsys.readouterr().err == ""
    paths.ENDED_DIR.touch()
    tell_watcher("web1")
    said = f"web1: the watcher hears of its end later: {paths.ENDED_DIR}/web1: Not a directory"
    assert said in capsys.readouterr().err


# Failures


@pytest.fixture
def needy(systemctl: ScriptedSystemctl, own_node: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """web1 needs a disk and a bridge that are not there, and its start has failed."""
    monkeypatch.setenv("SERVICE_RESULT", "exit-code")
    disk = own_node / "disk"
    nics = [{"mac": "52:54:00:00:00:01", "link": "br-none"}]
    keys = {"disks": [{"path": str(disk), "format": "raw"}], "nics": nics}
    store.save(completed({"name": "web1", **keys}))
    return disk


def lacked() -> object:
    found = read_marker(MarkerKind.FAILURE, "web1", run=RUN)
    return found.facts["lacks"] if found else None


def test_the_bridges_that_a_failed_start_lacked_are_noted_and_its_storage_is_left_alone(
    needy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exists = os.path.exists

    def look(path: str) -> bool:
        assert path != str(needy)
        return exists(path)

    monkeypatch.setattr(os.path, "exists", look)
    note_failure("web1")
    assert lacked() == ["/sys/class/net/br-none"]


@pytest.mark.parametrize(
    ("kind", "result", "lacks"),
    [
        (MarkerKind.FAILURE, "exit-code", ["/d"]),  # what the start itself noted stays
        (MarkerKind.START, "success", None),
        (MarkerKind.STOP, "exit-code", None),
        (MarkerKind.STARTED, "exit-code", []),  # it had all that it needs
    ],
)
def test_what_lacked_nothing_is_not_said_to(
    needy: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: MarkerKind,
    result: str,
    lacks: list[str] | None,
) -> None:
    write_marker(kind, "web1", run=RUN, lacks=["/d"])
    monkeypatch.setenv("SERVICE_RESULT", result)
    note_failure("web1")
    assert lacked() == lacks
