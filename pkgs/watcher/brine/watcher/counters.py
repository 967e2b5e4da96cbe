"""What was tried with each instance, on record: it outlives the watcher, and the node's reboot."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from brine.common import paths
from brine.common.errors import BrineError
from brine.common.wholefile import write_whole
from brine.watcher.restarts import NONE, Tries

FILE = paths.STATE_DIR / "watcher.json"

_VERSION = 1
_MODE = 0o600

log = logging.getLogger(__name__)


class CountersError(BrineError):
    """The counters can't be read or written; without them nothing may be started."""


class Counters:
    """The tries of all instances, by name. Each change is on disk before the call returns.

    One process has them at a time, see :func:`brine.watcher.passes.alone`.
    """

    def __init__(self, file: Path = FILE) -> None:
        self._file = file
        self._tries: dict[str, Tries] = {}

    def load(self) -> None:
        """Read them. What is damaged is told, and kept aside.

        :raises CountersError: if the system does not let them be read, or be kept aside.
        """
        try:
            self._tries = _parse(json.loads(self._file.read_bytes()))
        except FileNotFoundError:
            self._tries = {}
        except OSError as error:
            raise CountersError(f"{self._file}: can't be read: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            self._keep_aside(error)
            self._tries = {}

    def of(self, name: str) -> Tries:
        """What was tried with an instance."""
        return self._tries.get(name, NONE)

    def all(self) -> dict[str, Tries]:
        """What was tried, by instance."""
        return dict(self._tries)

    def set(self, name: str, tries: Tries) -> None:
        """Note what was tried with an instance.

        :raises CountersError: if it can't be written; then it is as before.
        """
        self._write({**self._tries, name: tries})

    def forget(self, name: str) -> None:
        """Have an instance be as good as new.

        :raises CountersError: if it can't be written; then it is as before.
        """
        if name in self._tries:
            self._write({key: tries for key, tries in self._tries.items() if key != name})

    def keep_only(self, names: frozenset[str]) -> None:
        """Forget instances that there are no more.

        :raises CountersError: if it can't be written; then it is as before.
        """
        left = {name: tries for name, tries in self._tries.items() if name in names}
        if left != self._tries:
            self._write(left)

    def _write(self, tries: Mapping[str, Tries]) -> None:
        data = {"version": _VERSION, "instances": {name: asdict(t) for name, t in tries.items()}}
        try:
            self._file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            text = json.dumps(data, indent=1, sort_keys=True)
            write_whole(self._file, text.encode() + b"\n", mode=_MODE, alone=True)
        except OSError as error:
            raise CountersError(f"{self._file}: can't be written: {error.strerror}") from error
        self._tries = dict(tries)

    def _keep_aside(self, error: Exception) -> None:
        aside = self._file.with_name(f"{self._file.name}.damaged")
        try:
            self._file.rename(aside)
        except OSError as fault:
            text = f"{self._file}: damaged, and can't be kept aside: {fault.strerror}"
            raise CountersError(text) from fault
        log.error("%s: damaged: %s; kept as %s", self._file, error, aside.name)


def _parse(data: Any) -> dict[str, Tries]:
    if data["version"] != _VERSION:
        raise ValueError(f"of version {data['version']!r}")
    return {name: _parse_tries(one) for name, one in data["instances"].items()}


def _parse_tries(data: Any) -> Tries:
    tries = Tries(**data)
    if not (
        type(tries.count) is int
        and isinstance(tries.last, (int, float))
        and isinstance(tries.given_up, bool)
    ):
        raise TypeError(f"no tries: {data!r}")
    return tries
