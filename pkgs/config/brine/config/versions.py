"""The old versions of a configuration: one file each, named by serial number."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from brine.common.files import sync_folder, write_whole
from brine.config.model import KINDS, Configuration, Stamped
from brine.config.schema import ConfigError, same

# Serial numbers and times: what rises when a configuration is changed.

S = TypeVar("S", bound=Stamped | Configuration)


def stamped(new: Configuration, old: Configuration | None, now: float) -> Configuration:
    """*new* with the serial numbers and times that it has as the successor of *old*.

    Without a predecessor it keeps those that it has. If nothing changed, it is *old*.

    :param now: seconds since 1970.
    """
    sections: dict[str, Any] = {}
    for section in KINDS:
        before: dict[str, Stamped] = getattr(old, section) if old else {}
        sections[section] = {
            key: _changed(item, before[key], now) if key in before else _born(item, now)
            for key, item in getattr(new, section).items()
        }
    if old is None:
        return replace(_born(new, now), cluster=_born(new.cluster, now), **sections)
    is_same = (
        new.version == old.version
        and same(new.extra, old.extra)
        and same(_like(new.cluster, old.cluster), old.cluster)
        and all(_is_like(sections[section], getattr(old, section)) for section in KINDS)
    )
    if is_same:
        return old
    cluster = _risen(new.cluster, old.cluster, now)
    return replace(_risen(new, old, now), cluster=cluster, **sections)


def lifted(configuration: Configuration, lowest_serial: int) -> Configuration:
    """*configuration* with serial numbers, its own and its cluster's, that are not below
    *lowest_serial*. A cluster's is never above its configuration's, so this is above both."""
    cluster = configuration.cluster
    cluster_serial = max(cluster.serial_no, lowest_serial)
    return replace(
        configuration,
        serial_no=max(configuration.serial_no, lowest_serial),
        cluster=replace(cluster, serial_no=cluster_serial),
    )


def restored(
    version: Configuration, current: Configuration | None, serial_no: int
) -> Configuration:
    """The content of an earlier *version*, ready to succeed *current*.

    Where there is no object in *current* to count from, serial numbers rise by as much as the
    configuration's: each change raised it by one, and an object's by no more than that.

    :param serial_no: that it is going to have.
    """
    rise = max(serial_no - version.serial_no, 0)
    sections: dict[str, Any] = {}
    for section in KINDS:
        now: dict[str, Stamped] = getattr(current, section) if current else {}
        sections[section] = {
            key: item if key in now else replace(item, serial_no=item.serial_no + rise)
            for key, item in getattr(version, section).items()
        }
    cluster = version.cluster
    if current is None:
        cluster = replace(cluster, serial_no=cluster.serial_no + rise)
    return replace(version, serial_no=serial_no, cluster=cluster, **sections)


def _is_like(new: dict[str, Stamped], old: dict[str, Stamped]) -> bool:
    """Whether a section is what it was; what did not change is the very same object by now."""
    return len(new) == len(old) and all(item is old.get(key) for key, item in new.items())


def _like(new: S, old: S) -> S:
    """*new* with the numbers and times of *old*."""
    return replace(new, serial_no=old.serial_no, ctime=old.ctime, mtime=old.mtime)


def _risen(new: S, old: S, now: float) -> S:
    """*new* with the next serial number."""
    return replace(new, serial_no=old.serial_no + 1, ctime=old.ctime, mtime=now)


def _changed(new: S, old: S, now: float) -> S:
    return old if new is old or same(_like(new, old), old) else _risen(new, old, now)


def _born(new: S, now: float) -> S:
    if new.serial_no > 0 and new.ctime and new.mtime:
        return new
    serial_no = max(new.serial_no, 1)
    return replace(new, serial_no=serial_no, ctime=new.ctime or now, mtime=new.mtime or now)


KEPT_VERSIONS = 10
GROUP = "brine"
"""The group that may read a configuration."""
MODE = 0o640

_PREFIX = ".new-"


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


@dataclass(frozen=True, slots=True)
class VersionState:
    """Where a current configuration stands among the kept versions.

    :param overtaken_by: the newest of these, where the current one should be newer and is not: an
        old file was put in its place by hand. None where all is in order.
    :param floor: the highest serial number that there may have been.
    """

    overtaken_by: int | None
    floor: int


class Versions:
    """A folder of kept versions.

    :param folder: made when there is something to keep.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def all(self, current: Path) -> list[Version]:
        """The versions, the newest first, without what is the *current* file already.

        :raises ConfigError: if they can't be read.
        """
        found = []
        try:
            for file in self.files():
                try:
                    status = file.stat()
                except FileNotFoundError:
                    continue  # a writer has just forgotten it
                if not _is_copy(file, current):
                    version = Version(int(file.name), file, status.st_mtime, status.st_size)
                    found.append(version)
        except OSError as error:
            raise cannot_read(self.folder, error) from error
        return sorted(found, key=lambda version: -version.serial_no)

    def files(self) -> list[Path]:
        """Their files, in no order.

        :raises ConfigError: if the folder can't be read.
        """
        try:
            return [file for file in self.folder.iterdir() if file.name.isdecimal()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise cannot_read(self.folder, error) from error

    def read(self, serial_no: int) -> bytes | None:
        """The bytes of a version; None if it is not kept.

        :raises ConfigError: if it can't be read.
        """
        file = self.file(serial_no)
        try:
            return file.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise cannot_read(file, error) from error

    def file(self, serial_no: int) -> Path:
        """Where a version is, if it is kept."""
        return self.folder / str(serial_no)

    def standing(self, current: Path, serial_no: int) -> VersionState:
        """Where the *current* file stands, which has that serial number.

        :raises ConfigError: if that can't be found out.
        """
        overtaken_by, floor = None, serial_no
        for file in self.files():
            kept = int(file.name)
            if kept < serial_no:
                continue
            try:
                if _is_same_file(file, current):
                    continue  # a writer was killed before the next one was there
                # The newest is kept when the next is written, so there was one more.
                floor = max(floor, kept + 1)
                # Else that writer was on a file system that has no second names.
                if not _is_copy(file, current):
                    overtaken_by = max(overtaken_by or 0, kept)
            except OSError as error:
                raise cannot_read(file, error) from error
        return VersionState(overtaken_by, floor)

    def highest_serial(self, corrupt: Path | None = None) -> int:
        """The highest serial number that there may have been, where no file says it: one above the
        kept versions', as the newest is kept when the next is written, and what can be made out in
        a *corrupt* file."""
        highest = max((int(file.name) for file in self.files()), default=0)
        if highest or corrupt:
            highest += 1
        if corrupt:
            seen = re.findall(rb'"serial_no"\s*:\s*(\d{1,15})\b', corrupt.read_bytes())
            # What is far above is damage, too.
            near = [int(digits) for digits in seen if int(digits) < highest + 1_000_000]
            highest = max([highest, *near])
        return highest

    def keep(self, current: Path, serial_no: int, group: int | None) -> Path | None:
        """Keep what the *current* file is now; the path if that made one.

        :param group: id of the group that may read it.
        :raises OSError: if that fails, also if another version has that serial number; then nothing
            was made.
        """
        if not self.folder.is_dir():
            self.folder.mkdir(mode=0o750, exist_ok=True)
            if group is not None:
                os.chown(self.folder, -1, group)
        file = self.file(serial_no)
        if file.exists():
            if _is_copy(file, current):  # left by a writer that was killed right here
                return None
            raise FileExistsError(errno.EEXIST, "another version has its serial number", str(file))
        try:
            second_name(current, file, group, prefix=_PREFIX)
            sync_folder(self.folder)
        except BaseException:
            file.unlink(missing_ok=True)
            raise
        return file

    def forget_oldest(self) -> None:
        """Remove all but the newest, and what writers that were killed left.

        :raises OSError: if that fails.
        """
        files = sorted(self.files(), key=lambda file: int(file.name))
        for file in [*files[:-KEPT_VERSIONS], *self.folder.glob(f"{_PREFIX}*")]:
            file.unlink(missing_ok=True)


def second_name(source: Path, target: Path, group: int | None, *, prefix: str) -> None:
    """A second name for a file that is never written in place, or a copy where the file system has
    no such thing.

    :param prefix: what the name of an unfinished copy begins with.
    :raises OSError: if that fails, also if there is a *target*.
    """
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV):
            raise
        if target.exists():
            raise FileExistsError(errno.EEXIST, "exists", str(target)) from None
        status = source.stat()
        write_whole(target, source.read_bytes(), mode=MODE, group=group, prefix=prefix)
        os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def _is_same_file(file: Path, other: Path) -> bool:
    try:
        return file.samefile(other)
    except FileNotFoundError:
        return False


def _is_copy(file: Path, other: Path) -> bool:
    """Whether both are one file, or have the same content."""
    if _is_same_file(file, other):
        return True
    try:
        return file.stat().st_size == other.stat().st_size and (
            file.read_bytes() == other.read_bytes()
        )
    except FileNotFoundError:
        return False


def cannot_read(file: Path, error: OSError) -> ConfigError:
    """The error to raise for a file or folder that the system does not let us read."""
    if isinstance(error, PermissionError):
        hint = f"be root, or a member of the group {GROUP}"
        return ConfigError(f"{file}: can't be read by this user", hint=hint)
    return ConfigError(f"{file}: can't be read: {error.strerror}")
