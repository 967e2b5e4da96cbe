"""UEFI: which firmware a machine starts with, what is stored of it, and what QEMU is given."""

from __future__ import annotations

import json
import os
import stat
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from brine.common import paths
from brine.common.errors import install_hint
from brine.instance.kvm import uefi
from brine.instance.kvm.command_line import qemu_args
from brine.instance.kvm.layout import layout_of
from brine.instance.kvm.resources import open_resources
from brine.instance.kvm.uefi import find_uefi
from brine.instance.store import InstanceError
from brine.instance.validate import completed
from brine.vm.files import InstanceFiles
from brine.vm.spec import Spec


def web1(**keys: Any) -> Spec:
    return completed({"name": "web1", "firmware": "uefi", **keys})


class Node:
    """A node's folders of descriptors, and of firmware."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.own, self.packages = folder / "etc", folder / "usr"
        self.images = folder / "images"
        for each in (self.own, self.packages, self.images):
            each.mkdir()
        monkeypatch.setattr(uefi, "FOLDERS", (self.own, self.packages))
        monkeypatch.setattr(paths, "UEFI_DIR", folder / "variables")

    def image(self, name: str, content: bytes = b"") -> Path:
        path = self.images / name
        path.write_bytes(content or name.encode())
        return path

    def descriptor(self, name: str, *, own: bool = False, **others: Any) -> tuple[Path, Path]:
        """A package's descriptor of a firmware for pc and q35, which is there."""
        code, variables = self.image(f"{name}.code"), self.image(f"{name}.variables")
        data = {
            "interface-types": ["uefi"],
            "mapping": {
                "device": "flash",
                "executable": {"filename": str(code), "format": "raw"},
                "nvram-template": {"filename": str(variables), "format": "raw"},
            },
            "targets": [{"architecture": "x86_64", "machines": ["pc-i440fx-*", "pc-q35-*"]}],
            "features": [],
            **others,
        }
        folder = self.own if own else self.packages
        (folder / f"{name}.json").write_text(json.dumps(data))
        return code, variables


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch)


# Which one


@pytest.mark.parametrize("machine", ["pc", "q35", "pc-i440fx-7.2", "pc-q35-10.0"])
def test_the_first_that_fits_by_name_is_taken(node: Node, machine: str) -> None:
    node.descriptor("60-later")
    first = node.descriptor("50-first")
    assert find_uefi(web1(machine=machine)) == first


Q35_ONLY = {"targets": [{"architecture": "x86_64", "machines": ["pc-q35-*"]}]}
ARM = {"targets": [{"architecture": "aarch64", "machines": ["virt-*"]}]}


@pytest.mark.parametrize(
    "others",
    [
        Q35_ONLY,
        ARM,
        {"features": ["requires-smm", "secure-boot"]},
        {"features": ["enrolled-keys"]},
        {"interface-types": ["bios"]},
        {"mapping": {"device": "memory", "filename": "/x"}},
        {"mapping": {"device": "flash", "mode": "stateless", "executable": {}}},
        {"mapping": 5},
        {"targets": None},
    ],
)
def test_one_that_does_not_fit_is_passed_over(node: Node, others: dict[str, Any]) -> None:
    node.descriptor("10-other", **others)
    last = node.descriptor("90-plain")
    assert find_uefi(web1()) == last


def test_what_is_no_descriptor_or_of_no_image_is_passed_over(node: Node) -> None:
    node.descriptor("10-gone")[0].unlink()
    (node.packages / "20-damaged.json").write_text("{")
    os.mkfifo(node.packages / "30-fifo.json")
    (node.packages / "40-README").write_text("{}")
    last = node.descriptor("90-plain")
    assert find_uefi(web1()) == last


def test_the_admins_own_stands_in_the_place_of_a_packages(node: Node) -> None:
    node.descriptor("50-edk2")
    own = node.descriptor("50-edk2", own=True)
    assert find_uefi(web1()) == own
    (node.own / "50-edk2.json").write_text("")  # which hides that one
    last = node.descriptor("60-edk2")
    assert find_uefi(web1()) == last


def test_a_node_without_any_says_what_to_install(node: Node) -> None:
    node.descriptor("10-q35", targets=Q35_ONLY["targets"])
    with pytest.raises(InstanceError, match="no UEFI firmware for the machine pc") as told:
        find_uefi(web1())
    assert install_hint(apt="ovmf", dnf="edk2-ovmf") in (told.value.hint or "")


# What it stores


def test_variables_are_made_once_and_kept(node: Node) -> None:
    template = node.image("template", b"empty")
    with uefi.opened_variables("web1", template) as descriptor:
        os.pwrite(descriptor, b"guest", 0)
    file = InstanceFiles("web1").uefi_variables
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with uefi.opened_variables("web1", template) as descriptor:
        assert os.pread(descriptor, 10, 0) == b"guest"
    assert template.read_bytes() == b"empty"


@pytest.mark.parametrize("kind", ["another firmware's", "fifo", "link"])
def test_what_is_no_file_of_this_firmware_is_refused(node: Node, kind: str) -> None:
    template = node.image("template", b"12")
    file = InstanceFiles("web1").uefi_variables
    file.parent.mkdir()
    match kind:
        case "fifo":
            os.mkfifo(file)
        case "link":
            file.symlink_to(template)
        case _:
            file.write_bytes(b"1")
    with pytest.raises(InstanceError, match="web1") as told:
        with uefi.opened_variables("web1", template):
            pass
    if file.is_file() and not file.is_symlink():
        assert "holds no variables of this firmware" in str(told.value)
        assert "move " in (told.value.hint or "")
        assert file.read_bytes() == b"1"


# What QEMU is given


def test_qemu_inherits_both_parts_and_only_the_variables_can_be_written(
    node: Node, tmp_path: Path
) -> None:
    node.descriptor("50-edk2")
    image = tmp_path / "disk"
    image.write_bytes(b"")
    disks = [{"path": str(image), "cache": "writeback"}]
    emulator = tmp_path / "qemu-system-x86_64"
    emulator.write_text("#!/bin/sh\necho QEMU emulator version 10.0.0\n")
    emulator.chmod(0o755)
    spec = web1(qemu=str(emulator), disks=disks, cdroms=[str(image)])
    with ExitStack() as stack:
        resources = open_resources(spec, stack)
        args = qemu_args(spec, layout_of(spec), resources)
        assert resources.uefi
        code, variables = resources.uefi
        for descriptor in (*code.descriptors, *variables.descriptors):
            assert os.get_inheritable(descriptor)
        (written,) = variables.descriptors
        assert os.readlink(f"/proc/self/fd/{written}") == str(InstanceFiles("web1").uefi_variables)
    machine = args[args.index("-machine") + 1]
    assert machine.endswith("pflash0=uefi-code,pflash1=uefi-variables")
    nodes = [json.loads(args[at + 1]) for at, one in enumerate(args) if one == "-blockdev"]
    flash = {one["node-name"]: one for one in nodes if one["node-name"].startswith("uefi-")}
    assert [(one["filename"], one["read-only"]) for one in flash.values()] == [
        ("/dev/fdset/2", True),  # after those of the disk and the CD-ROM
        ("/dev/fdset/3", False),
    ]
    assert "-bios" not in args
