"""Typed objects out of JSON and back: what keys there are follows from a class's annotations."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import json
import math
import re
import types
import typing
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NoReturn, Self

from brine.common.errors import BrineError

_NAMESPACE = uuid.UUID("0b1f8a3e-3f0a-4bd5-a9d4-64a1f6e0c0de")
_NOUNS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    dict: "an object",
    list: "a list",
    types.NoneType: "null",
}
_PRIVATE = re.compile(r"/(?:osparams_private|osparams_private_cluster|logical_id)(?:/|$)")
PRIVATE_KEYS = ("osparams_private", "osparams_private_cluster")
"""Of an instance, and of the cluster: an operating system's private parameters."""
SECRET_PLACE = 5
"""Of a DRBD disk's logical_id: the secret that its two sides share."""
_DEEPEST_CHILD = 8


class ConfigError(BrineError):
    """A configuration that can't be used, or that has not what was asked of it.

    :param where: JSON pointer (RFC 6901) of what is wrong; empty where it is the whole.
    """

    def __init__(self, message: str, *, where: str = "", hint: str | None = None) -> None:
        super().__init__(f"{where}: {message}" if where else message, hint=hint)
        self.where = where


def member(where: str, key: str | int) -> str:
    """The JSON pointer of a member of what is at *where*."""
    if isinstance(key, str) and ("~" in key or "/" in key):
        key = key.replace("~", "~0").replace("/", "~1")
    return f"{where}/{key}"


def is_private(where: str) -> bool:
    """Whether what is at the JSON pointer *where* may be a secret: an operating system's private
    parameters, and a DRBD disk's identity, which has the secret that its two sides share."""
    return bool(_PRIVATE.search(where))


def without_secrets(value: Any) -> Any:
    """JSON of a configuration, or of a part of it, of the same shape: private parameters are none,
    and null stands for the secrets of DRBD disks."""
    if isinstance(value, list):
        return [without_secrets(item) for item in value]
    if not isinstance(value, dict):
        return value
    open_ones = {
        key: {} if key in PRIVATE_KEYS else without_secrets(inner) for key, inner in value.items()
    }
    identity = open_ones.get("logical_id")
    if isinstance(identity, list) and len(identity) > SECRET_PLACE:
        open_ones["logical_id"] = [
            *identity[:SECRET_PLACE],
            None,
            *identity[SECRET_PLACE + 1 :],
        ]
    return open_ones


def shown(value: Any, where: str = "") -> str:
    """A value as an error message tells it: short, and never what could be a secret.

    :param where: JSON pointer of it, which says whether it is one.
    """
    numbers = isinstance(value, dict | list) and all(type(item) is int for item in value)
    inside = isinstance(value, dict | list) and not numbers  # where secrets may be, too
    if inside or is_private(where):
        return _NOUNS[type(value)]
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@contextlib.contextmanager
def shallow() -> Iterator[None]:
    """Tell of JSON that is nested too deep for the block."""
    try:
        yield
    except RecursionError:
        raise ConfigError("nested too deep") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigObject:
    """What all objects have.

    :param uuid: given once, never changed. One that the file lacks is made from the object's place
        in the file, the same at each load, and kept by the next write.
    :param present: the keys that the JSON had, in order.
    :param extra: what the JSON had under keys that are not known.
    """

    uuid: str = ""
    present: tuple[str, ...] = field(default=(), compare=False, repr=False)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: Any, where: str = "") -> Self:
        """Check *data* and make an object of it.

        :param where: JSON pointer of *data*, for errors.
        :raises ConfigError: if a key has the wrong type, or one without default is absent.
        """
        if type(data) is not dict:
            raise _wrong_type(_NOUNS[dict], data, where)
        shape = shape_of(cls)
        known = shape.by_key
        values: dict[str, Any] = {}
        extra: dict[str, Any] = {}
        for key, value in data.items():
            what = known.get(key)
            if what is None:
                extra[key] = value
            elif type(value) in what.kinds:
                convert = what.convert
                values[what.name] = convert(value, member(where, key)) if convert else value
            elif value is not None:
                raise _wrong_type(what.noun, value, member(where, key))
        for what in shape.required:
            if what.name not in values:
                raise ConfigError(f"has no {what.key}", where=where)
        if not values.get("uuid"):
            values["uuid"] = str(uuid.uuid5(_NAMESPACE, f"{cls.__name__} {where}"))
        return cls(**values, present=_shared(tuple(data)), extra=extra)

    def to_json(self) -> dict[str, Any]:
        """The JSON that this was made of, with what has changed since."""
        known = shape_of(type(self)).by_key
        result: dict[str, Any] = {}
        for key in self.present:
            what = known.get(key)
            if what is None:
                if key in self.extra:
                    result[key] = self.extra[key]
            else:
                value = getattr(self, what.name)
                result[key] = _plain(value) if what.convert else value
        for key, what in known.items():
            if key not in result:
                value = getattr(self, what.name)
                if what.is_required or value != what.default:
                    result[key] = _plain(value) if what.convert else value
        for key, value in self.extra.items():
            if key not in result:
                result[key] = value
        return result


