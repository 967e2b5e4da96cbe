"""The process that becomes QEMU: its last steps before that, and its leftovers if they fail."""

from __future__ import annotations

import json
import os
import pwd
import socket
import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from brine.common import paths
from brine.instance import store
from brine.instance.awaited import note_awaited
from brine.instance.kvm import confinement, resources
from brine.instance.kvm.moved_command import WAITING
from brine.instance.service import run as run_step
from brine.instance.validate import completed
from brine.instance.xen import config
from brine.instance.xen import xl as tool
from brine.vm.address import DeviceKind
from brine.vm.disk import Disk, without_empty
from brine.vm.files import InstanceFiles
from brine.vm.markers import UNKNOWN_RUN, file_of, read_marker, write_marker
from brine.vm.markers import MarkerKind as Marker
from brine.vm.nic import Nic
from brine.vm.run import Run
from brine.vm.runtime_file import Runtime, change_file
from brine.vm.spec import NOT_CONFINED, Spec, to_json
from lab.fake_qemu import FakeQemus
from lab.scripted_systemctl import ScriptedSystemctl
from lab.scripted_xl import ScriptedXl

HOT = "0c000000-0000-4000-8000-00000000000c"
UUID = "6f1b5c1e-8a3b-4a50-9d0e-0d6f1c2b3a4f"
RUN = "0d" * 16
WEB1 = InstanceFiles("web1")


class BecameError(Exception):
    """The process has become another program, and nothing of this one runs any more."""

    def __init__(self, program: str, args: list[str]) -> None:
        self.program = program
        self.args_of_it = args


