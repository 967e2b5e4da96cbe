"""VLANs of a bridge: on this kernel if it has them, else on Debian's."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from brine.hotplug.net.tap import open_tap
from brine.hotplug.net.wiring import wire
from brine.vm.connection import Vlans
from brine.vm.values import Mode
from brine.vm.vif import Vif
from component.namespaces import (
    Frame,
    Wire,
    bridge,
    ip,
    new_namespace,
    read_frame,
    send_frame,
)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="networks take root")


@pytest.fixture
def node(own_files: None) -> Iterator[None]:
    """A namespace with a bridge that looks at VLANs; a wire to it takes 100, 200 and 300."""
    with new_namespace():
        ip("link add br0 type bridge vlan_filtering 1")
        ip("link add port0 address 02:00:00:00:00:01 type veth peer name wire0")
        ip("link set port0 master br0")
        for vlan in (100, 200, 300):
            bridge(f"vlan add dev port0 vid {vlan}")
        for name in ("br0", "port0", "wire0"):
            ip(f"link set {name} up")
        yield


def vlans(name: str = "t0") -> Vlans:
    (port,) = json.loads(bridge(f"-json vlan show dev {name}"))
    found = {vlan["vlan"]: "PVID" in vlan.get("flags", []) for vlan in port["vlans"]}
    untagged = next((vid for vid in found if found[vid]), None)
    return Vlans(untagged, frozenset(vid for vid in found if vid != untagged))


@contextmanager
def guest(vlan: str) -> Iterator[int]:
    with open_tap("t0") as tap:
        wire(tap, Vif(instance="web1", uuid="0", mode=Mode.BRIDGED, link="br0", vlan=vlan))
        yield tap.queues[0]


@pytest.mark.needs_vlans
def test_an_access_port_has_no_tags_for_the_guest(node: None) -> None:
    with guest("100") as queue:
        assert vlans() == Vlans(100, frozenset())
        seen = Wire("wire0")
        send_frame(queue, b"from the guest")
        assert seen.next() == Frame(b"from the guest", 100)
        # Of another VLAN, without one, and then its own: only the last arrives.
        seen.send(b"other", vlan=200)
        seen.send(b"none")
        seen.send(b"its own", vlan=100)
        assert read_frame(queue) == Frame(b"its own", None)
        seen.close()


@pytest.mark.needs_vlans
def test_a_trunk_has_tags_for_the_guest(node: None) -> None:
    with guest(":100:200") as queue:
        assert vlans() == Vlans(None, frozenset({100, 200}))
        seen = Wire("wire0")
        send_frame(queue, b"untagged")
        send_frame(queue, b"not in it", vlan=300)
        send_frame(queue, b"tagged", vlan=200)
        assert seen.next() == Frame(b"tagged", 200)
        seen.send(b"not for it", vlan=300)
        seen.send(b"for it", vlan=100)
        assert read_frame(queue) == Frame(b"for it", 100)
        seen.close()


@pytest.mark.needs_vlans
def test_a_port_may_have_both(node: None) -> None:
    with guest(".100:200:300") as queue:
        seen = Wire("wire0")
        send_frame(queue, b"one")
        assert seen.next() == Frame(b"one", 100)
        send_frame(queue, b"two", vlan=300)
        assert seen.next() == Frame(b"two", 300)
        seen.close()


@pytest.mark.needs_vlans
def test_without_a_wish_the_bridges_default_stays(node: None) -> None:
    ip("link set br0 type bridge vlan_default_pvid 7")
    with guest(""):
        assert vlans() == Vlans(7, frozenset())


@pytest.mark.needs_vlans
def test_another_wish_replaces_the_first(node: None) -> None:
    with open_tap("t0") as tap:
        for text, wanted in (
            (".100:200", Vlans(100, frozenset({200}))),
            ("300", Vlans(300, frozenset())),
        ):
            wire(tap, Vif(instance="web1", uuid="0", mode=Mode.BRIDGED, link="br0", vlan=text))
            assert vlans() == wanted
        bridge("vlan add dev t0 vid 44")
        wire(tap, Vif(instance="web1", uuid="0", mode=Mode.BRIDGED, link="br0", vlan="300"))
        assert vlans() == Vlans(300, frozenset())
