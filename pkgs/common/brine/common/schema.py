"""Checked data: dataclasses out of JSON or TOML, every value of its type, every fault in its place.

A class of such data is a frozen dataclass, whose annotations say what a value may be: ``bool``,
``int``, ``float``, ``str``, :class:`~pathlib.Path`, another such class, or lists, tuples and
dictionaries of these or of ``Any``, each perhaps ``| None``. :func:`key` says the rest.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from brine.common.errors import BrineError, closest, nearest, printable

T = TypeVar("T")
Convert = Callable[[Any, str], Any]
"""Checks the parts of the value at a place, and makes objects of them."""

NOUNS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    dict: "an object",
    list: "a list",
    types.NoneType: "null",
    Path: "an absolute path",
}
_MOST_SHOWN = 60
_MOST_SOUND = 100
_DEEPEST = 20


class SchemaError(BrineError):
    """Data that is not what its schema says: *text*, and *where*, a JSON pointer (RFC 6901); that
    is empty where it is the whole."""

    def __init__(self, message: str, *, where: str = "", hint: str | None = None) -> None:
        where = printable(where)  # its keys are the data's own, and may have line ends
        super().__init__(f"{where}: {message}" if where else message, hint=hint)
        self.text = message
        self.where = where


def member(where: str, key: str | int) -> str:
    """The JSON pointer of a member of the value at *where*."""
    if isinstance(key, str) and ("~" in key or "/" in key):
        key = key.replace("~", "~0").replace("/", "~1")
    return f"{where}/{key}"


def shown(value: Any, *, secret: bool = False) -> str:
    """A value as an error message shows it: short, and never a secret."""
    numbers = isinstance(value, list) and value and all(type(item) is int for item in value)
    is_plain = isinstance(value, str | int | float | types.NoneType)
    if secret or not (is_plain or numbers):  # which may have one inside
        return NOUNS.get(type(value), f"a {type(value).__name__}")
    is_json = value is None or isinstance(value, bool)
    text = json.dumps(value) if is_json else repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def unknown_key(name: str, known: Mapping[str, Any]) -> str:
    """The fault of an unknown key, with the known key that is nearest to it."""
    hint = closest(name, known)
    return f"is not known; {hint}" if hint else "is not known"


def key(
    default: Any = dataclasses.MISSING,
    *,
    name: str | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] = (),
    check: Callable[[str], str | None] | None = None,
    tidy: Callable[[str], str] | None = None,
    meant: Mapping[str, str] = types.MappingProxyType({}),
    secret: bool = False,
) -> Any:
    """A key, with what its value may be.

    :param default: none means that it must be there.
    :param name: of the key, where the field has another.
    :param minimum: of a number, and *maximum*, both inclusive.
    :param choices: of a string, or of each in a list.
    :param check: says what is wrong with a string, or None; so it does of each in a list.
    :param tidy: makes of a string, or of each, the usual one of those that mean the same.
    :param meant: the strings that people mean by other words, in lower case.
    :param secret: no message shows the value.
    """
    limits: dict[str, Any] = {"minimum": minimum, "maximum": maximum, "choices": choices}
    limits |= {"check": check, "tidy": tidy, "meant": meant}
    metadata = {"key": name, "secret": secret, "limits": limits}
    return dataclasses.field(default=default, metadata=metadata)


class KeySchema(NamedTuple):
    """A key of a kind of data: the field *name*, its *key* in the data, the types of its values in
    *kinds* and in words, what converts them, and what an absent key means."""

    name: str
    key: str
    kinds: frozenset[type]
    noun: str
    convert: Convert | None
    is_required: bool
    default: Any
    secret: bool
    limits: Mapping[str, Any]
    usual: Any
    """The default as it stands in the data."""
    sound: dict[str, Any]
    """What strings become that were checked before: hundreds of specs have the same ones."""

    def wrong_type(self, value: Any, where: str) -> SchemaError:
        """The error to raise for a value of another type."""
        return _wrong_type(self.noun, value, where, self.secret, self.kinds)

    def check(self, value: Any, where: str) -> Any:
        """The value, converted."""
        if type(value) not in self.kinds:
            raise self.wrong_type(value, where)
        if type(value) is str:  # most are
            if (known := self.sound.get(value)) is None:
                known = self._text(self.convert(value, where) if self.convert else value, where)
                if len(self.sound) < _MOST_SOUND:
                    self.sound[value] = known
            return known
        if self.convert:
            value = self.convert(value, where)
        if float in self.kinds and value is not None:
            value = self._number(value, where)
        minimum, maximum = self.limits.get("minimum"), self.limits.get("maximum")
        if minimum is not None and value < minimum:
            raise SchemaError(f"must be at least {minimum}, but is {value!r}", where=where)
        if maximum is not None and value > maximum:
            raise SchemaError(f"must be at most {maximum}, but is {value!r}", where=where)
        check = self.limits.get("check_number")
        if check and (fault := check(value)):
            raise SchemaError(fault, where=where)
        if isinstance(value, tuple) and value and isinstance(value[0], str):
            return tuple(self._text(one, f"{where}/{index}") for index, one in enumerate(value))
        return value

    def _text(self, value: Any, where: str) -> Any:
        if not isinstance(value, str):
            return value
        choices, check = self.limits.get("choices"), self.limits.get("check")
        if choices and value not in choices:
            text = f"must be one of {', '.join(choices)}, but is {shown(value)}"
            raise SchemaError(text, where=where, hint=self._hint(value) or nearest(value, choices))
        if check and (fault := check(value)):
            raise SchemaError(fault, where=where, hint=self._hint(value))
        tidy = self.limits.get("tidy")
        return tidy(value) if tidy else value

    def _hint(self, value: str) -> str | None:
        meant = self.limits.get("meant", {}).get(value.lower())
        return f'did you mean "{meant}"?' if meant else None

    def _number(self, value: float, where: str) -> float:
        try:
            number = float(value)
        except OverflowError:
            raise SchemaError("is too large a number", where=where) from None
        if not math.isfinite(number):
            raise self.wrong_type(value, where)
        return number


class Shape(NamedTuple):
    """The keys of a class of data, from its annotations."""

    by_key: dict[str, KeySchema]
    required: tuple[KeySchema, ...]


_SHAPES: dict[type, Shape] = {}


def shape_of(kind: type) -> Shape:
    """The keys that an object of the dataclass *kind* has."""
    if shape := _SHAPES.get(kind):
        return shape
    assert dataclasses.is_dataclass(kind)
    hints = typing.get_type_hints(kind)
    keys = []
    for item in dataclasses.fields(kind):
        if item.metadata.get("apart"):
            continue
        default = item.default
        if item.default_factory is not dataclasses.MISSING:
            default = item.default_factory()
        keys.append(key_schema(item.name, hints[item.name], default, item.metadata))
    required = tuple(one for one in keys if one.is_required)
    return _SHAPES.setdefault(kind, Shape({one.key: one for one in keys}, required))


def key_schema(
    name: str, hint: Any, default: Any, metadata: Mapping[str, Any] = types.MappingProxyType({})
) -> KeySchema:
    """The schema of a key, by an annotation and by what :func:`key` has for a field. The default is
    :data:`dataclasses.MISSING` where the key must be there."""
    secret = metadata.get("secret", False)
    kinds, noun, convert = _kinds(hint, secret)
    return KeySchema(
        name,
        metadata.get("key") or name,
        kinds,
        metadata.get("noun") or noun,
        convert,
        default is dataclasses.MISSING,
        default,
        secret,
        metadata.get("limits", {}),
        list(default) if isinstance(default, tuple) else default,
        {},
    )


def parse(kind: type[T], data: Any, where: str = "", *, noun: str = "key") -> T:
    """Make an object of *kind*, a dataclass, of *data*, whose keys must all be known.

    A class may have ``OTHER_WORDS``: what others call its keys.

    :param where: JSON pointer of *data*, for errors.
    :param noun: what people call a key of it.
    :raises SchemaError: what is wrong, where.
    """
    if type(data) is not dict:
        raise _wrong_type(NOUNS[dict], data, where, secret=False)
    shape = shape_of(kind)
    by_key, values = shape.by_key, {}
    for name, value in data.items():
        what = by_key.get(name)
        if what is None:
            text, hint = f"there is no such {noun}", key_hint(kind, name)
            raise SchemaError(text, where=member(where, name), hint=hint)
        usual = what.usual
        if value.__class__ is usual.__class__ and value == usual:
            continue  # as good as left out; most of what we have written is that
        values[what.name] = what.check(value, f"{where}/{name}")
    expect_required(shape, values, where)
    return kind(**values)


def key_hint(kind: type, name: str) -> str:
    """A hint for a key that a class of data lacks: what the class calls it, or what is nearest."""
    usual = getattr(kind, "OTHER_WORDS", {}).get(name.lower())
    return f"did you mean {usual}?" if usual else nearest(name, shape_of(kind).by_key)


def expect_required(shape: Shape, values: Mapping[str, Any], where: str) -> None:
    """:raises SchemaError: if a field without default is not among *values*."""
    for what in shape.required:
        if what.name not in values:
            raise SchemaError(f"has no {what.key}", where=where)


def _wrong_type(
    noun: str, value: Any, where: str, secret: bool, kinds: Collection[type] = ()
) -> SchemaError:
    text = f"must be {noun}, but is {shown(value, secret=secret)}"
    return SchemaError(text, where=where, hint=None if secret else _meant(value, kinds, where))


_MIB = {"M": 1, "G": 1024, "T": 1024**2}


def _meant(value: Any, kinds: Collection[type], where: str) -> str | None:
    """A hint for a value of the wrong type, if the author's meaning is plain."""
    if str in kinds and type(value) in (int, float):
        # The written text is not known: YAML reads 52:54:00:11:22:33 and 010 as other numbers.
        return "put it in quotes: without them it is a number"
    if str in kinds and not isinstance(value, str | dict | list | types.NoneType):
        return "put it in quotes"  # YAML makes true of on, and dates of what looks like one
    if int in kinds and isinstance(value, str) and value.strip().isdecimal():
        return f"leave out the quotes: {value.strip()}"
    size = re.fullmatch(r"([0-9]{1,9}) ?([MGT])(i?B)?", value) if isinstance(value, str) else None
    if size and int in kinds and where.endswith("_mib"):
        return f"the unit is MiB: write {int(size[1]) * _MIB[size[2]]}"
    if bool in kinds and str(value).lower() in ("0", "1", "yes", "no", "on", "off"):
        return "true" if str(value).lower() in ("1", "yes", "on") else "false"
    return None


