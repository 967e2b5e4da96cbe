"""What the watcher has its hands on: this node's instances."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

from brine.common.errors import BrineError
from brine.instance import spec_files, unit
from brine.instance.control import control_of
from brine.instance.spec_files import InstanceError
from brine.instance.starting import start_failure
from brine.instance.states import Seen, look, look_at_all
from brine.instance.unit import Active, Unit
from brine.instance.user_shutdown import keep_users_will
from brine.watcher.passes import Case
from brine.watcher.sights import needs_verdict, sight_of, wish_of
from brine.watcher.verdicts import VerdictsError, last_verdicts

_LOCK_S = 5.0
_PAUSE_S = 0.1


class Instances:
    """The instances of this node; see :class:`brine.watcher.passes.Hands`.

    :param timeout_s: how long one may take to start.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def look(self) -> Iterator[Case | BrineError]:
        """All of them. systemd is asked once, and kvmd only about those that left no mark."""
        found: list[Seen] = []
        for seen in look_at_all():
            if isinstance(seen, InstanceError):
                yield seen
            else:
                found.append(seen)
        verdicts: Mapping[str, str] = {}
        try:
            verdicts = _verdicts_on(found)
        except VerdictsError as error:
            yield error
        for seen in found:
            yield _case_of(seen, verdicts)

    def look_again(self, key: str) -> Case | None:
        """One of them, by its name."""
        if not spec_files.file_of(key).exists():
            return None
        seen = look(key)
        return _case_of(seen, _verdicts_on([seen]))

    def alone(self, case: Case) -> AbstractContextManager[None]:
        """Nobody else changes its spec, or starts it."""
        return spec_files.alone(case.key, timeout_s=_LOCK_S)

    def set_down(self, case: Case) -> None:
        """For good, in its spec and for the cluster."""
        keep_users_will(case.key)

    def clean_up(self, case: Case) -> None:
        """systemd has done so."""

    def start(self, case: Case) -> Callable[[], None]:
        """As ``systemctl start`` does, without waiting."""
        before = unit.units([case.key]).get(case.key)
        unit.start_later(case.key)
        return lambda: self._wait_started(case.key, before)

    def _wait_started(self, name: str, before: Unit | None) -> None:
        deadline = time.monotonic() + self._timeout_s
        earlier = before.invocation if before else ""
        while True:
            now = unit.units([name]).get(name)
            if now and now.invocation != earlier:
                if now.active in (Active.ACTIVE, Active.RELOADING):
                    return
                if now.active in (Active.FAILED, Active.INACTIVE):
                    error = unit.UnitError(f"its unit is {now.active}")
                    raise start_failure(name, error, before)
            if time.monotonic() >= deadline:
                text = f"has not started within {self._timeout_s:g} s"
                raise InstanceError(name, text, hint=f"systemctl status {unit.unit_of(name)}")
            time.sleep(_PAUSE_S)


def _case_of(seen: Seen, verdicts: Mapping[str, str]) -> Case:
    name = seen.spec.name
    return Case(name, name, wish_of(seen.spec), sight_of(seen, verdicts.get(name)))


def _verdicts_on(several: list[Seen]) -> dict[str, str]:
    since = {}
    for seen in several:
        if needs_verdict(seen):
            try:
                since[seen.spec.name] = control_of(seen.spec.name).started.stat().st_mtime
            except OSError:  # it was started anew just now, or undefined
                continue
    return last_verdicts(since)
