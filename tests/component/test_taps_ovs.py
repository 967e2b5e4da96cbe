"""Taps on bridges of a real Open vSwitch, which switches in user space."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from brine.hotplug.net import ovs as ours
from brine.hotplug.net.gc import LeftoverKind, find_leftovers, remove_leftovers
from brine.hotplug.net.ovs import OpenVswitchError
from brine.hotplug.net.records import remove
from brine.hotplug.net.tap import open_tap
from brine.hotplug.net.wiring import unwire, wire
from brine.vm.values import Mode
from brine.vm.vif import Vif
from component.namespaces import Frame, Wire, ip, new_namespace, read_frame, send_frame
from lab.open_vswitch import OpenVswitch, fetch_open_vswitch, open_vswitch

pytestmark = [
    pytest.mark.usefixtures("own_files"),
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("apt-get"),
        reason="networks take root, and Open vSwitch's packages come by apt",
    ),
]

NAME = "vm-web1-abcdef"


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenVswitch]:
    """A switch with a bridge; what is sent to `wire0` comes out of it."""
    roots = fetch_open_vswitch()
    with new_namespace(), open_vswitch(roots) as running:
        for key, value in running.environment.items():
            monkeypatch.setenv(key, value)
        running.command("add-br", "ovs0", "--", "set", "bridge", "ovs0", "datapath_type=netdev")
        ip("link add port0 address 02:00:00:00:00:01 type veth peer name wire0")
        ip("link set port0 up")
        ip("link set wire0 up")
        running.command("add-port", "ovs0", "port0")
        yield running


def wiring(vlan: str = "", link: str = "ovs0") -> Vif:
    return Vif(instance="web1", uuid="0", mode=Mode.OPEN_VSWITCH, link=link, vlan=vlan)


def test_a_small_mtu_of_a_nic_does_not_lower_the_bridges(switch: OpenVswitch) -> None:
    with open_tap(NAME) as tap:
        assert wire(tap, replace(wiring(), mtu=1400)).mtu == 1400
        assert switch.command("get", "Interface", "ovs0", "mtu").strip() == "1500"


@pytest.mark.parametrize(
    ("vlan", "sent", "seen"),
    [("", None, None), ("100", None, 100), (":100:200", 200, 200), (".100:200", None, 100)],
)
def test_frames_pass_both_ways_with_their_vlan(
    switch: OpenVswitch, vlan: str, sent: int | None, seen: int | None
) -> None:
    with open_tap(NAME) as tap:
        wire(tap, wiring(vlan))
        wire0 = Wire("wire0")
        send_frame(tap.queues[0], b"from the guest", vlan=sent)
        assert wire0.next() == Frame(b"from the guest", seen)
        wire0.send(b"to the guest", vlan=seen)
        assert read_frame(tap.queues[0]) == Frame(b"to the guest", sent)
        wire0.close()
        unwire(tap)
        assert NAME not in switch.command("list-ports", "ovs0")


def test_wiring_twice_is_the_same_as_once_and_other_wishes_replace_it(switch: OpenVswitch) -> None:
    switch.command("add-br", "ovs1", "--", "set", "bridge", "ovs1", "datapath_type=netdev")
    with open_tap(NAME) as tap:
        assert wire(tap, wiring("100")).changed
        assert not wire(tap, wiring("100")).changed
        assert switch.command("get", "Port", NAME, "tag").strip() == "100"
        wire(tap, wiring())
        assert switch.command("get", "Port", NAME, "tag").strip() == "[]"
        # Another's hand moved it.
        switch.command("del-port", NAME, "--", "add-port", "ovs1", NAME)
        wire(tap, wiring())
        assert switch.command("port-to-br", NAME).strip() == "ovs0"


def test_a_bridge_that_is_not_there_leaves_nothing(switch: OpenVswitch) -> None:
    with open_tap(NAME) as tap:
        with pytest.raises(OpenVswitchError, match="no bridge named ovs9"):
            wire(tap, wiring(link="ovs9"))
        assert switch.command("list-ports", "ovs0").split() == ["port0"]
    assert find_leftovers() == []


def test_ports_of_dead_guests_are_removed_and_others_are_not(switch: OpenVswitch) -> None:
    switch.command("add-port", "ovs0", "theirs")  # its interface is not there, either
    with open_tap(NAME) as tap:
        wire(tap, wiring())
        assert find_leftovers() == []
    assert [one.kind for one in find_leftovers()] == [LeftoverKind.RECORD]
    # After a reboot there is no record, either.
    remove(NAME)
    (found,) = remove_leftovers()
    assert (found.kind, found.name, found.instance) == (LeftoverKind.PORT, NAME, "web1")
    assert sorted(switch.command("list-ports", "ovs0").split()) == ["port0", "theirs"]


def test_a_switch_that_does_not_run_is_told(
    switch: OpenVswitch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVS_RUNDIR", str(tmp_path))
    with open_tap(NAME) as tap, pytest.raises(OpenVswitchError, match="database connection failed"):
        wire(tap, wiring())


def test_a_missing_command_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with new_namespace(), open_tap(NAME) as tap:
        monkeypatch.setenv("PATH", str(tmp_path))
        assert not ours.installed()
        with pytest.raises(OpenVswitchError, match="ovs-vsctl is not there") as caught:
            wire(tap, wiring())
        assert "install openvswitch" in str(caught.value.hint)
        # For the end of the namespace.
        monkeypatch.undo()
