"""Salt's modules, states and grains, with what Salt's loader puts into each."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

SALT = Path(__file__).parents[2] / "salt"


class CommandExecutionError(Exception):
    """Salt's, which is not installed here."""


def load(kind: str, name: str, **given: Any) -> ModuleType:
    """Load a module.

    :param kind: modules, states or grains.
    :param given: what Salt would put into it: ``__opts__``, ``__salt__``, ...
    """
    return _load(SALT / f"states/_{kind}/{name}.py", given)


def load_map(**given: Any) -> ModuleType:
    """Load the map of the states, as Salt's renderer py does."""
    return _load(SALT / "states/brine/map.py", given)


def load_sls(name: str, **given: Any) -> ModuleType:
    """Load a file of the states that is a program in Python, as Salt's renderer py does."""
    return _load(SALT / f"states/brine/{name}.sls", given)


def _load(file: Path, given: Mapping[str, Any]) -> ModuleType:
    loader = SourceFileLoader(file.stem, str(file))  # whatever the name ends in
    spec = importlib.util.spec_from_file_location(file.stem, file, loader=loader)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    exceptions = mock.Mock(CommandExecutionError=CommandExecutionError)
    with mock.patch.dict(sys.modules, {"salt.exceptions": exceptions}):
        spec.loader.exec_module(module)
    vars(module).update(given)
    return module


def execution_module(run_all: Any) -> ModuleType:
    """The execution module ``brine``, for which this function is Salt's cmd.run_all."""
    return load("modules", "brine", __salt__={"cmd.run_all": run_all}, __context__={})


def be_on(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the master's host have this name."""

    class Uname:
        nodename = host

    monkeypatch.setattr(os, "uname", Uname)
