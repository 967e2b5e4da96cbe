"""A real VM, plugged into by Brine's commands, on a machine with a network."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.brine_command import brine
from lab.command import CommandError
from lab.guest import Guest, start_guest
from lab.guest_devices import wait_nic
from lab.machine import Machine
from lab.traces import Traces, differences, traces

CONTROL = Path("/run/brine/ctrl")

NODE4, NODE6 = "192.0.2.1", "2001:db8:0:1::1"
LAN4, LAN6 = "192.0.2.2", "2001:db8:0:1::2"
OTHER4 = "198.51.100.1"
FAR4, FAR6 = "203.0.113.2", "2001:db8:0:2::2"

# Two bridges of the node's; `lan`, a host that is on the first of them, and on another link of the
# node's, from which the node routes.
_NETWORK = f"""
ip link add br0 type bridge
ip link add br1 type bridge
ip netns add lan
ip link add lan0 type veth peer name eth0 netns lan
ip link add uplink type veth peer name eth1 netns lan
ip link set lan0 master br0
ip address add {NODE4}/24 dev br0
ip address add {NODE6}/64 dev br0 nodad
ip address add {OTHER4}/24 dev br1
ip address add 203.0.113.1/24 dev uplink
ip address add 2001:db8:0:2::1/64 dev uplink nodad
for link in br0 br1 lan0 uplink; do ip link set $link up; done
ip -netns lan address add {LAN4}/24 dev eth0
ip -netns lan address add {LAN6}/64 dev eth0 nodad
ip -netns lan address add {FAR4}/24 dev eth1
ip -netns lan address add {FAR6}/64 dev eth1 nodad
for link in eth0 eth1; do ip -netns lan link set $link up; done
echo 1 >/proc/sys/net/ipv6/conf/all/forwarding
"""

MACHINES = {
    "pc": ["-M", "pc", "-smp", "2"],
    # What is plugged in goes into the ports; pcie.0 takes nothing while it runs.
    "q35": ["-M", "q35", "-smp", "2"]
    + [
        word
        for number in range(1, 4)
        for word in ("-device", f"pcie-root-port,id=port{number},chassis={number},slot={number}")
    ],
}
SCSI = ["-device", "virtio-scsi-pci,id=scsi0"]


def give_network(machine: Machine) -> None:
    """Two bridges, and a host beyond; the addresses are this module's."""
    machine.shell(_NETWORK)


class Vm:
    """A guest and the commands that plug into it.

    :param socket: its QMP socket, as the machine knows it.
    """

    def __init__(self, machine: Machine, guest: Guest, *, socket: Path | None = None) -> None:
        self.machine = machine
        self.guest = guest
        self.socket = socket or CONTROL / f"{guest.name}.qmp"

    def brine(self, noun: str, verb: str, *args: str | Path) -> str:
        """Run `brine NOUN VERB --qmp SOCKET ARGS...`; returns what it said."""
        return brine(self.machine, noun, verb, "--qmp", self.socket, *args).stdout

    def plug(self, noun: str, *args: str | Path) -> str:
        """`add` a NIC or a disk; returns the device's id."""
        said = self.brine(noun, "add", *args)
        match = re.match(r"(plugged in|unchanged): ([^,]+),", said)
        assert match, said
        return match[2]

    def unplug(self, noun: str, device: str, *args: str | Path) -> str:
        """`remove` it; returns what was said."""
        return self.brine(noun, "remove", device, *args)

    def refusal(self, noun: str, verb: str, *args: str | Path) -> str:
        """The error of a command that must fail with status 1: one line, and perhaps a hint."""
        try:
            said = self.brine(noun, verb, *args)
        except CommandError as error:
            assert error.returncode == 1, error
            first, *hint = error.stderr.splitlines()
            assert first.startswith("brine: error: "), error
            assert len(hint) <= 2, error
            return error.stderr
        raise AssertionError(f"it did not fail: {said}")

    def listed(self, noun: str) -> list[dict[str, Any]]:
        """The rows of `list`."""
        found: list[dict[str, Any]] = json.loads(self.brine(noun, "list", "--json"))
        return found

    def taps(self) -> list[dict[str, Any]]:
        """The rows of `brine tap list` for this VM."""
        listed = json.loads(brine(self.machine, "tap", "list", "--json").stdout)
        return [tap for tap in listed if tap["instance"] == self.guest.name]

    def clear(self) -> None:
        """Unplug all that a test that failed has left."""
        self.guest.qmp("cont")
        for noun in ("nic", "disk"):
            for device in self.listed(noun):
                self.unplug(noun, str(device["device_id"]))

    def traces(self) -> Traces:
        """All that plugging has made so far."""
        return traces(self.machine, self.guest)


@contextmanager
def start_vm(
    machine: Machine,
    name: str,
    options: Sequence[str] = (),
    *,
    user: str = "",
    kvm: bool = False,
) -> Iterator[Vm]:
    """A VM that has begun to boot; see start_guest()."""
    machine.path(CONTROL).mkdir(parents=True, exist_ok=True)
    with start_guest(
        machine, name, control_dir=CONTROL, user=user, kvm=kvm, extra_args=options
    ) as guest:
        yield Vm(machine, guest)


@contextmanager
def nothing_left(vm: Vm) -> Iterator[Vm]:
    """Check that the block unplugs all that it plugs in, and leaves no trace.

    Else the next test finds the VM clean nevertheless.
    """
    vm.guest.check_running()
    before = vm.traces()
    yield vm
    vm.guest.check_running()
    left = differences(vm.traces(), before)
    if left:
        vm.guest.check_running()  # one that has ended meanwhile says more than what it lost
        vm.clear()
    assert not left, f"left, and lost: {left}"


def connect(guest: Guest, mac: str, *addresses: str) -> str:
    """Give the NIC with that MAC addresses in the guest, and put it up; returns its name.

    Addresses without the length of a prefix are routed ones: all else is behind the NIC.
    """
    nic = wait_nic(guest, mac)
    # Nobody else has these addresses.
    commands = [f"echo 0 >/proc/sys/net/ipv6/conf/{nic}/accept_dad", f"ip link set {nic} up"]
    for address in addresses:
        family = "-6" if ":" in address else "-4"
        commands.append(f"ip {family} address add {address} dev {nic}")
        if "/" not in address and family == "-6":
            commands.append(f"ip -6 route add default via fe80::1 dev {nic}")
        elif "/" not in address:
            # Any router will do: the node answers for all that it has a route to.
            commands.append(f"ip route add {FAR4} dev {nic} scope link")
            commands.append(f"ip route add default via {FAR4}")
    guest.run(" && ".join(commands))
    return nic


def reaches(guest: Guest, address: str, *, tries: int = 20) -> bool:
    """Whether a packet from the guest to an address is answered."""
    ping = f"ping -q -c 1 -W 1 {address} >/dev/null 2>&1"
    loop = f"for i in $(seq {tries}); do {ping} && echo answered && break; usleep 100000; done"
    return "answered" in guest.run(loop)


@contextmanager
def told(what: str) -> Iterator[None]:
    """Print how long the block took: for people, nothing is asserted of it."""
    start = time.monotonic()
    yield
    print(f"{what}: {time.monotonic() - start:.2f} s")
