"""Commands on disks that are killed anywhere lose no volume of a spec, and leave none unlisted."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from brine.common import cli, operation, paths
from brine.common.entry_points import EntryPoint
from brine.common.locks import node_lock
from brine.instance import store
from brine.instance.registry import define_instance, undefine_instance
from brine.storage import lvm
from brine.storage.directory_notes import RECORDS
from brine.storage.orphans import Orphan, orphans
from brine.storage.unit import UnitStatus
from brine.storage.volumes import managed_volumes, volume_in
from component.own_lvm import run_lvm
from component.test_volumes import Driver, driver, group, read, theirs_in, write
from killing import killed_after, killed_at, steps_of
from lab.waiting import wait_for

__all__ = ["driver", "group"]

pytestmark = [
    pytest.mark.usefixtures("own_node"),
    pytest.mark.skipif(os.geteuid() != 0, reason="makes disks as root; ./dev test runs as root"),
]

MIB = 1 << 20
PACKAGES = Path(__file__).parents[2] / "pkgs"


@dataclass(frozen=True)
class Place:
    """Two units, in which an instance has its disks."""

    driver: Driver
    other: str

    def disks(self, size_mib: int = 4) -> list[dict[str, Any]]:
        return [
            {"name": name, "unit": self.driver.unit, "size_mib": size_mib, "format": image}
            for name, image in (("root", "raw"), ("data", self.driver.format))
        ]

    def define(self, size_mib: int = 4) -> None:
        spec = {"name": "web1", "accel": "tcg", "disks": self.disks(size_mib)}
        file = paths.SPECS_DIR.parent / "web1.json"
        file.write_text(json.dumps(spec))
        brine("instance", "define", str(file))

    def left(self) -> set[str]:
        """All that is in both units, by its path."""
        units = [self.other]
        found = set()
        if self.driver.is_lvm:
            names = run_lvm("lvs", "--noheadings", "-o", "lv_name", self.driver.unit).split()
            found = {f"/dev/{self.driver.unit}/{name}" for name in names}
        else:
            units.append(self.driver.unit)
        for unit in units:
            found |= {f"{unit}/{name}" for name in os.listdir(unit) if name != RECORDS}
            with contextlib.suppress(FileNotFoundError):
                found |= {f"{unit}/{RECORDS}/{name}" for name in os.listdir(f"{unit}/{RECORDS}")}
        return found


@pytest.fixture
def place(driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(cli, "entry_points", offers)
    monkeypatch.setattr(operation, "entry_points", offers)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # kills are no power cuts
    with tempfile.TemporaryDirectory(prefix="brine-kills-", dir="/srv") as other:
        folders = [other] if driver.is_lvm else [driver.unit, other]
        settings = f'directories = {json.dumps(folders)}\ndefault_unit = "{driver.unit}"\n'
        (tmp_path / "etc/storage.toml").write_text(settings)
        yield Place(driver, other)
        clear()


def offers(group: str) -> list[EntryPoint]:
    """The entry points of the tree."""
    found = []
    for file in sorted(PACKAGES.glob("*/pyproject.toml")):
        project = tomllib.loads(file.read_text())["project"]
        found += [
            EntryPoint(*one) for one in project.get("entry-points", {}).get(group, {}).items()
        ]
    return found


def brine(*words: str) -> None:
    """Run a command, which succeeds."""
    status: object
    try:
        status = cli.main(words)
    except SystemExit as error:
        status = error.code
    assert status == 0, words


def clear() -> None:
    """Remove all instances and their volumes."""
    lvm.forget()
    for name in store.names():
        undefine_instance(name)
    for volume in managed_volumes():
        Orphan(volume, volume.status()).remove()
    lvm.forget()


def with_disks(place: Place) -> None:
    place.define()
    for disk in store.load("web1").disks:
        write(volume_in(disk.unit, disk.uuid), "kept")


def with_snapshots(place: Place) -> None:
    with_disks(place)
    for name in ("one", "two"):
        brine("disk", "snapshot", "web1", "--name", name)


def with_theirs(place: Place) -> None:
    path = theirs_in(place.driver, "kept")
    disk = {"name": "root", "path": path, "format": place.driver.format}
    define_instance({"name": "web1", "accel": "tcg", "disks": [disk]})


def with_orphans(place: Place) -> None:
    with_snapshots(place)
    brine("instance", "undefine", "web1")


def moved_away(place: Place) -> None:
    with_disks(place)
    brine("disk", "move", "web1", "data", "--to", place.other)


@dataclass(frozen=True)
class Verb:
    """A command on the disks of an instance, and what is there before it."""

    words: tuple[str, ...]
    before: Callable[[Place], None] = with_disks
    contents: tuple[str, ...] = ("kept",)


VERBS = {
    "add": Verb(("disk", "add", "web1", "--size", "4M"), contents=("kept", "")),
    "grow": Verb(("disk", "grow", "web1", "data", "9M")),
    "remove": Verb(("disk", "remove", "web1", "data")),
    "delete": Verb(("disk", "remove", "web1", "data", "--delete")),
    "adopt": Verb(("disk", "adopt", "web1", "root"), with_theirs),
    "snapshot": Verb(("disk", "snapshot", "web1", "--name", "one")),
    "remove snapshot": Verb(("disk", "snapshot", "web1", "--remove", "one"), with_snapshots),
    "rollback": Verb(("disk", "rollback", "web1", "two"), with_snapshots),
    "rollback far": Verb(("disk", "rollback", "web1", "one", "--discard-newer"), with_snapshots),
    "move": Verb(("disk", "move", "web1", "data", "--to", "{other}")),
    "evacuate": Verb(("storage", "evacuate", "file", "{other}", "--to", "{unit}"), moved_away),
    "clone": Verb(("instance", "clone", "web1", "web2")),
    "undefine": Verb(("instance", "undefine", "web1")),
    "undefine all": Verb(("instance", "undefine", "web1", "--delete-volumes", "--yes")),
    "orphans": Verb(("storage", "orphans", "--remove", "--yes"), with_orphans),
    "define": Verb(("define",), lambda _: None, contents=("",)),
    "define larger": Verb(("define", "9")),
}


def check(place: Place, verb: Verb, where: str) -> None:
    """Compare specs, volumes and files with each other, and see that nothing holds up others."""
    lvm.forget()
    assert operation.pending() == [], where
    contents = set()
    unclaimed = orphans()
    left = place.left()
    known = {disk.path for name in store.names() for disk in store.load(name).disks}
    for name in store.names():
        for disk in store.load(name).disks:
            known |= {layer.path for layer in disk.layers()}
            # An adoption that was killed has marked its disk, or was about to.
            known |= {path for path in left if f"/{RECORDS}/" in path and disk.uuid in path}
            if disk.unit:
                volume = volume_in(disk.unit, disk.uuid)
                status = volume.status()
                assert status.status is UnitStatus.OK, (where, disk, status)
                assert (status.path, status.format) == (disk.path, disk.format), where
                assert status.size >= disk.size_mib * MIB > 0, (where, disk, status)
                contents.add(read(volume))
                assert disk.uuid not in [one.volume.uuid for one in unclaimed], where
                known |= {path for path in left if disk.uuid in path}
    for one in unclaimed:
        known |= {one.status.path, *(path for path in left if one.volume.uuid in path)}
    assert left <= known, where
    assert not [path for path in left if re.fullmatch(r".*(?<!/\.brine)/\.[^/]*\.new", path)], where
    assert contents <= {*verb.contents}, where
    for lock in paths.LOCK_DIR.glob("*.lock"):
        with node_lock(lock.name.removesuffix(".lock"), timeout_s=0):
            pass


def kill(
    place: Place, what: str, killing: Callable[[Callable[[], object]], bool], where: str
) -> bool:
    """Do what a verb does, killed; see that all is right then, and when it is done again."""
    verb = VERBS[what]
    clear()
    verb.before(place)
    words = [word.format(other=place.other, unit=place.driver.unit) for word in verb.words]

    def work() -> None:
        if words[0] == "define":
            place.define(*map(int, words[1:]))
        else:
            brine(*words)

    was_killed = killing(work)
    # A program of a killed process may take a moment to end.
    wait_for("its end", lambda: all(one.is_interrupted() for one in operation.pending()))
    brine("operations", "settle")
    check(place, verb, where)
    if was_killed:
        with contextlib.suppress(SystemExit):  # nothing is left to do, perhaps
            cli.main(words) if words[0] != "define" else work()
        check(place, verb, f"{where}, and done again")
    return was_killed


# Steps in the middle of what a verb does.
SHORT = {
    "define": 36,
    "define larger": 21,
    "add": 21,
    "grow": 17,
    "delete": 11,
    "adopt": 6,
    "snapshot": 30,
    "remove snapshot": 36,
    "rollback far": 40,
    "move": 30,
    "clone": 42,
    "undefine all": 28,
}
SHARE = math.ceil(100 / len(VERBS))
# A kernel in an emulator takes its time for each command of LVM's.
SHORT_OF_LVM = ("define", "snapshot", "rollback far", "move")


def test_a_verb_that_is_killed_loses_no_volume_and_leaves_none_unlisted(place: Place) -> None:
    for what, number in SHORT.items():
        if not place.driver.is_lvm or what in SHORT_OF_LVM:
            assert kill(place, what, partial(killed_at, number), what)


@pytest.mark.long
@pytest.mark.parametrize("what", VERBS)
def test_two_hundred_kills_lose_no_volume_and_leave_none_unlisted(place: Place, what: str) -> None:
    """Of these, each verb has its share: at steps of it, and at any time with its programs."""
    chance = random.Random(what)
    counted = Counted()
    kill(place, what, counted, what)
    kills = 0
    while kills < SHARE:
        number = chance.randint(1, counted.steps)
        kills += kill(place, what, partial(killed_at, number), f"{what}, step {number}")
    while kills < 2 * SHARE:
        after = chance.random() * counted.duration_s
        kills += kill(place, what, partial(killed_after, after), f"{what}, {after} s")


class Counted:
    """Kills nothing, and counts."""

    steps = 0
    duration_s = 0.0

    def __call__(self, work: Callable[[], object]) -> bool:
        begun = time.monotonic()
        self.steps = steps_of(work)
        self.duration_s = time.monotonic() - begun
        return False
