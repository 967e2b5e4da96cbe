"""The verbs that act on instances: their results, and several instances side by side."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from types import MappingProxyType
from typing import Any, NamedTuple

from brine.common.cli import undo_when_told_to_end
from brine.common.errors import BrineError, tell_error
from brine.instance import messages
from brine.instance.observe import Observed, Oper, look, look_at_all
from brine.instance.parallel import ProcessEnd, in_processes
from brine.instance.store import system_error

MOST_AT_ONCE = 50


class Done(NamedTuple):
    """What a verb has done with an instance.

    :param result: in a word or two, as ``--json`` has it: ``stopped``.
    :param changed: whether it changed anything.
    :param more: for people, follows the name of the instance: ``does not run``.
    :param facts: further keys that ``--json`` shows.
    """

    result: str
    changed: bool = True
    more: str = ""
    facts: Mapping[str, Any] = MappingProxyType({})


Act = Callable[[str], Done]
"""Acts on the instance of a name."""


class ActionResult(NamedTuple):
    """The result of a verb for one instance, or the error."""

    name: str
    done: Done | None = None
    error: BrineError | None = None

    def __str__(self) -> str:
        if self.done is None:
            return str(self.error)
        return f"{self.done.result}: {self.name} {self.done.more}".rstrip()

    def to_json(self, status: str | None) -> dict[str, Any]:
        """It as ``--json`` shows it.

        :param status: of the instance afterwards.
        """
        if self.done is None:
            hint = self.error.hint if self.error else None
            return {"name": self.name, "error": str(self.error), "hint": hint}
        done = {"result": self.done.result, "changed": self.done.changed, **self.done.facts}
        return {"name": self.name, **done, "status": status}

    def encoded(self) -> bytes:
        """It for another process, whose errors name the instance."""
        if self.error is None:
            *done, facts = self.done or Done("")
            return json.dumps({"done": [*done, dict(facts)]}).encode()
        text = str(self.error)
        prefix = "" if text.startswith(f"{self.name}: ") else f"{self.name}: "
        return json.dumps({"error": f"{prefix}{text}", "hint": self.error.hint}).encode()

    @classmethod
    def decoded(cls, name: str, data: bytes) -> ActionResult:
        """The result that another process has encoded."""
        found = json.loads(data)
        if "error" in found:
            return cls(name, error=BrineError(found["error"], hint=found["hint"]))
        return cls(name, Done(*found["done"]))


def act_on(arguments: argparse.Namespace, act: Act, *, runs: str = "runs") -> int:
    """Do a verb on one instance, print its result, and return the exit status. On several, it is
    done as by :func:`act_on_each`.

    :param runs: is said of a running instance if the command is interrupted.
    :raises BrineError: if the verb fails for the only one.
    """
    if len(arguments.name) > 1:
        return act_on_each(arguments, act, runs=runs)
    undo_when_told_to_end()
    messages.log_to_journal("brine")
    (name,) = arguments.name
    try:
        result = ActionResult(name, act(name))
    except KeyboardInterrupt:
        return _tell_interrupted(name, runs=runs)
    if arguments.json:
        print(json.dumps(result.to_json(_statuses([name]).get(name)), indent=2))
    else:
        print(result)
    return 0


def act_on_each(
    arguments: argparse.Namespace,
    act: Act,
    *,
    runs: str = "runs",
    at_most: int = MOST_AT_ONCE,
    groups: Sequence[Sequence[str]] = (),
) -> int:
    """Do a verb on several instances, side by side. One that fails stops no other.

    :param at_most: so many at the same time.
    :param groups: the names, in groups of which each ends before the next one begins; each line
        then says how many are done. Empty makes one group of those that the command line names.
    """
    undo_when_told_to_end()
    messages.log_to_journal("brine")
    parts = groups or [list(dict.fromkeys(arguments.name))]
    names = [name for part in parts for name in part]
    results: dict[str, ActionResult] = {}
    try:
        for part in parts:
            with closing(_results(part, act, at_most)) as found:
                for result in found:
                    results[result.name] = result
                    count = f" ({len(results)} of {len(names)})" if groups else ""
                    if result.error:
                        tell_error(result.error)
                    elif not arguments.json:
                        # In one piece: print() itself may be interrupted before the line's end.
                        print(f"{result}{count}\n", end="", flush=True)
    except KeyboardInterrupt:
        for name in names:
            if name not in results:
                _tell_interrupted(name, runs=runs)
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

    def work(name: str) -> bytes:
        return _result(name, act).encoded()

    with closing(in_processes(names, work, at_most=at_most)) as ends:
        yield from map(_result_of, ends)


def _result(name: str, act: Act) -> ActionResult:
    try:
        return ActionResult(name, act(name))
    except BrineError as error:
        return ActionResult(name, error=error)
    except OSError as error:
        return ActionResult(name, error=system_error(name, error))


def _result_of(end: ProcessEnd) -> ActionResult:
    name = end.name
    if end.error:
        return ActionResult(name, error=system_error(name, end.error))
    if end.output:
        return ActionResult.decoded(name, end.output)
    text = f"{name}: the process that worked on it ended with {end.code}"
    return ActionResult(name, error=BrineError(text))


def _statuses(names: Sequence[str]) -> dict[str, str]:
    """The statuses of instances; one that can't be known is left out."""
    with suppress(BrineError):
        seen = [look(names[0])] if len(names) == 1 else look_at_all()
        return {one.name: one.state.status.value for one in seen if isinstance(one, Observed)}
    return {}


def _tell_interrupted(name: str, *, runs: str) -> int:
    """Report the state of an instance after an interrupt; *runs* is said of a running one."""
    with suppress(BrineError):  # it has no spec, say
        seen = look(name)
        words = runs if seen.state.oper is Oper.RUNNING else f"is {seen.state.oper}"
        text = f"interrupted: {name} {words}; its admin_state is {seen.spec.admin_state}"
        print(text, file=sys.stderr)
    return 128 + signal.SIGINT
