"""Definitions of one or several instances, their results for people and programs, and the verbs of
``brine instance`` for specs: define, edit, rename, undefine."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from brine.common.background import begun
from brine.common.cli import print_done, size, undo_when_told_to_end
from brine.common.errors import (
    BrineError,
    UsageError,
    install_hint,
    printable,
    tell_error,
    warn,
)
from brine.common.schema import key_hint, shape_of
from brine.common.unix_socket import is_listening
from brine.config.schema import NO_COMMENTS, parse_json
from brine.instance import store
from brine.instance.action import Done, act_on
from brine.instance.disks.live import show_growth
from brine.instance.disks.volumes import delete_volume, refuse_to_delete
from brine.instance.kvm.live_definition import LiveResult, change_live, in_words
from brine.instance.kvm.runtime_devices import KEYS, dropped
from brine.instance.messages import log_to_journal
from brine.instance.observe import Observed, Oper, look, look_at_all
from brine.instance.registry import Defined, define_instance, rename_instance, undefine_instance
from brine.instance.running_spec import running_spec
from brine.instance.store import InstanceError, system_error
from brine.instance.supervisor import supervisor
from brine.instance.unit import Unit, UnitError
from brine.vm.disk import Disk
from brine.vm.files import InstanceFiles
from brine.vm.spec import AS_ROOT, Spec, SpecError, to_json

_YAML = re.compile(rb"\s*(#|---|\w+:)")  # as no JSON object begins
_OCTAL = re.compile("[-+]?0[0-7_]+")
_FIXED = {
    "name": "brine instance rename gives an instance another name",
    "uuid": "an instance keeps its UUID",
    "version": "Brine writes it",
}
"""Keys that ``brine instance set`` does not change, and what to do."""
_KEY_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")


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
        if self.given.ignored is not None or self.defined:
            row["ignored"] = self.ignored()
        if self.defined is None:
            (error,) = self.errors()
            return {**row, "error": str(error), "hint": error.hint}
        spec, before = self.spec(), self.defined.before
        row |= {"changed": self.defined.changed, "drops": self.drops(), "removed": self.removed()}
        row["volumes"] = self.defined.volumes.to_json()
        row |= {**self.live.to_json(), "state": self.state} if self.live else {}
        made = to_json(spec)
        if before:
            return {**row, "before": made if before == spec else to_json(before), "spec": made}
        return {**row, "before": None, "spec": made}

    def spec(self) -> Spec:
        assert self.defined
        return self.live.spec if self.live else self.defined.spec

    def ignored(self) -> list[str]:
        """What is set and has no effect: keys of the spec, and the configuration's parameters."""
        keys = self.defined.spec.keys_without_effect() if self.defined else ()
        return [*keys, *(self.given.ignored or ())]

    def drops(self) -> list[str]:
        """The plugged devices that the next start does not have, in words."""
        if not self.defined or not self.defined.changed:
            return []
        if self.live and not set(KEYS).intersection(self.live.pending):
            return []  # the next start keeps what is plugged, see with_hot_changes()
        return dropped(self.spec())

    def removed(self) -> list[str]:
        """The devices that the former spec had and this one lacks, in words."""
        if not self.defined or not self.defined.before:
            return []
        before, spec = self.defined.before, self.spec()
        disks, nics = ({one.uuid for one in kind} for kind in (spec.disks, spec.nics))
        gone = [in_words(one) for one in before.disks if one.uuid not in disks]
        return gone + [in_words(one) for one in before.nics if one.uuid not in nics]


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
    keeps_by_hand: bool = False,
    asked: Callable[[], dict[str, Unit]] | None = None,
) -> list[DefinitionResult]:
    """Define several instances, in their order. One that can't be defined stops no other.

    An instance may get a disk or a MAC address that another of them gives up. So those that were
    refused are tried again when others have changed.

    :param live: also change the disks and NICs of those that run. It begins with instances that
        get no device.
    :param keeps_user_state: as in :func:`define_instance`; so is *keeps_by_hand*.
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
                    one.data,
                    dry_run=dry_run,
                    keeps_user_state=keeps_user_state,
                    keeps_by_hand=keeps_by_hand,
                    planned=planned,
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
    if not dry_run:
        for result in results:
            if result.defined:
                _show_growth(result.defined)
    if live:
        done = [one.defined.spec.name for one in results if one.defined]
        seen = observed() if observed else _observed(done)
        results = _changed_live(results, seen, dry_run=dry_run)
    return results


def _show_growth(defined: Defined) -> None:
    """Have a running guest see disks that have grown."""
    if defined.volumes.grown:
        try:
            show_growth(defined.spec.name, defined.volumes.grown)
        except BrineError as error:
            text = f"{defined.spec.name}: its guest does not see yet that disks have grown"
            warn(f"{text}: {error}", hint=error.hint)


def _changed_live(
    results: list[DefinitionResult], seen: Mapping[str, Observed], *, dry_run: bool
) -> list[DefinitionResult]:
    held_back = supervisor().reasons_to_wait()

    def gets_device(index: int) -> bool:
        defined = results[index].defined
        return defined is not None and not _devices(defined.spec) <= _devices(defined.before)

    for index in sorted(range(len(results)), key=gets_device):
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


def _devices(spec: Spec | None) -> set[str]:
    """What only one instance can have of a spec's devices."""
    return {*(one.path for one in spec.disks), *(one.mac for one in spec.nics)} if spec else set()


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
            f"{name}: its next start does not have these plugged devices: {', '.join(drops)}",
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
            for text in one.defined.volumes.in_words(would=dry_run):
                print(printable(f"{name}: {text}"))
            print(_line(one, dry_run=dry_run, waits=waits))
        if ignored := one.ignored():
            warn(f"{one.given.label}: set, and without effect: {', '.join(ignored)}")
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
    taken_out = {in_words(one) for one in live.detached}
    if gone := [one for one in result.removed() if one not in taken_out]:
        line += f"; {would}removed from its spec: {', '.join(gone)}"
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


