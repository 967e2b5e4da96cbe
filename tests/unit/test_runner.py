"""What becomes QEMU: the last moments before it does, and what is left if it does not."""

from __future__ import annotations

import json
import os
import pwd
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brine.common import markers, paths
from brine.common.errors import BrineError
from brine.common.markers import UNKNOWN_RUN, file_of, read_marker, write_marker
from brine.common.markers import MarkerKind as Marker
from brine.common.paths import InstanceFiles
from brine.common.uids import UidPoolError, release_uid
from brine.hotplug.address import DeviceKind
from brine.hotplug.disk import Disk
from brine.hotplug.net import records
from brine.hotplug.runtime_file import change
from brine.instance import store
from brine.instance.kvm import resources
from brine.instance.service import clear as clear_step
from brine.instance.service import run as run_step
from brine.instance.spec import NOT_CONFINED, Spec, to_json
from brine.instance.validate import define
from brine.instance.xen import config
from lab.scripted_systemctl import ScriptedSystemctl
from lab.scripted_xl import ScriptedXl

HOT = "0c000000-0000-4000-8000-00000000000c"


class BecameError(Exception):
    """The process has become another program, and nothing of this one runs any more."""

    def __init__(self, program: str, args: list[str]) -> None:
        self.program = program
        self.args_of_it = args


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InstanceFiles:
    """The files of web1, on a node of its own."""
    for name in ("CONTROL_DIR", "MARKS_DIR", "LOCK_DIR", "RUNTIME_DIR", "CONSOLE_DIR"):
        monkeypatch.setattr(paths, name, tmp_path / name)
    monkeypatch.setattr(store, "FOLDER", tmp_path / "instances")
    monkeypatch.setattr(store, "_GROUP", "none here")
    monkeypatch.setattr(records, "PLACES", records.Places(records=tmp_path / "taps"))
    monkeypatch.setattr(resources, "_SET_BEFORE", tmp_path / "system.control")
    ScriptedSystemctl(tmp_path / "systemctl", monkeypatch)

    def become(program: str, args: list[str]) -> None:
        raise BecameError(program, args)

    monkeypatch.setattr(os, "execv", become)
    # This process goes on, and needs what it has.
    monkeypatch.setattr(resources, "confine_runner", lambda: None)
    monkeypatch.setattr(resources, "confine_qemu", lambda _spec: None)
    monkeypatch.setattr(sys, "argv", ["runner", "web1"])
    return InstanceFiles("web1")


def defined(**keys: Any) -> Spec:
    # What confines QEMU takes the program's version, and this one has none.
    plain = {"name": "web1", "accel": "tcg", "qemu": "/bin/true", **NOT_CONFINED}
    spec = define({**plain, **keys})
    store.save(spec)
    return spec


def defined_on_xen() -> Spec:
    spec = define({"name": "web1", "hypervisor": "xen-pvm", "kernel": "/dev/null"})
    store.save(spec)
    return spec


def run() -> list[str]:
    with pytest.raises(BecameError) as became:
        run_step.main()
    assert became.value.program == "/bin/true"
    return became.value.args_of_it


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        run_step.main()
    assert ended.value.code == 1
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("brine-instance: error: ")
    return first.removeprefix("brine-instance: error: ")


def runtime() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((paths.RUNTIME_DIR / "web1.json").read_text())
    return data


def test_the_runtime_file_says_what_qemu_is_about_to_be(
    control: InstanceFiles, tmp_path: Path
) -> None:
    image = tmp_path / "image"
    image.write_bytes(bytes(3 << 20))
    linked = tmp_path / "linked"
    linked.hardlink_to(image)
    disks = [
        {"path": str(image), "cache": "writeback"},
        {"path": str(linked), "interface": "ide", "cache": "writeback"},
    ]
    spec = defined(disks=disks)
    args = run()
    found = runtime()
    assert found["command"] == args
    assert args[0] == "/bin/true"
    assert found["spec"] == to_json(store.load("web1"))
    assert spec.disks[0].format_source == "default"
    assert store.load("web1").disks[0].format_source == "start"
    assert found["nics"] == []
    (disk,) = found["disks"]  # that of IDE is none that could be plugged
    assert (disk["uuid"], disk["size_mib"], disk["pci"]) == (spec.disks[0].uuid, 3, 12)
    assert disk["hvinfo"]["id"] in " ".join(args)
    status = (paths.RUNTIME_DIR / "web1.json").stat()
    assert stat.S_IMODE(status.st_mode) == 0o600


