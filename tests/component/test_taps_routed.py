"""Routed NICs: a guest, its node, and a host of the node's network, each a real network stack."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from brine.common import paths
from brine.common.errors import BrineError
from brine.hotplug.net import records
from brine.hotplug.net.announce import announce
from brine.hotplug.net.gc import LeftoverKind, remove_leftovers
from brine.hotplug.net.netlink import Netlink
from brine.hotplug.net.packet_filter import filtered_taps, remove_filter
from brine.hotplug.net.tap import TapError, open_tap
from brine.hotplug.net.wiring import unwire, wire
from brine.vm.values import Mode
from brine.vm.vif import Vif
from component.namespaces import Namespace, ip, new_namespace, pumped, talks
from lab.waiting import wait_for

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="networks take root"),
    pytest.mark.both_kernels,
]

GUEST4, GUEST6 = "192.0.2.10", "2001:db8:0:1::10"
NODE4, NODE6 = "192.0.2.1", "2001:db8:0:1::1"
HOST4, HOST6 = "192.0.2.2", "2001:db8:0:1::2"
FAR4 = "198.51.100.2"
WEB = Vif(instance="web1", uuid="0", mode=Mode.ROUTED, ips=(GUEST4, GUEST6))


@dataclass
class Networks:
    """The node, which the test is in, and a host that is on the node's uplink."""

    node: Namespace
    host: Namespace


@pytest.fixture
def networks(own_files: None) -> Iterator[Networks]:
    host = Namespace()
    with new_namespace() as node:
        ip(f"link add uplink type veth peer name lan netns {host.path}")
        ip(f"address add {NODE4}/24 dev uplink")
        ip(f"address add {NODE6}/64 dev uplink nodad")
        ip("link set uplink up")
        Path("/proc/sys/net/ipv6/conf/all/forwarding").write_text("1")
        with host.entered():
            ip(f"address add {HOST4}/24 dev lan")
            ip(f"address add {FAR4}/32 dev lan")
            ip(f"address add {HOST6}/64 dev lan nodad")
            ip("link set lan up")
        ip(f"route add default via {HOST4}")
        yield Networks(node, host)
    host.close()


@contextmanager
def guest(networks: Networks, wiring: Vif = WEB) -> Iterator[Namespace]:
    """A guest whose NIC is the other end of a wired tap."""
    with ExitStack() as stack:
        tap = stack.enter_context(open_tap(wiring.tap_name()))
        wire(tap, wiring)
        stack.callback(unwire, tap)
        inside = Namespace()
        stack.callback(inside.close)
        with inside.entered():
            nic = stack.enter_context(open_tap("eth0"))
            ip("link set eth0 up")
            for address in wiring.ips:
                if ":" in address:
                    ip(f"address add {address}/128 dev eth0 nodad")
                    ip("route add default via fe80::1 dev eth0")
                else:
                    ip(f"address add {address}/32 dev eth0")
                    # Any router will do: the node answers for all that it has a route to.
                    ip(f"route add {HOST4} dev eth0 scope link")
                    ip(f"route add default via {HOST4}")
        stack.enter_context(pumped(tap.queues[0], nic.queues[0]))
        yield inside


@pytest.mark.parametrize(
    ("address", "node", "host"), [(GUEST4, NODE4, HOST4), (GUEST6, NODE6, HOST6)]
)
def test_node_and_lan_reach_the_guest_and_it_reaches_them(
    networks: Networks, address: str, node: str, host: str
) -> None:
    with guest(networks) as inside:
        assert talks(networks.node, inside, address) == node
        assert talks(networks.host, inside, address) == host
        assert talks(inside, networks.host, host) == address
        assert talks(inside, networks.node, node) == address


def test_the_guest_reaches_what_is_behind_a_router(networks: Networks) -> None:
    with guest(networks) as inside:
        assert talks(inside, networks.host, FAR4) == GUEST4


def test_neighbours_of_a_node_learn_at_once_that_an_address_is_there(networks: Networks) -> None:
    """They knew it at another node, from which the guest has moved."""
    with Netlink() as netlink:
        address = netlink.get("uplink").mac
    with guest(networks):
        with networks.host.entered():
            for known in (GUEST4, GUEST6):
                ip(f"neigh replace {known} lladdr 02:00:00:00:00:99 dev lan nud reachable")

        def is_known() -> bool:
            assert announce(WEB.tap_name(), times=1) == 2
            with networks.host.entered():
                return ip("neigh show dev lan").count(address) == 2

        wait_for("the neighbours to know", is_known)  # they ignore a change within a second
    assert announce(WEB.tap_name()) == 0


def test_guests_reach_each_other(networks: Networks) -> None:
    other = Vif(instance="db", uuid="0", mode=Mode.ROUTED, ips=("192.0.2.11", "2001:db8:0:1::11"))
    with guest(networks) as web, guest(networks, other) as db:
        assert talks(web, db, "192.0.2.11") == GUEST4
        assert talks(web, db, "2001:db8:0:1::11") == GUEST6


