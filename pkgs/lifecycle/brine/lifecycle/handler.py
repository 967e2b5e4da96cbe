"""The handler: ends an instance whose owner asks for that, or is gone.

It runs as a user without privileges. inotify tells of requests at once; changes of watchdogs are
read in bulk, once a second. Source: "Virt-launcher Watchdog Timer Safeguard" in the design of the
coupling of VM lifecycles.
"""

from __future__ import annotations

import select
import signal
import socket
import time
from collections.abc import Callable

from brine.common.systemd import ServiceManager
from brine.lifecycle import messages
from brine.lifecycle.executor_client import ExecutorClient, Outcome
from brine.lifecycle.handler_clock import HandlerClock
from brine.lifecycle.owned_instances import OwnedInstances
from brine.lifecycle.owner_folders import is_any_there
from brine.lifecycle.owner_watch import PAUSE_S, EndReason

_TICK_S = 1.0
_IDLE_S = 60.0
_CHECK_S = 5.0  # between two looks for what was missed


class Handler:
    """The loop of the handler, between its start and its end.

    :param service: systemd, which restarts it and shows its status.
    """

    def __init__(self, service: ServiceManager) -> None:
        self._service = service
        self._poll = select.poll()
        self._executor = ExecutorClient(self._poll)
        self._owned = OwnedInstances(self._executor)
        self._woken, self._waker = socket.socketpair()
        self._clock = HandlerClock(service.runtime_dir / "clock" if service.runtime_dir else None)
        self._checked_s = 0.0
        self._idle_since_s = time.monotonic()
        self._shown = ""
        self._ended = False

    def run(self, *, on_reload: Callable[[], object]) -> None:
        """Look after all owned instances, until told to end, or until there is none for a minute.

        :param on_reload: called on SIGHUP.
        :raises OSError: if the executor can't be reached for long: systemd then starts both anew.
        """
        self._take_signals()
        self._owned.begin(goes_on=self._clock.goes_on)
        self._expire(time.monotonic())
        self._executor.send_due(self._owned.is_obsolete)
        self._note_work()
        self._service.ready(self._status())
        next_tick_s = time.monotonic() + _TICK_S
        while not self._ended:
            left_s = max(next_tick_s - time.monotonic(), 0)
            ready = {descriptor for descriptor, _ in self._poll.poll(left_s * 1000)}
            if self._woken.fileno() in ready:
                self._act_on_signals(on_reload)
            if self._owned.descriptor in ready:
                self._owned.act_on_names()
            if self._executor.descriptor in ready:
                self._act_on_answer()
            now_s = time.monotonic()
            if now_s >= next_tick_s:
                if now_s - next_tick_s > PAUSE_S:
                    self._owned.renew_all(now_s)
                self._tick(now_s)
                next_tick_s = now_s + _TICK_S
            self._executor.send_due(self._owned.is_obsolete)
        self._service.stopping()

    # Signals.

    def _take_signals(self) -> None:
        for one in (self._woken, self._waker):
            one.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        self._poll.register(self._woken, select.POLLIN)
        self._poll.register(self._owned.descriptor, select.POLLIN)

    def _act_on_signals(self, on_reload: Callable[[], object]) -> None:
        for number in self._woken.recv(100):
            if number == signal.SIGHUP:
                self._service.reloading()
                on_reload()
                self._service.ready(self._status())
            else:
                self._ended = True

    # The clock.

    def _tick(self, now_s: float) -> None:
        self._service.alive()
        self._owned.look_for_places()
        self._owned.read_touches(now_s)
        if now_s >= self._checked_s + _CHECK_S:
            self._checked_s = now_s
            self._owned.find_missed()
        self._expire(now_s)
        self._note_work()
        if self._owned or self._executor.names:
            self._idle_since_s = now_s
        elif self._clock.is_kept() and now_s - self._idle_since_s > _IDLE_S and not is_any_there():
            self._ended = True  # its path unit starts it again
        self._show_status()

    def _expire(self, now_s: float) -> None:
        if self._clock.may_end(now_s):
            self._owned.expire(now_s)

    def _note_work(self) -> None:
        if not self._executor.is_lost:
            self._clock.note()

    # The executor.

    def _act_on_answer(self) -> None:
        answer = self._executor.answer()
        if answer is None:
            return
        name, cause = answer.name, answer.cause
        is_done = answer.outcome is Outcome.DONE
        if answer.outcome is Outcome.FAILED:
            if cause:
                messages.tell_instance(messages.NOT_ENDED, name, answer.text)
        elif cause is None:
            if is_done:
                messages.tell_instance(messages.OWNER_BACK, name)
        else:
            if is_done and cause is EndReason.SPEC_GONE:
                messages.tell_instance(messages.SPEC_GONE, name)
            self._owned.note_end(name, cause)

    # What people see.

    def _show_status(self) -> None:
        if (status := self._status()) != self._shown:
            self._shown = status
            self._service.status(status)

    def _status(self) -> str:
        text = f"instances with an owner: {len(self._owned)}, "
        text += f"owners that are there: {self._owned.owners_there()}"
        ends = self._executor.ends
        return f"{text}; being ended: {ends}" if ends else text
