"""The file that keeps the configuration: one writer at a time, whole writes, old versions kept."""

from __future__ import annotations

import contextlib
import grp
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from brine.common import paths
from brine.common.config.configuration import Configuration
from brine.common.config.objects import ConfigError
from brine.common.config.stamps import restored, stamped
from brine.common.config.versions import (
    GROUP,
    KEPT_VERSIONS,
    MODE,
    Version,
    Versions,
    cannot_read,
    second_name,
)
from brine.common.config.writelock import write_lock
from brine.common.wholefile import write_whole

__all__ = [
    "KEPT_VERSIONS",
    "LOCK_TIMEOUT_S",
    "ConfigStore",
    "CorruptError",
    "NoConfigError",
    "Restored",
    "Version",
    "Writer",
]

LOCK_TIMEOUT_S = 10.0


class NoConfigError(ConfigError):
    """There is no configuration here."""


class CorruptError(ConfigError):
    """The file is damaged: it is not what a writer of ours leaves."""


class ConfigStore:
    """A configuration file with its lock and its kept versions.

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
        self._prefix = f".{path.name}.new-"
        if lock_file is None:
            usual = path == _resolved(paths.CONFIG_FILE)
            lock_file = paths.CONFIG_LOCK if usual else path.with_name(f".{path.name}.lock")
        self._lock_file = lock_file
        self._clock = clock

    def read(self) -> Configuration:
        """The current configuration.

        :raises NoConfigError: if there is no file.
        :raises CorruptError: if what is there is no configuration.
        :raises ConfigError: if it can't be read.
        """
        return _parse(self.path, self.read_bytes(), hint=None)

    @contextlib.contextmanager
    def writing(self, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[Writer]:
        """Be the one writer for the time of the block.

        :raises brine.common.locks.LockedError: if another is, for *timeout_s*.
        :raises CorruptError: if the file is damaged; :meth:`restore` mends that.
        """
        with write_lock(self._lock_file, timeout_s):
            try:
                before = self._identity()
                current = _parse(self.path, self.read_bytes(), hint=self._mend_hint())
            except NoConfigError:
                current = None
            yield Writer(self, current, before)

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
        return _parse(self._versions.file(serial_no), data, hint=None)

    def restore(
        self, serial_no: int, timeout_s: float = LOCK_TIMEOUT_S, *, dry_run: bool = False
    ) -> Restored:
        """Make the content of a kept version the current one, with serial numbers above all that
        were. A damaged file is kept aside as ``config.data.corrupt-TIME``.

        :param dry_run: only tell what that would be; nothing is locked or written.
        :raises ConfigError: if that version is not kept, or can't be used.
        """
        with contextlib.nullcontext() if dry_run else write_lock(self._lock_file, timeout_s):
            version = self.read_version(serial_no)
            before = self._identity()
            aside = None
            try:
                current: Configuration | None = self.read()
            except NoConfigError:
                current = None
            except CorruptError:
                current = None
                aside = self.path if dry_run else self._keep_aside()
            floor = current.serial_no if current else self.highest_serial(aside)
            new = restored(version, current, floor + 1)
            if dry_run:
                written = stamped(new, current, self._clock())
                return Restored(current, written, None)
            writer = Writer(self, current, before)
            return Restored(current, writer.write(new, lowest_serial=floor + 1), aside)

    def highest_serial(self, corrupt: Path | None = None) -> int:
        """The highest serial number that there may have been, where no file says it: one above the
        kept versions', as the newest is kept when the next is written, and what can be made out in
        a *corrupt* file."""
        highest = self._versions.highest_serial()
        if highest or corrupt:
            highest += 1
        if corrupt:
            seen = re.findall(rb'"serial_no"\s*:\s*(\d{1,15})\b', corrupt.read_bytes())
            # What is far above is damage, too.
            near = [int(digits) for digits in seen if int(digits) < highest + 1_000_000]
            highest = max([highest, *near])
        return highest

    def read_bytes(self) -> bytes:
        """The current file as it is; raises NoConfigError, ConfigError."""
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            raise NoConfigError(
                f"{self.path}: there is no configuration",
                hint="brine config apply FILE makes one, on the master and its candidates",
            ) from None
        except OSError as error:
            raise cannot_read(self.path, error) from error

    def _identity(self) -> tuple[int, int, int, int]:
        """What changes when the file does; zeros if there is none."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return (0, 0, 0, 0)
        except OSError as error:
            raise cannot_read(self.path, error) from error
        return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def _mend_hint(self) -> str:
        kept = self.versions()
        if kept:
            return f"brine config restore {kept[0].serial_no} goes back to the version before"
        return "no version is kept that it could be restored from"

    def _keep_aside(self) -> Path:
        now = datetime.fromtimestamp(self._clock(), UTC)
        first = f"{self.path.name}.corrupt-{now:%Y%m%dT%H%M%SZ}"
        for number in itertools.count(1):
            aside = self.path.with_name(first if number == 1 else f"{first}-{number}")
            try:
                second_name(self.path, aside, _group(), prefix=self._prefix)
            except FileExistsError:  # another one of this very second
                if not aside.samefile(self.path):
                    continue
            except OSError as error:
                text = f"{self.path}: can't be kept aside: {error.strerror}"
                raise ConfigError(text, hint="nothing was changed") from error
            break
        return aside

    def put(self, new: Configuration, old: Configuration | None, before: tuple[int, ...]) -> None:
        """Write *new*, and keep *old*. For :class:`Writer`, under the lock."""
        if self._identity() != before:
            raise ConfigError(
                f"{self.path}: was changed while we had the lock",
                hint="something writes it without the lock; nothing was written now",
            )
        if old and new.serial_no <= old.serial_no:
            raise ConfigError(f"serial {new.serial_no} is not above {old.serial_no}")
        data = new.format()
        group = _group()
        try:
            self._clean_up()
            kept = self._versions.keep(self.path, old.serial_no, group) if old else None
            try:
                write_whole(self.path, data, mode=MODE, group=group, prefix=self._prefix)
            except BaseException:
                # Once the new file is there, this is the only trace of the old one.
                if kept and self._identity() == before:
                    kept.unlink(missing_ok=True)
                raise
            self._versions.forget_oldest()
        except OSError as error:
            if self._identity() == before:
                raise ConfigError(
                    f"{self.path}: can't be written: {error.strerror}",
                    hint="the configuration is as it was",
                ) from error
            raise ConfigError(
                f"{self.path}: serial {new.serial_no} is written, but then: {error.strerror}",
                hint="it is in use, but might not survive a power cut",
            ) from error

    def _clean_up(self) -> None:
        """Remove what writers that were killed left; we are the only one."""
        for file in self.path.parent.glob(f"{self._prefix}*"):
            file.unlink(missing_ok=True)


