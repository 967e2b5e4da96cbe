"""Conflicts between the instances of a node: UUIDs and MAC addresses that two would have, and disks
that two would use while one writes.

Every command that gives an instance such a thing asks here first. It holds the lock of
:func:`claiming` from the check until a file shows what it has given: the instance's spec, its
runtime file, or the record of begun work. So two commands never give one thing to two instances.

Storage may not answer, such as that of a dead NFS server. So :class:`Identities` asks for the disks
of all instances at once, for a limited time, and :func:`claiming` has it ask before the lock.
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
from brine.vm.claims import Claim, ClaimKind, claims_of, rows_in
from brine.vm.disk import as_plugged
from brine.vm.files import InstanceFiles
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

Identity = tuple[int | str, ...]
"""A claim, whatever name or spelling it is claimed by."""

Planned = Mapping[str, Mapping[str, Any]]
"""Specs of instances, as JSON by name, that a dry run takes for stored."""

NONE_PLANNED: Planned = {}


class _NewDiskError(BrineError):
    """A disk that was not asked for its identity before the lock was taken."""


class Identities:
    """The identities of claims. Each disk is asked once for the file or the device that it is."""

    def __init__(self) -> None:
        self._disks: dict[str, Identity | None] = {}
        self._is_complete = False

    @contextlib.contextmanager
    def complete(self, is_complete: bool) -> Iterator[None]:
        """Ask no further disk for the time of the block: it raises :class:`_NewDiskError`."""
        self._is_complete = is_complete
        try:
            yield
        finally:
            self._is_complete = False

    def ask(self, claims: Iterable[Claim]) -> None:
        """Ask for those of several disks at once. Storage that does not answer has none."""
        disks = {one.value for one in claims if one.kind is ClaimKind.DISK} - self._disks.keys()
        if disks and self._is_complete:
            raise _NewDiskError(", ".join(sorted(disks)))
        self._disks |= _asked(disks)

    def of(self, claim: Claim) -> Identity:
        if claim.kind is not ClaimKind.DISK:
            return (claim.kind.value, claim.value.lower())
        self.ask([claim])
        return self._disks[claim.value] or ("silent", claim.value)

    def refuse_silent(self, claims: Iterable[Claim]) -> None:
        """Refuse a disk whose storage does not answer.

        :raises BrineError: which one.
        """
        claims = list(claims)
        self.ask(claims)
        for one in claims:
            if one.kind is ClaimKind.DISK and self._disks[one.value] is None:
                text = f"{one.value}: its storage does not answer for {STORAGE_TIMEOUT_S:g} s"
                raise BrineError(text, hint="see whether its server and the network work")


def _asked(disks: Iterable[str]) -> dict[str, Identity | None]:
    """The identities of disks; None if the storage of one does not answer. The process can end, and
    can become QEMU, while it waits for NFS (TASK_KILLABLE)."""
    found: dict[str, Identity | None] = dict.fromkeys(disks)

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
    """A claim of another instance that excludes a wanted one.

    :param owner: the name of the other instance.
    :param runs: whether it has that now; if not, its next start has it.
    """

    wanted: Claim
    there: Claim
    owner: str
    runs: bool

    def __str__(self) -> str:
        wanted, owner = self.wanted, self.owner
        if wanted.kind is not ClaimKind.DISK:
            text = f"{wanted.value} is the {wanted.kind} of {owner}"
        else:
            text = f"{wanted.value} is a disk of {owner} too, {self.there.value}"
        return f"{text}, which runs" if self.runs else text

    @property
    def hint(self) -> str:
        """The ways out of it."""
        is_disk = self.wanted.kind is ClaimKind.DISK
        other = "make it read_only in both" if is_disk else "choose another one"
        end = f"stop {self.owner}" if self.runs else f'define {self.owner} as "offline"'
        return f"{other}, take it from {self.owner}, or {end} first"


class ConflictError(BrineError):
    """A claim that can't be had, as another instance has it."""

    def __init__(self, conflict: Conflict) -> None:
        super().__init__(str(conflict), hint=conflict.hint)
        self.conflict = conflict


def refuse_taken(
    own: str | None, wanted: Iterable[Claim], identities: Identities | None = None
) -> None:
    """Refuse a claim that another instance has now, or at its next start.

    :param own: the instance that it is for; None is a VM that is no instance.
    :raises ConflictError: which claim, and whose it is.
    """
    wanted, identities = list(wanted), identities or Identities()
    found = conflict_now(own, wanted, identities)
    found = found or conflict_later(own, wanted, identities=identities)
    if found:
        raise ConflictError(found)


