"""QEMU's command line, read as QEMU reads it: what a spec means to it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brine.instance.kvm.command_line import DiskFiles, Resources, TapFiles, qemu_args
from brine.instance.kvm.layout import layout_of
from brine.instance.validate import completed
from brine.vm.disk import Disk
from brine.vm.files import InstanceFiles
from brine.vm.nic import Nic
from brine.vm.spec import Spec
from brine.vm.values import tidy_path

A, B = "0a000000-0000-4000-8000-00000000000a", "0b000000-0000-4000-8000-00000000000b"
C = "0c000000-0000-4000-8000-00000000000c"
MAC = "52:54:00:00:00:01"
DISK = {"path": "/dev/vg/web1", "uuid": A}
NIC = {"uuid": B, "mac": MAC, "link": "br0"}

_FLAGS = {"-nodefaults", "-no-user-config", "-mem-prealloc"}


def properties(text: str) -> dict[str, str]:
    """A list as QEMU reads it: a comma ends a part, two are one. The first may have no name."""
    parts = re.findall(r"((?:[^,]|,,)+)", text)
    pairs = [part.replace(",,", ",").partition("=")[::2] for part in parts]
    assert ",".join(parts) == text
    return {
        name if value or number else "": value or name for number, (name, value) in enumerate(pairs)
    }


@dataclasses.dataclass
class Line:
    """A command line in its parts."""

    program: str
    options: list[tuple[str, str]]

    @classmethod
    def of(cls, args: Sequence[str]) -> Line:
        program, *rest = args
        options = []
        while rest:
            option = rest.pop(0)
            assert option.startswith("-"), option
            options.append((option, "" if option in _FLAGS else rest.pop(0)))
        return cls(program, options)

    def parts(self) -> set[str]:
        return {self.program, *(f"{name} {value}".rstrip() for name, value in self.options)}

    def values(self, option: str) -> list[str]:
        return [value for name, value in self.options if name == option]

    def value(self, option: str) -> str:
        (value,) = self.values(option)
        return value

    def lists(self, option: str) -> list[dict[str, str]]:
        return [properties(value) for value in self.values(option) if not value.startswith("{")]

    def objects(self, option: str) -> list[dict[str, Any]]:
        return [json.loads(value) for value in self.values(option) if value.startswith("{")]

    def device(self, device_id: str) -> dict[str, Any]:
        (found,) = [one for one in self.objects("-device") if one["id"] == device_id]
        return found

    def drivers(self) -> list[str]:
        plain = [one[""] for one in self.lists("-device")]
        return plain + [one["driver"] for one in self.objects("-device")]


def given_to(spec: Spec, **others: Any) -> Resources:
    """Descriptors for all that an instance has: 7 to 9 for what it boots from, 10 on for disks, 50
    for CD-ROMs, 70 for NICs."""
    disks, nics = {}, {}
    for number, disk in enumerate(spec.disks):
        first = 10 + 2 * number
        is_device = disk.path.startswith("/dev/")
        behind = range(number + 1, number + 1 + len(disk.layers()))
        backing = [DiskFiles(one, (30 + one,), is_device=False) for one in behind]
        disks[disk.uuid] = DiskFiles(number, (first, first + 1), is_device, backing)
    cdroms = [
        DiskFiles(len(spec.disks) + number, (50 + number,), is_device=False)
        for number, _ in enumerate(spec.cdroms)
    ]
    for number, nic in enumerate(spec.nics):
        queues = tuple(range(70 + 10 * number, 70 + 10 * number + nic.queues))
        vhost = tuple(90 + one for one in queues) if nic.vhost else ()
        nics[nic.uuid] = TapFiles(queues, vhost, nic.mtu or 1500)
    boot = {"firmware": 7, "kernel": 8, "initrd": 9}
    return Resources(disks, nics, cdroms, boot, **others)


def line(**keys: Any) -> Line:
    return line_given({}, **keys)


def line_given(given: dict[str, Any], **keys: Any) -> Line:
    """The line of a QEMU that is given these, beside its devices."""
    spec = completed({"name": "web1", "uuid": A, **keys})
    return Line.of(qemu_args(spec, layout_of(spec), given_to(spec, **given)))


# Each key of a spec

VNC = {"vnc_bind": "127.0.0.1"}
KERNEL = {"kernel": "/boot/k"}
Q35 = {"machine": "q35"}

# Key, its value, what it stands beside; a part of the line that comes with it, and one that goes.
EVERY: list[tuple[str, Any, dict[str, Any], str, str]] = [
    ("name", "web2", {}, "-name guest=web2,debug-threads=on", "-name guest=web1,debug-threads=on"),
    ("uuid", B, {}, f"-uuid {B}", f"-uuid {A}"),
    ("qemu", "/opt/q", {}, "/opt/q", "/usr/bin/qemu-system-x86_64"),
    ("machine", "pc-q35-7.2", {}, "-machine pc-q35-7.2,accel=kvm", "-machine pc,accel=kvm"),
    ("accel", "tcg", {}, "-machine pc,accel=tcg", "-machine pc,accel=kvm"),
    ("accel", "tcg", {}, "-cpu max", "-cpu host"),
    ("cpu", "qemu64,+vmx", {}, "-cpu qemu64,+vmx", "-cpu host"),
    ("vcpus", 4, {}, "-smp 4", "-smp 1"),
    ("sockets", 1, {}, "-smp 1,sockets=1", "-smp 1"),
    ("cores", 1, {}, "-smp 1,cores=1", "-smp 1"),
    ("threads", 1, {}, "-smp 1,threads=1", "-smp 1"),
    ("memory_mib", 512, {}, "-m 512M", "-m 1024M"),
    ("firmware", "/o,v.fd", {}, "-bios /proc/self/fd/7", ""),
    ("kernel", "/k", {}, "-kernel /proc/self/fd/8", "-boot strict=on"),
    ("initrd", "/i", KERNEL, "-initrd /proc/self/fd/9", ""),
    ("append", "a,b c=d", KERNEL, "-append a,b c=d", ""),
    ("hotplug_ports", 1, Q35, "", "-device pcie-root-port,id=port7,chassis=8,addr=0xd"),
    ("vnc_bind", "127.0.0.1", {}, "-vnc 127.0.0.1:0,to=99", ""),
    ("vnc_bind", "127.0.0.1", {}, "-device VGA", ""),
    ("vnc_port", 5907, VNC, "-vnc 127.0.0.1:7", "-vnc 127.0.0.1:0,to=99"),
    ("vnc_password_file", "/secret", VNC, "-vnc 127.0.0.1:0,to=99,password=on", ""),
    ("serial_console", False, {}, "", "-serial chardev:serial"),
    ("usb_tablet", True, {}, "-device usb-tablet,bus=usb.0", ""),
    ("guest_agent", False, {}, "", "-device virtio-serial-pci,id=channels"),
    ("rtc", "localtime", {}, "-rtc base=localtime", "-rtc base=utc"),
    ("acpi", False, {}, "-machine pc,accel=kvm,acpi=off", "-machine pc,accel=kvm"),
    ("reboot_behavior", "exit", {}, "-action reboot=shutdown", ""),
    ("huge_pages", "/huge", {}, "-mem-path /huge", ""),
    ("huge_pages", "/huge", {}, "-mem-prealloc", ""),
    ("extra_arguments", ["-S", "x"], {}, "-S x", ""),
    ("memory_lock", True, {}, "-overcommit mem-lock=on", ""),
]

# What is not QEMU's to know; and what is more than its line to it, which has tests of its own.
ELSEWHERE = {
    *("hypervisor", "admin_state", "admin_state_source", "tags", "user_shutdown", "start_order"),
    *("shutdown_timeout", "memory_max_mib", "cpu_limit_percent", "cpu_weight", "io_weight"),
    *("security_model", "security_user", "chroot", "version", "node"),
    *("start_timeout", "wait_for_network", "owner", "ignored", "slice", "claim_serial"),
}


# These have tests of their own below.
DEVICES = {"disks", "nics", "cdroms", "boot_order"}


def test_no_key_is_forgotten() -> None:
    known = {name for name, *_ in EVERY} | ELSEWHERE | DEVICES
    assert known == {field.name for field in dataclasses.fields(Spec)}


@pytest.mark.parametrize(("name", "value", "beside", "comes", "goes"), EVERY)
def test_a_key_changes_what_qemu_is_told(
    name: str, value: Any, beside: dict[str, Any], comes: str, goes: str
) -> None:
    before, after = line(**beside).parts(), line(**{**beside, name: value}).parts()
    assert comes in {*after, ""} - before
    assert goes in {*before, ""} - after


@pytest.mark.parametrize(
    "name", sorted(ELSEWHERE - {"hypervisor", "security_user", "claim_serial"})
)
def test_what_is_not_qemus_to_know_it_is_not_told(name: str) -> None:
    values = {"admin_state": "up", "admin_state_source": "user", "tags": ["a"], "chroot": True}
    values |= {"user_shutdown": "restart", "security_model": "pool", "wait_for_network": True}
    values |= {"version": 1, "node": "node1", "owner": {}, "ignored": ["os"]}
    values |= {"memory_max_mib": 8192, "slice": "ci.slice"}
    assert line(**{name: values.get(name, 7)}) == line()


# What is always so


def test_nothing_is_there_that_nobody_asked_for() -> None:
    flags = [name for name, _ in line().options]
    assert {"-nodefaults", "-no-user-config"} <= set(flags)
    assert line().value("-display") == "none"
    assert "pvpanic" in line().drivers()
    assert "panic=exit-failure" in line().values("-action")  # so that a panic is a crash


def test_three_monitors_and_two_channels_listen_where_all_look_for_them() -> None:
    control = InstanceFiles("web1")
    it = line()
    paths_of = [one[""] for one in it.lists("-qmp")]
    assert paths_of == [f"unix:{each}" for each in (control.events, control.qmp, control.unit)]
    chardevs = {one["id"]: one for one in it.lists("-chardev")}
    assert chardevs["serial"]["path"] == str(control.serial)
    assert chardevs["agent"]["path"] == str(control.agent)
    for one in [*it.lists("-qmp"), *chardevs.values()]:
        assert (one["server"], one["wait"]) == ("on", "off")


def test_what_nobody_wants_has_no_channel() -> None:
    assert line(serial_console=False, guest_agent=False).values("-chardev") == []


# Disks


def nodes(it: Line) -> dict[str, dict[str, Any]]:
    return {one["node-name"]: one for one in it.objects("-blockdev")}


def test_a_disk_is_a_set_of_descriptors_a_node_and_a_device() -> None:
    it = line(disks=[DISK])
    added = it.lists("-add-fd")
    assert [(one["fd"], one["set"]) for one in added] == [("10", "0"), ("11", "0")]
    device_id = "disk-0a000000-pci-12"
    for one in added:
        told_id, told_uuid, told = one["opaque"].split(" ", 2)
        assert (told_id, told_uuid, json.loads(told)["path"]) == (device_id, A, "/dev/vg/web1")
    (node,) = nodes(it).values()
    assert (node["node-name"], node["driver"]) == (device_id, "host_device")
    assert node["filename"] == "/dev/fdset/0"
    assert it.device(device_id) == {
        "driver": "virtio-blk-pci",
        "id": device_id,
        "drive": device_id,
        "serial": A[:20],
        "write-cache": "on",
        "bus": "pci.0",
        "addr": "0xc",
        "bootindex": 1,
    }


def test_each_disk_has_a_set_of_its_own() -> None:
    it = line(disks=[DISK, {"path": "/b", "uuid": B}], cdroms=["/a.iso"])
    sets = [(one["set"], one["fd"]) for one in it.lists("-add-fd")]
    assert sets == [("0", "10"), ("0", "11"), ("1", "12"), ("1", "13"), ("2", "50")]
    assert {one["filename"] for one in it.objects("-blockdev")} == {
        f"/dev/fdset/{number}" for number in range(3)
    }


def disk_seen(**keys: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The outermost node of a disk, and its device."""
    it = line(disks=[{**DISK, **keys}])
    (device,) = [one for one in it.objects("-device") if "drive" in one]
    return nodes(it)[device["drive"]], device


