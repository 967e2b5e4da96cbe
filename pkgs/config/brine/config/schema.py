"""Objects of a configuration out of JSON and back, and what their values look like."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import math
import re
import sys
import uuid
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field
from functools import lru_cache
from typing import Any, NoReturn, Self

from brine.common.schema import SchemaError, expect_required, member, shape_of, shown
from brine.vm.values import UUID

_NAMESPACE = uuid.UUID("0b1f8a3e-3f0a-4bd5-a9d4-64a1f6e0c0de")
PRIVATE_KEYS = ("osparams_private", "osparams_private_cluster")
"""Of an instance, and of the cluster: an operating system's private parameters."""
SECRET_PLACE = 5
"""Of a DRBD disk's logical_id: the secret that its two sides share."""


class ConfigError(SchemaError):
    """A configuration that can't be used, or that has not what was asked of it."""


def rule(
    default: Any = MISSING, *, key: str | None = None, secret: bool = False, **rules: Any
) -> Any:
    """A key, with what :mod:`brine.config.verify` expects of its value.

    :param default: or what makes it, such as ``dict``; none means that the key must be there.
    :param key: its name in the JSON, where the field has another.
    :param rules: ``fault``, a function that says what is wrong with a value, and the ``kind`` of
        that mistake; ``choices``; ``refers``, the section that a UUID or a list of them is of;
        ``params``, the component of these parameters; ``groups``, the components by group;
        ``texts``, how many levels above its strings a mapping of nothing else has; or ``lines``,
        true if each string is a line that can be printed.
    """
    metadata = {"key": key, "secret": secret, "rules": rules}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


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
        identity[SECRET_PLACE] = None
    return open_ones


@contextlib.contextmanager
def shallow() -> Iterator[None]:
    """Tell of JSON that does not fit the block's schema, or is nested too deep for the block."""
    try:
        yield
    except ConfigError:
        raise
    except SchemaError as error:
        raise ConfigError(error.text, where=error.where, hint=error.hint) from None
    except RecursionError:
        raise ConfigError("nested too deep") from None