def test_a_disk_that_looks_like_an_image_is_not_started_as_raw_by_default(
    control: InstanceFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = tmp_path / "image"
    defined(disks=[{"path": str(image), "cache": "writeback"}])
    image.write_bytes(b"QFI\xfb".ljust(1 << 20, b"\0"))
    with pytest.raises(SystemExit):
        run()
    said = capsys.readouterr().err
    assert "web1: /disks/0/format" in said
    assert "begins as qcow2 does, and its format is not said" in said
    defined(disks=[{"path": str(image), "cache": "writeback", "format": "raw"}])
    run()


def test_what_a_guest_writes_to_its_raw_disk_keeps_no_later_start_away(
    control: InstanceFiles, tmp_path: Path
) -> None:
    image = tmp_path / "image"
    image.write_bytes(bytes(1 << 20))
    defined(disks=[{"path": str(image), "cache": "writeback"}])
    run()
    image.write_bytes(b"LUKS\xba\xbe".ljust(1 << 20, b"\0"))
    run()


def test_the_run_that_begins_is_known_by_its_process(
    control: InstanceFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    defined()
    monkeypatch.setenv("INVOCATION_ID", "0d" * 16)
    run()
    assert markers.run_of("web1", os.getpid()) == "0d" * 16
    assert markers.run_of("web1", os.getppid()) is None


def test_descriptors_that_it_names_are_its(control: InstanceFiles, tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(b"")
    defined(disks=[{"path": str(image), "cache": "writeback"}])
    checked = []

    def become(_: str, args: list[str]) -> None:
        for value in (args[index + 1] for index, one in enumerate(args) if one == "-add-fd"):
            number = int(value.partition(",")[0].removeprefix("fd="))
            checked.append((os.readlink(f"/proc/self/fd/{number}"), os.get_inheritable(number)))
        raise BecameError("", args)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "execv", become)
        with pytest.raises(BecameError):
            run_step.main()
    pipe = str(tmp_path / "CONSOLE_DIR/web1")
    assert sorted(checked) == sorted([(pipe, True), *[(str(image), True)] * 2])


def test_what_the_last_run_left_is_gone(control: InstanceFiles) -> None:
    defined()
    paths.CONTROL_DIR.mkdir()
    said = [file_of(kind, "web1") for kind in (Marker.SHUTDOWN, Marker.REBOOT, Marker.ASKED)]
    left = (*control.sockets(), control.stopping, control.shutdown, *said)
    paths.MARKS_DIR.mkdir()
    control.unit.parent.mkdir(exist_ok=True)
    for file in left:
        file.touch()
    others = file_of(Marker.SHUTDOWN, "web2")
    others.touch()
    run()
    assert not any(file.exists() for file in left)
    assert others.exists()


def test_what_was_plugged_in_is_in_the_spec_from_now_on(
    control: InstanceFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = defined(vcpus=3)
    run()
    disk = {**Disk(HOT, Path("/gone")).to_json(), "size_mib": 1}
    change(paths.RUNTIME_DIR / "web1.json", lambda it: it.with_device(DeviceKind.DISK, disk))
    # It has gone meanwhile, so the start fails; that it was wished for stays so.
    for _ in range(2):
        assert refused(capsys).startswith("/gone: can't be opened")
        after = store.load("web1")
        assert [one.uuid for one in after.disks] == [HOT]
        assert (after.vcpus, after.uuid) == (3, spec.uuid)


def test_a_definition_at_the_same_time_is_not_lost(
    control: InstanceFiles, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who defines it has it alone, and what reads, changes and writes it here waits."""
    defined()
    alone = store.alone
    monkeypatch.setattr(store, "alone", lambda name: alone(name, timeout_s=0.05))
    with alone("web1"):
        assert "locked by process" in refused(capsys)
    run()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"disks": [{"path": "/nothing"}]}, "/nothing: can't be opened: No such file"),
        ({"cdroms": ["/nothing"]}, "/nothing: can't be opened: No such file"),
        ({"kernel": "/nothing"}, "web1: /nothing: can't be read"),
        ({"qemu": "/nothing"}, "web1: /nothing: there is no such program"),
        ({"huge_pages": "/tmp"}, "web1: /tmp: no hugetlbfs is mounted there"),
        ({"security_model": "user", "security_user": "nobody?"}, "web1: there is no user nobody?"),
        (
            {"vnc_bind": "::1", "vnc_password_file": "/nothing"},
            "web1: /nothing: can't be read: No such file",
        ),
    ],
)
def test_what_can_not_be_had_is_told_and_nothing_is_touched(
    control: InstanceFiles, capsys: pytest.CaptureFixture[str], keys: dict[str, Any], said: str
) -> None:
    defined()
    run()
    before = runtime()
    write_marker(Marker.SHUTDOWN, "web1", run=UNKNOWN_RUN)
    defined(**keys)
    assert refused(capsys).startswith(said)
    assert runtime() == before
    assert read_marker(Marker.SHUTDOWN, "web1")  # its user's will still
    noted = read_marker(Marker.FAILURE, "web1")
    assert noted
    lacked = "/nothing" in said and not {"qemu", "vnc_password_file"} & keys.keys()
    assert noted.facts == {"lacks": ["/nothing"] if lacked else []}


def test_root_by_another_name_is_root_too(
    control: InstanceFiles, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = pwd.getpwnam("root")
    monkeypatch.setattr(pwd, "getpwnam", lambda _: root)
    defined(security_model="user", security_user="toor")
    assert refused(capsys).startswith("web1: security_user must not be")


@pytest.mark.parametrize("busy", [False, True])
def test_a_vm_of_that_name_which_is_not_the_units_is_left_alone(
    control: InstanceFiles, capsys: pytest.CaptureFixture[str], *, busy: bool
) -> None:
    defined()
    paths.CONTROL_DIR.mkdir()
    with socket.socket(socket.AF_UNIX) as other, socket.socket(socket.AF_UNIX) as client:
        other.bind(str(control.qmp))
        other.listen(0)
        if busy:
            client.connect(str(control.qmp))
        assert "a VM of that name runs already, and not as this unit" in refused(capsys)
    assert control.qmp.exists()


@pytest.mark.parametrize(
    ("state", "said"), [("-b----", "web1: runs already, as domain 3"), ("---ss-", "is suspended")]
)
def test_a_domain_that_is_not_the_units_is_left_alone_with_its_marks(
    control: InstanceFiles,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    state: str,
    said: str,
) -> None:
    spec = defined_on_xen()
    xl = ScriptedXl(tmp_path / "xl", monkeypatch)
    xl.domain("web1", 3, state, spec.uuid, 2 if "s" in state else None)
    config.write(spec)
    write_marker(Marker.STARTED, "web1", run=UNKNOWN_RUN)
    paths.CONTROL_DIR.mkdir()
    write_marker(Marker.STOP, "web1", run=UNKNOWN_RUN)
    assert said in refused(capsys)
    assert InstanceFiles("web1").domain.exists()
    assert read_marker(Marker.STARTED, "web1", run=UNKNOWN_RUN)
    assert read_marker(Marker.STOP, "web1")
    assert xl.asked() == []


def test_what_is_left_of_a_domain_makes_way(
    control: InstanceFiles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = defined_on_xen()
    xl = ScriptedXl(tmp_path / "xl", monkeypatch)
    xl.domain("web1", 3, "---s--", spec.uuid, 0)
    config.write(spec)
    write_marker(Marker.STARTED, "web1", run=UNKNOWN_RUN)
    paths.CONTROL_DIR.mkdir()
    write_marker(Marker.SHUTDOWN, "web1", run=UNKNOWN_RUN)

    def become(program: str, args: list[str], _: object) -> None:
        raise BecameError(program, args)

    monkeypatch.setattr(os, "execvpe", become)
    monkeypatch.setenv("INVOCATION_ID", "0d" * 16)
    with pytest.raises(BecameError) as became:
        run_step.main()
    assert became.value.args_of_it == ["xl", "create", "-F", str(InstanceFiles("web1").domain)]
    assert xl.asked() == ["destroy 3"]
    assert not read_marker(Marker.SHUTDOWN, "web1")
    assert not read_marker(Marker.STARTED, "web1", run="0d" * 16)


@pytest.mark.parametrize("name", ["web2", ""])
def test_one_that_is_not_defined(
    control: InstanceFiles,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    defined()
    monkeypatch.setattr(sys, "argv", ["runner", name])
    assert refused(capsys).startswith(name)


def test_a_disk_that_is_full_is_told(
    control: InstanceFiles, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    defined()
    paths.RUNTIME_DIR.mkdir()
    (paths.RUNTIME_DIR / "web1.json").mkdir()  # which can't be replaced by a file
    assert "web1.json" in refused(capsys)


# What the unit runs last


def test_what_is_left_of_it_is_cleared(
    control: InstanceFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths.CONTROL_DIR.mkdir()
    control.unit.parent.mkdir()
    for file in (*control.sockets(), control.stopping, control.shutdown):
        file.touch()
    clear_step.main()
    assert not control.unit.exists()
    left = sorted(file.name for file in paths.CONTROL_DIR.iterdir())
    assert left == ["web1.shutdown", "web1.stopping"]  # which say how it ended
    clear_step.main()


@pytest.mark.parametrize("program", [clear_step.main, run])
def test_what_somebody_has_put_in_a_sockets_place_is_moved_aside(
    control: InstanceFiles, program: Callable[[], object]
) -> None:
    defined()
    for socket_file in control.sockets():
        (socket_file / "in the way").mkdir(parents=True)
    program()
    assert not any(os.path.lexists(socket_file) for socket_file in control.sockets())
    assert len(list(control.qmp.parent.glob(".web1.*.aside-*/in the way"))) == 4


def test_a_socket_for_vnc_that_qemu_could_not_remove_goes(
    control: InstanceFiles, tmp_path: Path
) -> None:
    """It sees another root than the one that the socket is in."""
    paths.RUNTIME_DIR.mkdir()
    runtime = paths.RUNTIME_DIR / "web1.json"
    bound, other = tmp_path / "web1.vnc", tmp_path / "no-socket"
    other.touch()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(bound))
        listener.listen()
        runtime.write_text(json.dumps({"spec": {"vnc_bind": str(bound), "security_model": ""}}))
        clear_step.main()
        assert bound.exists()  # which is somebody's
    clear_step.main()
    assert not bound.exists()
    for bind in (str(other), "127.0.0.1", 5, "/a\0b", None):
        runtime.write_text(json.dumps({"spec": {"vnc_bind": bind, "security_model": ""}}))
        clear_step.main()
    assert other.exists()


@pytest.mark.parametrize(
    "content", ["", "[" * 100_000, "5", "{}", '{"spec": {"security_model": "pool"}}']
)
def test_a_runtime_file_that_says_nothing_of_a_user(
    control: InstanceFiles, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    paths.RUNTIME_DIR.mkdir()
    (paths.RUNTIME_DIR / "web1.json").write_text(content)
    clear_step.main()
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("brine-instance: warning: web1: its ")


def test_a_user_id_that_is_given_back_is_told_once(
    control: InstanceFiles, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for folder in (paths.RUNTIME_DIR, paths.LOCK_DIR):
        folder.mkdir()
    lock = paths.LOCK_DIR / "uid-4000.lock"
    lock.touch()
    data = {"spec": {"security_model": "pool"}, "user": 4000}
    (paths.RUNTIME_DIR / "web1.json").write_text(json.dumps(data))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            clear_step, "release_uid", lambda uid: release_uid(uid, lock_dir=paths.LOCK_DIR)
        )
        clear_step.main()
        assert not lock.exists()
        clear_step.main()  # after a start that failed
    events = [record.__dict__["fields"]["BRINE_EVENT"] for record in caplog.records]
    assert events == ["uid-returned"]


def test_hot_changes_that_are_kept_are_told(
    control: InstanceFiles, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    defined()
    run()
    disk = {**Disk(HOT, Path("/dev/null")).to_json(), "size_mib": 1}
    change(paths.RUNTIME_DIR / "web1.json", lambda it: it.with_device(DeviceKind.DISK, disk))
    with pytest.raises(SystemExit):
        run_step.main()
    (record,) = caplog.records
    assert record.__dict__["fields"]["BRINE_EVENT"] == "hot-changes-kept"
    assert record.getMessage().endswith(": disk /dev/null plugged in")


def test_a_runtime_file_that_is_no_use_makes_way(
    control: InstanceFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    defined()
    paths.RUNTIME_DIR.mkdir()
    (paths.RUNTIME_DIR / "web1.json").write_text("[[]")
    run()
    assert (paths.RUNTIME_DIR / "web1.aside").read_text() == "[[]"
    assert runtime()["nics"] == []
    assert "warning: web1: its runtime file is not used" in capsys.readouterr().err


def test_what_fails_of_the_clearing_keeps_the_rest_from_nothing(
    control: InstanceFiles, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back = []

    def fail(_: object) -> None:
        raise BrineError("records: can't be read")

    def give_back(uid: int) -> None:
        given_back.append(uid)
        raise UidPoolError("uid-4000.lock: can't be removed")

    monkeypatch.setattr(records, "load_all", fail)
    monkeypatch.setattr(clear_step, "release_uid", give_back)
    paths.RUNTIME_DIR.mkdir()
    data = {"spec": {"security_model": "pool"}, "user": 4000}
    (paths.RUNTIME_DIR / "web1.json").write_text(json.dumps(data))
    clear_step.main()
    assert given_back == [4000]
    assert capsys.readouterr().err.splitlines() == [
        "brine-instance: warning: web1: its taps: records: can't be read",
        "brine-instance: warning: web1: its user id: uid-4000.lock: can't be removed",
    ]