DISKS: list[tuple[str, Any, Callable[[dict[str, Any], dict[str, Any]], Any], Any, Any]] = [
    ("uuid", B, lambda _, device: device["id"], "disk-0a000000-pci-12", "disk-0b000000-pci-12"),
    ("path", "/img", lambda node, _: node["driver"], "host_device", "file"),
    ("format", "qcow2", lambda node, _: node["driver"], "host_device", "qcow2"),
    ("interface", "scsi", lambda _, device: device["driver"], "virtio-blk-pci", "scsi-hd"),
    ("interface", "ide", lambda _, device: device["driver"], "virtio-blk-pci", "ide-hd"),
    ("cache", "writeback", lambda node, _: node["cache"]["direct"], True, False),
    ("cache", "writethrough", lambda _, device: device["write-cache"], "on", "off"),
    ("cache", "directsync", lambda _, device: device["write-cache"], "on", "off"),
    ("cache", "unsafe", lambda node, _: node["cache"]["no-flush"], False, True),
    ("aio", "io_uring", lambda node, _: node["aio"], "threads", "io_uring"),
    ("discard", False, lambda node, _: node["discard"], "unmap", "ignore"),
    ("read_only", True, lambda node, _: node["read-only"], False, True),
    ("serial", "S,1", lambda _, device: device["serial"], A[:20], "S,1"),
]


