"""Where commands run: the host, or a node. Both are used the same way."""

from __future__ import annotations

import os
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from lab.command import Arguments, run_command
from lab.errors import LabError


class Machine(ABC):
    """A system on which the lab runs commands and guests.

    `name` is for people; `root` is where this process finds the machine's files.
    """

    name: str
    root: Path
    limit_s = 120.0
    """How long a command may take, unless its caller says otherwise."""

    @abstractmethod
    def command(self, args: Arguments) -> list[str]:
        """The command line that, run here, runs `args` on the machine."""

    def run(
        self,
        args: Arguments,
        *,
        check: bool = True,
        stdin: str = "",
        timeout_s: float | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command there to its end; its output is in `.stdout` and `.stderr`.

        Raises CommandError, with the command to replay, on failure (unless `check` is false) and
        when it takes longer than `timeout_s`; None is the machine's own limit.
        """
        what = f"{args[0]} on {self.name}"
        command = self.command(args)
        limit_s = self.limit_s if timeout_s is None else timeout_s
        return run_command(command, check=check, stdin=stdin, timeout_s=limit_s, what=what)

    def shell(
        self, script: str, *, check: bool = True, stdin: str = "", timeout_s: float | None = None
    ) -> str:
        """Run a bash script there, ending at its first error, and return what it printed."""
        args = ["bash", "-euo", "pipefail", "-c", script]
        return self.run(args, check=check, stdin=stdin, timeout_s=timeout_s).stdout

    def path(self, inside: str | Path) -> Path:
        """Where this process finds the machine's absolute path `inside`.

        A symbolic link with an absolute target still points into this process's own files.
        """
        return self.root / str(inside).lstrip("/")

    def put(self, source: Path, inside: str | Path) -> None:
        """Copy a file or a folder of this process to the machine's path `inside`.

        Parents are made; a folder's content goes into the folder `inside`.
        """
        target = self.path(inside)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
        else:
            shutil.copy2(source, target)

    def write(self, inside: str | Path, text: str, *, mode: int = 0o644) -> None:
        """Write a file of the machine; parents are made."""
        target = self.path(inside)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(mode)

    def read(self, inside: str | Path) -> str:
        """The text of a file of the machine."""
        return self.path(inside).read_text()


class Host(Machine):
    """The machine that the lab itself runs on."""

    name = "host"
    root = Path("/")

    def command(self, args: Arguments) -> list[str]:
        return [str(arg) for arg in args]


def booted_with_systemd() -> bool:
    """Whether this machine's PID 1 is systemd; see sd_booted(3)."""
    return Path("/run/systemd/system").is_dir()


def require_root(what: str) -> None:
    """Raise LabError unless this process may do what root may."""
    if os.geteuid() != 0:
        raise LabError(f"{what} needs root", hint="run the command with sudo")


def require_commands(what: str, commands: Sequence[str]) -> None:
    """Raise LabError when one of `commands` is not installed."""
    missing = [command for command in commands if shutil.which(command) is None]
    if missing:
        raise LabError(
            f"{what} needs {', '.join(missing)}", hint="`./dev` installs what its commands need"
        )
