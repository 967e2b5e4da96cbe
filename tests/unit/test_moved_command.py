"""The command line of the QEMU that takes a moving guest: the devices of the one it leaves, in the
same slots, with all that is a node's own anew."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from brine.common import paths
from brine.instance.kvm.command_line import DiskFiles, TapFiles, qemu_args
from brine.instance.kvm.layout import layout_of
from brine.instance.kvm.moved_command import WAITING, moved_command
from brine.instance.store import InstanceError
from brine.instance.validate import completed
from brine.vm.disk import Backing, Disk
from brine.vm.nic import Nic
from brine.vm.runtime_file import Runtime
from brine.vm.slots import pci_slot
from brine.vm.spec import Spec
from brine.vm.vif import Vif
from lab.runtime_file import write_runtime_file
from unit.test_command_line import EVERY, NIC, A, B, C, Line, given_to

KINDS: dict[str, Any] = {
    "disks": [
        {"path": "/dev/vg/web1", "uuid": A},
        {"path": "/srv/b.raw", "uuid": B, "interface": "scsi"},
        {"path": "/srv/c.raw", "uuid": C, "interface": "ide"},
    ],
    "nics": [NIC],
    "cdroms": ["/srv/a.iso", ""],
    "vnc_bind": "127.0.0.1",
    "usb_tablet": True,
}


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "RUNTIME_DIR", tmp_path)


def spec_of(**keys: Any) -> Spec:
    return completed({"name": "web1", "uuid": A, **keys})


def started(spec: Spec, **given: Any) -> tuple[list[str], Runtime]:
    """The command of a start, and the runtime file that it has written."""
    command = qemu_args(spec, layout_of(spec), given_to(spec, **given))
    return command, Runtime.load(write_runtime_file(spec, command=command))


def moved(runtime: Runtime, spec: Spec, **given: Any) -> Line:
    command = moved_command(runtime, spec, given_to(spec, **given))
    assert tuple(command[-len(WAITING) :]) == WAITING
    return Line.of(command[: -len(WAITING)])


def every_spec() -> list[dict[str, Any]]:
    found = [{name: value, **beside} for name, value, beside, _, _ in EVERY]
    return [KINDS, {**KINDS, "machine": "q35"}, *found]


@pytest.mark.parametrize("keys", every_spec(), ids=lambda keys: "+".join(keys))
def test_with_the_same_resources_it_is_the_same_command(keys: dict[str, Any]) -> None:
    given: dict[str, Any] = {"console_log": DiskFiles(40, (40,)), "version": (7, 2)}
    given |= {"user": (1, 2), "root": Path("/run/e")}
    if keys.get("firmware") == "uefi":
        given["uefi"] = (DiskFiles(41, (41,)), DiskFiles(42, (42,)))
    spec = spec_of(**keys)
    command, runtime = started(spec, **given)
    if spec.extra_arguments:
        with pytest.raises(InstanceError, match="extra_arguments"):
            moved(runtime, spec, **given)
        return
    assert moved(runtime, spec, **given) == Line.of(command)
    there = moved_command(runtime, spec, given_to(spec, **given))  # and it moves on from there
    runtime = Runtime.load(write_runtime_file(spec, command=there))
    assert moved(runtime, spec, **given) == Line.of(command)


def test_what_is_of_a_node_is_the_new_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(**KINDS, kernel="/boot/k")
    _, runtime = started(spec, user=(1, 2), version=(7, 2))
    monkeypatch.setattr(paths, "CONTROL_DIR", Path("/run/other/ctrl"))
    there = replace(
        spec,
        qemu="/opt/qemu",
        disks=(replace(spec.disks[0], path="/srv/web1.qcow2", format="qcow2"), *spec.disks[1:]),
    )
    given = given_to(there, user=(3, 4), version=(10, 0), console_log=DiskFiles(9, (99,)))
    given.disks[A] = DiskFiles(70, (71,), is_device=False)  # type: ignore[index]
    it = Line.of(moved_command(runtime, there, given)[: -len(WAITING)])
    assert it.program == "/opt/qemu"
    assert it.lists("-run-with") == [{"user": "3:4"}]
    assert it.values("-runas") == []
    assert "71" in [one["fd"] for one in it.lists("-add-fd")]
    disk = next(one for one in it.objects("-blockdev") if one["driver"] == "qcow2")
    assert disk["node-name"] == it.objects("-device")[0]["drive"]
    assert {Path(one["path"]).parent for one in it.lists("-chardev")} == {Path("/run/other/ctrl")}
    assert len(it.values("-qmp")) == 3
    assert it.lists("-chardev")[0]["logfile"] == "/dev/fdset/9"


def test_what_was_plugged_since_is_there_and_what_was_unplugged_is_not() -> None:
    spec = spec_of(**KINDS)
    command, _ = started(spec)
    before = Line.of(command)
    plugged = Disk(uuid="0d000000-0000-4000-8000-00000000000d", path="/srv/d.raw")
    nic = Nic(uuid="0e000000-0000-4000-8000-00000000000e", mac="52:54:00:00:00:02", link="br0")
    now = replace(spec, disks=(*spec.disks[1:], plugged), nics=(nic,))
    rows = [plugged.entry(10, pci_slot(20)), Vif.of(now, nic).recorded(pci_slot(21))]
    file = write_runtime_file(spec, command=command)
    data = json.loads(file.read_text())
    data["disks"] = [*data["disks"][1:], rows[0]]
    data["nics"] = [rows[1]]
    file.write_text(json.dumps(data))
    it = moved(Runtime.load(file), now)
    gone = [one["id"] for one in before.objects("-device") if one not in it.objects("-device")]
    new = [one for one in it.objects("-device") if one not in before.objects("-device")]
    assert gone == ["disk-0a000000-pci-12", "nic-0b000000-pci-13"]
    assert [(one["id"], one["addr"]) for one in new] == [
        ("disk-0d000000-pci-20", "0x14"),
        ("nic-0e000000-pci-21", "0x15"),
    ]
    assert [one["id"] for one in it.objects("-netdev")] == ["nic-0e000000-pci-21"]
    assert it.drivers()[-2:] == ["virtio-blk-pci", "virtio-net-pci"]  # slots of others stay
    controllers = [one[""] for one in it.lists("-device")]
    assert controllers == [one[""] for one in before.lists("-device")]


def test_a_snapshot_since_the_start_is_below_the_disk() -> None:
    spec = spec_of(disks=[{"path": "/srv/a.raw", "uuid": A}])
    command, _ = started(spec)
    (disk,) = spec.disks
    laid = replace(
        disk, path="/srv/a.1", format="qcow2", backing=Backing(path="/srv/a.raw", format="raw")
    )
    now = replace(spec, disks=(laid,))
    file = write_runtime_file(spec, command=command)
    it = moved(Runtime.load(file), now)
    assert [one["driver"] for one in it.objects("-blockdev")] == ["file", "file", "qcow2"]


def test_a_medium_that_was_changed_or_taken_out() -> None:
    spec = spec_of(cdroms=["/srv/a.iso", ""])
    _, runtime = started(spec)
    given = replace(given_to(spec), cdroms=(None, DiskFiles(8, (88,))))
    it = Line.of(moved_command(runtime, spec, given)[: -len(WAITING)])
    assert ["drive" in one for one in it.objects("-device")] == [False, True]
    assert [one["node-name"] for one in it.objects("-blockdev")] == ["cdrom1"]


@pytest.mark.parametrize("others", [{"command": []}, {"command": ["q", "-netdev", "{}"]}])
def test_a_start_of_another_program_is_refused(others: dict[str, Any]) -> None:
    spec = spec_of()
    with pytest.raises(InstanceError, match="the command of its start"):
        moved(Runtime.load(write_runtime_file(spec, **others)), spec)


def test_a_nic_keeps_what_the_guest_has_seen_of_its_tap() -> None:
    spec = spec_of(nics=[{**NIC, "queues": 2}])
    command, runtime = started(spec)
    given = given_to(spec)
    given.nics[B] = TapFiles((3, 4), (), 9000)  # type: ignore[index]
    it = Line.of(moved_command(runtime, spec, given)[: -len(WAITING)])
    assert it.objects("-device") == Line.of(command).objects("-device")
    assert it.objects("-netdev")[0]["fds"] == "3:4"


@pytest.mark.parametrize(
    "words",
    [
        ["-drive", "file=/etc/shadow,format=raw"],
        ["-fw_cfg", "name=opt/a,file=/etc/shadow"],
        ["-object", "memory-backend-file,id=m,mem-path=/etc/shadow,size=1M"],
        ["-smbios", "file=/etc/shadow"],
        ["-pidfile", "/etc/passwd"],
        ["-machine", "pc,accel=tcg,dumpdtb=/etc/passwd"],
        ["-machine", "pc,accel=tcg,kernel=/etc/shadow"],
        ["-boot", "splash=/etc/shadow"],
        ["-serial", "file:/etc/passwd"],
        ["-display", "dbus"],
        ["-mem-path", "/etc"],
        ["-chardev", "file,id=console,path=/etc/passwd"],
        ["-device", "VGA,romfile=/etc/shadow"],
        ["-device", '{"driver": "virtio-net-pci", "romfile": "/etc/shadow"}'],
        ["-device", "vfio-pci,host=00:02.0"],
        ["-device", '{"driver": "vfio-pci"}'],
        ["-device", "loader,file=/etc/shadow"],
        ["-sandbox", "off"],
    ],
    ids=" ".join,
)
def test_a_source_in_bad_hands_can_not_name_files_of_this_node(words: list[str]) -> None:
    """QEMU would open them as root."""
    spec = spec_of(**KINDS)
    command, _ = started(spec)
    runtime = Runtime.load(write_runtime_file(spec, command=[*command, *words]))
    if words == ["-sandbox", "off"]:
        made = Line.of(moved_command(runtime, spec, given_to(spec))[: -len(WAITING)])
        assert made.values("-sandbox") == ["on,obsolete=deny,resourcecontrol=deny,spawn=deny"]
        return
    with pytest.raises(InstanceError, match="no start by Brine says that"):
        moved_command(runtime, spec, given_to(spec))
