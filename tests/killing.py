"""Killing a process at each of its steps that others can see."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # nodes run this module, too, and have no pytest
    import pytest

_NAMES = ("os.rename", "os.link", "os.symlink", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
_PROGRAMS = ("subprocess.Popen", "os.posix_spawn")
_KILLED = 77


class KilledError(BaseException):
    """The process ends here, as if it was killed: nothing but the test catches it."""


def die_after(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    """Have this process be as if it was killed when it has called a function for the first time;
    the list says whether it has."""
    function, killed = getattr(owner, name), list[str]()

    def call(*arguments: Any, **keys: Any) -> Any:
        found = function(*arguments, **keys)
        if not killed:
            killed.append(name)
            raise KilledError
        return found

    monkeypatch.setattr(owner, name, call)
    return killed


def killed_at(number: int, work: Callable[[], object]) -> bool:
    """Do something in a process that is killed before its n-th change of a name in a folder or its
    n-th program, by which others see all that it does; returns whether it came to that."""
    status = _watched(work, lambda count: os._exit(_KILLED) if count == number else None)
    assert status in (0, _KILLED), f"step {number}: {status}"
    return status == _KILLED


def steps_of(work: Callable[[], object]) -> int:
    """Do something in a process that is not killed; returns how many steps that takes."""
    reader, writer = os.pipe()
    try:
        status = _watched(work, lambda _: os.write(writer, b"."))
    finally:
        os.close(writer)
    with open(reader, "rb") as steps:
        count = len(steps.read())
    assert status == 0, f"without a kill: {status}"
    return count


def _watched(work: Callable[[], object], step: Callable[[int], object]) -> int:
    """Do something in a process that calls *step* with the number of each step before that is
    done; returns the status of its end."""
    child = os.fork()
    if child == 0:
        count = 0

        def watch(event: str, _: object) -> None:
            nonlocal count
            if event in _NAMES or event in _PROGRAMS:
                count += 1
                step(count)

        sys.addaudithook(watch)
        try:
            work()
        finally:
            os._exit(0 if sys.exc_info()[0] is None else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_after(delay_s: float, work: Callable[[], object]) -> bool:
    """Do something in a process that is killed after a time, with the programs that it has begun;
    returns whether it had not ended by then."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        try:
            work()
        finally:
            os._exit(0 if sys.exc_info()[0] is None else 1)
    with contextlib.suppress(PermissionError):  # it has done that itself
        os.setpgid(child, child)
    time.sleep(delay_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), f"after {delay_s} s: {status}"
    return status != 0


def each_step(work: Callable[[], object], prepare: Callable[[], object]) -> Iterator[int]:
    """Prepare and do something again and again, killed at the first step, the second, ...: all that
    there are, and not killed at last. Yields the number of the step each time."""
    number = 0
    is_killed = True
    while is_killed:
        number += 1
        assert number < 1000, "it has no end"
        prepare()
        is_killed = killed_at(number, work)
        yield number
