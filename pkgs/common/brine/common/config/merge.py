"""Merging what is declared of one object into what is known of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from brine.common.config import formats, fresh, params
from brine.common.config.params import Mistake
from brine.common.config.shape import ConfigError, ConfigObject, member, shape_of, shown
from brine.common.nearest import nearest
from brine.common.uid_pool import UidPoolError, parse_uid_pool

Json = dict[str, Any]

STAMPS = frozenset({"serial_no", "ctime", "mtime"})
_ALIASES = {"cluster": {"name": "cluster_name", "master": "master_node"}}
_IPS = frozenset({"ip", "primary_ip", "secondary_ip", "master_ip"})
_IN_DEFAULT_GROUP = frozenset({"nicparams", "beparams"})


@dataclass(frozen=True, slots=True)
class Rules:
    """How an object of one kind is merged.

    :param section: ``cluster``, ``nic`` or a section: what :mod:`fresh` calls it.
    :param kind: its class, which knows the keys.
    :param apart: keys that somebody else looks after.
    """

    section: str
    kind: type[ConfigObject]
    apart: frozenset[str] = field(default=frozenset({"uuid"}))

    def merge(
        self, base: Json, declared: Mapping[str, Any], where: str, *, foreign: bool, new: bool
    ) -> Iterator[Mistake]:
        """Change *base* by what is *declared*: an absent key stays, null resets or removes one,
        objects are merged in turn, and everything else is replaced.

        :param base: the object's JSON, not shared with anybody.
        :param foreign: a whole configuration of Ganeti's: unknown keys come along.
        :param new: the object is new: it gets all defaults.
        """
        aliases = _ALIASES.get(self.section, {})
        known = shape_of(self.kind).by_key
        reset: set[str] = set()
        for given, value in declared.items():
            key = aliases.get(given, given)
            place = member(where, given)
            if key in STAMPS:
                # Comes along when what was shown or exported is applied; we keep our own count.
                if new:
                    base[key] = value
                continue
            if key in self.apart:
                continue
            if key not in known:
                if value is None and not foreign:
                    base.pop(key, None)
                elif foreign or key in base:
                    base[key] = value
                else:
                    yield Mistake(place, _unknown(given, [*known, *aliases]), "unknown-key")
                continue
            if value is None:
                reset.add(key)
                base.pop(key, None)
                continue
            if not foreign:
                value = self._easier(key, value)
            if isinstance(value, Mistake):
                yield Mistake(place, value.text, value.kind)
                continue
            if type(value) is dict:
                value = merged(base.get(key), value)
            what = known[key]
            if type(value) not in what.kinds:
                yield Mistake(place, f"must be {what.noun}, but is {shown(value, place)}", "type")
                continue
            if what.convert:
                try:
                    what.convert(value, place)
                except ConfigError as error:
                    yield Mistake(error.where, _text(error), "type")
                    continue
            base[key] = value
        fresh.fill(self.section, base, only=None if new else reset)

    def _easier(self, key: str, value: Any) -> Any:
        """What a person may write in place of the form that is kept; a Mistake if it can't be
        that."""
        if key in _IPS and type(value) is str:
            return formats.canonical_ip(value)
        if self.section != "cluster":
            return value
        if key == "uid_pool" and isinstance(value, str | int) and type(value) is not bool:
            try:
                return parse_uid_pool(str(value))
            except UidPoolError as error:
                return Mistake("", str(error), "value")
        if key in _IN_DEFAULT_GROUP and type(value) is dict:
            # One level, as instances have it: there is only one group, and it is optional here.
            component = params.NIC if key == "nicparams" else params.BACKEND
            if value and all(name in component for name in value):
                return {"default": value}
        return value


def merged(old: Any, new: Json) -> Json:
    """*new* put over *old*, at each level: null removes a key."""
    result: Json = dict(old) if type(old) is dict else {}
    for key, value in new.items():
        if value is None:
            result.pop(key, None)
        elif type(value) is dict:
            result[key] = merged(result.get(key), value)
        else:
            result[key] = value
    return result


def _unknown(key: str, known: list[str]) -> str:
    hint = nearest(key, known)
    return f"is not known; {hint}" if hint.startswith("did") else "is not known"


def _text(error: ConfigError) -> str:
    return str(error).removeprefix(f"{error.where}: ")