# The verbs.


def define(arguments: argparse.Namespace) -> int:
    if arguments.file is None:
        hint = "give a file, or -, or --from-config"
        raise UsageError("no spec is named", hint=hint)
    for option in ("node", "config", "but"):
        if getattr(arguments, option) not in (None, []):
            hint = "a spec that is given is this node's"
            raise UsageError(f"--{option} goes with --from-config", hint=hint)
    log_to_journal("brine")
    data, dry_run = _input(arguments.file), arguments.dry_run
    if data == [] and not arguments.json:
        warn("the list has no spec: nothing is defined")
    given = [SpecInput(None, "the spec", data)]
    if isinstance(data, list):
        given = list(inputs_of(data))
    results = define_as_asked(given, arguments, is_declared=arguments.keep_user_state)
    if isinstance(data, list):
        return tell_results(results, dry_run=dry_run, as_json=arguments.json)
    (result,) = results
    if result.error:
        with naming(arguments.file, SpecError):
            raise result.error
    assert result.defined
    if not arguments.json:
        return tell_lines([result], dry_run=dry_run)
    status = tell_errors([result])
    warn_of(result)
    print(json.dumps({**result.to_json(), "dry_run": dry_run}, indent=2))
    return status


def define_as_asked(
    given: Sequence[SpecInput], arguments: argparse.Namespace, *, is_declared: bool
) -> list[DefinitionResult]:
    """Define several instances, with the options of ``brine instance define``.

    :param is_declared: a program has made the specs, of a declaration: what was added by hand to
        instances stays.
    """
    if arguments.live:
        undo_when_told_to_end()
    return define_several(
        given,
        dry_run=arguments.dry_run,
        live=arguments.live,
        keeps_user_state=arguments.keep_user_state,
        keeps_by_hand=is_declared,
        asked=arguments.ahead,
    )


def edit(arguments: argparse.Namespace) -> int:
    log_to_journal("brine")
    name = arguments.name
    before = store.load(name)
    text = json.dumps(to_json(before), indent=2).encode() + b"\n"
    # An editor makes files of names that it chooses: in a folder of root's alone.
    folder = Path(tempfile.mkdtemp(prefix=f"brine-{name}-", dir=_folder_for_edits()))
    kept = folder / f"{name}.json"
    kept.write_bytes(text)
    try:
        _run_editor(kept)
        if kept.read_bytes() == text:
            store.load(name)  # it may have been undefined meanwhile
            defined = Defined(before, changed=False, before=before)
        else:
            data = _input(str(kept))
            if isinstance(data, dict) and data.get("name") != name:
                hint = f"brine instance rename {name} NAME gives it another name"
                raise UsageError(f"the name is {name}, and can't be edited", hint=hint)
            defined = define_instance(data, over=before)
            _show_growth(defined)
    except BrineError:
        if kept.read_bytes() == text:
            shutil.rmtree(folder)
        else:
            warn(f"your text is kept as {kept}")
        raise
    shutil.rmtree(folder)
    results = [DefinitionResult(SpecInput(name, name), defined)]
    if arguments.live:
        undo_when_told_to_end()
        results = _changed_live(results, _observed([name]), dry_run=False)
    return tell_lines(results)


