"""NICs plugged into real guests by `brine nic`, and what the guest has of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from component.hotplug_vm import (
    FAR4,
    FAR6,
    LAN4,
    LAN6,
    MACHINES,
    NODE4,
    NODE6,
    OTHER4,
    Vm,
    connect,
    reaches,
    start_vm,
    told,
)
from lab.brine_command import brine
from lab.guest import Guest
from lab.guest_devices import seen_nics, wait_gone, wait_nic
from lab.machine import Machine
from lab.waiting import wait_for

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="networks take root")

MAC = "52:54:00:aa:00:01"
NIC = "0b5bcb4e-8f2c-4f2e-9ab6-6f7b1b0a3b0d"


def test_a_guest_gets_a_nic_and_packets_over_a_bridge(vm: Vm) -> None:
    with told("from nothing to traffic"):
        device = vm.plug("nic", "--link", "br0", "--mac", MAC, "--uuid", NIC)
        connect(vm.guest, MAC, "192.0.2.10/24", "2001:db8:0:1::10/64")
        assert reaches(vm.guest, NODE4)
    for address in (NODE6, LAN4, LAN6):
        assert reaches(vm.guest, address)
    assert [(one["device_id"], one["mac"]) for one in vm.listed("nic")] == [(device, MAC)]
    (tap,) = vm.taps()
    assert (tap["instance"], tap["nic"], tap["state"]) == (vm.guest.name, NIC, "open")
    assert [holder["process"] for holder in tap["holders"]] != []

    assert vm.unplug("nic", NIC).startswith(f"unplugged: {device}")
    wait_gone(vm.guest, MAC)
    assert vm.taps() == []


def test_a_guest_gets_packets_over_routes(pc: Vm) -> None:
    addresses = ["203.0.113.10", "2001:db8:0:2::10"]
    wiring = [word for address in addresses for word in ("--ip", address)]
    pc.plug("nic", "--mode", "routed", "--mac", MAC, *wiring)
    connect(pc.guest, MAC, *addresses)
    for address in (FAR4, FAR6, NODE4, NODE6):
        assert reaches(pc.guest, address)
    (tap,) = pc.taps()
    assert (tap["mode"], tap["ips"]) == ("routed", addresses)

    pc.unplug("nic", MAC)
    wait_gone(pc.guest, MAC)
    left = pc.machine.shell(
        "ip route; ip -6 route; ip neighbour show proxy; ip -6 neigh show proxy"
    )
    assert not any(address in left for address in addresses)


def test_a_nic_moves_to_another_link_in_its_slot(vm: Vm) -> None:
    first = vm.plug("nic", "--link", "br0", "--mac", MAC, "--uuid", NIC)
    connect(vm.guest, MAC, "192.0.2.10/24")
    assert reaches(vm.guest, LAN4)

    assert "bridged to br1" in vm.brine("nic", "modify", NIC, "--link", "br1")
    (nic,) = vm.listed("nic")
    assert (nic["device_id"], nic["mac"]) == (first, MAC)
    (tap,) = vm.taps()
    assert (tap["nic"], tap["link"], tap["state"]) == (NIC, "br1", "open")
    # It is another NIC: the addresses of the first went with it.
    connect(vm.guest, MAC, "198.51.100.10/24", "192.0.2.10/24")
    assert reaches(vm.guest, OTHER4)
    assert not reaches(vm.guest, LAN4, tries=1)

    vm.unplug("nic", NIC)
    wait_gone(vm.guest, MAC)


def test_a_nic_gets_another_mac(pc: Vm) -> None:
    first = pc.plug("nic", "--link", "br0", "--mac", MAC, "--uuid", NIC)
    wait_nic(pc.guest, MAC)
    other = "52:54:00:aa:00:02"
    pc.brine("nic", "modify", first, "--link", "br0", "--mac", other)
    wait_nic(pc.guest, other)
    assert MAC not in seen_nics(pc.guest)
    pc.unplug("nic", other)
    wait_gone(pc.guest, other)


def test_the_guest_learns_the_mtu_and_no_other_gets_it(pc: Vm) -> None:
    def mtu_of(mac: str) -> int:
        return int(pc.guest.run(f"cat /sys/class/net/{wait_nic(pc.guest, mac)}/mtu"))

    def bridge_mtu() -> int:
        (bridge,) = json.loads(pc.machine.shell("ip -json link show br0"))
        return int(bridge["mtu"])

    other = "52:54:00:aa:00:02"
    pc.plug("nic", "--link", "br0", "--mac", MAC, "--uuid", NIC, "--mtu", "1400")
    pc.plug("nic", "--link", "br0", "--mac", other)
    assert (mtu_of(MAC), mtu_of(other), bridge_mtu()) == (1400, 1500, 1500)
    pc.brine("nic", "modify", NIC, "--mtu", "1300")
    assert (mtu_of(MAC), bridge_mtu()) == (1300, 1500)
    # Another model can't tell it.
    pc.brine("nic", "modify", NIC, "--model", "e1000")
    for mac in (MAC, other):
        pc.unplug("nic", mac)
    assert bridge_mtu() == 1500


def test_a_nic_has_several_queues(pc: Vm) -> None:
    pc.plug("nic", "--link", "br0", "--mac", MAC, "--queues", "4")
    nic = connect(pc.guest, MAC, "192.0.2.10/24")
    queues = pc.guest.run(f"ls /sys/class/net/{nic}/queues").split()
    # It uses as many as it has processors.
    assert sorted(queues) == ["rx-0", "rx-1", "tx-0", "tx-1"]
    assert dict(pc.traces().descriptors)["/dev/net/tun"] == 4
    assert reaches(pc.guest, LAN4)
    pc.unplug("nic", MAC)


@pytest.mark.parametrize(
    ("model", "seen"), [("e1000", "0x8086 0x100e"), ("rtl8139", "0x10ec 0x8139")]
)
def test_a_nic_may_be_of_another_model(pc: Vm, model: str, seen: str) -> None:
    """The guest's kernel has no driver for it, and so the guest sees only that there is one."""
    look = "cat /sys/bus/pci/devices/*/uevent | grep ^PCI_ID="
    vendor, device = (part.removeprefix("0x").upper() for part in seen.split())
    pc.plug("nic", "--link", "br0", "--mac", MAC, "--model", model)
    assert (pc.listed("nic")[0]["mac"], model) == (MAC, model)
    _wait_line(pc, look, f"PCI_ID={vendor}:{device}", there=True)
    pc.unplug("nic", MAC)
    _wait_line(pc, look, f"PCI_ID={vendor}:{device}", there=False)


