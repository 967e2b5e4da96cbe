"""Definitions of one or several instances, and their results for people and programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from brine.common.errors import BrineError, printable, tell_error, warn
from brine.common.paths import InstanceFiles
from brine.common.process import begun, is_listening
from brine.instance.kvm.live_changes import KEYS, dropped
from brine.instance.kvm.live_definition import LiveResult, change_live, in_words
from brine.instance.observe import Observed, Oper, look, look_at_all
from brine.instance.operations import Defined, define_instance
from brine.instance.restart_counter import reasons_to_wait
from brine.instance.running_spec import running_spec
from brine.instance.spec import AS_ROOT, Spec, SpecError, to_json
from brine.instance.store import InstanceError, system_error
from brine.instance.unit import Unit, UnitError


@dataclass(frozen=True, slots=True)
class SpecInput:
    """A spec to be defined, as people write it.

    :param name: of the instance; None if it has none that is a string.
    :param label: what to call it in errors.
    :param fault: why there is no spec.
    :param ignored: parameters of the cluster's configuration without an effect.
    """

    name: str | None
    label: str
    data: Any = None
    fault: BrineError | None = None
    ignored: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class DefinitionResult:
    """The result of a definition: what was defined, and changed live; or the error.

    :param state: the instance's, before the live change; None if it is new, or not known.
    """

    given: SpecInput
    defined: Defined | None = None
    error: BrineError | None = None
    live: LiveResult | None = None
    state: Mapping[str, Any] | None = None

    def errors(self) -> Sequence[BrineError]:
        """All errors, with the instance's name."""
        if self.error and not isinstance(self.error, InstanceError):
            return [BrineError(f"{self.given.label}: {self.error}", hint=self.error.hint)]
        return [self.error] if self.error else self.live.errors if self.live else []

    def to_json(self) -> dict[str, Any]:
        """It as ``--json`` shows it."""
        name = self.defined.spec.name if self.defined else self.given.name
        row: dict[str, Any] = {"name": name}
        if self.given.ignored is not None:
            row["ignored"] = list(self.given.ignored)
        if self.defined is None:
            (error,) = self.errors()
            return {**row, "error": str(error), "hint": error.hint}
        spec, before = self.spec(), self.defined.before
        row |= {"changed": self.defined.changed, "drops": self.drops()}
        row |= {**self.live.to_json(), "state": self.state} if self.live else {}
        made = to_json(spec)
        if before:
            return {**row, "before": made if before == spec else to_json(before), "spec": made}
        return {**row, "before": None, "spec": made}

    def spec(self) -> Spec:
        """The spec that was defined."""
        assert self.defined
        return self.live.spec if self.live else self.defined.spec

    def drops(self) -> list[str]:
        """The plugged devices that the next start does not have, in words."""
        if not self.defined or not self.defined.changed:
            return []
        if self.live and not set(KEYS).intersection(self.live.pending):
            return []  # the next start keeps what is plugged, see with_hot_changes()
        return dropped(self.spec())


def inputs_of(data: Sequence[Any]) -> Iterator[SpecInput]:
    """The specs of a list. A name that is there twice is a fault of the second one."""
    names: set[str] = set()
    for index, one in enumerate(data):
        name = one.get("name") if isinstance(one, dict) else None
        if not isinstance(name, str):
            yield SpecInput(None, f"/{index}", one)
        elif name in names:
            yield SpecInput(name, name, fault=SpecError("is there twice", where=f"/{index}/name"))
        else:
            names.add(name)
            yield SpecInput(name, name, one)


def define_several(
    given: Sequence[SpecInput],
    *,
    dry_run: bool,
    live: bool = False,
    keeps_user_state: bool = False,
    asked: Callable[[], dict[str, Unit]] | None = None,
) -> list[DefinitionResult]:
    """Define several instances, in their order. One that can't be defined stops no other.

    An instance may get a disk or a MAC address that another of them gives up. So those that were
    refused are tried again when others have changed.

    :param live: also change the disks and NICs of those that run. It begins with instances that
        get no disk.
    :param keeps_user_state: as in :func:`define_instance`.
    :param asked: what waits for systemd's answer on all units, where it is asked already; for a dry
        run.
    """
    results = [DefinitionResult(one, error=one.fault) for one in given]
    planned: dict[str, Any] = {}
    waiting = [index for index, one in enumerate(given) if not one.fault]
    names = [one.name for one in given if one.name]
    # In a dry run systemd answers while the specs are checked, which takes about as long.
    observed = begun(partial(_observed, names, asked)) if live and dry_run and names else None
    while waiting:
        has_changed, refused = False, []
        for index in waiting:
            one = given[index]
            try:
                defined = define_instance(
                    one.data, dry_run=dry_run, keeps_user_state=keeps_user_state, planned=planned
                )
            except BrineError as error:
                results[index] = DefinitionResult(one, error=error)
                if isinstance(error, SpecError):
                    refused.append(index)
                continue
            except OSError as error:
                results[index] = DefinitionResult(one, error=system_error(one.label, error))
                continue
            results[index] = DefinitionResult(one, defined)
            has_changed = has_changed or defined.changed
            if dry_run:
                planned[defined.spec.name] = to_json(defined.spec)
        waiting = refused if has_changed else []
    if live:
        done = [one.defined.spec.name for one in results if one.defined]
        seen = observed() if observed else _observed(done)
        results = _changed_live(results, seen, dry_run=dry_run)
    return results


