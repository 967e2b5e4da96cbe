"""The file that keeps the configuration: one writer at a time, whole writes, old versions kept."""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from brine.common import paths
from brine.common.config.configuration import Configuration
from brine.common.config.objects import ConfigError
from brine.common.config.stamps import restored, stamped
from brine.common.locks import locked
from brine.common.wholefile import sync_folder, write_whole

KEPT_VERSIONS = 10
LOCK_TIMEOUT_S = 10.0

_GROUP = "brine"
_MODE = 0o640


class NoConfigError(ConfigError):
    """There is no configuration here."""


class CorruptError(ConfigError):
    """The file is damaged: it is not what a writer of ours leaves."""


@dataclass(frozen=True, slots=True)
class Version:
    """A version that is kept.

    :param written: when it became the current one, seconds since 1970.
    :param size: bytes.
    """

    serial_no: int
    file: Path
    written: float
    size: int


class ConfigStore:
    """A configuration file with its lock and its kept versions.

    :param path: the file. Its versions are in ``config.versions`` beside it (named after it).
    :param lock_file: None: where the design puts it for the usual path, else beside the file.
    :param clock: seconds since 1970.
    """

    def __init__(
        self,
        path: Path = paths.CONFIG_FILE,
        *,
        lock_file: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self.versions_dir = path.with_name(f"{path.stem}.versions")
        self._prefix = f".{path.name}.new-"
        if lock_file is None:
            usual = path == paths.CONFIG_FILE
            lock_file = paths.CONFIG_LOCK if usual else path.with_name(f".{path.name}.lock")
        self._lock_file = lock_file
        self._clock = clock

    def read(self) -> Configuration:
        """The current configuration.

        :raises NoConfigError: if there is no file.
        :raises CorruptError: if what is there is no configuration.
        :raises ConfigError: if it can't be read.
        """
        return _parse(self.path, self._read_bytes(), hint=None)

    @contextlib.contextmanager
    def writing(self, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[Writer]:
        """Be the one writer for the time of the block.

        :raises brine.common.locks.LockedError: if another is, for *timeout_s*.
        :raises CorruptError: if the file is damaged; :meth:`restore` mends that.
        """
        with self._locked(timeout_s):
            try:
                before = self._identity()
                current = _parse(self.path, self._read_bytes(), hint=self._mend_hint())
            except NoConfigError:
                current = None
            yield Writer(self, current, before)

    def versions(self) -> list[Version]:
        """The kept versions, the newest first. The current one is not among them."""
        found = []
        here = self._identity()
        for file in self._version_files():
            status = file.stat()
            if (status.st_dev, status.st_ino) != here[:2]:
                found.append(Version(int(file.name), file, status.st_mtime, status.st_size))
        return sorted(found, key=lambda version: -version.serial_no)

    def read_version(self, serial_no: int) -> Configuration:
        """A kept version.

        :raises ConfigError: if that one is not kept, or can't be used.
        """
        file = self.versions_dir / str(serial_no)
        try:
            data = file.read_bytes()
        except FileNotFoundError:
            kept = ", ".join(str(version.serial_no) for version in self.versions()) or "none"
            raise ConfigError(
                f"version {serial_no} is not kept", hint=f"kept versions: {kept}"
            ) from None
        except OSError as error:
            raise ConfigError(f"{file}: can't be read: {error.strerror}") from error
        return _parse(file, data, hint=None)

    def restore(self, serial_no: int, timeout_s: float = LOCK_TIMEOUT_S) -> Restored:
        """Make the content of a kept version the current one, with serial numbers above all that
        were. A damaged file is kept aside as ``config.data.corrupt-TIME``.

        :raises ConfigError: if that version is not kept, or can't be used.
        """
        with self._locked(timeout_s):
            version = self.read_version(serial_no)
            before = self._identity()
            aside = None
            try:
                current: Configuration | None = self.read()
            except NoConfigError:
                current = None
            except CorruptError:
                current = None
                aside = self._keep_aside()
            floor = current.serial_no if current else self.highest_serial(aside)
            new = restored(version, current, floor + 1)
            writer = Writer(self, current, before)
            return Restored(current, writer.write(new, lowest_serial=floor + 1), aside)

    def highest_serial(self, corrupt: Path | None = None) -> int:
        """The highest serial number that there may have been, where no file says it: the kept
        versions', and what can be made out in a *corrupt* file."""
        highest = max((int(file.name) for file in self._version_files()), default=0)
        if corrupt:
            highest += 1  # a version is kept when the next one is written
            seen = re.findall(rb'"serial_no"\s*:\s*(\d{1,15})\b', corrupt.read_bytes())
            # What is far above is damage, too.
            near = [int(digits) for digits in seen if int(digits) < highest + 1_000_000]
            highest = max([highest, *near])
        return highest

    def _locked(self, timeout_s: float) -> contextlib.AbstractContextManager[None]:
        folder = self._lock_file.parent
        try:
            if self._lock_file == paths.CONFIG_LOCK:
                folder.mkdir(mode=0o755, exist_ok=True)
            return _told(locked(self._lock_file, timeout_s=timeout_s), self._lock_file)
        except OSError as error:
            raise _cannot_lock(self._lock_file, error) from error

    def _read_bytes(self) -> bytes:
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            raise NoConfigError(
                f"{self.path}: there is no configuration",
                hint="brine config apply FILE makes one, on the master and its candidates",
            ) from None
        except PermissionError:
            raise ConfigError(
                f"{self.path}: can't be read by this user",
                hint=f"be root, or a member of the group {_GROUP}",
            ) from None
        except OSError as error:
            raise ConfigError(f"{self.path}: can't be read: {error.strerror}") from error

    def _identity(self) -> tuple[int, int, int, int]:
        """What changes when the file does; zeros if there is none."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return (0, 0, 0, 0)
        except OSError as error:
            raise ConfigError(f"{self.path}: can't be read: {error.strerror}") from error
        return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def _version_files(self) -> list[Path]:
        if not self.versions_dir.is_dir():
            return []
        return [file for file in self.versions_dir.iterdir() if file.name.isdecimal()]

    def _mend_hint(self) -> str:
        kept = self.versions()
        if kept:
            return f"brine config restore {kept[0].serial_no} goes back to the version before"
        return "no version is kept that it could be restored from"

    def _keep_aside(self) -> Path:
        now = datetime.fromtimestamp(self._clock(), UTC)
        aside = self.path.with_name(f"{self.path.name}.corrupt-{now:%Y%m%dT%H%M%SZ}")
        with contextlib.suppress(FileExistsError):  # kept in this very second
            _link(self.path, aside)
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
        group = _group() if os.geteuid() == 0 else None
        try:
            self._clean_up()
            kept = self._keep(old, group)
            try:
                write_whole(self.path, data, mode=_MODE, group=group, prefix=self._prefix)
            except BaseException:
                if kept:
                    kept.unlink(missing_ok=True)
                raise
            self._forget_oldest()
        except OSError as error:
            hint = "the configuration is as it was" if error.errno == errno.ENOSPC else None
            raise ConfigError(
                f"{self.path}: can't be written: {error.strerror}", hint=hint
            ) from error

    def _keep(self, old: Configuration | None, group: int | None) -> Path | None:
        """Keep what the file is now; the path if that made one."""
        if old is None:
            return None
        if not self.versions_dir.is_dir():
            self.versions_dir.mkdir(mode=0o750, exist_ok=True)
            if group is not None:
                os.chown(self.versions_dir, -1, group)
        file = self.versions_dir / str(old.serial_no)
        made = None
        try:
            _link(self.path, file)
            made = file
        except FileExistsError:
            # Left by a writer that was killed right here, or the file was changed by hand since.
            if not file.samefile(self.path):
                file.unlink()
                _link(self.path, file)
                made = file
        sync_folder(self.versions_dir)
        return made

    def _forget_oldest(self) -> None:
        files = sorted(self._version_files(), key=lambda file: int(file.name))
        for file in files[:-KEPT_VERSIONS]:
            file.unlink(missing_ok=True)

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
        :raises ConfigError: if it can't be written; then all is as it was.
        """
        store = self._store
        if self.current is None:
            lowest_serial = max(lowest_serial, store.highest_serial() + 1)
        written = stamped(new, self.current, store._clock())
        if self.current is None and written.serial_no < lowest_serial:
            rise = lowest_serial - written.serial_no
            cluster = replace(written.cluster, serial_no=written.cluster.serial_no + rise)
            written = replace(written, serial_no=lowest_serial, cluster=cluster)
        if self.current is not None and written == self.current:
            return self.current
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
    try:
        return grp.getgrnam(_GROUP).gr_gid
    except KeyError:
        return None


def _link(source: Path, target: Path) -> None:
    """A second name for a file that is never written in place, or a copy where the file system has
    no such thing."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV):
            raise
        if target.exists():
            raise FileExistsError(errno.EEXIST, "exists", str(target)) from None
        shutil.copy2(source, target)


@contextlib.contextmanager
def _told(lock: contextlib.AbstractContextManager[None], file: Path) -> Iterator[None]:
    """Take the lock, with its faults told."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock)
        except OSError as error:
            raise _cannot_lock(file, error) from error
        yield


def _cannot_lock(file: Path, error: OSError) -> ConfigError:
    if isinstance(error, PermissionError):
        return ConfigError(f"{file}: this user may not change the configuration", hint="be root")
    return ConfigError(f"{file}: can't be locked: {error.strerror}")