Convert = Callable[[Any, str], Any]


@dataclass(frozen=True, slots=True)
class KeySchema:
    """What is known of one key.

    :param name: the field.
    :param key: its name in JSON.
    :param kinds: the types that a value may have; ``NoneType`` if null means something.
    :param noun: the same in words.
    :param convert: checks what is inside, and makes objects of it; None for plain values.
    :param default: what an absent key means.
    """

    name: str
    key: str
    kinds: frozenset[type]
    noun: str
    convert: Convert | None
    is_required: bool
    default: Any


@dataclass(frozen=True, slots=True)
class Shape:
    """The keys of a class of objects, from its annotations."""

    by_key: dict[str, KeySchema]
    required: tuple[KeySchema, ...]


_SHAPES: dict[type[ConfigObject], Shape] = {}


def shape_of(kind: type[ConfigObject]) -> Shape:
    """The keys that an object of *kind* has."""
    if shape := _SHAPES.get(kind):
        return shape
    hints = typing.get_type_hints(kind)
    keys = []
    for item in dataclasses.fields(kind):
        if item.name in ("present", "extra"):
            continue
        kinds, noun, convert = _kinds(hints[item.name])
        default = item.default
        if item.default_factory is not dataclasses.MISSING:
            default = item.default_factory()
        is_required = default is dataclasses.MISSING
        key = item.metadata.get("key", item.name)
        keys.append(KeySchema(item.name, key, kinds, noun, convert, is_required, default))
    required = tuple(key for key in keys if key.is_required)
    _SHAPES[kind] = Shape({key.key: key for key in keys}, required)
    return _SHAPES[kind]


