"""Objects out of people's JSON: every key known, every value of its type, every mistake named.

Unlike the objects of a cluster's configuration these keep nothing that they don't know: a key that
is misspelt would be a wish that nobody grants.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from brine.common.errors import BrineError, nearest, printable

T = TypeVar("T")

_NOUNS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    str: "a string",
    tuple[str, ...]: "a list of strings",
}
_MOST_SHOWN = 60
_DEEPEST = 30
_OTHER_WORDS = {
    "bridge": "link",
    "network": "link",
    "memory": "memory_mib",
    "mem": "memory_mib",
    "ram": "memory_mib",
    "cpus": "vcpus",
    "interfaces": "nics",
    "networks": "nics",
    "drives": "disks",
    "file": "path",
    "device": "path",
    "driver": "format",
    "bus": "interface",
    "mac_address": "mac",
    "ip": "ips",
    "address": "ips",
    "addresses": "ips",
    "cdrom": "cdroms",
    "iso": "cdroms",
}
"""What others call a key."""


class SpecError(BrineError):
    """A spec that can't be used.

    :param where: JSON pointer of what is wrong; empty for the whole.
    """

    def __init__(self, message: str, *, where: str = "", hint: str | None = None) -> None:
        super().__init__(f"{where}: {message}" if where else message, hint=hint)
        self.where = where


def key(
    default: Any = dataclasses.MISSING,
    *,
    choices: tuple[str, ...] = (),
    minimum: int | None = None,
    maximum: int | None = None,
    check: Callable[[str], str | None] | None = None,
    tidy: Callable[[str], str] | None = None,
) -> Any:
    """A key of an object, with what its value may be.

    :param default: none means that it must be there.
    :param minimum: of a number, and *maximum*, both inclusive.
    :param check: says what is wrong with a string, or None; of a list of strings with each of
        them. An empty one is not checked where that is the default.
    :param tidy: makes of a string, or of each, the usual one of those that mean the same.
    """
    limits = {"choices": choices, "minimum": minimum, "maximum": maximum, "check": check}
    limits["tidy"] = tidy
    limits["may_be_empty"] = default == ""
    if isinstance(default, list | tuple):
        return dataclasses.field(default=tuple(default), metadata=limits)
    return dataclasses.field(default=default, metadata=limits)


def parse(kind: type[T], data: Any, where: str = "") -> T:
    """Make an object of *kind*, a dataclass, of what JSON had.

    :param where: JSON pointer of *data*, for errors.
    :raises SpecError: what is wrong, where.
    """
    if where.count("/") > _DEEPEST:
        raise SpecError("has too many objects in each other", where=where[:_MOST_SHOWN])
    if type(data) is not dict:
        raise SpecError(f"must be an object, but is {_shown(data)}", where=where)
    known: object = kind  # mypy takes no class for hashable
    shape = _shape(known)
    values = {}
    for name, value in data.items():
        if name not in shape:
            odd = _member(where, name)
            raise SpecError("there is no such key", where=odd, hint=_key_hint(name, shape))
        field, wanted = shape[name]
        if type(value) is wanted and value == field.default:
            values[name] = value  # as good as left out; most of what we have written is that
            continue
        values[name] = _checked(wanted, value, f"{where}/{name}", field.metadata)
    for name, (field, _) in shape.items():
        if name not in values and field.default is dataclasses.MISSING:
            raise SpecError(f"has no {name}", where=where)
    return kind(**values)


def known_part(kind: type, data: Any) -> Any:
    """What of an object a *kind* has keys for: what a newer one says more is left out."""
    if not isinstance(data, dict):
        return data
    shape, found = _shape(kind), {}
    for name, value in data.items():
        if name in shape:
            inner = (*typing.get_args(shape[name][1]), None)[0]
            is_object = isinstance(inner, type) and dataclasses.is_dataclass(inner)
            if is_object and isinstance(value, list):
                value = [known_part(inner, one) for one in value]
            elif is_object:
                value = known_part(inner, value)
            found[name] = value
    return found


def with_unknown(kind: type, data: dict[str, Any], before: Any) -> dict[str, Any]:
    """An object with what *before* says and a *kind* has no keys for. In lists of objects those of
    one UUID are the same."""
    if not isinstance(before, dict):
        return data
    shape = _shape(kind)
    found = {**{name: value for name, value in before.items() if name not in shape}, **data}
    for name, (_, wanted) in shape.items():
        inner = (*typing.get_args(wanted), None)[0]
        is_object = dataclasses.is_dataclass(inner) and isinstance(inner, type)
        if is_object and _is_optional(wanted):
            if data[name] is not None:
                found[name] = with_unknown(inner, data[name], before.get(name))
        elif is_object:
            rows = before.get(name)
            old = {
                row.get("uuid"): row
                for row in (rows if isinstance(rows, list) else ())
                if isinstance(row, dict)
            }
            found[name] = [with_unknown(inner, one, old.get(one["uuid"])) for one in data[name]]
    return found


def to_json(value: Any) -> dict[str, Any]:
    """The inverse of :func:`parse`, with all defaults filled in."""
    return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return to_json(value) if dataclasses.is_dataclass(value) else value


def _is_optional(wanted: Any) -> bool:
    """Whether it is an object that may be null."""
    return typing.get_origin(wanted) in (typing.Union, types.UnionType)


@functools.cache
def _shape(kind: type) -> dict[str, tuple[dataclasses.Field[Any], Any]]:
    assert dataclasses.is_dataclass(kind)
    types = typing.get_type_hints(kind)
    return {field.name: (field, types[field.name]) for field in dataclasses.fields(kind)}


def _checked(wanted: Any, value: Any, where: str, limits: Mapping[str, Any]) -> Any:
    if _is_optional(wanted):
        return None if value is None else parse(typing.get_args(wanted)[0], value, where)
    if typing.get_origin(wanted) is tuple:
        item: type[Any] = typing.get_args(wanted)[0]
        if type(value) is not list:
            noun = _NOUNS.get(wanted, "a list of objects")
            raise SpecError(f"must be {noun}, but is {_shown(value)}", where=where)
        return tuple(
            parse(item, each, f"{where}/{index}")
            if dataclasses.is_dataclass(item)
            else _checked(item, each, f"{where}/{index}", limits)
            for index, each in enumerate(value)
        )
    if type(value) is not wanted:
        hint = _type_hint(wanted, value)
        raise SpecError(f"must be {_NOUNS[wanted]}, but is {_shown(value)}", where=where, hint=hint)
    if fault := _fault(value, limits):
        raise SpecError(fault, where=where, hint=_hint(value, limits))
    tidy = limits.get("tidy")
    return tidy(value) if tidy else value


def _fault(value: Any, limits: Mapping[str, Any]) -> str | None:
    minimum, maximum = limits.get("minimum"), limits.get("maximum")
    if minimum is not None and value < minimum:
        return f"must be at least {minimum}, but is {value}"
    if maximum is not None and value > maximum:
        return f"must be at most {maximum}, but is {value}"
    if limits.get("choices") and value not in limits["choices"]:
        return f"must be one of {', '.join(limits['choices'])}, but is {_shown(value)}"
    if isinstance(value, str) and not value.isprintable():
        return f"has characters that can't be printed: {_shown(value)}"
    check = limits.get("check")
    return check(value) if check and (value or not limits["may_be_empty"]) else None


def _hint(value: Any, limits: Mapping[str, Any]) -> str | None:
    choices = limits.get("choices")
    return nearest(value, choices) if choices and isinstance(value, str) else None


def _key_hint(name: str, known: Mapping[str, Any]) -> str:
    usual = _OTHER_WORDS.get(name.lower(), "")
    return f"did you mean {usual}?" if usual in known else nearest(name, known)


def _type_hint(wanted: Any, value: Any) -> str | None:
    """What somebody may have meant by a value of another type."""
    if wanted is str and type(value) in (int, float):
        return f'put it in quotes: "{value}"'
    if wanted is int and isinstance(value, str) and value.strip().isdecimal():
        return f"leave out the quotes: {value.strip()}"
    if wanted is bool and str(value).lower() in ("0", "1", "yes", "no", "on", "off"):
        return "true" if str(value).lower() in ("1", "yes", "on") else "false"
    return None


def _member(where: str, name: str) -> str:
    """The JSON pointer of a key that is not known, and may be anything."""
    return f"{where}/{printable(name.replace('~', '~0').replace('/', '~1'))}"


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = "null" if value is None else repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."
