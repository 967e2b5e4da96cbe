"""The file of the configuration: one writer at a time, atomic writes, old versions kept."""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from brine.common import operation, paths
from brine.common.files import second_name, sync_folder, write_whole
from brine.common.locks import locked
from brine.config.model import KINDS, Configuration, Stamped
from brine.config.schema import ConfigError, same

LOCK_TIMEOUT_S = 10.0
KEPT_VERSIONS = 10

_GROUP = "brine"
"""The group that may read a configuration."""
_MODE = 0o640
_LOOKS = 10
"""The number of tries to read a file that changes meanwhile."""

S = TypeVar("S", bound=Stamped | Configuration)


class NoConfigError(ConfigError):
    """There is no configuration here."""


class CorruptError(ConfigError):
    """The file is damaged: no writer of Brine leaves such a file."""


@dataclass(frozen=True, slots=True)
class Version:
    """A version that is kept."""

    serial_no: int
    file: Path
    written: float  # when it became the current one, seconds since 1970
    size: int  # bytes


class ConfigStore:
    """A configuration file with its lock and its kept versions; ``is_usual`` says whether it is the
    cluster's own, where the design puts it. Methods raise ConfigError where a file can't be read.

    :param path: the file, which may be a symbolic link. Its versions are in ``config.versions``
        beside it (named after it).
    :param clock: seconds since 1970.
    """

    def __init__(
        self, path: Path = paths.CONFIG_FILE, *, clock: Callable[[], float] = time.time
    ) -> None:
        # All paths to a file have one lock, and a write does not replace a link.
        self.path = path = _resolved(path)
        self.versions_dir = path.with_name(f"{path.stem}.versions")
        self.is_usual = path == _resolved(paths.CONFIG_FILE)
        own_lock = path.with_name(f".{path.name}.lock")
        self._lock_file = paths.CONFIG_LOCK if self.is_usual else own_lock
        self.clock = clock

    def read(self) -> Configuration:
        """The current configuration; raises NoConfigError, CorruptError."""
        return self.read_with_data()[0]

    def read_with_data(self) -> tuple[Configuration, bytes]:
        """The current configuration, and the file's content; raises NoConfigError, CorruptError."""
        with _reading(self.path):
            try:
                data = self.path.read_bytes()
            except FileNotFoundError:
                raise self.none_here() from None
        return _parse(self.path, data), data

    def none_here(self) -> NoConfigError:
        """The error to raise where there is no configuration."""
        hint = self._hint(
            "brine config apply FILE makes one, on the master; "
            "the other master candidates get a copy of the file"
        )
        return NoConfigError(f"{self.path}: there is no configuration", hint=hint)

    def expect_none_lost(self) -> None:
        """Refuse to make a first configuration if there was one: raise NoConfigError."""
        if self.kept():
            text = f"{self.path}: there is no configuration, but versions of one are kept"
            instead = f"; if a new cluster is meant, move {self.versions_dir} away"
            raise NoConfigError(text, hint=self._hint("") + instead)

    def versions(self) -> list[Version]:
        """The kept versions, the newest first. The current one is not among them."""
        found = []
        for serial_no, file in sorted(self.kept().items(), reverse=True):
            with _reading(self.versions_dir), contextlib.suppress(FileNotFoundError):
                status = file.stat()  # unless a writer has just forgotten it
                if not _is_copy(file, self.path):
                    found.append(Version(serial_no, file, status.st_mtime, status.st_size))
        return found

    def read_version(self, serial_no: int) -> Configuration:
        """A kept version; raises ConfigError if it is not kept, or can't be used."""
        file = self.versions_dir / str(serial_no)
        with _reading(file):
            try:
                return _parse(file, file.read_bytes())
            except FileNotFoundError:
                kept = ", ".join(str(version.serial_no) for version in self.versions()) or "none"
                hint = f"kept versions: {kept}"
        raise ConfigError(f"version {serial_no} is not kept", hint=hint)

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
            yield self.look(dry_run=dry_run)

    def restore(
        self,
        serial_no: int,
        timeout_s: float = LOCK_TIMEOUT_S,
        *,
        dry_run: bool = False,
        written: Callable[[Configuration], object] = lambda _: None,
    ) -> Writer:
        """Make the content of a kept version the current one, with serial numbers above all that
        were. A damaged file is kept aside as ``config.data.corrupt-TIME``, one that is older than a
        kept version as ``config.data.older-TIME``.

        :param dry_run: only tell what that would be; nothing is locked or written.
        :param written: called with what was written, or would be, while the lock is held.
        :return: the writer that has done so.
        """
        with self._lock(timeout_s, dry_run=dry_run):
            version = self.read_version(serial_no)
            writer = self.look(dry_run=dry_run, mend=True)
            if writer.overtaken_by is not None:  # its objects' serials are none to go on from
                writer.current = None
            writer.write(_restored(version, writer.current, writer.floor + 1))
            written(writer.new)
            return writer

    def kept(self) -> dict[int, Path]:
        """The files of the kept versions by serial number, in no order."""
        with _reading(self.versions_dir), contextlib.suppress(FileNotFoundError):
            files = self.versions_dir.iterdir()
            return {int(file.name): file for file in files if file.name.isdecimal()}
        return {}

    def look(self, *, dry_run: bool = True, mend: bool = False) -> Writer:
        """The configuration as it is now. Without the lock it is for looking at, and for dry runs.

        :param mend: a damaged file is no CorruptError.
        """
        for _ in range(_LOOKS):
            writer = Writer(self, _identity(self.path), dry_run=dry_run)
            try:
                writer.old = writer.current = self.read()
            except NoConfigError:
                writer.floor = self._highest_serial()
                return writer
            except CorruptError as error:
                if mend:
                    writer.is_corrupt = True
                    writer.floor = self._highest_serial(is_corrupt=True)
                    return writer
                error.hint = self._hint(
                    "copy it from another master candidate: no version is kept to restore it from"
                )
                raise
            self._compare(writer, writer.old.serial_no)
            if not writer.is_late():  # with the lock, it never is
                return writer
        raise ConfigError(f"{self.path}: is changed all the time", hint="try again")

    def _compare(self, writer: Writer, serial_no: int) -> None:
        """See where the current file, of that serial number, stands among the kept versions."""
        writer.floor = serial_no
        for kept, file in self.kept().items():
            with _reading(file):
                # Else a writer was killed before the next one was there.
                if kept >= serial_no and not _is_same_file(file, self.path):
                    # The newest is kept when the next is written, so there was one more.
                    writer.floor = max(writer.floor, kept + 1)
                    # Otherwise an admin put a kept version in the place of a lost file.
                    if not _is_copy(file, self.path):
                        writer.overtaken_by = max(writer.overtaken_by or 0, kept)

    def _highest_serial(self, *, is_corrupt: bool = False) -> int:
        """The highest serial number that there may have been, where no file says it: one above the
        kept versions', as the newest is kept when the next is written, and what can be made out in
        a corrupt file."""
        highest = max(self.kept(), default=0)
        if highest or is_corrupt:
            highest += 1
        if is_corrupt:
            seen = re.findall(rb'"serial_no"\s*:\s*(\d{1,15})\b', self.path.read_bytes())
            # A number far above is damage, too.
            near = [int(digits) for digits in seen if int(digits) < highest + 1_000_000]
            highest = max([highest, *near])
        return highest

    @contextlib.contextmanager
    def _lock(self, timeout_s: float, *, dry_run: bool) -> Iterator[None]:
        file = self._lock_file
        with contextlib.ExitStack() as stack:
            try:
                if not dry_run:
                    if self.is_usual:
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
        if not (kept := self.versions()):
            return otherwise
        return (
            "copy it from another master candidate; if none has it, brine config restore "
            f"{kept[0].serial_no}, which loses what was changed after that version"
        )


