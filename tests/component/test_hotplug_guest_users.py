"""A QEMU that may open nothing: it plugs NICs and disks in through descriptors alone."""

from __future__ import annotations

import enum
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from component.hotplug_vm import LAN4, MACHINES, SCSI, Vm, connect, nothing_left, reaches, start_vm
from lab.guest_devices import wait_disk, wait_gone
from lab.machine import Machine

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="networks take root")

MAC = "52:54:00:aa:00:01"
DISK = "11111111-2222-4333-8444-555555555555"
SERIAL = DISK[:20]
MIB = 1 << 20
USER, NOBODY = "nobody", 65534
# An empty folder that every machine has.
ROOT = "/run/brine/empty"


class Way(enum.Enum):
    """How a QEMU comes to have no rights."""

    RUNAS = "runas"
    """Started by root, it becomes somebody else."""
    CHROOT = "chroot"
    """The same, and it sees an empty folder only."""
    ANOTHER_USER = "another-user"
    """Started by somebody else."""


@contextmanager
def started(machine: Machine, way: Way) -> Iterator[Vm]:
    """A running guest that was started in that way."""
    control = machine.path("/run/brine/ctrl")
    machine.path(ROOT).mkdir(parents=True, exist_ok=True)
    user = USER if way is Way.ANOTHER_USER else ""
    if user:
        os.chown(control, NOBODY, 0)
    options = [*MACHINES["pc"], *SCSI, *_options(machine, way)]
    try:
        with start_vm(machine, way.value, options, user=user) as vm:
            vm.guest.wait_ready()
            yield vm
    finally:
        os.chown(control, 0, 0)


def _options(machine: Machine, way: Way) -> list[str]:
    version = machine.run(["qemu-system-x86_64", "--version"]).stdout.split()[3]
    is_new = int(version.partition(".")[0]) >= 10
    chroot = f"chroot={ROOT}"
    match way:
        case Way.RUNAS:
            return ["-run-with", f"user={USER}"] if is_new else ["-runas", USER]
        case Way.CHROOT if is_new:
            return ["-run-with", f"user={USER},{chroot}"]
        case Way.CHROOT:
            return ["-runas", USER, "-chroot", ROOT]
        case Way.ANOTHER_USER:
            return []


@pytest.mark.parametrize("way", Way, ids=lambda way: way.value)
def test_what_qemu_may_not_open_is_handed_to_it(machine: Machine, images: Path, way: Way) -> None:
    image = images / "secret.img"
    image.write_bytes(b"of root's\n".ljust(4 * MIB, b"\0"))
    image.chmod(0o600)
    os.chown(image, 0, 0)
    with started(machine, way) as booted, nothing_left(booted) as vm:
        status = Path(f"/proc/{vm.guest.pid}/status").read_text()
        assert f"Uid:\t{NOBODY}\t{NOBODY}\t{NOBODY}\t{NOBODY}\n" in status
        assert _capabilities(status) == 0
        if way is Way.CHROOT:
            assert list(Path(f"/proc/{vm.guest.pid}/root").iterdir()) == []

        vm.plug("nic", "--link", "br0", "--mac", MAC, "--queues", "2")
        connect(vm.guest, MAC, "192.0.2.10/24")
        assert reaches(vm.guest, LAN4)
        for bus in ("pci", "scsi"):
            vm.plug("disk", "--path", image, "--uuid", DISK, "--bus", bus)
            name = wait_disk(vm.guest, SERIAL).name
            assert vm.guest.run(f"head -c 9 /dev/{name}") == "of root's"
            vm.guest.run(f"echo {bus} | dd of=/dev/{name} bs=512 seek=2048 conv=fsync,sync 2>&1")
            vm.unplug("disk", DISK)
            wait_gone(vm.guest, SERIAL)
            with image.open("rb") as data:
                data.seek(MIB)
                assert data.read(len(bus)) == bus.encode()
        vm.unplug("nic", MAC)
    assert stat.S_IMODE(image.stat().st_mode) == 0o600
    assert image.stat().st_uid == 0


def _capabilities(status: str) -> int:
    line = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    return int(line.split()[1], 16)
