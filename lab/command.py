"""Running a command so that its failure can be understood and repeated."""

from __future__ import annotations

import shlex
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from lab.errors import LabError

SHOWN_LINES = 30

Arguments = Sequence[str | Path]


class CommandError(LabError):
    """A command failed or took too long; the text has its output and the command to replay.

    `returncode` is None for a command that ran out of time.
    """

    def __init__(
        self, what: str, args: Arguments, returncode: int | None, stdout: str, stderr: str
    ) -> None:
        self.returncode = returncode
        self.stdout = stdout
        self.stderr = stderr
        verdict = "took too long" if returncode is None else f"failed with {returncode}"
        output = (stdout.rstrip() + "\n" + stderr.rstrip()).strip().splitlines()
        shown = "\n".join(f"  | {line}" for line in output[-SHOWN_LINES:])
        super().__init__(
            "\n".join(filter(None, [f"{what} {verdict}", shown])),
            hint=f"to replay: {replay(args)}",
        )


def ending_with_us(signal: str = "KILL") -> list[str]:
    """A command's prefix, by which the kernel signals it when this process ends, even by SIGKILL.

    It is empty in all threads but the main one: what the kernel goes by is not the process but the
    thread that started the command, and others may end before.
    """
    if threading.current_thread() is not threading.main_thread():
        return []
    return ["setpriv", "--pdeathsig", signal]


def in_one_stream(args: Sequence[str]) -> list[str]:
    """A command whose errors are among its output: the last lines of a failure came last."""
    return ["sh", "-c", 'exec "$@" 2>&1', "sh", *args]


def replay(args: Arguments) -> str:
    """The command line that a person would type for `args`."""
    return shlex.join(str(arg) for arg in args)


def run_command(
    args: Arguments,
    *,
    check: bool = True,
    stdin: str = "",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float = 300,
    what: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return what it wrote.

    The output goes through files, not pipes: a daemon that the command leaves behind would hold
    a pipe open, and the reader would wait for it.

    `what` is how a failure calls the command, in place of its first word.

    Raises CommandError when it takes longer than `timeout_s`, or, with `check`, fails.
    """
    with (
        tempfile.TemporaryFile("w+", errors="replace") as out,
        tempfile.TemporaryFile("w+", errors="replace") as err,
        tempfile.TemporaryFile("w+") as given,
    ):
        given.write(stdin)
        given.seek(0)
        process = subprocess.Popen(args, stdin=given, stdout=out, stderr=err, env=env, cwd=cwd)
        returncode: int | None
        try:
            returncode = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            returncode = None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        out.seek(0)
        err.seek(0)
        stdout, stderr = out.read(), err.read()
    if returncode is None or (check and returncode != 0):
        raise CommandError(what or str(args[0]), args, returncode, stdout, stderr)
    return subprocess.CompletedProcess(list(args), returncode, stdout, stderr)
