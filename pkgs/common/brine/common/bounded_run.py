"""Running a program with a time limit, even if the program cannot be killed."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Mapping, Sequence

_KILLED_S = 1.0


def run_bounded(
    command: Sequence[str], *, timeout_s: float | None, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a program without input, and return its output and its exit status.

    :func:`subprocess.run` waits for a program that it has killed. A program that waits for the
    kernel can't be killed: this function leaves it behind.

    :param timeout_s: how long it may take; None is without a limit.
    :raises subprocess.TimeoutExpired: if it takes longer; it is killed as soon as it can be.
    :raises OSError: if it can't be run.
    """
    program = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
    )
    try:
        said, said_wrong = program.communicate(timeout=timeout_s)
    except BaseException:
        program.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(_KILLED_S)
        raise
    return subprocess.CompletedProcess(command, program.returncode, said, said_wrong)
