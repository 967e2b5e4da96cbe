"""Building Brine's Debian packages from the tree."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from lab.command import run_command
from lab.errors import LabError
from lab.lock import folder_lock
from lab.machine import require_commands
from lab.progress import step
from lab.tree import TREE, copy_sources, digest, source_files

DIST = TREE / "dist"

_SOURCES = ("debian", "docs", "pkgs", "salt")
_STAMP = DIST / ".sources"


def build_packages() -> list[Path]:
    """Brine's Debian packages, in `dist/`; built anew only when their sources have changed.

    The build runs in a copy of the tree, so that it sees nothing but sources and leaves nothing.
    """
    require_commands("building packages", ["dpkg-buildpackage"])
    sources = list(source_files(*_SOURCES))
    if not any(path.parent.name == "debian" for path in sources):
        raise LabError("the tree has no debian/", hint="a whole clone is needed")
    sources += [path for path in TREE.glob("[A-Z]*") if path.is_file()]
    wanted = digest(sources)
    # Another ./dev in this tree makes dist/, too.
    with folder_lock(TREE, fcntl.LOCK_EX):
        if not (_STAMP.exists() and _STAMP.read_text() == wanted and _packages()):
            with step("building the Debian packages (into dist/)"):
                _build(sources, wanted)
        return _packages()


def _build(sources: list[Path], stamp: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "brine"
        copy_sources(sources, copy)
        run_command(
            ["dpkg-buildpackage", "--build=binary", "--no-sign"],
            cwd=copy,
            env={"PATH": os.environ["PATH"], "HOME": scratch, "LANG": "C.UTF-8"},
            timeout_s=900,
        )
        try:
            if DIST.exists():
                shutil.rmtree(DIST)
            DIST.mkdir()
        except OSError as error:
            raise LabError(
                f"cannot replace {error.filename}: {error.strerror}", hint="sudo rm -r dist"
            ) from None
        for package in Path(scratch).glob("*.deb"):
            shutil.copy(package, DIST)
        _STAMP.write_text(stamp)


def _packages() -> list[Path]:
    return sorted(DIST.glob("*.deb"))
