"""Filters of bridged taps: what a guest sends, and what of it others on the bridge see."""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from ipaddress import ip_address

import pytest

from brine.common.errors import UsageError
from brine.common.process import run_bounded
from brine.hotplug.net import records, wiring
from brine.hotplug.net.gc import remove_leftovers
from brine.hotplug.net.netlink import Netlink
from brine.hotplug.net.packet_filter import dropped_packets, filtered_taps
from brine.hotplug.net.records import FilterState, list_taps
from brine.hotplug.net.tap import Tap, open_tap
from brine.hotplug.net.wiring import bring_up, restore_filters, take_down, unwire, wire
from brine.vm.values import Mode
from brine.vm.vif import Vif
from component.namespaces import Namespace, add_script, ip, new_namespace, pumped, talks
from lab.waiting import wait_for

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="networks take root"),
    pytest.mark.both_kernels,
]

MAC, OTHER_MAC = "52:54:00:12:34:56", "52:54:00:99:99:99"
OWN4, OWN6 = "192.0.2.10", "2001:db8::10"
OTHER4, OTHER6 = "192.0.2.66", "2001:db8::66"
LOCAL6, ROUTER6 = "fe80::5054:ff:fe12:3456", "fe80::1"
ALL_NODES, ALL_ROUTERS = "ff02::1", "ff02::2"
OPEN = Vif(instance="web1", uuid="0", mode=Mode.BRIDGED, link="br0", mac=MAC, filter=True)
BOTH = replace(OPEN, ips=(OWN4, OWN6))
ONLY4 = replace(OPEN, ips=(OWN4,))
ONLY6 = replace(OPEN, ips=(OWN6,))
VNET_HEADER = bytes(10)

ARP, RARP, IPV4, IPV6 = 0x0806, 0x8035, 0x0800, 0x86DD
REQUEST, REPLY = 1, 2


@pytest.fixture(autouse=True)
def node(own_files: None) -> Iterator[Namespace]:
    """A namespace with a bridge, and a wire to it: what is sent to `wire0` comes out of it."""
    with new_namespace() as node:
        ip("link add br0 type bridge")
        ip("link add port0 address 02:00:00:00:00:01 type veth peer name wire0")
        ip("link set port0 master br0")
        for name in ("br0", "port0", "wire0"):
            ip(f"link set {name} up")
        yield node


# Frames.


def frame(kind: int, payload: bytes, *, mac: str = MAC, tags: tuple[int, ...] = ()) -> bytes:
    tagged = b"".join(struct.pack("!HH", 0x8100, tag) for tag in tags)
    return b"\xff" * 6 + packed(mac) + tagged + struct.pack("!H", kind) + payload.ljust(46, b"\0")


def packed(mac: str) -> bytes:
    return bytes.fromhex(mac.replace(":", ""))


def arp(operation: int, source: str, target: str = "192.0.2.1", *, mac: str = MAC) -> bytes:
    head = struct.pack("!HHBBH", 1, IPV4, 6, 4, operation)
    ends = packed(mac) + ip_address(source).packed + bytes(6) + ip_address(target).packed
    return head + ends


def udp(source: str, target: str, ports: tuple[int, int] = (4000, 4001)) -> bytes:
    """An IP packet with a datagram."""
    # As long as a frame must be: where iptables sees what bridges forward, padding is cut off.
    datagram = struct.pack("!HHHH", *ports, 32, 0) + b"data of 24 characters..."
    ends = ip_address(source).packed + ip_address(target).packed
    if len(ends) == 8:
        head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(datagram), 0, 0, 64, 17, 0)
        return _with_sum(head + ends) + datagram
    return struct.pack("!IHBB", 6 << 28, len(datagram), 17, 64) + ends + datagram


def _with_sum(header: bytes) -> bytes:
    total = sum(struct.unpack(f"!{len(header) // 2}H", header))
    total = (total & 0xFFFF) + (total >> 16)
    total = (total & 0xFFFF) + (total >> 16)
    return header[:10] + struct.pack("!H", ~total & 0xFFFF) + header[12:]


