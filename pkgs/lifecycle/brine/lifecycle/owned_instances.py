"""The owned instances: who watches over each, as the files of its owner and its spec show it."""

from __future__ import annotations

import contextlib
import logging
import time

from brine.common import paths
from brine.common.errors import BrineError
from brine.instance import owner, store
from brine.instance.owner import TERMINATE, WATCHDOG, OwnersFile
from brine.lifecycle import messages
from brine.lifecycle.executor_client import ExecutorClient
from brine.lifecycle.owner_folders import (
    FolderChange,
    OwnerFolders,
    is_read_only,
    names_with_folder,
)
from brine.lifecycle.owner_requests import OwnerRequests, is_open
from brine.lifecycle.owner_watch import EndReason, OwnerWatch
from brine.vm.spec import AdminState
from brine.vm.values import vm_name_fault

log = logging.getLogger(__name__)

_SPEC_S = 3.0  # an editor may have a spec be away for a moment
_AGAIN_S = 1.0  # before an instance that was started while it was ended is ended again
_UNKNOWN_TIMEOUT_S = 60.0  # of an instance whose spec is damaged


class OwnedInstances:
    """The instances with an owner, and what happens to them.

    :param executor: ends and starts them.
    """

    def __init__(self, executor: ExecutorClient) -> None:
        self._executor = executor
        self._requests = OwnerRequests(executor)
        self._folders = OwnerFolders()
        self._owned: dict[str, OwnerWatch] = {}

    def __len__(self) -> int:
        return len(self._owned)

    @property
    def descriptor(self) -> int:
        """Is readable when :meth:`act_on_names` has something to do."""
        return self._folders.descriptor

    def owners_there(self) -> int:
        """How many owners are there."""
        return sum(not owned.is_gone for owned in self._owned.values())

    def begin(self, *, goes_on: bool) -> None:
        """Watch all folders, and take over what earlier owners have left.

        :param goes_on: whether watchdogs are as old as they say.
        """
        self._folders.watch_places()
        for name in self._all_names():
            self._add(name, goes_on=goes_on)
            owned = self._owned.get(name)
            if owned and owned.is_gone and not owned.has_spec:
                self._executor.ask(name, EndReason.SPEC_GONE)  # it was undefined meanwhile

    # What is there.

    def _all_names(self) -> set[str]:
        """The instances with a folder, or with a spec that has an owner."""
        found = names_with_folder()
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
        self._folders.watch(name)
        now_s = time.monotonic()
        watchdog, request = self._find(owned)
        if goes_on:
            owned.take_over(watchdog, now_s, time.time())
        else:
            owned.observe(watchdog, now_s, time.time())
        if watchdog and owned.fault:
            messages.tell_fault(owned, f"{owned.fault}: it does not count")
        if owner.runs(name):
            owned.begin(now_s)
        self._read_spec(owned)
        if name not in self._owned:
            return
        if owned.is_up:
            owned.begin(now_s)  # a domain of Xen's may run without a process
        if owned.restarts and not owned.is_gone:
            self._executor.ask(name, None)
        self._requests.note(owned, watchdog, request)

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
            messages.tell_instance(messages.FAULT, owned.name, f"its spec can't be used: {error}")
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
        self._folders.unwatch(name)

    def _find(self, owned: OwnerWatch) -> tuple[OwnersFile | None, OwnersFile | None]:
        """The watchdog and the request of an owner, if they are there."""
        try:
            with owner.below(owner.folder_of(owned.name)) as folder:
                return owner.find_file(folder, WATCHDOG), owner.find_file(folder, TERMINATE)
        except FileNotFoundError:
            pass
        except OSError as error:
            messages.tell_fault(owned, f"its folder can't be used: {error.strerror}")
        return None, None

    # What happens.

    def act_on_names(self) -> None:
        """Act on names that came or went."""
        for change, name in self._folders.happened():
            if change is FolderChange.SPEC:
                self._spec_changed(name)
            elif change is FolderChange.FOLDER:
                self._folder_changed(name)
            elif change is FolderChange.ANY:
                self._look_at_all()
            elif owned := self._owned.get(name):
                self._files_changed(owned, change)

    def _files_changed(self, owned: OwnerWatch, change: FolderChange) -> None:
        if change is FolderChange.LOST:  # it may be there anew
            owned.forget_inodes()
            self._folders.watch(owned.name)
        self._look(owned)
        if change is FolderChange.START:
            self._read_spec(owned, is_new_run=True)
            owned.begin(time.monotonic())

    def look_for_places(self) -> None:
        """Watch the folders of all instances that were not there before."""
        if self._folders.watch_places():
            self._look_at_all()

    def read_touches(self, now_s: float) -> None:
        """Look at the watchdogs that were changed in the last second."""
        touched = self._folders.touched(self._owned.keys(), now_s)
        wall_s = time.time()
        for name in touched.changed:
            if owned := self._owned.get(name):
                self._note_touch(owned, now_s, wall_s)
        for name in touched.unknown:
            if owned := self._owned.get(name):
                self._look(owned)

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
            self._folders.watch(name)
            self._look(owned)
        elif owner.folder_of(name).is_dir():
            self._add(name)

    def _look_at_all(self) -> None:
        for name in self._all_names() - self._owned.keys():
            self._add(name)
        for owned in list(self._owned.values()):
            self._folders.watch(owned.name)
            self._read_spec(owned)
            self._look(owned)
        self.find_missed()

    def find_missed(self) -> None:
        """Look after instances whose start was not seen, and after requests without an answer."""
        asked = self._executor.names
        for owned in self._owned.values():
            if owned.name in asked:
                continue
            if is_open(owned):
                self._requests.ask_again(owned)
            elif owned.is_gone and owner.runs(owned.name):
                owned.begin(time.monotonic())

    def _look(self, owned: OwnerWatch) -> None:
        """Look at the files of an owner."""
        watchdog, request = self._find(owned)
        self._note_watchdog(owned, watchdog, time.monotonic(), time.time())
        self._requests.note(owned, watchdog, request)

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
            messages.tell_instance(messages.OWNER_THERE, owned.name)
            self._executor.call_off(owned.name, EndReason.GONE)
            if owned.restarts:
                self._executor.ask(owned.name, None)
        if watchdog and owned.fault:
            messages.tell_fault(owned, f"{owned.fault}: it does not count")

    def expire(self, now_s: float) -> None:
        """Have instances end whose owners are gone."""
        for owned in list(self._owned.values()):
            expires_s = owned.expires_s()
            if expires_s is None or now_s < expires_s:
                continue
            self._folders.watch(owned.name)
            self._look(owned)  # an event may have been lost
            if is_read_only(owned.name):
                owned.renew(now_s)
            if owned.note_if_gone(now_s):
                if owner.runs(owned.name):
                    reason = owned.fault or f"its watchdog is unchanged for {owned.timeout_s:g} s"
                    messages.tell_instance(messages.OWNER_GONE, owned.name, reason)
                self._executor.ask(owned.name, EndReason.GONE)

    def renew_all(self, now_s: float) -> None:
        """Start all expiries anew: this process did not run for a while."""
        log.info("the handler did not run for a while: all watchdogs have their time again")
        for owned in self._owned.values():
            owned.renew(now_s)

    # What the executor has done.

    def is_obsolete(self, name: str, cause: EndReason | None) -> bool:
        """Whether the reason for a request is no more."""
        owned = self._owned.get(name)
        if owned is None:
            return True
        if cause is EndReason.GONE:
            return not owned.is_gone
        if cause is EndReason.REQUEST:
            return owned.request is None
        return cause is None and (owned.is_gone or not owned.restarts)

    def note_end(self, name: str, cause: EndReason) -> None:
        """Confirm what its owner has asked for, and forget an instance without a spec."""
        owned = self._owned.get(name)
        if owned is None:
            return
        runs = owner.runs(name)
        if is_open(owned):
            if runs:  # it was started meanwhile
                self._executor.ask(name, EndReason.REQUEST, after_s=_AGAIN_S)
            else:
                self._requests.confirm(owned)
        elif owned.is_gone and runs:
            # It was started meanwhile, for an owner that has gone since.
            self._executor.ask(name, EndReason.GONE, after_s=_AGAIN_S)
        elif owned.restarts and not owned.is_gone:
            self._executor.ask(name, None)  # its owner has come back meanwhile
        if cause is not EndReason.REQUEST and not owned.has_spec:
            self._forget(name)
