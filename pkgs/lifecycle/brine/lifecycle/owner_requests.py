"""The requests of owners: the file by which one asks that its instance ends.

It stands in the owner's folder until the instance has ended; that it goes is the answer. A request
about a run that has ended already is dropped.
"""

from __future__ import annotations

import contextlib
import os
import time

from brine.instance import owner
from brine.instance.owner import PID, TERMINATE, OwnersFile
from brine.lifecycle import messages
from brine.lifecycle.executor_client import ExecutorClient
from brine.lifecycle.owner_watch import EndReason, OwnerWatch, is_other_run
from brine.vm.run import Run

_REQUEST_S = 5.0  # between two requests of one owner: one that asks again and again costs little


class OwnerRequests:
    """The requests of all owners, and what becomes of them.

    :param executor: ends the instances.
    """

    def __init__(self, executor: ExecutorClient) -> None:
        self._executor = executor

    def note(
        self, owned: OwnerWatch, watchdog: OwnersFile | None, request: OwnersFile | None
    ) -> None:
        """Act on an owner's request that the instance ends, if it is a new one."""
        known, owned.request = owned.request, request
        if request is None or request == known:
            return
        if request.fault:
            messages.tell_fault(owned, f"the request {request.fault}: it does not count")
            return
        if _is_about_other_run(owned.name):
            self._drop(owned)
            return
        owned.note_asking(watchdog)
        now_s = time.monotonic()
        wait_s = max(owned.next_request_s - now_s, 0.0)
        is_new = self._executor.ask(owned.name, EndReason.REQUEST, after_s=wait_s)
        if is_new or not wait_s:
            owned.next_request_s = now_s + wait_s + _REQUEST_S
            messages.tell_instance(messages.OWNER_REQUEST, owned.name)

    def ask_again(self, owned: OwnerWatch) -> None:
        """Act once more on a request that has had no answer."""
        if _is_about_other_run(owned.name):
            self._drop(owned)
        else:
            self._executor.ask(owned.name, EndReason.REQUEST)

    def confirm(self, owned: OwnerWatch) -> None:
        """Tell an owner that its instance has ended, as it has asked for."""
        if _remove(owned):
            owned.confirm(time.monotonic())
            messages.tell_instance(messages.CONFIRMED, owned.name)

    def _drop(self, owned: OwnerWatch) -> None:
        """Remove a request about a run that has ended already, and do nothing."""
        if _remove(owned):
            messages.tell_instance(messages.DROPPED, owned.name)


def is_open(owned: OwnerWatch) -> bool:
    """Whether an owner has asked for the end of its instance, in a way that counts."""
    return owned.request is not None and not owned.request.fault


def _remove(owned: OwnerWatch) -> bool:
    """Tell an owner that the instance that it has asked about is no more."""
    try:
        with owner.below(owner.folder_of(owned.name)) as folder:
            os.unlink(TERMINATE, dir_fd=folder)
    except FileNotFoundError:
        pass  # the owner has taken it back
    except OSError as error:  # of a read-only file system, for one
        messages.tell_fault(owned, f"can't confirm its end yet: {error.strerror}")
        return False
    owned.request = None
    return True


def _is_about_other_run(name: str) -> bool:
    """Whether an owner has asked for the end of another run than the present or last one. A run
    that begins is noted in ``pid`` first."""
    text = process = ""
    with contextlib.suppress(OSError), owner.below(owner.folder_of(name)) as folder:
        text, process = owner.read(folder, TERMINATE), owner.read(folder, PID)
    runs = [Run.last(name).id, *process.split()[2:3]]
    return all(is_other_run(text, run) for run in runs)
