"""Running a program that may never answer."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Mapping, Sequence

_KILLED_S = 1.0


def run_bounded(
    command: Sequence[str], *, timeout_s: float | None, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a program, which gets no input; returns what it said, and how it ended.

    Unlike :func:`subprocess.run` this waits no longer for a program that can't even be killed, as
    it waits for the kernel.

    :param timeout_s: how long it may take; None is for ever.
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
