"""Open vSwitch from Debian's packages, unpacked and not installed, with switching in user space."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab import peer_packages
from lab.command import ending_with_us, run_command
from lab.waiting import wait_for

_PROGRAM = "usr/lib/openvswitch-switch/ovs-vswitchd"


@dataclass(frozen=True)
class OpenVswitch:
    """A switch that runs in the network namespace in which it was started.

    `environment` is what its commands need, beside the caller's own.
    """

    environment: dict[str, str]

    def command(self, *arguments: str) -> str:
        """Run `ovs-vsctl`."""
        environment = {**os.environ, **self.environment}
        return run_command(["ovs-vsctl", "--timeout=10", *arguments], env=environment).stdout


def fetch_open_vswitch() -> list[Path]:
    """The folders of its packages, which are fetched if they are not in the cache."""
    return [
        peer_packages.unpacked("openvswitch-switch", _PROGRAM),
        peer_packages.unpacked("openvswitch-common", "usr/sbin/ovsdb-server"),
    ]


@contextmanager
def open_vswitch(roots: Sequence[Path]) -> Iterator[OpenVswitch]:
    """A switch without bridges; bridges need `datapath_type=netdev`.

    `roots` is what `fetch_open_vswitch` gave: a namespace in which a switch starts may have no way
    to a mirror.
    """
    switch = roots[0]
    # An alternative of the package's, which an installation would have made a link of.
    daemon = next(path for path in sorted(switch.glob(f"{_PROGRAM}*")) if path.is_file())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="brine-ovs-")))
        programs = [str(root / place) for root in roots for place in ("usr/bin", "usr/sbin")]
        environment = {
            "PATH": ":".join([*programs, os.environ["PATH"]]),
            "LD_LIBRARY_PATH": ":".join(filter(None, map(peer_packages.library_path, roots))),
            "OVS_RUNDIR": str(folder),
            "OVS_LOGDIR": str(folder),
            "OVS_DBDIR": str(folder),
        }
        whole = {**os.environ, **environment}
        schema = next(path for root in roots for path in root.rglob("vswitch.ovsschema"))
        database, socket = folder / "conf.db", folder / "db.sock"
        run_command(["ovsdb-tool", "create", database, schema], env=whole)
        log = stack.enter_context((folder / "log").open("w"))
        server = ["ovsdb-server", f"--remote=punix:{socket}", "--no-chdir", str(database)]
        for command in (server, [str(daemon), f"unix:{socket}", "--disable-system"]):
            process = subprocess.Popen(
                [*ending_with_us(), *command], env=whole, stdout=log, stderr=log
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            if command is server:
                wait_for("the switch's database", socket.exists)
                run_command(["ovs-vsctl", "--no-wait", "init"], env=whole)
        yield OpenVswitch(environment)
