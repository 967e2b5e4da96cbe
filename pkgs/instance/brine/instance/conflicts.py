"""What an instance would have that another has too: errors of definitions and of starts."""

from __future__ import annotations

from brine.instance.store import InstanceError
from brine.vm.conflicts import (
    NONE_PLANNED,
    IdentityKey,
    IdentityKeys,
    Planned,
    conflict_later,
    conflict_now,
)
from brine.vm.identities import Identity, IdentityKind, identities_of
from brine.vm.spec import AdminState, Spec, SpecError, to_json


def refuse_conflicts(
    spec: Spec,
    before: Spec | None,
    planned: Planned = NONE_PLANNED,
    keys: IdentityKeys | None = None,
) -> None:
    """Refuse a spec with a UUID, a MAC address or a disk that another instance has, too.

    :param before: the present spec: what it has already is not asked for again, unless the
        instance was offline.
    :param planned: specs that other instances would have.
    :raises SpecError: which one, and whose it is.
    """
    wanted, keys = list(identities_of(to_json(spec))), keys or IdentityKeys()
    _refuse_twice(wanted, keys)
    if before and before.admin_state != AdminState.OFFLINE:
        known = {(one.kind, one.value, one.read_only) for one in identities_of(to_json(before))}
        wanted = [one for one in wanted if (one.kind, one.value, one.read_only) not in known]
    if found := conflict_later(spec.name, wanted, planned, keys):
        hint = f"{found.hint}; or, if {spec.name} is its new name, "
        hint += f"brine instance rename {found.owner} {spec.name}"
        raise SpecError(str(found), where=found.wanted.where, hint=hint)


def _refuse_twice(wanted: list[Identity], keys: IdentityKeys) -> None:
    """Refuse a disk that a spec has twice, if it writes it."""
    disks = [one for one in wanted if one.kind is IdentityKind.DISK]
    if len(disks) < 2:
        return
    keys.ask(disks)
    known: dict[IdentityKey, list[Identity]] = {}
    for one in disks:
        others = known.setdefault(keys.of(one), [])
        for other in others:
            if not one.is_shared_with(other):
                text = f"{one.value} is another of its disks too, {other.value}"
                raise SpecError(text, where=one.where)
        others.append(one)


def refuse_in_use(spec: Spec, keys: IdentityKeys | None = None) -> None:
    """Refuse to start an instance with a UUID, a MAC address or a disk of another that runs.

    :raises InstanceError: which one, and whose it is.
    """
    if found := conflict_now(spec.name, identities_of(to_json(spec)), keys):
        raise InstanceError(spec.name, str(found), hint=found.hint)
