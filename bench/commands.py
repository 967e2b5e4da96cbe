"""Whole commands, from before one is started until it has ended, as a shell would run them."""

import subprocess
import tempfile
import time
from collections.abc import Sequence

from bench.errors import BenchError

ENVIRONMENT = {"HOME": "/root", "LANG": "C.UTF-8", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}


def timed(*commands: Sequence[str]) -> float:
    """Run commands one after the other; returns how many seconds they took together.

    Raises BenchError when one fails.
    """
    # Not a pipe, which somebody would have to read meanwhile.
    with tempfile.TemporaryFile() as output:
        began_at = time.perf_counter()
        for command in commands:
            process = subprocess.Popen(
                command, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
            # With a limit, Python would look only now and then.
            if process.wait() != 0:
                output.seek(0)
                said = output.read().decode(errors="replace").strip()
                raise BenchError(
                    f"{' '.join(command)} failed: {said}", hint="is it busy? try again"
                )
        return time.perf_counter() - began_at
