"""Specs from JSON and back, with the place of each mistake.

Unlike the objects of a cluster's configuration these keep nothing that they don't know: a key that
is misspelt would be a wish that nobody grants.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from brine.common import schema
from brine.common.schema import SchemaError, shape_of, shown

T = TypeVar("T")


class SpecError(SchemaError):
    """A spec that can't be used."""


def key(
    default: Any = dataclasses.MISSING,
    *,
    check: Callable[[str], str | None] | None = None,
    **limits: Any,
) -> Any:
    """A key of an object, with what its value may be, as :func:`brine.common.schema.key` has it.

    :param default: none means that it must be there.
    :param check: says what is wrong with a string, or None; of a list of strings with each of
        them. An empty one is not checked where that is the default.
    """

    def fault(text: str) -> str | None:
        if not text.isprintable():
            return f"has characters that can't be printed: {shown(text)}"
        return check(text) if check and (text or default != "") else None

    return schema.key(default, check=fault, **limits)


def parse(kind: type[T], data: Any, where: str = "") -> T:
    """Make an object of *kind*, a dataclass, of what JSON had.

    :param where: JSON pointer of *data*, for errors.
    :raises SpecError: what is wrong, where.
    """
    try:
        return schema.parse(kind, data, where)
    except SchemaError as error:
        raise SpecError(error.text, where=error.where, hint=error.hint) from None


def known_part(kind: type, data: Any) -> Any:
    """What of an object a *kind* has keys for: what a newer one says more is left out."""
    if not isinstance(data, dict):
        return data
    found = {}
    hints = typing.get_type_hints(kind)
    for name in data.keys() & shape_of(kind).by_key.keys():
        value, inner = data[name], _object_in(hints[name])
        if inner and isinstance(value, list):
            value = [known_part(inner, one) for one in value]
        elif inner:
            value = known_part(inner, value)
        found[name] = value
    return found


def with_unknown(kind: type, data: dict[str, Any], before: Any) -> dict[str, Any]:
    """An object with what *before* says and a *kind* has no keys for. In lists of objects those of
    one UUID are the same."""
    if not isinstance(before, dict):
        return data
    hints = typing.get_type_hints(kind)
    known = shape_of(kind).by_key
    found = {**{name: value for name, value in before.items() if name not in known}, **data}
    for name in known:
        inner, value, old = _object_in(hints[name]), data[name], before.get(name)
        if inner and isinstance(value, list):
            rows = old if isinstance(old, list) else []
            by_uuid = {row.get("uuid"): row for row in rows if isinstance(row, dict)}
            found[name] = [with_unknown(inner, one, by_uuid.get(one["uuid"])) for one in value]
        elif inner and value is not None:
            found[name] = with_unknown(inner, value, old)
    return found


def _object_in(hint: Any) -> type | None:
    """The class of the objects of an annotation; None if it has none."""
    inner = (*typing.get_args(hint), None)[0]
    return inner if isinstance(inner, type) and dataclasses.is_dataclass(inner) else None


def to_json(value: Any) -> dict[str, Any]:
    """The inverse of :func:`parse`, with all defaults filled in."""
    return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return to_json(value) if dataclasses.is_dataclass(value) else value