def test_no_key_of_a_disk_is_forgotten() -> None:
    keys = {field.name for field in dataclasses.fields(Disk)}
    # QEMU is not told these.
    told = keys - {"format_source", "slot", "name", "unit", "size_mib", "by_hand"}
    assert {name for name, *_ in DISKS} | {"backing"} == told


def test_an_overlay_has_the_nodes_of_its_whole_chain_and_none_that_its_header_names() -> None:
    base = {"path": "/base.img", "format": "raw"}
    middle = {"path": "/middle.qcow2", "format": "qcow2", "backing": base}
    it = line(disks=[{**DISK, "path": "/top.qcow2", "format": "qcow2", "backing": middle}])
    found = it.objects("-blockdev")
    top = found[-1]["node-name"]
    keys = ("node-name", "driver", "read-only", "filename", "backing")
    assert [tuple(one.get(key) for key in keys) for one in found] == [
        (f"{top}.2", "file", True, "/dev/fdset/2", None),
        (f"{top}.1.f", "file", True, "/dev/fdset/1", None),
        (f"{top}.1", "qcow2", True, None, f"{top}.2"),
        (f"{top}.f", "file", False, "/dev/fdset/0", None),
        (top, "qcow2", False, None, f"{top}.1"),
    ]
    alone = line(disks=[{**DISK, "format": "qcow2"}]).objects("-blockdev")[-1]
    assert alone["backing"] is None