def test_the_runtime_file_is_in_step(pc: Vm, images: Path) -> None:
    runtime = images / "web.json"
    runtime.write_text('{"nics": [], "disks": [], "started": "yes"}')
    named = ("--runtime", runtime)
    pc.plug("nic", "--link", "br0", "--mac", MAC, "--uuid", NIC, *named)
    recorded = json.loads(runtime.read_text())
    assert recorded["started"] == "yes"
    (nic,) = recorded["nics"]
    (listed,) = pc.listed("nic")
    assert (nic["uuid"], nic["mac"], nic["pci"]) == (NIC, MAC, listed["slot"])
    assert nic["nicparams"]["link"] == "br0"
    pc.brine("nic", "modify", NIC, "--link", "br1", *named)
    (changed,) = json.loads(runtime.read_text())["nics"]
    assert (changed["pci"], changed["nicparams"]["link"]) == (nic["pci"], "br1")
    pc.unplug("nic", NIC, *named)
    assert json.loads(runtime.read_text())["nics"] == []


def test_when_no_slot_is_left_the_limit_is_named(vm: Vm) -> None:
    reserved = ["--reserved-slots", "29"]
    macs = [f"52:54:00:aa:02:0{number}" for number in range(4)]
    for mac in macs[:3]:
        vm.plug("nic", "--link", "br0", "--mac", mac, *reserved)
    said = vm.refusal("nic", "add", "--link", "br0", "--mac", macs[3], *reserved)
    if "q35" in vm.guest.name:
        assert "no slot left: all 3 pcie-root-ports have a device" in said
    else:
        assert "no slot left: 3 devices have slots 29 to 31 of pci.0" in said
    assert len(vm.taps()) == len(vm.listed("nic")) == 3
    # One that goes makes place for the next.
    for mac in macs[:3]:
        wait_nic(vm.guest, mac)
    vm.unplug("nic", macs[1])
    vm.plug("nic", "--link", "br0", "--mac", macs[3], *reserved)
    for mac in (macs[0], macs[2], macs[3]):
        wait_nic(vm.guest, mac)
        vm.unplug("nic", mac)


def test_a_q35_machine_without_ports_takes_nothing(machine: Machine) -> None:
    with start_vm(machine, "portless", ["-M", "q35", "-S"]) as vm:
        said = vm.refusal("nic", "add", "--link", "br0", "--mac", MAC)
        assert "this q35 machine has no pcie-root-port" in said
        assert "-device pcie-root-port" in said
        assert vm.taps() == []


def test_the_end_of_the_vm_is_the_end_of_its_taps(machine: Machine) -> None:
    with start_vm(machine, "brief", [*MACHINES["pc"], "-S"]) as vm:
        vm.plug("nic", "--link", "br0", "--mac", MAC)
        assert [tap["state"] for tap in vm.taps()] == ["open"]
        vm.guest.qmp("quit")
        vm.guest.wait()
    assert "vm-brief" not in machine.run(["ip", "link"]).stdout


