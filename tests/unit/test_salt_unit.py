"""The state of units, on a systemctl that has some."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pytest

from unit.salt_loader import load

TIMER, SERVICE, ABSENT = "brine-watcher.timer", "brine-kvmd.service", "brine-confd.service"


class Systemd:
    """The units of a node, and how `systemctl` was called."""

    def __init__(self) -> None:
        self.active = {TIMER: "active", SERVICE: "inactive"}
        self.enabled = {TIMER: "enabled", SERVICE: "disabled"}
        self.calls: list[list[str]] = []
        self.refuses = ""

    def run_all(self, command: list[str], **_: Any) -> dict[str, Any]:
        program, verb, *arguments = command
        assert program == "systemctl"
        self.calls.append([verb, *(one for one in arguments if not one.startswith("--"))])
        if verb == self.refuses:
            return {"retcode": 1, "stdout": "", "stderr": "Failed: it is masked.\n"}
        if verb == "show":
            text = "\n".join(self._shown(unit) for unit in arguments[1:])
            return {"retcode": 0, "stdout": text, "stderr": ""}
        (unit,) = arguments
        if verb in ("enable", "disable"):
            self.enabled[unit] = f"{verb}d"
        else:
            self.active[unit] = {"start": "active", "stop": "inactive"}[verb]
        return {"retcode": 0, "stdout": "", "stderr": ""}

    def _shown(self, unit: str) -> str:
        load_state = "loaded" if unit in self.active else "not-found"
        active, enabled = self.active.get(unit, "inactive"), self.enabled.get(unit, "")
        return f"LoadState={load_state}\nActiveState={active}\nUnitFileState={enabled}\n"

    def changing(self) -> list[list[str]]:
        """The calls that do not only look."""
        return [call for call in self.calls if call[0] != "show"]


@pytest.fixture
def systemd() -> Systemd:
    return Systemd()


def states(systemd: Systemd, *, test: bool = False, units: Iterable[str] = ()) -> ModuleType:
    """The states of one run, which are of these units."""
    lowstate = [{"state": "brine_unit", "fun": "managed", "name": unit} for unit in units]
    return load(
        "states",
        "brine_unit",
        __context__={},
        __lowstate__=[{"state": "file", "fun": "absent", "name": "/x"}, *lowstate],
        __opts__={"test": test},
        __salt__={"cmd.run_all": systemd.run_all},
    )


@pytest.mark.parametrize("test", [False, True])
def test_units_that_are_as_wanted_are_looked_at_once(systemd: Systemd, test: bool) -> None:
    state = states(systemd, test=test, units=[TIMER, SERVICE, ABSENT, TIMER])
    for name, active, enabled in (
        (TIMER, True, True),
        (SERVICE, False, False),
        (SERVICE, None, False),
        (ABSENT, False, False),
    ):
        result = state.managed(name, active, enabled)
        assert (result["result"], result["changes"]) == (True, {})
    assert systemd.calls == [["show", TIMER, SERVICE, ABSENT]]


@pytest.mark.parametrize("test", [False, True])
@pytest.mark.parametrize(
    ("unit", "wanted", "verbs"),
    [
        (SERVICE, {"active": True}, ["start"]),
        (SERVICE, {"active": True, "enabled": True}, ["enable", "start"]),
        (TIMER, {"active": False, "enabled": False}, ["disable", "stop"]),
        (TIMER, {"active": True, "enabled": False}, ["disable"]),
    ],
)
def test_what_is_not_as_wanted_is_changed(
    systemd: Systemd, unit: str, wanted: dict[str, bool], verbs: list[str], test: bool
) -> None:
    state = states(systemd, test=test, units=[TIMER, SERVICE])
    result = state.managed(unit, **wanted)
    assert result["result"] is (None if test else True)
    assert set(result["changes"]) <= set(wanted)
    assert systemd.changing() == ([] if test else [[verb, unit] for verb in verbs])
    again = state.managed(unit, **wanted)
    assert bool(again["changes"]) is test


@pytest.mark.parametrize("unit_state", ["activating", "deactivating"])
def test_a_unit_that_just_starts_or_stops_is_neither_active_nor_inactive(
    systemd: Systemd, unit_state: str
) -> None:
    for active, verb in ((True, "start"), (False, "stop")):
        systemd.active[SERVICE] = unit_state
        systemd.calls.clear()
        assert states(systemd).managed(SERVICE, active=active)["result"] is True
        assert systemd.changing() == [[verb, SERVICE]]


def test_a_failed_unit_is_as_good_as_stopped(systemd: Systemd) -> None:
    systemd.active[SERVICE] = "failed"
    assert states(systemd).managed(SERVICE, active=False)["changes"] == {}
    assert states(systemd).managed(SERVICE, active=True)["changes"] != {}


def test_what_has_changed_since_all_were_looked_at_is_not_done_again(systemd: Systemd) -> None:
    state = states(systemd, units=[TIMER, SERVICE])
    state.managed(TIMER, active=True)
    systemd.active[SERVICE] = "active"
    assert state.managed(SERVICE, active=True)["changes"] == {}
    assert systemd.changing() == []


def test_after_a_change_all_are_looked_at_anew(systemd: Systemd) -> None:
    state = states(systemd, units=[TIMER, SERVICE])
    state.managed(SERVICE, active=True)
    systemd.active[TIMER] = "inactive"
    assert state.managed(TIMER, active=True)["changes"] != {}


@pytest.mark.parametrize("test", [False, True])
def test_a_unit_that_is_not_there_would_be_installed_or_is_a_fault(
    systemd: Systemd, test: bool
) -> None:
    result = states(systemd, test=test).managed(ABSENT, active=True, enabled=True)
    assert (result["result"], result["changes"]) == (None if test else False, {})
    assert systemd.changing() == []


def test_what_systemctl_refuses_is_told(systemd: Systemd) -> None:
    systemd.refuses = "start"
    result = states(systemd).managed(SERVICE, active=True)
    assert (result["result"], result["changes"]) == (False, {})
    assert result["comment"] == f"{SERVICE} systemctl start failed: Failed: it is masked."
    systemd.refuses = "show"
    result = states(systemd).managed(SERVICE, active=False)
    assert systemd.changing()[-1] == ["stop", SERVICE]
