"""A local apt repository on a machine."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from lab.command import run_command
from lab.machine import Machine, require_commands

FOLDER = "/srv/brine-repository"


def publish(machine: Machine, packages: Iterable[Path]) -> None:
    """Add Debian packages to the machine's local repository, made at the first call.

    Several versions of a package may stand side by side. apt is told of the repository, and knows
    its new content when this returns.
    """
    require_commands("a package repository", ["dpkg-scanpackages"])
    for package in packages:
        machine.put(package, f"{FOLDER}/{package.name}")
    # The index is made of copies: a working directory in another root is none that Perl can name.
    with tempfile.TemporaryDirectory() as scratch:
        for package in machine.path(FOLDER).glob("*.deb"):
            shutil.copy(package, scratch)
        index = run_command(["dpkg-scanpackages", "--multiversion", "."], cwd=Path(scratch)).stdout
    machine.write(f"{FOLDER}/Packages", index)
    source = f"deb [trusted=yes] file:{FOLDER} ./\n"
    machine.write("/etc/apt/sources.list.d/brine-lab.list", source)
    machine.run(["apt-get", "update", "--quiet=2"])
