"""Removing what is left of domains that have ended: it takes memory, which others may need.

Source: "Implementation" in the design of the detection of user shutdown: it is done before whatever
needs resources, and never by who only asks.
"""

from __future__ import annotations

from brine.common import marks
from brine.common.errors import BrineError
from brine.common.locks import LockedError
from brine.common.marks import Kind
from brine.instance import spec_files
from brine.instance.spec import AdminState, Spec
from brine.instance.spec_files import InstanceError
from brine.instance.state import Oper
from brine.instance.states import Seen, look
from brine.instance.user_shutdown import keep_users_will
from brine.instance.xen import xl

_LOCK_S = 2.0
_AT_REST = (Oper.DOWN, Oper.USER_SHUTDOWN)


def clean_up_ended(*, but: str | None) -> list[BrineError]:
    """Remove all ended domains of this node's instances; what their users wanted is noted first.

    :param but: the instance that it is done for, with which the caller is alone, if it is one.
    :returns: what could not be removed.
    :raises XlError: if Xen can't be asked.
    """
    ended = {domain.uuid for domain in xl.domains().domains if domain.has_ended()}
    if not ended:
        return []
    failed: list[BrineError] = []
    for spec in spec_files.load_all():
        if isinstance(spec, InstanceError) or spec.uuid not in ended or spec.name == but:
            continue
        try:
            _clean_up(spec)
        except LockedError:
            continue  # somebody is working on it
        except BrineError as error:
            failed.append(error)
    return failed


def _clean_up(spec: Spec) -> None:
    with spec_files.alone(spec.name, timeout_s=_LOCK_S):
        seen = look(spec.name)
        if is_left(seen):
            if keep_users_will(spec.name):
                seen = look(spec.name)
            remove(seen)


def forget_domain(name: str) -> None:
    """Remove what is left of an instance, whatever it says. The caller is alone with it.

    :raises BrineError: if Xen refuses.
    """
    seen = look(name)
    if seen.domain and is_left(seen):
        xl.destroy(seen.domain)


def is_left(seen: Seen) -> bool:
    """Whether an instance has ended, and its domain is still there, which nobody works on."""
    is_over = seen.domain is not None and seen.domain.is_over()
    return is_over and seen.state.oper in _AT_REST and not seen.is_being_stopped


def remove(seen: Seen) -> None:
    """Remove what is left of an instance. The caller is alone with it.

    :raises InstanceError: if it can't be noted how it ended; then all is left as it is.
    :raises XlError: if Xen refuses.
    """
    if seen.domain is None:
        return
    try:
        if seen.spec.admin_state == AdminState.UP:
            _note_end(seen)
    except OSError as error:
        text = f"it can't be noted how it has ended: {error.strerror}"
        raise InstanceError(seen.spec.name, text) from error
    xl.destroy(seen.domain)


def _note_end(seen: Seen) -> None:
    """Have what a domain says of its end not be lost with it. Where its xl was killed, nobody else
    has noted that."""
    name = seen.spec.name
    if seen.state.oper is Oper.USER_SHUTDOWN:
        marks.write_mark(Kind.SHUTDOWN, name, run=marks.last_run(name))
    elif not seen.was_stopped:
        # It is to run as if it never had; systemd may know no fault of it.
        marks.remove_mark(Kind.STARTED, name)
