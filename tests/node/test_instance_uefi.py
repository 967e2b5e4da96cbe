"""UEFI guests on real nodes: the firmware of Debian's package, as an operator has it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.guest_image import unpack_package
from lab.node import Node
from lab.waiting import wait_for
from node.instance_on_node import (
    DISKS,
    command_line,
    define,
    info,
    node_with_instances,
    option,
    serial_line,
)

VARIABLES = "/var/lib/brine/uefi"
DISK = {"path": f"{DISKS}/uefi", "cache": "writeback"}
UEFI = {
    "firmware": "uefi",
    "kernel": "",
    "initrd": "",
    "append": "",
    "security_model": "pool",
    "chroot": True,
    "disks": [DISK],
    "shutdown_timeout": 1,  # the firmware hears no power button
}
"""The keys of a guest that boots from an empty disk, so that its firmware says what it tries."""


@pytest.fixture(scope="module")
def node(release: str, packages: list[Path]) -> Iterator[Node]:
    with node_with_instances(release, packages) as booted:
        booted.shell(f"truncate -s 64M {DISK['path']}")
        booted.shell("echo 'uid_pool = \"4000-4009\"' > /etc/brine/instance.toml")
        yield booted


def test_a_node_without_firmware_says_what_to_install(node: Node) -> None:
    define(node, "bare", **{**UEFI, "disks": []})
    failed = node.run(["brine", "instance", "start", "bare"], check=False)
    assert failed.returncode == 1
    assert "did not start: this node has no UEFI firmware for the machine pc" in failed.stderr
    assert "hint: apt install ovmf" in failed.stderr
    told = node.shell("journalctl --output=cat BRINE_EVENT=start-failed BRINE_INSTANCE=bare")
    assert "this node has no UEFI firmware" in told


@pytest.mark.both_releases
def test_what_the_firmware_stores_is_kept_through_restarts_and_renames(
    node: Node, tmp_path: Path
) -> None:
    unpack_package("ovmf", tmp_path, tmp_path / "ovmf")
    for folder in ("usr/share/OVMF", "usr/share/qemu/firmware"):
        node.put(tmp_path / "ovmf" / folder, Path("/") / folder)
    define(node, "uefi1", **UEFI)
    node.run(["brine", "instance", "start", "uefi1"])
    machine, *_ = option(command_line(node, "uefi1"), "-machine")
    assert machine.endswith("pflash0=uefi-code,pflash1=uefi-variables")
    status = node.shell(f"grep ^Uid: /proc/{info(node, 'uefi1')['pid']}/status")
    assert 4000 <= int(status.split()[1]) <= 4009
    # It has looked for something to boot, found nothing, and written its list of that.
    template = node.shell("md5sum < /usr/share/OVMF/OVMF_VARS_4M.fd")

    def has_stored() -> bool:
        return node.shell(f"md5sum < {VARIABLES}/uefi1.fd") != template

    wait_for("the firmware to store something", has_stored, timeout_s=120, interval_s=1)
    with serial_line(node, "uefi1"):
        pass
    node.run(["brine", "instance", "stop", "--force", "uefi1"])
    stored = node.shell(f"md5sum < {VARIABLES}/uefi1.fd")
    node.run(["brine", "instance", "rename", "uefi1", "uefi2"])
    assert node.shell(f"ls {VARIABLES}") == "uefi2.fd\n"
    assert node.shell(f"md5sum < {VARIABLES}/uefi2.fd") == stored
    node.run(["brine", "instance", "start", "uefi2"])
    assert info(node, "uefi2")["status"] == "running"
    node.run(["brine", "instance", "stop", "--force", "uefi2"])
    node.run(["brine", "instance", "undefine", "uefi2"])
    assert node.shell(f"ls {VARIABLES}") == ""
