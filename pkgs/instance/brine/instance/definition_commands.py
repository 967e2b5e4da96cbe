"""The verbs of ``brine instance`` for specs: define, edit, rename, undefine."""

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
from pathlib import Path
from typing import Any

from brine.common.cli import print_done, undo_when_told_to_end
from brine.common.errors import BrineError, UsageError, install_hint, warn
from brine.config.schema import parse_json
from brine.instance import store
from brine.instance.action import act_on
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
from brine.instance.messages import log_to_journal
from brine.instance.operations import (
    Defined,
    define_instance,
    rename_instance,
    undefine_instance,
)
from brine.instance.spec import SpecError, to_json

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
        given,
        dry_run=dry_run,
        live=arguments.live,
        keeps_user_state=arguments.keep_user_state,
        asked=arguments.ahead,
    )
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


# Input files: JSON or YAML.


@contextmanager
def naming(file: str, kind: type[BrineError]) -> Iterator[None]:
    """Name an input file in errors of a kind."""
    try:
        yield
    except kind as error:
        place = "standard input" if file == "-" else file
        raise BrineError(f"{place}: {error}", hint=error.hint) from error


def content_of(file: str) -> bytes:
    """The content of an input file; ``-`` is standard input."""
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
    data = content_of(file)
    is_yaml = file.endswith((".yaml", ".yml")) or (file == "-" and _YAML.match(data))
    with naming(file, BrineError):
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
