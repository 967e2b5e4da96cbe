"""Where the key of a move is, for the QEMU of an instance."""

from __future__ import annotations

from pathlib import Path

from brine.instance.kvm.resources import EMPTY_ROOT
from brine.instance.store import started_as
from brine.moves.move_key import KeyFolder

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
