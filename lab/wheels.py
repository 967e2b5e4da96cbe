"""Python packages for a node, fetched on the host: a node then needs neither pip's index nor a CA.

The host's own pip configuration decides where they come from.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

from lab.cache import cached
from lab.command import run_command
from lab.debian import PYTHON_OF_RELEASE

SALT_REQUIREMENTS = Path(__file__).with_name("salt-requirements.txt")


# The last of each older series, which run with the same packages as the one of the requirements.
OLDER_SALTS = {"3006": "3006.30", "3007": "3007.17"}


def salt_wheels(release: str, series: str = "") -> Path:
    """A folder with Salt and what it imports, as wheels for the Python of `release`.

    `series` is one of OLDER_SALTS; without it, Salt is the one of the requirements.
    """
    python = PYTHON_OF_RELEASE[release]
    requirements = SALT_REQUIREMENTS.read_text()
    if series:
        pinned = f"salt=={OLDER_SALTS[series]}"
        requirements = re.sub(r"^salt==.*", pinned, requirements, flags=re.MULTILINE)

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
    name = "-".join(filter(None, ["salt-wheels", release, series]))
    what = ", ".join(filter(None, ["Salt's wheels", series, release]))
    return cached(name, ingredients, build, what=what)


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
