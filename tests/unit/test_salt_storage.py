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
        self.changes: list[str] = []
        self.refuses = ""

    def ask(self, *command: str) -> dict[str, Any]:
        if self.refuses in command[1:2]:
            return {"refused": "brine: error: no"}
        if command[:3] == ("storage", "list", "--type"):
            return {"said": [one for one in self.units if one["type"] == command[3]]}
        self.changes.append(" ".join(command[1:]))
        return {"said": {"result": "done"}}


@pytest.fixture
def brine() -> Brine:
    return Brine()


def states(brine: Brine, *, test: bool = False) -> ModuleType:
    given = {"__opts__": {"test": test}, "__salt__": {"brine.ask": brine.ask}}
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


@pytest.mark.parametrize("arguments", [["/dev/none", False], [DEVICE, "no"]])
def test_a_device_that_is_none_and_a_value_that_is_none_change_nothing(
    brine: Brine, arguments: list[Any]
) -> None:
    result = states(brine).allocatable(*arguments)
    assert (result["result"], brine.changes) == (False, [])
