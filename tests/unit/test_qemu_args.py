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

from brine.common import paths
from brine.common.paths import InstanceFiles
from brine.instance.kvm.command_line import DiskFiles, NicFiles, Resources, layout_of, qemu_args
from brine.instance.spec import DiskSpec, NicSpec, Spec, backing_chain, tidy_path
from brine.instance.validate import define

A, B = "0a000000-0000-4000-8000-00000000000a", "0b000000-0000-4000-8000-00000000000b"
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
    """Descriptors for all that an instance has: 10 on for disks, 50 for CD-ROMs, 70 for NICs."""
    disks, nics = {}, {}
    for number, disk in enumerate(spec.disks):
        first = 10 + 2 * number
        is_device = disk.path.startswith("/dev/")
        behind = range(number + 1, number + 1 + len(backing_chain(disk)))
        backing = [DiskFiles(one, (30 + one,), is_device=False) for one in behind]
        disks[disk.uuid] = DiskFiles(number, (first, first + 1), is_device, backing)
    cdroms = [
        DiskFiles(len(spec.disks) + number, (50 + number,), is_device=False)
        for number, _ in enumerate(spec.cdroms)
    ]
    for number, nic in enumerate(spec.nics):
        queues = tuple(range(70 + 10 * number, 70 + 10 * number + nic.queues))
        nics[nic.uuid] = NicFiles(queues, tuple(90 + one for one in queues) if nic.vhost else ())
    return Resources(InstanceFiles(spec.name), disks, nics, cdroms, **others)


def line(**keys: Any) -> Line:
    return line_given({}, **keys)


def line_given(given: dict[str, Any], **keys: Any) -> Line:
    """The line of a QEMU that is given these, beside its devices."""
    spec = define({"name": "web1", "uuid": A, **keys})
    return Line.of(qemu_args(spec, layout_of(spec), given_to(spec, **given)))


# Each key of a spec

Seen = Callable[[Line], Any]

BUS = {"disks": [DISK], "nics": [NIC], "cdroms": ["/a.iso"]}
VNC = {"vnc_bind": "127.0.0.1"}
KERNEL = {"kernel": "/boot/k"}


def boot_indices(of: Line) -> list[str]:
    found = {one["bootindex"]: one["driver"] for one in of.objects("-device") if "bootindex" in one}
    return [found[index] for index in sorted(found)]


