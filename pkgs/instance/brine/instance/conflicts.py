"""What an instance would have that another has too: errors of definitions and of starts."""

from __future__ import annotations

from brine.common.conflicts import (
    NONE_PLANNED,
    Claim,
    ClaimKind,
    Planned,
    claims_of,
    conflict_later,
    conflict_now,
)
from brine.instance.spec import AdminState, Spec, SpecError, to_json
from brine.instance.store import InstanceError


def refuse_conflicts(spec: Spec, before: Spec | None, planned: Planned = NONE_PLANNED) -> None:
    """Refuse a spec that claims a UUID, a MAC address or a disk that another instance has, too.

    :param before: the present spec: what it claims already is not asked for again, unless the
        instance was offline.
    :param planned: specs that other instances would have.
    :raises SpecError: which claim, and whose it is.
    """
    wanted = list(claims_of(to_json(spec)))
    _refuse_twice(wanted)
    if before and before.admin_state != AdminState.OFFLINE:
        known = {(one.kind, one.value, one.read_only) for one in claims_of(to_json(before))}
        wanted = [one for one in wanted if (one.kind, one.value, one.read_only) not in known]
    found = conflict_later(spec.name, wanted, planned)
    if found is None:
        return
    claim, owner = found.wanted, found.owner
    if claim.kind is ClaimKind.DISK:
        text = f"{claim.value} is a disk of {owner} too, {found.there.value}"
        hint = f'make it read_only in both, or define {owner} with "admin_state": "offline"'
        hint += f"; brine instance rename {owner} {spec.name}, if that is its new name"
    else:
        text = f"is the {claim.kind} of {owner}"
        hint = f'leave out "uuid" and "mac" for new ones, or undefine {owner}'
    raise SpecError(text, where=claim.where, hint=hint)


def _refuse_twice(wanted: list[Claim]) -> None:
    """Refuse a disk that a spec has twice, if it writes it."""
    known: dict[tuple[int | str, ...], list[Claim]] = {}
    for one in wanted:
        if one.kind is ClaimKind.DISK:
            others = known.setdefault(one.identity(), [])
            for other in others:
                if not (one.read_only and other.read_only):
                    text = f"{one.value} is another of its disks too, {other.value}"
                    raise SpecError(text, where=one.where)
            others.append(one)


def refuse_in_use(spec: Spec) -> None:
    """Refuse to start an instance with a UUID, a MAC address or a disk of another that runs.

    :raises InstanceError: which claim, and whose it is.
    """
    found = conflict_now(spec.name, claims_of(to_json(spec)))
    if found is None:
        return
    claim, owner = found.wanted, found.owner
    if claim.kind is ClaimKind.DISK:
        text = f"{claim.value}: is in use by {owner}, as {found.there.value}"
        hint = f"brine instance stop {owner}, or make it read_only in both"
    else:
        text = f"{claim.value}: is in use by {owner}, as its {claim.kind}"
        hint = f"brine instance stop {owner}, or define one of both with another"
    raise InstanceError(spec.name, text, hint=hint)
