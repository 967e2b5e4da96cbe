"""What an instance would have that another has too: errors of definitions and of starts."""

from __future__ import annotations

from brine.instance.store import InstanceError
from brine.vm.claims import Claim, ClaimKind, claims_of
from brine.vm.conflicts import (
    NONE_PLANNED,
    Identities,
    Identity,
    Planned,
    conflict_later,
    conflict_now,
)
from brine.vm.spec import AdminState, Spec, SpecError, to_json


def refuse_conflicts(
    spec: Spec,
    before: Spec | None,
    planned: Planned = NONE_PLANNED,
    identities: Identities | None = None,
) -> None:
    """Refuse a spec that claims a UUID, a MAC address or a disk that another instance has, too.

    :param before: the present spec: what it claims already is not asked for again, unless the
        instance was offline.
    :param planned: specs that other instances would have.
    :raises SpecError: which claim, and whose it is.
    """
    wanted, identities = list(claims_of(to_json(spec))), identities or Identities()
    _refuse_twice(wanted, identities)
    if before and before.admin_state != AdminState.OFFLINE:
        known = {(one.kind, one.value, one.read_only) for one in claims_of(to_json(before))}
        wanted = [one for one in wanted if (one.kind, one.value, one.read_only) not in known]
    if found := conflict_later(spec.name, wanted, planned, identities):
        hint = f"{found.hint}; or, if {spec.name} is its new name, "
        hint += f"brine instance rename {found.owner} {spec.name}"
        raise SpecError(str(found), where=found.wanted.where, hint=hint)


def _refuse_twice(wanted: list[Claim], identities: Identities) -> None:
    """Refuse a disk that a spec has twice, if it writes it."""
    disks = [one for one in wanted if one.kind is ClaimKind.DISK]
    if len(disks) < 2:
        return
    identities.ask(disks)
    known: dict[Identity, list[Claim]] = {}
    for one in disks:
        others = known.setdefault(identities.of(one), [])
        for other in others:
            if not one.is_shared_with(other):
                text = f"{one.value} is another of its disks too, {other.value}"
                raise SpecError(text, where=one.where)
        others.append(one)


def refuse_in_use(spec: Spec, identities: Identities | None = None) -> None:
    """Refuse to start an instance with a UUID, a MAC address or a disk of another that runs.

    :raises InstanceError: which claim, and whose it is.
    """
    if found := conflict_now(spec.name, claims_of(to_json(spec)), identities):
        raise InstanceError(spec.name, str(found), hint=found.hint)
