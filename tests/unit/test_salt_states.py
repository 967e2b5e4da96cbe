"""The states of Salt's side, on what the ``brine`` command prints."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from types import ModuleType
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from unit.salt_loader import SALT, execution_module, load, load_map

STATE_MODULES = sorted(file.stem for file in (SALT / "states/_states").glob("*.py"))


@pytest.fixture
def state() -> ModuleType:
    """The state module, as Salt loads it."""
    return load("states", "brine_config")


def applied(
    state: ModuleType, *changes: dict[str, Any], test: bool, fire: Any = None
) -> dict[str, Any]:
    """The result of the state when the command prints *changes*.

    :param fire: Salt's event.fire_master; None is a minion without a master.
    """
    said = {"dry_run": test, "old_serial": 4, "new_serial": None if test else 5, "notes": ["so"]}

    def run_all(command: list[str], **_: Any) -> dict[str, Any]:
        assert command[:4] == ["brine", "config", "apply", "-"]
        assert ("--dry-run" in command) is test
        return {"retcode": 0, "stdout": json.dumps({**said, "changes": changes}), "stderr": ""}

    functions = {"brine.ask": execution_module(run_all).ask, "cmd.which": lambda name: name}
    vars(state).update(
        __opts__={"test": test, "file_client": "remote" if fire else "local"},
        __pillar__={"brine": {"cluster": {}}},
        __salt__=functions | ({"event.fire_master": fire} if fire else {}),
    )
    result: dict[str, Any] = state.applied("cluster")
    return result


@pytest.mark.parametrize("test", [False, True])
@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (("added", None, None, ""), {"old": None, "new": "added"}),
        (("removed", None, None, ""), {"old": None, "new": "removed"}),
        (("added", None, None, "disk 0 of web1"), {"old": None, "new": "added: disk 0 of web1"}),
        (("added", None, 4, ""), {"old": None, "new": 4}),
        (("removed", 4, None, ""), {"old": 4, "new": None}),
        (("changed", "up", "down", ""), {"old": "up", "new": "down"}),
    ],
)
def test_a_change_is_shown(
    state: ModuleType, change: tuple[Any, ...], shown: dict[str, Any], test: bool
) -> None:
    one = dict(zip(("change", "old", "new", "note"), change, strict=True), pointer="/x")
    result = applied(state, one, test=test)
    assert result["changes"] == {"/x": shown}
    assert result["result"] is (None if test else True)
    assert result["comment"].endswith("\nso")


@pytest.mark.parametrize("test", [False, True])
@pytest.mark.parametrize("has_changed", [False, True])
def test_the_master_hears_of_a_change_and_of_nothing_else(
    state: ModuleType, has_changed: bool, test: bool
) -> None:
    fired: list[Any] = []
    change = {"pointer": "/x", "change": "changed", "old": 1, "new": 2}
    changes = [change] if has_changed else []
    applied(state, *changes, test=test, fire=lambda *event: fired.append(event))
    is_told = has_changed and not test
    assert fired == ([({}, "brine/config/changed")] if is_told else [])


@pytest.mark.parametrize("test", [False, True])
def test_the_master_hears_that_the_configuration_is_there(state: ModuleType, test: bool) -> None:
    fired: list[Any] = []
    for client in ("remote", "local"):
        vars(state).update(
            __opts__={"test": test, "file_client": client},
            __salt__={"event.fire_master": lambda *event: fired.append(event)},
        )
        assert state.announced("configuration")["changes"] == {}
    assert fired == ([] if test else [({}, "brine/config/changed")])


@pytest.mark.parametrize("test", [False, True])
def test_what_the_formula_does_not_know_is_for_the_command(state: ModuleType, test: bool) -> None:
    given: list[Any] = []

    def run_all(command: list[str], stdin: str, **_: Any) -> dict[str, Any]:
        given.append(json.loads(stdin))
        return {"retcode": 1, "stdout": "", "stderr": "brine: error: /instancs: is not known"}

    of_the_formula = dict.fromkeys(load_map().DEFAULTS)
    pillar: dict[str, Any] = {**of_the_formula, "instancs": {}, "networks": None}
    vars(state).update(
        __opts__={"test": test},
        __pillar__={"brine": pillar},
        __salt__={"brine.ask": execution_module(run_all).ask, "cmd.which": lambda name: name},
    )
    result = state.applied("cluster", prune=True)
    assert given == [{"instancs": {}, "networks": None}]
    assert (result["result"], result["changes"]) == (False, {})
    assert result["comment"] == "brine: error: /instancs: is not known"


def no_command(*_: Any, **given: Any) -> dict[str, Any]:
    """Raise what Salt's cmd.run_all raises where the command is missing."""
    reason = "[Errno 2] No such file or directory: 'brine'"
    context = {"stdin": given.get("stdin"), "env": {"TOKEN": "secret"}}
    text = f"Unable to run command '['brine']' with the context '{context}'"
    raise RuntimeError(f"{text}, reason: {reason}")


def no_json(*_: Any, **given: Any) -> dict[str, Any]:
    """Answer as cmd.run_all does for a command that prints no JSON."""
    return {"retcode": 0, "stdout": f"secret {given.get('stdin')}", "stderr": ""}


@pytest.mark.parametrize(
    ("run_all", "said"),
    [
        (no_command, "brine can't be run: [Errno 2] No such file or directory: 'brine'"),
        (no_json, "did not print JSON"),
    ],
)
def test_what_can_not_be_run_or_read_is_one_line_without_secrets(run_all: Any, said: str) -> None:
    for name, function, arguments in (
        ("brine_config", "applied", []),
        ("brine_config", "ssconf_exported", []),
        ("brine_instance", "defined", [{"append": "secret"}]),
        ("brine_instance", "running", []),
    ):
        module = load("states", name)
        vars(module).update(
            __context__={},
            __lowstate__=(),
            __opts__={"test": False},
            __pillar__={"brine": {"cluster": {"name": "secret"}}},
            __salt__={
                "brine.ask": execution_module(run_all).ask,
                "file.file_exists": lambda _: True,
            },
        )
        result = getattr(module, function)("web1", *arguments)
        assert (result["result"], result["changes"]) == (False, {})
        assert said in result["comment"]
        assert "secret" not in result["comment"]
        assert "\n" not in result["comment"]


@pytest.mark.parametrize("module", STATE_MODULES)
def test_each_state_says_what_it_ensures_and_has_an_example(module: str) -> None:
    """The example is a state that Salt can read, with arguments that the function takes."""
    of_module = vars(load("states", module))
    states = {
        name: function
        for name, function in of_module.items()
        if inspect.isfunction(function) and name[0] != "_" and name != "mod_init"
    }
    assert states
    for name, function in states.items():
        said = inspect.getdoc(function) or ""
        assert said.startswith("Ensure "), name
        example = re.search(r"^Example::\n\n((?:    .*\n|\n)+)(?=:param )", said, re.MULTILINE)
        assert example, name
        calls = [
            given[f"{module}.{name}"]
            for given in yaml.safe_load(textwrap.dedent(example[1])).values()
            if f"{module}.{name}" in given
        ]
        assert calls, name
        given = {key for call in calls for one in call for key in one}
        known = {*inspect.signature(function).parameters, "require", "onchanges"}
        assert given <= known, name