# Key, what it stands beside, where QEMU sees it, and what of: by default, and where it is given.
EVERY: list[tuple[str, dict[str, Any], Seen, Any, Any, Any]] = [
    ("name", {}, lambda it: it.lists("-name")[0]["guest"], "web1", "web2", "web2"),
    ("uuid", {}, lambda it: it.value("-uuid"), A, B, B),
    ("qemu", {}, lambda it: it.program, "/usr/bin/qemu-system-x86_64", "/opt/q", "/opt/q"),
    ("machine", {}, lambda it: it.lists("-machine")[0][""], "pc", "pc-q35-7.2", "pc-q35-7.2"),
    ("accel", {}, lambda it: it.lists("-machine")[0]["accel"], "kvm", "tcg", "tcg"),
    ("accel", {}, lambda it: it.value("-cpu"), "host", "tcg", "max"),
    ("cpu", {}, lambda it: it.value("-cpu"), "host", "qemu64,+vmx", "qemu64,+vmx"),
    ("vcpus", {}, lambda it: it.lists("-smp")[0][""], "1", 4, "4"),
    ("sockets", {}, lambda it: it.lists("-smp")[0].get("sockets"), None, 1, "1"),
    ("cores", {}, lambda it: it.lists("-smp")[0].get("cores"), None, 1, "1"),
    ("threads", {}, lambda it: it.lists("-smp")[0].get("threads"), None, 1, "1"),
    ("memory_mib", {}, lambda it: it.value("-m"), "1024M", 512, "512M"),
    ("firmware", {}, lambda it: it.values("-bios"), [], "/o,v.fd", ["/o,v.fd"]),
    ("kernel", {}, lambda it: it.values("-kernel"), [], "/k", ["/k"]),
    ("kernel", {}, lambda it: it.values("-boot"), ["strict=on"], "/k", []),
    ("initrd", KERNEL, lambda it: it.values("-initrd"), [], "/i", ["/i"]),
    ("append", KERNEL, lambda it: it.values("-append"), [], "a,b c=d", ["a,b c=d"]),
    (
        "boot_order",
        BUS,
        boot_indices,
        ["virtio-blk-pci", "ide-cd", "virtio-net-pci"],
        ["network", "disk"],
        ["virtio-net-pci", "virtio-blk-pci"],
    ),
    ("disks", {}, lambda it: "virtio-blk-pci" in it.drivers(), False, [DISK], True),
    ("nics", {}, lambda it: it.objects("-netdev") != [], False, [NIC], True),
    ("cdroms", {}, lambda it: it.drivers().count("ide-cd"), 0, ["/a", "/b"], 2),
    (
        "hotplug_ports",
        {"machine": "q35"},
        lambda it: it.drivers().count("pcie-root-port"),
        8,
        3,
        3,
    ),
    (
        "vnc_bind",
        {},
        lambda it: it.lists("-vnc"),
        [],
        "127.0.0.1",
        [{"": "127.0.0.1:0", "to": "99"}],
    ),
    ("vnc_bind", {}, lambda it: "VGA" in it.drivers(), False, "127.0.0.1", True),
    ("vnc_port", VNC, lambda it: it.lists("-vnc")[0].get("to"), "99", 5907, None),
    ("vnc_port", VNC, lambda it: it.lists("-vnc")[0][""][-2:], ":0", 5907, ":7"),
    (
        "vnc_password_file",
        VNC,
        lambda it: it.lists("-vnc")[0].get("password"),
        None,
        "/etc/secret",
        "on",
    ),
    ("serial_console", {}, lambda it: it.values("-serial"), ["chardev:serial"], False, []),
    ("usb_tablet", {}, lambda it: "usb-tablet" in it.drivers(), False, True, True),
    ("guest_agent", {}, lambda it: "virtserialport" in it.drivers(), True, False, False),
    ("rtc", {}, lambda it: it.lists("-rtc")[0]["base"], "utc", "localtime", "localtime"),
    ("acpi", {}, lambda it: it.lists("-machine")[0].get("acpi"), None, False, "off"),
    (
        "reboot_behavior",
        {},
        lambda it: "reboot=shutdown" in it.values("-action"),
        False,
        "exit",
        True,
    ),
    ("huge_pages", {}, lambda it: it.values("-mem-path"), [], "/huge", ["/huge"]),
    ("huge_pages", {}, lambda it: it.values("-mem-prealloc"), [], "/huge", [""]),
    ("extra_arguments", {}, lambda it: it.options[-1][0], "-sandbox", ["-S", "x"], "-S"),
    ("memory_lock", {}, lambda it: it.values("-overcommit"), [], True, ["mem-lock=on"]),
]

# What is not QEMU's to know; and what is more than its line to it, which has tests of its own.
ELSEWHERE = {
    *("hypervisor", "admin_state", "admin_state_source", "tags", "user_shutdown", "start_order"),
    *("shutdown_timeout", "memory_max_mib", "cpu_limit_percent", "cpu_weight", "io_weight"),
    *("security_model", "security_user", "chroot", "version", "node"),
    *("start_timeout", "wait_for_network"),
}


def test_no_key_is_forgotten() -> None:
    known = {name for name, *_ in EVERY} | ELSEWHERE
    assert known == {field.name for field in dataclasses.fields(Spec)}


@pytest.mark.parametrize(
    ("name", "beside", "seen", "usual", "value", "told"), EVERY, ids=[row[0] for row in EVERY]
)
def test_a_key_changes_what_qemu_is_told(
    name: str, beside: dict[str, Any], seen: Seen, usual: Any, value: Any, told: Any
) -> None:
    assert seen(line(**beside)) == usual
    assert seen(line(**{**beside, name: value})) == told


