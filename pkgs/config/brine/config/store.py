"""The file of the configuration: one writer at a time, atomic writes, old versions kept."""

from __future__ import annotations

import contextlib
import grp
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from brine.common import paths
from brine.common.files import write_whole
from brine.common.locks import locked
from brine.config.model import Configuration
from brine.config.schema import ConfigError
from brine.config.versions import (
    GROUP,
    MODE,
    Version,
    Versions,
    VersionState,
    cannot_read,
    lifted,
    restored,
    second_name,
    stamped,
)

# Files that no writer of Brine has left: they are kept aside before they are replaced.


def keep_aside(file: Path, why: str, *, now: float, group: int | None, prefix: str) -> Path:
    """Give *file* a second name beside its own, as ``config.data.corrupt-TIME``.

    :param why: a word in that name.
    :param now: seconds since 1970.
    :param group: id of the group that may read it.
    :param prefix: what the name of an unfinished copy begins with.
    :return: the second name.
    :raises ConfigError: if that fails.
    """
    first = f"{file.name}.{why}-{datetime.fromtimestamp(now, UTC):%Y%m%dT%H%M%SZ}"
    for number in itertools.count(1):
        aside = file.with_name(first if number == 1 else f"{first}-{number}")
        try:
            second_name(file, aside, group, prefix=prefix)
        except FileExistsError:  # another one of this very second
            if not aside.samefile(file):
                continue
        except OSError as error:
            text = f"{file}: can't be kept aside: {error.strerror}"
            raise ConfigError(text, hint="nothing was changed") from error
        break
    return aside


# Replacing the file of a configuration: atomically, and with the old content kept.

Identity = tuple[int, int, int, int]
"""The identity of a file's content; zeros if there is no file."""


@dataclass(frozen=True, slots=True)
class Found:
    """The state before a change.

    :param current: the present configuration; None if there is none.
    :param standing: the file's place among the kept versions.
    :param corrupt: whether the file is damaged.
    """

    identity: Identity
    current: Configuration | None
    standing: VersionState
    corrupt: bool = False


@dataclass(frozen=True, slots=True)
class Replaced:
    """The effect of a change, or of a dry run.

    :param old: the former configuration; None if there was none that can be used.
    :param aside: the new name of a damaged or older file.
    :param overtaken_by: the newest kept version, if the former configuration was older.
    """

    path: Path
    old: Configuration | None
    new: Configuration
    aside: Path | None
    overtaken_by: int | None


class Writer:
    """The only writer of a configuration.

    :param path: the file.
    :param clock: seconds since 1970.
    :param dry_run: nothing is written.
    """

    aside: Path | None = None
    """The new name of a file that is not a version."""

    def __init__(
        self,
        path: Path,
        versions: Versions,
        clock: Callable[[], float],
        found: Found,
        *,
        dry_run: bool = False,
    ) -> None:
        self.current = found.current
        self.standing = found.standing
        self._path = path
        self._versions = versions
        self._clock = clock
        self._before = found.identity
        self._corrupt = found.corrupt
        self._dry_run = dry_run
        self._prefix = f".{path.name}.new-"

    def write(self, new: Configuration) -> Configuration:
        """Replace the current configuration, once.

        The serial numbers of the configuration and of the cluster rise by one; that of an object
        rises if the object changed, and its mtime becomes now. A first configuration keeps its
        serial numbers. If nothing changed, nothing is written.

        Both serial numbers exceed all former ones, even if somebody has removed the file or put an
        older one in its place. An older file is kept aside as ``config.data.older-TIME``, and
        replaced even if only its serial numbers change.

        :return: the present configuration.
        :raises ConfigError: if it can't be written, which changes nothing, or is not safely on the
            disk.
        """
        current, floor = self.current, self.standing.floor
        written = stamped(new, current, self._clock())
        if written is current and self.standing.overtaken_by is None:
            return written
        leaps = floor > (current.serial_no if current else 0)
        if leaps:
            written = lifted(written, floor + 1)
        if not self._dry_run:
            self._put(written, leaps=leaps)
            self._before = identity(self._path)
        self.current = written
        self.standing = VersionState(None, written.serial_no)
        return written

    def replace(self, new: Configuration) -> Replaced:
        """Do the same as :meth:`write`; returns the effect, also of a dry run."""
        old, overtaken_by = self.current, self.standing.overtaken_by
        written = self.write(new)
        return Replaced(self._path, old, written, self.aside, overtaken_by)

    def _put(self, new: Configuration, *, leaps: bool) -> None:
        """Write *new*.

        :param leaps: whether its serial number is not the next one after the kept versions'.
        """
        if identity(self._path) != self._before:
            raise ConfigError(
                f"{self._path}: was changed while we had the lock",
                hint="something writes it without the lock; nothing was written now",
            )
        if self.current and new.serial_no <= self.current.serial_no:
            raise ConfigError(f"serial {new.serial_no} is not above {self.current.serial_no}")
        data = new.format()
        group = _group()
        try:
            self._clean_up()
            kept = self._keep(group)
            try:
                write_whole(self._path, data, mode=MODE, group=group, prefix=self._prefix)
            except BaseException:
                # Once the new file is there, this is the only copy of the old one.
                if kept and identity(self._path) == self._before:
                    kept.unlink(missing_ok=True)
                raise
            if leaps:
                # If this file were lost, the kept versions would not show its serial number.
                self._versions.keep(self._path, new.serial_no, group)
            self._versions.forget_oldest()
        except OSError as error:
            if identity(self._path) == self._before:
                raise ConfigError(
                    f"{self._path}: can't be written: {error.strerror}",
                    hint="the configuration is as it was",
                ) from error
            raise ConfigError(
                f"{self._path}: serial {new.serial_no} is written, but then: {error.strerror}",
                hint="it is in use, but might not survive a power cut",
            ) from error

    def _keep(self, group: int | None) -> Path | None:
        """Keep the present file as a version; returns the path of a new version."""
        is_older = self.standing.overtaken_by is not None
        if is_older or self._corrupt:
            why = "older" if is_older else "corrupt"
            now, prefix = self._clock(), self._prefix
            self.aside = keep_aside(self._path, why, now=now, group=group, prefix=prefix)
            return self.aside
        if self.current:
            return self._versions.keep(self._path, self.current.serial_no, group)
        return None

    def _clean_up(self) -> None:
        """Remove unfinished files of killed writers; this process is the only writer."""
        for file in self._path.parent.glob(f"{self._prefix}*"):
            file.unlink(missing_ok=True)


