"""VLANs and vhost, with real guests: on this kernel if it can, else on Debian's."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from component.hotplug_vm import SCSI, Vm, connect, nothing_left, reaches, start_vm
from lab.command import run_command
from lab.debian_kernel import on_debian_kernel
from lab.guest_devices import wait_gone
from lab.machine import Machine
from lab.private_host import private_host

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="networks take root"),
    pytest.mark.needs_vlans,
]

MAC = "52:54:00:aa:00:01"
DISK = "11111111-2222-4333-8444-555555555555"
MIB = 1 << 20
TRUNK = "52:54:00:aa:00:02"
VHOST = ("--vhost", "--queues", "2")

# A bridge that looks at VLANs, and `lan`, a host on it that is in VLANs 100, 200 and 300.
_NETWORK = """
ip link add br0 type bridge vlan_filtering 1
ip netns add lan
ip link add lan0 type veth peer name eth0 netns lan
ip link set lan0 master br0
ip link set lan0 up
ip link set br0 up
ip -netns lan link set eth0 up
for vlan in 100 200 300; do
    bridge vlan add dev lan0 vid $vlan
    ip -netns lan link add link eth0 name eth0.$vlan type vlan id $vlan
    ip -netns lan address add 10.$((vlan / 100)).0.2/24 dev eth0.$vlan
    ip -netns lan link set eth0.$vlan up
done
"""


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """This host, with a bridge that looks at VLANs."""
    with private_host() as host:
        host.shell(_NETWORK)
        yield host


@pytest.fixture(scope="module")
def booted(machine: Machine) -> Iterator[Vm]:
    with start_vm(machine, "tagged", SCSI, kvm=on_debian_kernel()) as vm:
        vm.guest.wait_ready(timeout_s=300)
        yield vm


@pytest.fixture
def tagged(booted: Vm) -> Iterator[Vm]:
    """A guest, into which nothing is plugged before and after the test."""
    with nothing_left(booted):
        yield booted


def test_on_an_access_port_the_guest_is_in_one_vlan(tagged: Vm) -> None:
    """The kernel moves its frames."""
    tagged.plug("nic", "--link", "br0", "--vlan", "100", "--mac", MAC, *VHOST)
    assert _vlans(tagged) == [(100, {"PVID", "Egress Untagged"})]
    assert _open(tagged, "/dev/vhost-net") == 2
    connect(tagged.guest, MAC, "10.1.0.10/24", "10.2.0.10/24")
    assert reaches(tagged.guest, "10.1.0.2")
    assert not reaches(tagged.guest, "10.2.0.2", tries=1)
    tagged.unplug("nic", MAC)
    wait_gone(tagged.guest, MAC)


@pytest.mark.long
@pytest.mark.parametrize("vlan", [100, 200])
def test_it_is_the_vlan_that_decides(tagged: Vm, vlan: int) -> None:
    """QEMU moves its frames."""
    tagged.plug("nic", "--link", "br0", "--vlan", str(vlan), "--mac", MAC)
    connect(tagged.guest, MAC, "10.1.0.10/24", "10.2.0.10/24")
    for number in (100, 200):
        is_its = number == vlan
        address = f"10.{number // 100}.0.2"
        assert reaches(tagged.guest, address, tries=20 if is_its else 1) is is_its
    tagged.unplug("nic", MAC)
    wait_gone(tagged.guest, MAC)


def test_on_a_trunk_the_guest_is_in_the_vlans_that_it_may_be_in(tagged: Vm) -> None:
    tagged.plug("nic", "--link", "br0", "--vlan", ":100:200", "--mac", MAC)
    assert _vlans(tagged) == [(100, set()), (200, set())]
    nic = connect(tagged.guest, MAC)
    for vlan in (100, 200, 300):
        address = f"10.{vlan // 100}.0.10/24"
        tagged.guest.run(
            f"vconfig add {nic} {vlan} >/dev/null && ip address add {address} dev {nic}.{vlan}"
            f" && ip link set {nic}.{vlan} up"
        )
    assert reaches(tagged.guest, "10.1.0.2")
    assert reaches(tagged.guest, "10.2.0.2")
    assert not reaches(tagged.guest, "10.3.0.2", tries=1)
    tagged.unplug("nic", MAC)
    wait_gone(tagged.guest, MAC)


@pytest.mark.long
def test_a_vm_that_does_not_run_yet_is_given_all_of_it(machine: Machine, images: Path) -> None:
    """Facts that need no guest: VLANs of taps, vhost's descriptors, a block device's node."""
    image = images / "device.img"
    image.write_bytes(bytes(MIB))
    device = run_command(["losetup", "--find", "--show", image]).stdout.strip()
    try:
        with start_vm(machine, "unborn", ["-S"], kvm=on_debian_kernel()) as vm:
            vm.plug("nic", "--link", "br0", "--vlan", "100", "--mac", MAC)
            assert _vlans(vm) == [(100, {"PVID", "Egress Untagged"})]
            vm.plug("nic", "--link", "br0", "--vlan", ":100:200", "--mac", TRUNK, *VHOST)
            assert _vlans(vm, mac=TRUNK) == [(100, set()), (200, set())]
            assert (_open(vm, "/dev/net/tun"), _open(vm, "/dev/vhost-net")) == (3, 2)
            plugged = vm.plug("disk", "--path", device, "--uuid", DISK)
            nodes = vm.guest.qmp("query-named-block-nodes")
            assert {node["node-name"]: node["drv"] for node in nodes}[plugged] == "host_device"
    finally:
        run_command(["losetup", "--detach", device])


def _open(vm: Vm, device: str) -> int:
    """How often QEMU has a device open; in another root its path is longer."""
    return sum(count for path, count in vm.traces().descriptors if path.endswith(device))


def _vlans(vm: Vm, *, mac: str = MAC) -> list[tuple[int, set[str]]]:
    """The VLANs of a NIC's tap, as the bridge has them, with their flags."""
    (nic,) = [nic for nic in vm.listed("nic") if nic["mac"] == mac]
    part = nic["device_id"].split("-")[1]
    (tap,) = [tap for tap in vm.taps() if tap["nic"].startswith(part)]
    shown = vm.machine.run(["bridge", "-json", "vlan", "show", "dev", tap["name"]]).stdout
    (port,) = json.loads(shown)
    return [(vlan["vlan"], set(vlan.get("flags", []))) for vlan in port["vlans"]]