def discovery(
    kind: int,
    source: str,
    *,
    about: str = "",
    options: bytes = b"",
    target: str = ALL_NODES,
    extension: bool = False,
) -> bytes:
    """A message of neighbour discovery. Its checksum is 0: a filter does not look at it."""
    body = struct.pack("!BBHI", kind, 0, 0, 0) + (ip_address(about).packed if about else b"")
    body += options
    first = 58
    if extension:  # options for the destination: padding
        body, first = struct.pack("!BBBB4x", 58, 0, 1, 4) + body, 60
    ends = ip_address(source).packed + ip_address(target).packed
    return struct.pack("!IHBB", 6 << 28, len(body), first, 255) + ends + body


def fragment(packet: bytes, *, offset: int = 0, length: int | None = None) -> bytes:
    """A fragment of an IPv6 packet: so many bytes of what follows its header."""
    data = packet[40:][offset : None if length is None else offset + length]
    has_more = offset + len(data) < len(packet) - 40
    header = struct.pack("!BBHI", packet[6], 0, offset | has_more, 7)
    first = packet[:4] + struct.pack("!HB", len(header) + len(data), 44) + packet[7:40]
    return first + header + data


def option(kind: int, mac: str = MAC) -> bytes:
    return bytes([kind, 1]) + packed(mac)


# What passes.


class Bridge:
    """What arrives at the bridge's other port."""

    def __init__(self, interface: str = "wire0") -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        self._socket.bind((interface, 0))
        self._socket.settimeout(10)
        self._number = itertools.count(1)

    def __enter__(self) -> Bridge:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def sees(self, tap: Tap, sent: bytes, nic: Vif) -> bool:
        """Whether a frame that a guest sends arrives here, before the guest's next one."""
        number = next(self._number)
        if any(":" not in address for address in nic.ips) or not nic.ips:
            last = frame(ARP, arp(REQUEST, OWN4, f"10.0.{number >> 8}.{number & 255}"))
        else:
            last = frame(IPV6, udp(OWN6, ALL_NODES, (5000, number)))
        last = last[:6] + packed(nic.mac) + last[12:]
        last = last.replace(packed(MAC), packed(nic.mac))
        for one in (sent, last):
            os.write(tap.queues[0], VNET_HEADER + one)
        found = False
        while (received := self._socket.recv(2000)) != last:
            # The kernel hands over a VLAN tag beside the frame.
            found = found or received in (sent, without_tag(sent))
        return found


def without_tag(one: bytes) -> bytes:
    """A frame without its first VLAN tag."""
    return one[:12] + one[16:] if one[12:14] == b"\x81\x00" else one


@contextmanager
def guest(nic: Vif) -> Iterator[Tap]:
    with open_tap(nic.tap_name()) as tap:
        wire(tap, nic)
        try:
            yield tap
        finally:
            unwire(tap)


ALWAYS = {
    "an ARP request": frame(ARP, arp(REQUEST, OWN4)),
    "an ARP reply": frame(ARP, arp(REPLY, OWN4)),
    "a probe for its address": frame(ARP, arp(REQUEST, "0.0.0.0", OWN4)),
    "IPv4": frame(IPV4, udp(OWN4, OTHER4)),
    "a DHCP request": frame(IPV4, udp("0.0.0.0", "255.255.255.255", (68, 67))),
    "IPv6": frame(IPV6, udp(OWN6, OTHER6)),
    "a fragment of IPv6": frame(IPV6, fragment(udp(OWN6, OTHER6), length=8)),
    "the next one": frame(IPV6, fragment(udp(OWN6, OTHER6), offset=8)),
    "IPv6 within the link": frame(IPV6, udp(LOCAL6, "ff02::1:2", (546, 547))),
    "a probe for its IPv6 address": frame(IPV6, discovery(135, "::", about=OWN6)),
    "a probe with a nonce": frame(
        IPV6, discovery(135, "::", about=LOCAL6, options=b"\x0e\x01nonce!")
    ),
    "a solicitation": frame(
        IPV6, discovery(135, OWN6, about=OTHER6, options=option(1), target="ff02::1:ff00:66")
    ),
    "a question for routers": frame(
        IPV6, discovery(133, LOCAL6, options=option(1), target=ALL_ROUTERS)
    ),
    "one without a MAC address": frame(IPV6, discovery(133, "::", target=ALL_ROUTERS)),
    "an advertisement": frame(IPV6, discovery(136, OWN6, about=OWN6, options=option(2))),
    "one of the link's address": frame(IPV6, discovery(136, LOCAL6, about=LOCAL6)),
    "QEMU's announcement": frame(RARP, arp(3, "0.0.0.0", "0.0.0.0")),
    "a frame in a VLAN": frame(IPV4, udp(OWN4, OTHER4), tags=(7,)),
}
"""What passes if it has both addresses, or declares none."""

