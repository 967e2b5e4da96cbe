"""The demo's report for people, which says how much of it is right."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from demo.endings import Ending
from lab.node import Node
from lab.salt import StateResult


@dataclass(frozen=True)
class Score:
    """So many of so many, of what."""

    right: int
    of: int
    what: str

    def __str__(self) -> str:
        return f"{self.right} of {self.of} {self.what}"


@dataclass(frozen=True)
class Seen:
    """An ending, and what was said of it: the journal's record of the verdict, and an object of
    `brine instance list --json`; both are empty where there is none."""

    ending: Ending
    record: Mapping[str, Any]
    listed: Mapping[str, Any]

    @property
    def verdict(self) -> tuple[str, str]:
        """The party that ended it, and the evidence."""
        return str(self.record.get("BRINE_VERDICT", "")), str(self.record.get("BRINE_CAUSE", ""))

    @property
    def status(self) -> str:
        return str(self.listed.get("status", ""))

    @property
    def verdict_is_right(self) -> bool:
        return self.verdict == (self.ending.verdict, self.ending.cause)

    @property
    def state_is_right(self) -> bool:
        """Whether the status is, and the sentence beside it."""
        why = str(self.listed.get("why", ""))
        expected = self.ending.why
        return self.status == self.ending.status and (expected in why if expected else not why)

    @property
    def is_right(self) -> bool:
        return self.verdict_is_right and self.state_is_right


def verdict_of(node: Node, instance: str) -> Mapping[str, Any]:
    """The journal's record of the last verdict on an instance, also from before the node's boot;
    empty if there is none."""
    found = node.journal("--boot=all", "BRINE_EVENT=verdict", f"BRINE_INSTANCE={instance}")
    return found[-1] if found else {}


def listed(node: Node, instance: str) -> Mapping[str, Any]:
    """The row of an instance in `brine instance list`."""
    found = json.loads(node.run(["brine", "instance", "list", "--json"]).stdout)
    return next((one for one in found if one["name"] == instance), {"status": "unknown"})


def highstate(answers: Mapping[str, Sequence[StateResult]]) -> str:
    """One line a node."""
    return "\n".join(
        f"{minion}: {len(results)} states, {sum(bool(one.changes) for one in results)} changed"
        for minion, results in answers.items()
    )


def scores(all_seen: Sequence[Seen]) -> list[Score]:
    """How many verdicts and states are right."""
    verdicts = sum(seen.verdict_is_right for seen in all_seen)
    states = sum(seen.state_is_right for seen in all_seen)
    return [
        Score(verdicts, len(all_seen), "verdicts are right"),
        Score(states, len(all_seen), "states are right"),
    ]


HEADINGS = ("instance", "what was done", "verdict", "cause", "status", "")


def table(all_seen: Sequence[Seen]) -> str:
    """One line an ending."""
    rows = [HEADINGS, *map(_row, all_seen)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths).rstrip())
    return "\n".join(lines)


def _row(seen: Seen) -> tuple[str, ...]:
    ending = seen.ending
    mark = "right"
    if not seen.is_right:
        expected = (ending.verdict, ending.cause, ending.status, ending.why)
        mark = f"WRONG: {', '.join(filter(None, expected))}"
    said = (one or "-" for one in (*seen.verdict, seen.status))
    return (ending.instance, ending.done, *said, mark)
