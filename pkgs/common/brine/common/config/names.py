"""Finding objects by UUID, name, or short name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

from brine.common.config.shape import ConfigError, shown
from brine.common.nearest import nearest


class _Named(Protocol):
    @property
    def uuid(self) -> str: ...

    @property
    def name(self) -> str: ...


Named = TypeVar("Named", bound=_Named)


class NotFoundError(ConfigError):
    """There is no such object.

    The hint, the known name that looks most like it, is only worked out when it is asked for: that
    takes a while on a large cluster.
    """

    def __init__(self, noun: str, reference: str, known: Mapping[str, Any]) -> None:
        super().__init__(f"there is no {noun} {shown(reference)}")
        self.reference = reference
        self._noun = noun
        self._known = known

    @property
    def hint(self) -> str | None:
        """The nearest known name."""
        if not self._known:
            return f"there are no {self._noun}s at all"
        hint = nearest(self.reference, self._known)
        return hint if len(hint) < 200 else None

    @hint.setter
    def hint(self, value: str | None) -> None:
        """Ignored: the hint follows from the names."""


class AmbiguousError(ConfigError):
    """A short name that several objects have.

    :param names: the whole names.
    """

    def __init__(self, noun: str, reference: str, names: list[str]) -> None:
        first = ", ".join(sorted(names)[:5])
        super().__init__(
            f"{len(names)} {noun}s are named {reference}", hint=f"give the whole name: {first}"
        )
        self.names = names


class Names(Generic[Named]):
    """Finds the objects of one kind by UUID, name, or a short name that only one has.

    :param noun: for errors.
    :param objects: by UUID.
    """

    def __init__(self, noun: str, objects: Mapping[str, Named]) -> None:
        self._noun = noun
        self._objects = objects

    @cached_property
    def by_name(self) -> dict[str, Named]:
        """By whole name; of several that have the same, the first."""
        names: dict[str, Named] = {}
        for item in self._objects.values():
            names.setdefault(item.name, item)
        return names

    @cached_property
    def _by_uuid(self) -> dict[str, Named]:
        return {item.uuid: item for item in self._objects.values()}

    @cached_property
    def _by_prefix(self) -> dict[str, list[Named]]:
        prefixes: dict[str, list[Named]] = {}
        for item in self._objects.values():
            end = item.name.find(".")
            while end > 0:
                prefixes.setdefault(item.name[:end], []).append(item)
                end = item.name.find(".", end + 1)
        return prefixes

    def find(self, reference: str) -> Named | None:
        """The object, or None if there is none.

        :raises AmbiguousError: if it is the short name of several.
        """
        found = self._by_uuid.get(reference) or self.by_name.get(reference)
        if found is None:
            found = self._objects.get(reference)
        if found is not None:
            return found
        several = self._by_prefix.get(reference, [])
        if len(several) > 1:
            raise AmbiguousError(self._noun, reference, [item.name for item in several])
        return several[0] if several else None

    def get(self, reference: str) -> Named:
        """The object.

        :raises NotFoundError: if there is none.
        :raises AmbiguousError: if it is the short name of several.
        """
        found = self.find(reference)
        if found is None:
            raise NotFoundError(self._noun, reference, self.by_name)
        return found