NEVER = {
    "another MAC address": frame(IPV4, udp(OWN4, OTHER4), mac=OTHER_MAC),
    "another MAC address in ARP": frame(ARP, arp(REPLY, OWN4, mac=OTHER_MAC)),
    "another MAC address in both": frame(ARP, arp(REPLY, OWN4, mac=OTHER_MAC), mac=OTHER_MAC),
    "another MAC address in a solicitation": frame(
        IPV6, discovery(135, OWN6, about=OTHER6, options=option(1, OTHER_MAC))
    ),
    "another MAC address in an advertisement": frame(
        IPV6, discovery(136, OWN6, about=OWN6, options=option(2, OTHER_MAC))
    ),
    "another MAC address behind a first one": frame(
        IPV6, discovery(136, OWN6, about=OWN6, options=option(2) + option(2, OTHER_MAC))
    ),
    "an advertisement behind a header": frame(
        IPV6, discovery(136, OWN6, about=OWN6, options=option(2, OTHER_MAC), extension=True)
    ),
    "another MAC address in QEMU's announcement": frame(
        RARP, arp(3, "0.0.0.0", "0.0.0.0", mac=OTHER_MAC)
    ),
    "a router's advertisement": frame(IPV6, discovery(134, LOCAL6, options=bytes(8) + option(1))),
    "one behind a header": frame(
        IPV6, discovery(134, LOCAL6, options=bytes(8) + option(1), extension=True)
    ),
    "one behind a header, in fragments": frame(
        IPV6,
        fragment(discovery(134, LOCAL6, options=bytes(8) + option(1), extension=True), length=8),
    ),
    "a redirect": frame(IPV6, discovery(137, LOCAL6, about=OWN6)),
    "a DHCP server's answer": frame(IPV4, udp(OWN4, "255.255.255.255", (67, 68))),
    "a DHCPv6 server's answer": frame(IPV6, udp(LOCAL6, OTHER6, (547, 546))),
    "another protocol": frame(0x88CC, b"LLDP"),
    "a bridge's message": frame(38, b"\x42\x42\x03" + bytes(35)),
    "two VLAN tags": frame(IPV4, udp(OWN4, OTHER4), tags=(7, 8)),
    "another MAC address in a VLAN": frame(
        ARP, arp(REPLY, OWN4, mac=OTHER_MAC), mac=MAC, tags=(7,)
    ),
}

OF_OTHERS = {
    "ARP": frame(ARP, arp(REPLY, OTHER4)),
    "an ARP probe": frame(ARP, arp(REQUEST, "0.0.0.0", OTHER4)),
    "IPv4": frame(IPV4, udp(OTHER4, OWN4)),
    "IPv4 in a VLAN": frame(IPV4, udp(OTHER4, OWN4), tags=(7,)),
    "IPv6": frame(IPV6, udp(OTHER6, OWN6)),
    "IPv6 of the router": frame(IPV6, udp(ROUTER6, ALL_NODES)),
    "an advertisement": frame(IPV6, discovery(136, OWN6, about=OTHER6, options=option(2))),
    "an advertisement of the router": frame(
        IPV6, discovery(136, LOCAL6, about=ROUTER6, options=option(2))
    ),
    "an advertisement from another": frame(IPV6, discovery(136, OTHER6, about=OWN6)),
    "an IPv6 probe": frame(IPV6, discovery(135, "::", about=OTHER6)),
}
"""What passes only if it declares no addresses."""