_APART = {"apart": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonObject:
    """An object of JSON, of which nothing is lost.

    :param present: the keys that the JSON had, in order.
    :param extra: what the JSON had under keys that are not known.
    """

    present: tuple[str, ...] = field(default=(), compare=False, repr=False, metadata=_APART)
    extra: dict[str, Any] = field(default_factory=dict, metadata=_APART)

    @classmethod
    def from_json(cls, data: Any, where: str = "") -> Self:
        """Check *data* and make an object of it.

        :param where: JSON pointer of *data*, for errors.
        :raises SchemaError: if a key has the wrong type, or one without default is absent.
        """
        if type(data) is not dict:
            raise SchemaError(f"must be an object, but is {shown(data)}", where=where)
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
                raise what.wrong_type(value, member(where, key))
        expect_required(shape, values, where)
        if "uuid" in known and not values.get("uuid"):
            values["uuid"] = str(uuid.uuid5(_NAMESPACE, f"{cls.__name__} {where}"))
        return cls(**values, present=_shared(tuple(data)), extra=extra)

    def to_json(self) -> dict[str, Any]:
        """The JSON that this was made of, with what has changed since."""
        order = dict.fromkeys(self.present)
        values: dict[str, Any] = {}
        for key, what in shape_of(type(self)).by_key.items():
            value = getattr(self, what.name)
            if key in order or what.is_required or value != what.default:
                values[key] = _plain(value) if what.convert else value
        values |= self.extra
        return {key: values[key] for key in order | values if key in values}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigObject(JsonObject):
    """The keys that all objects of a configuration have.

    :param uuid: given once, never changed. One that the file lacks is made from the object's place
        in the file, the same at each load, and kept by the next write.
    """

    uuid: str = ""


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, and of the same types all through: for Python 1 equals true."""
    if one is other:
        return True
    if type(one) is not type(other) or one != other:
        return False
    if isinstance(one, JsonObject):
        names = (key.name for key in shape_of(type(one)).by_key.values())
        return same(one.extra, other.extra) and all(
            same(getattr(one, name), getattr(other, name)) for name in names
        )
    if isinstance(one, dict):
        return all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return all(map(same, one, other))
    return True


def _plain(value: Any) -> Any:
    """JSON of the value of a key that has a converter."""
    if isinstance(value, JsonObject):
        return value.to_json()
    if isinstance(value, tuple):
        return [item.to_json() if isinstance(item, JsonObject) else item for item in value]
    if isinstance(value, dict) and isinstance(next(iter(value.values()), None), JsonObject):
        return {key: item.to_json() for key, item in value.items()}
    return value


@lru_cache(maxsize=512)
def _shared(present: tuple[str, ...]) -> tuple[str, ...]:
    # Thousands of objects have the same keys in the same order.
    return present


# What names and addresses look like. An empty one is absent, but nothing goes without a name.

_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,238}[A-Za-z0-9_])?")
_LONGEST_LABEL = 128
_PAIRS = re.compile(r"[0-9A-Fa-f]{2}(?::[0-9A-Fa-f]{2})*")


def name_fault(name: str) -> str | None:
    """The fault in the name of a node or an instance, which also names files; or None."""
    if _HOST.fullmatch(name) and ".." not in name:
        return None
    return f"{shown(name)} is no name: letters, digits and inner dots and dashes, up to 240"


def label_fault(name: str) -> str | None:
    """The fault in the name of a cluster, a node group or a network, or None. Such a name names no
    file: Ganeti takes any."""
    if name and name == name.strip() and name.isprintable() and len(name) <= _LONGEST_LABEL:
        return None
    return f"{shown(name)} is no name: one line of up to {_LONGEST_LABEL} characters"


def is_uuid(text: str) -> bool:
    """Whether *text* is a UUID in its usual form, in either case."""
    return bool(re.fullmatch(UUID, text))


def canonical_uuid(text: str) -> str:
    """A UUID in the one spelling that is stored; anything else as it is."""
    return text.lower() if is_uuid(text) else text


def mac_fault(
    mac: str | None, pairs: int = 6, noun: str = "address, such as aa:00:00:12:34:56"
) -> str | None:
    """The fault in a MAC address, or in the first *pairs* of one; or None."""
    if mac and not (_PAIRS.fullmatch(mac) and len(mac) == 3 * pairs - 1):
        return f"{shown(mac)} is no MAC {noun}"
    if mac and int(mac[1], 16) & 1:
        return f"{mac} is a multicast address, which no NIC can have"
    return None


def mac_prefix_fault(prefix: str | None) -> str | None:
    """The fault in the first half of a MAC address, or None."""
    return mac_fault(prefix, 3, "prefix, such as aa:00:00")


@lru_cache(maxsize=1024)  # rules of several kinds ask about one address
def ip_fault(ip: str | None) -> str | None:
    """The fault in an IP address of either family, or None."""
    try:
        address = ipaddress.ip_address(ip) if ip else None
    except ValueError:
        return f"{shown(ip)} is no IP address"
    if isinstance(address, ipaddress.IPv6Address) and address.scope_id:
        return f"{shown(ip)} has a scope, which means nothing on another node"
    return None


def ip_network_fault(network: str | None) -> str | None:
    """The fault in an IP network, ``ADDRESS/LENGTH``; or None."""
    try:
        if network:
            ipaddress.ip_network(network)
    except ValueError as error:
        return f"{shown(network)} is no IP network: {error}"
    return None


def canonical_ip(text: str) -> str:
    """An IP address in the one spelling that is stored; other text stays as it is."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return text


# JSON from bytes, by the letter of RFC 8259.

_MAYBE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_input(name: str, hint: str, *, most: int = -1) -> Any:
    """The JSON of a file that people name, or of standard input, which is ``-``.

    :param hint: what it should be.
    :param most: the bytes that it may have.
    :raises ConfigError: if it can't be read, or is no such JSON.
    """
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if name == "-" else open(name, "rb") as file:
            data = file.read(most + 1 if most >= 0 else -1)
    except OSError as error:
        raise ConfigError(f"{name}: can't be read: {error.strerror}") from error
    if 0 <= most < len(data):
        raise ConfigError(f"{name}: is larger than {most} bytes")
    try:
        return parse_json(data, unique_keys=True)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}", hint=error.hint or hint) from error


NO_COMMENTS = "JSON has no comments"


def parse_json(data: bytes, *, unique_keys: bool = False) -> Any:
    """The JSON in *data*: UTF-8 only, finite numbers only, and no half of a surrogate pair, which
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
        hint = _json_hint(error) if data.strip() else "the file is empty"
        text = f"not valid JSON at byte {offset}, line {error.lineno}: {error.msg}"
        raise ConfigError(text, hint=hint) from None
    except RecursionError:
        raise ConfigError("not usable JSON: nested too deep") from None
    except ValueError as error:
        has_digits = "set_int_max_str_digits" in str(error)  # Python's advice is for programmers
        text = "a number has thousands of digits" if has_digits else str(error)
        raise ConfigError(f"not usable JSON: {text}") from None
    return value


def _json_hint(error: json.JSONDecodeError) -> str | None:
    """What is usual elsewhere, and is no JSON."""
    rest = error.doc[error.pos :].lstrip()
    if rest.startswith(("#", "//", "/*")):
        return NO_COMMENTS
    if rest.startswith("'"):
        return "JSON has double quotes only"
    # Python 3.13 points at the comma itself.
    if re.match(r",?\s*[]}]", rest) and error.doc[: error.pos + 1].rstrip("]} \n\t").endswith(","):
        return "JSON has no comma after the last item"
    return None


def _finite(text: str) -> float:
    number = float(text)
    if -math.inf < number < math.inf:
        return number
    raise ValueError(f"the number {shown(text)} is too large")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"the key {shown(key)} is twice in one object")
        made[key] = value
    return made


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
