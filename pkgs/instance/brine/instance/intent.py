"""The admin state of an instance: changing it in the spec, and the events for the cluster."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from brine.common import outbox, paths
from brine.common.errors import BrineError
from brine.common.locks import LockedError
from brine.instance import store
from brine.instance.observe import Observed, Oper, look
from brine.instance.store import InstanceError, NoSpecError
from brine.vm import markers
from brine.vm.files import InstanceFiles
from brine.vm.markers import MarkerKind, clear_way
from brine.vm.spec import AdminState, Source, Spec

ADMIN_STATE = "admin-state"
"""The kind of the events."""

_LOCK_S = 2.0


def want(spec: Spec, admin_state: AdminState, by: Source = Source.ADMIN) -> bool:
    """Set the admin_state of an instance; returns whether it changed.

    The caller holds the instance's lock. An instance that is offline stays offline.

    :raises BrineError: if it is offline and should be up, or its spec can't be written.
    """
    if by is Source.OWNER and admin_state == spec.admin_state == AdminState.DOWN:
        return False  # it stays as its admin or its user wanted it
    if admin_state is AdminState.DOWN:
        with suppress(OSError):  # then it is the user's and the admin's will that it is down
            forget_user_shutdown(spec.name)
        with suppress(OSError):
            markers.remove_marker(MarkerKind.REBOOT, spec.name)
    wanted = replace(spec, admin_state=admin_state.value, admin_state_source=by.value)
    if spec.admin_state == AdminState.OFFLINE:
        if admin_state is AdminState.DOWN:
            return False  # it is more than that
        raise offline(spec.name)
    # Also if nothing changes: a killed command may have told the cluster otherwise.
    tell_cluster(spec, wanted)
    if wanted != spec:
        store.save(wanted)
    return spec.admin_state != admin_state


def forget_user_shutdown(name: str) -> None:
    markers.remove_marker(MarkerKind.SHUTDOWN, name)
    clear_way(InstanceFiles(name).shutdown)


def tell_cluster(before: Spec, after: Spec) -> None:
    """Tell the cluster that the user no longer keeps an instance down, if it may believe so."""
    if before.is_down_by_user() or any_events():
        put_event(after, only_after_another=not before.is_down_by_user())


def put_event(wanted: Spec, *, only_after_another: bool = False) -> None:
    """Keep an event for the cluster with the admin_state of an instance; or only if an earlier one
    of the instance is not acknowledged yet."""
    if only_after_another and not any(one.instance == wanted.uuid for one in outbox.events()):
        return
    outbox.put(ADMIN_STATE, instance=wanted.uuid, name=wanted.name, data=_data_of(wanted))


def correct_events(specs: Iterable[Spec | InstanceError]) -> list[BrineError]:
    """Correct events that differ from the specs; returns the errors.

    An event is kept before its spec is written, and a command that is killed in between may never
    be repeated. Call this when users' shutdowns are noted in the specs.
    """
    try:
        told = {one.instance: dict(one.data) for one in outbox.events() if one.kind == ADMIN_STATE}
    except outbox.OutboxError as error:
        return [error]
    failed: list[BrineError] = []
    for spec in specs if told else ():
        if isinstance(spec, InstanceError) or told.get(spec.uuid) in (None, _data_of(spec)):
            continue
        try:
            # A command that is just changing it has kept an event first.
            with store.alone(spec.name, timeout_s=_LOCK_S):
                put_event(store.load(spec.name), only_after_another=True)
        except (LockedError, NoSpecError):
            continue  # another command works on it, or it is undefined by now
        except BrineError as error:
            failed.append(error)
    return failed


def _data_of(spec: Spec) -> dict[str, str]:
    # The cluster knows of no owners.
    is_user = spec.admin_state_source == Source.USER
    source = Source.USER if is_user else Source.ADMIN
    return {"admin_state": spec.admin_state, "source": source.value}


def offline(name: str) -> InstanceError:
    """The error of an instance that must not be started."""
    hint = 'define it with "admin_state": "down", if it may run again'
    return InstanceError(name, "is offline", hint=hint)


# The intent of an instance's user, who has shut it down.

RESTART = "restart"
"""The value of user_shutdown of an instance that starts again."""


def stays_off(seen: Observed) -> bool:
    """Whether an instance stays down by its user's will, and that is not completely noted yet."""
    spec = seen.spec
    should_run = spec.admin_state == AdminState.UP and spec.user_shutdown != RESTART
    is_half_noted = spec.is_down_by_user() and seen.run.was_shut_down()
    return seen.state.oper is Oper.USER_SHUTDOWN and (should_run or is_half_noted)


def keep_users_will(name: str, *, is_told: bool = False) -> bool:
    """Set an instance that its user has shut down to ``down``, by the user; False if none is due.

    The caller holds the instance's lock. If it fails, nothing is lost, and it can be repeated.

    :param is_told: whether another source than a marker shows the user's shutdown.
    """
    seen = look(name)
    if not (stays_off(seen) or (is_told and seen.state.oper is Oper.DOWN)):
        return False
    down, user = AdminState.DOWN.value, Source.USER.value
    wanted = replace(seen.spec, admin_state=down, admin_state_source=user)
    try:
        try:
            # The event comes first: after a kill in between, both are repeated, and it is not kept
            # twice.
            put_event(wanted)
        except BrineError:
            # Otherwise no later pass would tell it.
            markers.write_marker(MarkerKind.SHUTDOWN, name, run=seen.run.id)
            raise
        finally:
            # Even if the cluster does not learn of it, the instance stays down on this node.
            store.save(wanted)
        forget_user_shutdown(name)
    except OSError as error:
        text = f"{error.filename}: can't be changed: {error.strerror}"
        raise InstanceError(name, text) from error
    return True


def any_events() -> bool:
    """Whether there may be events that are not acknowledged."""
    try:
        with os.scandir(paths.OUTBOX_DIR) as entries:
            return any(entry.name.endswith(".json") for entry in entries)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # reading them then says why that fails
