"""Killing a process at each of its steps that others can see."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

_NAMES = ("os.rename", "os.link", "os.symlink", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
_PROGRAMS = ("subprocess.Popen", "os.posix_spawn")
_KILLED = 77


def killed_at(number: int, work: Callable[[], object]) -> bool:
    """Do something in a process that is killed before its n-th change of a name in a folder or its
    n-th program, by which others see all that it does; returns whether it came to that."""
    child = os.fork()
    if child == 0:
        count = 0

        def watch(event: str, _: object) -> None:
            nonlocal count
            if event in _NAMES or event in _PROGRAMS:
                count += 1
                if count == number:
                    os._exit(_KILLED)

        sys.addaudithook(watch)
        try:
            work()
        finally:
            os._exit(0 if sys.exc_info()[0] is None else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, _KILLED), f"step {number}: {status}"
    return status == _KILLED


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
