"""An instance that its user has shut down stays off for good: in its spec, and for the cluster.

What says so at first is a file in ``/run``, which is gone after a reboot. Source: "Implementation"
in the design of the detection of user shutdown.
"""

from __future__ import annotations

from dataclasses import replace

from brine.common import outbox
from brine.instance import spec_files
from brine.instance.control import control_of
from brine.instance.marks import remove_mark
from brine.instance.spec import AdminState, Source
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


def keep_users_will(name: str) -> bool:
    """Have an instance that its user has shut down be ``down`` for good, by the user; returns
    whether it was to be. The caller is alone with its spec.

    :raises BrineError: if that can't be written. Nothing is lost: it can be done again.
    """
    seen = look(name)
    if not stays_off(seen):
        return False
    spec = seen.spec
    state, source = AdminState.DOWN.value, Source.USER.value
    data = {"admin_state": state, "source": source}
    try:
        # First, so that whoever is killed in between does both again; it is not kept twice.
        outbox.put(ADMIN_STATE, instance=spec.uuid, name=name, data=data)
    finally:
        # Whatever the cluster gets to know: on this node it stays off.
        spec_files.save(replace(spec, admin_state=state, admin_state_source=source))
    remove_mark(control_of(name).shutdown)
    return True
