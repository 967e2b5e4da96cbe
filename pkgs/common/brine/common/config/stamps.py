"""Serial numbers and times: what rises when a configuration is changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from brine.common.config.configuration import KINDS, Configuration
from brine.common.config.objects import Stamped
from brine.common.config.shape import same

S = TypeVar("S", bound=Stamped)


def stamped(new: Configuration, old: Configuration | None, now: float) -> Configuration:
    """*new* with the serial numbers and times that it has as the successor of *old*.

    Without a predecessor it keeps those that it has. If nothing changed, it is *old*.

    :param now: seconds since 1970.
    """
    if old is None:
        return _first(new, now)
    sections = _sections(new, old, now)
    is_same = (
        new.version == old.version
        and same(new.extra, old.extra)
        and same(_like(new.cluster, old.cluster), old.cluster)
        and all(_is_like(sections[section], getattr(old, section)) for section in KINDS)
    )
    if is_same:
        return old
    cluster = replace(
        new.cluster,
        serial_no=old.cluster.serial_no + 1,
        ctime=old.cluster.ctime,
        mtime=now,
    )
    return replace(
        new,
        serial_no=old.serial_no + 1,
        ctime=old.ctime,
        mtime=now,
        cluster=cluster,
        **sections,
    )


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


def _first(new: Configuration, now: float) -> Configuration:
    sections: dict[str, Any] = {
        section: {key: _born(item, now) for key, item in getattr(new, section).items()}
        for section in KINDS
    }
    return replace(
        new,
        serial_no=max(new.serial_no, 1),
        ctime=new.ctime or now,
        mtime=new.mtime or now,
        cluster=_born(new.cluster, now),
        **sections,
    )


def _sections(new: Configuration, old: Configuration, now: float) -> dict[str, Any]:
    sections: dict[str, Any] = {}
    for section in KINDS:
        before: dict[str, Stamped] = getattr(old, section)
        sections[section] = {
            key: _changed(item, before[key], now) if key in before else _born(item, now)
            for key, item in getattr(new, section).items()
        }
    return sections


def _is_like(new: dict[str, Stamped], old: dict[str, Stamped]) -> bool:
    """Whether a section is what it was; what did not change is the very same object by now."""
    return len(new) == len(old) and all(item is old.get(key) for key, item in new.items())


def _like(new: S, old: S) -> S:
    """*new* with the numbers and times of *old*."""
    return replace(new, serial_no=old.serial_no, ctime=old.ctime, mtime=old.mtime)


def _changed(new: S, old: S, now: float) -> S:
    if new is old or same(_like(new, old), old):
        return old
    return replace(new, serial_no=old.serial_no + 1, ctime=old.ctime, mtime=now)


def _born(new: S, now: float) -> S:
    if new.serial_no > 0 and new.ctime and new.mtime:
        return new
    serial_no = max(new.serial_no, 1)
    return replace(new, serial_no=serial_no, ctime=new.ctime or now, mtime=new.mtime or now)
