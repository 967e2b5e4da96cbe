"""
Pillar, checked before anything changes
=======================================

The state ``brine.common`` has it, and all others of the formula require that::

    brine-pillar:
      brine_pillar.valid: []

It needs no ``brine``, so it also tells of mistakes on a node that has no package yet, and in test
mode. No message shows a text that is in pillar, as that may be a secret.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    __env__: str = ""
    __pillar__: dict[str, Any] = {}
    __salt__: dict[str, Callable[..., Any]] = {}

Result = dict[str, Any]
Node = Mapping[str, Any]

NOUNS = {
    "object": "a mapping",
    "array": "a list",
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "a string",
}
_ALONE = ("brine:instance:instances", "brine:instances")
_MOST = 50
_LONGEST = 80


def valid(
    name: str,
    schema: str = "salt://brine/schema.json",
    parts: Mapping[str, bool] | None = None,
    instance: str = "",
) -> Result:
    """Ensure pillar ``brine:`` is valid. The comment has a line for each fault: its place, and what
    is meant there.

    Faults inside of one instance are left out: they fail the states of that instance alone.

    Example::

        brine-pillar:
          brine_pillar.valid: []

    :param name: for people; nothing depends on it.
    :param schema: of pillar, a JSON Schema.
    :param parts: of Brine, and whether this node is to have each.
    :param instance: check this one of ``brine:instance:instances``, and nothing else.
    """
    file = __salt__["cp.cache_file"](schema, saltenv=__env__)
    if not file:
        return _result(name, [f"there is no {schema}: copy the folder brine as a whole"])
    root = json.loads(Path(file).read_text(encoding="utf-8"))
    pillar = {"brine": __pillar__.get("brine")}
    check = _Check(root, alone=() if instance else _ALONE)
    try:
        if instance:
            faults = list(check.instance(pillar, instance))
        else:
            faults = [*check.faults(root, pillar, ""), *_blank_keys(pillar), *_misfits(parts or {})]
            faults += _not_given(pillar)
            # Alone, as it may be the cause of all others.
            faults = [str(fault)] if (fault := __pillar__.get("brine_fault")) else faults
    except RecursionError:
        faults = ["brine: nested too deep"]
    return _result(name, faults)


class _Check:
    """A check of pillar by a schema; *alone* are mappings whose values are left out."""

    def __init__(self, root: Node, alone: Iterable[str]) -> None:
        self._root = root
        self._alone = frozenset(alone)

    def instance(self, pillar: Node, name: str) -> Iterator[str]:
        """The faults of one of ``brine:instance:instances``."""
        where, schema = _ALONE[0], self._root
        value: Any = pillar
        for key in where.split(":"):
            schema, value = schema["properties"][key], (value or {}).get(key)
        for key, spec in (value or {}).items():
            if str(key) == name:
                yield from self.faults(
                    schema["additionalProperties"], spec, f"{where}:{_shown(key)}"
                )

    def faults(self, schema: Node, value: Any, where: str) -> Iterator[str]:
        """The faults of a value. Null stands for the default, everywhere."""
        if "$ref" in schema:
            schema = {**self._root["$defs"][schema["$ref"].rpartition("/")[2]], **schema}
        if value is None:
            return
        if fault := _fault(schema, value):
            yield f"{where}: {fault}"
        elif isinstance(value, Mapping):
            yield from self._mapping(schema, value, where)
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                yield from self.faults(schema.get("items", {}), item, f"{where}:{index}")

    def _mapping(self, schema: Node, value: Mapping[Any, Any], where: str) -> Iterator[str]:
        known = schema.get("properties", {})
        others = schema.get("additionalProperties", {})
        names = schema.get("propertyNames")
        for key, inner in value.items():
            place = f"{where}:{_shown(key)}" if where else _shown(key)
            if not isinstance(key, str):
                # YAML makes true of on, and a number or a date of what looks like one.
                yield f"{place}: a key must be a string, but is {_noun_of(key)}; put it in quotes"
            elif key in known:
                yield from self.faults(known[key], inner, place)
            elif others is False or (others == {"type": "null"} and inner is not None):
                yield f"{place}: there is no such key; {_nearest(str(key), known, 'key')}"
            elif names and not re.fullmatch(names["pattern"], key):
                yield f"{place}: a name here is {names['title']} only"
            elif where not in self._alone:
                yield from self.faults(others, inner, place)
        for key in schema.get("required", ()):
            if value.get(key) is None:
                yield f"{where}: has no {key}"
        either = [key for one in schema.get("anyOf", ()) for key in one["required"]]
        if either and all(value.get(key) is None for key in either):
            yield f"{where}: has neither {' nor '.join(either)}"


def _fault(schema: Node, value: Any) -> str:
    """The fault of a value itself, without its members'."""
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(kind, value) for kind in kinds):
        noun = schema.get("title") or " or ".join(NOUNS[kind] for kind in kinds)
        return f"must be {noun}, but is {_noun_of(value)}{_meant(kinds, value)}"
    if not kinds and not any(_is(kind, value) for kind in NOUNS):
        return f"must be something that JSON has, but is {_noun_of(value)}; put it in quotes"
    if "enum" in schema and value not in schema["enum"]:
        known = [str(one) for one in schema["enum"]]
        return f"must be one of {', '.join(known)}"
    if "minimum" in schema and value < schema["minimum"]:
        return f"must be at least {schema['minimum']}, but is {_number(value)}"
    if "maximum" in schema and value > schema["maximum"]:
        return f"must be at most {schema['maximum']}, but is {_number(value)}"
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        return f"must be {schema['title']}"
    if isinstance(value, str) and len(value.encode(errors="replace")) > schema.get(
        "maxLength", 1e9
    ):
        return f"has more than {schema['maxLength']} bytes"
    return ""


