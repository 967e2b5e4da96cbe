"""Building Brine's RPMs from the tree, and signed dnf repositories of them."""

from __future__ import annotations

import fcntl
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from lab.command import in_one_stream, run_command
from lab.fedora import MACROS, dnf_image
from lab.lock import folder_lock
from lab.machine import Machine
from lab.node import boot_node
from lab.packages import DIST
from lab.progress import step
from lab.repository import FOLDER, KEY
from lab.signing import KEY_FILE, OWNER, keyring, public_key
from lab.tree import TREE, clone, copy_sources, digest, source_files
from lab.version import versions

SPEC = TREE / "rpm/brine.spec"

_SOURCES = ("docs", "pkgs", "rpm", "salt")
# What makes dist/rpms/ of the packages, beside the node's own tree.
_RECIPES = [MACROS, Path(__file__)]
_TOP = "/srv/rpmbuild"
_KEY_COPY = "/srv/signing-key.asc"
_BUILD_TIMEOUT_S = 900.0

_REPOSITORY_FILE = f"""\
[brine]
name=Brine
baseurl=file://{FOLDER}
gpgkey=file://{FOLDER}/{KEY}
gpgcheck=1
repo_gpgcheck=1
"""


def build_rpms(release: str) -> Path:
    """The folder in `dist/rpms/` with Brine's RPMs, built on a node of this Debian release.

    It is a signed repository of dnf. The RPMs are for the Python of that release, and are built
    anew only when their sources have changed.
    """
    sources = _sources()
    folder = DIST / "rpms" / release
    stamp = folder / ".sources"
    wanted = digest([*sources, *_RECIPES])
    # Another ./dev in this tree makes dist/, too.
    with folder_lock(TREE, fcntl.LOCK_EX):
        if not (stamp.exists() and stamp.read_text() == wanted):
            with (
                boot_node(release, image=dnf_image) as node,
                step(f"building the RPMs (into {folder.relative_to(TREE)}/)"),
            ):
                add_to_repository(node, build_on(node))
                shutil.rmtree(folder, ignore_errors=True)
                shutil.copytree(node.path(FOLDER), folder)
                stamp.write_text(wanted)
    return folder


def build_on(machine: Machine, *, revision: int = 1, with_tests: bool = False) -> list[Path]:
    """Build the RPMs on a machine with rpm, as the given revision of the version (`Release`).

    `with_tests` runs the unit tests. Returns the RPMs' paths there, as this process finds them.
    """
    name = f"brine-{versions()[0]}"
    with tempfile.TemporaryDirectory() as scratch:
        copy_sources(clone() if with_tests else _sources(), Path(scratch, name))
        archive = Path(scratch, f"{name}.tar.gz")
        tar = ["tar", "--create", "--gzip", "--owner=0", "--group=0", f"--file={archive}"]
        run_command([*tar, f"--directory={scratch}", name])
        machine.put(archive, f"{_TOP}/SOURCES/{archive.name}")
    spec = re.sub(r"(?m)^(Release: +)1", rf"\g<1>{revision}", SPEC.read_text())
    machine.write(f"{_TOP}/{SPEC.name}", spec)
    machine.put(MACROS, "/etc/rpm/macros.fedora")
    build = ["rpmbuild", "-bb", "--with" if with_tests else "--without", "tests"]
    build += ["--define", f"_topdir {_TOP}", f"{_TOP}/{SPEC.name}"]
    machine.run(in_one_stream(build), timeout_s=_BUILD_TIMEOUT_S)
    return sorted(machine.path(_TOP).glob(f"RPMS/*/*-{versions()[0]}-{revision}.*rpm"))


def add_to_repository(machine: Machine, packages: Iterable[Path]) -> None:
    """Add RPMs to the signed repository of a machine with rpm, and sign them, too."""
    files = []
    for package in packages:
        machine.put(package, f"{FOLDER}/{package.name}")
        files.append(f"{FOLDER}/{package.name}")
    with keyring() as home:
        machine.write(f"{FOLDER}/{KEY}", public_key(home))
    machine.put(KEY_FILE, _KEY_COPY)
    machine.run(["gpg", "--batch", "--quiet", "--import", _KEY_COPY])
    # rpm 6 has another name for the same.
    identity = [f"--define={macro} {OWNER}" for macro in ("_gpg_name", "_openpgp_sign_id")]
    machine.run(["rpmsign", "--addsign", *identity, *files])
    machine.run(["createrepo_c", "--quiet", FOLDER])
    index = f"{FOLDER}/repodata/repomd.xml"
    machine.run(["gpg", "--batch", "--yes", "--armor", "--detach-sign", index])


def publish_rpms(machine: Machine, folder: Path) -> None:
    """Give a machine a signed repository, and tell dnf of it."""
    machine.put(folder, FOLDER)
    machine.write("/etc/yum.repos.d/brine.repo", _REPOSITORY_FILE)


def _sources() -> list[Path]:
    return [*source_files(*_SOURCES), *(path for path in TREE.glob("[A-Z]*") if path.is_file())]
