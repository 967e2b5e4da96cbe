"""Debian trees with rpm and dnf: the nearest to Fedora that Debian's packages make.

Trixie has rpm 4.20 and dnf 4, as Fedora 42; forky has rpm 6 and dnf 5, as later ones. A generated
package, debian-tree, tells dnf what such a tree has, and does what Fedora's systemd does when
packages are installed.
"""

from __future__ import annotations

import inspect
import re
import shutil
from pathlib import Path

from lab import images
from lab.cache import cached
from lab.command import run_command
from lab.errors import LabError

DNF_OF_RELEASE = {"trixie": "dnf", "forky": "dnf5"}

MACROS = Path(__file__).with_name("fedora.macros")

_SPEC = Path(__file__).with_name("fedora-tree.spec")
_UPDATE_HELPER = Path(__file__).with_name("systemd-update-helper.sh")

# What builds, signs and checks RPMs, and makes a repository of them.
_RPM_PACKAGES = [
    "createrepo-c",
    "gpg",
    "gpg-agent",
    "python3-docutils",
    "python3-hypothesis",
    "python3-packaging",
    "python3-pip",
    "python3-pytest",
    "python3-pytest-xdist",
    "python3-setuptools",
    "python3-wheel",
    "python3-yaml",
    "rpm",
    "rpmlint",
]

# Names of Fedora's packages, and of Debian's with the same programs.
FEDORA_NAMES = {
    "iproute": "iproute2",
    "nftables": "nftables",
    "python3": "python3",
    "qemu-system-x86": "qemu-system-x86",
    "systemd": "systemd",
    "util-linux": "util-linux",
}

_LIST_PROJECTS = """
from importlib.metadata import distributions
for one in distributions():
    print(one.metadata["Name"], one.version)
"""


def dnf_image(release: str) -> Path:
    """A tree with systemd, QEMU, rpm, dnf and the run-time dependencies of Brine."""
    if release not in DNF_OF_RELEASE:
        raise LabError(
            f"no tree with dnf is made of Debian {release}",
            hint=f"known: {', '.join(DNF_OF_RELEASE)}",
        )
    packages = [*images._NODE_PACKAGES, *_RPM_PACKAGES, DNF_OF_RELEASE[release]]

    def build(folder: Path) -> None:
        tree = folder / "tree"
        images._debootstrap(release, tree, packages)
        if not (tree / "usr/bin/dnf").exists():
            (tree / "usr/bin/dnf").symlink_to("dnf5")  # as Fedora has it
        _describe(tree)

    steps = (images._debootstrap, dnf_image, _describe, _provides, _upstream)
    recipe = [inspect.getsource(step) for step in steps]
    recipe += [file.read_text() for file in (_SPEC, _UPDATE_HELPER)]
    ingredients = [release, packages, recipe, _LIST_PROJECTS, FEDORA_NAMES]
    return cached(f"dnf-{release}", ingredients, build, what=f"a tree with dnf, {release}") / "tree"


def _describe(tree: Path) -> None:
    """Install the package into a tree that tells rpm and dnf what the tree has."""
    folder = tree / "tmp/debian-tree"
    folder.mkdir()
    shutil.copy(_UPDATE_HELPER, folder)
    (folder / "provides").write_text("".join(f"Provides: {one}\n" for one in _provides(tree)))
    shutil.copy(_SPEC, folder)
    inside = f"/tmp/{folder.name}"
    build = ["rpmbuild", "-bb", "--quiet", "--define", f"_topdir {inside}"]
    build += ["--define", f"_sourcedir {inside}", f"{inside}/{_SPEC.name}"]
    run_command(["chroot", tree, *build])
    built = [f"/{file.relative_to(tree)}" for file in folder.glob("RPMS/*/*.rpm")]
    # There is nothing yet that its triggers are for, and here rpm 6 cannot run them.
    run_command(["chroot", tree, "rpm", "--install", "--nosignature", "--notriggers", *built])
    shutil.rmtree(folder)


def _provides(tree: Path) -> list[str]:
    """The provides of a tree: programs, packages by Fedora's names, and projects of Python."""
    python: list[str | Path] = ["chroot", tree, "python3", "-c"]
    version = "import sysconfig; print(sysconfig.get_python_version())"
    abi = run_command([*python, version]).stdout.strip()
    found = ["/bin/sh", "/usr/bin/bash", "/usr/bin/python3", "/usr/bin/sh", f"python(abi) = {abi}"]
    for name, debian_name in FEDORA_NAMES.items():
        query = ["dpkg-query", "--show", "--showformat=${Version}", debian_name]
        found.append(f"{name} = {_upstream(run_command(['chroot', tree, *query]).stdout)}")
    for line in run_command([*python, _LIST_PROJECTS]).stdout.splitlines():
        name, project_version = line.split()
        name = re.sub("[-_.]+", "-", name).lower()
        for capability in (f"python3dist({name})", f"python{abi}dist({name})"):
            found.append(f"{capability} = {_upstream(project_version)}")
    return found


def _upstream(version: str) -> str:
    """A Debian version without the epoch and the revision; a version of Python's as RPM has it."""
    upstream = version.partition(":")[2] or version
    return re.sub("[^A-Za-z0-9.]", ".", upstream.rpartition("-")[0] or upstream)