@pytest.mark.parametrize(("name", "value", "seen", "usual", "told"), DISKS)
def test_a_key_of_a_disk_changes_what_qemu_is_told(
    name: str, value: Any, seen: Callable[..., Any], usual: Any, told: Any
) -> None:
    assert seen(*disk_seen()) == usual
    assert seen(*disk_seen(**{name: value})) == told


def test_disks_of_scsi_are_behind_a_controller_that_comes_first() -> None:
    it = line(disks=[{**DISK, "interface": "scsi"}])
    controller = next(one for one in it.lists("-device") if one[""] == "virtio-scsi-pci")
    device = it.device("disk-0a000000-scsi-0")
    assert device["bus"] == f"{controller['id']}.0"
    drivers = [value for name, value in it.options if name == "-device"]
    assert drivers.index("virtio-scsi-pci,id=scsi0") < drivers.index(json.dumps(device))
    assert "virtio-scsi-pci" not in line(disks=[DISK]).drivers()


def test_ide_disks_and_cdroms_share_their_buses() -> None:
    it = line(disks=[{**DISK, "interface": "ide", "serial": "S"}], cdroms=["/a.iso"])
    disk, cdrom = it.device("ide0"), it.device("cdrom0")
    assert (disk["bus"], disk["unit"], disk["serial"]) == ("ide.0", 0, "S")
    assert (cdrom["driver"], cdrom["bus"], cdrom["unit"]) == ("ide-cd", "ide.0", 1)
    node = nodes(it)["cdrom0"]
    assert (node["driver"], node["read-only"]) == ("file", True)


