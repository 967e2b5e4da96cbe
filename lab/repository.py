"""Signed apt repositories of Brine's packages: in a folder here, and on a machine."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterable
from email.utils import formatdate
from pathlib import Path

from lab.command import run_command
from lab.machine import Machine, require_commands
from lab.signing import keyring, public_key, sign

FOLDER = "/srv/brine-repository"
KEY = "brine.asc"
"""The file of a repository that has the key, in ASCII armour."""

_SOURCE = "/etc/apt/sources.list.d/brine-lab.list"
_KNOWN_KEY = "/etc/apt/keyrings/brine-lab.asc"
_INDEX = ("Packages", "InRelease", KEY)


def make_repository(folder: Path) -> None:
    """Make a folder with Debian packages a repository: apt's index of them, signed, and the key.

    Several versions of a package may stand side by side.
    """
    require_commands("a package repository", ["dpkg-scanpackages"])
    scan = ["dpkg-scanpackages", "--multiversion", "--hash", "sha256", "."]
    index = run_command(scan, cwd=folder).stdout.encode()
    release = (
        "Origin: Brine\n"
        "Label: Brine\n"
        "Suite: stable\n"
        f"Date: {formatdate(usegmt=True)}\n"
        "SHA256:\n"
        f" {hashlib.sha256(index).hexdigest()} {len(index)} Packages\n"
    )
    with keyring() as home:
        (folder / "Packages").write_bytes(index)
        (folder / "InRelease").write_text(sign(home, release))
        (folder / KEY).write_text(public_key(home))


def publish(machine: Machine, packages: Iterable[Path]) -> None:
    """Add Debian packages to the machine's local repository, made at the first call.

    The repository and its key become one of apt's sources, and apt reads its new content.
    """
    for package in packages:
        machine.put(package, f"{FOLDER}/{package.name}")
    # The index is made of copies: a working directory in another root is none that Perl can name.
    with tempfile.TemporaryDirectory() as scratch:
        for package in machine.path(FOLDER).glob("*.deb"):
            shutil.copy(package, scratch)
        make_repository(Path(scratch))
        for name in _INDEX:
            machine.put(Path(scratch, name), f"{FOLDER}/{name}")
        machine.put(Path(scratch, KEY), _KNOWN_KEY)
    machine.write(_SOURCE, f"deb [signed-by={_KNOWN_KEY}] file:{FOLDER} ./\n")
    machine.run(["apt-get", "update", "--quiet=2"])
