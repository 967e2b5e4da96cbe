"""A guest's view of its NICs and disks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lab.waiting import wait_for

# A device that is just coming has its folder before its files; one that is going loses them first.
_NICS = "for f in /sys/class/net/*/address; do m=$(cat $f) && echo $f $m; done 2>/dev/null"
# virtio-blk has a file for the serial; SCSI has it in page 0x80, after a header of four bytes.
_DISKS = (
    "for d in /sys/block/*; do [ -e $d/device ] || continue;"
    " size=$(cat $d/size) && ro=$(cat $d/ro) &&"
    " s=$(cat $d/serial || tail -c +5 $d/device/vpd_pg80) &&"
    " [ $s ] && echo ${d##*/} $size $ro $s; done 2>/dev/null"
)


class Guest(Protocol):
    """Runs shell commands in a guest, and returns their output."""

    name: str

    def run(self, command: str) -> str: ...


@dataclass(frozen=True)
class SeenDisk:
    """A disk as a guest sees it: `/dev/<name>`, so large, and whether it may write to it."""

    name: str
    size_bytes: int
    read_only: bool


def seen_nics(guest: Guest) -> dict[str, str]:
    """The names of the guest's NICs by their MAC."""
    lines = [line.split() for line in guest.run(_NICS).splitlines()]
    return {mac: path.split("/")[4] for path, mac in lines if mac != "00:00:00:00:00:00"}


def seen_disks(guest: Guest) -> dict[str, SeenDisk]:
    """The guest's disks by their serial."""
    found = {}
    for line in guest.run(_DISKS).splitlines():
        if len(fields := line.split()) != 4:
            continue  # one that is just going
        name, sectors, read_only, serial = fields
        found[serial] = SeenDisk(name, int(sectors) * 512, read_only == "1")
    return found


def wait_nic(guest: Guest, mac: str) -> str:
    """Wait until the guest has a NIC with that MAC; return its name."""
    return wait_for(f"NIC {mac} in guest {guest.name}", lambda: seen_nics(guest).get(mac))


def wait_disk(guest: Guest, serial: str) -> SeenDisk:
    """Wait until the guest has a disk with that serial; return it."""
    return wait_for(f"disk {serial} in guest {guest.name}", lambda: seen_disks(guest).get(serial))


def wait_gone(guest: Guest, known_as: str) -> None:
    """Wait until the guest has neither a NIC with that MAC nor a disk with that serial."""
    wait_for(
        f"{known_as} to be gone from guest {guest.name}",
        lambda: known_as not in seen_nics(guest) and known_as not in seen_disks(guest),
    )
