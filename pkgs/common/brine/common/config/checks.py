"""Checks that several kinds of objects have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from brine.common.config import params
from brine.common.config.params import Mistake
from brine.common.config.shape import ConfigObject, is_private, member, shape_of, shown
from brine.common.nearest import nearest


def unknown_keys(where: str, item: ConfigObject) -> Iterator[Mistake]:
    """Keys of an object that its kind does not have."""
    for key in item.extra:
        hint = nearest(key, shape_of(type(item)).by_key)
        text = f"is not known; {hint}" if hint.startswith("did") else "is not known"
        yield Mistake(member(where, key), text, "unknown-key")


def form(
    where: str, check: Callable[[str], str | None], value: str | None, kind: str
) -> Iterator[Mistake]:
    """A value that does not look as it should, by a check of :mod:`formats`."""
    # What is empty is absent, but nothing goes without a name.
    if (value or kind == "name") and (fault := check(value or "")):
        yield Mistake(where, fault, kind)


def reference(
    where: str, noun: str, value: Any, known: set[str], *, needed: bool = False
) -> Iterator[Mistake]:
    """A reference to nothing.

    :param noun: what it should refer to.
    :param needed: it must refer to something.
    """
    if value in known if isinstance(value, str) else False:
        return
    if value or needed:
        what = "" if is_private(where) else f" {shown(value)}"
        text = f"there is no {noun}{what}" if value else f"must name a {noun}"
        yield Mistake(where, text, "dangling")


def choice(where: str, value: str, choices: Iterable[str]) -> Iterator[Mistake]:
    """A value that is none of the few that there are."""
    if value not in choices:
        known = ", ".join(choices)
        yield Mistake(where, f"must be one of {known}, but is {shown(value)}", "value")


def grouped(
    where: str,
    groups: Mapping[str, Mapping[str, Any]],
    components: Mapping[str, params.Component],
    *,
    for_instance: bool = False,
) -> Iterator[Mistake]:
    """Parameters in groups, each with a component of its own."""
    for group, values in groups.items():
        place = member(where, group)
        component = components.get(group)
        if component is None:
            text = f"there is no such group of parameters; {nearest(group, components)}"
            yield Mistake(place, text, "unknown-parameter")
        else:
            yield from params.validate(component, values, place, for_instance=for_instance)