@pytest.mark.parametrize("nic", [OPEN, BOTH], ids=["no addresses", "addresses"])
def test_a_guest_sends_as_itself_alone(nic: Vif) -> None:
    passes = {**ALWAYS, **(OF_OTHERS if nic is OPEN else {})}
    wrong = []
    with guest(nic) as tap, Bridge() as bridge:
        before = dropped_packets()[tap.name]
        for what, sent in {**ALWAYS, **OF_OTHERS}.items():
            if bridge.sees(tap, sent, nic) != (what in passes and sent == passes[what]):
                wrong.append(what)
        for what, sent in NEVER.items():
            if bridge.sees(tap, sent, nic):
                wrong.append(what)
        assert wrong == []
        expected = len(NEVER) + (0 if nic is OPEN else len(OF_OTHERS))
        assert dropped_packets()[tap.name] - before == expected


@pytest.mark.parametrize("nic", [ONLY4, ONLY6], ids=["IPv4", "IPv6"])
def test_addresses_of_one_version_are_all_that_there_are(nic: Vif) -> None:
    with guest(nic) as tap, Bridge() as bridge:
        assert bridge.sees(tap, ALWAYS["IPv4"], nic) == (nic is ONLY4)
        assert bridge.sees(tap, ALWAYS["an ARP request"], nic) == (nic is ONLY4)
        assert bridge.sees(tap, ALWAYS["a DHCP request"], nic) == (nic is ONLY4)
        assert bridge.sees(tap, ALWAYS["IPv6"], nic) == (nic is ONLY6)
        assert bridge.sees(tap, ALWAYS["a solicitation"], nic) == (nic is ONLY6)
        assert bridge.sees(tap, ALWAYS["an advertisement"], nic) == (nic is ONLY6)


def test_a_declared_address_of_the_link_takes_the_usual_ones_place() -> None:
    nic = replace(ONLY6, ips=(OWN6, "fe80::abcd"))
    with guest(nic) as tap, Bridge() as bridge:
        assert bridge.sees(tap, frame(IPV6, udp("fe80::abcd", ALL_NODES)), nic)
        assert bridge.sees(tap, frame(IPV6, discovery(136, OWN6, about="fe80::abcd")), nic)
        assert not bridge.sees(tap, frame(IPV6, udp(LOCAL6, ALL_NODES)), nic)


def test_without_a_filter_everything_passes() -> None:
    nic = replace(BOTH, filter=False)
    with guest(nic) as tap, Bridge() as bridge:
        sent = {**NEVER, **OF_OTHERS}
        assert [what for what in sent if not bridge.sees(tap, sent[what], nic)] == []
        assert filtered_taps() == set()


def test_several_nics_on_a_bridge_have_each_its_own() -> None:
    others = replace(OPEN, instance="db1", mac=OTHER_MAC)
    free = replace(OPEN, instance="dev1", mac="52:54:00:00:00:01", filter=False)
    own, false = ALWAYS["IPv4"], NEVER["another MAC address"]
    with Bridge() as bridge, guest(OPEN) as web:
        assert not bridge.sees(web, false, OPEN)
        with guest(others) as db, guest(free) as dev:
            assert filtered_taps() == {web.name, db.name}
            assert dropped_packets() == {web.name: 1, db.name: 0}
            assert bridge.sees(db, false, others)
            assert not bridge.sees(db, own, others)
            assert bridge.sees(dev, own, free)
            assert bridge.sees(web, own, OPEN)
            assert dropped_packets() == {web.name: 1, db.name: 1}
        assert not bridge.sees(web, false, OPEN)
        assert dropped_packets() == {web.name: 2}


