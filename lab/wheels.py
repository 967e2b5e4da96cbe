"""Python packages for a node, fetched on the host: a node then needs neither pip's index nor a CA.

The host's own pip configuration decides where they come from.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from lab.cache import cached
from lab.command import run_command
from lab.debian import PYTHON_OF_RELEASE

SALT_REQUIREMENTS = Path(__file__).with_name("salt-requirements.txt")


def salt_wheels(release: str) -> Path:
    """A folder with Salt and what it imports, as wheels for the Python of `release`."""
    python = PYTHON_OF_RELEASE[release]
    requirements = SALT_REQUIREMENTS.read_text()

    def build(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            pip = _pip(Path(scratch))
            lines = [line for line in requirements.splitlines() if not line.startswith("#")]
            salt = [line for line in lines if line.startswith("salt==")]
            # Salt comes as source only; it is pure Python, so one wheel fits every Python.
            run_command([*pip, "wheel", "--no-deps", "--wheel-dir", folder, *salt])
            others = [line for line in lines if line not in salt]
            run_command([*pip, "download", "--no-deps", "--dest", folder, *_tags(python), *others])

    ingredients = [python, os.uname().machine, requirements]
    return cached(f"salt-wheels-{release}", ingredients, build, what=f"Salt's wheels, {release}")


def _pip(scratch: Path) -> list[str | Path]:
    """A pip of its own, so that nothing depends on what the host has installed."""
    run_command([sys.executable, "-m", "venv", scratch / "venv"])
    return [scratch / "venv/bin/pip", "--quiet", "--disable-pip-version-check"]


def _tags(python: str) -> list[str]:
    """pip's options for wheels that run on Debian with this version of Python."""
    machine = os.uname().machine
    # Debian 12 has glibc 2.36; wheels are built for one of these.
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in (34, 28, 17, 12, 5)]
    platforms += [f"manylinux2014_{machine}", f"manylinux2010_{machine}"]
    options = [option for platform in platforms for option in ("--platform", platform)]
    return [*options, "--only-binary=:all:", "--python-version", python]
