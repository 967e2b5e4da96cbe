"""Machines of Proxmox's as specs: no part is lost in silence."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from brine.common.errors import BrineError
from brine.instance.foreign.proxmox import spec_of_config
from brine.instance.validate import completed

FOLDER = Path(__file__).parent / "machines"
MACHINES = {one.stem: one.read_text() for one in sorted(FOLDER.iterdir())}
BOOKKEEPING = {
    "meta",
    "cipassword",  # which is never printed
    "size",
    "base64",
    "snaptime",
}

Run = Callable[..., tuple[int, str, str]]


def read(text: str, number: str = "7") -> tuple[dict[str, Any], list[str]] | str:
    """The spec and what is lost, or the error."""
    storages = {"local-lvm": "/dev/pve"}
    try:
        return spec_of_config(text, number=number, link="br7", storages=storages)
    except BrineError as error:
        assert "\n" not in str(error)
        return str(error)


def test_a_machine_becomes_a_spec() -> None:
    data, lost = spec_of_config(MACHINES["100"], storages={"local-lvm": "/dev/pve"})
    assert data == {
        "name": "web.example.com",
        "uuid": "7f5f2d2a-7d6e-4b7e-a9f0-3b5f5a1c2d3e",
        "machine": "pc-q35-8.1",
        "cpu": "host,+aes,-pcid",
        "vcpus": 4,
        "sockets": 2,
        "cores": 2,
        "threads": 1,
        "cpu_limit_percent": 150,
        "cpu_weight": 200,
        "memory_mib": 4096,
        "tags": ["prod", "web"],
        "boot_order": ["disk", "cdrom", "network"],
        "start_order": 3,
        "shutdown_timeout": 90,
        "cdroms": ["/var/lib/vz/template/iso/debian-12.iso"],
        "disks": [
            {
                "path": "/dev/pve/vm-100-disk-0",
                "format": "raw",
                "interface": "scsi",
                "cache": "writeback",
            },
            {
                "path": "/var/lib/vz/images/100/vm-100-disk-1.qcow2",
                "format": "qcow2",
                "interface": "scsi",
                "aio": "native",
                "discard": False,
                "serial": "DATA",
            },
        ],
        "nics": [
            {
                "mac": "bc:24:11:aa:bb:01",
                "model": "virtio",
                "link": "vmbr0",
                "vlan": ".42:50:60:61:62",
                "queues": 4,
            },
            {"mac": "bc:24:11:aa:bb:02", "model": "e1000", "link": "vmbr1"},
            {
                "mac": "bc:24:11:aa:bb:03",
                "model": "virtio",
                "link": "vmbr2",
                "vlan": ":7",
                "mtu": 9000,
            },
        ],
    }
    assert {
        "the notes",
        "the snapshot before-upgrade",
        "changes that are pending",
        "agent fstrim_cloned_disks=1",
        "net0 firewall=1",
        "net1 link_down=1",
        "the NIC bc:24:11:aa:bb:02: queues of the model e1000",
        "usb0 host=1234:5678",
        "scsi0 iothread=1",
    } <= set(lost)
    completed(data)


def test_one_of_windows_becomes_a_spec() -> None:
    data, lost = spec_of_config(MACHINES["205"], number="205", storages={"local-lvm": "/dev/pve"})
    assert data["cpu"].startswith("qemu64,+aes,")
    assert (data["name"], data["vcpus"], data["sockets"], data["cores"]) == ("vm-205", 2, 1, 2)
    assert [one["path"] for one in data["disks"]] == [
        "/dev/pve/vm-205-disk-0",
        "/dev/disk/by-id/ata-EXAMPLE",
        "/var/lib/vz/images/205/vm-205-disk-2.qcow2",
        "/dev/pve/vm-205-disk-4",
    ]
    base = "/var/lib/vz/images/9000/base-9000-disk-0.qcow2"
    assert data["disks"][2]["backing"] == {"path": base, "format": "qcow2"}
    assert (data["accel"], data["firmware"], data["acpi"]) == ("tcg", "uefi", False)
    assert data["cdroms"] == ["", ""]
    assert "ide3 far:iso/x.iso: the drive is empty" in lost
    assert "cipassword" in lost
    assert "Hu5h" not in json.dumps(lost)
    completed(data)


@pytest.mark.parametrize("machine", MACHINES)
def test_each_line_and_each_word_is_used_or_named(machine: str) -> None:
    """Another value changes the spec or what is named, or is an error."""
    before = read(MACHINES[machine])
    assert not isinstance(before, str), before
    lines = MACHINES[machine].split("\n[")[0].splitlines()

    def changes() -> Iterator[tuple[str, str]]:
        for number, line in enumerate(lines):
            key, colon, value = line.partition(": ")
            words = value.split(",")
            for index, word in enumerate(words if colon else ()):
                name, equals, _ = word.rpartition("=")
                other = [*words[:index], f"{name}{equals}odd", *words[index + 1 :]]
                for what, text in ((name, ",".join(other)), ("new", f"{value},new=1")):
                    changed = [*lines[:number], f"{key}: {text}", *lines[number + 1 :]]
                    if not BOOKKEEPING & {key, what}:
                        yield f"{key} {what}", "\n".join(changed)
        yield "new", "\n".join([*lines, "new: 1"])

    whole = read("\n".join(lines))
    assert [what for what, text in changes() if read(text) == whole] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no line KEY: VALUE"),
        ("<domain/>", "line 1 is not KEY: VALUE"),
        ("rootfs: local:1", "is the configuration of a container"),
        ("template: 1", "is a template"),
        ("arch: aarch64", "aarch64"),
        ("memory: much", "memory is 'much'"),
        ("scsi0: far:vm-1-disk-0", "on the storage far, of which no folder is known"),
        ("scsi0: local:1/../../etc/shadow", "no folder is known"),
        ("scsi0: local:1/vm.vmdk", "is an image of the format vmdk"),
        ("net0: virtio,bridge=vmbr0,trunks=1-99999", "a VLAN is at most 4094"),
        ("net0: virtio,bridge=vmbr0,trunks=9-5", "the first VLAN is the larger one"),
        ("net0: virtio,bridge=vmbr0,trunks=" + "1-4094;" * 5000, "more than 4094 words"),
        ("a: b\n" * 10_001, "has more than 10000 lines"),
    ],
)
def test_what_brine_does_not_run_is_refused_in_one_line(text: str, said: str) -> None:
    assert said in read(text)


def test_a_machine_is_imported_by_the_command(brine: Run, tmp_path: Path) -> None:
    file = FOLDER / "300.conf"
    status, _, said = brine("import", "--proxmox", file)
    assert status == 1
    assert "net0 is on no bridge" in said
    assert "hint: name the bridge that it is to be on: --link BRIDGE" in said
    status, out, said = brine("import", "--proxmox", file, "--link", "br0", "--json")
    assert status == 0
    spec = json.loads(out)["spec"]
    assert (spec["name"], spec["cpu"]) == ("vm-300", "kvm64")
    assert spec["disks"][0]["path"] == "/var/lib/vz/images/300/vm-300-disk-1.raw"
    file = FOLDER / "100.conf"
    status, _, said = brine("import", "--proxmox", file)
    assert status == 1
    assert "hint: --storage local-lvm=FOLDER" in said
    status, out, said = brine("import", "--proxmox", file, "--storage", "local-lvm=/dev/pve")
    assert status == 0
    assert "brine: warning: web.example.com: no counterpart: usb0 host=1234:5678" in said
    # Standard input has no number that could become a name.
    text = file.read_bytes().replace(b"name: ", b"hookscript: ")
    options = ("--storage", "local-lvm=/dev/pve")
    status, _, said = brine("import", "--proxmox", "-", *options, stdin=text)
    assert status == 1
    assert "hint: give it another one: --name NAME" in said


def test_a_time_that_a_spec_can_not_have_is_named() -> None:
    found = read("startup: order=1000,down=7200")
    assert isinstance(found, tuple)
    data, lost = found
    assert (data["start_order"], data["shutdown_timeout"]) == (999, 3600)
    assert "startup order=1000: the spec has 999" in lost
    assert "startup down=7200: the spec has 3600" in lost