def move_key(instance: str) -> str:
    """The key of the operation that moves an instance, on the master."""
    return f"move/{instance}"


def read_configuration(file: str) -> Configuration:
    """The configuration in a file; ``-`` is standard input.

    :raises ConfigError: if there is none, or it is damaged.
    """
    if file != "-":
        return ConfigStore(Path(file).absolute()).read()
    try:
        return Configuration.parse(sys.stdin.buffer.read())
    except ConfigError as error:
        raise ConfigError(f"standard input: {error}", hint=error.hint) from error


class Writer:
    """The only writer of a configuration, for one write; or what one would find.

    :ivar old: the former configuration; None if there was none that can be used.
    :ivar current: the same, or None where serial numbers are not to go on from it.
    :ivar new: the present one, after the write.
    :ivar overtaken_by: the newest kept version, where the current one should be newer and is not:
        an old file was put in its place by hand. None where all is in order.
    :ivar floor: the highest serial number that there may have been.
    :ivar aside: the new name of a damaged or older file, which is no version.
    """

    new: Configuration

    def __init__(self, store: ConfigStore, identity: tuple[int, ...], *, dry_run: bool) -> None:
        self.path = store.path
        self.old: Configuration | None = None
        self.current: Configuration | None = None
        self.overtaken_by: int | None = None
        self.floor = 0
        self.is_corrupt = False
        self.aside: Path | None = None
        self.dry_run = dry_run
        self._store = store
        self._identity = identity

    def is_late(self) -> bool:
        """Whether the file is another one by now."""
        return _identity(self.path) != self._identity

    def write(self, new: Configuration, *, moved: str = "") -> Configuration:
        """Replace the current configuration, once; returns the present one.

        Serial numbers and the mtime of what changed rise. A first configuration keeps its own. If
        nothing changed, nothing is written.

        The serial numbers of the configuration and of the cluster exceed all former ones, even if
        the file was removed, or an older one was put in its place. An older file is kept aside
        as ``config.data.older-TIME``, and replaced even if only its serial numbers change.

        :param moved: the instance whose move is what changes it. No other write may change an
            instance while its move is pending: the claim that its target takes has the next serial.
        :raises ConfigError: if it can't be written, which changes nothing, or is not safely on the
            disk.
        """
        if self._store.is_usual and self.current:
            _expect_unmoved(new, self.current, moved)
        current, lowest = self.current, self.floor + 1
        written = _stamped(new, current, self._store.clock())
        self.new = written
        if written is current and self.overtaken_by is None:
            return written
        # Whether its serial number is not the next one after the kept versions'.
        leaps = lowest > (current.serial_no if current else 0) + 1
        if leaps:
            cluster = written.cluster
            cluster = replace(cluster, serial_no=max(cluster.serial_no, lowest))
            serial_no = max(written.serial_no, lowest)
            written = replace(written, serial_no=serial_no, cluster=cluster)
        if not self.dry_run:
            self._put(written, leaps=leaps)
        self.new = written
        return written

    def _put(self, new: Configuration, *, leaps: bool) -> None:
        if self.is_late():
            raise ConfigError(
                f"{self.path}: was changed while we had the lock",
                hint="something writes it without the lock; nothing was written now",
            )
        data = new.format()
        group = _group()
        try:
            kept = self._keep(group)
            try:
                write_whole(self.path, data, mode=_MODE, group=group, alone=True)
            except BaseException:
                # Once the new file is there, this is the only copy of the old one.
                if kept and not self.is_late():
                    kept.unlink(missing_ok=True)
                raise
            if leaps:
                # If this file were lost, the kept versions would not show its serial number.
                self._keep_version(new.serial_no, group)
            for _, file in sorted(self._store.kept().items())[:-KEPT_VERSIONS]:
                file.unlink(missing_ok=True)
        except OSError as error:
            if not self.is_late():
                raise ConfigError(
                    f"{self.path}: can't be written: {error.strerror}",
                    hint="the configuration is as it was",
                ) from error
            raise ConfigError(
                f"{self.path}: serial {new.serial_no} is written, but then: {error.strerror}",
                hint="it is in use, but might not survive a power cut",
            ) from error

    def _keep(self, group: int | None) -> Path | None:
        """Keep the present file, as a version or, where no writer of Brine has left it, aside;
        returns the path of what that made."""
        if not self.is_corrupt and self.overtaken_by is None:
            return self._keep_version(self.current.serial_no, group) if self.current else None
        now = datetime.fromtimestamp(self._store.clock(), UTC)
        why = "corrupt" if self.is_corrupt else "older"
        aside = self.path.with_name(f"{self.path.name}.{why}-{now:%Y%m%dT%H%M%SZ}")
        try:
            self.aside = second_name(self.path, aside)
        except OSError as error:
            text = f"{self.path}: can't be kept aside: {error.strerror}"
            raise ConfigError(text, hint="nothing was changed") from error
        return self.aside

    def _keep_version(self, serial_no: int, group: int | None) -> Path | None:
        """Keep what the file is now as a version; the path if that made one. Raises OSError, also
        if another version has that serial number; then nothing was made."""
        folder = self._store.versions_dir
        if not folder.is_dir():
            folder.mkdir(mode=0o750, exist_ok=True)
            if group is not None:
                os.chown(folder, -1, group)
        file = folder / str(serial_no)
        if file.exists():
            if _is_copy(file, self.path):  # left by a writer that was killed right here
                return None
            raise FileExistsError(errno.EEXIST, "another version has its serial number", str(file))
        try:
            os.link(self.path, file)
            sync_folder(folder)
        except BaseException:
            file.unlink(missing_ok=True)
            raise
        return file


