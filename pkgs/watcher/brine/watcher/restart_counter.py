"""The watcher's pause, and the number of its failed starts of each instance."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from brine.common import paths
from brine.common.errors import BrineError
from brine.common.files import put_aside, read_regular, write_whole
from brine.common.locks import LockedError, locked
from brine.common.times import local_time
from brine.instance.store import group
from brine.instance.supervisor import Attempts, Supervision
from brine.watcher.settings import WatcherSettings, load_settings

log = logging.getLogger(__name__)

FILE = paths.STATE_DIR / "watcher.json"

_VERSION = 1
_MODE = 0o640
_LOCK_S = 30.0
_LATEST_S = 1e11
_MOST_TRIES = 1_000_000


class TriesError(BrineError):
    """The record can't be read or written; then no start may be tried."""


class DamagedCounterError(TriesError):
    """The record is damaged."""


@dataclass(frozen=True, slots=True)
class Tries:
    """The watcher's tries to start an instance.

    :param last: the time of the last one, in seconds since 1970.
    :param given_up: whether it was reported that further starts come rarely.
    """

    count: int = 0
    last: float = 0.0
    given_up: bool = False


NONE = Tries()


def load() -> dict[str, Tries]:
    """The tries of all instances, by name."""
    try:
        data = json.loads(read_regular(FILE))
        if not isinstance(data, dict) or not isinstance(data.get("instances"), dict):
            raise TypeError("it is no record of tries")
        if data.get("version") != _VERSION:
            raise ValueError(f"it is of version {data.get('version')!r}")
        return {name: _parse(one) for name, one in data["instances"].items()}
    except FileNotFoundError:
        return {}
    except OSError as error:
        hint = "be root, or in the group brine" if isinstance(error, PermissionError) else None
        raise TriesError(f"{FILE}: can't be read: {error.strerror}", hint=hint) from error
    except (ValueError, TypeError, RecursionError) as error:
        hint = "the watcher's next pass keeps it aside, and begins anew"
        raise DamagedCounterError(f"{FILE}: damaged: {error}", hint=hint) from error


def _parse(data: Any) -> Tries:
    tries = Tries(**data)
    if not (
        type(tries.count) is int
        and 0 <= tries.count <= _MOST_TRIES
        and isinstance(tries.last, (int, float))
        and 0 <= tries.last < _LATEST_S
        and isinstance(tries.given_up, bool)
    ):
        raise TypeError(f"no tries: {data!r}")
    return tries


def tries_of(name: str) -> dict[str, Any] | None:
    """The tries of an instance, as another node's watcher keeps them; None if there are none, or
    the record can't be read."""
    try:
        found = load().get(name)
    except TriesError:
        return None
    return asdict(found) if found else None


def keep_tries(name: str, data: Any) -> None:
    """Keep the tries of an instance that comes from another node.

    :param data: of :func:`tries_of`, by that node.
    :raises TriesError: if they are none, or can't be kept.
    """
    try:
        tries = _parse(data)
    except (TypeError, ValueError) as error:
        raise TriesError(f"{name}: its tries: {error}") from error
    with changed() as record:
        record[name] = tries


@contextlib.contextmanager
def changed() -> Iterator[dict[str, Tries]]:
    """The record to be changed in the block; it is on disk before the block is left.

    A damaged record is reported and kept aside.

    :raises TriesError: if that fails; then the record has not changed.
    """
    try:
        paths.LOCK_DIR.mkdir(mode=0o755, parents=True, exist_ok=True)
        with locked(paths.LOCK_DIR / "tries.lock", timeout_s=_LOCK_S):
            before = _sound()
            record = dict(before)
            yield record
            if record != before:
                _write(record)
    except LockedError as error:
        raise TriesError(f"{FILE}: can't be changed: {error}") from error
    except OSError as error:
        hint = "be root" if isinstance(error, PermissionError) else None
        raise TriesError(f"{FILE}: can't be written: {error.strerror}", hint=hint) from error


