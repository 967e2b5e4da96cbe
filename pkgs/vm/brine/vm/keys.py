"""Kinds of keys that specs have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from brine.common import schema
from brine.vm.values import UUID, like, line, tidy_path


def key(
    default: Any = dataclasses.MISSING,
    *,
    check: Callable[[str], str | None] | None = None,
    **limits: Any,
) -> Any:
    """A key, as :func:`brine.common.schema.key` has it, whose strings can be printed."""

    return schema.key(default, check=line(check), **limits)


def path_key(
    default: Any = dataclasses.MISSING,
    pattern: str = "/.*",
    fault: str = "must be an absolute path",
    **limits: Any,
) -> Any:
    """A key that is an absolute path, with the further *limits* of a key."""
    return key(default, check=like(pattern, fault), tidy=tidy_path, **limits)


def uuid_key() -> Any:
    """A key that is a UUID, or empty."""
    return key("", check=like(UUID, "is no UUID"), tidy=str.lower)


def slot_key() -> Any:
    """A key that is the slot of a device, or -1."""
    return key(-1, minimum=-1, maximum=255)
