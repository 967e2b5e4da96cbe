"""Specs: each key, its default, and its allowed values."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from brine.vm.disk import Disk
from brine.vm.nic import Nic
from brine.vm.spec import OwnerSpec, Spec, SpecError, parse, to_json

UUID = "9fb0b0f9-0000-4000-8000-00000000000a"
LONG = "x" * 64

BOOL: list[Any] = [0, 1, "yes", None]
NUMBER: list[Any] = ["1", 1.0, True, None]
TEXT: list[Any] = [5, None, [], "a\nb", "\0", "\x1b[2J"]
LIST: list[Any] = ["a", {}, None, [5], ["a\nb"]]
OBJECTS: list[Any] = [{}, "a", None, [5], [[]], [{}]]
NO_SLICES = ["a/b.slice", "a@b.slice", "%i.slice", "ci.slice\n", f"{'x' * 250}.slice"]
PATH: list[Any] = [*TEXT, "relative", "./x", "~/x"]
WEIGHT: list[Any] = [*NUMBER, -1, 10_001]
TOPOLOGY: list[Any] = [*NUMBER, -1, 1025]
BAD_MACS = ["52:54:00:12:34", "52:54:00:12:34:56:78", "52-54-00-12-34-56", "525400123456"]
BAD_MACS += ["53:54:00:12:34:56", "ff:ff:ff:ff:ff:ff", "00:00:00:00:00:00"]

BASE = {"path": "/a", "format": "raw", "backing": None}
BAD_BASES: list[Any] = [5, [], {}, {"path": "/a"}, {**BASE, "path": "a"}, {**BASE, "format": "vdi"}]

# Key by key: its default, what else it may be, and what it may not.
SPEC: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "version": (1, [2], [*NUMBER, 0]),
    "name": (..., ["web1", "w", "W-1.example_2.com", "x" * 63], [*TEXT, "", LONG, "-a", ".a"]),
    "uuid": ("", [UUID], [*TEXT, "9fb0b0f9", UUID.replace("-", ""), f"{{{UUID}}}"]),
    "hypervisor": ("kvm", [], [*TEXT, "", "xen"]),
    "node": ("", ["node1", "node1.example.com"], [*TEXT, "-a", "a b"]),
    "claim_serial": (0, [7, (1 << 63) - 1], [*NUMBER, -1, 1 << 63]),
    "admin_state": ("down", ["up", "offline"], [*TEXT, "", "running"]),
    "admin_state_source": ("admin", ["user"], [*TEXT, "", "root"]),
    "tags": ([], [["a", "b:c"]], LIST),
    "qemu": ("/usr/bin/qemu-system-x86_64", ["/opt/qemu"], [*PATH, ""]),
    "machine": ("pc", ["q35", "pc-i440fx-7.2", "pc-q35-10.0"], [*TEXT, "", "pc,usb=on", "p c"]),
    "accel": ("kvm", ["tcg"], [*TEXT, "", "xen"]),
    "cpu": ("", ["host", "Skylake-Server,+vmx"], TEXT),
    "vcpus": (1, [2, 1024], [*NUMBER, 0, -1, 1025]),
    "sockets": (0, [1, 1024], TOPOLOGY),
    "cores": (0, [1, 1024], TOPOLOGY),
    "threads": (0, [1, 1024], TOPOLOGY),
    "memory_mib": (1024, [1, 1 << 32], [*NUMBER, 0, -1, (1 << 32) + 1]),
    "firmware": ("", ["/usr/share/ovmf/OVMF.fd", "uefi"], [*PATH, "UEFI", "bios"]),
    "kernel": ("", ["/boot/vmlinuz"], PATH),
    "initrd": ("", ["/boot/initrd.img"], PATH),
    "append": ("", ["root=/dev/vda ro"], TEXT),
    "boot_order": (["disk", "cdrom", "network"], [["network"], []], LIST),
    "disks": ([], [], OBJECTS),
    "nics": ([], [], [*OBJECTS[:-1], [{"no": 1}]]),
    "cdroms": ([], [["/a.iso", "/b.iso"], [""]], [*LIST, ["a.iso"]]),
    "hotplug_ports": (8, [0, 24], [*NUMBER, -1, 25]),
    "vnc_bind": (
        "",
        ["127.0.0.1", "::1", "/run/vnc", f"/{'x' * 106}"],
        [*TEXT, "localhost", "1.2.3", "[::1]", f"/{'x' * 107}", f"/{'é' * 54}"],
    ),
    "vnc_port": (0, [5900, 65535], [*NUMBER, -1, 65536]),
    "vnc_password_file": ("", ["/etc/brine/vnc"], PATH),
    "serial_console": (True, [False], BOOL),
    "usb_tablet": (False, [True], BOOL),
    "guest_agent": (True, [False], BOOL),
    "rtc": ("utc", ["localtime"], [*TEXT, "", "UTC"]),
    "acpi": (True, [False], BOOL),
    "reboot_behavior": ("reboot", ["exit"], [*TEXT, "", "stop"]),
    "security_model": ("pool", ["user", "none"], [*TEXT, "", "root"]),
    "security_user": ("", ["guests"], TEXT),
    "chroot": (True, [False], BOOL),
    "huge_pages": ("", ["/dev/hugepages"], PATH),
    "extra_arguments": ([], [["-device", "x,y=z"], [""]], LIST),
    "user_shutdown": ("stop", ["restart"], [*TEXT, "", "start"]),
    "shutdown_timeout": (120, [1, 3600], [*NUMBER, 0, 3601]),
    "start_timeout": (0, [1, 3600], [*NUMBER, -1, 3601]),
    "wait_for_network": (False, [True], BOOL),
    "memory_lock": (False, [True], BOOL),
    "memory_max_mib": (0, [1 << 20, 1 << 32], [*NUMBER, -1, (1 << 32) + 1]),
    "cpu_limit_percent": (0, [50, 400, 819_200], [*NUMBER, -1, 819_201]),
    "cpu_weight": (0, [1, 10_000], WEIGHT),
    "io_weight": (0, [1, 10_000], WEIGHT),
    "start_order": (100, [0, 999], [*NUMBER, -1, 1000]),
    "slice": (
        "",
        ["ci.slice", "-.slice", "kubepods-burstable-pod1_2.slice", r"a\x2db-c:1.slice"],
        [*TEXT, "ci", ".slice", "ci.service", "-ci.slice", "ci-.slice", "a--b.slice", *NO_SLICES],
    ),
    "owner": (None, [{"watchdog_timeout": 9, "group": "ci", "restart_with_owner": True}], ["ci"]),
    "ignored": ([], [["vga", "os"]], LIST),
}

OWNER: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "watchdog_timeout": (15, [2, 86_400], [*NUMBER, 1, 86_401]),
    "group": ("", ["ci", "0", "100000", "4294967294"], [*TEXT, "4294967295", "9" * 5000, "\u0663"]),
    "restart_with_owner": (False, [True], BOOL),
}

DISK: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "uuid": ("", [UUID], [*TEXT, "9fb0b0f9"]),
    "name": ("", ["data", "0.a_b-c"], [*TEXT, "Data", "../x", "a/b", "-a", "a" * 33]),
    "unit": ("", ["vg1", "/srv/vms"], [*TEXT, "a/b", "..", "/srv/../etc", "-vg", "a b"]),
    "size_mib": (0, [1, 1 << 33], [*NUMBER, -1, (1 << 33) + 1]),
    "path": (..., ["/dev/vg/web1", "/a,b.img"], [*PATH, ""]),
    "format": ("raw", ["qcow2"], [*TEXT, "", "vmdk"]),
    "format_source": ("admin", ["start", "default"], [*TEXT, "", "user"]),
    "backing": (None, [BASE, {**BASE, "format": "qcow2", "backing": BASE}], BAD_BASES),
    "interface": ("virtio", ["scsi", "ide"], [*TEXT, "", "nvme"]),
    "cache": ("none", ["writeback", "writethrough", "directsync", "unsafe"], [*TEXT, "", "off"]),
    "aio": ("threads", ["native", "io_uring"], [*TEXT, "", "io-uring"]),
    "discard": (True, [False], BOOL),
    "read_only": (False, [True], BOOL),
    "serial": ("", ["a" * 20], [*TEXT, "a" * 21, "é"]),
    "slot": (-1, [0, 255], [*NUMBER, -2, 256]),
    "by_hand": (False, [True], BOOL),
}

NIC: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "uuid": ("", [UUID], [*TEXT, "9fb0b0f9"]),
    "mac": ("", ["52:54:00:12:34:56", "aa:00:00:ab:cd:ef"], [*TEXT, *BAD_MACS]),
    "model": ("virtio", ["e1000", "e1000e", "rtl8139"], [*TEXT, "", "ne2k"]),
    "mode": ("bridged", ["routed", "openvswitch"], [*TEXT, "", "macvtap"]),
    "link": ("", ["br0", "100"], TEXT),
    "vlan": ("", ["7", ".7:8-9"], TEXT),
    "ips": ([], [["192.0.2.1", "2001:db8::1"]], [*LIST, ["192.0.2.1/24"], [""], ["web1"]]),
    "filter": (False, [True], BOOL),
    "queues": (1, [2, 256], [*NUMBER, 0, 257]),
    "vhost": (False, [True], BOOL),
    "mtu": (0, [1500, 65521], [*NUMBER, -1, 65522]),
    "slot": (-1, [0, 255], [*NUMBER, -2, 256]),
    "by_hand": (False, [True], BOOL),
}

KINDS: dict[type, tuple[dict[str, tuple[Any, list[Any], list[Any]]], dict[str, Any]]] = {
    Spec: (SPEC, {"name": "web1"}),
    OwnerSpec: (OWNER, {}),
    Disk: (DISK, {"path": "/dev/vg/web1"}),
    Nic: (NIC, {}),
}
EVERY = [
    pytest.param(kind, name, *row, id=f"{kind.__name__}.{name}")
    for kind, (rows, _) in KINDS.items()
    for name, row in rows.items()
]


@pytest.mark.parametrize(("kind", "name", "default", "good", "bad"), EVERY)
def test_a_key(kind: Any, name: str, default: Any, good: list[Any], bad: list[Any]) -> None:
    rows, least = KINDS[kind]
    assert [field.name for field in dataclasses.fields(kind)] == list(rows)
    if default is not ...:
        assert to_json(parse(kind, least))[name] == default
    for value in good:
        assert to_json(parse(kind, {**least, name: value}))[name] == value
    for value in bad:
        with pytest.raises(SpecError) as told:
            parse(kind, {**least, name: value})
        assert told.value.where.startswith(f"/{name}"), value
        assert "\n" not in str(told.value)


def test_a_key_that_must_be_there() -> None:
    with pytest.raises(SpecError, match="has no name"):
        parse(Spec, {})
    with pytest.raises(SpecError, match="/disks/0: has no path"):
        parse(Spec, {"name": "web1", "disks": [{}]})


def test_the_limit_of_a_start_grows_with_the_memory() -> None:
    limits = [
        parse(Spec, {"name": "web1", **keys}).start_limit_s()
        for keys in (
            {"memory_mib": 512},
            {"memory_mib": 1 << 18},
            {"memory_mib": 1 << 30},
            {"memory_mib": 1 << 18, "start_timeout": 7},
        )
    ]
    assert limits == [91, 90 + 2 * 256, 3600, 7]


def test_there_and_back_through_json() -> None:
    data: dict[str, Any] = {
        name: good[-1] if good else default
        for name, (default, good, _) in SPEC.items()
        if name not in ("disks", "nics")
    }
    for name, rows in (("disks", DISK), ("nics", NIC)):
        data[name] = [{key: good[0] for key, (_, good, _) in rows.items()}]
    spec = parse(Spec, json.loads(json.dumps(data)))
    assert to_json(spec) == data
    assert parse(Spec, json.loads(json.dumps(to_json(spec)))) == spec


@pytest.mark.parametrize(
    ("data", "where", "hint"),
    [
        ({"memory": 1}, "/memory", "did you mean memory_mib?"),
        ({"vcpu": 1}, "/vcpu", "did you mean vcpus?"),
        ({"disks": [{"path": "/a", "readonly": True}]}, "/disks/0/readonly", "read_only"),
        ({"nics": [{}, {"ip": "192.0.2.1"}]}, "/nics/1/ip", "ips"),
        ({"security_model": "users"}, "/security_model", "did you mean user?"),
        ({"autostart": True}, "/autostart", "did you mean admin_state?"),
        ({"admin_state": "on"}, "/admin_state", 'did you mean "up"?'),
        ({"admin_state": "stopped"}, "/admin_state", 'did you mean "down"?'),
        ({"firmware": "efi"}, "/firmware", 'did you mean "uefi"?'),
        ({"firmware": "UEFI"}, "/firmware", 'did you mean "uefi"?'),
        ({"memory_mib": "1G"}, "/memory_mib", "the unit is MiB: write 1024"),
        ({"disks": [{"size_mib": "20 GiB"}]}, "/disks/0/size_mib", "write 20480"),
    ],
)
def test_what_is_misspelt_names_the_nearest(data: Any, where: str, hint: str) -> None:
    with pytest.raises(SpecError) as told:
        parse(Spec, {"name": "web1", **data})
    assert told.value.where == where
    assert hint in (told.value.hint or "")


@pytest.mark.parametrize(
    ("given", "usual"),
    [
        ("/srv//x/./img", "/srv/x/img"),
        ("//srv/x/", "/srv/x"),
        ("/./srv/.", "/srv"),
        ("/", "/"),
        ("/srv/link/../img", "/srv/link/../img"),  # of which only the kernel knows where it leads
        ("/srv/.img/..x", "/srv/.img/..x"),
    ],
)
def test_a_path_is_written_as_is_usual(given: str, usual: str) -> None:
    data = {"name": "web1", "disks": [{"path": given}], "cdroms": [given], "vnc_bind": given}
    spec = parse(Spec, data)
    assert (spec.disks[0].path, spec.cdroms, spec.vnc_bind) == (usual, (usual,), usual)
    assert parse(Spec, {"name": "web1", "vnc_bind": "::1"}).vnc_bind == "::1"


@pytest.mark.parametrize(
    ("machine", "is_q35"),
    [("pc", False), ("q35", True), ("pc-q35-7.2", True), ("pc-i440fx-10.0", False)],
)
def test_which_machine_has_ports(machine: str, *, is_q35: bool) -> None:
    assert parse(Spec, {"name": "web1", "machine": machine}).is_q35() is is_q35
