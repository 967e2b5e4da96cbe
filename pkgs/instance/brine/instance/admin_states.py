"""What an admin wants of an instance, written into its spec."""

from __future__ import annotations

from dataclasses import replace

from brine.instance import spec_files
from brine.instance.spec import AdminState, Source, Spec
from brine.instance.spec_files import InstanceError


def want(spec: Spec, admin_state: AdminState) -> bool:
    """Have an instance be wanted up, or down; returns whether it was not. The caller is alone with
    its spec.

    :raises BrineError: if it is offline and is to be up, or that can't be written.
    """
    wanted = replace(spec, admin_state=admin_state.value, admin_state_source=Source.ADMIN.value)
    if spec.admin_state == AdminState.OFFLINE:
        if admin_state is AdminState.DOWN:
            return False  # it is more than that
        raise offline(spec.name)
    if wanted != spec:
        tell_cluster(spec, wanted)
        spec_files.save(wanted)
    return spec.admin_state != admin_state


def tell_cluster(before: Spec, after: Spec) -> None:
    """Have the cluster learn that it is no more the user who keeps an instance down: it may have
    heard so, or be about to.

    :raises brine.common.outbox.OutboxError: if that can't be kept.
    """
    if before.is_down_by_user() and not after.is_down_by_user():
        from brine.instance.user_shutdown import put_event  # rarely so

        put_event(after)


def offline(name: str) -> InstanceError:
    """What to tell of an instance that must not be started."""
    hint = 'define it with "admin_state": "down", if it may run again'
    return InstanceError(name, "is offline", hint=hint)