def conflict_later(
    own: str | None,
    wanted: Iterable[Claim],
    planned: Planned = NONE_PLANNED,
    identities: Identities | None = None,
) -> Conflict | None:
    """A conflict with the next start of another instance that is not offline."""
    if not (wanted := list(wanted)):
        return None
    found = _conflicts(wanted, _later(own, planned), identities or Identities(), runs=False)
    return next(found, None)


def conflict_now(
    own: str | None, wanted: Iterable[Claim], identities: Identities | None = None
) -> Conflict | None:
    """A conflict with another instance that runs or is just starting."""
    if not (wanted := list(wanted)):
        return None
    begun = _claims_of_operations()
    theirs = (
        (owner, [*_claims_now(owner), *begun.get(owner, ())])
        for owner in _started()
        if owner != own
    )
    found = _conflicts(wanted, theirs, identities or Identities(), runs=True)
    return next((one for one in found if _runs(one.owner)), None)


def _conflicts(
    wanted: list[Claim],
    theirs: Iterable[tuple[str, Iterable[Claim]]],
    identities: Identities,
    *,
    runs: bool,
) -> Iterator[Conflict]:
    kinds = {one.kind for one in wanted}
    known = [(owner, one) for owner, claims in theirs for one in claims if one.kind in kinds]
    if any(one.kind is ClaimKind.DISK for _, one in known):
        identities.ask([*wanted, *(one for _, one in known)])
        # It may be the disk of another that is silent, too. One that answers is none of those.
        identities.refuse_silent(wanted)
    mine: dict[Identity, list[Claim]] = {}
    for one in wanted if known else ():
        mine.setdefault(identities.of(one), []).append(one)
    for owner, there in known:
        for one in mine.get(identities.of(there), ()):
            if not one.is_shared_with(there):
                yield Conflict(one, there, owner, runs)


@contextlib.contextmanager
def claiming(check: Callable[[Identities], object] | None = None) -> Iterator[None]:
    """Hold the lock of all claims for the time of the block, which asks neither guest nor storage.

    A command takes it after the locks of instances and of VMs, and within it only that of a runtime
    file.

    :param check: refuses what another instance has. It is called before the lock is taken, so that
        no command waits for the storage that it asks, and again under the lock.
    :raises brine.common.locks.LockError: if it can't be had.
    """
    identities = Identities()
    for number in range(_ROUNDS if check else 1):
        if check:
            check(identities)
        with node_lock(_LOCK, timeout_s=_LOCK_TIMEOUT_S):
            if check:
                try:
                    # Other commands may name new disks again and again: at last those are asked.
                    with identities.complete(number < _ROUNDS - 1):
                        check(identities)
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
        later = (claim for _, claims in _later(self._name, self._planned) for claim in claims)
        return {one.value.lower() for one in later if one.kind is not ClaimKind.DISK}


# What instances claim.


def _later(own: str | None, planned: Planned) -> Iterator[tuple[str, Iterator[Claim]]]:
    """The claims of each other instance that is not offline, at its next start."""
    stored = ((name, data) for name, data in specs_but(own) if name not in planned)
    for name, spec in (*stored, *planned.items()):
        if name != own and spec.get("admin_state") != _OFFLINE:
            yield name, claims_of({**spec, **_kept_devices(spec, LastStart.known(name))})


def _kept_devices(spec: Mapping[str, Any], last: LastStart | None) -> dict[str, Any]:
    """The devices that the next start takes from the runtime file: those of now, unless an admin
    has changed them in the spec since the last start."""
    if not last or last.spec is None:
        return {}
    started = last.spec
    return {
        key: rows
        for key, rows in last.devices().items()
        if _as_plugged(started, key) == _as_plugged(spec, key)
    }


def _as_plugged(spec: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """The devices of a spec, without what only Brine knows of them."""
    return [as_plugged(row) for row in rows_in(spec, key)]


def _claims_now(name: str) -> Iterator[Claim]:
    """The claims of an instance that runs."""
    last = LastStart.known(name)
    spec = last.spec if last else started_with(name)
    spec = spec if isinstance(spec, Mapping) else {}
    return claims_of({**spec, **(last.devices() if last else {})})


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


def _claims_of_operations() -> dict[str, list[Claim]]:
    """The claims of recorded operations, by instance: a step that gives an instance something has
    ``claims`` among its facts, which are rows as a spec has them, with ``instance`` and perhaps
    ``process``, with which the claims end."""
    found: dict[str, list[Claim]] = {}
    for step in (step for one in pending() for step in one.steps):
        claims = step.facts.get("claims")
        if not isinstance(claims, Mapping) or not isinstance(claims.get("instance"), str):
            continue
        process = str(claims.get("process", ""))
        if not process.isdecimal() or os.path.exists(f"/proc/{process}"):
            found.setdefault(claims["instance"], []).extend(claims_of(claims))
    return found