def _changed_live(
    results: list[DefinitionResult], seen: Mapping[str, Observed], *, dry_run: bool
) -> list[DefinitionResult]:
    held_back = reasons_to_wait()

    def gets_disk(index: int) -> bool:
        defined = results[index].defined
        if defined is None:
            return False
        disks = {one.uuid for one in defined.before.disks} if defined.before else ()
        return any(one.uuid not in disks for one in defined.spec.disks)

    for index in sorted(range(len(results)), key=gets_disk):
        if defined := results[index].defined:
            found = seen.get(defined.spec.name)
            live = change_live(defined.spec, defined.before, found, dry_run=dry_run)
            if not found and defined.before and is_listening(InstanceFiles(defined.spec.name).qmp):
                live = replace(live, errors=(_unseen(defined.spec.name),))
            results[index] = replace(results[index], live=live)
            if found:
                state = {
                    "status": found.state.status,
                    "oper_state": found.state.oper,
                    "why": found.state.why,
                    "held_back": held_back(found.name),
                }
                results[index] = replace(results[index], state=state)
    return results


def _unseen(name: str) -> InstanceError:
    text = "may run, and systemd does not tell: its disks and NICs are as they were"
    return InstanceError(name, text, hint=f"brine instance info {name} says more")


def _observed(
    names: Sequence[str], asked: Callable[[], dict[str, Unit]] | None = None
) -> dict[str, Observed]:
    """The instances of these names, and perhaps others. None where systemd can't be asked, as where
    an image is being built."""
    if not names:
        return {}
    try:
        is_one = len(names) == 1 and not asked
        found: Iterable[Any] = [look(names[0])] if is_one else look_at_all(asked=asked)
        return {one.name: one for one in found if isinstance(one, Observed)}
    except (UnitError, InstanceError):  # a dry run has not stored a first spec
        return {}


def tell_results(
    results: Sequence[DefinitionResult], *, dry_run: bool, as_json: bool, **more: Any
) -> int:
    """Print the results of several definitions, and return the exit status.

    :param more: keys of the JSON.
    """
    if as_json:
        status = tell_errors(results)
        for one in results:
            warn_of(one)
        rows = [one.to_json() for one in results]
        print(json.dumps({"instances": rows, **more, "dry_run": dry_run}))
        return status
    return tell_lines(results, dry_run=dry_run)


def tell_errors(results: Iterable[DefinitionResult]) -> int:
    """Print the errors, and return the exit status."""
    errors = [error for one in results for error in one.errors()]
    for error in errors:
        tell_error(error)
    return 1 if errors else 0


def warn_of(result: DefinitionResult) -> None:
    """Warn of a file that a definition keeps aside, and of devices that it drops."""
    if result.defined is None:
        return
    name = result.defined.spec.name
    if result.defined.aside:
        warn(f"the damaged spec of {name} is kept as {result.defined.aside}")
    if drops := result.drops():
        warn(
            f"{name}: its next start does not have what was plugged: {', '.join(drops)}",
            hint='to keep them, give the spec the "disks" and "nics" that are to be there',
        )


def tell_lines(results: Sequence[DefinitionResult], *, dry_run: bool = False) -> int:
    """Print results for people, and return the exit status."""
    status = tell_errors(results)
    changed = []
    for one in results:
        warn_of(one)
        if one.defined and one.defined.changed:
            spec = one.spec()
            changed += [] if one.live else [spec.name]
            if not spec.is_xen() and spec.security_model == "none":
                warn(f"{spec.name}: {AS_ROOT}")
    seen = {} if dry_run else _observed(changed)
    for one in results:
        if one.defined:
            name = one.defined.spec.name
            waits = name in changed and name in seen and _waits(seen[name])
            print(_line(one, dry_run=dry_run, waits=waits))
        for parameter in one.given.ignored or ():
            warn(f"{one.given.label}: its parameter {parameter} has no effect here")
    return status


def _line(result: DefinitionResult, *, dry_run: bool, waits: bool) -> str:
    assert result.defined
    live = result.live or LiveResult(result.spec())
    would = "would be " if dry_run else ""
    is_done = result.defined.changed or live.attached or live.detached
    line = f"{f'{would}defined' if is_done else 'unchanged'}: {result.defined.spec.name}"
    for word, devices in (("attached", live.attached), ("detached", live.detached)):
        if devices:
            line += f"; {would}{word}: {', '.join(map(in_words, devices))}"
    if live.pending:
        line += f"; restart pending: {', '.join(live.pending)}"
    return printable(line + ("; it runs, and has this from its next start on" if waits else ""))


def _waits(seen: Observed) -> bool:
    """Whether an instance runs with other settings than its spec, as far as that is known."""
    running = running_spec(seen)
    return bool(running.pending) if running else seen.state.oper is Oper.RUNNING


def print_spec(spec: Spec, *, dry_run: bool, **more: Any) -> None:
    """Print a spec that was defined as JSON, with *more* of it."""
    result = {"name": spec.name, **more, "dry_run": dry_run, "spec": to_json(spec)}
    print(json.dumps(result, indent=2))