def _kinds(hint: Any) -> tuple[frozenset[type], str, Convert | None]:
    """The JSON types, their noun, and the converter of an annotation."""
    if isinstance(hint, types.UnionType):
        (inner,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
        kinds, noun, convert = _kinds(inner)
        if convert:
            convert = _unless_null(convert)
        return kinds | {types.NoneType}, f"{noun} or null", convert
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is dict:
        return frozenset({dict}), _NOUNS[dict], _each_value(parts[1])
    if origin is list:
        return frozenset({list}), _NOUNS[list], _each_item(parts[0], list)
    if origin is tuple:
        return frozenset({list}), _NOUNS[list], _each_item(parts[0], tuple)
    if hint is float:
        return frozenset({float, int}), _NOUNS[float], None
    return frozenset({hint}), _NOUNS[hint], None


def _unless_null(convert: Convert) -> Convert:
    def checked(value: Any, where: str) -> Any:
        return None if value is None else convert(value, where)

    return checked


def _each_value(hint: Any) -> Convert | None:
    if hint is Any:
        return None
    kinds, noun, convert = _kinds(hint)

    def checked(value: dict[str, Any], where: str) -> dict[str, Any]:
        for key, item in value.items():
            if type(item) not in kinds:
                raise _wrong_type(noun, item, member(where, key))
            if convert:
                convert(item, member(where, key))
        return value

    return checked


def _each_item(hint: Any, container: type) -> Convert | None:
    if hint is Any:
        return None
    if isinstance(hint, type) and issubclass(hint, ConfigObject):
        kind = hint

        def made(value: list[Any], where: str) -> tuple[ConfigObject, ...]:
            if where.count("/children") > _DEEPEST_CHILD:
                raise ConfigError("nested too deep", where=where)
            return tuple(
                kind.from_json(item, f"{where}/{index}") for index, item in enumerate(value)
            )

        return made
    kinds, noun, convert = _kinds(hint)

    def checked(value: list[Any], where: str) -> Any:
        for index, item in enumerate(value):
            if type(item) not in kinds:
                raise _wrong_type(noun, item, f"{where}/{index}")
            if convert:
                convert(item, f"{where}/{index}")
        return tuple(value) if container is tuple else value

    return checked


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, and of the same types all through: for Python 1 equals true."""
    if one is other:
        return True
    if type(one) is not type(other) or one != other:
        return False
    if isinstance(one, ConfigObject):
        names = (key.name for key in shape_of(type(one)).by_key.values())
        return same(one.extra, other.extra) and all(
            same(getattr(one, name), getattr(other, name)) for name in names
        )
    if isinstance(one, dict):
        return all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return all(map(same, one, other))
    return True


def _wrong_type(noun: str, value: Any, where: str) -> ConfigError:
    return ConfigError(f"must be {noun}, but is {shown(value, where)}", where=where)


def _plain(value: Any) -> Any:
    """JSON of the value of a key that has a converter."""
    if isinstance(value, tuple):
        return [item.to_json() if isinstance(item, ConfigObject) else item for item in value]
    return value


@lru_cache(maxsize=512)
def _shared(present: tuple[str, ...]) -> tuple[str, ...]:
    # Thousands of objects have the same keys in the same order.
    return present


# What names and addresses look like.

_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,238}[A-Za-z0-9_])?")
_LONGEST_LABEL = 128
_MAC = re.compile(r"[0-9A-Fa-f]{2}(?::[0-9A-Fa-f]{2}){5}")
_MAC_PREFIX = re.compile(r"[0-9A-Fa-f]{2}(?::[0-9A-Fa-f]{2}){2}")


def name_fault(name: str) -> str | None:
    """What is wrong with the name of a node or an instance, which also names files."""
    if _HOST.fullmatch(name) and ".." not in name:
        return None
    return f"{shown(name)} is no name: letters, digits and inner dots and dashes, up to 240"


def label_fault(name: str) -> str | None:
    """What is wrong with the name of a cluster, a node group or a network, which names nothing
    but itself: Ganeti takes any."""
    if name and name == name.strip() and name.isprintable() and len(name) <= _LONGEST_LABEL:
        return None
    return f"{shown(name)} is no name: one line of up to {_LONGEST_LABEL} characters"


def is_uuid(text: str) -> bool:
    """Whether *text* is a UUID in its usual form, in either case."""
    try:
        return len(text) == 36 and str(uuid.UUID(text)) == text.lower()
    except ValueError:
        return False


def canonical_uuid(text: str) -> str:
    """A UUID in the one spelling that is stored; anything else as it is."""
    return text.lower() if is_uuid(text) else text


def mac_fault(mac: str) -> str | None:
    """What is wrong with a MAC address."""
    if not _MAC.fullmatch(mac):
        return f"{shown(mac)} is no MAC address, such as aa:00:00:12:34:56"
    if int(mac[1], 16) & 1:
        return f"{mac} is a multicast address, which no NIC can have"
    return None


def mac_prefix_fault(prefix: str) -> str | None:
    """What is wrong with the first half of a MAC address."""
    if not _MAC_PREFIX.fullmatch(prefix):
        return f"{shown(prefix)} is no MAC prefix, such as aa:00:00"
    if int(prefix[1], 16) & 1:
        return f"{prefix} begins multicast addresses, which no NIC can have"
    return None


def ip_fault(ip: str) -> str | None:
    """What is wrong with an IP address, of either family."""
    try:
        address = ipaddress.ip_address(ip)
    except ValueError:
        return f"{shown(ip)} is no IP address"
    if isinstance(address, ipaddress.IPv6Address) and address.scope_id:
        return f"{shown(ip)} has a scope, which means nothing on another node"
    return None


def ip_network_fault(network: str) -> str | None:
    """What is wrong with an IP network, ``ADDRESS/LENGTH``."""
    try:
        ipaddress.ip_network(network)
    except ValueError as error:
        return f"{shown(network)} is no IP network: {error}"
    return None


def canonical_ip(text: str) -> str:
    """An IP address in the one spelling that is stored; what is none as it is."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return text


# JSON from bytes, by the letter of RFC 8259.

_MAYBE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(data: bytes, *, unique_keys: bool = False) -> Any:
    """What *data* says: UTF-8 only, finite numbers only, and no half of a surrogate pair, which
    could not be written again.

    :param unique_keys: a key that is twice in one object is a mistake; by itself JSON takes the
        last. For what people write.
    :raises ConfigError: that says at which byte it stops being JSON.
    """
    try:
        value = json.loads(
            data.decode(),
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_unique if unique_keys else None,
        )
        if _MAYBE_SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"not valid UTF-8 at byte {error.start}") from None
    except UnicodeEncodeError:
        raise ConfigError("not usable JSON: half of a surrogate pair is no character") from None
    except json.JSONDecodeError as error:
        offset = len(error.doc[: error.pos].encode())
        hint = "the file is empty" if not data.strip() else None
        text = f"not valid JSON at byte {offset}, line {error.lineno}: {error.msg}"
        raise ConfigError(text, hint=hint) from None
    except RecursionError:
        raise ConfigError("not usable JSON: nested too deep") from None
    except ValueError as error:  # also numbers of thousands of digits
        raise ConfigError(f"not usable JSON: {error}") from None
    return value


def _finite(text: str) -> float:
    number = float(text)
    if -math.inf < number < math.inf:
        return number
    raise ValueError(f"the number {shown(text)} is too large")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {shown(key)} is twice in one object")
            seen.add(key)
    return made


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
