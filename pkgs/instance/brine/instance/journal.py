"""What QEMU and what prepared it had to say, from the journal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from brine.common.journal_sender import KVMD_USER, is_from
from brine.common.printable import printable

_MOST = 20
_OURS = "brine-instance: error: "
_HINT = "brine-instance: hint: "
_ENDED = "see what it said above"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why an instance did not start."""

    text: str
    hint: str | None = None


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


def last_verdict(name: str, since_s: float) -> Verdict | None:
    """The verdict on the latest end of an instance; None if none is known.

    :param since_s: when it was started last, in seconds since 1970.
    """
    from systemd import journal

    reader = journal.Reader()
    try:
        reader.add_match(BRINE_INSTANCE=name, BRINE_EVENT="verdict")
        reader.seek_tail()
        while record := reader.get_previous():
            if record["__REALTIME_TIMESTAMP"].timestamp() < since_s:
                return None
            if is_from(record, KVMD_USER):
                who, cause = record.get("BRINE_VERDICT", ""), record.get("BRINE_CAUSE", "")
                return Verdict(printable(str(who)), printable(str(cause)))
    finally:
        reader.close()
    return None


def reason_in(name: str, lines: Sequence[str]) -> Reason | None:
    """Which of these lines says why.

    :param lines: of a run, the oldest first.
    """
    hints = [line.removeprefix(_HINT) for line in lines if line.startswith(_HINT)]
    ours = [line for line in lines if line.startswith(_OURS) and _ENDED not in line]
    theirs = [line for line in lines if not line.startswith((_OURS, _HINT))]
    faults = [line for line in theirs if line.startswith("qemu") and ": warning: " not in line]
    for found in (ours, faults, theirs):
        if found:
            text = found[-1].removeprefix(_OURS).removeprefix(f"{name}: ")
            return Reason(text, hints[-1] if hints and found is ours else None)
    return None


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
