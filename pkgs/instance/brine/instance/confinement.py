"""The confinement of an instance: limits of its control group, capabilities, locked memory."""

from __future__ import annotations

import contextlib
import resource
from ipaddress import ip_address
from pathlib import Path

from brine.common.peer import unit_of
from brine.common.privileges import Capability, keep_for_programs, keep_only
from brine.instance.spec import SecurityModel, Spec
from brine.instance.store import InstanceError
from brine.instance.unit import UnitError, set_properties

# What preparing a QEMU needs; the unit has more, for Xen.
_RUNNERS = tuple(set(Capability) - {Capability.SYS_ADMIN})
# What QEMU needs to become the guest's own user, in the guest's own root directory.
_TO_BECOME_ANOTHER = (Capability.SETUID, Capability.SETGID, Capability.SYS_CHROOT)

_KEYS = ("memory_max_mib", "cpu_limit_percent", "cpu_weight", "io_weight")
_SET_BEFORE = Path("/run/systemd/system.control")


def properties_of(spec: Spec) -> list[str]:
    """The unit's properties for the limits of a spec (systemd.resource-control(5))."""
    wanted = {
        "MemoryMax": f"{spec.memory_max_mib}M" if spec.memory_max_mib else "infinity",
        "CPUQuota": f"{spec.cpu_limit_percent}%" if spec.cpu_limit_percent else "",
        "CPUWeight": str(spec.cpu_weight or ""),
        "IOWeight": str(spec.io_weight or ""),
    }
    settings = [f"{name}={value}" for name, value in wanted.items()]
    # The property is a list that grows, so it is emptied first.
    settings.append("IPAddressAllow=")
    if allowed := addresses_of(spec):
        settings.append(f"IPAddressAllow={allowed}")
    return settings


def addresses_of(spec: Spec) -> str:
    """The IP addresses that QEMU may talk with, as systemd writes them: those of VNC clients.

    The guest's own packets pass through its taps and do not count as QEMU's. With extra arguments
    all addresses are allowed, as their effect is not known.
    """
    if spec.extra_arguments:
        return "any"
    if not spec.vnc_bind or spec.vnc_bind.startswith("/"):
        return ""
    return "localhost" if ip_address(spec.vnc_bind).is_loopback else "any"


def confine_runner() -> None:
    """Give up the capabilities that preparing a QEMU does not need.

    :raises PrivilegeError: if the kernel refuses.
    """
    keep_for_programs(*_RUNNERS)
    keep_only(*_RUNNERS)


def confine_qemu(spec: Spec) -> None:
    """Leave to QEMU only the capabilities that it needs to become the guest's own user. A QEMU that
    stays root keeps those of this process.

    :raises PrivilegeError: if the kernel refuses.
    """
    if spec.security_model != SecurityModel.NONE:
        keep_for_programs(*_TO_BECOME_ANOTHER)


def allow_locked_memory(spec: Spec) -> None:
    """Let QEMU lock all of its memory if the spec wants it: the kernel's limit is 8 MiB."""
    if spec.memory_lock:
        with contextlib.suppress(OSError, ValueError):  # what there is may do
            unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.setrlimit(resource.RLIMIT_MEMLOCK, unlimited)


def set_limits(spec: Spec) -> None:
    """Set the limits of this process's unit, until the next boot.

    :raises InstanceError: if that fails.
    """
    has_limits = any(getattr(spec, name) for name in _KEYS) or addresses_of(spec)
    if not has_limits and not (_SET_BEFORE / f"{unit_of(spec.name)}.d").exists():
        return
    try:
        set_properties(spec.name, properties_of(spec))
    except UnitError as error:
        raise InstanceError(spec.name, f"its limits can't be set: {error}") from error