# Serial numbers and times: what rises when a configuration is changed.


def _expect_unmoved(new: Configuration, current: Configuration, moved: str) -> None:
    """Refuse a change of instances whose moves are pending, but for one."""
    pending = {key: one for one in operation.pending() for key in one.keys}
    for uuid, old in current.instances.items() if pending else ():
        move = pending.get(move_key(old.name))
        changed = new.instances.get(uuid)
        if not move or old.name == moved or (changed and same(changed, old)):
            continue
        raise ConfigError(
            f"{old.name} can't change while it moves (operation {move.id})",
            hint="try again when the move has ended; brine operations list shows it",
        )


def _stamped(new: Configuration, old: Configuration | None, now: float) -> Configuration:
    """*new* with the serial numbers and times that it has as the successor of *old*; without one it
    keeps those that it has. If nothing changed, it is *old*."""
    sections: dict[str, Any] = {}
    for section in KINDS:
        before = getattr(old, section, {})
        items = getattr(new, section).items()
        sections[section] = {key: _successor(item, before.get(key), now) for key, item in items}
    if old is None:
        return replace(_born(new, now), cluster=_born(new.cluster, now), **sections)
    cluster = _successor(new.cluster, old.cluster, now)
    written = _successor(replace(new, cluster=cluster, **sections), old, now)
    if written is old:
        return old
    return replace(written, cluster=_risen(new.cluster, old.cluster, now))


