"""Definitions of one or several instances, and their results for people and programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from brine.common.errors import BrineError, tell_error, warn
from brine.instance.kvm.live_changes import dropped
from brine.instance.observe import Observed, Oper, look, look_at_all
from brine.instance.operations import Defined, define_instance
from brine.instance.report import AS_ROOT
from brine.instance.running_spec import running_spec
from brine.instance.spec import SpecError, to_json
from brine.instance.store import InstanceError
from brine.instance.unit import UnitError


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
    """The result of one definition among several: what was defined, or the error."""

    given: SpecInput
    defined: Defined | None = None
    error: BrineError | None = None

    def to_json(self) -> dict[str, Any]:
        """It as ``--json`` shows it."""
        row: dict[str, Any] = {"name": self.given.name}
        if self.given.ignored is not None:
            row["ignored"] = list(self.given.ignored)
        if self.defined is None:
            assert self.error
            text = str(self.error)
            if not isinstance(self.error, InstanceError):
                text = f"{self.given.label}: {text}"
            return {**row, "error": text, "hint": self.error.hint}
        before = self.defined.before
        return {
            **row,
            "changed": self.defined.changed,
            "drops": _drops(self.defined),
            "before": to_json(before) if before else None,
            "spec": to_json(self.defined.spec),
        }


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


def define_several(given: Sequence[SpecInput], *, dry_run: bool) -> list[DefinitionResult]:
    """Define several instances, in their order. One that can't be defined stops no other.

    An instance may get a disk or a MAC address that another of them gives up. So those that were
    refused are tried again when others have changed.
    """
    results = [DefinitionResult(one, error=one.fault) for one in given]
    planned: dict[str, Any] = {}
    waiting = [index for index, one in enumerate(given) if not one.fault]
    while waiting:
        has_changed, refused = False, []
        for index in waiting:
            one = given[index]
            try:
                defined = define_instance(one.data, dry_run=dry_run, planned=planned)
            except BrineError as error:
                results[index] = DefinitionResult(one, error=error)
                if isinstance(error, SpecError):
                    refused.append(index)
                continue
            results[index] = DefinitionResult(one, defined)
            has_changed = has_changed or defined.changed
            if dry_run:
                planned[defined.spec.name] = to_json(defined.spec)
        waiting = refused if has_changed else []
    return results


def tell_results(
    results: Sequence[DefinitionResult], *, dry_run: bool, as_json: bool, **more: Any
) -> int:
    """Print the results of several definitions, and return the exit status.

    :param more: keys of the JSON.
    """
    for one in results:
        if one.error:
            tell_error(one.error, "" if isinstance(one.error, InstanceError) else one.given.label)
    if as_json:
        rows = [one.to_json() for one in results]
        print(json.dumps({"instances": rows, **more, "dry_run": dry_run}, indent=2))
    else:
        done = [one.defined for one in results if one.defined]
        for defined in done:
            warn_of(defined)
        tell_definitions(done, dry_run=dry_run)
        for one in results:
            for name in one.given.ignored or ():
                warn(f"{one.given.label}: its parameter {name} has no effect here")
    return 1 if any(one.error for one in results) else 0


def tell_definitions(several: Sequence[Defined], *, dry_run: bool = False) -> None:
    """Print the results of definitions."""
    changed = [one.spec for one in several if one.changed]
    for spec in changed:
        if not spec.is_xen() and spec.security_model == "none":
            warn(f"{spec.name}: {AS_ROOT}")
    waiting = set() if dry_run else _waiting([spec.name for spec in changed])
    for defined in several:
        name = defined.spec.name
        if not defined.changed:
            print(f"unchanged: {name}")
        elif dry_run:
            print(f"would be defined: {name}")
        else:
            later = "; it runs, and has this from its next start on" if name in waiting else ""
            print(f"defined: {name}{later}")


def _waiting(names: Sequence[str]) -> set[str]:
    """The instances that run with other settings than their specs, as far as that is known: where
    an image is being built, there is no systemd."""
    if not names:
        return set()
    try:
        several: Iterable[Any] = [look(names[0])] if len(names) == 1 else look_at_all()
        return {one.name for one in several if isinstance(one, Observed) and _waits(one)}
    except UnitError:
        return set()


def _waits(seen: Observed) -> bool:
    running = running_spec(seen)
    return bool(running.pending) if running else seen.state.oper is Oper.RUNNING


def warn_of(defined: Defined) -> list[str]:
    """Warn of files that a definition keeps aside, and of devices that it drops; returns the
    devices."""
    name, drops = defined.spec.name, _drops(defined)
    if defined.aside:
        warn(f"the damaged spec of {name} is kept as {defined.aside}")
    if drops:
        warn(
            f"{name}: its next start does not have what was plugged: {', '.join(drops)}",
            hint='to keep them, give the spec the "disks" and "nics" that are to be there',
        )
    return drops


def _drops(defined: Defined) -> list[str]:
    return dropped(defined.spec) if defined.changed else []
