"""Making and removing logical volumes, beside LVM's own commands, on a kernel that maps devices."""

import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench import lvm, machine
from bench.harness import Plan, Report, Table, TableRow, in_turns, timed
from brine.storage.plain_volume import PlainVolume
from brine.storage.volume import VolumeRequest, Wipe

LIMIT = 1.5
"""The driver, beside LVM's two commands."""

_SIZE = 64 << 20
_GROUP_SIZE = 512 << 20
_LVM, _DRIVER, _ZEROED = "lvcreate + lvremove", "driver: create + remove", "the same, zeroed"


def measure(plan: Plan) -> Report:
    """Make and remove one volume after another."""
    with lvm.volume_group(Path("/tmp/bench-lvm"), _GROUP_SIZE):
        pairs: dict[str, Callable[[], float]] = {
            _LVM: _by_lvm,
            _DRIVER: partial(_by_driver, Wipe.ENDS),
            _ZEROED: partial(_by_driver, Wipe.ZERO),
        }
        took = in_turns("volumes", plan.rounds, pairs, warm_up=True)
    beside = TableRow.of_times(_LVM, took[_LVM])
    driver = TableRow.of_times(_DRIVER, took[_DRIVER]).beside(beside, "LVM").at_most(LIMIT)
    zeroed = TableRow.of_times(_ZEROED, took[_ZEROED]).beside(beside, "LVM")
    heads = [*machine.description(), f"emulated; rounds: {plan.rounds}"]
    return Report(heads, [Table("a volume of 64 MiB", [beside, driver, zeroed])], took)


def _by_lvm() -> float:
    options = ["--yes", "--wipesignatures", "y", "--zero", "y", "--size", f"{_SIZE}b"]
    return timed(
        ["lvm", "lvcreate", *options, "--name", "plain", lvm.GROUP],
        ["lvm", "lvremove", "--yes", f"{lvm.GROUP}/plain"],
    )


def _by_driver(wipe: Wipe) -> float:
    began_at = time.perf_counter()
    volume = PlainVolume(lvm.GROUP, str(uuid.uuid4()))
    volume.create(VolumeRequest(size=_SIZE, owner="web1", name="data", wipe=wipe))
    volume.remove()
    return time.perf_counter() - began_at
