"""Interfaces in the kernel's own words."""

from __future__ import annotations

import errno
import struct

import pytest

from brine.hotplug.net.netlink import (
    Attribute,
    LinkError,
    LinkSocket,
    Netlink,
    NoLinkError,
    attributes_in,
    link_of,
)


def attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


HEAD = struct.pack("=BxHiII", 0, 1, 7, 1, 0)


def test_a_bridge_of_the_kernels_words() -> None:
    data = attribute(7, b"\1")
    of_kind = attribute(1, b"bridge\0") + attribute(2 | 0x8000, data)
    link = link_of(
        HEAD
        + attribute(Attribute.NAME, b"br0\0")
        + attribute(Attribute.MTU, struct.pack("=I", 9000))
        + attribute(Attribute.ADDRESS, bytes.fromhex("fe0102030405"))
        + attribute(Attribute.INFORMATION | 0x8000, of_kind)
    )
    assert (link.index, link.name, link.kind, link.up) == (7, "br0", "bridge", True)
    assert (link.mtu, link.mac) == (9000, "fe:01:02:03:04:05")
    assert link.vlan_filtering
    assert (link.alias, link.master, link.user, link.persistent) == ("", None, None, False)


def test_what_another_kind_has_under_a_bridges_number_is_not_its() -> None:
    of_kind = attribute(1, b"vxlan\0") + attribute(2, attribute(7, b"\1"))
    said = HEAD + attribute(Attribute.NAME, b"v\0") + attribute(Attribute.INFORMATION, of_kind)
    link = link_of(said)
    assert (link.kind, link.vlan_filtering) == ("vxlan", False)


@pytest.mark.parametrize("data", [b"", b"\1", struct.pack("=HH", 0, 1)])
def test_what_is_no_attribute_is_none(data: bytes) -> None:
    assert attributes_in(data) == {}


def test_the_kernel_is_asked() -> None:
    links = LinkSocket()
    try:
        lo = links.link("lo")
        assert lo in links.links()
        assert (lo.kind, lo.mac) == ("", "00:00:00:00:00:00")
        with pytest.raises(OSError, match="No such device") as caught:
            links.link("none-here")
        assert caught.value.errno == errno.ENODEV
        # It still answers what it is asked.
        assert links.link("lo") == lo
    finally:
        links.close()


def test_what_is_refused_is_told() -> None:
    with Netlink() as netlink:
        assert netlink.find("none-here") is None
        with pytest.raises(NoLinkError, match="there is no interface none-here"):
            netlink.get("none-here")
        with pytest.raises(LinkError, match="interface a-name-that-is-too-long: the kernel says"):
            netlink.find("a-name-that-is-too-long")
