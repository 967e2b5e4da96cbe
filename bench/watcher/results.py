"""What is to be measured, and what was."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

PASS = "brine watcher run"
DRY = "brine watcher run --dry-run"
LIST = "brine instance list"
SHOW = "systemctl show, of all instances' units"
SHOW_SOME = "the same, of what Brine wants to know"
XL = "xl list -v"
PYTHON = "python3 -c pass"
HELP = "brine watcher --help"


class Scene(StrEnum):
    """What the instances do, none of which anything is to be done about."""

    RUNNING = "all run"
    SOME = "20 run"
    DOWN = "none runs"
    XEN = "domains of an emulated Xen's"


@dataclass(frozen=True)
class Plan:
    """What to measure, how much.

    :param instances: how many are defined, and *some* how many run where not all do.
    :param domains: how many domains there are of Xen's, and nothing else; 0 is none.
    """

    rounds: int
    instances: int
    some: int
    domains: int = 0


@dataclass
class Results:
    """All samples, in seconds, in the order of the rounds: by scene, and by what was run."""

    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Results":
        """The opposite of dataclasses.asdict."""
        return cls(**fields)
