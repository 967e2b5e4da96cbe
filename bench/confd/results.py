"""What is to be measured, and what was."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Plan:
    """What to measure, how much; `ganeti` has the fields of lab.ganeti.Confd, or is empty."""

    sizes: list[int]
    rounds: int
    seconds: float
    warm_up_s: float
    replacements: int
    ganeti: dict[str, str]
    with_brine: bool


@dataclass
class Load:
    """One kind of question, asked for a while; times in seconds."""

    rate: float
    p50_s: float | None
    p99_s: float | None
    worst_s: float | None
    answers: int
    lost: int
    wrong: int
    """Replies in the sample that were not the right answer, or not authentic."""
    complaint: str
    """The first of those, shortened."""
    serials: int
    """How many different serial numbers the sample has."""


@dataclass
class Round:
    """One daemon at one size, once. `trouble` says why what is missing is missing."""

    daemon: str
    size: int
    favoured: bool = False
    start_s: float | None = None
    start_kib: int | None = None
    end_kib: int | None = None
    warm: dict[str, Load] = field(default_factory=dict)
    """By the kind's title, as are the others."""
    first: dict[str, Load] = field(default_factory=dict)
    """Each query asked at most once, of a daemon that was just started."""
    bad_s: dict[str, float] = field(default_factory=dict)
    """The processor time that a large datagram of somebody without the key costs, by its kind."""
    replacing: Load | None = None
    """While the configuration is replaced again and again."""
    trouble: str = ""

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Round":
        """The opposite of dataclasses.asdict."""
        loads = {
            name: {title: Load(**load) for title, load in fields[name].items()}
            for name in ("warm", "first")
        }
        replacing = fields["replacing"] and Load(**fields["replacing"])
        return cls(**{**fields, **loads, "replacing": replacing})

    def loads(self) -> list[Load]:
        """All of them."""
        replacing = [self.replacing] if self.replacing else []
        return [*self.warm.values(), *self.first.values(), *replacing]