def _kinds(hint: Any, secret: bool) -> tuple[frozenset[type], str, Convert | None]:
    """The types in the data, their noun, and the converter of an annotation."""
    if isinstance(hint, types.UnionType):
        (inner,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
        kinds, noun, convert = _kinds(inner, secret)
        return kinds | {types.NoneType}, f"{noun} or null", convert and _unless_null(convert)
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is dict:
        return frozenset({dict}), NOUNS[dict], _each(parts[1], dict, secret)
    if origin in (list, tuple):
        is_object = dataclasses.is_dataclass(parts[0])
        what = " of objects" if is_object else " of strings" if parts[0] is str else ""
        return frozenset({list}), f"{NOUNS[list]}{what}", _each(parts[0], origin, secret)
    if dataclasses.is_dataclass(hint):
        return frozenset({dict}), NOUNS[dict], _maker(hint)
    if hint is float:
        return frozenset({float, int}), NOUNS[float], None
    if hint is Path:
        return frozenset({str}), NOUNS[Path], _absolute
    if issubclass(hint, StrEnum):
        return frozenset({str}), NOUNS[str], _member_of(hint)
    return frozenset({hint}), NOUNS[hint], None


def _maker(kind: Any) -> Convert:
    """The function that makes objects of a class of data: its ``from_json``, or :func:`parse`."""
    make: Convert = getattr(kind, "from_json", functools.partial(parse, kind))

    def made(value: Any, where: str) -> Any:
        if where.count("/") > _DEEPEST:
            raise SchemaError("nested too deep", where=where)
        return make(value, where)

    return made


def _absolute(value: str, where: str) -> Path:
    path = Path(value)
    if not path.is_absolute() or "\0" in value:
        raise _wrong_type(NOUNS[Path], value, where, secret=False)
    return path


def _member_of(kind: type[StrEnum]) -> Convert:
    def member_of(value: str, where: str) -> StrEnum:
        try:
            return kind(value)
        except ValueError:
            text = f"must be one of {', '.join(kind)}, but is {shown(value)}"
            raise SchemaError(text, where=where) from None

    return member_of


def _unless_null(convert: Convert) -> Convert:
    return lambda value, where: None if value is None else convert(value, where)


def _each(hint: Any, container: type, secret: bool) -> Convert | None:
    """Checks the items of a list or tuple, or the values of a dictionary."""
    if hint is Any:
        return None
    kinds, noun, convert = _kinds(hint, secret)

    def checked(value: Any, where: str) -> Any:
        for name, item in value.items() if container is dict else enumerate(value):
            if type(item) not in kinds:
                raise _wrong_type(noun, item, member(where, name), secret, kinds)
        if convert and container is dict:
            return {name: convert(item, member(where, name)) for name, item in value.items()}
        if convert:
            value = [convert(item, f"{where}/{index}") for index, item in enumerate(value)]
        return tuple(value) if container is tuple else value

    return checked
