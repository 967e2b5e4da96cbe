"""One run of an instance: from one start of its unit to the end, as its markers tell it.

:class:`Run` is the only reader of marker files. It reads each of them when it is first asked about
it, and at most once, so that all answers of one object agree::

    run = Run.last("web1")
    if run.has_come_up() and not run.was_stopped():
        print(run.id, run.verdict)

A marker of another run says nothing of this one. A caller that waits for a change asks
``run.again()``, which reads anew.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from brine.common.errors import printable
from brine.common.process import runs_in
from brine.vm.halt import Halt
from brine.vm.markers import (
    UNKNOWN_RUN,
    Marker,
    MarkerKind,
    is_held,
    read_marker,
    this_run,
)
from brine.vm.unit_name import unit_of

_HELD = (MarkerKind.STOP, MarkerKind.REBOOT)


class RecordedVerdict(NamedTuple):
    """brine-kvmd's verdict on the end of a run: the party that ended it, and the cause in QEMU's
    words."""

    who: str
    cause: str


class RunFailure(NamedTuple):
    """The failure of a run.

    :param reason: why its start failed, with a *hint*, fit for one line; None if that is not noted.
    :param lacks: the files and network interfaces that it needs and that were not there.
    """

    reason: str | None = None
    hint: str | None = None
    lacks: tuple[str, ...] = ()


class Run:
    """A run of an instance. Nothing is read until a question is asked.

    :param run_id: systemd's invocation id of its unit, or ``unknown``.
    :param folder: of the markers; None is the node's.
    """

    __slots__ = ("_held", "_markers", "folder", "id", "name")

    def __init__(self, name: str, run_id: str = UNKNOWN_RUN, folder: Path | None = None) -> None:
        self.name = name
        self.id = run_id
        self.folder = folder
        self._markers: dict[MarkerKind, Marker | None] = {}
        self._held: dict[MarkerKind, bool] = {}

    def __repr__(self) -> str:
        return f"Run({self.name!r}, {self.id!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and (self.name, self.id) == (other.name, other.id)

    def __hash__(self) -> int:
        return hash((self.name, self.id))

    @classmethod
    def last(cls, name: str, *, folder: Path | None = None) -> Run:
        """The run of an instance that began last; its id is ``unknown`` if no marker names it."""
        return cls.marked(MarkerKind.START, name, folder=folder) or cls(name, folder=folder)

    @classmethod
    def of_process(cls, name: str, pid: int, *, folder: Path | None = None) -> Run | None:
        """The run whose QEMU a process is; None if Brine has not started that process."""
        run = cls.marked(MarkerKind.START, name, folder=folder)
        return run if run and run.facts(MarkerKind.START).get("pid") == pid else None

    @classmethod
    def own(cls, name: str) -> Run:
        """The run that this process belongs to: for programs of the instance's unit."""
        return cls(name, this_run())

    @classmethod
    def marked(cls, kind: MarkerKind, name: str, *, folder: Path | None = None) -> Run | None:
        """The run that the marker of a kind names; None without such a marker."""
        marker = read_marker(kind, name, folder=folder)
        if marker is None:
            return None
        found = cls(name, marker.run, folder)
        found._markers[kind] = marker
        return found

    @classmethod
    def with_markers(
        cls, name: str, run_id: str, *markers: Marker, held: Container[MarkerKind] = ()
    ) -> Run:
        """A run with just these markers: no file is read.

        :param held: which of them a process holds.
        """
        found = cls(name, run_id)
        found._markers |= dict.fromkeys(MarkerKind) | {one.kind: one for one in markers}
        found._held |= {kind: kind in held for kind in MarkerKind}
        return found

    def again(self) -> Run:
        """The same run, of which nothing is read yet."""
        return Run(self.name, self.id, self.folder)

    def read(self, *kinds: MarkerKind, files: Container[str]) -> Run:
        """Read these markers now, and whether a process holds them, whatever becomes of them later;
        returns the same object.

        :param files: a listing of the folder: a marker without a file there is not looked for.
        """
        for kind in kinds:
            if f"{self.name}.{kind}" in files:
                if self.has(kind) and kind in _HELD:
                    self._is_held(kind)
            else:
                self._markers.setdefault(kind, None)
        return self

    # What it is.

    def is_known(self) -> bool:
        """Whether its id is known."""
        return self.id not in ("", UNKNOWN_RUN)

    def is_followed(self) -> bool:
        """Whether a later run has begun, by now."""
        last = read_marker(MarkerKind.START, self.name, folder=self.folder)
        return last is not None and last.run not in (self.id, UNKNOWN_RUN)

    def is_last(self) -> bool:
        """Whether it is the run that began last, by now."""
        return Run.last(self.name, folder=self.folder).id == self.id

    @property
    def pid(self) -> int | None:
        """The process that becomes its QEMU, or waits for its domain."""
        pid = self.facts(MarkerKind.START).get("pid")
        return pid if isinstance(pid, int) else None

    def has_process(self) -> bool:
        """Whether that process is there."""
        pid = self.pid
        return pid is not None and runs_in(pid, unit_of(self.name))

    # How it went.

    def has_come_up(self) -> bool:
        return self.has(MarkerKind.STARTED)

    @property
    def awaits_from(self) -> str:
        """The node whose guest its QEMU was started to take; empty if it was not."""
        return printable(str(self.facts(MarkerKind.AWAITS).get("node") or ""))

    def is_paused(self) -> bool:
        """Whether an administrator has paused it, and has not resumed it."""
        return self.has(MarkerKind.PAUSED)

    def halt(self) -> Halt | None:
        """How its QEMU stands still without an administrator's doing; None if it does not."""
        return Halt.of(self._mine(MarkerKind.HALTED))

    def was_asked(self) -> bool:
        """Whether its guest was told to shut down, and had not done so in time."""
        return self.has(MarkerKind.ASKED)

    @property
    def asked_at(self) -> float:
        """When that was, in seconds since 1970."""
        return self.made_at(MarkerKind.ASKED)

    def is_to_reboot(self) -> bool:
        """Whether an administrator reboots the instance: its next run follows this one."""
        return self.has(MarkerKind.REBOOT)

    def awaits_reboot(self) -> bool:
        """Whether that is so, and the command that would start the next run is gone."""
        return self.is_to_reboot() and not self._is_held(MarkerKind.REBOOT)

    @property
    def reboot_until(self) -> float | None:
        """How long its guest may take to end for a reboot, in seconds since 1970; None if the
        marker does not say."""
        until = self.facts(MarkerKind.REBOOT).get("until", 0)
        return until if isinstance(until, int | float) else None

    # How it ended.

    def was_stopped(self) -> bool:
        """Whether an administrator has stopped it, or is about to."""
        return self.has(MarkerKind.STOP)

    def is_being_stopped(self) -> bool:
        """Whether that stop is in progress."""
        return self.was_stopped() and self._is_held(MarkerKind.STOP)

    @property
    def stop_cause(self) -> str:
        """The cause of that stop, for the verdict; empty for a plain stop, or without one."""
        return str(self.facts(MarkerKind.STOP).get("cause") or "")

    @property
    def stopped_at(self) -> float:
        """When that stop began, in seconds since 1970."""
        return self.made_at(MarkerKind.STOP)

    def was_shut_down(self) -> bool:
        """Whether its user has shut it down, and the spec does not say so yet."""
        return self.has(MarkerKind.SHUTDOWN)

    @property
    def verdict(self) -> RecordedVerdict | None:
        """The verdict on its end; None if there is none yet."""
        if not self.has(MarkerKind.VERDICT):
            return None
        facts = self.facts(MarkerKind.VERDICT)
        return RecordedVerdict(*(printable(str(facts.get(key))) for key in ("who", "cause")))

    @property
    def verdict_usec(self) -> tuple[int | None, int | None]:
        """When that verdict was given, and when the run ended by QEMU's clock, in microseconds
        since 1970; None for what is not noted."""
        facts = self.facts(MarkerKind.VERDICT)
        given, ended = facts.get("given_usec"), facts.get("time_usec")
        return given if isinstance(given, int) else None, ended if isinstance(ended, int) else None

    @property
    def failure(self) -> RunFailure | None:
        """Its failure; None if systemd and its programs have noted none."""
        if not self.has(MarkerKind.FAILURE):
            return None
        facts = self.facts(MarkerKind.FAILURE)
        reason, hint = (
            printable(text) if isinstance(text := facts.get(key), str) else None
            for key in ("reason", "hint")
        )
        lacks = facts.get("lacks")
        return RunFailure(reason, hint, tuple(map(str, lacks)) if isinstance(lacks, list) else ())

    @property
    def lacks(self) -> tuple[str, ...]:
        """The files and network interfaces that it lacked when it failed."""
        return self.failure.lacks if self.failure else ()

    # Any marker.

    def has(self, kind: MarkerKind) -> bool:
        """Whether it has a marker."""
        return self._mine(kind) is not None

    def facts(self, kind: MarkerKind) -> Mapping[str, Any]:
        """What a marker of it says beside the run, unchecked; nothing without the marker."""
        marker = self._mine(kind)
        return marker.facts if marker else {}

    def made_at(self, kind: MarkerKind) -> float:
        """When a marker of it was made, in seconds since 1970; 0 without the marker."""
        marker = self._mine(kind)
        return marker.made_at if marker else 0.0

    def _mine(self, kind: MarkerKind) -> Marker | None:
        try:
            marker = self._markers[kind]
        except KeyError:
            marker = read_marker(kind, self.name, folder=self.folder)
            self._markers[kind] = marker
        return marker if marker and marker.run == self.id else None

    def _is_held(self, kind: MarkerKind) -> bool:
        if kind not in self._held:
            self._held[kind] = is_held(kind, self.name)
        return self._held[kind]
