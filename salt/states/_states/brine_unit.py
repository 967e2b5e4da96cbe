"""
The units of systemd that Brine's packages have
===============================================

The first such state of a run looks at the units of all of them, by one ``systemctl show``. Salt's
own states of services ask ``systemctl`` up to five times for each unit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    __context__: dict[str, Any] = {}
    __lowstate__: Sequence[dict[str, Any]] = ()
    __opts__: dict[str, Any] = {}
    __salt__: dict[str, Callable[..., Any]] = {}

Result = dict[str, Any]

_PROPERTIES = ("LoadState", "ActiveState", "UnitFileState")
_RUNS = ("active", "reloading", "refreshing")
_STOPPED = ("inactive", "failed")
_FOUND = "brine_unit_found"


def managed(name: str, active: bool | None = None, enabled: bool | None = None) -> Result:
    """Ensure a unit is active, inactive, enabled or disabled, as given. None leaves it as it is.

    A unit that does not exist is neither active nor enabled.

    Example::

        brine-watcher-timer:
          brine_unit.managed:
            - name: brine-watcher.timer
            - active: true
            - enabled: true

    :param name: of the unit, with its suffix.
    :param active: whether it runs; for a timer or a path, whether it waits.
    :param enabled: whether it starts with the node.
    """
    unit = _found_by_all().get(name)
    if unit is None or _changes(unit, active, enabled):
        # The unit may have changed since all of them were looked at.
        unit = _looked_at([name])[name]
    if not (changes := _changes(unit, active, enabled)):
        return _result(name, {}, "is as it should be")
    if unit["LoadState"] == "not-found":
        if __opts__["test"]:
            return {**_result(name, {}, "would be installed first"), "result": None}
        return _failure(name, "is not there: is its package installed?")
    commands = [_COMMANDS[key][change["new"]] for key, change in changes.items()]
    if __opts__["test"]:
        return _result(name, changes, f"would be changed: {', '.join(commands)}")
    __context__.pop(_FOUND, None)
    for command in commands:
        run = _systemctl(command, name)
        if run["retcode"] != 0:
            said = (run["stderr"] or run["stdout"]).strip()
            return _failure(name, f"systemctl {command} failed: {said}")
    return _result(name, changes, f"was changed: {', '.join(commands)}")


_COMMANDS = {
    "enabled": {True: "enable", False: "disable"},
    "active": {True: "start", False: "stop"},
}


def _changes(unit: Result, active: bool | None, enabled: bool | None) -> Result:
    """The changes that a unit needs."""
    is_enabled = unit["UnitFileState"] in ("enabled", "enabled-runtime")
    changes = {}
    if enabled is not None and enabled != is_enabled:
        changes["enabled"] = {"old": is_enabled, "new": enabled}
    # One that just starts or stops is neither.
    is_so = unit["ActiveState"] in (_RUNS if active else _STOPPED)
    if active is not None and not is_so:
        changes["active"] = {"old": not active, "new": active}
    return changes


def _found_by_all() -> dict[str, Result]:
    """The units of all such states of this run, as the first of them found them. It is nothing
    where a state runs alone."""
    if _FOUND not in __context__:
        names = [low["name"] for low in __lowstate__ if low["state"] == "brine_unit"]
        __context__[_FOUND] = _looked_at(list(dict.fromkeys(names))) if names else {}
    found: dict[str, Result] = __context__[_FOUND]
    return found


def _looked_at(names: list[str]) -> dict[str, Result]:
    """The properties of units, by their names."""
    run = _systemctl("show", f"--property={','.join(_PROPERTIES)}", *names)
    shown = [block.splitlines() for block in run["stdout"].strip().split("\n\n")]
    units = [dict(line.split("=", 1) for line in block if "=" in line) for block in shown]
    empty = dict.fromkeys(_PROPERTIES, "")
    return {
        name: {**empty, **(units[number] if number < len(units) else {})}
        for number, name in enumerate(names)
    }


def _systemctl(*arguments: str) -> Result:
    run: Result = __salt__["cmd.run_all"](
        ["systemctl", *arguments], python_shell=False, ignore_retcode=True
    )
    return run


def _failure(name: str, comment: str) -> Result:
    return {"name": name, "result": False, "changes": {}, "comment": f"{name} {comment}"}


def _result(name: str, changes: Result, comment: str) -> Result:
    result = None if changes and __opts__["test"] else True
    return {"name": name, "result": result, "changes": changes, "comment": f"{name} {comment}"}
