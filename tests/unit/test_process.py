"""Work in the background, programs that do not answer, and capabilities given up."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from threading import Event

import pytest

from brine.common import process, progress
from brine.common.background import begun
from brine.common.process import run_bounded
from brine.common.progress import spoken_wait


def test_work_goes_on_meanwhile_and_what_it_raises_is_raised() -> None:
    done = Event()
    result, fault = begun(lambda: done.wait(60)), begun(lambda: int("nothing"))
    done.set()
    assert result() is True
    with pytest.raises(ValueError, match="nothing"):
        fault()


class _Heard(io.StringIO):
    """Stderr, and that something was said there."""

    def __init__(self) -> None:
        super().__init__()
        self.said = Event()

    def flush(self) -> None:
        self.said.set()


def test_only_what_takes_long_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = _Heard()
    monkeypatch.setattr(sys, "stderr", heard)
    with spoken_wait("web1: waiting for nothing, at most 1 s"):
        pass
    monkeypatch.setattr(progress, "_SILENT_S", 0.01)
    with spoken_wait("web1: waiting for its end, at most 60 s"):
        assert heard.said.wait(60)
    assert heard.getvalue() == "brine: web1: waiting for its end, at most 60 s\n"


def test_what_a_program_says_and_how_it_ends() -> None:
    script = "cat; echo said $WHO; echo wrong >&2; exit 3"
    done = run_bounded(["sh", "-c", script], timeout_s=10, environment={**os.environ, "WHO": "it"})
    assert (done.returncode, done.stdout, done.stderr) == (3, "said it\n", "wrong\n")
    with pytest.raises(FileNotFoundError):
        run_bounded(["/nowhere"], timeout_s=10, environment={})


def test_one_that_takes_too_long_is_killed_or_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TimeoutError):
        run_bounded(["sleep", "4322"], timeout_s=0.1, environment=dict(os.environ))
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


_SCRIPT = """
import subprocess
from brine.common.privileges import Capability, keep_only
keep_only(Capability.DAC_OVERRIDE, Capability.NET_ADMIN)
keep_only(Capability.NET_ADMIN, Capability.SYS_PTRACE)
print(open("/proc/self/status").read())
print(subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True).stdout)
"""


def test_a_process_keeps_what_it_named_and_had_and_its_programs_have_their_own() -> None:
    """Root keeps one capability here; anybody else has none to begin with."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        env={"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.defpath},
        capture_output=True,
        text=True,
        check=True,
    )
    ours, of_program = (int(found, 16) for found in re.findall(r"CapEff:\s*(\w+)", done.stdout))
    bounding = int(re.findall(r"CapBnd:\s*(\w+)", done.stdout)[0], 16)
    is_root = re.findall(r"Uid:\s+0\s", done.stdout) != []
    assert ours == (1 << 12 if is_root else 0) & bounding
    assert of_program == (bounding if is_root else 0)
