"""What an instance needs of its node, looked at before anything is done."""

from __future__ import annotations

import os
from pathlib import Path

from brine.instance.spec import Spec
from brine.instance.spec_files import InstanceError
from brine.instance.vnc import read_password

_KVM = Path("/dev/kvm")
_MOUNTS = Path("/proc/self/mounts")


def check_node(spec: Spec) -> None:
    """Refuse to start an instance that this node can't run.

    :raises InstanceError: what the node lacks.
    """
    name = spec.name
    if not os.access(spec.qemu, os.X_OK):
        hint = "apt install qemu-system-x86, or have its spec name another program"
        raise InstanceError(name, f"{spec.qemu}: there is no such program", hint=hint)
    if spec.accel == "kvm" and not _KVM.exists():
        hint = 'see whether the firmware has virtualization enabled; "accel": "tcg" does without'
        raise InstanceError(name, f"this node has no {_KVM}", hint=hint)
    for file in (spec.firmware, spec.kernel, spec.initrd):
        if file and not os.access(file, os.R_OK):
            raise InstanceError(name, f"{file}: can't be read, or is not there")
    # QEMU would make a file of that name, in the memory of no huge page.
    if spec.huge_pages and not _is_hugetlbfs(spec.huge_pages):
        hint = f"mount -t hugetlbfs none {spec.huge_pages}"
        raise InstanceError(name, f"{spec.huge_pages}: no hugetlbfs is mounted there", hint=hint)
    if spec.vnc_password_file:
        read_password(spec)  # or it says why not


def _is_hugetlbfs(path: str) -> bool:
    rows = (line.split() for line in _MOUNTS.read_text(errors="surrogateescape").splitlines())
    found = [row[2] for row in rows if row[1] == path.rstrip("/")]
    return bool(found) and found[-1] == "hugetlbfs"
