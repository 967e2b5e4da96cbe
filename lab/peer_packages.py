"""A peer's Debian package: fetched with the machine's apt, unpacked into a cache, not installed."""

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lab.cache import cache_root
from lab.errors import LabError

NO_SUCH_PACKAGE_HINT = (
    "apt-get update, or look with apt-cache search; --only brine runs without a peer"
)

PYTHON = "/usr/bin/python3"
"""The distribution's, which its packages of Python modules are for."""


def newest(pattern: str) -> str:
    """The package name with the highest number in it: `ganeti-haskell-3.1` rather than `-3.0`."""
    names = [line.split()[0] for line in _run("apt-cache", "search", "--names-only", pattern)]
    if not names:
        raise LabError(f"apt knows no package named like {pattern}", hint=NO_SUCH_PACKAGE_HINT)
    return max(names, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])


def version(package: str) -> str:
    """The version that apt would fetch."""
    for line in _run("apt-cache", "show", "--no-all-versions", package):
        if line.startswith("Version: "):
            return line.removeprefix("Version: ")
    raise LabError(
        f"apt does not say which version of {package} there is", hint=NO_SUCH_PACKAGE_HINT
    )


def unpacked(package: str, program: str) -> Path:
    """The folder with a package's files, and the shared libraries that are not installed here.

    `program` is the path in it of what is to be run.
    """
    root = cache_root() / "peers" / f"{package}_{version(package)}"
    if not root.is_dir():
        with _made_whole(root) as tree:
            _fetch([package], tree)
            _add_libraries(package, tree / program, tree)
    return root


def unpacked_module(package: str, folder: str, module: str) -> Path:
    """The folder with a package's files, and the Python modules and libraries it needs.

    `folder` is the path in it of the package's own modules, of which `module` must be importable
    by the system's Python (see `python_environment`).
    """
    root = cache_root() / "peers" / f"{package}_{version(package)}"
    if not root.is_dir():
        with _made_whole(root) as tree:
            _fetch([package], tree)
            _add_modules(package, folder, module, tree)
    return root


def source_file(package: str, source: str, member: str) -> Path:
    """A file of the upstream source that a package was built from.

    `source` is the source package's name, `member` the file's path in it. Apt's own sources need no
    line for source packages.
    """
    root = cache_root() / "peers" / f"{source}-source_{version(package)}"
    if not root.is_dir():
        with _made_whole(root) as tree:
            _fetch_source(package, source, tree)
    return root / member


def archives(packages: Sequence[str], status: Path, key: str) -> list[Path]:
    """The archives of packages, and of all that they need, for a system to install them offline.

    `status` is that system's list of what it has (dpkg's), of this machine's release. `key` tells
    one such system from another.
    """
    root = cache_root() / "peers" / f"{packages[0]}_{version(packages[0])}_{key}"
    if not root.is_dir():
        with _made_whole(root) as folder:
            (folder / "partial").mkdir()
            _run(
                *("apt-get", "-qq", "--yes", "--download-only", "--no-install-recommends"),
                *("-o", f"Dir::State::status={status}", "-o", f"Dir::Cache::archives={folder}"),
                # That system is not this one, whose dpkg may be at work.
                *("-o", "Debug::NoLocking=1", "-o", "APT::Sandbox::User=root"),
                *("install", *packages),
            )
    return sorted(root.glob("*.deb"))


def python_environment(root: Path, folder: str) -> dict[str, str]:
    """The environment with which the system's Python imports from an unpacked tree."""
    return {
        "PYTHONPATH": f"{root / folder}:{root / 'usr/lib/python3/dist-packages'}",
        "LD_LIBRARY_PATH": library_path(root),
    }


def library_path(root: Path) -> str:
    """LD_LIBRARY_PATH for programs in an unpacked tree."""
    folders = sorted({file.parent for file in root.glob("**/lib*.so*")})
    return ":".join(str(folder) for folder in folders)


@contextlib.contextmanager
def _made_whole(root: Path) -> Iterator[Path]:
    """A folder to fill; it becomes `root` only when whole, so an interrupted run leaves no half."""
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent) as scratch:
        tree = Path(scratch, "tree")
        tree.mkdir()
        yield tree
        tree.chmod(0o755)
        try:
            tree.rename(root)
        except OSError:  # another run was faster
            if not root.is_dir():
                raise


