"""What an instance needs of its node, looked at before anything is done."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from brine.common.instance_units import unit_of
from brine.hotplug.choices import Mode
from brine.instance.checks import UEFI
from brine.instance.spec import SecurityModel, Spec, backing_chain
from brine.instance.spec_files import InstanceError
from brine.instance.vnc import read_password

_KVM = Path("/dev/kvm")
_MOUNTS = Path("/proc/self/mounts")
_STATUS = Path("/proc/self/status")
_INTERFACES = Path("/sys/class/net")
_CAP_IPC_LOCK = 14
_QEMU_ITSELF_MIB = 256  # beside the guest's memory; it grows with the devices


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
    for text in (spec.firmware, spec.kernel, spec.initrd):
        if text and text != UEFI:
            _check_file(name, Path(text))
    # QEMU would make a file of that name, in the memory of no huge page.
    if spec.huge_pages and not _is_hugetlbfs(spec.huge_pages):
        hint = f"mount -t hugetlbfs none {spec.huge_pages}"
        raise InstanceError(name, f"{spec.huge_pages}: no hugetlbfs is mounted there", hint=hint)
    if spec.memory_lock:
        _check_locked_memory(spec)
    if spec.vnc_password_file:
        read_password(spec)  # or it says why not


def missing_paths_of(spec: Spec) -> list[str]:
    """The files, devices and bridges that an instance needs and that are not there, as paths."""
    disks = [disk.path for disk in spec.disks]
    backing = [each.path for disk in spec.disks for each in backing_chain(disk)]
    others = [spec.firmware, spec.kernel, spec.initrd, *spec.cdroms]
    paths = [path for path in (*disks, *backing, *others) if path.startswith("/")]
    return [path for path in paths if not os.path.exists(path)] + missing_bridges_of(spec)


def missing_bridges_of(spec: Spec) -> list[str]:
    """The bridges that an instance needs and that are not there, as paths below */sys*."""
    links = [nic.link for nic in spec.nics if nic.link and nic.mode != Mode.ROUTED]
    return [str(_INTERFACES / link) for link in links if not (_INTERFACES / link).exists()]


def _check_file(name: str, file: Path) -> None:
    if not os.access(file, os.R_OK):
        raise InstanceError(name, f"{file}: can't be read, or is not there")
    if not file.is_file():  # QEMU would wait for a FIFO's writer
        raise InstanceError(name, f"{file}: is no file")


def _check_locked_memory(spec: Spec) -> None:
    """Refuse what QEMU would end at: the kernel's limit of what a process may keep locked.

    Root's own right to lock as much as it likes ends where QEMU becomes another user.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    needed = spec.memory_mib + _QEMU_ITSELF_MIB << 20
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return
    if spec.security_model == SecurityModel.NONE and _may_lock():
        return
    unit = unit_of(spec.name)
    raise InstanceError(
        spec.name,
        f"memory_lock takes {needed >> 20} MiB, and {limit >> 20} MiB may be locked",
        hint=f"systemctl edit {unit}, with [Service] and LimitMEMLOCK=infinity",
    )


def _may_lock() -> bool:
    """Whether this process has CAP_IPC_LOCK (:manpage:`capabilities(7)`)."""
    lines = _STATUS.read_text(errors="replace").splitlines()
    effective = [line.split()[1] for line in lines if line.startswith("CapEff:")]
    return bool(effective) and bool(int(effective[0], 16) >> _CAP_IPC_LOCK & 1)


def _is_hugetlbfs(path: str) -> bool:
    rows = (line.split() for line in _MOUNTS.read_text(errors="surrogateescape").splitlines())
    found = [row[2] for row in rows if row[1] == path.rstrip("/")]
    return bool(found) and found[-1] == "hugetlbfs"
