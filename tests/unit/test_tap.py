"""Taps: their names, the settings of NICs, and the decisions that make an address reachable."""

from __future__ import annotations

import argparse
import errno
import ipaddress
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brine.common import paths
from brine.common.cli import execute
from brine.common.errors import UsageError
from brine.common.locks import LockError
from brine.hotplug import tap_commands
from brine.hotplug.cli import NIC as NIC_COMMAND
from brine.hotplug.cli import TAP
from brine.hotplug.net.netlink import PROTOCOL, LinkError, Netlink, Proxy, Route, Rule
from brine.hotplug.net.records import (
    RecordError,
    TapRecord,
    load,
    one_at_a_time,
    save,
)
from brine.hotplug.net.routing import find_uplink, make_plan, table_names, table_number
from brine.hotplug.net.tap import TapError, check_name
from brine.hotplug.net.wiring import tap_mac
from brine.hotplug.options import nic_from, with_options
from brine.vm.connection import Vlans, parse_vlans
from brine.vm.nic import usual_filter, usual_wiring
from brine.vm.values import NAME_BYTES, Mode
from brine.vm.vif import Vif, owner_of, tap_name

NIC = "0b5bcb4e-8f2c-4f2e-9ab6-6f7b1b0a3b0d"
WEB = Vif(instance="web1.example.com", uuid=NIC, mode=Mode.BRIDGED, link="br0")


