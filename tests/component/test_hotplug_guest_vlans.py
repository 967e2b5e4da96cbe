"""VLANs, vhost and block devices, with real guests: on this kernel if it can, and on Debian's."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from component.hotplug_vm import SCSI, Vm, connect, nothing_left, reaches, start_vm
from component.namespaces import can_filter_vlans
from lab.command import run_command
from lab.debian_kernel import run_on_debian_kernel
from lab.guest import QEMU_FILES
from lab.guest_devices import wait_disk, wait_gone
from lab.guest_image import guest_image
from lab.machine import Machine
from lab.private_host import private_host

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="networks take root")

TREE = Path(__file__).parents[2]
MAC = "52:54:00:aa:00:01"
DISK = "11111111-2222-4333-8444-555555555555"
SERIAL = DISK[:20]
MIB = 1 << 20

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
PROGRAMS = ["qemu-system-x86_64", "nsenter", "mount", "mkdir", "bash", "setpriv", "losetup"]

needs_vlans = pytest.mark.skipif(
    os.geteuid() != 0 or not can_filter_vlans(),
    reason="this kernel has no VLANs on bridges; it is done on Debian's",
)


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """This host, with a bridge that looks at VLANs."""
    with private_host() as host:
        host.shell(_NETWORK)
        yield host


@pytest.fixture(scope="module")
def booted(machine: Machine) -> Iterator[Vm]:
    with start_vm(machine, "tagged", SCSI) as vm:
        vm.guest.wait_ready(timeout_s=300)
        yield vm


@pytest.fixture
def tagged(booted: Vm) -> Iterator[Vm]:
    """A guest, into which nothing is plugged before and after the test."""
    with nothing_left(booted):
        yield booted


@needs_vlans
def test_on_an_access_port_the_guest_is_in_one_vlan(tagged: Vm) -> None:
    tagged.plug("nic", "--link", "br0", "--vlan", "100", "--mac", MAC)
    connect(tagged.guest, MAC, "10.1.0.10/24", "10.2.0.10/24")
    assert reaches(tagged.guest, "10.1.0.2")
    assert not reaches(tagged.guest, "10.2.0.2", tries=1)
    tagged.unplug("nic", MAC)
    wait_gone(tagged.guest, MAC)


@needs_vlans
def test_on_a_trunk_the_guest_is_in_the_vlans_that_it_may_be_in(tagged: Vm) -> None:
    tagged.plug("nic", "--link", "br0", "--vlan", ":100:200", "--mac", MAC)
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


@needs_vlans
@pytest.mark.skipif(not Path("/dev/vhost-net").exists(), reason="it is done on Debian's kernel")
def test_the_kernel_moves_the_frames(tagged: Vm) -> None:
    wish = ("--link", "br0", "--vlan", "100", "--mac", MAC, "--vhost", "--queues", "2")
    tagged.plug("nic", *wish)
    connect(tagged.guest, MAC, "10.1.0.10/24")
    assert reaches(tagged.guest, "10.1.0.2")
    assert dict(tagged.traces().descriptors)["/dev/vhost-net"] == 2
    network = tagged.guest.qmp("human-monitor-command", **{"command-line": "info network"})
    assert "vhost=on" in network.replace("vhost_net=on", "vhost=on"), network
    tagged.unplug("nic", MAC)
    wait_gone(tagged.guest, MAC)


@needs_vlans
def test_a_block_device_is_plugged_in_as_one(tagged: Vm, images: Path) -> None:
    image = images / "device.img"
    image.write_bytes(b"from the host\n".ljust(MIB, b"\0"))
    device = run_command(["losetup", "--find", "--show", image]).stdout.strip()
    try:
        plugged = tagged.plug("disk", "--path", device, "--uuid", DISK)
        nodes = tagged.guest.qmp("query-named-block-nodes")
        assert {node["node-name"]: node["drv"] for node in nodes}[plugged] == "host_device"
        name = wait_disk(tagged.guest, SERIAL).name
        assert tagged.guest.run(f"head -n 1 /dev/{name}") == "from the host\n"
        tagged.guest.run(f"echo from the guest | dd of=/dev/{name} conv=fsync,sync 2>/dev/null")
        tagged.unplug("disk", DISK)
        wait_gone(tagged.guest, SERIAL)
    finally:
        run_command(["losetup", "--detach", device])
    assert image.read_bytes().startswith(b"from the guest\n")


@pytest.mark.skipif(
    Path("/lab-script").exists() or not shutil.which("apt-get"),
    reason="it runs on Debian's kernel, or there is no apt to fetch that",
)
def test_on_debians_kernel_all_of_it_works() -> None:
    """A guest in a guest."""
    project = TREE / "pyproject.toml"
    options = ["-m", "pytest", "-q", "-rs", "--color=no", "--durations=10"]
    said = run_on_debian_kernel(
        [*options, "-p", "no:hypothesispytest", "-c", project, Path(__file__)],
        paths=[
            *(TREE / "pkgs", TREE / "tests", project, guest_image().folder, *QEMU_FILES),
            Path("/etc/os-release"),
        ],
        programs=PROGRAMS,
    )
    skipped = [line for line in said.splitlines() if line.startswith("SKIPPED")]
    assert len(skipped) == 1, said
    assert "Debian's kernel" in skipped[0]
    print(said)