def set_keys(arguments: argparse.Namespace) -> int:
    """``brine instance set``."""
    log_to_journal("brine")
    undo_when_told_to_end()
    name, dry_run = arguments.name, arguments.dry_run
    before = store.load(name)
    data = to_json(before) | dict(map(_assigned, arguments.assignments))
    defined = define_instance(data, over=before, dry_run=dry_run)
    if not dry_run:
        _show_growth(defined)
    results = [DefinitionResult(SpecInput(name, name), defined)]
    results = _changed_live(results, _observed([name]), dry_run=dry_run)
    if not arguments.json:
        return tell_lines(results, dry_run=dry_run)
    status = tell_errors(results)
    print(json.dumps({**results[0].to_json(), "dry_run": dry_run}, indent=2))
    return status


def _assigned(assignment: str) -> tuple[str, Any]:
    """The key and the value of ``KEY=VALUE``. An empty value is the default; a list of strings may
    be written with commas, and a key in MiB as a size.

    :raises UsageError: if it is none, or of a key that this verb does not change.
    """
    key, equals, text = assignment.partition("=")
    if not equals:
        raise UsageError(f"not KEY=VALUE: {assignment!r}", hint="such as memory_mib=4096")
    known = shape_of(Spec).by_key
    if key not in known:
        raise UsageError(f"a spec has no key {key!r}", hint=key_hint(Spec, key))
    if key in _FIXED:
        raise UsageError(f"{key} can't be set", hint=_FIXED[key])
    kinds = known[key].kinds
    if not text:
        return key, known[key].usual
    if kinds == {str}:
        return key, text
    if list in kinds and not text.startswith("["):
        return key, text.split(",")
    if key.endswith("_mib") and text[-1].isalpha():
        try:
            return key, size(text) >> 20
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"{key} {error}", hint=f"such as {key}=4096 or {key}=4G") from None
    try:
        return key, json.loads(text)
    except ValueError:
        return key, text  # which its schema refuses, and says what it should be


def _folder_for_edits() -> str:
    """The folder of temporary files. Another user must not be able to give the name of a folder
    there to one of their own."""
    folder = tempfile.gettempdir()
    status = os.stat(folder)
    others_write = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
    if others_write or status.st_uid not in (0, os.geteuid()):
        text = f"{folder}: other users can replace files there"
        raise BrineError(text, hint="TMPDIR=/tmp names another folder for temporary files")
    return folder


def _run_editor(file: Path) -> None:
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "editor"
    try:
        status = subprocess.run([*shlex.split(editor), str(file)], check=False).returncode
        fault = f"failed with exit status {status}" if status else ""
    except (OSError, ValueError) as error:
        fault = getattr(error, "strerror", None) or str(error)
    if fault:
        raise BrineError(f"{editor}: {fault}", hint="EDITOR names another one")


def undefine(arguments: argparse.Namespace) -> int:
    names = list(dict.fromkeys(arguments.name))
    specs = {name: store.load_sound(name) for name in names}
    volumes = {
        name: [disk for disk in spec.disks if disk.unit] if spec else []
        for name, spec in specs.items()
    }
    if arguments.delete_volumes:
        for name in names:
            store.load(name)  # a damaged spec does not tell which they are
            refuse_to_delete(name, volumes[name])
        for name, disks in volumes.items():
            if disks and not arguments.yes:
                _ask_to_delete(name, disks)

    def act(name: str) -> Done:
        disks = volumes[name]
        undefine_instance(name, over=specs[name] if arguments.delete_volumes else None)
        deleted = [one.path for one in disks if arguments.delete_volumes and delete_volume(one)]
        kept = [one.path for one in disks if one.path not in deleted]
        more = [f"; {word}: {', '.join(found)}" for word, found in _named(deleted, kept) if found]
        facts = {"volumes_deleted": deleted, "volumes_kept": kept}
        return Done("undefined", more="".join(more).removeprefix("; "), facts=facts)

    return act_on(arguments, act)