def test_a_guest_of_a_table_is_reached_and_routed_by_it(networks: Networks) -> None:
    """The main table's default route leads nowhere; the guest's table has the right one."""
    ip(f"route replace default via {NODE4.replace('.1', '.99')}")
    ip(f"route add default via {HOST4} dev uplink table 100")
    wiring = Vif(instance="web1", uuid="0", mode=Mode.ROUTED, link="100", ips=(GUEST4, GUEST6))
    with guest(networks, wiring) as inside:
        assert GUEST4 in ip("route show table 100")
        assert GUEST4 not in ip("route show table main")
        assert talks(inside, networks.host, FAR4) == GUEST4
        assert talks(networks.host, inside, GUEST4) == HOST4
        assert talks(networks.host, inside, GUEST6) == HOST6
        assert talks(networks.node, inside, GUEST4) == NODE4
        assert talks(networks.node, inside, GUEST6) == NODE6
    assert "lookup 100" not in ip("rule") + ip("-6 rule")


def test_two_tables_may_have_the_same_address(networks: Networks) -> None:
    first = Vif(instance="web1", uuid="0", mode=Mode.ROUTED, link="100", ips=(GUEST4,))
    second = Vif(instance="web2", uuid="0", mode=Mode.ROUTED, link="200", ips=(GUEST4,))
    with guest(networks, first), guest(networks, second):
        assert first.tap_name() in ip("route show table 100")
        assert second.tap_name() in ip("route show table 200")