def test_a_bridge_learns_no_false_address() -> None:
    with guest(OPEN) as tap, Bridge() as bridge:
        assert not bridge.sees(tap, NEVER["another MAC address"], OPEN)
        known = json.loads(ip("-json fdb show br br0", program="bridge"))
        macs = [one["mac"] for one in known if one["ifname"] == tap.name]
        assert MAC in macs
        assert OTHER_MAC not in macs


def test_another_mac_address_takes_the_firsts_place() -> None:
    new = replace(OPEN, mac=OTHER_MAC)
    with guest(OPEN) as tap, Bridge() as bridge:
        assert wire(tap, new).changed
        assert not wire(tap, new).changed
        assert bridge.sees(tap, NEVER["another MAC address"], new)
        assert not bridge.sees(tap, ALWAYS["IPv4"], new)
        assert wire(tap, replace(new, filter=False)).changed
        assert filtered_taps() == set()


def test_the_filter_is_there_before_the_tap_is(tmp_path_factory: pytest.TempPathFactory) -> None:
    """While a script runs after the wiring, and if the wiring is interrupted there."""
    seen = tmp_path_factory.mktemp("seen") / "up"
    said = f'nft list table netdev "brine-$INTERFACE" >{seen}'
    script = add_script("50-look", f'[ "$1" != up ] || {{ {said}; kill -KILL $PPID; }}')
    with open_tap(OPEN.tap_name()) as tap:
        child = os.fork()
        if not child:
            try:
                wire(tap, OPEN)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        wait_for("the script", seen.exists)
        script.unlink()
        assert filtered_taps() == {tap.name}
        assert MAC in seen.read_text()
        with Bridge() as bridge:
            assert not bridge.sees(tap, NEVER["another MAC address"], OPEN)
            assert wire(tap, OPEN).changed
            assert not bridge.sees(tap, NEVER["another MAC address"], OPEN)


def test_a_tap_whose_filter_fails_does_not_go_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brine.hotplug.net.packet_filter.SEARCH_PATH", "/nowhere")
    with open_tap(OPEN.tap_name()) as tap, Netlink() as netlink:
        with pytest.raises(Exception, match="nft is not there"):
            wire(tap, OPEN)
        shown = ip(f"-o link show {tap.name}")
        assert "master" not in shown
        assert "state UP" not in shown
        assert netlink.get(tap.name)
    assert records.load_all() == {}


def test_rules_of_the_operator_stay() -> None:
    table = "table netdev own {\nchain c {\n}\n}\ntable bridge brine-own {\nchain c {\n}\n}\n"
    subprocess.run(["nft", "-f", "-"], input=table, text=True, check=True)
    before = rules()
    with guest(OPEN):
        assert "52:54:00:12:34:56" in rules()
    assert rules() == before


def rules() -> str:
    done = run_bounded(["nft", "list", "ruleset"], timeout_s=60, environment=dict(os.environ))
    return done.stdout


def test_a_flushed_filter_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    with guest(BOTH) as tap, Bridge() as bridge, Netlink() as netlink:
        false = OF_OTHERS["IPv4"]
        assert not bridge.sees(tap, false, BOTH)
        (shown,) = list_taps()
        assert (shown.filter, shown.drops) == (FilterState.ON, 1)
        with caplog.at_level(logging.WARNING):
            assert restore_filters(netlink) == []
            assert caplog.text == ""
            subprocess.run(["nft", "flush", "ruleset"], check=True)
            assert bridge.sees(tap, false, BOTH)
            (shown,) = list_taps()
            assert (shown.filter, shown.drops) == (FilterState.MISSING, None)
            assert restore_filters(netlink) == [tap.name]
        assert "its filter was gone" in caplog.text
        assert not bridge.sees(tap, false, BOTH)
        subprocess.run(["nft", "flush", "ruleset"], check=True)
        remove_leftovers()
        assert not bridge.sees(tap, false, BOTH)