class Writer:
    """The one writer: what is there now, and how it is replaced.

    :param current: None if there is no configuration yet.
    """

    def __init__(
        self, store: ConfigStore, current: Configuration | None, before: tuple[int, ...]
    ) -> None:
        self.current = current
        self._store = store
        self._before = before

    def write(self, new: Configuration, *, lowest_serial: int = 1) -> Configuration:
        """Replace the current configuration, once.

        The serial number is one above the current one's, as is the cluster's; an object's rises if
        the object changed, and its mtime is now. A first configuration keeps the serials that it
        brings. If nothing changed, nothing is written.

        :param lowest_serial: where there is no current one, the serial is not below that.
        :return: what is there now.
        :raises ConfigError: if it can't be written, which leaves all as it was, or is not safe on
            the disk.
        """
        store = self._store
        if self.current is None:
            lowest_serial = max(lowest_serial, store.highest_serial() + 1)
        written = stamped(new, self.current, store._clock())
        if self.current is None and lowest_serial > 1:
            # A cluster's serial is never above its configuration's, so this is above both.
            cluster_serial = max(written.cluster.serial_no, lowest_serial)
            written = replace(
                written,
                serial_no=max(written.serial_no, lowest_serial),
                cluster=replace(written.cluster, serial_no=cluster_serial),
            )
        if written is self.current:
            return written
        store.put(written, self.current, self._before)
        self.current = written
        self._before = store._identity()
        return written


@dataclass(frozen=True, slots=True)
class Restored:
    """What :meth:`ConfigStore.restore` did.

    :param old: what was there; None if nothing was, or nothing usable.
    :param aside: where a damaged file is kept now.
    """

    old: Configuration | None
    new: Configuration
    aside: Path | None


def _parse(file: Path, data: bytes, *, hint: str | None) -> Configuration:
    try:
        return Configuration.parse(data)
    except ConfigError as error:
        raise CorruptError(f"{file}: {error}", hint=hint or error.hint) from error


def _group() -> int | None:
    """The group that a file of ours belongs to; None leaves it to the system."""
    if os.geteuid() != 0:
        return None
    try:
        return grp.getgrnam(GROUP).gr_gid
    except KeyError:
        return None


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # the latter for a loop of links
        raise ConfigError(f"{path}: can't be found: {error}") from error
