"""Fixtures of unit tests."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from brine.common import ahead, cli, operation, paths
from brine.common.entry_points import EntryPoint
from brine.instance import store, supervisor, unit
from brine.watcher import restart_counter, volume_watch
from lab.fake_qemu import FakeQemus
from lab.scripted_systemctl import ScriptedSystemctl
from tree_entry_points import of_tree


@pytest.fixture
def own_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node of the test's own, with no instance: where all its files are."""
    for name in ("CONTROL_DIR", "MARKS_DIR", "LOCK_DIR", "RUNTIME_DIR", "ETC_DIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(paths, name, tmp_path / name)
    monkeypatch.setattr(paths, "ENDED_DIR", tmp_path / "ended")
    monkeypatch.setattr(paths, "CONSOLE_DIR", tmp_path / "console")
    monkeypatch.setattr(paths, "CONSOLE_LOG_DIR", tmp_path / "log")
    (tmp_path / "uefi").mkdir()
    monkeypatch.setattr(paths, "UEFI_DIR", tmp_path / "uefi")
    monkeypatch.setattr(paths, "OUTBOX_DIR", tmp_path / "outbox")
    monkeypatch.setattr(paths, "OPERATIONS_DIR", tmp_path / "operations")
    monkeypatch.setattr(paths, "VOLATILE_OPERATIONS_DIR", tmp_path / "begun")
    for each in (ahead, operation):
        monkeypatch.setattr(each, "entry_points", of_tree)
    entry = EntryPoint("watcher", "brine.watcher.restart_counter:WATCHER")
    monkeypatch.setattr(supervisor, "entry_points", lambda _group: [entry])
    monkeypatch.setattr(restart_counter, "FILE", tmp_path / "watcher.json")
    monkeypatch.setattr(volume_watch, "FILE", tmp_path / "watcher-volumes.json")
    monkeypatch.setattr(restart_counter, "PAUSE_FILE", tmp_path / "pause")
    monkeypatch.setattr(paths, "SPECS_DIR", tmp_path / "instances")
    monkeypatch.setattr(paths, "QEMU_VERSIONS_FILE", tmp_path / "qemu-versions.json")
    monkeypatch.setattr(paths, "NODE_FILE", tmp_path / "node.json")
    monkeypatch.setattr(paths, "CLAIMS_DIR", tmp_path / "claims")
    monkeypatch.setattr(paths, "UNASKED_FILE", tmp_path / "unasked")
    monkeypatch.setattr(store, "_GROUP", "none here")
    monkeypatch.setattr(unit, "DROP_INS", tmp_path / "systemd")
    return tmp_path


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedSystemctl:
    """A systemctl that says what the test has it say."""
    return ScriptedSystemctl(tmp_path / "systemctl", monkeypatch)


@pytest.fixture
def qemus() -> Iterator[FakeQemus]:
    """QEMUs that answer as the test has them answer."""
    with FakeQemus() as peers:
        yield peers


@pytest.fixture
def brine(
    own_node: Path,
    systemctl: ScriptedSystemctl,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Runs ``brine instance``, or another noun, on a node of its own: status, output, errors."""
    entries = [
        EntryPoint("instance", "brine.instance.cli:COMMAND"),
    ]
    verbs = [EntryPoint("node", "brine.instance.node_cli:add_node_verbs")]
    known = {"brine.commands": entries, "brine.verbs": verbs}
    monkeypatch.setattr(cli, "entry_points", lambda group: known.get(group, []))

    def run(
        *arguments: object, stdin: object = None, noun: str = "instance"
    ) -> tuple[int, str, str]:
        data = stdin if isinstance(stdin, bytes) else json.dumps(stdin).encode()
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
            try:
                status = cli.main([noun, *map(str, arguments)])
            except SystemExit as end:
                status = int(str(end.code))
        output = capsys.readouterr()
        return status, output.out, output.err

    # A command of a process of its own may have these as it likes; a test's may not.
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    yield run
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.fixture(autouse=True)
def hangups_are_heard() -> Iterator[None]:
    """A run under nohup(1) ignores SIGHUP, and so would what is tested."""
    before = signal.getsignal(signal.SIGHUP)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
