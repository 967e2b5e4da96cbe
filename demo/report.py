"""What the demo has seen, as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from demo.endings import Ending


@dataclass(frozen=True)
class Seen:
    """An ending and the verdict that the journal has on it; times are microseconds since 1970."""

    ending: Ending
    acted_usec: int
    record: dict[str, Any]

    @property
    def verdict(self) -> str:
        return str(self.record.get("BRINE_VERDICT", "-"))

    @property
    def cause(self) -> str:
        return str(self.record.get("BRINE_CAUSE", "-"))

    @property
    def right(self) -> bool:
        return (self.verdict, self.cause) == (self.ending.verdict, self.ending.cause)

    @property
    def delay_ms(self) -> float:
        """From QEMU's last event, or from the act where there was none, to the verdict."""
        given = int(self.record["_SOURCE_REALTIME_TIMESTAMP"])
        began = int(self.record.get("BRINE_EVENT_TIME_USEC", self.acted_usec))
        return (given - began) / 1000


HEADINGS = ("instance", "what was done", "verdict", "cause", "ms", "")


def table(all_seen: Sequence[Seen]) -> str:
    """One line an ending; `ms` is from the end's event to the verdict in the journal."""
    rows = [HEADINGS]
    for seen in all_seen:
        expected = f"WRONG: {seen.ending.verdict} {seen.ending.cause}"
        mark = "right" if seen.right else expected
        delay = f"{seen.delay_ms:.1f}" if seen.record else "-"
        instance, done = seen.ending.instance, seen.ending.done
        rows.append((instance, done, seen.verdict, seen.cause, delay, mark))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        cells[4] = row[4].rjust(widths[4])
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
