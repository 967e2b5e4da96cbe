"""A domain whose spec names no kernel: GRUB runs in the domain, and finds the guest's own."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from lab.command import run_command
from lab.xen_domain import order, rows, wait_ready
from lab.xen_image import DOMAIN_FOLDER
from lab.xen_node import XenNode
from xen.instances_on_xen import LONG_S, forget_log, spec_of, wait_status

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("no_instances"),
    pytest.mark.parametrize("release", ["trixie"], scope="session"),
]

GRUB = "usr/lib/grub-xen/grub-i386-xen_pvh.bin"
MENU = """\
set timeout=0
menuentry guest {
    linux /boot/kernel console=hvc0 quiet mitigations=off
    initrd /boot/initramfs
}
"""


@pytest.fixture
def disk(node: XenNode, tmp_path: Path) -> str:
    """The disk of a guest with a kernel and a menu of its own, on a node that has GRUB."""
    download = ["apt-get", "-o", "APT::Sandbox::User=", "download", "--quiet=2", "grub-xen-host"]
    run_command(download, cwd=tmp_path)
    (package,) = tmp_path.glob("grub-xen-host_*.deb")
    run_command(["dpkg-deb", "--extract", package, tmp_path / "grub"])
    boot = tmp_path / "tree/boot"
    (boot / "grub").mkdir(parents=True)
    (boot / "grub/grub.cfg").write_text(MENU)
    for name in ("kernel", "initramfs"):
        encoded = node.run(["base64", f"{DOMAIN_FOLDER}/{name}"], timeout_s=LONG_S).stdout
        (boot / name).write_bytes(base64.b64decode(encoded))
    image = tmp_path / "disk.img"
    run_command(["truncate", "--size=64M", image])
    run_command(["mkfs.ext4", "-q", "-d", tmp_path / "tree", image])
    node.run(["mkdir", "-p", f"/{Path(GRUB).parent}"])
    node.put(tmp_path / "grub" / GRUB, f"/{GRUB}")
    node.put(image, "/srv/disk.img")
    # Its systemd leaves modules alone.
    node.shell("modprobe loop; modprobe xen-blkback", timeout_s=LONG_S)
    return "/srv/disk.img"


def loop_devices(node: XenNode) -> str:
    """The loop devices of a node."""
    return node.run(["losetup", "--list"]).stdout


def test_the_guests_own_kernel_is_found_and_its_disk_given_back(node: XenNode, disk: str) -> None:
    spec = spec_of(
        "web1", disks=[{"path": disk, "format": "raw"}], memory_mib=224, hypervisor="xen-pvh"
    )
    for key in ("kernel", "initrd", "append"):
        del spec[key]
    node.run(["brine", "instance", "define", "-"], stdin=json.dumps(spec))
    start(node)
    assert disk in loop_devices(node)
    node.run(["brine", "instance", "stop", "web1"], timeout_s=LONG_S)
    wait_status(node, ["web1"], "ADMIN_down")
    assert rows(node) == []
    assert loop_devices(node) == ""

    # systemd ends a guest that hears nothing when its time is over.
    node.run(["brine", "instance", "define", "-"], stdin=json.dumps(spec | {"shutdown_timeout": 5}))
    start(node)
    order(node, "web1", "deaf")
    node.run(["systemctl", "stop", "brine-instance@web1"], timeout_s=LONG_S)
    assert rows(node) == []
    assert loop_devices(node) == ""


def start(node: XenNode) -> None:
    """Start web1, and wait until its guest obeys orders."""
    forget_log(node, "web1")
    node.run(["brine", "instance", "start", "web1"], timeout_s=LONG_S)
    wait_ready(node, "web1")