def test_a_persistent_tap_keeps_its_filter_until_it_is_down() -> None:
    bring_up(OPEN)
    for _ in range(2):  # a QEMU, and the next one
        with open_tap(OPEN.tap_name(), reuse=True) as tap, Bridge() as bridge:
            assert bridge.sees(tap, ALWAYS["IPv4"], OPEN)
            assert not bridge.sees(tap, NEVER["another MAC address"], OPEN)
    assert take_down(OPEN.tap_name())
    assert rules() == ""


def test_a_killed_qemus_filter_is_removed() -> None:
    with open_tap(OPEN.tap_name()) as tap:
        wire(tap, OPEN)
    remove_leftovers()
    assert rules() == ""


def test_a_filter_needs_the_mac_address_that_it_goes_by() -> None:
    with open_tap(OPEN.tap_name()) as tap:
        with pytest.raises(UsageError, match="MAC address"):
            wire(tap, replace(OPEN, mac=""))
        assert wiring.unwire(tap) is False


# Real stacks of a network.


@contextmanager
def stack_of(nic: Vif, node: Namespace) -> Iterator[tuple[Namespace, Namespace]]:
    """A guest, and a host that is on its bridge."""
    with ExitStack() as stack:
        host, inside = Namespace(), Namespace()
        stack.callback(host.close)
        stack.callback(inside.close)
        ip(f"link set wire0 netns {host.path}")
        with host.entered():
            ip("address add 192.0.2.1/24 dev wire0")
            ip("address add 2001:db8::1/64 dev wire0 nodad")
            ip("link set wire0 up")
        tap = stack.enter_context(guest(nic))
        with inside.entered():
            eth0 = stack.enter_context(open_tap("eth0"))
            ip(f"link set eth0 address {nic.mac}")
            ip("link set eth0 up")
            ip(f"address add {OWN4}/24 dev eth0")
            ip(f"address add {OTHER4}/24 dev eth0")
            ip(f"address add {OWN6}/64 dev eth0")
            ip(f"address add {OTHER6}/64 dev eth0")
        stack.enter_context(pumped(tap.queues[0], eth0.queues[0]))
        yield inside, host


@pytest.mark.parametrize("nic", [OPEN, BOTH], ids=["no addresses", "addresses"])
def test_a_guest_and_a_host_talk(node: Namespace, nic: Vif) -> None:
    with stack_of(nic, node) as (inside, host):
        # The kernel probes for the IPv6 addresses first.
        wait_for("the end of the probes", lambda: "tentative" not in inside.ip("-6 address show"))
        assert talks(inside, host, "192.0.2.1", own=OWN4) == OWN4
        assert talks(host, inside, OWN4) == "192.0.2.1"
        assert talks(inside, host, "2001:db8::1", own=OWN6) == OWN6
        host.ip("neigh flush all")
        assert talks(host, inside, OWN6) == "2001:db8::1"
        if nic is BOTH:
            for own, there in ((OTHER4, "192.0.2.1"), (OTHER6, "2001:db8::1")):
                assert not reaches(inside, host, own, there)
            return
        assert talks(inside, host, "192.0.2.1", own=OTHER4) == OTHER4
        assert talks(inside, host, "2001:db8::1", own=OTHER6) == OTHER6
        inside.ip(f"link set eth0 address {OTHER_MAC}")
        assert not reaches(inside, host, OWN4, "192.0.2.1")


def reaches(source: Namespace, target: Namespace, own: str, address: str) -> bool:
    """Whether a datagram from an address arrives, of those that are sent until two from the node's
    own side have passed the same way."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with target.entered():
        there = socket.socket(family, socket.SOCK_DGRAM)
    with source.entered():
        here = socket.socket(family, socket.SOCK_DGRAM)
    dropped = next(iter(dropped_packets().values()))
    with there, here:
        there.bind((address, 7008))
        there.setblocking(False)
        here.bind((own, 0))
        here.sendto(b"false", (address, 7008))
        wait_for("a dropped packet", lambda: next(iter(dropped_packets().values())) > dropped)
        try:
            return bool(there.recv(100))
        except BlockingIOError:
            return False
