"""Run Ganeti's tests of its locks on Brine's. The system's Python runs this, with both libraries.

The arguments are the file of the tests, and the tests to leave out.
"""

from __future__ import annotations

import queue
import sys
import unittest
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

from ganeti import errors, locking, query  # type: ignore[import-not-found]

from component import ganeti_locks

_PIPES = ("TestSingleNotifyPipeCondition", "TestPipeCondition")
"""Tests of what Ganeti's locks, and not ours, are made of."""
_LONGEST_WAIT_S = 60


class _PatientQueue(queue.Queue[str]):
    """Ganeti's tests wait a second for what has to come; a machine may be slower."""

    def get(self, block: bool = True, timeout: float | None = None) -> str:
        return super().get(block, timeout and _LONGEST_WAIT_S)


def main(file: str, *left_out: str) -> int:
    """Returns an exit status."""
    assert (query.LQ_MODE, query.LQ_OWNER, query.LQ_PENDING) == (
        ganeti_locks.MODE,
        ganeti_locks.OWNER,
        ganeti_locks.PENDING,
    )
    ganeti_locks.NoLockError = errors.LockError  # type: ignore[misc]
    locking.SharedLock = ganeti_locks.SharedLock
    queue.Queue = _PatientQueue  # type: ignore[assignment, misc]
    sys.modules["testutils"] = ModuleType("testutils")  # only its main program is used
    module = ModuleType("ganeti_lock_tests")
    SourceFileLoader(module.__name__, file).exec_module(module)
    loaded = unittest.defaultTestLoader.loadTestsFromModule(module)
    chosen = [test for test in _each(loaded) if not {*test.id().split(".")} & {*_PIPES, *left_out}]
    result = unittest.TextTestRunner().run(unittest.TestSuite(chosen))
    return 0 if result.wasSuccessful() else 1


def _each(tests: Any) -> Iterator[unittest.TestCase]:
    for test in tests:
        if isinstance(test, unittest.TestSuite):
            yield from _each(test)
        else:
            yield test


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
