"""The verdict on an end, out of the journal: of the run that is meant, however late it came."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from systemd import journal as systemd_journal

from brine.instance.history import EndReference, RecordedVerdict, last_verdicts

RUN, NEXT_RUN = "0d" * 16, "0e" * 16


def record(name: str, time_s: float, who: str, run: str | None) -> dict[str, Any]:
    """One of brine-kvmd's."""
    time = datetime.datetime.fromtimestamp(time_s, datetime.UTC)
    found = {"__REALTIME_TIMESTAMP": time, "_UID": 0, "BRINE_INSTANCE": name, "BRINE_VERDICT": who}
    return {**found, "BRINE_CAUSE": "cause"} if run is None else {**found, "BRINE_RUN": run}


class Records:
    """A journal that has these records; the newest is the last."""

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self._records = list(records)

    def __call__(self) -> Records:
        return self

    def add_match(self, **_: str) -> None:
        """All of them match."""

    def seek_tail(self) -> None:
        """There it begins."""

    def get_previous(self) -> dict[str, Any]:
        return self._records.pop() if self._records else {}

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize(
    ("told", "who"),
    [
        # That of the run before came when the next one had begun, and ended.
        ([("user", NEXT_RUN, 3), ("admin", RUN, 4)], "user"),
        ([("admin", RUN, 4)], None),
        # Somebody who has put a socket of his own in the place of the VM's.
        ([("admin", NEXT_RUN, 3), ("user", "unknown", 4)], "admin"),
        # An older brine-kvmd does not say of which run, so that only its time counts.
        ([("crash", None, 3)], "crash"),
        ([("crash", None, 1)], None),
    ],
)
def test_a_late_verdict_is_of_its_own_run(
    monkeypatch: pytest.MonkeyPatch, told: list[tuple[str, str | None, float]], who: str | None
) -> None:
    records = [record("web1", 1000 + time_s, verdict, run) for verdict, run, time_s in told]
    monkeypatch.setattr(systemd_journal, "Reader", Records(records))
    found = last_verdicts({"web1": EndReference(since=1002.0, run=NEXT_RUN)})
    assert {name: verdict.who for name, verdict in found.items()} == ({"web1": who} if who else {})
    assert all(isinstance(verdict, RecordedVerdict) for verdict in found.values())
