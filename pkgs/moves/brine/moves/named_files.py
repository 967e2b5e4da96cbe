"""The files of this node that another node's instance names. That node may be in bad hands, and its
guest would read them."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Collection, Iterator, Sequence
from pathlib import PurePath

from brine.common.mounts import MOUNTS, Mount, mounts_in
from brine.instance.movable import is_on_network
from brine.vm.spec import UEFI, Spec


def faults_of_files(spec: Spec, volumes: Collection[str]) -> Iterator[str]:
    """Why an instance must not have the files that its spec names, in words.

    :param volumes: the paths of those that this node makes for it.
    """
    disks = [
        path
        for disk in spec.disks
        for path in (disk.path, *(layer.path for layer in disk.layers()))
        if path not in volumes
    ]
    only_read = [*spec.cdroms, spec.kernel, spec.initrd, spec.firmware]
    only_read = [path for path in only_read if path not in ("", UEFI)]
    # To follow links mounts what is mounted on demand, so it comes first.
    real = {path: os.path.realpath(path) for path in (*disks, *only_read, spec.qemu)}
    mounts = mounts_in(MOUNTS.read_text(errors="replace"))
    for path in disks:
        if not _on_network(path, real[path], mounts):
            yield f"disk {path} is not copied, and in no file system of several nodes"
    for path in only_read:
        if not (_on_network(path, real[path], mounts) or _may_be_read(real[path])):
            text = "is neither in a file system of several nodes nor a file that every user may"
            yield f"{path}: {text} read"
    programs = () if spec.is_xen() else (spec.qemu, real[spec.qemu])
    if any(is_on_network(one, mounts) for one in programs):
        yield f"{spec.qemu}: is not run as root, as the other node may have written it"
    if spec.vnc_bind.startswith("/") and _is_in_use(spec.vnc_bind):
        yield f"{spec.vnc_bind}: another program listens there"


def _on_network(path: str, real: str, mounts: Sequence[Mount]) -> bool:
    """Whether a file is the other node's, too, and no link leads out of there."""
    return is_on_network(path, mounts) and is_on_network(real, mounts)


def _may_be_read(path: str) -> bool:
    """Whether every user may read a regular file; so it is with one that is missing."""
    try:
        status = os.stat(path)
        folders = [os.stat(one).st_mode for one in PurePath(path).parents]
    except FileNotFoundError:
        return True  # that there is none is told elsewhere
    except OSError:
        return False
    is_open = bool(status.st_mode & stat.S_IROTH) and all(one & stat.S_IXOTH for one in folders)
    return stat.S_ISREG(status.st_mode) and is_open


def _is_in_use(path: str) -> bool:
    """Whether a program listens at a socket, which QEMU would take from it."""
    with socket.socket(socket.AF_UNIX) as tried:
        tried.setblocking(False)
        try:
            tried.connect(path)
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
            return False
        except OSError:
            return True
    return True
