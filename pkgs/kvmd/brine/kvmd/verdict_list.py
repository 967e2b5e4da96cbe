"""The verdicts of this node, read from the journal and from markers, as a table or JSON."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, time, timedelta
from pathlib import Path
from typing import Any

from systemd import journal

from brine.common import paths
from brine.common.cli import length_of_time
from brine.common.errors import BrineError, UsageError, printable
from brine.common.message import KVMD_USER, is_from
from brine.common.settings import SettingsError, load
from brine.common.tables import print_table
from brine.common.times import local_time
from brine.kvmd import messages
from brine.kvmd.settings import KvmdSettings
from brine.kvmd.verdict import Who
from brine.vm.markers import UNKNOWN_RUN, MarkerKind
from brine.vm.run import Run

_VERDICTS = frozenset(map(str, Who))
_HEADING = ("TIME", "INSTANCE", "VERDICT", "CAUSE", "DELAY")


@dataclass(frozen=True)
class VerdictLine:
    """One verdict, as ``--json`` shows it: when it was given, ISO 8601 in UTC, and how long after
    the event that ended the VM (QEMU's clock); None if QEMU sent none."""

    time: str
    instance: str
    verdict: str
    cause: str
    delay_ms: float | None


# Of a verdict: whose it is, and when it was given. A run keeps its id when its instance is renamed.
_Key = tuple[str, int]


def read_verdicts(*, instances: Iterable[str] = (), since: datetime | None) -> list[VerdictLine]:
    """The verdicts in this node's journal, oldest first, with those of each instance's last end
    that the journal has lost. No *instances* means all."""
    names = list(instances)
    found = dict(_in_journal(names, since))
    lines = list(found.values())
    for key, line in _in_markers():
        is_wanted = not names or line.instance in names
        is_late_enough = not since or datetime.fromisoformat(line.time) >= since
        if key not in found and is_wanted and is_late_enough:
            lines.append(line)
    return sorted(lines, key=lambda line: line.time)


def _in_markers() -> Iterator[tuple[_Key, VerdictLine]]:
    """The verdicts in markers: those on each instance's last end."""
    try:
        folder = load(KvmdSettings, paths.settings_file("kvmd")).marks_dir
    except SettingsError:  # the daemon then goes on with the settings of its last start
        folder = paths.MARKS_DIR
    for file in sorted(folder.glob(f"*.{MarkerKind.VERDICT}")):
        name = file.name.removesuffix(f".{MarkerKind.VERDICT}")
        run = Run.marked(MarkerKind.VERDICT, name, folder=folder)
        if run is None or (verdict := run.verdict) is None:
            continue
        given, ended = run.verdict_usec
        # The verdict "unknown" is not the daemon's.
        if verdict.who in _VERDICTS and given is not None:
            delay_ms = round((given - ended) / 1e3, 3) if ended is not None else None
            time_text = _iso(datetime.fromtimestamp(given / 1e6, UTC))
            line = VerdictLine(time_text, name, verdict.who, verdict.cause, delay_ms)
            yield _key(run.id, name, given), line


def _in_journal(names: Iterable[str], since: datetime | None) -> Iterator[tuple[_Key, VerdictLine]]:
    reader = journal.Reader()
    for message in messages.VERDICTS.values():
        reader.add_match(MESSAGE_ID=message.id)
    if names:
        reader.add_conjunction()
        for name in names:
            reader.add_match(BRINE_INSTANCE=os.fsencode(name))
    if since:
        reader.seek_realtime(since)
    for number, entry in enumerate(reader, 1):
        if is_from(entry, KVMD_USER):
            line = line_of(entry)
            given = _text(entry.get("BRINE_GIVEN_USEC"))
            # Older daemons did not record the time.
            when = int(given) if given.isdecimal() else -number
            yield _key(_text(entry.get("BRINE_RUN", UNKNOWN_RUN)), line.instance, when), line


def _key(run: str, name: str, given_usec: int) -> _Key:
    # Neither a VM that Brine did not start has a run, nor a verdict of an older daemon.
    return name if run == UNKNOWN_RUN else run, given_usec


def line_of(entry: Mapping[str, Any]) -> VerdictLine:
    """The verdict of a journal entry."""
    given: datetime = entry.get("_SOURCE_REALTIME_TIMESTAMP") or entry["__REALTIME_TIMESTAMP"]
    event_usec = entry.get("BRINE_EVENT_TIME_USEC")
    delay_ms = None
    if event_usec is not None:
        delay_ms = round(given.timestamp() * 1e3 - int(event_usec) / 1e3, 3)
    name, who, cause = (
        _text(entry.get(f"BRINE_{field}", "")) for field in ("INSTANCE", "VERDICT", "CAUSE")
    )
    return VerdictLine(_iso(given), name, who, cause, delay_ms)


def parse_since(text: str, now: datetime) -> datetime:
    """A point in time: ``2h`` (so long ago; units s, m, h, d, w), ``today``, ``yesterday``,
    ``12:30`` (today), ``2026-01-31`` or ``2026-01-31 12:30``, local time."""
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    ago_s = length_of_time(text)
    try:
        if text in ("today", "yesterday"):
            return midnight - timedelta(days=("today", "yesterday").index(text))
        if ago_s is not None:
            return now - timedelta(seconds=ago_s)
        if re.fullmatch(r"\d\d:\d\d(:\d\d)?", text):
            return datetime.combine(midnight.date(), time.fromisoformat(text)).astimezone()
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        hint = "try 90s, 30m, 2h, 3d, 1w, today, 12:30, 2026-01-31 or '2026-01-31 12:30'"
        raise UsageError(f"not a point in time: {text!r}", hint=hint) from None


def _iso(when: datetime) -> str:
    return when.astimezone(UTC).isoformat(timespec="microseconds")


def _text(value: Any) -> str:
    # The journal returns a field that is not UTF-8 as bytes.
    return os.fsdecode(value) if isinstance(value, bytes) else str(value)


def print_verdicts(arguments: argparse.Namespace) -> int:
    """``brine kvmd verdicts``."""
    since = None
    if arguments.since is not None:
        since = parse_since(arguments.since, datetime.now().astimezone())
    _require_journal()
    lines = read_verdicts(instances=arguments.instance, since=since)
    if arguments.json:
        print(json.dumps([asdict(line) for line in lines], indent=2))
    else:
        print_table(_HEADING, map(_row, lines), none="no verdicts")
    return 0


def _row(line: VerdictLine) -> tuple[str, ...]:
    delay = "-" if line.delay_ms is None else f"{line.delay_ms:.1f} ms"
    return (
        local_time(datetime.fromisoformat(line.time).timestamp()),
        printable(line.instance),
        line.verdict,
        printable(line.cause),
        delay,
    )


def _require_journal() -> None:
    """Refuse an empty list if this user may not read the journal."""
    folders = (Path("/var/log/journal"), Path("/run/log/journal"))
    files = [file for folder in folders for file in folder.glob("*/system.journal")]
    if files and not any(os.access(file, os.R_OK) for file in files):
        raise BrineError(
            "the journal can't be read by this user",
            hint="be root, or a member of the group systemd-journal or adm",
        )