@pytest.fixture(autouse=True)
def _keep_privileges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the privileges that a command would give up: other tests need them."""
    monkeypatch.setattr(tap_commands, "keep_only", lambda *_: None)


# Names.


def test_nics_and_instances_that_begin_alike_have_names_of_their_own() -> None:
    names = [
        tap_name(f"customer-{instance}.example.com", str(nic))
        for instance in range(500)
        for nic in range(2)
    ]
    assert len(set(names)) == len(names)
    assert tap_name("web1.example.com", NIC).startswith("vm-web1-")


@given(st.text(), st.text())
def test_any_name_fits_the_kernel(instance: str, nic: str) -> None:
    name = tap_name(instance, nic)
    check_name(name)
    assert len(name.encode()) <= NAME_BYTES


@pytest.mark.parametrize("name", ["", "x" * 16, "a b", "a/b", "a:b", "vm-%d", "..", "vm-\udcff"])
def test_what_can_be_no_name_is_refused(name: str) -> None:
    with pytest.raises(TapError) as caught:
        check_name(name)
    str(caught.value).encode()


@given(st.text(min_size=1, max_size=30), st.text(min_size=1, max_size=30))
def test_the_alias_tells_the_whole_truth(instance: str, nic: str) -> None:
    assert owner_of(Vif(instance=instance, uuid=nic, mode=Mode.BRIDGED, link="br0").alias()) == (
        instance,
        nic,
    )


def test_the_alias_reads_well() -> None:
    assert WEB.alias() == f"brine instance=web1.example.com nic={NIC}"
    odd = replace(WEB, instance=os.fsdecode(b"odd\xff"))
    odd.check()
    assert odd.alias().isascii()
    assert owner_of(odd.alias()) == (odd.instance, NIC)
    for alias in ("my own", "", "xbrine instance=a nic=b"):
        assert owner_of(alias) is None


def test_a_taps_own_address_is_no_guests_and_no_low_one() -> None:
    assert tap_mac("vm-web1-abcdef") == tap_mac("vm-web1-abcdef")
    assert tap_mac("vm-web1-abcdef") != tap_mac("vm-web1-abcdeg")
    assert tap_mac("vm-web1-abcdef").startswith("fe:")


# What a NIC can be.


@pytest.mark.parametrize(
    ("text", "vlans"),
    [
        ("", None),
        ("100", Vlans(100, frozenset())),
        (".100", Vlans(100, frozenset())),
        (":100:200", Vlans(None, frozenset({100, 200}))),
        (".100:200:300", Vlans(100, frozenset({200, 300}))),
        ("4094", Vlans(4094, frozenset())),
    ],
)
def test_vlans_are_read_as_ganeti_writes_them(text: str, vlans: Vlans | None) -> None:
    assert parse_vlans(text) == vlans


@pytest.mark.parametrize("text", ["0", "4095", ":", ".", "a", "100:", "1:1", ":2:2", "-1", "..1"])
def test_what_is_no_vlan_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_vlans(text)


@pytest.mark.parametrize(
    ("nic", "said"),
    [
        (Vif(instance="", uuid="0", mode=Mode.BRIDGED, link="br0"), "name of its instance"),
        (Vif(instance="x" * 300, uuid="0", mode=Mode.BRIDGED, link="br0"), "too long"),
        (Vif(instance="web1", uuid="0", mode=Mode.BRIDGED), "needs its bridge"),
        (Vif(instance="web1", uuid="0", mode=Mode.OPEN_VSWITCH), "needs its bridge"),
        (Vif(instance="web1", uuid="0", mode=Mode.BRIDGED, link="a/b"), "can't be the name"),
        (Vif(instance="web1", uuid="0", mode=Mode.BRIDGED, link="br0", mtu=10), "MTU must be"),
        (
            Vif(instance="web1", uuid="0", mode=Mode.BRIDGED, link="br0", ips=("somewhere",)),
            "not an address",
        ),
        (
            Vif(instance="web1", uuid="0", mode=Mode.BRIDGED, link="br0", model="e1000", queues=2),
            "has no several queues",
        ),
        (Vif(instance="web1", uuid="0", mode=Mode.ROUTED), "needs its address"),
        (Vif(instance="web1", uuid="0", mode=Mode.ROUTED, ips=("0.0.0.0",)), "can't be a guest's"),
        (Vif(instance="web1", uuid="0", mode=Mode.ROUTED, ips=("ff02::1",)), "can't be a guest's"),
        (Vif(instance="web1", uuid="0", mode=Mode.ROUTED, ips=("fe80::1",)), "one link only"),
        (
            Vif(instance="web1", uuid="0", mode=Mode.ROUTED, ips=("fe80::1%eth0",)),
            "not an address of a guest",
        ),
        (
            Vif(instance="web1", uuid="0", mode=Mode.ROUTED, ips=("2001:db8::1", "2001:db8:0::1")),
            "twice",
        ),
        (
            Vif(instance="web1", uuid="0", mode=Mode.ROUTED, vlan="1", ips=("192.0.2.1",)),
            "has no VLAN",
        ),
    ],
)
def test_what_can_not_be_is_refused(nic: Vif, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        nic.check()


@pytest.mark.parametrize(
    ("nicparams", "given", "found"),
    [
        (None, ("", ""), ("bridged", "")),
        (None, (None, "br7"), ("bridged", "br7")),
        ("", ("routed", ""), ("routed", "")),
        ("mode=bridged\nlink=br0\n", ("", ""), ("bridged", "br0")),
        ("mode=bridged\nlink=br0\n", ("bridged", None), ("bridged", "br0")),
        ("mode=bridged\nlink=br0\n", ("", "br7"), ("bridged", "br7")),
        ("mode=bridged\nlink=br0\n", ("routed", ""), ("routed", "")),
        ("link=br0\nvlan=7\n", ("", ""), ("bridged", "br0")),
        ("mode=openvswitch\nlink=ovs0\n", ("bridged", ""), ("bridged", "")),
        ("mode=routed\nlink=main\n", ("", ""), ("routed", "")),
        # Ganeti's own, which this machine does not have.
        ("mode=bridged\nlink=xen-br0\n", ("", ""), ("bridged", "")),
        ("mode=bridged\nlink=xen-br0\n", ("", "xen-br0"), ("bridged", "xen-br0")),
        ("mode=bridge\n", ("bridged", "br0"), ("bridged", "br0")),
    ],
)
def test_a_nic_has_the_clusters_mode_and_link_unless_it_has_its_own(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nicparams: str | None,
    given: tuple[str, str],
    found: tuple[str, str],
) -> None:
    monkeypatch.setattr(paths, "SSCONF_DIR", tmp_path)
    if nicparams is not None:
        (tmp_path / "ssconf_nicparams").write_text(nicparams)
    assert usual_wiring(*given) == found


def test_a_mode_of_the_clusters_that_there_is_not_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "SSCONF_DIR", tmp_path)
    (tmp_path / "ssconf_nicparams").write_text("mode=bridge\n")
    with pytest.raises(UsageError, match="the cluster's NICs are bridge, which is no mode"):
        usual_wiring("", "")


@pytest.mark.parametrize(
    ("nicparams", "given", "found"),
    [
        (None, None, False),
        (None, True, True),
        ("mode=bridged\nlink=br0\n", None, False),
        ("mode=bridged\nfilter=True\n", None, True),
        ("mode=bridged\nfilter=True\n", False, False),
        ("mode=bridged\nfilter=False\n", None, False),
    ],
)
def test_a_nic_has_the_clusters_filter_unless_it_says_otherwise(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nicparams: str | None,
    given: bool | None,
    found: bool,
) -> None:
    monkeypatch.setattr(paths, "SSCONF_DIR", tmp_path)
    if nicparams is not None:
        (tmp_path / "ssconf_nicparams").write_text(nicparams)
    assert usual_filter(given) == found


# Routing.


def _route(network: str, link: int, *, gateway: bool = False, protocol: int = 2) -> Route:
    return Route(ipaddress.ip_network(network), link, gateway=gateway, protocol=protocol)


@pytest.mark.parametrize(
    ("address", "uplink"),
    [
        ("192.0.2.10", 2),  # of the network of interface 2
        ("192.0.2.200", 3),  # of a smaller network within that
        ("198.51.100.1", 4),  # of none: by the router
        ("203.0.113.9", 4),  # behind another router: not the way by which others come
    ],
)
def test_the_uplink_is_where_others_are(address: str, uplink: int) -> None:
    routes = [
        _route("0.0.0.0/0", 4, gateway=True),
        _route("192.0.2.0/24", 2),
        _route("192.0.2.192/26", 3),
        _route("203.0.113.0/24", 5, gateway=True),
        _route(f"{address}/32", 9, protocol=PROTOCOL),  # ours, from before
    ]
    assert find_uplink(ipaddress.ip_address(address), routes) == uplink
    assert find_uplink(ipaddress.ip_address(address), []) == 0


def test_in_the_main_table_there_are_no_rules() -> None:
    record = TapRecord(
        "t0", 7, Vif(instance="web1", uuid=NIC, mode=Mode.ROUTED, ips=("192.0.2.10",)), since=0
    )
    routes = {4: [[_route("192.0.2.0/24", 2)]]}
    plan = make_plan(record, 254, routes=routes, names={2: "eth0"})
    assert plan.proxies == (Proxy("192.0.2.10", "eth0"),)
    assert plan.rules == ()


def test_a_table_of_its_own_is_looked_up_by_rules() -> None:
    record = TapRecord(
        "t0", 7, Vif(instance="web1", uuid=NIC, mode=Mode.ROUTED, ips=("2001:db8::10",)), since=0
    )
    routes = {6: [[_route("::/0", 3, gateway=True)], [_route("2001:db8::/64", 2)]]}
    plan = make_plan(record, 100, routes=routes, names={2: "eth0", 3: "eth1"})
    assert plan.uplinks == ("eth1",)
    assert plan.rules == (
        Rule(6, 100, "t0"),
        Rule(6, 100, "eth1", "2001:db8::10"),
        Rule(6, 100, "lo", "2001:db8::10"),
    )


def test_a_table_has_a_number_or_a_name(tmp_path: Path) -> None:
    assert [table_number(text) for text in ("", "main", "100")] == [254, 254, 100]
    (tmp_path / "rt_tables").write_text("# names\n100\tblue\n0xc8 green # and so on\n")
    (tmp_path / "rt_tables.d").mkdir()
    (tmp_path / "rt_tables.d/ours.conf").write_text("300 red\n")
    found = table_names([tmp_path, tmp_path / "nowhere"])
    assert (found["blue"], found["green"], found["red"]) == (100, 200, 300)


@pytest.mark.parametrize("text", ["0", "4294967296", "nothing-like-it", "local", "255", "-1"])
def test_what_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        table_number(text)


def test_the_kernel_is_asked_and_what_it_refuses_is_told() -> None:
    with Netlink() as netlink:
        lo = netlink.get("lo")
        assert lo in netlink.links()
        assert (lo.kind, lo.mac) == ("", "00:00:00:00:00:00")
        assert netlink.find("none-here") is None
        with pytest.raises(LinkError, match="there is no interface none-here") as caught:
            netlink.get("none-here")
        assert caught.value.code == errno.ENODEV
        with pytest.raises(LinkError, match="interface a-name-that-is-too-long: the kernel says"):
            netlink.find("a-name-that-is-too-long")
        # It still answers what it is asked.
        assert netlink.get("lo") == lo


# Records.


@pytest.fixture
def taps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the records, which is not there yet, as that of the locks."""
    monkeypatch.setattr(paths, "TAPS_DIR", tmp_path / "taps")
    monkeypatch.setattr(paths, "LOCK_DIR", tmp_path / "locks")
    return paths.TAPS_DIR


