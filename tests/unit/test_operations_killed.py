"""Operations that are killed at each step: what is seen meanwhile, and how they end.

A new user of :mod:`brine.common.operation` adds a row to ``USERS``. Those that need a VM are in
tests/component/test_hotplug_faults.py, in ``OPERATIONS``.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from brine.common import cli, operation, paths
from brine.common.entry_points import EntryPoint
from brine.config.rotation import RotationStep, begin_rotation, confirm_step, rotation
from brine.instance import store
from brine.instance.clone import clone_instance
from brine.instance.observe import look
from brine.instance.registry import define_instance, rename_instance, undefine_instance
from brine.instance.validate import completed
from brine.vm.files import InstanceFiles
from brine.vm.markers import MarkerKind, file_of
from brine.vm.spec import Spec
from killing import each_step
from lab.scripted_systemctl import ScriptedSystemctl

CONTENT = '{"run": "unknown"}'
_FOLDERS = ("CONTROL_DIR", "MARKS_DIR", "LOCK_DIR", "RUNTIME_DIR", "SPECS_DIR", "UEFI_DIR")

State = Mapping[str, bytes]
"""The content of all files, by their paths."""


@dataclass(frozen=True)
class User:
    """A user of recorded operations.

    :param has_more: whether more work waits for other nodes at the end, which *same_key* then does.
    :param work: one operation of its own.
    :param same_key: a command of the same key, which ends the interrupted operation first and then
        changes nothing.
    """

    work: Callable[[], object]
    same_key: Callable[[], object]
    has_more: Callable[[], bool] = lambda: False


def _rotate() -> None:
    begin_rotation()
    _confirm_all()


def _confirm_all() -> None:
    operation.settle("cluster/key")
    while (now := rotation()).step is not RotationStep.DONE:
        confirm_step(now.step_id)


def _touch(name: str) -> Callable[[], object]:
    def touch() -> None:
        with store.alone(name):
            pass

    return touch


USERS = {
    "rename, by the new name": User(lambda: rename_instance("web1", "web2"), _touch("web2")),
    "rename, by the old name": User(lambda: rename_instance("web1", "web2"), _touch("web1")),
    "clone": User(lambda: clone_instance("web1", "web2"), _touch("web2")),
    "rotation of the key": User(_rotate, _confirm_all, lambda: bool(rotation().step_id)),
}


@pytest.fixture
def node(own_node: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    ScriptedSystemctl(own_node / "systemctl", monkeypatch)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # kills are no power cuts
    monkeypatch.setattr(paths, "SALT_KEYS_FILE", own_node / "keys/keys.json")
    entry = EntryPoint("operations", "brine.common.cli:OPERATIONS")
    monkeypatch.setattr(cli, "entry_points", lambda group: [entry] * (group == "brine.commands"))
    return own_node


def files_of(name: str) -> list[Path]:
    return [
        file_of(MarkerKind.SHUTDOWN, name),
        file_of(MarkerKind.STARTED, name),
        paths.RUNTIME_DIR / f"{name}.json",
        InstanceFiles(name).uefi_variables,
    ]


def have_web1(node: Path) -> Spec:
    """A node with web1, which its user has shut down, and its disks, and nothing else."""
    folders = [getattr(paths, name) for name in _FOLDERS]
    keys_file = paths.SALT_KEYS_FILE
    for folder in (*folders, paths.OPERATIONS_DIR, keys_file.parent, node / "disks"):
        shutil.rmtree(folder, ignore_errors=True)
    for folder in (*folders, keys_file.parent, node / "disks"):
        folder.mkdir()
    keys_file.write_text(json.dumps({"key": "old", "previous_key": "", "step": "done"}))
    disks = [{"path": str(node / f"disks/{name}"), "format": "raw"} for name in ("a", "b")]
    for disk in disks:
        Path(disk["path"]).write_text(disk["path"])
    uuid = "0b5bcb4e-8f2c-4f2e-9ab6-6f7b1b0a3b0d"
    keys: dict[str, Any] = {"uuid": uuid, "disks": disks, "firmware": "uefi"}
    spec = completed({"name": "web1", "admin_state": "up", **keys})
    store.save(spec)
    for file in files_of("web1"):
        file.write_text(CONTENT)
    return spec


def state(node: Path) -> State:
    """All files but locks; a new instance has new UUIDs each time, and a new key is random."""
    found: dict[str, bytes] = {}
    for name in (*_FOLDERS, "OPERATIONS_DIR"):
        folder = getattr(paths, name)
        if name != "LOCK_DIR" and folder.is_dir():
            found |= {str(file): file.read_bytes() for file in folder.iterdir() if file.is_file()}
    for name in ("web1", "web2"):
        if data := found.get(str(InstanceFiles(name).spec)):
            spec = json.loads(data)
            for one in (spec, *spec["disks"]):
                one["uuid"] = ""
            found[str(InstanceFiles(name).spec)] = json.dumps(spec).encode()
    given = json.loads(paths.SALT_KEYS_FILE.read_text())
    keys = {name: one if len(one) < 64 else "new" for name, one in given.items()}
    found[str(paths.SALT_KEYS_FILE)] = json.dumps(keys).encode()
    return found | {str(file): file.read_bytes() for file in (node / "disks").iterdir()}


def differences(there: State, *others: State) -> list[dict[str, Any]]:
    """What differs from each of the states."""
    return [
        {
            key: (there.get(key), other.get(key))
            for key in there.keys() | other.keys()
            if there.get(key) != other.get(key)
        }
        for other in others
    ]


def at_boot() -> None:
    """What the boot of the node does: locks are gone."""
    for lock in paths.LOCK_DIR.iterdir():
        lock.unlink()
    assert cli.main(["operations", "settle"]) == 0


@pytest.mark.parametrize(
    ("user", "how"),
    [
        *((user, "the next command") for user in USERS),
        *((user, "at boot") for user in USERS if user != "rename, by the old name"),
    ],
)
def test_killed_at_any_step_it_ends_whole_or_undone(node: Path, user: str, how: str) -> None:
    have_web1(node)
    before = state(node)
    USERS[user].work()
    after = state(node)
    assert before != after
    ends = []
    for number in each_step(USERS[user].work, lambda: have_web1(node)):
        seen = store.names()
        if how == "at boot":
            at_boot()
        if how != "at boot" or USERS[user].has_more():
            USERS[user].same_key()
            operation.remove_unfinished()
        assert store.names() == seen, number  # what was seen stays so
        ends.append(state(node))
        assert ends[-1] in (before, after), (number, differences(ends[-1], before, after))
    assert (ends[0], ends[-1]) == (before, after)
    # Once it is completed, it is not undone by a later kill.
    assert ends == sorted(ends, key=lambda one: one == after)


@pytest.mark.parametrize("user", ["rename, by the new name", "clone"])
def test_killed_again_while_it_is_settled_it_ends_the_same_way(node: Path, user: str) -> None:
    have_web1(node)
    before = state(node)
    USERS[user].work()
    after = state(node)
    for number in each_step(USERS[user].work, lambda: have_web1(node)):
        if number % 10 == 0 and operation.pending():
            for _ in each_step(USERS[user].same_key, lambda: None):
                pass
            operation.remove_unfinished()
            assert state(node) in (before, after), number


# What is seen meanwhile.


def test_a_renamed_one_has_one_name_and_all_its_files_at_any_time(node: Path) -> None:
    before = have_web1(node)
    for _ in each_step(lambda: rename_instance("web1", "web2"), lambda: have_web1(node)):
        (name,) = store.names()
        spec = store.load(name)
        assert (spec.uuid, spec.name) == (before.uuid, name)
        assert look(name).state.status == "USER_down"  # or it would be started
        assert [file.read_text() for file in files_of(name)] == [CONTENT] * 4
        store.settle_instance("web1")
        assert store.names() == [name]  # what was seen stays so
        # The other name can be given to a new one, which inherits nothing.
        other = "web1" if name == "web2" else "web2"
        assert define_instance({"name": other}).changed
        assert not any(file.exists() for file in files_of(other))
        assert store.load(name).uuid == before.uuid
        assert [file.read_text() for file in files_of(name)] == [CONTENT] * 4


def test_a_rename_that_0_2_0_left_half_done_gives_the_old_name_to_another(node: Path) -> None:
    before = have_web1(node)
    store.switch("web1", "web2")
    assert store.load("web2").uuid == before.uuid
    assert define_instance({"name": "web1"}).spec.uuid != before.uuid
    assert not any(file.exists() for file in files_of("web1"))


def test_one_that_is_undefined_is_there_whole_or_not_at_all(node: Path) -> None:
    for _ in each_step(lambda: undefine_instance("web1"), lambda: have_web1(node)):
        if store.names():
            assert [file.read_text() for file in files_of("web1")] == [CONTENT] * 4
            continue
        define_instance({"name": "web1"})
        assert not any(file.exists() for file in files_of("web1"))


def test_a_copy_that_another_file_replaced_is_not_removed(node: Path) -> None:
    """Its name may lead to something else by the time that a killed clone is undone."""
    for _ in each_step(lambda: clone_instance("web1", "web2"), lambda: have_web1(node)):
        copy = node / "disks/web2-a"
        if operation.pending() and copy.exists() and not store.load_sound("web2"):
            copy.unlink()
            copy.write_text("another")
            store.settle_instance("web2")
            assert copy.read_text() == "another"
            return
    raise AssertionError("it was never killed with a copy")
