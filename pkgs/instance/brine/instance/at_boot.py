"""Starting all instances of a node that should be up, as after its own start."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from queue import Empty, SimpleQueue
from threading import Thread

from brine.common.errors import BrineError
from brine.instance import messages, spec_files, tries, unit
from brine.instance.spec import AdminState, Spec
from brine.instance.spec_files import InstanceError
from brine.instance.starting import start_failure
from brine.instance.state import Oper
from brine.instance.states import Seen, look_at_all
from brine.instance.tries import TriesError
from brine.instance.unit import UnitError

SLOT_S = 20.0
"""So long a start counts among those that are made at the same time; then another one begins."""

_MOUNTS = Path("/proc/self/mounts")


class StillStartingError(InstanceError):
    """An instance whose start takes long. systemd goes on with it, and nobody waits."""


def start_all(*, parallel: int, slot_s: float = SLOT_S) -> Iterator[tuple[str, BrineError | None]]:
    """Start all instances that should be up and are down, but those that their users shut down.

    Those with a lower ``start_order`` have started, or failed to, before the next ones begin. What
    takes longer than *slot_s* holds up no other one. Last come those that the watcher has tried to
    start, and those whose disks are where those of a start are that takes so long.

    :param parallel: how many start at the same time.
    :returns: the name of each, as it has started, with why it did not; also of specs that can't be
        used. In the end :class:`StillStartingError` of those that are starting still.
    :raises UnitError: if systemd can't be asked.
    """
    due = []
    for seen in look_at_all():
        if isinstance(seen, InstanceError):
            yield seen.name, seen
        elif is_due(seen):
            due.append(seen)
    yield from _Starts(parallel, slot_s).of(due)


class _Starts:
    """Starts of many, some of which hang."""

    def __init__(self, parallel: int, slot_s: float) -> None:
        self._parallel = parallel
        self._slot_s = slot_s
        self._ended: SimpleQueue[tuple[str, BrineError | None]] = SimpleQueue()
        self._slots: dict[str, tuple[Spec, float]] = {}  # with when each is given back
        self._late: dict[str, Spec] = {}
        self._silent: set[str] = set()  # storage of late ones

    def of(self, due: Sequence[Seen]) -> Iterator[tuple[str, BrineError | None]]:
        failed = _failed_before()
        due = sorted(due, key=lambda seen: (seen.spec.start_order, seen.spec.name))
        last = [seen for seen in due if seen.spec.name in failed]
        yield from self._begin([seen for seen in due if seen.spec.name not in failed], last)
        last.sort(key=lambda seen: (seen.spec.name in failed, seen.spec.start_order))
        yield from self._begin(last, None)
        for name in sorted(self._late):
            text = f"is starting still, after {self._slot_s:g} s, and nobody waits for it"
            hint = f"brine instance info {name} tells how that goes on"
            yield name, StillStartingError(name, text, hint=hint)

    def _begin(
        self, several: Sequence[Seen], last: list[Seen] | None
    ) -> Iterator[tuple[str, BrineError | None]]:
        """Start these in their order; returns when none has a slot any more.

        :param last: takes those that are put off.
        """
        for seen in several:
            while self._slots and not self._has_room(seen):
                yield from self._next()
            if last is not None and not self._silent.isdisjoint(storage_of(seen.spec)):
                last.append(seen)
                continue
            name = seen.spec.name
            self._slots[name] = (seen.spec, time.monotonic() + self._slot_s)
            # One that hangs must not keep the whole program from ending.
            Thread(target=self._start, args=(seen,), daemon=True).start()
        while self._slots:
            yield from self._next()

    def _has_room(self, seen: Seen) -> bool:
        orders = {spec.start_order for spec, _ in self._slots.values()}
        return len(self._slots) < self._parallel and orders == {seen.spec.start_order}

    def _start(self, seen: Seen) -> None:
        error: BrineError | None
        try:
            error = _start(seen)
        except OSError as fault:
            error = InstanceError(seen.spec.name, f"{fault.filename or fault}: {fault.strerror}")
        self._ended.put((seen.spec.name, error))

    def _next(self) -> Iterator[tuple[str, BrineError | None]]:
        """Wait for the end of any start, or until one has had its time."""
        left_s = min(until for _, until in self._slots.values()) - time.monotonic()
        try:
            name, error = self._ended.get(timeout=max(left_s, 0))
        except Empty:
            now = time.monotonic()
            for name in [one for one, (_, until) in self._slots.items() if until <= now]:
                self._late[name] = self._slots.pop(name)[0]
                self._silent |= storage_of(self._late[name])
            return
        self._slots.pop(name, None)
        self._late.pop(name, None)
        yield name, error


def _failed_before() -> frozenset[str]:
    """Those that the watcher has tried to start since they were well."""
    try:
        return frozenset(tries.load())
    except TriesError:
        return frozenset()


def storage_of(spec: Spec) -> frozenset[str]:
    """What the disks of an instance are kept in: mount points, and folders of devices. Nothing of
    that is touched, as it may not answer."""
    points = {line.split()[1] for line in _MOUNTS.read_text(errors="replace").splitlines()}
    found = set()
    for disk in spec.disks:
        path = PurePosixPath(disk.path)
        if path.is_relative_to("/dev"):
            # A volume group's folder; others have disks of all kinds.
            found.add(str(path.parent if len(path.parts) == 4 and _is_group(path) else path))
        else:
            found.add(next((str(one) for one in path.parents if str(one) in points), "/"))
    return frozenset(found)


def _is_group(path: PurePosixPath) -> bool:
    return path.parts[2] not in ("mapper", "disk", "zvol")


def is_due(seen: Seen) -> bool:
    """Whether an instance should run and nothing of it does."""
    return seen.spec.admin_state == AdminState.UP and seen.state.oper is Oper.DOWN


def _start(seen: Seen) -> BrineError | None:
    name = seen.spec.name
    try:
        with spec_files.alone(name):  # until it is queued, or who stops it now would miss it
            # Others were started first: somebody may have decided otherwise since.
            if spec_files.load(name).admin_state != AdminState.UP:
                return None
            messages.tell_start_asked(name, messages.who_asks())
            wait = unit.begin_start(name)
        wait()
    except UnitError as error:
        return start_failure(name, error, seen.unit)
    except BrineError as error:
        return error
    return None
