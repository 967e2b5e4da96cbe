"""Conflicts between the instances of a node: UUIDs and MAC addresses that two would have, and disks
that two would use while one writes.

Every command that gives an instance such a thing asks here first. It holds the lock of
:func:`identities_lock` from the check until a file shows what it has given: the instance's spec,
its runtime file, or the record of begun work. So two commands never give one thing to two
instances.

Storage may not answer, such as that of a dead NFS server. So :class:`IdentityKeys` asks for the
disks of all instances at once, for a limited time, and :func:`identities_lock` has it ask before
the lock.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import cached_property
from threading import Thread
from typing import Any, NamedTuple

from brine.common import paths
from brine.common.errors import BrineError
from brine.common.locks import node_lock
from brine.common.operation import pending
from brine.common.unix_socket import is_listening
from brine.vm.disk import as_plugged
from brine.vm.files import InstanceFiles
from brine.vm.identities import Identity, IdentityKind, identities_of, rows_in
from brine.vm.instances import specs_but, started_with
from brine.vm.markers import MarkerKind
from brine.vm.run import Run
from brine.vm.runtime_file import LastStart

STORAGE_TIMEOUT_S = 10.0
"""How long disks may take to show that they are there."""

_LOCK = "claims"
_LOCK_TIMEOUT_S = 60.0
_ROUNDS = 5
_PATIENCE_S = 0.5
_OFFLINE = "offline"

IdentityKey = tuple[int | str, ...]
"""The same for all names and spellings of one thing."""

Planned = Mapping[str, Mapping[str, Any]]
"""Specs of instances, as JSON by name, that a dry run takes for stored."""

NONE_PLANNED: Planned = {}


class _NewDiskError(BrineError):
    """A disk that was not asked for its identity before the lock was taken."""


class IdentityKeys:
    """The keys of identities. Each disk is asked once for the file or the device that it is."""

    def __init__(self) -> None:
        self._disks: dict[str, IdentityKey | None] = {}
        self._is_complete = False

    @contextlib.contextmanager
    def complete(self, is_complete: bool) -> Iterator[None]:
        """Ask no further disk for the time of the block: it raises :class:`_NewDiskError`."""
        self._is_complete = is_complete
        try:
            yield
        finally:
            self._is_complete = False

    def ask(self, identities: Iterable[Identity]) -> None:
        """Ask for those of several disks at once. Storage that does not answer has none."""
        disks = {
            one.value for one in identities if one.kind is IdentityKind.DISK
        } - self._disks.keys()
        if disks and self._is_complete:
            raise _NewDiskError(", ".join(sorted(disks)))
        self._disks |= _asked(disks)

    def of(self, identity: Identity) -> IdentityKey:
        if identity.kind is not IdentityKind.DISK:
            return (identity.kind.value, identity.value.lower())
        self.ask([identity])
        return self._disks[identity.value] or ("silent", identity.value)

    def refuse_silent(self, identities: Iterable[Identity]) -> None:
        """Refuse a disk whose storage does not answer.

        :raises BrineError: which one.
        """
        identities = list(identities)
        self.ask(identities)
        for one in identities:
            if one.kind is IdentityKind.DISK and self._disks[one.value] is None:
                text = f"{one.value}: its storage does not answer for {STORAGE_TIMEOUT_S:g} s"
                raise BrineError(text, hint="see whether its server and the network work")


def _asked(disks: Iterable[str]) -> dict[str, IdentityKey | None]:
    """The keys of disks; None if the storage of one does not answer. The process can end, and
    can become QEMU, while it waits for NFS (TASK_KILLABLE)."""
    found: dict[str, IdentityKey | None] = dict.fromkeys(disks)

    def ask(paths: list[str]) -> None:
        for path in paths:
            found[path] = _identity(path)

    def ask_in_threads(groups: list[list[str]], limit_s: float) -> None:
        threads = [Thread(target=ask, args=(group,), daemon=True) for group in groups]
        for one in threads:
            one.start()
        deadline = time.monotonic() + limit_s
        for one in threads:
            one.join(max(deadline - time.monotonic(), 0))

    if found:
        ask_in_threads([list(found)], _PATIENCE_S)
    if rest := [path for path, identity in found.items() if identity is None]:
        # One that is silent holds up those behind it.
        ask_in_threads([[path] for path in rest], STORAGE_TIMEOUT_S)
    return dict(found)


class Conflict(NamedTuple):
    """An identity of another instance that excludes a wanted one.

    :param owner: the name of the other instance.
    :param runs: whether it has that now; if not, its next start has it.
    """

    wanted: Identity
    there: Identity
    owner: str
    runs: bool

    def __str__(self) -> str:
        wanted, owner = self.wanted, self.owner
        if wanted.kind is not IdentityKind.DISK:
            text = f"{wanted.value} is the {wanted.kind} of {owner}"
        else:
            path = self.there.value
            name = f", as {path}" if path != wanted.value else ""
            text = f"{wanted.value} is also a disk of {owner}{name}"
        return f"{text}, which runs" if self.runs else text

    @property
    def hint(self) -> str:
        """The ways out of it."""
        is_disk = self.wanted.kind is IdentityKind.DISK
        other = "make it read_only in both" if is_disk else "choose another one"
        end = f"stop {self.owner}" if self.runs else f'define {self.owner} as "offline"'
        return f"{other}, take it from {self.owner}, or {end} first"


class ConflictError(BrineError):
    """An identity that can't be had, as another instance has it."""

    def __init__(self, conflict: Conflict) -> None:
        super().__init__(str(conflict), hint=conflict.hint)
        self.conflict = conflict


