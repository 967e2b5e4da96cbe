"""Building Brine's Debian packages from the tree, and checking them with lintian."""

from __future__ import annotations

import fcntl
import inspect
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from lab import images
from lab.cache import cached
from lab.command import in_one_stream, run_command
from lab.errors import LabError
from lab.lock import folder_lock
from lab.machine import require_commands
from lab.progress import step
from lab.repository import make_repository
from lab.tree import TREE, copy_sources, digest, source_files
from lab.version import RELEASED

DIST = TREE / "dist"

_SOURCES = ("debian", "docs", "pkgs", "salt")
_STAMP = DIST / ".sources"
# What makes dist/ of the packages.
_RECIPES = [TREE / "lab" / name for name in ("packages.py", "repository.py", "signing.py")]
_TIMEOUT_S = 900.0


def build_packages() -> list[Path]:
    """Brine's Debian packages, in `dist/`; built anew only when their sources have changed.

    `dist/` is a signed repository. The build runs in a copy of the tree, so that it sees nothing
    but sources and leaves nothing.
    """
    sources = list(source_files(*_SOURCES))
    if not any(path.parent.name == "debian" for path in sources):
        raise LabError("the tree has no debian/", hint="a whole clone is needed")
    sources += [path for path in TREE.glob("[A-Z]*") if path.is_file()]
    wanted = digest([*sources, *_RECIPES])
    # Another ./dev in this tree makes dist/, too.
    with folder_lock(TREE, fcntl.LOCK_EX):
        if not (_STAMP.exists() and _STAMP.read_text() == wanted and _packages()):
            with step("building the Debian packages (into dist/)"):
                _make_dist(sources, wanted)
        return _packages()


def build(
    sources: Iterable[Path],
    folder: Path,
    *,
    with_source: bool = False,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Build the packages in the empty `folder`, from a copy of files of the tree.

    `with_source` also builds the source package; for that, `sources` is the whole tree. Of this
    process's environment, the build has only what `environment` names. No unit tests run.
    """
    copy = folder / "brine"
    copy_sources(sources, copy)
    _run_build(copy, with_source=with_source, environment=environment)


def lintian_image(release: str) -> Path:
    """A tree with systemd and the lintian of a Debian release."""
    packages = [*images._INIT, "lintian"]

    def build_tree(folder: Path) -> None:
        images._debootstrap(release, folder / "tree", packages)

    ingredients = [release, packages, inspect.getsource(images._debootstrap)]
    what = f"a tree with lintian, {release}"
    return cached(f"lintian-{release}", ingredients, build_tree, what=what) / "tree"


class NoHistoryError(LabError):
    """The tree does not have the commit of a released version: a shallow clone, or no clone."""


def released_packages(version: str) -> list[Path]:
    """The Debian packages of a released version, built from its commit; the cache keeps them.

    Raises NoHistoryError when the tree does not have that commit.
    """
    commit = RELEASED[version]

    def build_commit(folder: Path) -> None:
        sources, archive = folder / "brine", folder / "brine.tar"
        # The clone may be another user's.
        git = ["git", "-c", f"safe.directory={TREE}", "-C", str(TREE)]
        has_git = shutil.which("git") is not None
        if not has_git or run_command([*git, "cat-file", "-e", commit], check=False).returncode:
            raise NoHistoryError(
                f"Brine {version} cannot be built: no git, or no commit {commit} in {TREE}",
                hint="apt install git; in a shallow clone: git fetch --unshallow",
            )
        run_command([*git, "archive", f"--output={archive}", commit])
        sources.mkdir()
        run_command(["tar", "--extract", f"--file={archive}"], cwd=sources)
        _run_build(sources)
        shutil.rmtree(sources)

    what = f"the packages of Brine {version}"
    return sorted(cached(f"released-{version}", commit, build_commit, what=what).glob("*.deb"))


def _run_build(
    sources: Path,
    *,
    with_source: bool = False,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Build the packages of a tree into the folder beside it."""
    require_commands("building packages", ["dpkg-buildpackage"])
    command = ["dpkg-buildpackage", "--no-sign", "--build-profiles=nocheck"]
    command += [f"--build={'full' if with_source else 'binary'}"]
    run_command(
        in_one_stream(command),
        what=command[0],
        cwd=sources,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(sources.parent),
            "LANG": "C.UTF-8",
            "DEB_BUILD_OPTIONS": "nocheck",
            **(environment or {}),
        },
        timeout_s=_TIMEOUT_S,
    )


def _make_dist(sources: list[Path], stamp: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        build(sources, Path(scratch))
        try:
            DIST.mkdir(exist_ok=True)
            for old in DIST.iterdir():
                if old.is_file():  # dist/rpms/ is not ours
                    old.unlink()
        except OSError as error:
            raise LabError(
                f"cannot replace {error.filename}: {error.strerror}", hint="sudo rm -r dist"
            ) from None
        for package in Path(scratch).glob("*.deb"):
            shutil.copy(package, DIST)
        make_repository(DIST)
        _STAMP.write_text(stamp)


def _packages() -> list[Path]:
    return sorted(DIST.glob("*.deb"))
