"""What is to be measured, and what was."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Device(StrEnum):
    """What is plugged in."""

    DISK = "disk"
    NIC = "nic"


class Way(StrEnum):
    """How it is plugged in."""

    LIBRARY = "library"
    SAME = "same round trips"
    FEWEST = "fewest round trips"
    SAME_AND_TAP = "same round trips and a bare tap"
    COMMAND = "brine"
    VIRSH = "virsh"


@dataclass(frozen=True)
class Plan:
    """What to measure, how much.

    :param settle_s: how long a guest is left alone after a device was plugged in or out.
    :param qmp: of the guest that libvirt started: a monitor besides libvirt's own.
    :param folder: where images of disks are made.
    """

    rounds: int
    settle_s: float
    domain: str
    qmp: str
    bridge: str
    folder: str


@dataclass(frozen=True)
class Pair:
    """A device plugged in and taken out again, in seconds.

    :param guest_s: how long the guest took to let go, a part of *remove_s*; None where that can't
        be seen.
    """

    add_s: float
    remove_s: float
    guest_s: float | None = None


@dataclass
class Results:
    """All samples, in the order of the rounds.

    :param pairs: by :func:`series`.
    :param singles: in seconds, by what was run.
    :param orders: how many QMP commands an add and a remove are, by :func:`series`.
    """

    pairs: dict[str, list[Pair]] = field(default_factory=dict)
    singles: dict[str, list[float]] = field(default_factory=dict)
    orders: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Results":
        """The opposite of dataclasses.asdict."""
        pairs = {name: [Pair(**one) for one in found] for name, found in fields["pairs"].items()}
        return cls(**{**fields, "pairs": pairs})


def series(device: Device, way: Way) -> str:
    """The name of what was measured."""
    return f"{device}: {way}"
