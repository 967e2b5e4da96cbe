"""What unit tests share."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from brine.common import paths
from brine.instance import restart_counter, store


@pytest.fixture
def own_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node of the test's own, with no instance: where all its files are."""
    for name in ("CONTROL_DIR", "MARKS_DIR", "LOCK_DIR", "RUNTIME_DIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(paths, name, tmp_path / name)
    monkeypatch.setattr(paths, "ENDED_DIR", tmp_path / "ended")
    monkeypatch.setattr(paths, "CONSOLE_DIR", tmp_path / "console")
    monkeypatch.setattr(paths, "CONSOLE_LOG_DIR", tmp_path / "log")
    (tmp_path / "uefi").mkdir()
    monkeypatch.setattr(paths, "UEFI_DIR", tmp_path / "uefi")
    monkeypatch.setattr(paths, "OUTBOX_DIR", tmp_path / "outbox")
    monkeypatch.setattr(restart_counter, "FILE", tmp_path / "watcher.json")
    monkeypatch.setattr(paths, "SPECS_DIR", tmp_path / "instances")
    monkeypatch.setattr(store, "FOLDER", tmp_path / "instances")
    monkeypatch.setattr(store, "_GROUP", "none here")
    return tmp_path


@pytest.fixture(autouse=True)
def hangups_are_heard() -> Iterator[None]:
    """A run under nohup(1) ignores SIGHUP, and so would what is tested."""
    before = signal.getsignal(signal.SIGHUP)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
