"""The differences between two configurations, by names and not by UUIDs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from brine.common.errors import printable
from brine.common.schema import member
from brine.config.model import KINDS, Configuration, Stamped
from brine.config.schema import PRIVATE_KEYS, SECRET_PLACE, same, shallow

_COUNTERS = frozenset({"serial_no", "ctime", "mtime"})
_HIDDEN = "(private)"
_LONGEST = 200
_SIGNS = {"added": "+", "removed": "-", "changed": "~"}


@dataclass(frozen=True, slots=True)
class Change:
    """One difference, with the keys that ``--json`` prints; secrets are hidden."""

    change: str  # "added", "removed" or "changed"
    pointer: str  # with names in place of UUIDs
    old: Any = None
    new: Any = None
    note: str = ""  # on the place, such as the instance of a disk

    def __str__(self) -> str:
        values: list[Any] = [self.old, self.new]
        if self.change != "changed":
            values = [value for value in values if value is not None]
        note = f" ({self.note})" if self.note else ""
        what = f": {' -> '.join(map(_text, values))}" if values else ""
        return printable(f"{_SIGNS[self.change]} {self.pointer}{note}{what}")


def _text(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


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
        self._names: dict[Any, str] = {}
        self._notes: dict[str, str] = {}
        for side in filter(None, (old, new)):
            for section in ("nodes", "nodegroups", "networks"):
                self._names |= {item.uuid: item.name for item in getattr(side, section).values()}
            for instance in side.instances.values():
                for index, disk in enumerate(instance.disks):
                    self._notes[disk] = f"disk {index} of {instance.name}"

    def all(self) -> Iterator[Change]:
        old, new = self._old, self._new
        if old is None:
            yield Change("added", "/cluster", note=new.cluster.name)
        elif not same(old.cluster, new.cluster):
            yield from self._inside("/cluster", old.cluster.to_json(), new.cluster.to_json())
        for section in KINDS:
            olds: dict[str, Stamped] = getattr(old, section) if old else {}
            news: dict[str, Stamped] = getattr(new, section)
            for key in olds | news:
                before, after = olds.get(key), news.get(key)
                if same(before, after):
                    continue
                name = getattr(after or before, "name", None) if section != "disks" else None
                where, note = member(f"/{section}", name or key), self._notes.get(key, "")
                if before and after:
                    yield from self._inside(where, before.to_json(), after.to_json(), note)
                else:
                    yield Change("removed" if before else "added", where, note=note)
        if old is not None:
            yield from self._inside(
                "", {"version": old.version, **old.extra}, {"version": new.version, **new.extra}
            )

    def _inside(
        self, where: str, old: Mapping[Any, Any], new: Mapping[Any, Any], note: str = ""
    ) -> Iterator[Change]:
        """The changes of an object, or of a list whose items are by number."""
        for key in {**old, **new}:
            if key in _COUNTERS:
                continue
            place = member(where, self._names.get(key, key))  # a group's networks are by UUID
            before, after = old.get(key), new.get(key)
            if key not in old:
                yield Change("added", place, None, self._shown(key, after), note)
            elif key not in new:
                yield Change("removed", place, self._shown(key, before), None, note)
            elif same(before, after):
                continue
            elif type(before) is type(after) is dict and key not in PRIVATE_KEYS:
                yield from self._inside(place, before, after, note)
            elif type(before) is type(after) is list and key in ("nics", "children"):
                items = (dict(enumerate(before)), dict(enumerate(after)))
                yield from self._inside(place, *items, note)
            else:
                shown = (self._shown(key, before), self._shown(key, after))
                yield Change("changed", place, *shown, note)

    def _shown(self, key: Any, value: Any) -> Any:
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
