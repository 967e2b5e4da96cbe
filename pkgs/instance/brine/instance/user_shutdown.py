"""Keeping an instance off for good that its user has shut down, in its spec and for the cluster.

What says so at first is a file in ``/run``, which is gone after a reboot. Source: "Implementation"
in the design of the detection of user shutdown.
"""

from __future__ import annotations

from dataclasses import replace

from brine.common import markers
from brine.common.errors import BrineError
from brine.common.markers import MarkerKind
from brine.instance import store
from brine.instance.files import forget_user_shutdown
from brine.instance.intent import put_event
from brine.instance.observe import look
from brine.instance.spec import AdminState, Source, Spec
from brine.instance.status import Observed, Oper
from brine.instance.store import InstanceError

RESTART = "restart"
"""The value of user_shutdown of an instance that starts again."""


def stays_off(seen: Observed) -> bool:
    """Whether its user has shut down an instance that stays so, and not all know of it yet."""
    spec = seen.spec
    should_run = spec.admin_state == AdminState.UP and spec.user_shutdown != RESTART
    is_half_noted = spec.is_down_by_user() and seen.has_user_marker
    return seen.state.oper is Oper.USER_SHUTDOWN and (should_run or is_half_noted)


def keep_users_will(name: str, *, is_told: bool = False) -> bool:
    """Have an instance that its user has shut down be ``down`` for good, by the user; returns
    whether it was to be. The caller is alone with its spec.

    :param is_told: whether somebody else knows that its user did, where no marker says so.
    :raises BrineError: if that can't be written. Nothing is lost: it can be done again.
    """
    seen = look(name)
    if not (stays_off(seen) or (is_told and seen.state.oper is Oper.DOWN)):
        return False
    try:
        _note(seen.spec, seen.run)
        forget_user_shutdown(name)
    except OSError as error:
        text = f"{error.filename}: can't be changed: {error.strerror}"
        raise InstanceError(name, text) from error
    return True


def _note(spec: Spec, run: str) -> None:
    state, source = AdminState.DOWN.value, Source.USER.value
    wanted = replace(spec, admin_state=state, admin_state_source=source)
    try:
        # First, so that whoever is killed in between does both again; it is not kept twice.
        put_event(wanted)
    except BrineError:
        markers.write_marker(
            MarkerKind.SHUTDOWN, spec.name, run=run
        )  # or nobody would tell it again
        raise
    finally:
        # Whatever the cluster gets to know: on this node it stays off.
        store.save(wanted)
