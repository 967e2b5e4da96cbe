"""The name of an instance's unit."""

from __future__ import annotations

PREFIX = "brine-instance@"
SUFFIX = ".service"


def unit_of(name: str) -> str:
    return f"{PREFIX}{name}{SUFFIX}"