def refuse_taken(
    own: str | None, wanted: Iterable[Identity], keys: IdentityKeys | None = None
) -> None:
    """Refuse an identity that another instance has now, or at its next start.

    :param own: the instance that it is for; None is a VM that is no instance.
    :raises ConflictError: which one, and whose it is.
    """
    wanted, keys = list(wanted), keys or IdentityKeys()
    found = conflict_now(own, wanted, keys)
    found = found or conflict_later(own, wanted, keys=keys)
    if found:
        raise ConflictError(found)


def conflict_later(
    own: str | None,
    wanted: Iterable[Identity],
    planned: Planned = NONE_PLANNED,
    keys: IdentityKeys | None = None,
) -> Conflict | None:
    """A conflict with the next start of another instance that is not offline."""
    if not (wanted := list(wanted)):
        return None
    found = _conflicts(wanted, _later(own, planned), keys or IdentityKeys(), runs=False)
    return next(found, None)


def conflict_now(
    own: str | None, wanted: Iterable[Identity], keys: IdentityKeys | None = None
) -> Conflict | None:
    """A conflict with another instance that runs or is just starting."""
    if not (wanted := list(wanted)):
        return None
    begun = _identities_of_operations()
    theirs = (
        (owner, [*_identities_now(owner), *begun.get(owner, ())])
        for owner in _started()
        if owner != own
    )
    found = _conflicts(wanted, theirs, keys or IdentityKeys(), runs=True)
    return next((one for one in found if _runs(one.owner)), None)


def _conflicts(
    wanted: list[Identity],
    theirs: Iterable[tuple[str, Iterable[Identity]]],
    keys: IdentityKeys,
    *,
    runs: bool,
) -> Iterator[Conflict]:
    kinds = {one.kind for one in wanted}
    known = [(owner, one) for owner, ones in theirs for one in ones if one.kind in kinds]
    if any(one.kind is IdentityKind.DISK for _, one in known):
        keys.ask([*wanted, *(one for _, one in known)])
        # It may be the disk of another that is silent, too. One that answers is none of those.
        keys.refuse_silent(wanted)
    mine: dict[IdentityKey, list[Identity]] = {}
    for one in wanted if known else ():
        mine.setdefault(keys.of(one), []).append(one)
    for owner, there in known:
        for one in mine.get(keys.of(there), ()):
            if not one.is_shared_with(there):
                yield Conflict(one, there, owner, runs)


@contextlib.contextmanager
def identities_lock(check: Callable[[IdentityKeys], object] | None = None) -> Iterator[None]:
    """Hold the lock of all identities for the block, which asks neither guest nor storage.

    A command takes it after the locks of instances and of VMs, and within it only that of a runtime
    file.

    :param check: refuses what another instance has. It is called before the lock is taken, so that
        no command waits for the storage that it asks, and again under the lock.
    :raises brine.common.locks.LockError: if it can't be had.
    """
    keys = IdentityKeys()
    for number in range(_ROUNDS if check else 1):
        if check:
            check(keys)
        with node_lock(_LOCK, timeout_s=_LOCK_TIMEOUT_S):
            if check:
                try:
                    # Other commands may name new disks again and again: at last those are asked.
                    with keys.complete(number < _ROUNDS - 1):
                        check(keys)
                except _NewDiskError:
                    continue
            yield
            return