def _restored(
    version: Configuration, current: Configuration | None, serial_no: int
) -> Configuration:
    """The content of an earlier *version*, ready to succeed *current* with that serial number.

    Where there is no object in *current* to count from, serial numbers rise by as much as the
    configuration's: each change raised it by one, and an object's by no more than that.
    """
    rise = max(serial_no - version.serial_no, 0)
    sections: dict[str, Any] = {}
    for section in KINDS:
        now = getattr(current, section, {})
        sections[section] = {
            key: item if key in now else replace(item, serial_no=item.serial_no + rise)
            for key, item in getattr(version, section).items()
        }
    cluster = version.cluster
    if current is None:
        cluster = replace(cluster, serial_no=cluster.serial_no + rise)
    return replace(version, serial_no=serial_no, cluster=cluster, **sections)


def _successor(new: S, old: S | None, now: float) -> S:
    """An object in the place of *old*: that itself if it did not change."""
    if old is None or new is old:
        return new if old else _born(new, now)
    like = replace(new, serial_no=old.serial_no, ctime=old.ctime, mtime=old.mtime)
    return old if same(like, old) else _risen(new, old, now)


def _risen(new: S, old: S, now: float) -> S:
    """*new* with the next serial number."""
    return replace(new, serial_no=old.serial_no + 1, ctime=old.ctime, mtime=now)


def _born(new: S, now: float) -> S:
    if new.serial_no > 0 and new.ctime and new.mtime:
        return new
    serial_no = max(new.serial_no, 1)
    return replace(new, serial_no=serial_no, ctime=new.ctime or now, mtime=new.mtime or now)


# Files.


def _identity(file: Path) -> tuple[int, ...]:
    """The identity of the content of a file; empty if there is no file."""
    with _reading(file), contextlib.suppress(FileNotFoundError):
        status = file.stat()
        return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    return ()


def _is_same_file(file: Path, other: Path) -> bool:
    try:
        return file.samefile(other)
    except FileNotFoundError:
        return False


def _is_copy(file: Path, other: Path) -> bool:
    """Whether both are one file, or have the same content."""
    if _is_same_file(file, other):
        return True
    with contextlib.suppress(FileNotFoundError):
        return file.stat().st_size == other.stat().st_size and (
            file.read_bytes() == other.read_bytes()
        )
    return False


def _group() -> int | None:
    """The group of the configuration's files; None leaves it to the system."""
    if os.geteuid() == 0:
        with contextlib.suppress(KeyError):
            return grp.getgrnam(_GROUP).gr_gid
    return None


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Tell of a file or folder that the system does not let us read."""
    try:
        yield
    except PermissionError as error:
        hint = f"be root, or a member of the group {_GROUP}"
        raise ConfigError(f"{file}: can't be read by this user", hint=hint) from error
    except OSError as error:
        raise ConfigError(f"{file}: can't be read: {error.strerror}") from error


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
