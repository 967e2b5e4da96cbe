"""Fixtures of component tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from brine.common import paths
from brine.common.entry_points import EntryPoint
from brine.instance import supervisor
from brine.watcher import restart_counter, volume_watch
from component import other_kernel
from component.hotplug_fixtures import booted_pc, booted_q35, images, pc, vm
from component.hotplug_vm import give_network
from component.kvmd_process import Kvmd, kvmd_process
from component.own_lvm import use_lvm_of
from lab.debian_kernel import on_debian_kernel
from lab.machine import Machine
from lab.parallel import turn_of
from lab.private_host import private_host
from lab.scripted_systemctl import ScriptedSystemctl

__all__ = ["booted_pc", "booted_q35", "images", "pc", "vm"]


def pytest_configure(config: pytest.Config) -> None:
    for mark, meaning in other_kernel.MARKS.items():
        config.addinivalue_line("markers", f"{mark}: {meaning}")


@pytest.hookimpl(trylast=True)  # when all have been chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    other_kernel.replace(items, is_long=config.getoption("--long"))
    items.sort(key=lambda item: turn_of(item.nodeid))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if on_debian_kernel():
        other_kernel.tell(terminalreporter)


@pytest.fixture
def kvmd() -> Iterator[Kvmd]:
    """A running kvmd."""
    with kvmd_process() as process:
        process.start()
        yield process


@pytest.fixture(autouse=True)
def no_lvm_of_others(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LVM sees no device until a test says which: others' tests make theirs meanwhile."""
    use_lvm_of([], tmp_path_factory.getbasetemp() / "no-lvm", monkeypatch)


@pytest.fixture(autouse=True)
def own_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is noted of folders that are storage units is of one test."""
    monkeypatch.setattr(paths, "STORAGE_DIRECTORIES_FILE", tmp_path / "storage-directories.json")


@pytest.fixture
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of the test's own for the records of taps, their locks, scripts and sockets."""
    names = ("TAPS_DIR", "LOCK_DIR", "NIC_SCRIPTS_DIR", "CONTROL_DIR", "HOTPLUG_DIR")
    for name in (*names, "OPERATIONS_DIR", "VOLATILE_OPERATIONS_DIR"):
        monkeypatch.setattr(paths, name, tmp_path / name)
    paths.CONTROL_DIR.mkdir()


@pytest.fixture
def own_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node of the test's own, with no instance, whose systemd is scripted."""
    names = ("CONTROL_DIR", "MARKS_DIR", "LOCK_DIR", "RUNTIME_DIR", "CONSOLE_DIR", "OUTBOX_DIR")
    for name in (*names, "CONSOLE_LOG_DIR", "OPERATIONS_DIR", "VOLATILE_OPERATIONS_DIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(paths, name, tmp_path / name)
    monkeypatch.setattr(paths, "SPECS_DIR", tmp_path / "instances")
    monkeypatch.setattr(paths, "UEFI_DIR", tmp_path / "uefi")
    entry = EntryPoint("watcher", "brine.watcher.restart_counter:WATCHER")
    monkeypatch.setattr(supervisor, "entry_points", lambda _group: [entry])
    monkeypatch.setattr(restart_counter, "FILE", tmp_path / "watcher.json")
    monkeypatch.setattr(volume_watch, "FILE", tmp_path / "watcher-volumes.json")
    ScriptedSystemctl(tmp_path / "systemctl", monkeypatch)


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """Where VMs run, and Brine's commands: this host, with a network of its own."""
    with private_host() as host:
        give_network(host)
        yield host
