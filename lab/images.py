"""Cached Debian trees that nodes boot from.

A tree is never written to: nodes lay an overlay over it (`lab.node`).
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from lab.cache import cached
from lab.command import run_command
from lab.debian import apt_sources, apt_transport_settings, known_release
from lab.wheels import SALT_REQUIREMENTS, salt_wheels

_INIT = ["systemd", "systemd-sysv", "dbus"]

# What Brine's packages depend on, so that a node without a network can install them, and what
# tests and people look around with. The Python environment of Salt is made with python3-venv. A
# container owns an instance, with busybox in it.
_NODE_PACKAGES = [
    *_INIT,
    "bash-completion",
    "busybox-static",
    "crun",
    "iproute2",
    "nftables",
    "podman",
    "procps",
    "python3",
    "python3-json-pointer",
    "python3-pyinotify",
    "python3-pyroute2",
    "python3-systemd",
    "python3-tomlkit",
    "python3-venv",
    "qemu-system-x86",
    "qemu-utils",
    "socat",
]

# Half of a tree's files are documentation and translations that no node's test reads.
_DPKG_OPTIONS = [
    "path-exclude=/usr/share/doc/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/man/*",
    "path-include=/usr/share/doc/brine*",
    "path-include=/usr/share/man/man?/brine*",
]

_APT_OPTIONS = ['APT::Install-Recommends "false"', 'Acquire::Languages "none"']

# Units that only make noise in a throw-away node: logins on a console that is a file, the loading
# of modules into a kernel that is not the node's, and apt's and dpkg's housekeeping, which would
# start behind a test's back.
_MASKED_UNITS = [
    "apt-daily-upgrade.timer",
    "apt-daily.timer",
    "console-getty.service",
    "dpkg-db-backup.timer",
    "fstrim.timer",
    "getty.target",
    "podman-auto-update.service",
    "podman-auto-update.timer",
    "podman-restart.service",
    "podman.service",
    "podman.socket",
    "systemd-modules-load.service",
    "systemd-timesyncd.service",
]

# A tree with an empty machine id would go through systemd's first boot, presets and all, each time.
_MACHINE_ID = "b41e0000000000000000000000000001"

_SALT_HOME = "opt/salt"

# What makes a tree mounts into it. When it is killed, or we are, the kernel ends all of it and its
# mounts with it. (It is waited for by the thread that starts it, whose end setpriv is about.)
_CONTAINED = ["setpriv", "--pdeathsig", "KILL"]
_CONTAINED += ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


def node_image(release: str) -> Path:
    """A tree with systemd, QEMU, Salt and the run-time dependencies of Brine, but no apt source."""
    release = known_release(release)

    def build(folder: Path) -> None:
        wheels = salt_wheels(release)
        tree = folder / "tree"
        _debootstrap(release, tree, _NODE_PACKAGES)
        for sources in (tree / "etc/apt").glob("sources.list*"):
            run_command(["rm", "-rf", sources])
        _install_salt(tree, wheels)

    ingredients = [release, _NODE_PACKAGES, _recipe(), SALT_REQUIREMENTS.read_text()]
    return cached(f"node-{release}", ingredients, build, what=f"a node's tree, {release}") / "tree"


def bare_image(release: str) -> Path:
    """A tree with systemd and apt's sources and nothing else: a machine as it was installed."""
    release = known_release(release)

    def build(folder: Path) -> None:
        tree = folder / "tree"
        _debootstrap(release, tree, _INIT)
        transport = tree / "etc/apt/apt.conf.d/90transport"
        transport.write_text("".join(f"{line}\n" for line in apt_transport_settings()))

    ingredients = [release, _INIT, _recipe(), apt_sources(release), apt_transport_settings()]
    return cached(f"bare-{release}", ingredients, build, what=f"a bare tree, {release}") / "tree"


def _recipe() -> str:
    """The code that makes trees: when it changes, trees are made anew."""
    return inspect.getsource(sys.modules[__name__])


def _debootstrap(release: str, tree: Path, packages: list[str]) -> None:
    """Unpack and configure `packages` and what they need into `tree`."""
    apt_options = [*_APT_OPTIONS, *(line.rstrip(";") for line in apt_transport_settings())]
    run_command(
        [
            *_CONTAINED,
            "mmdebstrap",
            "--variant=minbase",
            f"--include={','.join(packages)}",
            *(f"--aptopt={option}" for option in apt_options),
            *(f"--dpkgopt={option}" for option in _DPKG_OPTIONS),
            # These settings were for making the tree; what a node keeps of them is written below.
            '--customize-hook=rm "$1"/etc/apt/apt.conf.d/99mmdebstrap',
            release,
            tree,
            *apt_sources(release),
        ],
        timeout_s=900,
        what="mmdebstrap",
    )
    (tree / "etc/machine-id").write_text(f"{_MACHINE_ID}\n")
    # The host's name, copied by mmdebstrap, would win over the name that a node is given.
    (tree / "etc/hostname").unlink(missing_ok=True)
    (tree / "etc/apt/apt.conf.d/90brine-lab").write_text(
        "".join(f"{option};\n" for option in _APT_OPTIONS)
    )
    for unit in _MASKED_UNITS:
        (tree / "etc/systemd/system" / unit).unlink(missing_ok=True)
        (tree / "etc/systemd/system" / unit).symlink_to("/dev/null")


def _install_salt(tree: Path, wheels: Path) -> None:
    """Put Salt into an environment of the tree's own Python, and its commands into the path."""
    inside = Path("var/cache/salt-wheels")
    run_command(["cp", "-a", wheels, tree / inside])
    names = [f"/{inside}/{wheel.name}" for wheel in sorted(wheels.iterdir())]
    run_command(["chroot", tree, "python3", "-m", "venv", f"/{_SALT_HOME}"])
    pip: list[str | Path] = [
        "chroot",
        tree,
        f"/{_SALT_HOME}/bin/pip",
        "--quiet",
        "--disable-pip-version-check",
    ]
    run_command([*pip, "install", "--no-index", "--no-deps", *names])
    run_command(["rm", "-rf", tree / inside])
    for command in (tree / _SALT_HOME / "bin").glob("salt*"):
        (tree / "usr/local/bin" / command.name).symlink_to(f"/{_SALT_HOME}/bin/{command.name}")
