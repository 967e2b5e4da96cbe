"""What an interrupt does to a command that has hardly begun, or is over."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_SCRIPT = """
import signal
signal.signal(signal.SIGINT, signal.{before})
from brine.common import cli, start
seen = [signal.getsignal(signal.SIGINT)]
def main():
    seen.append(signal.getsignal(signal.SIGINT))
    return 7
cli.main = main
status = start.main()
seen.append(signal.getsignal(signal.SIGINT))
print(status, *(getattr(each, "name", "heard") for each in seen))
"""


@pytest.mark.parametrize(
    ("before", "seen"),
    [
        ("default_int_handler", "7 SIG_DFL heard SIG_DFL"),
        ("SIG_IGN", "7 SIG_IGN SIG_IGN SIG_IGN"),
    ],
)
def test_it_is_an_exception_only_while_somebody_catches_that(before: str, seen: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-P", "-c", _SCRIPT.format(before=before)]
    done = subprocess.run(
        command, capture_output=True, check=True, text=True, timeout=60, env=environment
    )
    assert done.stdout.strip() == seen
