"""JSON pointers (RFC 6901) into a configuration, with names in place of UUIDs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jsonpointer

from brine.common.config.configuration import KINDS, Configuration
from brine.common.config.shape import ConfigError, member
from brine.common.nearest import nearest

_INDEX = re.compile("0|[1-9][0-9]{0,8}")


def resolve(configuration: Configuration, pointer: str) -> Any:
    """What is at *pointer*: JSON.

    :param pointer: ``/instances/web1.example.com/nics/0``; empty for the whole. An object may be
        given by UUID, name, or a short name that only one has.
    :raises ConfigError: if there is no such place.
    """
    try:
        parts = jsonpointer.JsonPointer(pointer).parts
    except jsonpointer.JsonPointerException:
        hint = "in a name, ~ is written ~0, and / is written ~1"
        if not pointer.startswith("/"):
            hint = f"a pointer begins with a slash: /{pointer}"
        raise ConfigError(f"{pointer} is no JSON pointer", hint=hint) from None
    if len(parts) > 1 and parts[0] in KINDS:
        parts = [parts[0], _key(configuration, parts[0], parts[1]), *parts[2:]]
    return descend(configuration.to_json(), parts)


def descend(value: Any, parts: Sequence[str]) -> Any:
    """What is in JSON *value* at the reference tokens *parts* of a pointer.

    The library's own way down also goes into strings, and past the end of lists.

    :raises ConfigError: if there is no such place.
    """
    place = ""
    for part in parts:
        inner = member(place, part)
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and _INDEX.fullmatch(part) and int(part) < len(value):
            value = value[int(part)]
        else:
            near = isinstance(value, dict) and 0 < len(value) < 1000
            known = nearest(part, value) if near else None
            raise ConfigError(f"there is no {inner}", hint=known)
        place = inner
    return value


def _key(configuration: Configuration, section: str, reference: str) -> str:
    """The key of an object."""
    objects: dict[str, Any] = getattr(configuration, section)
    if reference in objects or section == "disks":
        return reference
    find = {
        "nodes": configuration.node,
        "nodegroups": configuration.nodegroup,
        "instances": configuration.instance,
        "networks": configuration.network,
    }[section]
    found = find(reference)
    return next(key for key, item in objects.items() if item is found)
