"""How a configuration's file is replaced: whole, with what was there kept."""

from __future__ import annotations

import grp
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from brine.common.config.aside import Aside, keep_aside
from brine.common.config.configuration import Configuration
from brine.common.config.shape import ConfigError
from brine.common.config.stamps import lifted, stamped
from brine.common.config.versions import GROUP, MODE, Standing, Versions, cannot_read
from brine.common.wholefile import write_whole

Identity = tuple[int, int, int, int]
"""What changes when a file does; zeros if there is none."""


@dataclass(frozen=True, slots=True)
class Found:
    """What is there before a change.

    :param current: what the change is to succeed; None if there is nothing.
    :param standing: where the file stands among the kept versions.
    """

    identity: Identity
    current: Configuration | None
    standing: Standing


@dataclass(frozen=True, slots=True)
class Replaced:
    """What a change did, or would do.

    :param old: what was there; None if nothing was, or nothing usable.
    :param aside: where a damaged file, or an older one, is kept now.
    :param overtaken_by: the newest kept version, if what was there was older.
    """

    path: Path
    old: Configuration | None
    new: Configuration
    aside: Path | None
    overtaken_by: int | None


class Writer:
    """The one writer: what is there now, and how it is replaced.

    :param path: the file.
    :param clock: seconds since 1970.
    :param corrupt: the file is damaged, and kept aside.
    :param dry_run: nothing is written.
    """

    aside: Path | None = None
    """Where a file that is no version is kept now."""

    def __init__(
        self,
        path: Path,
        versions: Versions,
        clock: Callable[[], float],
        found: Found,
        *,
        corrupt: bool = False,
        dry_run: bool = False,
    ) -> None:
        self.current = found.current
        self.standing = found.standing
        self._path = path
        self._versions = versions
        self._clock = clock
        self._before = found.identity
        self._corrupt = corrupt
        self._dry_run = dry_run
        self._prefix = f".{path.name}.new-"

    def write(self, new: Configuration) -> Configuration:
        """Replace the current configuration, once.

        The serial number is one above the current one's, as is the cluster's; an object's rises if
        the object changed, and its mtime is now. A first configuration keeps the serials that it
        brings. If nothing changed, nothing is written.

        Both serials are above all that were, also where somebody removed the file or put an older
        one in its place. Such a one is kept aside as ``config.data.older-TIME``, and replaced even
        if nothing but its serials changes.

        :return: what is there now.
        :raises ConfigError: if it can't be written, which leaves all as it was, or is not safe on
            the disk.
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
        self.standing = Standing(None, written.serial_no)
        return written

    def _put(self, new: Configuration, *, leaps: bool) -> None:
        """Write *new*.

        :param leaps: its serial is not the next one after those of the kept versions.
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
                # Once the new file is there, this is the only trace of the old one.
                if kept and identity(self._path) == self._before:
                    kept.unlink(missing_ok=True)
                raise
            if leaps:
                # From the one before, nobody could tell this one's serial if it were lost.
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
        """Keep what is there; the path if that made one."""
        why = Aside.CORRUPT if self._corrupt else None
        if self.standing.overtaken_by is not None:
            why = Aside.OLDER
        if why:
            self.aside = keep_aside(
                self._path, why, now=self._clock(), group=group, prefix=self._prefix
            )
            return self.aside
        if self.current:
            return self._versions.keep(self._path, self.current.serial_no, group)
        return None

    def _clean_up(self) -> None:
        """Remove what writers that were killed left; we are the only one."""
        for file in self._path.parent.glob(f"{self._prefix}*"):
            file.unlink(missing_ok=True)


def identity(file: Path) -> Identity:
    """What identifies the content of a file.

    :raises ConfigError: if that can't be found out.
    """
    try:
        status = file.stat()
    except FileNotFoundError:
        return (0, 0, 0, 0)
    except OSError as error:
        raise cannot_read(file, error) from error
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _group() -> int | None:
    """The group that a file of ours belongs to; None leaves it to the system."""
    if os.geteuid() != 0:
        return None
    try:
        return grp.getgrnam(GROUP).gr_gid
    except KeyError:
        return None
