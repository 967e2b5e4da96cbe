"""Work on several instances side by side: in processes of their own, or in threads with slots.

A command that acts on instances has a process for each (:func:`in_processes`): a process gets
signals of its own, and undoes its own work when a signal ends it. A start only waits for systemd,
so it is a thread. Some hang, as where storage does not answer; so each has a slot for
limited time (:class:`SlotPool`).
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Generic, NamedTuple, NoReturn, TypeVar

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_Result = TypeVar("_Result")


class SlotPool(Generic[_Result]):
    """Works in threads, so many at a time. A work holds a slot until it ends, but not longer than
    *slot_s*: then it is late, and goes on without one.

        pool = SlotPool(4, 20.0)
        for name, work in works.items():
            while pool.is_full():
                ended = pool.wait()
            pool.begin(name, work)

    :param on_late: is called with the name of each work that becomes late.
    """

    def __init__(
        self, slots: int, slot_s: float, on_late: Callable[[str], object] = lambda _: None
    ) -> None:
        self.late: set[str] = set()
        """The works that are late, and have not ended."""
        self._slots = slots
        self._slot_s = slot_s
        self._on_late = on_late
        self._ended: SimpleQueue[tuple[str, _Result]] = SimpleQueue()
        self._until: dict[str, float] = {}  # by the monotonic clock

    def holders(self) -> list[str]:
        """The works that hold a slot."""
        return list(self._until)

    def is_full(self) -> bool:
        return len(self._until) >= self._slots

    def begin(self, name: str, work: Callable[[], _Result]) -> None:
        """Begin a work that raises nothing. It gets a slot, even if all are taken."""
        self._until[name] = time.monotonic() + self._slot_s
        # A daemon thread: one that hangs must not keep the program from ending.
        Thread(target=lambda: self._ended.put((name, work())), daemon=True).start()

    def wait(self) -> tuple[str, _Result] | None:
        """Wait until any work ends, and return its name and result; or, if a slot is given back
        before that because a work becomes late, None. Some work holds a slot."""
        left_s = min(self._until.values()) - time.monotonic()
        try:
            name, result = self._ended.get(timeout=max(left_s, 0))
        except Empty:
            now = time.monotonic()
            for name in [one for one, until in self._until.items() if until <= now]:
                del self._until[name]
                self.late.add(name)
                self._on_late(name)
            return None
        self._until.pop(name, None)
        self.late.discard(name)
        return name, result


# Processes.


class ProcessEnd(NamedTuple):
    """The end of a process that worked on an instance.

    :param output: of its work; empty if it has not come to an end.
    :param code: its exit code; negative is the number of the signal that ended it.
    :param error: why no process could be made.
    """

    name: str
    output: bytes = b""
    code: int = 0
    error: OSError | None = None


def in_processes(
    names: Sequence[str], work: Callable[[str], bytes], *, at_most: int
) -> Generator[ProcessEnd]:
    """Work on each instance in a process of its own; yields each end. When the generator is closed
    before, it ends all processes, and waits for that.

    :param work: returns its output, which is short. Its exceptions are reported.
    :param at_most: so many at the same time.
    """
    waiting, running = deque(names), dict[int, _Child]()
    try:
        while waiting or running:
            while waiting and len(running) < at_most:
                name = waiting.popleft()
                try:
                    with _signals_held():
                        child = _Child(name, work)
                        running[child.reader] = child
                except OSError as error:  # the node has no room for a process more
                    yield ProcessEnd(name, error=error)
            for reader in select.select(list(running), [], [])[0] if running else ():
                with _signals_held():  # it has written its output, and ends
                    end = running.pop(reader).end()
                yield end
    finally:
        for child in running.values():
            child.terminate()
        for child in running.values():
            child.end()


@contextmanager
def _signals_held() -> Iterator[None]:
    """Have signals wait: what they raise is lost during a fork, and so is a child that its parent
    does not know yet."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Child:
    """A process that works on one instance."""

    def __init__(self, name: str, work: Callable[[str], bytes]) -> None:
        self.name = name
        self.reader, writer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            self._pid = os.fork()
        except OSError:
            os.close(self.reader)
            os.close(writer)
            raise
        if self._pid == 0:
            _work_and_exit(name, work, writer)
        os.close(writer)

    def terminate(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGTERM)

    def end(self) -> ProcessEnd:
        """Wait for its output, and its end."""
        with os.fdopen(self.reader, "rb") as reader:
            output = reader.read()
        _, status = os.waitpid(self._pid, 0)
        return ProcessEnd(self.name, output, os.waitstatus_to_exitcode(status))


def _work_and_exit(name: str, work: Callable[[str], bytes], writer: int) -> NoReturn:
    """The life of a child. It writes nothing to standard output."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent gets it too, and ends it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        os.write(writer, work(name))
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)