def _named(deleted: list[str], kept: list[str]) -> list[tuple[str, list[str]]]:
    return [("and deleted its volumes", deleted), ("and kept its volumes", kept)]


def _ask_to_delete(name: str, disks: Sequence[Disk]) -> None:
    """Ask a person whether the volumes of an instance may go.

    :raises UsageError: if they may not, or there is no one to ask.
    """
    if not sys.stdin.isatty():
        raise UsageError("--delete-volumes asks, and standard input is no terminal", hint="--yes")
    for disk in disks:
        print(f"{disk.path}  {disk.size_mib} MiB  {disk.name}".rstrip(), file=sys.stderr)
    print(f"Delete these volumes of {name}, with all data? [y/N] ", end="", file=sys.stderr)
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError(f"{name} is not undefined, and its volumes stay")


def rename(arguments: argparse.Namespace) -> int:
    log_to_journal("brine")
    name, new_name = arguments.name, arguments.new_name
    rename_instance(name, new_name)
    print_done(f"renamed: {name} to {new_name}", as_json=arguments.json, name=new_name, source=name)
    return 0


# Input files: JSON or YAML.


@contextmanager
def naming(file: str, kind: type[BrineError]) -> Iterator[None]:
    """Name an input file in errors of a kind."""
    try:
        yield
    except kind as error:
        place = "standard input" if file == "-" else file
        raise BrineError(f"{place}: {error}", hint=error.hint) from error


def content_of(file: str, *, most: int = -1) -> bytes:
    """The content of an input file, or the first *most* bytes; ``-`` is standard input."""
    if file == "-":
        return sys.stdin.buffer.read(most)
    try:
        with Path(file).open("rb") as opened:
            return opened.read(most)
    except OSError as error:
        raise BrineError(f"{file}: can't be read: {error.strerror}") from error


def _input(file: str) -> Any:
    """The JSON or YAML of a file; ``-`` is standard input.

    :raises BrineError: if it can't be read, or is neither.
    """
    data = content_of(file)
    is_yaml = file.endswith((".yaml", ".yml")) or (file == "-" and _YAML.match(data))
    with naming(file, BrineError):
        if is_yaml:
            return _yaml(data)
        try:
            return parse_json(data, unique_keys=True)
        except BrineError as error:
            if error.hint == NO_COMMENTS:
                error.hint = f"{NO_COMMENTS}; YAML has, in a file whose name ends in .yaml"
            raise


def _yaml(data: bytes) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        hint = install_hint(apt="python3-yaml", dnf="python3-pyyaml")
        hint += "; or write the spec in JSON"
        raise BrineError("YAML can't be read here", hint=hint) from None

    class UniqueKeys(yaml.SafeLoader):  # type: ignore[misc]
        """A YAML loader that refuses duplicate keys, and those that JSON does not have."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                text = ""
                if key.tag not in _KEY_TAGS:
                    text = 'a key must be a string: put it in quotes, as in "5"'
                elif key.value in seen:
                    text = f"the key {key.value} stands twice"
                if text:
                    raise yaml.MarkedYAMLError(problem=text, problem_mark=key.start_mark)
                seen.add(key.value)
            mapping: dict[Any, Any] = super().construct_mapping(node, deep)
            return mapping

        def construct_plain_int(self, node: Any) -> int:
            """A whole number, unless YAML reads it as another one than people do."""
            number, text = int(self.construct_yaml_int(node)), str(node.value)
            fault = ""
            if ":" in text:
                fault = f"{text} is a number to the base 60: put it in quotes"
            elif _OCTAL.fullmatch(text):
                fault = f"{text} is octal, that is {number}: write {number}, or put it in quotes"
            if fault:
                raise yaml.MarkedYAMLError(problem=fault, problem_mark=node.start_mark)
            return number

    UniqueKeys.add_constructor("tag:yaml.org,2002:int", UniqueKeys.construct_plain_int)
    try:
        return yaml.load(data, Loader=UniqueKeys)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" at line {mark.line + 1}" if mark else ""
        raise BrineError(f"not valid YAML{where}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BrineError(f"not valid YAML: {error}") from None
