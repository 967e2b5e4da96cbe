"""What the KVM daemon has counted since the node's boot: verdicts, and VMs that stood still."""

from __future__ import annotations

from collections import Counter
from typing import Any

from brine.common.figures import Figures, count_kind, rows_of
from brine.kvmd.verdict import Verdict
from brine.vm.halt import Halt


class Tally:
    """Its counts, which survive a restart of the daemon.

    :param earlier: what the daemon's last process has left.
    """

    def __init__(self, earlier: Figures | None = None) -> None:
        self._verdicts = earlier.counts("verdicts", 2) if earlier else Counter()
        self._halts = earlier.counts("halts", 2) if earlier else Counter()
        self._delays = int(earlier.number("delays")) if earlier else 0
        self._delay_s = earlier.number("delay_s") if earlier else 0.0

    def count_verdict(self, verdict: Verdict, cause: str) -> None:
        """Count a verdict.

        :param cause: its cause, printable.
        """
        count_kind(self._verdicts, (str(verdict.who), cause))
        if verdict.time_usec is not None:
            self._delays += 1
            self._delay_s += max(verdict.given_usec - verdict.time_usec, 0) / 1e6

    def count_halt(self, halt: Halt) -> None:
        """Count a VM that stands still without an administrator's doing."""
        count_kind(self._halts, (halt.state, halt.reason))

    def values(self) -> dict[str, Any]:
        """The counts, for the file of figures."""
        return {
            "verdicts": rows_of(self._verdicts),
            "halts": rows_of(self._halts),
            "delays": self._delays,
            "delay_s": round(self._delay_s, 6),
        }