@pytest.mark.parametrize("name", sorted(ELSEWHERE - {"hypervisor", "security_user"}))
def test_what_is_not_qemus_to_know_it_is_not_told(name: str) -> None:
    values = {"admin_state": "up", "admin_state_source": "user", "tags": ["a"], "chroot": True}
    values |= {"user_shutdown": "restart", "security_model": "pool", "wait_for_network": True}
    values |= {"version": 1, "node": "node1"}
    assert line(**{name: values.get(name, 7)}) == line()


# What is always so


def test_nothing_is_there_that_nobody_asked_for() -> None:
    flags = [name for name, _ in line().options]
    assert {"-nodefaults", "-no-user-config"} <= set(flags)
    assert line().value("-display") == "none"


def test_a_guest_that_panics_ends() -> None:
    assert "pvpanic" in line().drivers()
    assert "panic=exit-failure" in line().values("-action")


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
    keys = {field.name for field in dataclasses.fields(DiskSpec)}
    told = keys - {"format_source", "slot"}  # QEMU is not told these
    assert {name for name, *_ in DISKS} | {"backing"} == told


def test_an_overlay_has_the_nodes_of_its_whole_chain_and_none_that_its_header_names() -> None:
    base = {"path": "/base.img", "format": "raw"}
    middle = {"path": "/middle.qcow2", "format": "qcow2", "backing": base}
    it = line(disks=[{**DISK, "path": "/top.qcow2", "format": "qcow2", "backing": middle}])
    found = it.objects("-blockdev")
    top = found[-1]["node-name"]
    assert [(one["node-name"], one["driver"], one["read-only"]) for one in found] == [
        (f"{top}.2", "file", True),
        (f"{top}.1.f", "file", True),
        (f"{top}.1", "qcow2", True),
        (f"{top}.f", "file", False),
        (top, "qcow2", False),
    ]
    assert [one.get("backing") for one in found if one["driver"] == "qcow2"] == [
        f"{top}.2",
        f"{top}.1",
    ]
    assert [one["filename"] for one in found if "filename" in one] == [
        "/dev/fdset/2",
        "/dev/fdset/1",
        "/dev/fdset/0",
    ]
    alone = line(disks=[{**DISK, "format": "qcow2"}]).objects("-blockdev")[-1]
    assert alone["backing"] is None


@pytest.mark.parametrize(("name", "value", "seen", "usual", "told"), DISKS)
def test_a_key_of_a_disk_changes_what_qemu_is_told(
    name: str, value: Any, seen: Callable[..., Any], usual: Any, told: Any
) -> None:
    assert seen(*disk_seen()) == usual
    assert seen(*disk_seen(**{name: value})) == told


@pytest.mark.parametrize("interface", ["virtio", "scsi", "ide"])
@pytest.mark.parametrize(
    ("cache", "write_cache"), [("none", "on"), ("writethrough", "off"), ("directsync", "off")]
)
def test_a_guest_on_any_interface_knows_whether_it_must_flush(
    interface: str, cache: str, write_cache: str
) -> None:
    _, device = disk_seen(interface=interface, cache=cache)
    assert device["write-cache"] == write_cache


def test_an_image_of_another_format_is_in_a_node_of_its_own() -> None:
    it = line(disks=[{"path": "/a.qcow2", "uuid": A, "format": "qcow2", "read_only": True}])
    inner, outer = it.objects("-blockdev")
    assert (inner["driver"], inner["filename"]) == ("file", "/dev/fdset/0")
    assert (outer["driver"], outer["file"]) == ("qcow2", inner["node-name"])
    assert inner["read-only"] is outer["read-only"] is True


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
    """What moves the frames, and the device."""
    it = line(nics=[{**NIC, **keys}])
    (netdev,) = it.objects("-netdev")
    (device,) = [one for one in it.objects("-device") if "netdev" in one]
    assert device["netdev"] == netdev["id"] == device["id"]
    return netdev, device


