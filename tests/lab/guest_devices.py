"""What a guest sees of its NICs and disks."""

from __future__ import annotations

from dataclasses import dataclass

from lab.guest import Guest
from lab.waiting import wait_for

_NICS = "for f in /sys/class/net/*/address; do echo $f $(cat $f); done"
# virtio-blk has a file for the serial; SCSI has it in page 0x80, after a header of four bytes.
_DISKS = (
    "for d in /sys/block/*; do [ -e $d/device ] || continue;"
    " s=$(cat $d/serial 2>/dev/null || tail -c +5 $d/device/vpd_pg80 2>/dev/null);"
    " echo ${d##*/} $(cat $d/size) $(cat $d/ro) $s; done"
)


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
        name, sectors, read_only, serial = line.split()
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
