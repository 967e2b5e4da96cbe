"""The differences between two configurations, by names and not by UUIDs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from brine.common.schema import member
from brine.config.model import KINDS, Configuration, Stamped
from brine.config.schema import PRIVATE_KEYS, SECRET_PLACE, same, shallow

_COUNTERS = frozenset({"serial_no", "ctime", "mtime"})
_HIDDEN = "(private)"
_LONGEST = 200


class ChangeKind(Enum):
    """The kind of a change."""

    ADDED = "+"
    REMOVED = "-"
    CHANGED = "~"


@dataclass(frozen=True, slots=True)
class Change:
    """One difference.

    :param where: JSON pointer with names in place of UUIDs.
    :param old: None if it did not exist; secrets are hidden.
    :param note: a remark on the place, such as the instance of a disk.
    """

    kind: ChangeKind
    where: str
    old: Any = None
    new: Any = None
    note: str = ""

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        match self.kind:
            case ChangeKind.ADDED:
                what = "" if self.new is None else f": {_text(self.new)}"
            case ChangeKind.REMOVED:
                what = "" if self.old is None else f": {_text(self.old)}"
            case ChangeKind.CHANGED:
                what = f": {_text(self.old)} -> {_text(self.new)}"
        return f"{self.kind.value} {self.where}{note}{what}"

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "change": self.kind.name.lower(),
            "pointer": self.where,
            "old": self.old,
            "new": self.new,
            "note": self.note,
        }


@shallow()
def changes(old: Configuration | None, new: Configuration) -> list[Change]:
    """The changes from *old* to *new*, without serial numbers and times.

    An added or removed object is one change; a changed object has a change for each value.
    """
    return list(_Comparison(old, new).all())


class _Comparison:
    def __init__(self, old: Configuration | None, new: Configuration) -> None:
        self._old = old
        self._new = new
        self._names: dict[str, str] = {}
        self._notes: dict[str, str] = {}
        for side in (old, new):
            if side is None:
                continue
            for section in ("nodes", "nodegroups", "networks"):
                for item in getattr(side, section).values():
                    self._names[item.uuid] = item.name
            for instance in side.instances.values():
                for index, disk in enumerate(instance.disks):
                    self._notes[disk] = f"disk {index} of {instance.name}"

    def all(self) -> Iterator[Change]:
        old, new = self._old, self._new
        if old is None:
            yield Change(ChangeKind.ADDED, "/cluster", note=new.cluster.name)
        elif not same(old.cluster, new.cluster):
            yield from self._inside("/cluster", old.cluster.to_json(), new.cluster.to_json())
        for section in KINDS:
            olds: dict[str, Stamped] = getattr(old, section) if old else {}
            news: dict[str, Stamped] = getattr(new, section)
            for key in [*olds, *(key for key in news if key not in olds)]:
                yield from self._object(section, key, olds.get(key), news.get(key))
        if old is not None:
            before, after = ({"version": each.version, **each.extra} for each in (old, new))
            yield from self._inside("", before, after)

    def _object(
        self, section: str, key: str, old: Stamped | None, new: Stamped | None
    ) -> Iterator[Change]:
        if same(old, new):
            return
        one = new or old
        name = getattr(one, "name", None) if section != "disks" else None
        where = member(f"/{section}", name or key)
        note = self._notes.get(key, "")
        if old is None:
            yield Change(ChangeKind.ADDED, where, note=note)
        elif new is None:
            yield Change(ChangeKind.REMOVED, where, note=note)
        else:
            yield from self._inside(where, old.to_json(), new.to_json(), note)

    def _inside(
        self, where: str, old: Mapping[str, Any], new: Mapping[str, Any], note: str = ""
    ) -> Iterator[Change]:
        for key in [*old, *(key for key in new if key not in old)]:
            if key in _COUNTERS:
                continue
            place = member(where, self._names.get(key, key))  # a group's networks are by UUID
            if key not in old:
                yield Change(ChangeKind.ADDED, place, None, self._shown(key, new[key]), note)
            elif key not in new:
                yield Change(ChangeKind.REMOVED, place, self._shown(key, old[key]), None, note)
            elif not same(old[key], new[key]):
                yield from self._value(place, key, old[key], new[key], note)

    def _value(self, where: str, key: str, old: Any, new: Any, note: str) -> Iterator[Change]:
        if type(old) is type(new) is dict and key not in PRIVATE_KEYS:
            yield from self._inside(where, old, new, note)
        elif type(old) is type(new) is list and key in ("nics", "children"):
            for index in range(max(len(old), len(new))):
                place = f"{where}/{index}"
                if index >= len(old):
                    yield Change(ChangeKind.ADDED, place, None, self._shown(key, new[index]), note)
                elif index >= len(new):
                    gone = self._shown(key, old[index])
                    yield Change(ChangeKind.REMOVED, place, gone, None, note)
                elif not same(old[index], new[index]):
                    yield from self._inside(place, old[index], new[index], note)
        else:
            before, after = (self._shown(key, value) for value in (old, new))
            yield Change(ChangeKind.CHANGED, where, before, after, note)

    def _shown(self, key: str, value: Any) -> Any:
        """A value with names for UUIDs, and without secrets."""
        if key in PRIVATE_KEYS:
            return _HIDDEN
        if isinstance(value, str):
            return value if key == "uuid" else self._names.get(value, value)
        if isinstance(value, list):
            shown = [self._shown("", item) for item in value]
            if key == "logical_id" and len(shown) > SECRET_PLACE:
                shown[SECRET_PLACE] = _HIDDEN
            return shown
        if isinstance(value, dict):
            return {inner: self._shown(inner, item) for inner, item in value.items()}
        return value


def _text(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