def forget_counter(name: str) -> bool:
    """Forget the tries of an instance; returns whether there were any."""
    if not FILE.exists():
        return False
    with changed() as record:
        return record.pop(name, None) is not None


def _sound() -> dict[str, Tries]:
    try:
        return load()
    except DamagedCounterError as error:
        aside = put_aside(FILE, FILE.with_name(f"{FILE.name}.damaged"))
        log.error("%s; kept as %s", error, aside.name)
        return {}


def _write(record: dict[str, Tries]) -> None:
    data = {"version": _VERSION, "instances": {name: asdict(one) for name, one in record.items()}}
    FILE.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    text = json.dumps(data, indent=1, sort_keys=True)
    write_whole(FILE, text.encode() + b"\n", mode=_MODE, group=group(), alone=True)


# The pause. Its file has one number, the epoch second at which it ends, as Ganeti's watcher reads
# it.

PAUSE_FILE = paths.STATE_DIR / "watcher.pause"

LONGEST_PAUSE_S = 365 * 86400
"""How long the watcher can be paused."""
_CLOCK_S = 86400  # by which the node's clock may have been set back since
_HINT = "brine watcher resume removes it"


def paused_until(now: float) -> float | None:
    """The end of the pause, in seconds since 1970; None if the watcher is not paused.

    An end more than a year ahead (milliseconds, say) is an error, as a file without a number.
    """
    try:
        text = PAUSE_FILE.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise BrineError(f"{PAUSE_FILE}: can't be read: {error}", hint=_HINT) from error
    try:
        until = float(text)
        time.gmtime(until)
    except (ValueError, OverflowError, OSError):
        fault = f"has no number of seconds: {text[:40]!r}"
        raise BrineError(f"{PAUSE_FILE}: {fault}", hint=_HINT) from None
    if until > now + LONGEST_PAUSE_S + _CLOCK_S:
        fault = f"ends more than a year ahead, which no pause does: {text[:40]!r}"
        raise BrineError(f"{PAUSE_FILE}: {fault}", hint=_HINT)
    return until if until > now else None


def _pause() -> str | None:
    """Why the watcher starts no instance now; None if it does."""
    try:
        until = paused_until(time.time())
    except BrineError as error:
        return f"whether the watcher is paused is unknown: {error}; {error.hint}"
    if until is None:
        return None
    return f"the watcher is paused until {local_time(until)}; brine watcher resume ends the pause"


# How often an instance that crashed is started again, and when that becomes rare.

_EARLY = 0.2
"""The part of the first wait by which a pass may come too early. Passes are not quite regular;
without this, a pass that comes a second early would double the wait."""


def with_one_more(tries: Tries, settings: WatcherSettings, now: float) -> Tries:
    """The counter after one more try."""
    return Tries(tries.count + 1, now, given_up=is_slow(tries, settings))


def is_slow(tries: Tries, settings: WatcherSettings) -> bool:
    """Whether an instance is given up: it is started rarely."""
    return tries.given_up and tries.count >= settings.tries


def due_at(tries: Tries, settings: WatcherSettings, now: float) -> float:
    """When the next try is due, in seconds since 1970."""
    # After a clock was set back, an instance must not wait for years.
    if tries.count == 0 or tries.last > now:
        return now
    if is_slow(tries, settings):
        return tries.last + settings.slow_interval
    wait_s = settings.interval * 2.0 ** (tries.count - 1)
    return tries.last + wait_s - _EARLY * settings.interval


def _attempts() -> dict[str, Attempts]:
    """The tries of all instances by name; empty if the record can't be read."""
    try:
        found = load()
    except TriesError:
        return {}
    try:
        settings = load_settings() if found else WatcherSettings()
    except BrineError:  # passes do nothing until it is mended, and say so
        settings = WatcherSettings()
    now = time.time()
    return {
        name: Attempts(one.count, due_at(one, settings, now), given_up=one.given_up)
        for name, one in found.items()
    }


WATCHER = Supervision(_attempts, _pause, forget_counter, record=tries_of, keep=keep_tries)