def _is(kind: str, value: Any) -> bool:
    if kind == "object":
        return isinstance(value, Mapping)
    if kind == "array":
        return isinstance(value, (list, tuple))
    if kind == "string":
        return isinstance(value, str)
    if isinstance(value, bool):  # which is a number for Python
        return kind == "boolean"
    if kind == "number":
        return isinstance(value, (int, float)) and value - value == 0  # neither infinite nor NaN
    return kind == "integer" and isinstance(value, int)


def _noun_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    found = (noun for kind, noun in NOUNS.items() if _is(kind, value))
    return next(found, f"a {type(value).__name__}")


def _meant(kinds: Iterable[str], value: Any) -> str:
    """A hint for a value of the wrong type, if the author's meaning is plain."""
    if "string" in kinds and not isinstance(value, (Mapping, list, tuple)):
        return "; put it in quotes"
    if isinstance(value, str):
        if "boolean" in kinds and value.strip().lower() in ("yes", "on", "true", "1"):
            return "; true, without quotes, is meant"
        if "boolean" in kinds and value.strip().lower() in ("no", "off", "false", "0"):
            return "; false, without quotes, is meant"
        if {"integer", "number"} & {*kinds} and re.fullmatch(r"\s*[0-9.]+\s*", value):
            return "; leave out the quotes"
    return ""


def _number(value: float) -> str:
    return str(value) if isinstance(value, float) or abs(value) < 10**20 else "far from that"


def _shown(key: Any) -> str:
    """A key as a part of a path, in one line."""
    text = str(key)
    text = text if text.isprintable() else json.dumps(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _nearest(word: str, known: Iterable[str], noun: str) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(word[:_LONGEST], known, n=1)
    return f"the nearest is {close[0]}" if close else f"the {noun}s here are {', '.join(known)}"


def _blank_keys(pillar: Node) -> Iterator[str]:
    """The fault of a key for brine-confd. An empty key counts as none."""
    confd = _inside(pillar, "brine", "confd")
    for key in ("key", "previous_key"):
        text = confd.get(key)
        if isinstance(text, str) and text and not text.strip():
            yield f"brine:confd:{key}: is blank; put the cluster's key there, or leave it out"


def _not_given(pillar: Node) -> Iterator[str]:
    """The fault of the external pillar for this node. The node that writes the configuration does
    not need that pillar."""
    given = _inside(pillar, "brine", "distributed")
    if "fault" in given and not _inside(pillar, "brine", "config").get("apply"):
        yield f"brine:distributed: could not be made: {given['fault']}"


def _inside(pillar: Node, *keys: str) -> Node:
    """A mapping inside of pillar; an empty one if there is none."""
    value: Any = pillar
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def _misfits(parts: Mapping[str, bool]) -> Iterator[str]:
    """The parts that this node is to have without the parts that they need."""
    for part, other in (
        ("instance", "hotplug"),
        ("instance", "storage"),
        ("watcher", "instance"),
        ("lifecycle", "instance"),
        ("moves", "instance"),
        ("moves", "confd"),
    ):
        if parts.get(part) and not parts.get(other):
            whose = f"brine-{part}, which this node has or is to have,"
            yield f"brine:{other}:enabled: {whose} needs brine-{other}"


def _result(name: str, faults: list[str]) -> Result:
    lines = faults[:_MOST]
    if len(faults) > _MOST:
        lines.append(f"and {len(faults) - _MOST} more")
    comment = "\n".join(lines) or "pillar is as the formula knows it"
    return {"name": name, "result": not faults, "changes": {}, "comment": comment}