# NICs


def nic_seen(**keys: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of a NIC: the backend, and the device."""
    it = line(nics=[{**NIC, **keys}])
    (netdev,) = it.objects("-netdev")
    (device,) = [one for one in it.objects("-device") if "netdev" in one]
    assert device["netdev"] == netdev["id"] == device["id"]
    return netdev, device


NOT_MQ = (None, None)
NICS: list[tuple[str, Any, Callable[[dict[str, Any], dict[str, Any]], Any], Any, Any]] = [
    ("uuid", A, lambda _, device: device["id"], "nic-0b000000-pci-12", "nic-0a000000-pci-12"),
    ("mac", "52:54:00:00:00:0F", lambda _, device: device["mac"], MAC, "52:54:00:00:00:0f"),
    ("model", "e1000", lambda _, device: device["driver"], "virtio-net-pci", "e1000"),
    ("queues", 2, lambda netdev, _: netdev.get("fds"), None, "70:71"),
    ("queues", 2, lambda _, device: (device.get("mq"), device.get("vectors")), NOT_MQ, (True, 6)),
    ("vhost", True, lambda netdev, _: netdev.get("vhostfd"), None, "160"),
    ("mtu", 9000, lambda _, device: device.get("host_mtu"), None, 9000),
]


def test_no_key_of_a_nic_is_forgotten() -> None:
    of_the_tap = {"mode", "link", "vlan", "ips", "filter", "slot"}
    known = {name for name, *_ in NICS} | of_the_tap | {"by_hand"}
    assert known == {field.name for field in dataclasses.fields(Nic)}


@pytest.mark.parametrize(("name", "value", "seen", "usual", "told"), NICS)
def test_a_key_of_a_nic_changes_what_qemu_is_told(
    name: str, value: Any, seen: Callable[..., Any], usual: Any, told: Any
) -> None:
    assert seen(*nic_seen()) == usual
    assert seen(*nic_seen(**{name: value})) == told


@pytest.mark.parametrize("keys", [{"model": "e1000", "mtu": 9000}, {"mtu": 1500}])
def test_no_mtu_is_told_that_cannot_be_or_goes_without_saying(keys: dict[str, Any]) -> None:
    _, device = nic_seen(**keys)
    assert "host_mtu" not in device


def test_a_nic_is_given_its_tap_open() -> None:
    netdev, device = nic_seen()
    assert (netdev["type"], netdev["fd"]) == ("tap", "70")
    assert (device["bus"], device["addr"]) == ("pci.0", "0xc")


def test_only_what_boots_from_the_network_has_the_program_for_it() -> None:
    _, boots = nic_seen()
    assert "romfile" not in boots
    it = line(nics=[NIC], boot_order=["disk"])
    (device,) = [one for one in it.objects("-device") if "netdev" in one]
    assert device["romfile"] == ""


# The order in which it boots


def booted(**keys: Any) -> list[str]:
    """The devices in the order in which they are tried."""
    devices = line(**keys).objects("-device")
    found = {one["bootindex"]: one["id"] for one in devices if "bootindex" in one}
    return [found[index] for index in sorted(found)]


def test_all_of_a_kind_have_their_place_one_after_the_other() -> None:
    bus: dict[str, Any] = {"disks": [DISK, {"path": "/b", "uuid": B}], "cdroms": ["/a", "/b"]}
    bus["nics"] = [{**NIC, "uuid": C}]
    disks, cdroms = ["disk-0a000000-pci-12", "disk-0b000000-pci-13"], ["cdrom0", "cdrom1"]
    assert booted(**bus) == [*disks, *cdroms, "nic-0c000000-pci-14"]
    assert booted(**bus, boot_order=["cdrom", "disk"]) == [*cdroms, *disks]
    assert booted(**bus, **KERNEL) == []


# VNC


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"vnc_bind": "0.0.0.0", "vnc_port": 5900}, {"": "0.0.0.0:0"}),
        ({"vnc_bind": "::1", "vnc_port": 65535}, {"": "[::1]:59635"}),
        ({"vnc_bind": "::1"}, {"": "[::1]:0", "to": "99"}),
        ({"vnc_bind": "fe80::1%a,b", "vnc_port": 5901}, {"": "[fe80::1%a,b]:1"}),
        ({"vnc_bind": "/run/v,n=c"}, {"vnc": "unix:/run/v,n=c"}),
        (
            {"vnc_bind": "/run/vnc", "vnc_password_file": "/p"},
            {"vnc": "unix:/run/vnc", "password": "on"},
        ),
    ],
)
def test_where_vnc_listens(keys: dict[str, Any], told: dict[str, str]) -> None:
    assert line(**keys).lists("-vnc") == [told]


def test_a_password_is_nowhere_in_it(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("hunter22")
    it = line(vnc_bind="::1", vnc_password_file=str(file))
    assert "hunter22" not in str(it)
    assert str(file) not in str(it)


# As whom, and where


_IN_TWO = {"-runas": "4000:4001", "-chroot": "/r,t"}
_IN_ONE = {"-run-with": "user=4000:4001,chroot=/r,,t"}


@pytest.mark.parametrize(
    ("version", "user", "root", "told"),
    [
        ((7, 2), (4000, 4001), "/r,t", _IN_TWO),
        ((9, 0), (4000, 4001), "/r,t", _IN_TWO),
        ((9, 1), (4000, 4001), "/r,t", _IN_ONE),
        ((10, 0), (4000, 4001), "/r,t", _IN_ONE),
        ((7, 2), (4000, 4001), None, {"-runas": "4000:4001"}),
        ((10, 0), (4000, 4001), None, {"-run-with": "user=4000:4001"}),
        ((7, 2), None, "/r,t", {"-chroot": "/r,t"}),
        ((10, 0), None, "/r,t", {"-run-with": "chroot=/r,,t"}),
        ((7, 2), None, None, {}),
        ((10, 0), None, None, {}),
    ],
)
def test_each_qemu_is_told_in_its_own_way(
    version: tuple[int, int], user: tuple[int, int] | None, root: str | None, told: dict[str, str]
) -> None:
    it = line_given({"user": user, "root": root and Path(root), "version": version})
    assert {name: value for name, value in it.options if name in {*_IN_TWO, *_IN_ONE}} == told


def test_no_guest_has_qemu_start_programs() -> None:
    sandbox = line().lists("-sandbox")[0]
    assert (sandbox[""], sandbox["spawn"]) == ("on", "deny")


# Commas


@given(path=st.text(st.sampled_from(",=a/ "), min_size=1).map(lambda text: tidy_path(f"/{text}")))
def test_no_path_becomes_an_option(path: str) -> None:
    it = line_given(
        {"user": (1, 1), "root": Path(path), "version": (10, 0)},
        disks=[{"path": path, "uuid": A}],
        vnc_bind=path,
    )
    assert it.lists("-run-with")[0] == {"user": "1:1", "chroot": str(Path(path))}
    told = it.lists("-add-fd")[0]["opaque"].split(" ", 2)[2]
    assert json.loads(told)["path"] == str(Path(path))
    assert it.lists("-vnc") == [{"vnc": f"unix:{path}"}]
    assert [one["id"] for one in it.lists("-chardev")] == ["serial", "agent"]
