"""Stopping an instance of Xen's: as :mod:`brine.instance.stopping` does it with QEMU."""

from __future__ import annotations

from contextlib import suppress

from brine.common import marks
from brine.common.marks import Kind
from brine.instance import messages
from brine.instance.spec_files import InstanceError
from brine.instance.stopping import Ended, asked, said
from brine.instance.xen import started
from brine.instance.xen.guest import Guest

_HEARD_S = 30.0


def stop_domain(
    name: str,
    pid: int,
    run: str,
    *,
    timeout_s: float,
    uuid: str | None = None,
    force: bool,
    must_be_said: bool = True,
) -> bool:
    """Have an instance's domain end; False if its guest does not shut down in time, and may go on.

    :param pid: of the xl that waits for its end; 0 if there is none.
    :param run: which run of its unit it is.
    :param uuid: of the domain; None is that which was started last.
    :param force: destroy it then.
    :param must_be_said: as of :func:`brine.instance.stopping.end`.
    :raises BrineError: if that fails.
    """
    uuid = uuid or started.uuid_of(name)
    if uuid is None:
        raise InstanceError(name, "nobody knows the UUID of its domain")
    with Guest.of(name, uuid, pid) as guest:
        if not force:
            return shut_down(name, guest, run, timeout_s=timeout_s)
        end(name, guest, run, timeout_s=timeout_s, must_be_said=must_be_said)
    return True


def end(name: str, guest: Guest, run: str, *, timeout_s: float, must_be_said: bool = True) -> Ended:
    """Have an instance's guest shut down; if it does not in time, destroy its domain.

    :param must_be_said: as of :func:`brine.instance.stopping.end`.
    :raises InstanceError: if even that does not end it.
    :raises XlError: if Xen can't be asked.
    """
    with said(name, guest, run, must=must_be_said):
        if _asked(name, guest, timeout_s):
            return Ended.BY_ITSELF
        if guest.destroy():
            messages.tell_ended(name, timeout_s, "xl destroy")
            return Ended.BY_KILL
    raise InstanceError(name, "its domain does not end, not even by xl destroy")


def shut_down(name: str, guest: Guest, run: str, *, timeout_s: float) -> bool:
    """Have an instance's guest shut down; False if it does not in time, and still runs.

    :raises InstanceError: if nobody could say that it is the admin who wants it.
    :raises XlError: if Xen can't be asked.
    """
    with said(name, guest, run, must=True):
        if _asked(name, guest, timeout_s):
            return True
    # Its guest may still do what it was told to.
    with suppress(OSError):
        marks.write_mark(Kind.ASKED, name, run=run)
    return False


def _asked(name: str, guest: Guest, timeout_s: float) -> bool:
    return asked(name, guest, lambda _, left_s: guest.ask(min(left_s, _HEARD_S)), timeout_s)
