"""The lab's commands have default signals, also where a shell's background job runs the tests."""

from __future__ import annotations

import os
import subprocess
import sys

BACKGROUND_JOB = ["sh", "-c", 'trap "" INT QUIT; exec "$@"', "sh"]
"""What runs below it ignores SIGINT and SIGQUIT, as a shell's background job does."""

PROGRAM = """
import os, signal, subprocess
from lab.signals import give_commands_default_signals

give_commands_default_signals()
os.kill(os.getpid(), signal.SIGINT)
print("goes on", flush=True)
for number in (signal.SIGINT, signal.SIGQUIT):
    print(subprocess.run(["sh", "-c", f"kill -{number:d} $$"]).returncode, flush=True)
"""


def test_a_command_of_a_background_job_hears_signals() -> None:
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [*BACKGROUND_JOB, sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=path, capture_output=True, text=True, check=True)
    assert done.stdout == "goes on\n-2\n-3\n"
