"""A configuration in the making: what an input says so far, over what there is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from brine.common.config.configuration import KINDS, Configuration
from brine.common.config.formats import canonical_uuid
from brine.common.config.merge import Json
from brine.common.config.params import Mistake


@dataclass(frozen=True, slots=True)
class Draft:
    """What the parts of an apply work on.

    :param current: None if there is none yet.
    :param declared: the input.
    :param foreign: the input is a whole configuration of Ganeti's.
    :param old: objects by section and UUID, as they are.
    :param touched: JSON of those that the input speaks of, by section and UUID.
    :param new: UUIDs of those that are not in old.
    :param removed: UUIDs by section.
    :param keys: what the input calls the touched ones, by section and UUID.
    :param mistakes: what is wrong in the input.
    :param notes: what a person should know.
    """

    current: Configuration | None
    declared: Json
    foreign: bool
    old: dict[str, dict[str, Any]]
    touched: dict[str, dict[str, Json]] = field(
        default_factory=lambda: {section: {} for section in KINDS}
    )
    new: set[str] = field(default_factory=set)
    removed: dict[str, set[str]] = field(
        default_factory=lambda: {section: set() for section in KINDS}
    )
    keys: dict[str, dict[str, str]] = field(
        default_factory=lambda: {section: {} for section in KINDS}
    )
    mistakes: list[Mistake] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def wrong(self, where: str, text: str, kind: str) -> None:
        """There is a mistake."""
        self.mistakes.append(Mistake(where, text, kind))

    def uuid(self, section: str, given: str) -> str:
        """A UUID from the input as it is stored; what is none as it is."""
        return given if given in self.old[section] else canonical_uuid(given)

    def value(self, section: str, uuid: str | None, key: str) -> Any:
        """What an object is going to have under *key*; None if there is no such object."""
        if uuid is None:
            return None
        touched = self.touched[section].get(uuid)
        if touched is not None:
            return touched.get(key)
        old = None if uuid in self.removed[section] else self.old[section].get(uuid)
        return getattr(old, key, None)

    def nodes(self) -> dict[str, Json]:
        """All nodes as they are going to be; those that are not touched are copies."""
        nodes = {
            key: self.touched["nodes"].get(key) or node.to_json()
            for key, node in self.old["nodes"].items()
            if key not in self.removed["nodes"]
        }
        return nodes | self.touched["nodes"]

    def said(self, section: str, uuid: str) -> Json:
        """What the input says of an object."""
        declared = self.declared.get(section)
        key = self.keys[section].get(uuid)
        said = declared.get(key) if type(declared) is dict and key is not None else None
        return said if type(said) is dict else {}
