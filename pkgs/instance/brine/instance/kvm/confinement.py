"""The confinement of QEMU: a user, capabilities, and the limits of the control group."""

from __future__ import annotations

import contextlib
import grp
import pwd
from contextlib import ExitStack
from pathlib import Path

from brine.common.privileges import Capability, keep_for_programs, keep_only
from brine.common.uids import parse_uid_pool, request_unused_uid
from brine.instance.store import InstanceError
from brine.instance.unit import UnitError, set_properties
from brine.vm.spec import SecurityModel, Spec
from brine.vm.unit_name import unit_of

# What preparing a QEMU needs; the unit has more, for Xen.
_RUNNERS = tuple(set(Capability) - {Capability.SYS_ADMIN})
# What QEMU needs to become another user, in another root directory.
_TO_BECOME_ANOTHER = (Capability.SETUID, Capability.SETGID, Capability.SYS_CHROOT)

_SET_BEFORE = Path("/run/systemd/system.control")

_MIGHTY_GROUPS = frozenset(
    {
        *("adm", "brine", "brine-kvmd", "dialout", "disk", "docker", "incus-admin", "input"),
        *("kmem", "libvirt", "lxd", "root", "shadow", "sudo", "systemd-journal", "tape", "tty"),
        "wheel",
    }
)
"""Groups that own devices, secrets or other VMs, or can become root."""


def confine_runner() -> None:
    """Give up the capabilities that preparing a QEMU does not need."""
    keep_for_programs(*_RUNNERS)
    keep_only(*_RUNNERS)


def confine_qemu(spec: Spec) -> None:
    """Leave to QEMU only the capabilities that it needs to become the guest's own user. A QEMU that
    stays root keeps those of this process."""
    if spec.security_model != SecurityModel.NONE:
        keep_for_programs(*_TO_BECOME_ANOTHER)


def set_limits(spec: Spec) -> None:
    """Set the limits of this process's unit, until the next boot."""
    addresses = _addresses_of(spec)
    limits = (spec.memory_max_mib, spec.cpu_limit_percent, spec.cpu_weight, spec.io_weight)
    were_set = (_SET_BEFORE / f"{unit_of(spec.name)}.d").exists()
    if not (any(limits) or addresses or were_set):
        return
    memory_max = f"{spec.memory_max_mib}M" if spec.memory_max_mib else "infinity"
    cpu_quota = f"{spec.cpu_limit_percent}%" if spec.cpu_limit_percent else ""
    properties = [  # systemd.resource-control(5)
        f"MemoryMax={memory_max}",
        f"MemorySwapMax={memory_max}",
        f"CPUQuota={cpu_quota}",
        f"CPUWeight={spec.cpu_weight or ''}",
        f"IOWeight={spec.io_weight or ''}",
        "IPAddressAllow=",  # a list that grows, so it is emptied first
    ]
    if addresses:
        properties.append(f"IPAddressAllow={addresses}")
    try:
        set_properties(spec.name, properties)
    except UnitError as error:
        raise InstanceError(spec.name, f"its limits can't be set: {error}") from error


def _addresses_of(spec: Spec) -> str:
    """The IP addresses that QEMU may talk with, as systemd writes them: those of VNC clients.

    The guest's own packets pass through its taps and do not count as QEMU's. With extra arguments
    all addresses are allowed, as their effect is not known.
    """
    if spec.extra_arguments:
        return "any"
    if not spec.vnc_bind or spec.vnc_bind.startswith("/"):
        return ""
    from ipaddress import ip_address  # few have VNC

    return "localhost" if ip_address(spec.vnc_bind).is_loopback else "any"


def user_of(spec: Spec, stack: ExitStack) -> tuple[int, int] | None:
    """The ids of the user and the group that QEMU becomes; None if it stays root."""
    if spec.security_model == SecurityModel.NONE:
        return None
    if spec.security_model == SecurityModel.USER:
        try:
            user = pwd.getpwnam(spec.security_user)
        except KeyError:
            hint = f"useradd --system {spec.security_user}"
            text = f"there is no user {spec.security_user}"
            raise InstanceError(spec.name, text, hint=hint) from None
        _refuse_mighty(spec.name, user)
        return user.pw_uid, user.pw_gid
    uid = stack.enter_context(request_unused_uid(_uid_pool()))
    uid.hand_over()
    return uid.uid, uid.uid


def _refuse_mighty(name: str, user: pwd.struct_passwd) -> None:
    """Refuse a user with privileges that a guest must not get by breaking out. QEMU gets the user's
    primary group only."""
    if user.pw_uid == 0:
        raise InstanceError(name, "security_user must not be root")
    group = "root" if user.pw_gid == 0 else ""
    with contextlib.suppress(KeyError):  # a group without a name owns nothing that counts
        group = group or grp.getgrgid(user.pw_gid).gr_name
    if group in _MIGHTY_GROUPS:
        text = f"security_user must not be of the group {group}, as {user.pw_name} is"
        raise InstanceError(name, text, hint=f"useradd --system --user-group {name}")


def _uid_pool() -> list[list[int]]:
    """The node's own pool, or else the cluster's, or else the default pool."""
    from brine.config.ssconf import Ssconf, SsconfError  # few starts need these
    from brine.instance.settings import DEFAULT_UID_POOL, load_uid_pool

    if pool := load_uid_pool():
        return pool
    with contextlib.suppress(SsconfError):  # it is a node of no cluster
        if pool := Ssconf().uid_pool():
            return pool
    return parse_uid_pool(DEFAULT_UID_POOL)
