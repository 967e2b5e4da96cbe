"""Snapshots of an instance that does not run, on each kind of storage unit; see also the tests on
nodes, where it runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from brine.common import cli, operation
from brine.common.entry_points import EntryPoint
from brine.instance import store
from brine.instance.disks import snapshots
from brine.instance.registry import define_instance
from brine.storage.volume import Volume
from brine.storage.volumes import volume_in
from component.own_lvm import run_lvm
from component.test_volumes import Driver, driver, group, read, write

__all__ = ["driver", "group"]

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="makes disks as root; ./dev test runs as root"
)

KINDS = {"volumes": "volumes:VOLUMES"} | {
    name: f"snapshots:{kind}"
    for name, kind in (
        ("snapshot", "SNAPSHOT"),
        ("snapshot-removal", "REMOVAL"),
        ("snapshot-rest", "REST"),
        ("rollback", "ROLLBACK"),
    )
}


@pytest.fixture
def web1(own_node: None, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """An instance with two disks in the unit, and one that is no volume."""
    nouns = {
        "brine.commands": [EntryPoint("disk", "brine.hotplug.cli:DISK")],
        "brine.verbs": [EntryPoint("disk", "brine.instance.disks.cli:add_disk_verbs")],
    }
    monkeypatch.setattr(cli, "entry_points", lambda group: nouns.get(group, []))
    kinds = [EntryPoint(name, f"brine.instance.disks.{kind}") for name, kind in KINDS.items()]
    monkeypatch.setattr(operation, "entry_points", lambda _group: kinds)
    disks = [
        {"name": name, "unit": driver.unit, "size_mib": 8, "format": driver.format}
        for name in ("root", "data")
    ]
    define_instance({"name": "web1", "accel": "tcg", "disks": [*disks, {"path": "/srv/other"}]})
    return driver


def disk(*words: str) -> int:
    """Run `brine disk`; returns its status."""
    try:
        return cli.main(["disk", *words])
    except SystemExit as end:
        return int(end.code or 0)


def volumes() -> list[Volume]:
    return [volume_in(one.unit, one.uuid) for one in store.load("web1").disks if one.unit]


def write_to_all(text: str) -> None:
    for each in volumes():
        write(each, text)


def read_from_all() -> set[str]:
    return {read(each) for each in volumes()}


def test_disks_go_back_to_a_snapshot(web1: Driver, capsys: pytest.CaptureFixture[str]) -> None:
    write_to_all("first")
    assert disk("snapshot", "web1", "--name", "one", "--json") == 0
    taken = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in taken["disks"]] == ["root", "data"]
    assert any("/srv/other" in note for note in taken["notes"])
    assert any("many times" in note for note in taken["notes"]) is web1.is_lvm
    write_to_all("second")
    assert disk("snapshot", "web1", "--name", "two") == 0
    write_to_all("third")
    assert list(snapshots.snapshots_of(store.load("web1"))) == ["one", "two"]
    capsys.readouterr()

    assert disk("rollback", "web1", "one") == 1
    assert "two" in capsys.readouterr().err
    assert disk("rollback", "web1", "three") == 1
    assert "one, two" in capsys.readouterr().err
    assert read_from_all() == {"third"}

    assert disk("rollback", "web1", "two") == 0
    assert read_from_all() == {"second"}
    assert disk("rollback", "web1", "one", "--discard-newer") == 0
    assert read_from_all() == {"first"}
    assert list(snapshots.snapshots_of(store.load("web1"))) == ["one"]
    write_to_all("fourth")
    assert disk("snapshot", "web1", "--remove", "one") == 0
    assert read_from_all() == {"fourth"}
    assert [one.backing for one in store.load("web1").disks] == [None] * 3
    assert operation.pending() == []


@pytest.mark.parametrize("driver", ["file-qcow2"], indirect=True)
@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["snapshot", "web1", "--name", "../up"], 2),
        (["snapshot", "web1", "--name", "x" * 33], 2),
        (["snapshot", "web1", "--size", "10x"], 2),
        (["snapshot", "web1", "--size", "0G"], 2),
        (["snapshot", "web1", "--list", "--remove", "one"], 2),
        (["snapshot", "web1", "--remove", ""], 2),
        (["snapshot", "web1", "--remove="], 2),
        (["snapshot", "web1", "--name", ""], 2),
        (["snapshot", "web1", ""], 2),
        (["rollback", "web1", ""], 2),
        (["snapshot", "web1", "--remove", "one"], 1),
        (["snapshot", "web2"], 1),
        (["rollback", "web1", "../up"], 1),
    ],
)
def test_bad_input_is_refused_in_a_line_and_nothing_changes(
    web1: Driver, capsys: pytest.CaptureFixture[str], words: list[str], status: int
) -> None:
    before = store.load("web1")
    assert disk(*words) == status
    said = capsys.readouterr().err
    assert said.startswith("brine: error: "), said
    assert "Traceback" not in said
    assert store.load("web1") == before
    assert all(not each.status().snapshots for each in volumes())


def test_a_snapshot_that_fails_on_one_disk_is_on_none(
    web1: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    data = volumes()[1]
    if web1.is_lvm:  # something of others has the name that its snapshot would have
        size = ("--size", "4M", "--activate", "n", "-Zn", "-Wn")
        run_lvm("lvcreate", *size, "--name", f"brine-{data.uuid}.mine", data.unit)
    else:
        Path(data.unit, f"{data.uuid}.mine.qcow2").touch()
    known = store.load("web1")
    assert disk("snapshot", "web1", "--name", "mine") == 1
    assert capsys.readouterr().err.startswith("brine: error: ")
    assert [one.status().snapshots for one in volumes()] == [(), ()]
    assert store.load("web1") == known
    assert operation.pending() == []
