"""The options that `brine nic` and `brine disk` have in common."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from brine.common import paths
from brine.hotplug.plug_options import runtime_file


def test_an_instance_of_our_own_has_its_runtime_file_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "CONTROL_DIR", tmp_path / "ctrl")
    monkeypatch.setattr(paths, "RUNTIME_DIR", tmp_path)
    own = tmp_path / "web1.example.com.json"
    own.write_text("{}")

    def found(socket: str, runtime: Path | None = None) -> Path | None:
        return runtime_file(Namespace(qmp=tmp_path / socket, runtime=runtime))

    assert found("ctrl/web1.example.com.qmp") == own
    assert found("ctrl/web2.qmp") is None
    assert found("elsewhere/web1.example.com.qmp") is None
    assert found("ctrl/web1.example.com.qmp", tmp_path / "other") == tmp_path / "other"


def test_a_socket_that_leads_nowhere_has_no_runtime_file(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert runtime_file(Namespace(qmp=tmp_path / "a", runtime=None)) is None
