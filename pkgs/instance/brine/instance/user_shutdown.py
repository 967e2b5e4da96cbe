"""An instance that its user has shut down stays off for good: in its spec, and for the cluster.

What says so at first is a file in ``/run``, which is gone after a reboot. Source: "Implementation"
in the design of the detection of user shutdown.
"""

from __future__ import annotations

from dataclasses import replace

from brine.common import outbox
from brine.common.errors import BrineError
from brine.instance import spec_files
from brine.instance.control import control_of
from brine.instance.marks import make_mark, remove_mark
from brine.instance.spec import AdminState, Source, Spec
from brine.instance.state import Oper
from brine.instance.states import Seen, look

ADMIN_STATE = "admin-state"
"""The kind of the event that the cluster gets."""

_RESTART = "restart"


def stays_off(seen: Seen) -> bool:
    """Whether its user has shut down an instance that stays so, and not all know of it yet."""
    spec = seen.spec
    should_run = spec.admin_state == AdminState.UP and spec.user_shutdown != _RESTART
    return seen.state.oper is Oper.USER_SHUTDOWN and (should_run or spec.is_down_by_user())


def keep_users_will(name: str, *, is_told: bool = False) -> bool:
    """Have an instance that its user has shut down be ``down`` for good, by the user; returns
    whether it was to be. The caller is alone with its spec.

    :param is_told: whether somebody else knows that its user did, where no mark says so.
    :raises BrineError: if that can't be written. Nothing is lost: it can be done again.
    """
    seen = look(name)
    if not (stays_off(seen) or (is_told and seen.state.oper is Oper.DOWN)):
        return False
    state, source = AdminState.DOWN.value, Source.USER.value
    wanted = replace(seen.spec, admin_state=state, admin_state_source=source)
    try:
        # First, so that whoever is killed in between does both again; it is not kept twice.
        put_event(wanted)
    except BrineError:
        if is_told:
            make_mark(control_of(name).shutdown)  # as nobody tells it again
        raise
    finally:
        # Whatever the cluster gets to know: on this node it stays off.
        spec_files.save(wanted)
    remove_mark(control_of(name).shutdown)
    return True


def put_event(wanted: Spec, *, only_after_another: bool = False) -> None:
    """Keep for the cluster what is wanted of an instance.

    :param only_after_another: if what was wanted before is still kept there.
    :raises brine.common.outbox.OutboxError: if it can't be kept.
    """
    if only_after_another and not any(one.instance == wanted.uuid for one in outbox.events()):
        return
    data = {"admin_state": wanted.admin_state, "source": wanted.admin_state_source}
    outbox.put(ADMIN_STATE, instance=wanted.uuid, name=wanted.name, data=data)
