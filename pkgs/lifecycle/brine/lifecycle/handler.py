"""The handler: ends an instance whose owner asks for that, or is gone.

It runs as a user without privileges. inotify tells of requests at once; changes of watchdogs are
read in bulk, once a second. Source: "Virt-launcher Watchdog Timer Safeguard" in the design of the
coupling of VM lifecycles.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

from brine.common import paths
from brine.common.errors import BrineError
from brine.common.inotify import NAMES, TOUCHES, FolderWatches
from brine.common.journal import tell
from brine.common.message import Message
from brine.common.systemd import ServiceManager
from brine.instance import owner, store
from brine.instance.owner import PID, TERMINATE, WATCHDOG, OwnersFile
from brine.lifecycle import messages
from brine.lifecycle.executor_client import ExecutorClient, Outcome
from brine.lifecycle.owner_watch import PAUSE_S, EndReason, OwnerWatch, is_other_run
from brine.vm.run import Run
from brine.vm.spec import AdminState
from brine.vm.values import vm_name_fault

log = logging.getLogger(__name__)

_TICK_S = 1.0
_IDLE_S = 60.0
_UNKNOWN_GRACE_S = 2.0  # after the handler's start owners may be as late as it is
_LONGEST_GRACE_S = 30.0
_SPEC_S = 3.0  # an editor may have a spec be away for a moment
_CHECK_S = 5.0  # between two looks for what was missed
_JUMP_S = 1.0  # two clocks that differ by more have not gone alike
_AGAIN_S = 1.0  # before an instance that was started while it was ended is ended again
_REQUEST_S = 5.0  # between two requests of one owner: one that asks again and again costs little
_NOISE_S = 10.0  # so long a folder with too many events is looked at by the clock
_UNKNOWN_TIMEOUT_S = 60.0  # of an instance whose spec is damaged
_CLOCK_BYTES = 64
_SPECS, _MARKS, _FOLDERS = "/specs", "/marks", "/folders"
_SPEC, _START = ".json", ".start"


class Handler:
    """Everything that the handler does between its start and its end.

    :param service: systemd, which restarts it and shows its status.
    """

    def __init__(self, service: ServiceManager) -> None:
        self._service = service
        self._owned: dict[str, OwnerWatch] = {}
        self._names = FolderWatches(NAMES)
        self._touches = FolderWatches(TOUCHES)
        self._poll = select.poll()
        self._executor = ExecutorClient(self._poll)
        self._woken, self._waker = socket.socketpair()
        self._clock_file = service.runtime_dir / "clock" if service.runtime_dir else None
        self._not_before_s = 0.0
        self._noisy_until_s = self._checked_s = 0.0
        self._unwatched: set[str] = set()
        self._idle_since_s = time.monotonic()
        self._shown = ""
        self._ended = False

    def run(self, *, on_reload: Callable[[], object]) -> None:
        """Look after all owned instances, until told to end, or until there is none for a minute.

        :param on_reload: called on SIGHUP.
        :raises OSError: if the executor can't be reached for long: systemd then starts both anew.
        """
        self._take_signals()
        self._begin()
        self._expire(time.monotonic())
        self._executor.send_due(self._is_obsolete)
        self._note_work()
        self._service.ready(self._status())
        next_tick_s = time.monotonic() + _TICK_S
        while not self._ended:
            left_s = max(next_tick_s - time.monotonic(), 0)
            ready = {descriptor for descriptor, _ in self._poll.poll(left_s * 1000)}
            if self._woken.fileno() in ready:
                self._act_on_signals(on_reload)
            if self._names.descriptor in ready:
                self._act_on_names()
            if self._executor.descriptor in ready:
                self._act_on_answer()
            now_s = time.monotonic()
            if now_s >= next_tick_s:
                if now_s - next_tick_s > PAUSE_S:
                    self._renew_all(now_s)
                self._tick(now_s)
                next_tick_s = now_s + _TICK_S
            self._executor.send_due(self._is_obsolete)
        self._service.stopping()

    # Signals.

    def _take_signals(self) -> None:
        for one in (self._woken, self._waker):
            one.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        self._poll.register(self._woken, select.POLLIN)
        self._poll.register(self._names.descriptor, select.POLLIN)

    def _act_on_signals(self, on_reload: Callable[[], object]) -> None:
        for number in self._woken.recv(100):
            if number == signal.SIGHUP:
                self._service.reloading()
                on_reload()
                self._service.ready(self._status())
            else:
                self._ended = True

    # What is there.

    def _begin(self) -> None:
        """Watch all folders, and take over what earlier owners have left."""
        now_s = time.monotonic()
        absent_s, not_before_s = self._read_clock()
        goes_on = absent_s is not None
        # If the handler was away for long, its owners may have been, too. Otherwise the time of a
        # watchdog's change tells what happened meanwhile.
        late_s = _UNKNOWN_GRACE_S if absent_s is None else absent_s if absent_s > PAUSE_S else 0.0
        not_before_s = max(not_before_s, now_s + late_s)
        self._not_before_s = min(not_before_s, now_s + _LONGEST_GRACE_S)
        self._watch_places()
        for name in self._all_names():
            self._add(name, goes_on=goes_on)
            owned = self._owned.get(name)
            if owned and owned.is_gone and not owned.has_spec:
                self._executor.ask(name, EndReason.SPEC_GONE)  # it was undefined meanwhile

    def _watch_places(self) -> bool:
        """Watch the folders of all instances; returns whether one of them is new."""
        found = False
        places = {_SPECS: paths.SPECS_DIR, _MARKS: paths.MARKS_DIR, _FOLDERS: paths.LIFECYCLE_DIR}
        for key, folder in places.items():
            if not self._names.watches(key) and self._names.add(key, folder, may_be_noisy=True):
                found = True
        return found

    def _all_names(self) -> set[str]:
        """The instances with a folder, or with a spec that has an owner."""
        found = _folders()
        with contextlib.suppress(BrineError):
            # A spec is read again when its instance is added, so one with a folder is not here.
            found |= {one for one in store.names() if one not in found and self._reads_owner(one)}
        return found

    def _reads_owner(self, name: str) -> bool:
        try:
            return store.load(name).owner is not None
        except BrineError:
            return False

    def _add(self, name: str, *, goes_on: bool = False) -> None:
        """Look after an instance.

        :param goes_on: whether its watchdog is as old as it says.
        """
        owned = self._owned[name] = OwnerWatch(name, _UNKNOWN_TIMEOUT_S)
        self._watch(name)
        now_s = time.monotonic()
        watchdog, request = self._find(owned)
        if goes_on:
            owned.take_over(watchdog, now_s, time.time())
        else:
            owned.observe(watchdog, now_s, time.time())
        if watchdog and owned.fault:
            self._tell_fault(owned, f"{owned.fault}: it does not count")
        if owner.runs(name):
            owned.begin(now_s)
        self._read_spec(owned)
        if name not in self._owned:
            return
        if owned.is_up:
            owned.begin(now_s)  # a domain of Xen's may run without a process
        if owned.restarts and not owned.is_gone:
            self._executor.ask(name, None)
        self._note_request(owned, watchdog, request)

    def _watch(self, name: str) -> None:
        folder = owner.folder_of(name)
        uid = _user_of(folder)
        if uid is None:
            self._unwatched.discard(name)
        elif uid != os.geteuid():
            # It is root's until its file system is mounted, and inotify does not tell of mounts.
            self._unwatched.add(name)
        elif self._names.add(name, folder) and self._touches.add(name, folder):
            self._unwatched.discard(name)
        else:
            if name not in self._unwatched:
                log.warning("%s can't be watched: it is looked at each second", folder)
            self._unwatched.add(name)

    def _read_spec(self, owned: OwnerWatch, *, is_new_run: bool = False) -> None:
        """Read what the spec says of the owner. A damaged one changes nothing."""
        was_read = owned.has_spec
        try:
            spec = store.load(owned.name)
        except store.NoSpecError:
            # An owner may be there before its instance is defined.
            if paths.SPECS_DIR.is_dir() and (owned.has_spec or owner.runs(owned.name)):
                self._executor.ask(owned.name, EndReason.SPEC_GONE, after_s=_SPEC_S)
                owned.has_spec = False
            return
        except BrineError as error:
            owned.has_spec = True
            self._tell(messages.FAULT, owned.name, f"its spec can't be used: {error}")
            return
        owned.has_spec = True
        self._executor.call_off(owned.name, EndReason.SPEC_GONE)
        if spec.owner is None:
            self._forget(owned.name)
            return
        timeout_s = spec.owner.watchdog_timeout
        # The owner of a running instance goes by the timeout of its start.
        if is_new_run or not was_read or timeout_s > owned.timeout_s or not owner.runs(owned.name):
            owned.timeout_s = timeout_s
        owned.restarts = spec.owner.restart_with_owner
        owned.is_up = spec.admin_state == AdminState.UP

    def _forget(self, name: str) -> None:
        self._owned.pop(name, None)
        self._names.remove(name)
        self._touches.remove(name)
        self._unwatched.discard(name)

    def _find(self, owned: OwnerWatch) -> tuple[OwnersFile | None, OwnersFile | None]:
        """The watchdog and the request of an owner, if they are there."""
        try:
            with owner.below(owner.folder_of(owned.name)) as folder:
                return owner.find(folder, WATCHDOG), owner.find(folder, TERMINATE)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._tell_fault(owned, f"its folder can't be used: {error.strerror}")
        return None, None

    # What happens.

    def _act_on_names(self) -> None:
        """Act on names that came or went."""
        for key, name in self._names.happened():
            if key == _SPECS and name.endswith(_SPEC):
                self._spec_changed(name.removesuffix(_SPEC))
            elif key == _MARKS and name.endswith(_START):
                if owned := self._owned.get(name.removesuffix(_START)):
                    self._look(owned)
                    self._read_spec(owned, is_new_run=True)
                    owned.begin(time.monotonic())
            elif key == _FOLDERS:
                self._folder_changed(name)
            elif owned := self._owned.get(key):
                if not name:  # it was removed or unmounted, and may be there anew
                    owned.forget_inodes()
                    self._watch(key)
                self._look(owned)
        if self._names.has_overflowed:
            self._names.has_overflowed = False
            self._look_at_all()

    def _spec_changed(self, name: str) -> None:
        if vm_name_fault(name):
            return
        if owned := self._owned.get(name):
            self._read_spec(owned)
        elif self._reads_owner(name):
            self._add(name)

    def _folder_changed(self, name: str) -> None:
        if vm_name_fault(name):
            return
        if owned := self._owned.get(name):
            owned.forget_inodes()
            self._watch(name)
            self._look(owned)
        elif owner.folder_of(name).is_dir():
            self._add(name)

    def _look_at_all(self) -> None:
        for name in self._all_names() - self._owned.keys():
            self._add(name)
        for owned in list(self._owned.values()):
            self._watch(owned.name)
            self._read_spec(owned)
            self._look(owned)
        self._find_missed()

    def _find_missed(self) -> None:
        """Look after instances whose start was not seen, and after requests without an answer."""
        asked = self._executor.names
        for owned in self._owned.values():
            if owned.name in asked:
                continue
            if owned.request and not owned.request.fault:
                if _is_about_other_run(owned.name):
                    self._drop_request(owned)
                else:
                    self._executor.ask(owned.name, EndReason.REQUEST)
            elif owned.is_gone and owner.runs(owned.name):
                owned.begin(time.monotonic())

    def _look(self, owned: OwnerWatch) -> None:
        """Look at the files of an owner."""
        watchdog, request = self._find(owned)
        self._note_watchdog(owned, watchdog, time.monotonic(), time.time())
        self._note_request(owned, watchdog, request)

    def _note_touch(self, owned: OwnerWatch, now_s: float, wall_s: float) -> None:
        """Look at a watchdog that was touched, which happens often."""
        try:
            watchdog = owner.found_at(f"{paths.LIFECYCLE_DIR}/{owned.name}/{WATCHDOG}")
        except OSError:
            return
        self._note_watchdog(owned, watchdog, now_s, wall_s)

    def _note_watchdog(
        self, owned: OwnerWatch, watchdog: OwnersFile | None, now_s: float, wall_s: float
    ) -> None:
        if owned.observe(watchdog, now_s, wall_s):
            self._tell(messages.OWNER_THERE, owned.name)
            self._executor.call_off(owned.name, EndReason.GONE)
            if owned.restarts:
                self._executor.ask(owned.name, None)
        if watchdog and owned.fault:
            self._tell_fault(owned, f"{owned.fault}: it does not count")

    def _note_request(
        self, owned: OwnerWatch, watchdog: OwnersFile | None, request: OwnersFile | None
    ) -> None:
        """Act on an owner's request that the instance ends, if it is a new one."""
        known, owned.request = owned.request, request
        if request is None or request == known:
            return
        if request.fault:
            self._tell_fault(owned, f"the request {request.fault}: it does not count")
            return
        if _is_about_other_run(owned.name):
            self._drop_request(owned)
            return
        owned.note_asking(watchdog)
        now_s = time.monotonic()
        wait_s = max(owned.next_request_s - now_s, 0.0)
        is_new = self._executor.ask(owned.name, EndReason.REQUEST, after_s=wait_s)
        if is_new or not wait_s:
            owned.next_request_s = now_s + wait_s + _REQUEST_S
            self._tell(messages.OWNER_REQUEST, owned.name)

    # The clock.

    def _tick(self, now_s: float) -> None:
        self._service.alive()
        if self._watch_places():
            self._look_at_all()
        self._read_touches(now_s)
        if now_s >= self._checked_s + _CHECK_S:
            self._checked_s = now_s
            self._find_missed()
        self._expire(now_s)
        self._note_work()
        if self._owned or self._executor.names:
            self._idle_since_s = now_s
        elif self._clock_file and now_s - self._idle_since_s > _IDLE_S and not _is_any_there():
            self._ended = True  # its path unit starts it again
        self._show_status()

    def _read_touches(self, now_s: float) -> None:
        """Look at the watchdogs that were changed in the last second."""
        changed = {key for key, _ in self._touches.happened()}
        if self._touches.has_overflowed:
            self._touches.has_overflowed = False
            changed.update(self._owned)
        noisy = self._names.noisy | self._touches.noisy | self._unwatched
        self._names.counts.clear()
        self._touches.counts.clear()
        wall_s = time.time()
        for name in changed - noisy:
            if owned := self._owned.get(name):
                self._note_touch(owned, now_s, wall_s)
        to_watch = set(self._unwatched)
        if noisy and now_s >= self._noisy_until_s:
            self._noisy_until_s = now_s + _NOISE_S
            to_watch = noisy
        for name in to_watch & self._owned.keys():
            self._watch(name)
        for name in noisy:
            if owned := self._owned.get(name):
                self._look(owned)

    def _expire(self, now_s: float) -> None:
        if now_s < self._not_before_s:
            return
        for owned in list(self._owned.values()):
            expires_s = owned.expires_s()
            if expires_s is None or now_s < expires_s:
                continue
            self._watch(owned.name)
            self._look(owned)  # an event may have been lost
            if _is_read_only(owner.folder_of(owned.name)):
                owned.renew(now_s)
            if owned.note_if_gone(now_s):
                if owner.runs(owned.name):
                    reason = owned.fault or f"its watchdog is unchanged for {owned.timeout_s:g} s"
                    self._tell(messages.OWNER_GONE, owned.name, reason)
                self._executor.ask(owned.name, EndReason.GONE)

    def _renew_all(self, now_s: float) -> None:
        """Start all expiries anew: this process did not run for a while."""
        log.info("the handler did not run for a while: all watchdogs have their time again")
        for owned in self._owned.values():
            owned.renew(now_s)

    def _note_work(self) -> None:
        """Note both clocks, and when this handler may end the first instance. The fence sees by it
        that the handler works, which one that dies at each start does not."""
        if self._clock_file and not self._executor.is_lost:
            text = f"{time.monotonic():.3f} {time.time():.3f} {self._not_before_s:.3f}"
            with contextlib.suppress(OSError):
                self._clock_file.touch()
                with self._clock_file.open("r+b", buffering=0) as clock:
                    # In place, which needs no room.
                    clock.write(text.ljust(_CLOCK_BYTES - 1).encode() + b"\n")

    def _read_clock(self) -> tuple[float | None, float]:
        """For how long no handler was there, and when the last one might have ended the first
        instance. None and 0 if that is not known, or the wall clock has not gone as the monotonic
        one meanwhile."""
        with contextlib.suppress(OSError, ValueError):
            if self._clock_file:
                monotonic_s, wall_s, not_before_s = map(float, self._clock_file.read_text().split())
                absent_s = time.monotonic() - monotonic_s
                if absent_s >= 0 and abs(time.time() - wall_s - absent_s) < _JUMP_S:
                    return absent_s, not_before_s
        return None, 0.0

    # The executor.

    def _is_obsolete(self, name: str, cause: EndReason | None) -> bool:
        """Whether the reason for a request is no more."""
        owned = self._owned.get(name)
        if owned is None:
            return True
        if cause is EndReason.GONE:
            return not owned.is_gone
        if cause is EndReason.REQUEST:
            return owned.request is None
        return cause is None and (owned.is_gone or not owned.restarts)

    def _act_on_answer(self) -> None:
        answer = self._executor.answer()
        if answer is None:
            return
        name, cause = answer.name, answer.cause
        is_done = answer.outcome is Outcome.DONE
        if answer.outcome is Outcome.FAILED:
            if cause:
                self._tell(messages.NOT_ENDED, name, answer.text)
        elif cause is None:
            if is_done:
                self._tell(messages.OWNER_BACK, name)
        else:
            if is_done and cause is EndReason.SPEC_GONE:
                self._tell(messages.SPEC_GONE, name)
            if owned := self._owned.get(name):
                self._has_ended(owned, cause)

    def _has_ended(self, owned: OwnerWatch, cause: EndReason) -> None:
        """Confirm what its owner has asked for, and forget an instance without a spec."""
        if owned.request and not owned.request.fault:
            if owner.runs(owned.name):
                # It was started meanwhile.
                self._executor.ask(owned.name, EndReason.REQUEST, after_s=_AGAIN_S)
            elif self._remove_request(owned):
                owned.confirm(time.monotonic())
                self._tell(messages.CONFIRMED, owned.name)
        elif owned.is_gone and owner.runs(owned.name):
            # It was started meanwhile, for an owner that has gone since.
            self._executor.ask(owned.name, EndReason.GONE, after_s=_AGAIN_S)
        elif owned.restarts and not owned.is_gone:
            self._executor.ask(owned.name, None)  # its owner has come back meanwhile
        if cause is not EndReason.REQUEST and not owned.has_spec:
            self._forget(owned.name)

    def _drop_request(self, owned: OwnerWatch) -> None:
        """Remove a request about a run that has ended already, and do nothing."""
        if self._remove_request(owned):
            self._tell(messages.DROPPED, owned.name)

    def _remove_request(self, owned: OwnerWatch) -> bool:
        """Tell an owner that the instance that it has asked about is no more."""
        try:
            with owner.below(owner.folder_of(owned.name)) as folder:
                os.unlink(TERMINATE, dir_fd=folder)
        except FileNotFoundError:
            pass  # the owner has taken it back
        except OSError as error:  # of a read-only file system, for one
            self._tell_fault(owned, f"can't confirm its end yet: {error.strerror}")
            return False
        owned.request = None
        return True

    # What people see.

    def _tell(self, message: Message, name: str, reason: str | None = None) -> None:
        fields = {} if reason is None else {"BRINE_REASON": reason}
        tell(log, message, message.text.format(reason=reason), instance=name, **fields)

    def _tell_fault(self, owned: OwnerWatch, reason: str) -> None:
        """Tell the fault of an owner's files, which may be read each second."""
        if owned.is_to_tell(reason, time.monotonic()):
            self._tell(messages.FAULT, owned.name, reason)

    def _show_status(self) -> None:
        if (status := self._status()) != self._shown:
            self._shown = status
            self._service.status(status)

    def _status(self) -> str:
        there = sum(not owned.is_gone for owned in self._owned.values())
        text = f"{len(self._owned)} instances with an owner, {there} owners are there"
        ends = self._executor.ends
        return f"{text}; {ends} are being ended" if ends else text


