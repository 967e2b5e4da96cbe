"""Brine's packages on a Xen node.

dpkg takes minutes on an emulated processor. So the packages are installed natively, over the tree
of a node of the same release, and what that has added is unpacked on the Xen node.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from lab.command import Arguments, run_command
from lab.images import node_image
from lab.xen_node import XenNode

PARTS = [*("common", "config", "confd", "kvmd", "hotplug", "storage", "instance", "lifecycle")]
PARTS += ["watcher", "moves"]
"""The packages that instances need; their dependencies are there."""

# Of the tree alone: its own accounts, and dpkg's records of packages that the Xen node has not.
_NOT_TAKEN = ["var/lib/dpkg", "var/log", "var/cache", "run", "tmp"]
_NOT_TAKEN += [f"etc/{name}{backup}" for name in ("passwd", "group") for backup in ("", "-")]
_NOT_TAKEN += [f"etc/{name}{backup}" for name in ("shadow", "gshadow") for backup in ("", "-")]

_INSTALL = """
mount -t overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work" overlay "$2/tree"
mount --bind "$2/packages" "$2/tree/mnt"
chroot "$2/tree" sh -c 'dpkg --install /mnt/*.deb'
"""

_FINISH = """
systemd-sysusers
systemd-tmpfiles --create
systemctl daemon-reload
"""
_TIMEOUT_S = 900.0


def install(node: XenNode, release: str, packages: Iterable[Path]) -> None:
    """Give a node what the packages of instances install. No timer of theirs runs afterwards."""
    with tempfile.TemporaryDirectory(prefix="brine-xen-") as scratch:
        folder = Path(scratch)
        for name in ("upper", "work", "tree", "packages"):
            (folder / name).mkdir()
        found = {path.name.partition("_")[0]: path for path in packages}
        for part in PARTS:
            shutil.copy(found[f"brine-{part}"], folder / "packages")
        tree = node_image(release)
        # The mounts end with it.
        command: Arguments = ["unshare", "--mount", "sh", "-euc", _INSTALL, "sh", tree, folder]
        run_command(command, timeout_s=_TIMEOUT_S, what="dpkg")
        upper = folder / "upper"
        run_command(["rm", "-rf", *(upper / path for path in _NOT_TAKEN)])
        # What the tree had, and what was removed from it: an overlay says so by such devices.
        run_command(["find", upper, "-type", "c", "-delete"])
        for each in sorted(upper.iterdir()):
            node.put(each, f"/{each.name}")
    node.shell(_FINISH, timeout_s=_TIMEOUT_S)