def _add_libraries(package: str, program: Path, tree: Path) -> None:
    level = [package]
    fetched = {package}
    while missing := _missing_libraries(program, tree):
        level = [name for name in _depends(level) if name not in fetched and not _installed(name)]
        if not level:
            raise LabError(
                f"{program.name} lacks {', '.join(missing)}, and no dependency brings it",
                hint="install the library with apt",
            )
        _fetch(level, tree)
        fetched.update(level)


def _add_modules(package: str, folder: str, module: str, tree: Path) -> None:
    level = [package]
    fetched = {package}
    while trouble := _import_trouble(module, python_environment(tree, folder)):
        # Of what a daemon depends on, only that which a module is made of.
        level = [
            name
            for name in _depends(level, providers=True)
            if name.startswith(("python3-", "lib")) and name not in fetched and not _installed(name)
        ]
        if not level:
            raise LabError(
                f"{package}: {module} can't be imported: {trouble}",
                hint="install what it lacks with apt",
            )
        _fetch(level, tree)
        fetched.update(level)


def _import_trouble(module: str, env: Mapping[str, str]) -> str:
    """The last line of what Python says, or nothing where the import works."""
    done = subprocess.run(
        [PYTHON, "-c", f"import {module}"],
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return (done.stderr.strip().splitlines() or ["no reason"])[-1] if done.returncode else ""


def _missing_libraries(program: Path, tree: Path) -> list[str]:
    env = {**os.environ, "LD_LIBRARY_PATH": library_path(tree)}
    return [line.split()[0] for line in _run("ldd", str(program), env=env) if "not found" in line]


def _depends(packages: Sequence[str], *, providers: bool = False) -> list[str]:
    """The dependencies of packages; with `providers` also the providers of virtual ones."""
    found = []
    for line in _run("apt-cache", "depends", *packages):
        words = line.split()
        # Providers stand alone, further to the right than the virtual package that they provide.
        if words[0].endswith("Depends:") or (providers and line.startswith("    ")):
            found.append(words[-1])
    return [name for name in found if "<" not in name]


def _installed(package: str) -> bool:
    query = ["dpkg-query", "--show", "--showformat=${db:Status-Status}", package]
    return (
        "installed"
        in subprocess.run(
            query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False
        ).stdout.split()
    )


def _fetch(packages: Sequence[str], tree: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        # As root, apt would drop to a user who can't write here, and warn about it.
        _run("apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", *packages, cwd=folder)
        for archive in Path(folder).glob("*.deb"):
            _run("dpkg", "-x", str(archive), str(tree))


def _fetch_source(package: str, source: str, tree: Path) -> None:
    # Such as: ganeti-3.0 | 3.0.2-3 | http://SITE/debian bookworm/main amd64 Packages
    site, suite = _run("apt-cache", "madison", package)[0].split("|")[2].split()[:2]
    suite, _, component = suite.partition("/")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "state/lists/partial").mkdir(parents=True)
        Path(folder, "sources.list").write_text(f"deb-src {site} {suite} {component}\n")
        options = {
            "Dir::Etc::sourcelist": f"{folder}/sources.list",
            "Dir::Etc::sourceparts": "/dev/null",
            "Dir::State": f"{folder}/state",
            "Dir::State::status": "/dev/null",
            "Dir::Cache": folder,
            "APT::Sandbox::User": "root",
        }
        apt = ["apt-get", "-qq", *(part for pair in options.items() for part in _option(*pair))]
        _run(*apt, "update")
        _run(*apt, "source", "--download-only", "--tar-only", source, cwd=folder)
        (archive,) = Path(folder).glob("*.orig.tar.*")
        _run("tar", "-xf", str(archive), "--strip-components=1", "-C", str(tree))


def _option(name: str, value: str) -> tuple[str, str]:
    return "-o", f"{name}={value}"


def _run(*command: str, cwd: str | None = None, env: dict[str, str] | None = None) -> list[str]:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise LabError(f"{' '.join(command)} failed: {said}", hint=NO_SUCH_PACKAGE_HINT)
    return done.stdout.splitlines()
