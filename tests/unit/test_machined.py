"""An instance is registered with systemd-machined where that is installed, and nothing waits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from brine.instance.service import machined
from lab.waiting import wait_for

UUID = "5e000000-0000-4000-8000-0000000000ff"


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that a busctl writes its words to, once it may go on."""
    said, go_on, program = tmp_path / "said", tmp_path / "go-on", tmp_path / "busctl"
    os.mkfifo(go_on)
    program.write_text(f'#!/bin/sh\nread word <{go_on}\nprintf "%s\\n" "$@" >{said}.new\n')
    with program.open("a") as script:
        script.write(f"mv {said}.new {said}\n")
    program.chmod(0o755)
    monkeypatch.setattr(machined, "PROGRAM", str(program))
    monkeypatch.setattr(machined, "SERVICE_FILE", tmp_path / "service")
    return said


def test_a_start_gives_its_name_uuid_and_process_and_goes_on(asked: Path) -> None:
    machined.SERVICE_FILE.touch()
    machined.register_machine("web1", UUID, 4711)
    assert not asked.exists()
    asked.with_name("go-on").write_text("now\n")
    wait_for("busctl to be asked", asked.exists)
    call, machine = asked.read_text().split("sayssus\n")
    assert "RegisterMachine" in call
    numbers = [str(one) for one in bytes.fromhex(UUID.replace("-", ""))]
    assert machine.split("\n")[:-1] == ["web1", "16", *numbers, "brine", "vm", "4711", ""]


@pytest.mark.parametrize(("is_there", "pid"), [(False, 4711), (True, 0)])
def test_without_it_or_a_process_nothing_is_asked(
    asked: Path, is_there: bool, pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_there:
        machined.SERVICE_FILE.touch()
    monkeypatch.setattr(os, "posix_spawn", lambda *_, **__: pytest.fail("it was asked"))
    machined.register_machine("web1", UUID, pid)


def test_without_busctl_a_start_goes_on(asked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machined.SERVICE_FILE.touch()
    monkeypatch.setattr(machined, "PROGRAM", "/nowhere/busctl")
    machined.register_machine("web1", UUID, 4711)
