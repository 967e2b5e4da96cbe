"""The states of storage units, on a brine that has some."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from unit.salt_loader import load

FOLDER, DEVICE, UUID = "/srv/vms", "/dev/sdb", "4Q3Zbr-nfHz-iY7f-lBuM-G4Pl-lZAo-45Aldc"


class Brine:
    """The storage units of a node, and the commands that changed them."""

    def __init__(self) -> None:
        self.units: list[dict[str, Any]] = [
            {"type": "file", "name": FOLDER, "status": "ok", "allocatable": True},
            {"type": "file", "name": "/srv/gone", "status": "missing", "allocatable": False},
            {"type": "lvm-pv", "name": DEVICE, "uuid": UUID, "allocatable": True},
        ]
        self.default = "vg1"
        self.is_installed = True
        self.asked = 0
        self.changes: list[str] = []
        self.refuses = ""

    def ask(self, *command: str) -> dict[str, Any]:
        if self.refuses in command[1:2]:
            return {"refused": "brine: error: no"}
        if command == ("storage", "default"):
            return {"said": {"default_unit": self.default}}
        if command[:3] == ("storage", "list", "--type"):
            self.asked += 1
            return {"said": [one for one in self.units if one["type"] == command[3]]}
        self.changes.append(" ".join(command[1:]))
        return {"said": {"result": "done"}}


@pytest.fixture
def brine() -> Brine:
    return Brine()


def states(brine: Brine, *, test: bool = False) -> ModuleType:
    version = "0.3.0" if brine.is_installed else ""
    salt = {"brine.ask": brine.ask, "pkg.version": {"brine-storage": version}.__getitem__}
    given = {"__opts__": {"test": test}, "__salt__": salt, "__context__": {}}
    return load("states", "brine_storage", **given)


@pytest.mark.parametrize("test", [False, True])
@pytest.mark.parametrize(
    ("function", "arguments", "change"),
    [
        ("unit", [FOLDER], ""),
        ("unit", ["/srv/new"], "create file /srv/new"),
        ("unit", ["/srv/gone"], "create file /srv/gone"),
        ("absent", ["/srv/new"], ""),
        ("absent", [FOLDER], f"remove file {FOLDER}"),
        ("default", ["vg1"], ""),
        ("default", [FOLDER], f"default {FOLDER}"),
        ("allocatable", [DEVICE], ""),
        ("allocatable", [DEVICE, False], f"modify lvm-pv {DEVICE} --allocatable no"),
        ("allocatable", [UUID, False], f"modify lvm-pv {DEVICE} --allocatable no"),
    ],
)
def test_a_unit_becomes_what_is_wanted(
    brine: Brine, function: str, arguments: list[Any], change: str, test: bool
) -> None:
    result = getattr(states(brine, test=test), function)(*arguments)
    assert result["result"] is (None if change and test else True)
    assert bool(result["changes"]) == bool(change)
    assert brine.changes == ([change] if change and not test else [])


@pytest.mark.parametrize(
    ("function", "arguments"), [("unit", [FOLDER]), ("default", ["vg1"]), ("allocatable", [DEVICE])]
)
def test_a_trial_on_a_node_without_the_package_says_what_it_would_do(
    brine: Brine, function: str, arguments: list[Any]
) -> None:
    brine.is_installed, brine.refuses = False, arguments[0]
    result = getattr(states(brine, test=True), function)(*arguments)
    assert (result["result"], bool(result["changes"])) == (None, True)
    assert (brine.asked, brine.changes) == (0, [])


def test_a_run_asks_once_until_something_changes(brine: Brine) -> None:
    loaded = states(brine)
    for folder, asked in ((FOLDER, 1), (FOLDER, 1), ("/srv/new", 1), (FOLDER, 2)):
        loaded.unit(folder)
        assert brine.asked == asked
    loaded.mod_init({})
    loaded.unit(FOLDER)
    assert brine.asked == 3


def test_a_device_is_known_by_its_other_names(brine: Brine, tmp_path: Path) -> None:
    (tmp_path / "by-id").symlink_to(DEVICE)
    result = states(brine).allocatable(str(tmp_path / "by-id"), False)
    assert result["result"] is True
    assert brine.changes == [f"modify lvm-pv {DEVICE} --allocatable no"]


@pytest.mark.parametrize("refuses", ["list", "modify"])
def test_what_brine_refuses_fails_in_one_line(brine: Brine, refuses: str) -> None:
    brine.refuses = refuses
    result = states(brine).allocatable(DEVICE, False)
    assert (result["result"], result["changes"]) == (False, {})
    assert "brine: error: no" in result["comment"]


def test_a_default_unit_that_brine_refuses_fails_in_one_line(brine: Brine) -> None:
    brine.refuses = "default"
    result = states(brine).default(FOLDER)
    assert (result["result"], result["changes"]) == (False, {})
    assert "brine: error: no" in result["comment"]


@pytest.mark.parametrize("arguments", [["/dev/none", False], [DEVICE, "no"]])
def test_a_device_that_is_none_and_a_value_that_is_none_change_nothing(
    brine: Brine, arguments: list[Any]
) -> None:
    result = states(brine).allocatable(*arguments)
    assert (result["result"], brine.changes) == (False, [])
