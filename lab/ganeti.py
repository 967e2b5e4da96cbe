"""Ganeti's own daemons and confd client, from Debian's packages: unpacked, not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab import peer_packages, sandbox
from lab.confd_wire import Heard

NODE = "node1.example.com"
"""The name that the daemon takes its host's to be."""
STATE = Path("/var/lib/ganeti")
"""Where it looks for its files: compiled in."""

_DAEMONS = r"^ganeti-haskell-[0-9.]+$"
_MODULES = r"^ganeti-[0-9.]+$"
_TREE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Unpacked:
    """A daemon: where it was unpacked to, and from what."""

    package: str
    version: str
    root: Path
    program: Path

    def confd_command(self, port: int) -> list[str]:
        """Run confd in the foreground, on the IPv4 loopback address."""
        options = ["--foreground", "--no-user-checks"]
        return [str(self.program), *options, "-b", "127.0.0.1", "-p", str(port)]

    def environment(self) -> dict[str, str]:
        """Its environment variables besides the caller's own."""
        return {
            "GANETI_HOSTNAME": NODE,
            "LD_LIBRARY_PATH": peer_packages.library_path(self.root),
        }


def daemon(name: str) -> Unpacked:
    """The newest such daemon that apt has, as ``confd``. Raises LabError where it has none."""
    package = peer_packages.newest(_DAEMONS)
    program = f"usr/lib/ganeti/{_number(package)}/usr/sbin/ganeti-{name}"
    root = peer_packages.unpacked(package, program)
    return Unpacked(package, peer_packages.version(package), root, root / program)


@dataclass(frozen=True, slots=True)
class Library:
    """Ganeti's Python modules: where they were unpacked to, and from what."""

    package: str
    version: str
    root: Path
    folder: str

    def environment(self) -> dict[str, str]:
        """The environment variables with which the system's Python imports them."""
        return peer_packages.python_environment(self.root, self.folder)


def library(module: str) -> Library:
    """The newest that apt has, in which a module can be imported. Raises LabError where it has
    none."""
    package = peer_packages.newest(_MODULES)
    folder = f"usr/share/ganeti/{_number(package)}"
    root = peer_packages.unpacked_module(package, folder, module)
    return Library(package, peer_packages.version(package), root, folder)


def lock_tests(modules: Library) -> Path:
    """Ganeti's own tests of its locks."""
    member = "test/py/ganeti.locking_unittest.py"
    return peer_packages.source_file(modules.package, "ganeti", member)


def write_state(folder: Path, config: str | None, key: bytes) -> None:
    """Fill what will be the daemon's STATE; *config* is the text of its configuration file."""
    if config is not None:
        (folder / "config.data").write_text(config, encoding="utf-8")
    (folder / "hmac.key").write_bytes(key)


@contextmanager
def running(confd: Unpacked, state: Path, port: int, log: Path) -> Iterator[None]:
    """Confd at work with *state* as its STATE, and everything else of its own hidden.

    Whether it is ready, only an answer tells.
    """
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if os.geteuid() != 0:
        command += ["--user", "--map-root-user"]
    command += [sys.executable, "-m", "lab.ganeti", str(state), *confd.confd_command(port)]
    environment = {
        **os.environ,
        **confd.environment(),
        "PYTHONPATH": f"{_TREE}/tests:{_TREE}",
    }
    with log.open("ab") as lines:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=lines, stderr=lines
        )
    try:
        yield
    finally:
        # Its child, the first process of the namespace, is killed with it, and so are all others.
        process.kill()
        process.wait()


class ClientError(Exception):
    """Ganeti's client could not be used: what it said."""


def ask_with_client(
    questions: Sequence[tuple[int, Any]], *, key: bytes, peers: Sequence[str], port: int
) -> list[Heard | None]:
    """Have Ganeti's own client ask, one question after the other. None: no daemon answered."""
    modules = library("ganeti.confd.client")
    orders = {
        "key": key.decode(),
        "peers": list(peers),
        "port": port,
        "questions": [[int(number), query] for number, query in questions],
    }
    done = subprocess.run(
        [peer_packages.PYTHON, "-P", str(Path(__file__).with_name("ganeti_client.py"))],
        env={**os.environ, **modules.environment()},
        input=json.dumps(orders),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ClientError(done.stderr)
    return [None if fields is None else Heard(**fields) for fields in json.loads(done.stdout)]


def _number(package: str) -> str:
    return package.rpartition("-")[2]


def _become_daemon(state: str, command: list[str]) -> None:
    sandbox.hide_state({})
    STATE.mkdir(parents=True)
    for folder in (Path("/run/ganeti"), Path("/var/log/ganeti")):
        folder.mkdir(parents=True)
    subprocess.run(["mount", "--bind", state, STATE], check=True)
    os.execv(command[0], command)


if __name__ == "__main__":
    _become_daemon(sys.argv[1], sys.argv[2:])
