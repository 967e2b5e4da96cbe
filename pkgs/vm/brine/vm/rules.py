"""The rules between values of a VM.

A spec is checked by these, and so is the cluster's configuration, of which specs are made.
Those of NICs are in :mod:`brine.vm.connection`, and those of slots in :mod:`brine.vm.slots`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from brine.vm.values import CACHE_MODES, SMALLEST_VNC_PORT

KeyFault = tuple[str, str, str | None]
"""The key with a mistake, in a spec's words, a description, and a hint."""


def topology_fault(vcpus: int, sockets: int, cores: int, threads: int) -> str | None:
    """Why a machine can't have *vcpus* processors in that many of each; 0 is not given."""
    given = [number for number in (sockets, cores, threads) if number]
    product = prod(given)
    if len(given) == 3 and product != vcpus:
        return f"sockets, cores and threads make {product} processors, not {vcpus}"
    return f"can't be divided among {product}" if vcpus % product else None


def disk_faults(*, interface: str, cache: str, aio: str, is_read_only: bool) -> Iterator[KeyFault]:
    """The mistakes of a disk, by its keys in a spec."""
    _, direct, _ = CACHE_MODES[cache]
    if aio == "native" and not direct:
        text = f"native needs a cache mode that is direct, not {cache}"
        yield "aio", text, "choose cache none or directsync, or aio threads"
    if is_read_only and interface == "ide":
        hint = "give it the interface virtio or scsi"
        yield "read_only", "a disk of the interface ide can't be", hint


def security_faults(model: str, user: str) -> Iterator[KeyFault]:
    """The mistakes of a security model with the user of a VM, who may be empty."""
    key = "security_user"
    if model == "user" and not user:
        yield key, "the security model user needs it", None
    if user == "root":
        hint = 'name another user; or leave it out with "security_model": "none", which is root'
        yield key, "must not be root", hint
    if model != "user" and user:
        yield key, f"is not used by the security model {model}", None


def xen_nic_faults(*, mode: str, link: str) -> Iterator[KeyFault]:
    """The mistakes of a domain's NIC, by its keys in a spec: Xen's own scripts connect it."""
    if mode == "routed" and link:
        hint = "leave link out: Xen's vif-route routes in the main table"
        yield "link", f"{link} can't be the routing table of a domain's NIC", hint


def vnc_listener(bind: str, name: str) -> str:
    """Where VNC of a VM listens, by the cluster's configuration: a socket in a folder that ends
    with a slash has the VM's name."""
    return f"{bind}{name}.vnc" if bind.endswith("/") else bind


def vnc_port_fault(port: int) -> str | None:
    """Why VNC can't have that port; 0 is none, and right."""
    if 0 < port < SMALLEST_VNC_PORT:
        return f"must be {SMALLEST_VNC_PORT} or more, but is {port}"
    return None
