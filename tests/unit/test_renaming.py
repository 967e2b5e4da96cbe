"""A rename that is killed, at any step: there is one instance with all that belongs to it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from brine.common import paths
from brine.instance import store
from brine.instance.observe import look
from brine.instance.operations import define_instance, rename_instance, undefine_instance
from brine.instance.validate import define
from brine.vm.files import InstanceFiles
from brine.vm.markers import MarkerKind, file_of
from brine.vm.spec import Spec
from lab.scripted_systemctl import ScriptedSystemctl

_STEPS = ("os.rename", "os.link", "os.remove")
_KILLED = 77

# All that a rename has, and one more, of which the last test makes sure.
STEPS = range(1, 60)
CONTENT = '{"run": "unknown"}'


@pytest.fixture
def before(own_node: Path, monkeypatch: pytest.MonkeyPatch) -> Spec:
    """web1, which its user has shut down, on a node of its own."""
    ScriptedSystemctl(own_node / "systemctl", monkeypatch)
    spec = define({"name": "web1", "admin_state": "up"})
    store.save(spec)
    for file in files_of("web1"):
        file.write_text(CONTENT)
    return spec


def files_of(name: str) -> list[Path]:
    runtime = paths.RUNTIME_DIR / f"{name}.json"
    return [
        file_of(MarkerKind.SHUTDOWN, name),
        file_of(MarkerKind.STARTED, name),
        runtime,
        InstanceFiles(name).uefi_variables,
    ]


def left() -> Iterator[str]:
    """All files that there are."""
    for folder in (paths.MARKS_DIR, paths.RUNTIME_DIR, paths.SPECS_DIR, paths.UEFI_DIR):
        yield from (file.name for file in folder.iterdir())


def killed_at(number: int, work: Callable[[], object]) -> bool:
    """Do something in a process that is killed before its n-th change of a name in a folder;
    returns whether it came to that."""
    child = os.fork()
    if child == 0:
        count = 0

        def watch(event: str, _: object) -> None:
            nonlocal count
            if event in _STEPS:
                count += 1
                if count == number:
                    os._exit(_KILLED)

        sys.addaudithook(watch)
        try:
            work()
        finally:
            os._exit(0 if sys.exc_info()[0] is None else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, _KILLED)
    return status == _KILLED


@pytest.mark.parametrize("number", STEPS)
def test_there_is_one_with_all_its_files_and_another_rename_finishes_it(
    before: Spec, number: int
) -> None:
    killed_at(number, lambda: rename_instance("web1", "web2"))
    (name,) = store.names()
    spec = store.load(name)
    assert (spec.uuid, spec.name) == (before.uuid, name)
    assert look(name).state.status == "USER_down"  # or it would be started
    assert [file.read_text() for file in files_of(name)] == [CONTENT] * 4
    other = "web2" if name == "web1" else "web1"
    rename_instance(name, other)
    assert set(left()) == {file.name for file in [*files_of(other), Path(f"{other}.json")]}
    assert store.load(other).uuid == before.uuid


@pytest.mark.parametrize("number", STEPS)
def test_both_names_can_be_given_to_new_ones_which_inherit_nothing(
    before: Spec, number: int
) -> None:
    killed_at(number, lambda: rename_instance("web1", "web2"))
    (name,) = store.names()
    other = "web1" if name == "web2" else "web2"
    assert define_instance({"name": other}).changed
    assert not any(file.exists() for file in files_of(other))
    assert {spec.name for spec in store.load_all()} == {"web1", "web2"}
    assert store.load(name).uuid == before.uuid
    assert [file.read_text() for file in files_of(name)] == [CONTENT] * 4


def test_steps_are_enough_to_be_killed_at_each(before: Spec) -> None:
    assert killed_at(1, lambda: rename_instance("web1", "web2"))
    assert not killed_at(max(STEPS), lambda: rename_instance("web1", "web2"))
    assert store.names() == ["web2"]


@pytest.mark.parametrize("number", STEPS)
def test_one_that_is_undefined_is_there_whole_or_not_at_all(before: Spec, number: int) -> None:
    killed_at(number, lambda: undefine_instance("web1"))
    if store.names():
        assert [file.read_text() for file in files_of("web1")] == [CONTENT] * 4
        return
    define_instance({"name": "web1"})
    assert list(left()) == ["web1.json"]
