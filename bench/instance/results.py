"""What is to be measured, and what was."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Guest(StrEnum):
    """What is started."""

    PLAIN = "no disk, no NIC"
    USUAL = "a disk and a NIC"
    CONFINED = "the same, with a user and a root of its own"


class Way(StrEnum):
    """How it is started."""

    BRINE = "brine instance start"
    VIRSH = "virsh start"
    QEMU = "QEMU alone"


UNIT = "systemctl start, of a unit that sleeps"
PYTHONS = "the same, with three bare Pythons"

BRINE_LIST = "brine instance list"
BRINE_LIST_JSON = "brine instance list --json"
VIRSH_LIST = "virsh list --all"
PASS = "python3 -c pass"
USUAL_IMPORTS = "import argparse, json"
SYSTEMCTL_SHOW = "systemctl show, of all instances' units"
READ_SPECS = "import json; read and parse all specs"


@dataclass(frozen=True)
class Plan:
    """What to measure, how much.

    :param settle_s: how long the machine is left alone after something was stopped.
    :param instances: how many are defined for the lists; so many of them run.
    :param guest: the folder of a kernel and an initramfs; *images* is one for images of disks.
    """

    rounds: int
    settle_s: float
    instances: int
    running: int
    bridge: str
    guest: str
    images: str


@dataclass(frozen=True)
class Start:
    """One start, in seconds since before the command was started.

    :param exec_s: until a process began to execute QEMU, or what a unit has in its stead.
    :param answers_s: until QEMU answered on a QMP socket; None where there is no QEMU.
    :param returned_s: until the command had ended; None where there is none.
    """

    exec_s: float
    answers_s: float | None = None
    returned_s: float | None = None


@dataclass
class Results:
    """All samples, in the order of the rounds.

    :param starts: by :func:`series`, or by the name of a floor.
    :param lists: in seconds, by what was run.
    """

    starts: dict[str, list[Start]] = field(default_factory=dict)
    lists: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Results":
        """The opposite of dataclasses.asdict."""
        starts = {name: [Start(**one) for one in found] for name, found in fields["starts"].items()}
        return cls(starts, fields["lists"])


def series(guest: Guest, way: Way) -> str:
    """The name of what was measured."""
    return f"{guest}: {way}"