def test_a_record_is_read_as_it_was_written(taps: Path) -> None:
    assert load("t0") is None
    nic = Vif(
        instance="web1",
        uuid=NIC,
        mode=Mode.ROUTED,
        link="100",
        ips=("192.0.2.1",),
        tags=("a",),
        mtu=1400,
    )
    record = TapRecord(
        "t0",
        7,
        nic,
        since=1.5,
        uplinks=("eth0",),
        proxies=(Proxy("192.0.2.1", "eth0"),),
        rules=(Rule(4, 100, "t0"),),
    )
    save(record)
    assert load("t0") == record
    assert (taps / "t0.json").stat().st_mode & 0o777 == 0o600


def test_a_record_of_version_0_1_0_is_read(taps: Path) -> None:
    taps.mkdir()
    (taps / "t0.json").write_text(
        """{"name": "t0", "index": 7, "since": 1.5, "mtu": 1500, "complete": true, "table": 254,
        "namespace": 4026531840, "uplinks": [], "proxies": [], "rules": [], "queues": 2,
        "vhost": true, "wiring": {"instance": "web1", "nic": "0", "mode": "bridged",
        "link": "br0", "vlan": "", "ips": [], "mac": "52:54:00:00:00:01", "mtu": null,
        "index": 0, "tags": ["a"], "network": {"NETWORK_NAME": "blue"}}}"""
    )
    record = load("t0")
    assert record
    assert (record.complete, record.nic.queues, record.nic.vhost) == (True, 2, True)
    assert (record.nic.uuid, record.nic.network) == ("0", {"NETWORK_NAME": "blue"})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"wiring": {}}'])
