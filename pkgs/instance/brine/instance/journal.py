"""What QEMU and what prepared it had to say, from the journal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from brine.common.journal_sender import KVMD_USER, is_from
from brine.common.printable import printable

_MOST = 20
_OURS = "brine-instance: error: "
_HINT = "brine-instance: hint: "
_XL = "Parsing config from "
_ENDED = "see what it said above"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why an instance did not start."""

    text: str
    hint: str | None = None


def start_failures(invocations: Iterable[str]) -> dict[str, str]:
    """Why starts failed, as each told, by systemd's ids of these runs; all in one question.

    :param invocations: of these runs. What told nothing is left out.
    """
    wanted = set(invocations)
    found: dict[str, str] = {}
    with _newest_first("start-failed", "_SYSTEMD_INVOCATION_ID", wanted) as records:
        while len(found) < len(wanted) and (record := next(records, None)):
            if is_from(record, "root"):
                invocation = str(record.get("_SYSTEMD_INVOCATION_ID", "")).replace("-", "")
                found.setdefault(invocation, printable(str(record.get("BRINE_REASON", ""))))
    return found


def why_not_started(name: str, invocation: str) -> Reason | None:
    """Why an instance did not start; None if nothing was said.

    :param invocation: systemd's id of that run of its unit.
    """
    return reason_in(name, _lines(invocation))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What brine-kvmd said of an instance's end.

    :param who: ``user``, ``admin`` or ``crash``.
    :param cause: in QEMU's words.
    """

    who: str
    cause: str


@dataclass(frozen=True, slots=True)
class End:
    """Which end of an instance is meant.

    :param since: when it came at the earliest, in seconds since 1970.
    :param run: of which run of its unit it is.
    """

    since: float
    run: str


def last_verdicts(ends: Mapping[str, End]) -> dict[str, Verdict]:
    """The verdicts on ends of instances, all in one question. One that has none is left out.

    :param ends: by the instance's name. A verdict that came late is of its own run, and no other.
    """
    found: dict[str, Verdict] = {}
    oldest = min((end.since for end in ends.values()), default=0.0)
    with _newest_first("verdict", "BRINE_INSTANCE", ends) as records:
        while len(found) < len(ends) and (record := next(records, None)):
            time_s = record["__REALTIME_TIMESTAMP"].timestamp()
            if time_s < oldest:
                break
            name = str(record.get("BRINE_INSTANCE", ""))
            end = ends.get(name)
            if end is None or time_s < end.since:
                continue
            # An older brine-kvmd did not say of which run.
            if str(record.get("BRINE_RUN", end.run)) == end.run and is_from(record, KVMD_USER):
                who, cause = record.get("BRINE_VERDICT", ""), record.get("BRINE_CAUSE", "")
                verdict = Verdict(printable(str(who)), printable(str(cause)))
                found.setdefault(name, verdict)
    return found


@contextlib.contextmanager
def _newest_first(event: str, field: str, values: Iterable[str]) -> Iterator[Iterator[Any]]:
    """The records of an event that have one of these values in a field."""
    from systemd import journal

    reader = journal.Reader()
    try:
        for value in values:
            reader.add_match(**{field: value})
        reader.add_match(BRINE_EVENT=event)
        reader.seek_tail()
        # An empty one is the end.
        yield iter(reader.get_previous, {})
    finally:
        reader.close()


def reason_in(name: str, lines: Sequence[str]) -> Reason | None:
    """Which of these lines says why.

    :param lines: of a run, the oldest first.
    """
    hints = [line.removeprefix(_HINT) for line in lines if line.startswith(_HINT)]
    ours = [line for line in lines if line.startswith(_OURS) and _ENDED not in line]
    theirs = [line for line in lines if not line.startswith((_OURS, _HINT))]
    faults = [line for line in theirs if line.startswith("qemu") and ": warning: " not in line]
    if not ours and any(line.startswith(_XL) for line in theirs):
        return _reason_of_xl(theirs)
    for found in (ours, faults, theirs):
        if found:
            text = found[-1].removeprefix(_OURS).removeprefix(f"{name}: ")
            return Reason(text, hints[-1] if hints and found is ours else None)
    return None


def _reason_of_xl(lines: Sequence[str]) -> Reason | None:
    from brine.instance.xen.faults import fault_in  # most are QEMU's

    fault = fault_in(lines)
    return Reason(printable(fault)) if fault else None


def _lines(invocation: str) -> list[str]:
    from systemd import journal

    reader = journal.Reader()
    reader.add_match(_SYSTEMD_INVOCATION_ID=invocation, _TRANSPORT="stdout")
    reader.seek_tail()
    lines: list[str] = []
    while len(lines) < _MOST and (record := reader.get_previous()):
        lines.append(str(record.get("MESSAGE", "")))
    reader.close()
    return lines[::-1]
