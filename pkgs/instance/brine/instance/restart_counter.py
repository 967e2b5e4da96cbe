"""The restart counter: how often the watcher has started each instance that did not stay up."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from brine.common import paths
from brine.common.errors import BrineError
from brine.common.files import put_aside, read_regular, write_whole
from brine.common.locks import LockedError, locked
from brine.instance.store import group

FILE = paths.STATE_DIR / "watcher.json"

_VERSION = 1
_MODE = 0o640
_LOCK_S = 30.0
_LATEST_S = 1e11


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
        and isinstance(tries.last, (int, float))
        and 0 <= tries.last < _LATEST_S
        and isinstance(tries.given_up, bool)
    ):
        raise TypeError(f"no tries: {data!r}")
    return tries


def given_up() -> dict[str, int]:
    """The number of tries of each instance that is given up; empty if the record can't be read."""
    try:
        return {name: tries.count for name, tries in load().items() if tries.given_up}
    except TriesError:
        return {}


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


def forget(name: str) -> bool:
    """Forget the tries of an instance; returns whether there were any."""
    if not FILE.exists():
        return False
    with changed() as record:
        return record.pop(name, None) is not None


def _sound() -> dict[str, Tries]:
    try:
        return load()
    except DamagedCounterError as error:
        import logging

        aside = put_aside(FILE, FILE.with_name(f"{FILE.name}.damaged"))
        logging.getLogger(__name__).error("%s; kept as %s", error, aside.name)
        return {}


def _write(record: dict[str, Tries]) -> None:
    data = {"version": _VERSION, "instances": {name: asdict(one) for name, one in record.items()}}
    FILE.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    text = json.dumps(data, indent=1, sort_keys=True)
    write_whole(FILE, text.encode() + b"\n", mode=_MODE, group=group(), alone=True)
