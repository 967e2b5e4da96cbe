"""The verbs of ``brine instance`` for specs: define, import, edit, rename, clone, undefine."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from brine.common.cli import print_done, undo_when_told_to_end
from brine.common.errors import BrineError, UsageError, install_hint, printable, warn
from brine.config.schema import parse_json
from brine.hotplug.choices import FORMATS
from brine.hotplug.disk import format_of
from brine.instance import store
from brine.instance.action import act_on
from brine.instance.clone import DiskCopy, clone_instance
from brine.instance.definition import (
    DefinitionResult,
    SpecInput,
    define_several,
    inputs_of,
    tell_errors,
    tell_lines,
    tell_results,
    warn_of,
)
from brine.instance.libvirt import spec_of_domain
from brine.instance.messages import log_to_journal
from brine.instance.operations import (
    Defined,
    define_instance,
    rename_instance,
    undefine_instance,
)
from brine.instance.spec import Spec, SpecError, to_json

_YAML = re.compile(rb"\s*(#|---|\w+:)")  # as no JSON object begins
_KEY_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")


def define(arguments: argparse.Namespace) -> int:
    """``brine instance define FILE``"""
    if arguments.file is None:
        hint = "give a file, or -, or --from-config"
        raise UsageError("where is the spec to come from?", hint=hint)
    for option in ("node", "config"):
        if getattr(arguments, option) is not None:
            hint = "a spec that is given is this node's"
            raise UsageError(f"--{option} goes with --from-config", hint=hint)
    log_to_journal("brine")
    data, dry_run = _input(arguments.file), arguments.dry_run
    if arguments.live:
        undo_when_told_to_end()
    given = [SpecInput(None, "the spec", data)]
    if isinstance(data, list):
        given = list(inputs_of(data))
    results = define_several(
        given, dry_run=dry_run, live=arguments.live, keeps_user_state=arguments.keep_user_state
    )
    if isinstance(data, list):
        return tell_results(results, dry_run=dry_run, as_json=arguments.json)
    (result,) = results
    if result.error:
        with _naming(arguments.file, SpecError):
            raise result.error
    assert result.defined
    if not arguments.json:
        return tell_lines([result], dry_run=dry_run)
    status = tell_errors([result])
    warn_of(result)
    print(json.dumps({**result.to_json(), "dry_run": dry_run}, indent=2))
    return status


def edit(arguments: argparse.Namespace) -> int:
    """``brine instance edit``"""
    log_to_journal("brine")
    name = arguments.name
    before = store.load(name)
    text = json.dumps(to_json(before), indent=2) + "\n"
    with tempfile.NamedTemporaryFile(
        "w", prefix=f"brine-{name}-", suffix=".json", delete=False
    ) as f:
        f.write(text)
    kept = Path(f.name)
    try:
        _run_editor(kept)
        if kept.read_text() == text:
            defined = Defined(before, changed=False)
        else:
            data = _input(str(kept))
            if isinstance(data, dict) and data.get("name") != name:
                hint = f"brine instance rename {name} NAME gives it another name"
                raise UsageError(f"the name is {name}, and can't be edited", hint=hint)
            defined = define_instance(data, over=before)
    except BrineError:
        if kept.read_text() == text:
            kept.unlink()
        else:
            warn(f"what you wrote is kept as {kept}")
        raise
    kept.unlink()
    tell_lines([DefinitionResult(SpecInput(name, name), defined)])
    return 0


def _run_editor(file: Path) -> None:
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "editor"
    try:
        status = subprocess.run([*shlex.split(editor), str(file)], check=False).returncode
        fault = f"failed with exit status {status}" if status else ""
    except (OSError, ValueError) as error:
        fault = getattr(error, "strerror", None) or str(error)
    if fault:
        raise BrineError(f"{editor}: {fault}", hint="EDITOR names another one")


def import_machine(arguments: argparse.Namespace) -> int:
    """``brine instance import``"""
    if (arguments.image is None) == (arguments.libvirt is None):
        raise UsageError("what is to be imported?", hint="name an image, or --libvirt FILE")
    log_to_journal("brine")
    ignored: list[str] = []
    if arguments.libvirt is None:
        data = _of_image(Path(arguments.image).absolute(), arguments.link)
    else:
        content = _content(arguments.libvirt)
        with _naming(arguments.libvirt, BrineError):
            data, ignored = spec_of_domain(content, link=arguments.link or "")
    for key in ("name", "memory_mib", "vcpus", "accel"):
        if (value := getattr(arguments, key)) is not None:
            data[key] = value
    if data.get("accel") == "tcg" and data.get("cpu") == "host":
        del data["cpu"]
        ignored.append("cpu host, as this processor is emulated: QEMU's own is the guest's")
    defined = define_instance(data, is_new=True, dry_run=arguments.dry_run)
    spec = defined.spec
    if arguments.json:
        _print_json(spec, dry_run=arguments.dry_run, changed=defined.changed, ignored=ignored)
        return 0
    for what in ignored:
        warn(f"{spec.name}: no counterpart: {printable(what)}")
    if arguments.dry_run:
        print(json.dumps(data, indent=2))
    else:
        print(f"defined: {spec.name}; brine instance start {spec.name}")
    return 0


def _of_image(image: Path, link: str | None) -> dict[str, Any]:
    """The spec of a machine that boots an image."""
    found = format_of(image)
    if found not in FORMATS:
        hint = f"qemu-img convert -O qcow2 {image} {image.with_suffix('.qcow2')}"
        raise BrineError(f"{image}: is an image of the format {found}", hint=hint)
    disks = [{"path": str(image), "format": found}]
    data = {"name": image.name.split(".")[0], "disks": disks}
    return {**data, "nics": [{"link": link}]} if link else data


def undefine(arguments: argparse.Namespace) -> int:
    """``brine instance undefine``"""

    def act(name: str) -> tuple[str, bool]:
        undefine_instance(name)
        return f"undefined: {name}", True

    return act_on(arguments, act)


def rename(arguments: argparse.Namespace) -> int:
    """``brine instance rename``"""
    log_to_journal("brine")
    name, new_name = arguments.name, arguments.new_name
    rename_instance(name, new_name)
    print_done(f"renamed: {name} to {new_name}", as_json=arguments.json, name=new_name, source=name)
    return 0


def clone(arguments: argparse.Namespace) -> int:
    """``brine instance clone``"""
    undo_when_told_to_end()
    log_to_journal("brine")

    def tell(copy: DiskCopy) -> None:
        text = f"copying {copy.source} to {copy.target}, {copy.size_mib} MiB ..."
        print(f"brine: {printable(text)}", file=sys.stderr, flush=True)

    source, name, dry_run = arguments.name, arguments.new_name, arguments.dry_run
    disks, addresses = dict(arguments.disk), dict(arguments.address)
    spec, copies, notes = clone_instance(source, name, disks, addresses, dry_run=dry_run, tell=tell)
    if arguments.json:
        rows = [asdict(one) for one in copies]
        _print_json(spec, dry_run=dry_run, source=source, disks=rows, notes=notes)
        return 0
    for note in notes:
        warn(f"{name}: {printable(note)}")
    if dry_run:
        for one in copies:
            text = f"would be copied: {one.source} to {one.target}, {one.size_mib} MiB"
            print(printable(text))
        print(f"would be cloned: {source} to {name}")
    else:
        print(f"cloned: {source} to {name}; brine instance start {name}")
    return 0


def _print_json(spec: Spec, *, dry_run: bool, **more: Any) -> None:
    result = {"name": spec.name, **more, "dry_run": dry_run, "spec": to_json(spec)}
    print(json.dumps(result, indent=2))


# Input files: JSON, YAML, or libvirt's XML.


@contextmanager
def _naming(file: str, kind: type[BrineError]) -> Iterator[None]:
    """Name an input file in errors of a kind."""
    try:
        yield
    except kind as error:
        place = "standard input" if file == "-" else file
        raise BrineError(f"{place}: {error}", hint=error.hint) from error


def _content(file: str) -> bytes:
    if file == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise BrineError(f"{file}: can't be read: {error.strerror}") from error


def _input(file: str) -> Any:
    """The JSON or YAML of a file; ``-`` is standard input.

    :raises BrineError: if it can't be read, or is neither.
    """
    data = _content(file)
    is_yaml = file.endswith((".yaml", ".yml")) or (file == "-" and _YAML.match(data))
    with _naming(file, BrineError):
        return _yaml(data) if is_yaml else parse_json(data, unique_keys=True)


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

    try:
        return yaml.load(data, Loader=UniqueKeys)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" at line {mark.line + 1}" if mark else ""
        raise BrineError(f"not valid YAML{where}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BrineError(f"not valid YAML: {error}") from None
