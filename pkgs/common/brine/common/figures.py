"""The figures of a daemon, in a file for ``brine metrics``: a daemon alone has them.

The daemon writes the file anew every few seconds. It survives the daemon, whose next process goes
on counting from there, until the node's boot.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brine.common.errors import BrineError
from brine.common.files import read_regular, write_whole
from brine.common.process import start_time_of

log = logging.getLogger(__name__)

_VERSION = 1
_MODE = 0o640
_LATEST_S = 1e11
FILE_NAME = "figures"

INTERVAL_S = 5.0
"""How often a daemon writes its figures."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a process has written.

    :param is_running: whether that process still runs.
    :param written: in seconds since 1970.
    """

    values: Mapping[str, Any]
    is_running: bool
    written: float

    def number(self, key: str) -> float:
        """A number among them; 0 if there is none, as in the file of an older version."""
        return as_number(self.values.get(key))

    def rows(self, key: str, words: int) -> list[tuple[tuple[str, ...], float]]:
        """A list of counts, each with so many words that say of what; what is none is left out."""
        found = self.values.get(key)
        rows = found if isinstance(found, list) else []
        return [
            (tuple(map(str, row[:words])), as_number(row[words]))
            for row in rows
            if isinstance(row, list) and len(row) == words + 1
        ]

    def counts(self, key: str, words: int) -> Counter[tuple[str, ...]]:
        """Such a list, to be counted on from."""
        return Counter({kind: int(count) for kind, count in self.rows(key, words)})


def as_number(value: Any) -> float:
    """A number of JSON; 0 if it is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < _LATEST_S**2 else 0.0


class FiguresFile:
    """The file of a daemon's own figures, in its unit's ``RuntimeDirectory=``. Without systemd, as
    in a trial, there is none, and nothing is written."""

    def __init__(self, folder: Path | None) -> None:
        self._file = folder / FILE_NAME if folder else None
        self._is_failing = False

    def earlier(self) -> Figures | None:
        """What the daemon's last process has counted; None if that is not known."""
        return earlier_figures(self._file) if self._file else None

    def write(self, values: Mapping[str, Any]) -> None:
        """Put the figures in place. A fault is logged once, and does the daemon no harm."""
        if not self._file:
            return
        try:
            write_figures(self._file, values)
        except OSError as error:
            if not self._is_failing:
                log.warning("%s: can't be written: %s", self._file, error.strerror)
            self._is_failing = True
        else:
            self._is_failing = False


MOST_KINDS = 100
"""So many kinds of a thing are counted each; a peer that invents more has them counted together."""


def count_kind(counts: Counter[tuple[str, ...]], kind: tuple[str, ...]) -> None:
    """Count one of a kind, whose words may be a peer's."""
    is_new = kind not in counts
    counts[("other",) * len(kind) if is_new and len(counts) >= MOST_KINDS else kind] += 1


def rows_of(counts: Counter[tuple[str, ...]]) -> list[list[str | int]]:
    """Counts as :meth:`Figures.rows` reads them."""
    return [[*kind, count] for kind, count in sorted(counts.items())]


def write_figures(file: Path, values: Mapping[str, Any]) -> None:
    """Put the figures of this process in place.

    :raises OSError: if they can't be written.
    """
    pid = os.getpid()
    data = {
        "version": _VERSION,
        "pid": pid,
        "started": start_time_of(pid),
        "written": time.time(),
        "figures": dict(values),
    }
    text = json.dumps(data).encode() + b"\n"
    write_whole(file, text, mode=_MODE, alone=True, durable=False)


def earlier_figures(file: Path) -> Figures | None:
    """The figures in a file, to be counted on from; None, and a warning, if they can't be read."""
    try:
        return read_figures(file)
    except BrineError as error:
        log.warning("counting begins anew: %s", error)
        return None


def read_figures(file: Path) -> Figures | None:
    """The figures in a file; None if there is none.

    :raises BrineError: if it can't be read, or is damaged.
    """
    try:
        data = json.loads(read_regular(file))
        if not isinstance(data, dict) or not isinstance(data.get("figures"), dict):
            raise ValueError("these are no figures")
        if data.get("version") != _VERSION:
            raise ValueError(f"they are of version {data.get('version')!r}")
        pid, written = data["pid"], as_number(data["written"])
        if not isinstance(pid, int) or isinstance(pid, bool):
            raise ValueError("they name no process")
    except FileNotFoundError:
        return None
    except OSError as error:
        hint = "be root" if isinstance(error, PermissionError) else None
        raise BrineError(f"{file}: can't be read: {error.strerror}", hint=hint) from error
    except (ValueError, LookupError, RecursionError) as error:
        hint = "it is written anew within seconds"
        raise BrineError(f"{file}: damaged: {error}", hint=hint) from error
    is_running = bool(data.get("started")) and start_time_of(pid) == data["started"]
    return Figures(data["figures"], is_running, written)