@pytest.fixture(autouse=True)
def node(own_node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node of its own, where this process becomes no other program."""
    monkeypatch.setattr(paths, "TAPS_DIR", own_node / "taps")
    monkeypatch.setattr(confinement, "_SET_BEFORE", own_node / "system.control")
    ScriptedSystemctl(own_node / "systemctl", monkeypatch)

    def become(program: str, args: list[str], _: object = None) -> None:
        raise BecameError(program, args)

    monkeypatch.setattr(os, "execv", become)
    monkeypatch.setattr(os, "execvpe", become)
    # This process goes on, and needs what it has.
    monkeypatch.setattr(resources, "confine_runner", lambda: None)
    monkeypatch.setattr(resources, "confine_qemu", lambda _spec: None)
    monkeypatch.setattr(sys, "argv", ["runner", "web1"])
    monkeypatch.setenv("INVOCATION_ID", RUN)


def defined(**keys: Any) -> Spec:
    # What confines QEMU takes the program's version, and this one has none.
    plain = {"name": "web1", "accel": "tcg", "qemu": "/bin/true", **NOT_CONFINED}
    spec = completed({**plain, **keys})
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
    data: dict[str, Any] = json.loads(WEB1.runtime.read_text())
    return data


def test_a_unit_that_is_not_in_the_slice_of_its_spec_does_not_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    defined(slice="ci-job1.slice")
    monkeypatch.setattr(run_step, "slice_of", lambda _: "machine.slice")
    said = "web1: its unit is in machine.slice, and its spec says ci-job1.slice"
    assert refused(capsys) == said
    monkeypatch.setattr(run_step, "slice_of", lambda _: "ci-job1.slice")
    run()


def test_the_runtime_file_says_what_qemu_is_about_to_be(tmp_path: Path) -> None:
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
    started = to_json(store.load("web1"))
    started["disks"] = [without_empty(one) for one in started["disks"]]
    assert found["spec"] == started
    assert spec.disks[0].format_source == "default"
    assert store.load("web1").disks[0].format_source == "start"
    assert found["nics"] == []
    (disk,) = found["disks"]  # that of IDE is none that could be plugged
    assert (disk["uuid"], disk["size_mib"], disk["pci"]) == (spec.disks[0].uuid, 3, 12)
    assert disk["hvinfo"]["id"] in " ".join(args)
    assert stat.S_IMODE(WEB1.runtime.stat().st_mode) == 0o600


def test_a_disk_that_looks_like_an_image_is_not_started_as_raw_by_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = tmp_path / "image"
    defined(disks=[{"path": str(image), "cache": "writeback"}])
    image.write_bytes(b"QFI\xfb".ljust(1 << 20, b"\0"))
    with pytest.raises(SystemExit):
        run()
    said = capsys.readouterr().err
    assert "web1: /disks/0/format" in said
    assert "is a qcow2 file, and the disk has no format" in said
    defined(disks=[{"path": str(image), "cache": "writeback", "format": "raw"}])
    run()
    # Once it was started, what its guest writes keeps no later start away.
    image.write_bytes(bytes(1 << 20))
    defined(disks=[{"path": str(image), "cache": "writeback"}])
    run()
    image.write_bytes(b"LUKS\xba\xbe".ljust(1 << 20, b"\0"))
    run()


def test_the_run_that_begins_is_known_by_its_process() -> None:
    defined()
    run()
    assert Run.of_process("web1", os.getpid()) == Run("web1", RUN)
    assert Run.of_process("web1", os.getppid()) is None


def test_descriptors_that_it_names_are_its(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = tmp_path / "image"
    image.write_bytes(b"")
    defined(disks=[{"path": str(image), "cache": "writeback"}])
    checked = []

    def become(program: str, args: list[str]) -> None:
        for value in (args[index + 1] for index, one in enumerate(args) if one == "-add-fd"):
            number = int(value.partition(",")[0].removeprefix("fd="))
            checked.append((os.readlink(f"/proc/self/fd/{number}"), os.get_inheritable(number)))
        raise BecameError(program, args)

    monkeypatch.setattr(os, "execv", become)
    run()
    assert sorted(checked) == sorted([(str(WEB1.console_pipe), True), *[(str(image), True)] * 2])


def test_what_the_last_run_left_is_gone() -> None:
    defined()
    said = [file_of(kind, "web1") for kind in (Marker.SHUTDOWN, Marker.REBOOT, Marker.ASKED)]
    left = (*WEB1.sockets(), WEB1.stopping, WEB1.shutdown, *said)
    WEB1.unit.parent.mkdir(exist_ok=True)
    for file in left:
        file.touch()
    others = file_of(Marker.SHUTDOWN, "web2")
    others.touch()
    run()
    assert not any(file.exists() for file in left)
    assert others.exists()


def test_a_start_waits_for_the_guest_of_another_node_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only while the instance is the other's: a start that comes by itself, before or after, makes
    no QEMU that waits, and runs nothing that another node may run."""
    here, there = tmp_path / "here", tmp_path / "there"
    for image in (here, there):
        image.write_bytes(bytes(3 << 20))
    spec = defined(vcpus=3, disks=[{"path": str(there), "cache": "writeback", "format": "raw"}])
    sent = run()
    moved = replace(spec.disks[0], path=str(here))
    note_awaited("web1", Runtime.load(WEB1.runtime).with_image(moved, 3))
    # What its next start would have may differ from what it runs with.
    store.save(replace(spec, vcpus=2, disks=(moved,), node="n2.example.com", claim_serial=7))
    args = run()
    assert tuple(args[-len(WAITING) :]) == WAITING
    assert args[: len(sent)] == [word.replace(str(there), str(here)) for word in sent]
    assert WEB1.qmp.name in " ".join(args)
    found = runtime()
    assert found["command"] == args
    assert found["spec"]["vcpus"] == 3
    assert [one["path"] for one in (*found["disks"], *found["spec"]["disks"])] == [str(here)] * 2
    assert Run("web1", RUN).awaits_from == "n2.example.com"
    assert store.load("web1").vcpus == 2
    assert "web1: is n2.example.com's" in refused(capsys)
    # One that was noted too late is of no use, and does no harm.
    note_awaited("web1", Runtime.load(WEB1.runtime))
    store.save(replace(store.load("web1"), node=os.uname().nodename, claim_serial=8))
    assert WAITING[0] not in run()
    assert not WEB1.awaited.exists()
    assert not Run("web1", RUN).awaits_from


def test_what_was_plugged_in_is_in_the_spec_from_now_on_and_told(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    spec = defined(vcpus=3)
    run()
    disk = {**Disk(uuid=HOT, path="/gone").recorded(), "size_mib": 1}
    change_file(WEB1.runtime, lambda it: it.with_device(DeviceKind.DISK, disk))
    # It has gone meanwhile, so the start fails; that it was wished for stays so.
    for _ in range(2):
        assert refused(capsys).startswith("/gone: can't be opened")
        after = store.load("web1")
        assert [one.uuid for one in after.disks] == [HOT]
        assert (after.vcpus, after.uuid) == (3, spec.uuid)
    (record,) = caplog.records
    assert record.__dict__["fields"]["BRINE_EVENT"] == "hot-changes-kept"
    assert record.getMessage().endswith(": disk /gone plugged in")


def test_a_definition_at_the_same_time_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command that defines it has its lock, and code that changes it here waits."""
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
    capsys: pytest.CaptureFixture[str], keys: dict[str, Any], said: str
) -> None:
    defined()
    run()
    before = runtime()
    write_marker(Marker.SHUTDOWN, "web1", run=UNKNOWN_RUN)
    defined(**keys)
    error = refused(capsys)
    assert error.startswith(said)
    assert runtime() == before
    assert read_marker(Marker.SHUTDOWN, "web1")  # its user's will still
    noted = read_marker(Marker.FAILURE, "web1")
    assert noted
    lacked = "/nothing" in said and not {"qemu", "vnc_password_file"} & keys.keys()
    assert noted.facts["lacks"] == (["/nothing"] if lacked else [])
    assert error.endswith(noted.facts["reason"])


def test_root_by_another_name_is_root_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = pwd.getpwnam("root")
    monkeypatch.setattr(pwd, "getpwnam", lambda _: root)
    defined(security_model="user", security_user="toor")
    assert refused(capsys).startswith("web1: security_user must not be")


@pytest.mark.parametrize("busy", [False, True])
def test_a_vm_of_that_name_which_is_not_the_units_is_left_alone(
    capsys: pytest.CaptureFixture[str], *, busy: bool
) -> None:
    defined()
    with socket.socket(socket.AF_UNIX) as other, socket.socket(socket.AF_UNIX) as client:
        other.bind(str(WEB1.qmp))
        other.listen(0)
        if busy:
            client.connect(str(WEB1.qmp))
        assert "a VM of that name runs already, and not as this unit" in refused(capsys)
    assert WEB1.qmp.exists()


@pytest.fixture
def xl(node: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedXl:
    """web1 is a domain of Xen's, whose run before has left its marks."""
    spec = completed({"name": "web1", "uuid": UUID, "hypervisor": "xen-pvm", "kernel": "/dev/null"})
    store.save(spec)
    config.write_config(spec)
    for kind in (Marker.STARTED, Marker.STOP, Marker.SHUTDOWN):
        write_marker(kind, "web1", run=UNKNOWN_RUN)
    return ScriptedXl(tmp_path / "xl", monkeypatch)


@pytest.mark.parametrize(
    ("state", "said"), [("-b----", "web1: runs already, as domain 3"), ("---ss-", "is suspended")]
)
def test_a_domain_that_is_not_the_units_is_left_alone_with_its_marks(
    xl: ScriptedXl, capsys: pytest.CaptureFixture[str], state: str, said: str
) -> None:
    xl.domain("web1", 3, state, UUID, 2 if "s" in state else None)
    assert said in refused(capsys)
    assert WEB1.domain.exists()
    assert read_marker(Marker.STARTED, "web1")
    assert read_marker(Marker.STOP, "web1")
    assert xl.asked() == []


def test_where_there_is_no_xl_a_start_says_what_to_install(
    xl: ScriptedXl, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "PROGRAM", "xl-that-is-not-there")
    with pytest.raises(SystemExit):
        run_step.main()
    said = capsys.readouterr().err
    assert "there is no program xl-that-is-not-there\n" in said
    assert "install xen-" in said
    failure = read_marker(Marker.FAILURE, "web1", run=RUN)
    assert failure is not None
    assert "install xen-" in failure.facts["hint"]


def test_what_is_left_of_a_domain_makes_way(xl: ScriptedXl) -> None:
    xl.domain("web1", 3, "---s--", UUID, 0)
    with pytest.raises(BecameError) as became:
        run_step.main()
    assert became.value.args_of_it == ["xl", "create", "-F", str(WEB1.domain)]
    assert xl.asked() == ["destroy 3"]
    assert not read_marker(Marker.SHUTDOWN, "web1")


def test_a_domain_does_not_start_with_the_mac_of_another_instance_that_runs(
    xl: ScriptedXl, capsys: pytest.CaptureFixture[str], qemus: FakeQemus
) -> None:
    other, mac = InstanceFiles("web2"), "52:54:00:aa:00:01"
    other.runtime.write_text(json.dumps({"nics": [{"mac": mac}]}))
    qemus.start(other.qmp)
    spec = store.load("web1")
    store.save(replace(spec, nics=(Nic(link="br0", uuid=UUID, mac=mac),)))
    assert refused(capsys) == f"web1: {mac} is the MAC address of web2, which runs"


@pytest.mark.parametrize("name", ["web2", ""])
def test_one_that_is_not_defined(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    defined()
    monkeypatch.setattr(sys, "argv", ["runner", name])
    assert refused(capsys).startswith(name)


def test_a_disk_that_is_full_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    defined()
    WEB1.runtime.mkdir()  # which can't be replaced by a file
    assert "web1.json" in refused(capsys)


def test_a_runtime_file_that_is_no_use_makes_way(capsys: pytest.CaptureFixture[str]) -> None:
    defined()
    WEB1.runtime.write_text("[[]")
    run()
    assert (paths.RUNTIME_DIR / "web1.aside").read_text() == "[[]"
    assert runtime()["nics"] == []
    assert "warning: web1: its runtime file is not used" in capsys.readouterr().err
