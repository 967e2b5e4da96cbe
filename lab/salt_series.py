"""Older series of Salt on a node, and the one of Debian's nodes on others."""

from __future__ import annotations

import shutil
from pathlib import Path

from lab.cache import cached
from lab.images import node_image
from lab.node import Node, boot_node
from lab.wheels import salt_wheels

RELEASE = "bookworm"
"""The nodes that can have them: they do not know the Python of newer releases."""

NEWEST_HOME = "/opt/salt"

_WHEELS = "/srv/salt-wheels"


def use_salt(node: Node, series: str) -> str:
    """Have the Salt of a node of RELEASE, such as its `salt-call`, be one of OLDER_SALTS, and know
    nothing of what another one did; empty is the newest again. Returns the folder of its Python
    environment.
    """
    home = _home(series)
    if series and not node.path(home).exists():
        node.put(_environment(series), home)
    node.shell(f"""
        rm -rf /etc/salt /var/cache/salt /usr/local/bin/salt*
        ln -s {home}/bin/salt* /usr/local/bin/
    """)
    return home


def add_newest_salt(node: Node, release: str) -> None:
    """Give a node without Salt, such as one with dnf, that of Debian's nodes of a release."""
    node.put(node_image(release) / NEWEST_HOME.lstrip("/"), NEWEST_HOME)
    use_salt(node, "")


def _home(series: str) -> str:
    return f"{NEWEST_HOME}-{series}" if series else NEWEST_HOME


def _environment(series: str) -> Path:
    """A Python environment to be put where `_home` says."""
    wheels, home = salt_wheels(RELEASE, series), _home(series)

    def build(folder: Path) -> None:
        with boot_node(RELEASE) as node:
            node.put(wheels, _WHEELS)
            names = [f"{_WHEELS}/{wheel.name}" for wheel in wheels.iterdir()]
            node.run(["python3", "-m", "venv", home])
            pip = [f"{home}/bin/pip", "--quiet", "--disable-pip-version-check"]
            node.run([*pip, "install", "--no-index", "--no-deps", *names], timeout_s=600)
            shutil.copytree(node.path(home), folder / "salt", symlinks=True)

    what = f"an environment of Salt {series}, {RELEASE}"
    return cached(f"salt-{series}-{RELEASE}", [home, wheels.name], build, what=what) / "salt"