class OtherIdentities(Container[str]):
    """The UUIDs and MAC addresses of the other instances. They are read when one is asked for: a
    definition that changes nothing asks for none."""

    def __init__(self, name: str, planned: Planned = NONE_PLANNED) -> None:
        self._name = name
        self._planned = planned

    def __contains__(self, identity: object) -> bool:
        return identity in self._all

    @cached_property
    def _all(self) -> set[str]:
        later = (one for _, theirs in _later(self._name, self._planned) for one in theirs)
        return {one.value.lower() for one in later if one.kind is not IdentityKind.DISK}


# What instances have.


def _later(own: str | None, planned: Planned) -> Iterator[tuple[str, Iterator[Identity]]]:
    """The identities of each other instance that is not offline, at its next start."""
    stored = ((name, data) for name, data in specs_but(own) if name not in planned)
    for name, spec in (*stored, *planned.items()):
        if name != own and spec.get("admin_state") != _OFFLINE:
            yield name, identities_of({**spec, **_kept_devices(spec, LastStart.known(name))})


def _kept_devices(spec: Mapping[str, Any], last: LastStart | None) -> dict[str, Any]:
    """The devices that the next start takes from the runtime file: those of now, unless an admin
    has changed them in the spec since the last start."""
    if not last or last.spec is None:
        return {}
    there = {row.get("uuid") for row in rows_in(spec, "disks")}

    def left(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Those that the next start may have: a disk on IDE that the spec has no more is not."""
        return [one for one in rows if one.get("interface") != "ide" or one.get("uuid") in there]

    started = {**last.spec, "disks": left(rows_in(last.spec, "disks"))}
    return {
        key: left(rows)
        for key, rows in last.devices().items()
        if _as_plugged(started, key) == _as_plugged(spec, key)
    }


def _as_plugged(spec: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """The devices of a spec, without what only Brine knows of them."""
    return [as_plugged(row) for row in rows_in(spec, key)]


def _identities_now(name: str) -> Iterator[Identity]:
    """The identities of an instance that runs."""
    last = LastStart.known(name)
    spec = last.spec if last else started_with(name)
    spec = spec if isinstance(spec, Mapping) else {}
    return identities_of({**spec, **(last.devices() if last else {})})


# The instances that run.


def _started() -> list[str]:
    """The instances that may run: those with a socket, and those that have been started."""
    found = {file.stem for file in paths.CONTROL_DIR.glob("*.qmp")}
    suffix = f".{MarkerKind.START}"
    for file in paths.MARKS_DIR.glob(f"*{suffix}"):
        name = file.name.removesuffix(suffix)
        if name not in found and not name.startswith(".") and Run.last(name).has_process():
            found.add(name)
    return sorted(found)


def _runs(name: str) -> bool:
    return is_listening(InstanceFiles(name).qmp) or Run.last(name).has_process()


# The identity of a disk: two VMs that write one disk destroy its file system.


def is_same_disk(path: str, other: str) -> bool:
    """Whether two paths lead to one disk."""
    return _identity(path) == _identity(other)


def _identity(path: str) -> tuple[int | str, ...]:
    try:
        status = os.stat(path)
    except OSError:
        return ("path", os.path.realpath(path))  # it may be there later
    if stat.S_ISBLK(status.st_mode):
        return ("device", status.st_rdev)
    return ("file", status.st_dev, status.st_ino)


def _identities_of_operations() -> dict[str, list[Identity]]:
    """The identities in recorded operations, by instance: a step that gives an instance something
    has ``claims`` among its facts, which are rows as a spec has them, with ``instance`` and perhaps
    ``process``, with which they end."""
    found: dict[str, list[Identity]] = {}
    for step in (step for one in pending() for step in one.steps):
        given = step.facts.get("claims")
        if not isinstance(given, Mapping) or not isinstance(given.get("instance"), str):
            continue
        process = str(given.get("process", ""))
        if not process.isdecimal() or os.path.exists(f"/proc/{process}"):
            found.setdefault(given["instance"], []).extend(identities_of(given))
    return found