NICS: list[tuple[str, Any, Callable[[dict[str, Any], dict[str, Any]], Any], Any, Any]] = [
    ("uuid", A, lambda _, device: device["id"], "nic-0b000000-pci-12", "nic-0a000000-pci-12"),
    ("mac", "52:54:00:00:00:0F", lambda _, device: device["mac"], MAC, "52:54:00:00:00:0f"),
    ("model", "e1000", lambda _, device: device["driver"], "virtio-net-pci", "e1000"),
    ("queues", 2, lambda netdev, _: netdev.get("fds"), None, "70:71"),
    (
        "queues",
        2,
        lambda _, device: (device.get("mq"), device.get("vectors")),
        (None,) * 2,
        (True, 6),
    ),
    ("vhost", True, lambda netdev, _: netdev.get("vhostfd"), None, "160"),
]


def test_no_key_of_a_nic_is_forgotten() -> None:
    of_the_tap = {"mode", "link", "vlan", "ips", "mtu", "slot"}
    known = {name for name, *_ in NICS} | of_the_tap
    assert known == {field.name for field in dataclasses.fields(NicSpec)}


@pytest.mark.parametrize(("name", "value", "seen", "usual", "told"), NICS)
def test_a_key_of_a_nic_changes_what_qemu_is_told(
    name: str, value: Any, seen: Callable[..., Any], usual: Any, told: Any
) -> None:
    assert seen(*nic_seen()) == usual
    assert seen(*nic_seen(**{name: value})) == told


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


def test_all_of_a_kind_have_their_place_one_after_the_other() -> None:
    disks = [DISK, {"path": "/b", "uuid": B}]
    it = line(disks=disks, cdroms=["/a", "/b"], boot_order=["cdrom", "disk"])
    found = {one["id"]: one["bootindex"] for one in it.objects("-device") if "bootindex" in one}
    assert found == {
        "cdrom0": 1,
        "cdrom1": 2,
        "disk-0a000000-pci-12": 3,
        "disk-0b000000-pci-13": 4,
    }


def test_who_starts_a_kernel_boots_from_nothing() -> None:
    assert boot_indices(line(**BUS, **KERNEL)) == []


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


def confined(
    version: tuple[int, int], *, user: int | None = 4000, root: str | None = "/r,t"
) -> Line:
    ids = None if user is None else (user, user + 1)
    where = None if root is None else Path(root)
    return line_given({"user": ids, "root": where, "version": version})


def test_an_older_qemu_is_told_in_two_options() -> None:
    for version in ((7, 2), (9, 0)):
        it = confined(version)
        assert (it.value("-runas"), it.value("-chroot")) == ("4000:4001", "/r,t")
        assert it.values("-run-with") == []


def test_a_newer_one_in_one() -> None:
    for version in ((9, 1), (10, 0)):
        it = confined(version)
        assert it.lists("-run-with") == [{"user": "4000:4001", "chroot": "/r,t"}]
        assert it.values("-runas") == it.values("-chroot") == []


@pytest.mark.parametrize("version", [(7, 2), (10, 0)])
def test_what_is_not_wanted_is_not_said(version: tuple[int, int]) -> None:
    user = str(confined(version, root=None).options)
    assert "4000:4001" in user
    assert "chroot" not in user
    root = str(confined(version, user=None).options)
    assert "chroot" in root
    assert "user=" not in root
    neither = confined(version, user=None, root=None)
    assert not {"-runas", "-chroot", "-run-with"} & {name for name, _ in neither.options}


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
        firmware=path,
    )
    assert it.lists("-run-with")[0] == {"user": "1:1", "chroot": str(Path(path))}
    told = it.lists("-add-fd")[0]["opaque"].split(" ", 2)[2]
    assert json.loads(told)["path"] == str(Path(path))
    assert it.value("-bios") == path
    assert it.lists("-vnc") == [{"vnc": f"unix:{path}"}]
    assert [one["id"] for one in it.lists("-chardev")] == ["serial", "agent"]


def test_no_folder_becomes_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "CONTROL_DIR", Path("/run/a,b"))
    it = line()
    assert it.lists("-qmp")[2][""] == "unix:/run/unit/web1.qmp"
    sockets = [one[""] for one in it.lists("-qmp")[:2]] + [
        one["path"] for one in it.lists("-chardev")
    ]
    assert sockets == [
        f"{before}/run/a,b/web1.{suffix}"
        for before, suffix in [("unix:", "kvmd"), ("unix:", "qmp"), ("", "serial"), ("", "agent")]
    ]