def test_a_damaged_record_is_an_error(taps: Path, text: str) -> None:
    taps.mkdir()
    (taps / "t0.json").write_text(text)
    with pytest.raises(RecordError, match="damaged"):
        load("t0")


def test_a_lock_that_can_not_be_had_is_named(taps: Path) -> None:
    paths.LOCK_DIR.write_text("no folder")
    with pytest.raises(LockError, match="tap-t0.lock: can't be locked: "):
        with one_at_a_time("t0"):
            pass


def test_a_fault_within_the_lock_is_no_fault_of_the_lock(taps: Path) -> None:
    with pytest.raises(FileNotFoundError):
        with one_at_a_time("t0"):
            (taps / "nothing").read_text()


# The commands.


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    TAP.configure(parser)
    return parser.parse_args(arguments)


def changes(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    NIC_COMMAND.configure(parser)
    return parser.parse_args(["modify", "web1", NIC, *options])


def test_a_dry_run_checks_and_says_the_name(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = parse("up", "--instance", "web1", "--nic", "0", "--link", "br0", "--dry-run")
    assert execute(arguments) == 0
    assert capsys.readouterr().out == f"would be up: {tap_name('web1', '0')}, bridged to br0\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--link", "br0"], "no tap is named"),
        (["t0", "--mode", "routed"], "needs its address"),
        (["t0", "--mode", "routed", "--ip", "192.0.2.1/24"], "not an address"),
        (["t0", "--mode", "routed", "--ip", "2001:db8::g"], "not an address"),
        (["t0", "--link", "br0", "--user", "no-such-user"], "there is no user"),
        (["t0", "--link", "br0", "--group", "no-such-group"], "there is no group"),
        (["t0", "--link", "br0", "--user", "99999999999"], "there is no user"),
        (["t0", "--link", "br0", "--group", "4294967295"], "there is no group"),
        (["t0", "--link", "br0", "--network", "blue"], "not KEY=VALUE"),
    ],
)
def test_a_persons_mistake_is_a_usage_error(options: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        execute(parse("up", *options, "--dry-run"))


def test_all_that_scripts_are_told_can_be_given() -> None:
    arguments = parse(
        *("up", "t0", "--index", "1", "--mac", "52:54:00:1:2:3", "--tag", "a", "--tag", "b"),
        *("--network", "NAME=blue", "--network", "NETWORK_TAGS=c"),
        *("--mode", "routed", "--ip", "192.0.2.1", "--ip", "2001:DB8:0::A"),
    )
    nic = nic_from(arguments, "web1", NIC)
    assert (nic.index, nic.tags, nic.mac) == (1, ("a", "b"), "52:54:00:1:2:3")
    assert nic.network == {"NETWORK_NAME": "blue", "NETWORK_TAGS": "c"}
    assert nic.ips == ("192.0.2.1", "2001:db8::a")


def test_an_address_is_the_same_however_it_is_written() -> None:
    nic = nic_from(parse("up", "t0", "--mode=routed", "--ip=2001:DB8:0::A"), "web1", NIC)
    assert with_options(changes("--ip=2001:db8:0:0::a"), nic) == nic


def test_another_mode_takes_no_link_along() -> None:
    nic = replace(WEB, vlan="7")
    assert with_options(changes("--link", "br1"), nic) == replace(nic, link="br1")
    routed = with_options(changes("--mode", "routed", "--ip", "192.0.2.1"), nic)
    assert (routed.mode, routed.link, routed.vlan) == (Mode.ROUTED, "", "")
