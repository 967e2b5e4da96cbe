"""The file that keeps the configuration: one writer at a time, whole writes, old versions kept."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from brine.common import paths
from brine.common.config.configuration import Configuration
from brine.common.config.objects import ConfigError
from brine.common.config.stamps import restored
from brine.common.config.versions import KEPT_VERSIONS, Standing, Version, Versions, cannot_read
from brine.common.config.writelock import write_lock
from brine.common.config.writer import Found, Replaced, Writer, identity

__all__ = [
    "KEPT_VERSIONS",
    "LOCK_TIMEOUT_S",
    "ConfigStore",
    "CorruptError",
    "NoConfigError",
    "Replaced",
    "Version",
    "Writer",
]

LOCK_TIMEOUT_S = 10.0

_LOOKS = 10
"""At a file that somebody writes meanwhile."""


class NoConfigError(ConfigError):
    """There is no configuration here."""


class CorruptError(ConfigError):
    """The file is damaged: it is not what a writer of ours leaves."""


class ConfigStore:
    """A configuration file with its lock and its kept versions; ``is_usual`` says whether it is the
    cluster's own, where the design puts it.

    :param path: the file, which may be a symbolic link. Its versions are in ``config.versions``
        beside it (named after it).
    :param lock_file: None: where the design puts it for the usual path, else beside the file.
    :param clock: seconds since 1970.
    :raises ConfigError: if *path* is a link that leads nowhere.
    """

    def __init__(
        self,
        path: Path = paths.CONFIG_FILE,
        *,
        lock_file: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        # All ways to one file lead to one lock, and a write does not replace a link.
        self.path = path = _resolved(path)
        self.versions_dir = path.with_name(f"{path.stem}.versions")
        self._versions = Versions(self.versions_dir)
        self.is_usual = path == _resolved(paths.CONFIG_FILE)
        if lock_file is None:
            usual = paths.CONFIG_LOCK
            lock_file = usual if self.is_usual else path.with_name(f".{path.name}.lock")
        self._lock_file = lock_file
        self._clock = clock

    def read(self) -> Configuration:
        """The current configuration.

        :raises NoConfigError: if there is no file.
        :raises CorruptError: if what is there is no configuration.
        :raises ConfigError: if it can't be read.
        """
        return _parse(self.path, self.read_bytes())

    def read_bytes(self) -> bytes:
        """The current file as it is; raises NoConfigError, ConfigError."""
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            raise self.none_here() from None
        except OSError as error:
            raise cannot_read(self.path, error) from error

    def none_here(self) -> NoConfigError:
        """The error to raise where there is no configuration."""
        return NoConfigError(f"{self.path}: there is no configuration", hint=self._missing_hint())

    def overtaken_by(self, current: Configuration) -> int | None:
        """The newest kept version, where the *current* one should be newer and is not.

        :raises ConfigError: see :meth:`read`.
        """
        if self._versions.standing(self.path, current.serial_no).overtaken_by is None:
            return None
        return self._find().standing.overtaken_by  # unless a writer was at work meanwhile

    @contextlib.contextmanager
    def writing(
        self, timeout_s: float = LOCK_TIMEOUT_S, *, dry_run: bool = False
    ) -> Iterator[Writer]:
        """Be the one writer for the time of the block.

        :param dry_run: nothing is locked or written.
        :raises brine.common.locks.LockedError: if another is, for *timeout_s*.
        :raises CorruptError: if the file is damaged; :meth:`restore` mends that.
        """
        with self._lock(timeout_s, dry_run=dry_run):
            yield Writer(self.path, self._versions, self._clock, self._find(), dry_run=dry_run)

    def expect_none_lost(self) -> None:
        """Before a first configuration is made: see that there was none.

        :raises NoConfigError: if versions of one are kept.
        """
        if kept := self.versions():
            raise NoConfigError(
                f"{self.path}: there is no configuration, but versions of one are kept",
                hint=f"{_bring_back(kept[0])}; if a new cluster is meant, move {self.versions_dir} "
                "away",
            )

    def versions(self) -> list[Version]:
        """The kept versions, the newest first. The current one is not among them.

        :raises ConfigError: if they can't be read.
        """
        return self._versions.all(self.path)

    def read_version(self, serial_no: int) -> Configuration:
        """A kept version.

        :raises ConfigError: if that one is not kept, or can't be used.
        """
        data = self._versions.read(serial_no)
        if data is None:
            kept = ", ".join(str(version.serial_no) for version in self.versions()) or "none"
            raise ConfigError(f"version {serial_no} is not kept", hint=f"kept versions: {kept}")
        return _parse(self._versions.file(serial_no), data)

    def restore(
        self, serial_no: int, timeout_s: float = LOCK_TIMEOUT_S, *, dry_run: bool = False
    ) -> Replaced:
        """Make the content of a kept version the current one, with serial numbers above all that
        were. A damaged file is kept aside as ``config.data.corrupt-TIME``, one that is older than a
        kept version as ``config.data.older-TIME``.

        :param dry_run: only tell what that would be; nothing is locked or written.
        :raises ConfigError: if that version is not kept, or can't be used.
        """
        with self._lock(timeout_s, dry_run=dry_run):
            version = self.read_version(serial_no)
            corrupt = False
            try:
                found = self._find()
            except CorruptError:
                corrupt = True
                standing = Standing(None, self._versions.highest_serial(self.path))
                found = Found(identity(self.path), None, standing)
            old, standing = found.current, found.standing
            if standing.overtaken_by is not None:  # its objects' serials are none to go on from
                found = replace(found, current=None)
            writer = Writer(
                self.path, self._versions, self._clock, found, corrupt=corrupt, dry_run=dry_run
            )
            new = writer.write(restored(version, found.current, standing.floor + 1))
            return Replaced(self.path, old, new, writer.aside, standing.overtaken_by)

    def _find(self) -> Found:
        for _ in range(_LOOKS):
            before = identity(self.path)
            try:
                data = self.read_bytes()
            except NoConfigError:
                return Found(before, None, Standing(None, self._versions.highest_serial()))
            try:
                current = Configuration.parse(data)
            except ConfigError as error:
                raise CorruptError(f"{self.path}: {error}", hint=self._mend_hint()) from error
            standing = self._versions.standing(self.path, current.serial_no)
            if identity(self.path) == before:  # with the lock, it always is
                return Found(before, current, standing)
        raise ConfigError(f"{self.path}: is changed all the time", hint="try again")

    def _lock(self, timeout_s: float, *, dry_run: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if dry_run else write_lock(self._lock_file, timeout_s)

    def _missing_hint(self) -> str:
        if kept := self.versions():
            return _bring_back(kept[0])
        return (
            "brine config apply FILE makes one, on the master; "
            "the other master candidates get a copy of the file"
        )

    def _mend_hint(self) -> str:
        if kept := self.versions():
            return _bring_back(kept[0])
        return "copy it from another master candidate: no version is kept to restore it from"


def _bring_back(newest: Version) -> str:
    return (
        "copy it from another master candidate; if none has it, "
        f"brine config restore {newest.serial_no}, which loses what was changed after that version"
    )


def _parse(file: Path, data: bytes) -> Configuration:
    try:
        return Configuration.parse(data)
    except ConfigError as error:
        raise CorruptError(f"{file}: {error}", hint=error.hint) from error


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # the latter for a loop of links
        raise ConfigError(f"{path}: can't be found: {error}") from error