def identity(file: Path) -> Identity:
    """The identity of the content of a file.

    :raises ConfigError: if it can't be read.
    """
    try:
        status = file.stat()
    except FileNotFoundError:
        return (0, 0, 0, 0)
    except OSError as error:
        raise cannot_read(file, error) from error
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _group() -> int | None:
    """The group of the configuration's files; None leaves it to the system."""
    if os.geteuid() != 0:
        return None
    try:
        return grp.getgrnam(GROUP).gr_gid
    except KeyError:
        return None


LOCK_TIMEOUT_S = 10.0

_LOOKS = 10
"""The number of tries to read a file that changes meanwhile."""


class NoConfigError(ConfigError):
    """There is no configuration here."""


class CorruptError(ConfigError):
    """The file is damaged: no writer of Brine leaves such a file."""


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
        # All paths to a file have one lock, and a write does not replace a link.
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
        :raises CorruptError: if the file is not a configuration.
        :raises ConfigError: if it can't be read.
        """
        return _parse(self.path, self.read_bytes())

    def read_bytes(self) -> bytes:
        """The content of the current file; raises NoConfigError, ConfigError."""
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            raise self.none_here() from None
        except OSError as error:
            raise cannot_read(self.path, error) from error

    def none_here(self) -> NoConfigError:
        """The error to raise where there is no configuration."""
        hint = self._hint(
            "brine config apply FILE makes one, on the master; "
            "the other master candidates get a copy of the file"
        )
        return NoConfigError(f"{self.path}: there is no configuration", hint=hint)

    def overtaken_by(self, current: Configuration) -> int | None:
        """The newest kept version, if the *current* one should be newer and is not.

        :raises ConfigError: see :meth:`read`.
        """
        if self._versions.standing(self.path, current.serial_no).overtaken_by is None:
            return None
        return self._find().standing.overtaken_by  # unless a writer was at work meanwhile

    @contextlib.contextmanager
    def writing(
        self, timeout_s: float = LOCK_TIMEOUT_S, *, dry_run: bool = False
    ) -> Iterator[Writer]:
        """Be the only writer for the time of the block.

        :param dry_run: nothing is locked or written.
        :raises brine.common.locks.LockedError: if another writer holds the lock for *timeout_s*.
        :raises CorruptError: if the file is damaged; :meth:`restore` mends that.
        """
        with self._lock(timeout_s, dry_run=dry_run):
            yield Writer(self.path, self._versions, self._clock, self._find(), dry_run=dry_run)

    def expect_none_lost(self) -> None:
        """Refuse to make a first configuration if there was one.

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

        :raises ConfigError: if it is not kept, or can't be used.
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
            try:
                found = self._find()
            except CorruptError:
                standing = VersionState(None, self._versions.highest_serial(self.path))
                found = Found(identity(self.path), None, standing, corrupt=True)
            old, standing = found.current, found.standing
            if standing.overtaken_by is not None:  # its objects' serials are none to go on from
                found = replace(found, current=None)
            writer = Writer(self.path, self._versions, self._clock, found, dry_run=dry_run)
            done = writer.replace(restored(version, found.current, standing.floor + 1))
            return replace(done, old=old)

    def _find(self) -> Found:
        for _ in range(_LOOKS):
            before = identity(self.path)
            try:
                data = self.read_bytes()
            except NoConfigError:
                return Found(before, None, VersionState(None, self._versions.highest_serial()))
            try:
                current = Configuration.parse(data)
            except ConfigError as error:
                hint = self._hint(
                    "copy it from another master candidate: no version is kept to restore it from"
                )
                raise CorruptError(f"{self.path}: {error}", hint=hint) from error
            standing = self._versions.standing(self.path, current.serial_no)
            if identity(self.path) == before:  # with the lock, it always is
                return Found(before, current, standing)
        raise ConfigError(f"{self.path}: is changed all the time", hint="try again")

    @contextlib.contextmanager
    def _lock(self, timeout_s: float, *, dry_run: bool) -> Iterator[None]:
        """Be the one writer for the time of the block, unless it is a dry run.

        :raises brine.common.locks.LockedError: if another process is, for *timeout_s*.
        :raises ConfigError: if this one can't be.
        """
        file = self._lock_file
        with contextlib.ExitStack() as stack:
            try:
                if not dry_run:
                    if file == paths.CONFIG_LOCK:
                        file.parent.mkdir(mode=0o755, exist_ok=True)
                    stack.enter_context(locked(file, timeout_s=timeout_s))
            except PermissionError as error:
                text = f"{file}: this user may not change the configuration"
                raise ConfigError(text, hint="be root") from error
            except OSError as error:
                raise ConfigError(f"{file}: can't be locked: {error.strerror}") from error
            yield

    def _hint(self, otherwise: str) -> str:
        """How the configuration comes back from a kept version, or what to do without one."""
        kept = self.versions()
        return _bring_back(kept[0]) if kept else otherwise


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
