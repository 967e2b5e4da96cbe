"""The `brine` command on a machine: from the source tree on the host, installed on a node."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
from pathlib import Path

from lab.from_source import from_source
from lab.machine import Host, Machine


def brine(
    machine: Machine, *args: str | Path, check: bool = True, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run `brine ARGS...` to its end; see Machine.run()."""
    return machine.run([*prefix(machine), *args], check=check, timeout_s=timeout_s)


def brine_python(
    machine: Machine, script: str, *args: str | Path, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run a Python script that imports Brine, to its end."""
    if isinstance(machine, Host):
        _, path, python, *_ = prefix(machine)
        command = ["env", path, python]
    else:
        command = ["python3"]
    return machine.run([*command, "-P", "-c", script, *args], timeout_s=timeout_s)


def prefix(machine: Machine) -> list[str]:
    """The words before the arguments, for Machine.command()."""
    return list(_from_source()) if isinstance(machine, Host) else ["brine"]


@functools.cache
def _from_source() -> tuple[str, ...]:
    args, environment = from_source(["brine"])
    return ("env", f"PYTHONPATH={environment['PYTHONPATH']}", *args)


def kill_at_once(machine: Machine, process: subprocess.Popen[bytes]) -> None:
    """End a command that was started by Machine.command() with SIGKILL, and wait until it is gone.

    In a node the command is a child of the process that was started here.
    """
    if isinstance(machine, Host):
        process.kill()
    else:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for child in children:
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(int(child), signal.SIGKILL)
    process.wait(60)
