"""Which VLANs a NIC is in, as Ganeti writes it."""

from __future__ import annotations

from dataclasses import dataclass

from brine.common.errors import UsageError

_HIGHEST = 4094


@dataclass(frozen=True)
class Vlans:
    """The VLANs of a port.

    :param untagged: frames without a tag are of this one; None if there is none.
    :param tagged: frames with one of these tags pass.
    """

    untagged: int | None
    tagged: frozenset[int]

    def ids(self) -> frozenset[int]:
        """All of them."""
        return self.tagged | ({self.untagged} if self.untagged is not None else set())


def parse_vlans(text: str) -> Vlans | None:
    """``100`` or ``.100`` is one VLAN, whose frames have no tag for the guest; ``:100:200`` are
    tagged ones; ``.100:200:300`` is both. Nothing is None: whatever the link gives to a port.

    :raises UsageError: if it is none of these.
    """
    text = text.strip()
    if not text:
        return None
    first, *tagged = text.split(":")
    if not first and not tagged:
        raise _mistake(text)
    untagged = _number(first.removeprefix("."), text) if first else None
    many = [_number(one, text) for one in tagged]
    if len(set(many)) < len(many) or untagged in many:
        raise UsageError(f"VLANs {text!r}: one is there twice")
    return Vlans(untagged, frozenset(many))


def _number(text: str, whole: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 5 and 0 < int(text) <= _HIGHEST):
        raise _mistake(whole)
    return int(text)


def _mistake(text: str) -> UsageError:
    return UsageError(
        f"not VLANs: {text!r}",
        hint=f"100 (untagged), :100:200 (tagged) or .100:200 (both), each 1 to {_HIGHEST}",
    )
