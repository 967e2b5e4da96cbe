"""Moving logical volumes off a physical volume, within its volume group: :manpage:`pvmove(8)`.

LVM moves a volume while it is used, and goes on with a move that was interrupted. It moves the
extents in several pieces here, so that each is there in a short time, and a rate can be kept.
"""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from brine.common.progress import Tell, tell_nothing
from brine.storage import lvm
from brine.storage.lvm_units import LvmPv

STUCK_S = 300.0
"""How long LVM may copy nothing before it is given up."""

_PIECE_BYTES = 1 << 30
_PIECE_S = 4.0
"""So long LVM takes for a piece at a given rate."""
_END_S = 30.0
_MOVED = re.compile(r": Moved: ([0-9.]+)%")


@dataclass(frozen=True, slots=True)
class Occupant:
    """A logical volume with extents on a physical volume.

    :param name: of the volume; of a part of one, LVM's own.
    :param disk: the UUID of its disk; empty if it is no volume of Brine's.
    :param ranges: the extents there: the first, and how many.
    :param extent_size: in bytes.
    """

    group: str
    name: str
    disk: str
    ranges: tuple[tuple[int, int], ...]
    extent_size: int

    @property
    def extents(self) -> int:
        return sum(count for _, count in self.ranges)

    @property
    def size(self) -> int:
        """What it has there, in bytes."""
        return self.extents * self.extent_size


def occupants(pv: LvmPv) -> list[Occupant]:
    """The logical volumes with extents on a physical volume, in the order of their names.

    :raises brine.storage.lvm.LvmError: if they can't be found out.
    """
    fields = "vg_name,vg_extent_size,lv_name,lv_tags,segtype,pvseg_start,pvseg_size"
    found: dict[str, list[lvm.Row]] = {}
    for row in lvm.rows("pvseg", "pvs", "--segments", "-o", fields, pv.name):
        if row["lv_name"] and row["segtype"] != "free":
            found.setdefault(row["lv_name"].strip("[]"), []).append(row)
    return [_occupant(name, rows) for name, rows in sorted(found.items())]


def _occupant(name: str, rows: list[lvm.Row]) -> Occupant:
    disk = lvm.tag_of(rows[0], lvm.DISK_TAG)
    ranges = tuple((int(row["pvseg_start"]), int(row["pvseg_size"])) for row in rows)
    return Occupant(rows[0]["vg_name"], name, disk, ranges, int(rows[0]["vg_extent_size"]))


def finish_interrupted(tell: Tell = tell_nothing) -> None:
    """Have LVM go on with moves that were interrupted, and wait for their end.

    :raises brine.storage.lvm.LvmError: if that fails.
    """
    _run(lambda done: tell(done, "what was being moved"), "pvmove", "--interval", "1")


def move_off(pv: LvmPv, occupant: Occupant, *, rate: int = 0, tell: Tell = tell_nothing) -> None:
    """Move a volume's extents off a physical volume. Allocation there is off.

    :param rate: bytes per second on average; 0 is as fast as LVM can.
    :raises brine.storage.lvm.LvmError: if there is no space for it in the volume group, or LVM
        fails. What was moved stays moved.
    """
    text, moved, began = f"{occupant.group}/{occupant.name}", 0, time.monotonic()
    for first, count in _pieces(occupant, rate):
        extents = f"{pv.name}:{first}-{first + count - 1}"

        def told(done: float, moved: int = moved, count: int = count) -> None:
            tell((moved + done * count) / occupant.extents, text)

        told(0)
        _run(told, "pvmove", "--interval", "1", "--name", occupant.name, extents)
        moved += count
        tell(moved / occupant.extents, text)
        if rate and moved < occupant.extents:
            time.sleep(max(began + moved * occupant.extent_size / rate - time.monotonic(), 0))


def _pieces(occupant: Occupant, rate: int) -> Iterator[tuple[int, int]]:
    """The ranges of extents that are moved at a time."""
    size = min(_PIECE_BYTES, int(rate * _PIECE_S)) if rate else _PIECE_BYTES
    most = max(size // occupant.extent_size, 1)
    for first, count in occupant.ranges:
        for offset in range(0, count, most):
            yield first + offset, min(most, count - offset)


def _run(tell: Callable[[float], object], *arguments: str) -> None:
    """Run a command that takes as long as it copies. One that is stuck is left to itself."""
    command, environment = lvm.program(*arguments)
    with tempfile.TemporaryFile() as said:
        program = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            env=environment,
            start_new_session=True,  # a key that interrupts Brine leaves it whole
        )
        try:
            _follow(program, tell)
            status = program.wait(_END_S)
        except subprocess.TimeoutExpired:
            raise _stuck(_END_S) from None
        finally:
            lvm.forget()
        said.seek(0)
        if status:
            raise lvm.LvmError(f"lvm pvmove: {lvm.fault_of(said.read().decode(), status)}")


def _follow(program: subprocess.Popen[bytes], tell: Callable[[float], object]) -> None:
    """Read what a command says of its progress, to its end."""
    assert program.stdout
    deadline, before = time.monotonic() + STUCK_S, -1.0
    with selectors.DefaultSelector() as ready, program.stdout as output:
        ready.register(output, selectors.EVENT_READ)
        while ready.select(max(deadline - time.monotonic(), 0)):
            if not (data := os.read(output.fileno(), 65536)):
                return
            for found in _MOVED.findall(data.decode(errors="replace")):
                if (done := float(found) / 100) > before:
                    deadline, before = time.monotonic() + STUCK_S, done
                    tell(min(done, 1.0))
            if time.monotonic() >= deadline:
                break
    raise _stuck(STUCK_S)


def _stuck(seconds: float) -> lvm.LvmError:
    text = f"lvm pvmove: has copied nothing for {seconds:g} s"
    hint = "a device may not answer; lvm pvmove goes on with it, and lvm pvmove --abort gives up"
    return lvm.LvmError(text, hint=hint)