def _folders() -> set[str]:
    with contextlib.suppress(OSError), os.scandir(paths.LIFECYCLE_DIR) as entries:
        return {
            entry.name
            for entry in entries
            if entry.is_dir(follow_symlinks=False) and not vm_name_fault(entry.name)
        }
    return set()


def _is_about_other_run(name: str) -> bool:
    """Whether an owner has asked for the end of another run than the present or last one. A run
    that begins is noted in ``pid`` first."""
    text = process = ""
    with contextlib.suppress(OSError), owner.below(owner.folder_of(name)) as folder:
        text, process = owner.read(folder, TERMINATE), owner.read(folder, PID)
    runs = [Run.last(name).id, *process.split()[2:3]]
    return all(is_other_run(text, run) for run in runs)


def _is_any_there() -> bool:
    """Whether any folder is there, for which the path unit would start the handler again."""
    with contextlib.suppress(OSError):
        return bool(os.listdir(paths.LIFECYCLE_DIR))
    return False


def _user_of(folder: Path) -> int | None:
    """Whose a folder is; None if there is none."""
    with contextlib.suppress(OSError):
        found = os.stat(folder, follow_symlinks=False)
        return found.st_uid if stat.S_ISDIR(found.st_mode) else None
    return None


def _is_read_only(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
    return False
