"""A tap as a port of a bridge of the kernel's, with or without VLANs."""

from __future__ import annotations

from brine.common.errors import BrineError
from brine.hotplug.links import Netlink
from brine.hotplug.network import Link
from brine.hotplug.sysctl import set_interface
from brine.hotplug.vlans import Vlans


class BridgeError(BrineError):
    """A bridge that a NIC can't be connected to."""


def connect_to_bridge(netlink: Netlink, tap: Link, name: str, vlans: Vlans | None) -> None:
    """Make a tap a port of a bridge, in these VLANs.

    :param tap: as it is now.
    :param vlans: None leaves it in the one that the bridge gives its ports.
    :raises BridgeError: if there is no such bridge, or it does not look at VLANs and should.
    """
    bridge = find_bridge(netlink, name, vlans)
    # The node has nothing to say on a port: its own neighbour discovery would reach the guest.
    set_interface("ipv6", tap.name, "disable_ipv6", 1, required=False)
    netlink.set_master(tap, bridge)
    if vlans:
        netlink.set_vlans(tap, vlans)


def find_bridge(netlink: Netlink, name: str, vlans: Vlans | None) -> Link:
    """A bridge for a NIC in these VLANs.

    :raises BridgeError: if there is no such bridge, or it does not look at VLANs and should.
    """
    bridge = netlink.find(name)
    if bridge is None:
        raise BridgeError(f"there is no bridge {name}", hint=f"ip link add {name} type bridge")
    if bridge.kind != "bridge":
        hint = "for a bridge of Open vSwitch the mode is openvswitch"
        raise BridgeError(f"{name} is no bridge", hint=hint)
    if vlans and not bridge.vlan_filtering:
        raise BridgeError(
            f"bridge {name} takes no notice of VLANs",
            hint=f"ip link set {name} type bridge vlan_filtering 1",
        )
    return bridge