def _wait_line(vm: Vm, command: str, line: str, *, there: bool) -> None:
    """Wait until what a command in the guest prints has a line, or has it no more."""
    wait_for(line, lambda: (line in vm.guest.run(command).splitlines()) is there)


def test_a_filtered_nic_sends_as_itself_alone(pc: Vm) -> None:
    own4, own6, false4 = "192.0.2.10", "2001:db8:0:1::10", "192.0.2.66"
    pc.plug("nic", "--link", "br0", "--mac", MAC, "--filter", "--ip", own4, "--ip", own6)
    nic = connect(pc.guest, MAC, f"{own4}/24", f"{own6}/64")
    assert reaches(pc.guest, LAN4)
    assert reaches(pc.guest, LAN6)

    before = pc.taps()[0]["drops"]
    pc.guest.run(f"ip address add {false4}/24 dev {nic}")
    ping = f"ping -q -c 1 -W 1 -I {false4} {LAN4}"
    assert "100% packet loss" in pc.guest.run(ping, check=False)
    pc.guest.run(f"ip address del {false4}/24 dev {nic}")
    pc.guest.run(f"ip link set {nic} address 52:54:00:aa:00:99")
    assert not reaches(pc.guest, LAN4, tries=1)
    (tap,) = pc.taps()
    assert tap["filter"] == "on"
    assert tap["drops"] >= before + 2
    lines = brine(pc.machine, "tap", "list", "--wide").stdout.splitlines()
    (line,) = [one for one in lines if one.startswith(f"{tap['name']} ")]
    state, drops = line.split()[-2:]
    assert state == "on"
    assert int(drops) >= tap["drops"]  # the guest goes on

    other = "52:54:00:aa:00:02"
    assert "changed" in pc.brine("nic", "modify", MAC, "--mac", other)
    connect(pc.guest, other, f"{own4}/24", f"{own6}/64")
    assert reaches(pc.guest, LAN4)
    assert reaches(pc.guest, LAN6)
    pc.unplug("nic", other)
    wait_gone(pc.guest, other)
    assert tap["name"] not in pc.machine.shell("nft list ruleset")


def test_a_filtered_guest_gets_a_lease_and_gives_none(pc: Vm) -> None:
    """A client of DHCP on one NIC, and a server on another, in a network of its own."""
    servers, lease, guest = "52:54:00:aa:00:02", "192.0.2.50", pc.guest
    pc.plug("nic", "--link", "br0", "--mac", MAC, "--filter", "--ip", lease)
    client = wait_nic(guest, MAC)
    guest.run(f"ip link set {client} up")
    for options, is_answered in ((["--filter"], False), ([], True)):
        pc.plug("nic", "--link", "br0", "--mac", servers, *options)
        with serving(guest, wait_nic(guest, servers), lease):
            ask = f"udhcpc -f -n -q -t 3 -T 1 -s /bin/true -i {client} 2>&1"
            said = guest.run(ask, check=False)
        assert (f"lease of {lease} obtained" in said) == is_answered, said
        drops = {tap["nic"]: tap["drops"] for tap in pc.taps() if tap["filter"] == "on"}
        assert is_answered or all(drops.values()), drops
        pc.unplug("nic", servers)
        wait_gone(guest, servers)
    pc.unplug("nic", MAC)
    wait_gone(guest, MAC)


@contextmanager
def serving(guest: Guest, nic: str, lease: str) -> Iterator[None]:
    """A server of DHCP in a guest, with one lease. Its NIC is in a namespace until the end."""
    settings = [f"start {lease}", f"end {lease}", f"interface {nic}", "lease_file /leases"]
    settings += ["pidfile /server.pid", "option lease 600"]
    guest.run(
        "true >/leases; printf '%s\\n' " + " ".join(f"'{one}'" for one in settings) + ">/conf"
    )
    guest.run("unshare -n sleep 1000000 >/dev/null 2>&1 & echo $! >/holder.pid")
    holder = "$(cat /holder.pid)"
    # It has its own namespace when it is the command.
    guest.run(f"until grep -q sleep /proc/{holder}/comm; do usleep 10000; done")
    within = f"nsenter -n -t {holder}"
    guest.run(f"ip link set {nic} netns {holder}")
    guest.run(f"{within} ip address add 192.0.2.49/24 dev {nic}; {within} ip link set {nic} up")
    guest.run(f"{within} udhcpd /conf")
    yield
    guest.run(f"kill $(cat /server.pid); kill {holder}")
    guest.run(f"until [ -e /sys/class/net/{nic} ]; do usleep 10000; done")
