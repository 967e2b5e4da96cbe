"""A NIC as specs have it. That of a certain instance is a :class:`brine.vm.vif.Vif`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from brine.common import paths
from brine.common.errors import UsageError
from brine.vm.keys import key, slot_key, uuid_key
from brine.vm.values import LARGEST_MTU, MODELS, WHOLE, Mode, address_fault, vm_mac_fault

_GANETIS_LINK = "xen-br0"
_INTERFACES = Path("/sys/class/net")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """A network interface, in Ganeti's words.

    :param uuid: made from the MAC address where it is not given, and that made at random.
    :param link: the bridge; of a routed NIC the routing table, by number or name, empty for the
        main one.
    :param vlan: see :func:`brine.vm.connection.parse_vlans`, and brine-nic(1).
    :param ips: the guest's addresses; a routed NIC has one or more.
    :param filter: whether the guest may send only from its own MAC address, and from *ips* if there
        are any. A routed NIC may send only from *ips* in any case.
    :param vhost: whether the kernel moves the frames, not QEMU.
    :param mtu: in bytes; 0 is the link's.
    :param slot: as a disk's; so is *by_hand*.
    """

    OTHER_WORDS: ClassVar = {
        **dict.fromkeys(("bridge", "network"), "link"),
        **dict.fromkeys(("ip", "address", "addresses"), "ips"),
        "mac_address": "mac",
    }

    uuid: str = uuid_key()
    mac: str = key("", check=vm_mac_fault, tidy=str.lower)
    model: str = key("virtio", choices=tuple(MODELS))
    mode: str = key("bridged", choices=tuple(Mode))
    link: str = key("")
    vlan: str = key("")
    ips: tuple[str, ...] = key((), check=address_fault)
    filter: bool = key(False)
    queues: int = key(1, **WHOLE["queues"])
    vhost: bool = key(False)
    mtu: int = key(0, minimum=0, maximum=LARGEST_MTU)
    slot: int = slot_key()
    by_hand: bool = key(False)

    def as_qemu_has_it(self) -> Nic:
        """It without what only Brine knows of it."""
        return replace(self, by_hand=False)


def usual_wiring(mode: str | None, link: str | None) -> tuple[str, str]:
    """The mode and the link of a NIC, completed from the cluster's ``nicparams``.

    A link belongs to a mode: a NIC with another mode does not get the cluster's link.

    :param mode: the NIC's own; None or empty if it has none. The same holds for *link*.
    :raises UsageError: if Brine does not know the cluster's mode.
    """
    of_cluster = _nicparams()
    usual = of_cluster.get("mode") or Mode.BRIDGED.value
    if not mode and usual not in list(Mode):
        text = f"the cluster's NICs are {usual}, which is no mode"
        raise UsageError(text, hint="choose one with --mode")
    mode = mode or usual
    if not link and mode == usual:
        link = of_cluster.get("link", "")
        # The main routing table has no name.
        link = "" if (mode, link) == (Mode.ROUTED.value, "main") else link
        # A configuration that names no link has Ganeti's own, which few nodes have.
        link = "" if link == _GANETIS_LINK and not (_INTERFACES / link).exists() else link
    return mode, link or ""


def usual_filter(given: bool | None) -> bool:
    """Whether a NIC has a filter, completed from the cluster's ``nicparams``.

    :param given: what the NIC says; None if it says nothing.
    """
    return _nicparams().get("filter") == str(True) if given is None else given


def _nicparams() -> dict[str, str]:
    """The cluster's parameters of NICs, as this node knows them; none without a cluster."""
    try:
        lines = (paths.SSCONF_DIR / "ssconf_nicparams").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    return dict(line.split("=", 1) for line in lines if "=" in line)
