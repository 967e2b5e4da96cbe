"""Why an instance did not start: what its runner has noted, or QEMU or xl has said last."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from brine.common.errors import printable
from brine.common.message import is_from
from brine.vm.run import Run

_MOST_LINES = 20
_LONGEST = 500  # of what QEMU says, in characters
_XL = "Parsing config from "


class StartFailure(NamedTuple):
    """The reason why an instance did not start."""

    text: str
    hint: str | None = None


def why_not_started(name: str, invocation: str) -> StartFailure | None:
    """The reason why an instance did not start, by what its runner has noted, or else by what QEMU
    or xl has said last; None if neither is there.

    :param invocation: systemd's id of that run of its unit.
    """
    if noted := noted_failure(name, invocation):
        return noted
    with newest_first("_SYSTEMD_INVOCATION_ID", [invocation], _TRANSPORT="stdout") as records:
        lines = [str(record.get("MESSAGE", "")) for record in islice(records, _MOST_LINES)]
    text = reason_in(lines[::-1])
    return StartFailure(text) if text else None


def noted_failure(name: str, run: str) -> StartFailure | None:
    """The reason that the runner of a failed start has noted; None if it has noted none."""
    noted = Run(name, run).failure
    return StartFailure(noted.reason, noted.hint) if noted and noted.reason is not None else None


def reason_in(lines: Sequence[str]) -> str | None:
    """The reason in the lines that QEMU or xl has said in a failed run, oldest first, fit for one
    line; None if there is none. Nothing in them counts as Brine's word."""
    faults = [line for line in lines if line.startswith("qemu") and ": warning: " not in line]
    if any(line.startswith(_XL) for line in lines):
        from brine.instance.xen.xl import fault_in  # most nodes have no Xen

        said = fault_in(lines)
    else:
        said = next(reversed(faults or lines), None)
    return printable(said[:_LONGEST]) if said else None


def start_failures(invocations: Iterable[str]) -> dict[str, str]:
    """The reasons of failed starts from the journal, by systemd's ids of the runs."""
    wanted = set(invocations)
    found: dict[str, str] = {}
    with newest_first("_SYSTEMD_INVOCATION_ID", wanted, BRINE_EVENT="start-failed") as records:
        while len(found) < len(wanted) and (record := next(records, None)):
            if is_from(record, "root"):
                invocation = str(record.get("_SYSTEMD_INVOCATION_ID", "")).replace("-", "")
                found.setdefault(invocation, printable(str(record.get("BRINE_REASON", ""))))
    return found


@contextlib.contextmanager
def newest_first(
    field: str, values: Iterable[str], **others: str
) -> Iterator[Iterator[Mapping[str, Any]]]:
    """The journal's entries with one of these values in a field, and the other fields as given."""
    from systemd import journal  # it takes long to load, and most have nothing to ask

    reader = journal.Reader()
    try:
        for value in values:
            reader.add_match(**{field: value})
        reader.add_match(**others)
        reader.seek_tail()
        # The end of the journal is an empty entry.
        yield iter(reader.get_previous, {})
    finally:
        reader.close()
