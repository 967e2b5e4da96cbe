"""The verbs that act on instances: their results, and several instances side by side."""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any, NamedTuple, NoReturn

from brine.common.cli import undo_when_told_to_end
from brine.common.errors import BrineError, tell_error
from brine.instance import messages
from brine.instance.observe import Observed, Oper, look, look_at_all
from brine.instance.store import system_error

Act = Callable[[str], tuple[str, bool]]
"""Acts on the instance of a name; returns the result in words, and whether it changed anything."""

_MOST_AT_ONCE = 50
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ActionResult(NamedTuple):
    """The result of a verb for one instance: in words, or the error."""

    name: str
    text: str = ""
    changed: bool = False
    error: BrineError | None = None

    def to_json(self, status: str | None) -> dict[str, Any]:
        """It as ``--json`` shows it.

        :param status: of the instance afterwards.
        """
        if self.error:
            return {"name": self.name, "error": str(self.error), "hint": self.error.hint}
        result = self.text.partition(":")[0]
        return {"name": self.name, "result": result, "changed": self.changed, "status": status}


def act_on(arguments: argparse.Namespace, act: Act, *, runs: str = "runs") -> int:
    """Do a verb on one instance, print its result, and return the exit status.

    :param runs: is said of a running instance if the command is interrupted.
    :raises BrineError: if the verb fails.
    """
    undo_when_told_to_end()
    messages.log_to_journal("brine")
    name = arguments.name
    try:
        result = ActionResult(name, *act(name))
    except KeyboardInterrupt:
        return interrupted(name, runs=runs)
    if arguments.json:
        print(json.dumps(result.to_json(_statuses([name]).get(name)), indent=2))
    else:
        print(result.text)
    return 0


def act_on_each(
    arguments: argparse.Namespace,
    act: Act,
    *,
    runs: str = "runs",
    at_most: int = _MOST_AT_ONCE,
) -> int:
    """Do a verb on several instances, side by side. One that fails stops no other.

    :param at_most: so many at the same time.
    """
    undo_when_told_to_end()
    messages.log_to_journal("brine")
    names = list(dict.fromkeys(arguments.name))
    results: dict[str, ActionResult] = {}
    try:
        with closing(_results(names, act, at_most)) as found:
            for result in found:
                results[result.name] = result
                if result.error:
                    tell_error(result.error)
                elif not arguments.json:
                    # In one piece: print() itself may be interrupted before the end of the line.
                    print(f"{result.text}\n", end="", flush=True)
    except KeyboardInterrupt:
        for name in names:
            if name not in results:
                interrupted(name, runs=runs)
        return 128 + signal.SIGINT
    if arguments.json:
        statuses = _statuses(names)
        rows = [results[name].to_json(statuses.get(name)) for name in names]
        print(json.dumps({"instances": rows}, indent=2))
    return 1 if any(one.error for one in results.values()) else 0


def _results(names: Sequence[str], act: Act, at_most: int) -> Generator[ActionResult]:
    if len(names) == 1:
        yield _result(names[0], act)
        return
    waiting, running = deque(names), dict[int, _Child]()
    try:
        while waiting or running:
            while waiting and len(running) < at_most:
                name = waiting.popleft()
                try:
                    with _signals_held():
                        child = _Child(name, act)
                        running[child.reader] = child
                except OSError as error:  # the node has no room for a process more
                    yield ActionResult(name, error=system_error(name, error))
            for reader in select.select(list(running), [], [])[0] if running else ():
                with _signals_held():  # it has written its result, and ends
                    result = running.pop(reader).result()
                yield result
    finally:
        for child in running.values():
            child.terminate()
        for child in running.values():
            child.result()


def _result(name: str, act: Act) -> ActionResult:
    try:
        return ActionResult(name, *act(name))
    except BrineError as error:
        return ActionResult(name, error=error)
    except OSError as error:
        return ActionResult(name, error=system_error(name, error))


@contextmanager
def _signals_held() -> Generator[None]:
    """Have signals wait: what they raise is lost during a fork, and so is a child that its parent
    does not know yet."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Child:
    """A process that acts on one instance. Each has signals, and what undoes its work, of its own,
    which threads do not have."""

    def __init__(self, name: str, act: Act) -> None:
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
            _act_and_exit(name, act, writer)
        os.close(writer)

    def terminate(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGTERM)

    def result(self) -> ActionResult:
        """Wait for its result, and its end."""
        with os.fdopen(self.reader, "rb") as reader:
            data = reader.read()
        _, status = os.waitpid(self._pid, 0)
        if not data:
            code = os.waitstatus_to_exitcode(status)
            text = f"{self.name}: the process that worked on it ended with {code}"
            return ActionResult(self.name, error=BrineError(text))
        found = json.loads(data)
        if "error" in found:
            error = BrineError(found["error"], hint=found["hint"])
            return ActionResult(self.name, error=error)
        return ActionResult(self.name, found["text"], found["changed"])


def _act_and_exit(name: str, act: Act, writer: int) -> NoReturn:
    """The life of a child. It writes nothing to standard output."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent gets it too, and ends it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        result = _result(name, act)
        found: dict[str, Any] = {"text": result.text, "changed": result.changed}
        if result.error:
            text = str(result.error)
            prefix = "" if text.startswith(f"{name}: ") else f"{name}: "
            found = {"error": f"{prefix}{text}", "hint": result.error.hint}
        os.write(writer, json.dumps(found).encode())
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)


def _statuses(names: Sequence[str]) -> dict[str, str]:
    """The statuses of instances; one that can't be known is left out."""
    with suppress(BrineError):
        seen = [look(names[0])] if len(names) == 1 else look_at_all()
        return {one.name: one.state.status.value for one in seen if isinstance(one, Observed)}
    return {}


def interrupted(name: str, *, runs: str) -> int:
    """Report the state of an instance after an interrupt; *runs* is said of a running one."""
    with suppress(BrineError):  # it has no spec, say
        seen = look(name)
        words = runs if seen.state.oper is Oper.RUNNING else f"is {seen.state.oper}"
        text = f"interrupted: {name} {words}; its admin_state is {seen.spec.admin_state}"
        print(text, file=sys.stderr)
    return 128 + signal.SIGINT
