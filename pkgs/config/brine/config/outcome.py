"""What a change of the configuration came to, told to people and to programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from brine.config.diff import Change, ChangeKind, changes
from brine.config.model import Configuration
from brine.config.store import Replaced


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """What came of a change, or would.

    :param old: what was there; None if nothing was, or nothing usable.
    :param new: what is there now.
    :param notes: what a person should know.
    """

    old: Configuration | None
    new: Configuration
    changes: Sequence[Change]
    notes: Sequence[str]
    dry_run: bool

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "dry_run": self.dry_run,
            "old_serial": self.old.serial_no if self.old else None,
            "new_serial": None if self.dry_run else self.new.serial_no,
            "changes": [change.to_json() for change in self.changes],
            "notes": list(self.notes),
        }

    def print_json(self) -> None:
        """For programs, to standard output."""
        print(json.dumps(self.to_json(), indent=2))

    def print_applied(self) -> None:
        """For people: each change, and the serial numbers."""
        for change in self.changes:
            print(change)
        self.print_notes()
        count = counted(len(self.changes), "change")
        if not self.changes:
            print(f"no changes: serial {self.new.serial_no}")
        elif self.dry_run:
            print(f"would apply: {count}")
        elif self.old is None:
            print(f"applied: serial {self.new.serial_no}, {count}")
        else:
            print(f"applied: serial {self.old.serial_no} -> {self.new.serial_no}, {count}")

    def print_restored(self, serial_no: int) -> None:
        """For people.

        :param serial_no: of the version whose content it is.
        """
        # What was there is damaged, or nothing: then all of it would be a change.
        for change in self.changes if self.old else ():
            print(change)
        self.print_notes()
        if self.old and self.old.serial_no == self.new.serial_no:
            print(f"no changes: serial {self.new.serial_no}")
        else:
            done = "would restore" if self.dry_run else "restored"
            print(f"{done}: the content of serial {serial_no}, as {self.new.serial_no}")

    def print_notes(self) -> None:
        """What a person should know, a line each."""
        for note in self.notes:
            print(f"note: {note}")


def outcome_of(done: Replaced, notes: Iterable[str] = (), *, dry_run: bool) -> ConfigChange:
    """What came of a change of the file; where *old* was overtaken, its serial number is what has
    to change at least.

    :param notes: what a person should know besides.
    """
    old, new = done.old, done.new
    found = changes(old, new)
    if old and done.overtaken_by is not None:
        found.append(Change(ChangeKind.CHANGED, "/serial_no", old.serial_no, new.serial_no))
    return ConfigChange(old, new, found, [*notes, *_aside_notes(done)], dry_run)


def overtaken(serial_no: int, by: int) -> str:
    """How a configuration of that serial number stands to a newer kept version, or to another one
    of the same number."""
    if by == serial_no:
        return f"is not kept version {by}, but has its serial number"
    return f"is older than kept version {by}"


def _aside_notes(done: Replaced) -> list[str]:
    """What happened to a file that was not what a writer left."""
    old, by, aside = done.old, done.overtaken_by, done.aside
    if old and by is not None:
        has = "had" if aside else "has"
        what = f"{done.path} {has} serial {old.serial_no}, which {overtaken(old.serial_no, by)}"
        where = f"; that file is kept as {aside}" if aside else ""
        return [f"{what}: serial numbers go on from the highest there was{where}"]
    return [f"the damaged file is kept as {aside}"] if aside else []


def counted(number: int, noun: str) -> str:
    """Such as ``1 change``, ``2 changes``."""
    return f"{number} {noun}{'s' * (number != 1)}"
