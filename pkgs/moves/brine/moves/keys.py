"""Where the key of a move is, for the QEMU of an instance, and whose file it is there."""

from __future__ import annotations

from pathlib import Path

from brine.instance.kvm.resources import EMPTY_ROOT
from brine.instance.store import started_as
from brine.moves.move_key import KeyFolder
from brine.moves.records import MoveRecord
from brine.vm.runtime_file import LastStart

_OUTSIDE = Path("/run/brine/moves")


def key_folder(name: str) -> KeyFolder:
    """The folder of the key of a move, as this process and the instance's QEMU find it.

    A QEMU that has a root of its own finds it there: that is the only thing in it.
    """
    spec = started_as(name)
    if spec and not spec.chroot:
        place = _OUTSIDE / f"{name}.key"
        return KeyFolder(place, place)
    return KeyFolder(EMPTY_ROOT / f"move-{name}", Path(f"/move-{name}"))


def key_folder_of(record: MoveRecord) -> KeyFolder | None:
    """The same; None if the guest is off, or nothing is encrypted."""
    wishes = record.facts.get("wishes") or {}
    is_used = record.move.is_live and not wishes.get("plaintext")
    return key_folder(record.name) if is_used else None


def qemu_user(name: str) -> int | None:
    """The id of the user of an instance's QEMU."""
    started = LastStart.read(name)
    return started.user if started and isinstance(started.user, int) else None
