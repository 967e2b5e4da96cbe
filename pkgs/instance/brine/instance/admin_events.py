"""What the cluster has to learn of what is wanted of instances: an event for each change of it."""

from __future__ import annotations

from collections.abc import Iterable

from brine.common import outbox
from brine.common.errors import BrineError
from brine.common.locks import LockedError
from brine.common.outbox import OutboxError
from brine.instance import store
from brine.instance.spec import Spec
from brine.instance.store import InstanceError, NoSpecError

ADMIN_STATE = "admin-state"
"""The kind of these events."""

_LOCK_S = 2.0


def put_event(wanted: Spec, *, only_after_another: bool = False) -> None:
    """Keep for the cluster what is wanted of an instance.

    :param only_after_another: if what was wanted before is still kept there.
    :raises brine.common.outbox.OutboxError: if it can't be kept.
    """
    if only_after_another and not any(one.instance == wanted.uuid for one in outbox.events()):
        return
    outbox.put(ADMIN_STATE, instance=wanted.uuid, name=wanted.name, data=_data_of(wanted))


def correct_events(specs: Iterable[Spec | InstanceError]) -> list[BrineError]:
    """Have the cluster hear what is so where it is about to hear otherwise. An event is kept before
    its spec is written, and who is killed in between may never do it again.

    To be called where users' wills have been noted, which may not be in their specs before.

    :param specs: of this node. They are read once more where something is done.
    :returns: what could not be done.
    """
    try:
        told = {one.instance: dict(one.data) for one in outbox.events() if one.kind == ADMIN_STATE}
    except OutboxError as error:
        return [error]
    failed: list[BrineError] = []
    for spec in specs if told else ():
        if isinstance(spec, InstanceError) or told.get(spec.uuid) in (None, _data_of(spec)):
            continue
        try:
            # Who is just changing it has told so first.
            with store.alone(spec.name, timeout_s=_LOCK_S):
                put_event(store.load(spec.name), only_after_another=True)
        except (LockedError, NoSpecError):
            continue  # somebody is working on it, or it is undefined by now
        except BrineError as error:
            failed.append(error)
    return failed


def _data_of(spec: Spec) -> dict[str, str]:
    return {"admin_state": spec.admin_state, "source": spec.admin_state_source}