def spoofs(source: Namespace, target: Namespace, own: str, false: str, address: str) -> bool:
    """Whether a datagram under a false address gets to an address, where one under its own does."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with target.entered():
        there = socket.socket(family, socket.SOCK_DGRAM)
    with source.entered():
        one, other = (socket.socket(family, socket.SOCK_DGRAM) for _ in range(2))
    with there, one, other:
        there.bind((address, 7008))
        there.settimeout(10)
        one.bind((false, 0))
        other.bind((own, 0))
        one.sendto(b"false", (address, 7008))
        other.sendto(b"own", (address, 7008))  # it overtakes nobody
        return there.recvfrom(100)[0] == b"false"


@pytest.mark.parametrize("table", ["", "100"])
@pytest.mark.parametrize(
    ("own", "false", "node", "host"),
    [
        (GUEST4, "192.0.2.99", NODE4, HOST4),
        (GUEST4, "203.0.113.9", NODE4, HOST4),
        (GUEST6, "2001:db8:0:1::99", NODE6, HOST6),
        (GUEST6, "2001:db8:9::9", NODE6, HOST6),
    ],
)
def test_a_guest_can_not_send_under_anothers_address(
    networks: Networks, own: str, false: str, node: str, host: str, table: str
) -> None:
    """Neither to the node nor through it; and for IPv4 either of what keeps it from it would do."""
    with guest(
        networks, Vif(instance="web1", uuid="0", mode=Mode.ROUTED, link=table, ips=(GUEST4, GUEST6))
    ) as inside:
        tap = WEB.tap_name()
        inside.ip(f"address add {false} dev eth0 {'nodad' if ':' in false else ''}")
        assert talks(inside, networks.node, node, own=own) == own
        assert talks(inside, networks.host, host, own=own) == own
        assert not spoofs(inside, networks.node, own, false, node)
        assert not spoofs(inside, networks.host, own, false, host)
        Path(f"/proc/sys/net/ipv4/conf/{tap}/rp_filter").write_text("0")
        assert not spoofs(inside, networks.node, own, false, node)
        assert not spoofs(inside, networks.host, own, false, host)
        remove_filter(tap)
        assert spoofs(inside, networks.node, own, false, node)
        if ":" not in false:
            Path(f"/proc/sys/net/ipv4/conf/{tap}/rp_filter").write_text("1")
            assert not spoofs(inside, networks.node, own, false, node)


def test_a_filter_that_others_flush_comes_back(
    networks: Networks, caplog: pytest.LogCaptureFixture
) -> None:
    with guest(networks) as inside, caplog.at_level(logging.WARNING):
        inside.ip("address add 2001:db8:9::9 dev eth0 nodad")
        talks(inside, networks.node, NODE6, own=GUEST6)
        remove_leftovers()
        assert caplog.text == ""
        remove_filter(WEB.tap_name())  # as nft flush ruleset does
        assert spoofs(inside, networks.node, GUEST6, "2001:db8:9::9", NODE6)
        remove_leftovers()
        assert "its filter was gone" in caplog.text
        assert not spoofs(inside, networks.node, GUEST6, "2001:db8:9::9", NODE6)
        assert talks(networks.host, inside, GUEST6) == HOST6


def test_a_guest_may_ask_for_its_address(networks: Networks) -> None:
    """A DHCP request, from a client without an address."""
    with guest(networks) as inside:
        inside.ip(f"address del {GUEST4}/32 dev eth0")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, WEB.tap_name().encode())
            server.bind(("", 67))
            server.settimeout(10)
            with inside.entered():
                client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            with client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"eth0")
                client.bind(("", 68))
                client.sendto(b"an address, please", ("255.255.255.255", 67))
                assert server.recvfrom(100) == (b"an address, please", ("0.0.0.0", 68))


def test_no_filter_is_left_behind(networks: Networks) -> None:
    with open_tap("t0") as tap:
        wire(tap, WEB)
        assert "t0" in filtered_taps()
        unwire(tap)
        assert "t0" not in filtered_taps()
        wire(tap, WEB)
    remove_leftovers()
    assert "t0" not in filtered_taps()


def test_the_mtu_is_the_uplinks(networks: Networks) -> None:
    ip("link set uplink mtu 1400")
    with open_tap("t0") as tap:
        assert wire(tap, WEB).mtu == 1400


def test_a_guest_can_not_have_the_node_change_its_routes(networks: Networks) -> None:
    with open_tap("t0") as tap:
        wire(tap, WEB)
        conf = Path("/proc/sys/net")
        for key in ("ipv6/conf/t0/accept_ra", "ipv4/conf/t0/accept_redirects"):
            assert (conf / key).read_text() == "0\n"


def test_wiring_twice_is_the_same_as_once(networks: Networks) -> None:
    with open_tap("t0") as tap:
        assert wire(tap, WEB).changed
        before = everything()
        assert not wire(tap, WEB).changed
        assert everything() == before
        ip("link set t0 down")
        assert not wire(tap, WEB).changed
        assert everything() == before


def test_unwiring_leaves_nothing(networks: Networks) -> None:
    with open_tap("t0") as tap:
        before = everything()
        wire(tap, Vif(instance="web1", uuid="0", mode=Mode.ROUTED, link="100", ips=WEB.ips))
        assert everything() != before
        unwire(tap)
        assert everything() == before


def test_what_a_dead_guest_leaves_is_removed(networks: Networks) -> None:
    wiring = Vif(instance="web1", uuid="0", mode=Mode.ROUTED, link="100", ips=WEB.ips)
    before = everything()
    with open_tap("t0") as tap:
        wire(tap, wiring)
    assert "t0" in ip("rule")
    assert GUEST4 in ip("neighbour show proxy")
    assert [one.kind for one in remove_leftovers()] == [LeftoverKind.RECORD]
    assert everything() == before


def test_a_proxy_of_the_operators_stays(networks: Networks) -> None:
    ip(f"neighbour add proxy {GUEST4} dev uplink")
    with open_tap("t0") as tap:
        wire(tap, WEB)
        unwire(tap)
    assert GUEST4 in ip("neighbour show proxy")
    assert GUEST6 not in ip("-6 neighbour show proxy")


def test_an_address_of_another_nic_is_refused(networks: Networks) -> None:
    second = Vif(instance="web2", uuid="0", mode=Mode.ROUTED, ips=("192.0.2.11", GUEST4))
    with open_tap("t0") as tap, open_tap("t1") as other:
        wire(tap, WEB)
        before = everything()
        with pytest.raises(TapError, match=f"{GUEST4} is routed elsewhere already"):
            wire(other, second)
        assert everything() == before
        # What was there already is not taken along by the one who failed.
        assert GUEST4 in ip("neighbour show proxy")


def test_an_uplink_that_goes_away_takes_the_wiring_apart(networks: Networks) -> None:
    with open_tap("t0") as tap:
        wire(tap, WEB)
        ip("link delete uplink")
        assert unwire(tap)
    assert records.load_all() == {}


def test_a_node_that_does_not_forward_ipv6_is_told(
    networks: Networks, caplog: pytest.LogCaptureFixture
) -> None:
    Path("/proc/sys/net/ipv6/conf/all/forwarding").write_text("0")
    with open_tap("t0") as tap, caplog.at_level(logging.WARNING):
        wire(tap, WEB)
    assert "net.ipv6.conf.all.forwarding=1" in caplog.text


def test_a_node_without_ipv6_says_so(networks: Networks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brine.hotplug.net.netlink._NET", paths.CONTROL_DIR)
    with open_tap("t0") as tap, pytest.raises(BrineError, match="No such file") as caught:
        wire(tap, Vif(instance="web1", uuid="0", mode=Mode.ROUTED, ips=(GUEST6,)))
    assert caught.value.hint == "this node has no IPv6"


def everything() -> list[str]:
    """The kernel's routes, rules and proxies."""
    commands = ["rule", "-6 rule", "route show table all", "-6 route show table all"]
    proxies = ["neighbour show proxy", "-6 neighbour show proxy"]
    lines = "".join(ip(command) for command in [*commands, *proxies]).splitlines()
    # The kernel makes a link-local address and its routes for each interface when it gets to it.
    return sorted(line for line in lines if "fe80" not in line and "ff00" not in line)
