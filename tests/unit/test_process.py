"""Programs that do not answer."""

from __future__ import annotations

import os
import subprocess
import time

import pytest

from brine.common import process
from brine.common.process import run_bounded


def test_what_a_program_says_and_how_it_ends() -> None:
    script = "cat; echo said $WHO; echo wrong >&2; exit 3"
    done = run_bounded(["sh", "-c", script], timeout_s=10, environment={**os.environ, "WHO": "it"})
    assert (done.returncode, done.stdout, done.stderr) == (3, "said it\n", "wrong\n")
    with pytest.raises(FileNotFoundError):
        run_bounded(["/nowhere"], timeout_s=10, environment={})


def test_one_that_takes_too_long_is_killed() -> None:
    before = time.monotonic()
    with pytest.raises(TimeoutError):
        run_bounded(["sleep", "4322"], timeout_s=0.1, environment=dict(os.environ))
    assert time.monotonic() - before < 60


def test_one_that_can_not_be_killed_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_KILLED_S", 0.1)
    left: list[subprocess.Popen[str]] = []

    def survive(self: subprocess.Popen[str]) -> None:
        left.append(self)

    with monkeypatch.context() as patched, pytest.raises(TimeoutError):
        patched.setattr(subprocess.Popen, "kill", survive)
        run_bounded(["sleep", "4323"], timeout_s=0.1, environment=dict(os.environ))
    (program,) = left
    assert program.poll() is None
    program.kill()
    program.wait()
