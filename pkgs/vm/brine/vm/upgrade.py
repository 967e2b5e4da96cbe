"""Takes over the markers of versions before 0.2 when the packages are upgraded.

Those were empty files in the control directory and beside it, and named no run. Without this,
instances that run at the upgrade, and those that ended before it, would have no markers.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from brine.common import paths
from brine.common.message import KVMD_USER
from brine.vm import markers
from brine.vm.markers import MarkerKind
from brine.vm.unit_name import PREFIX, SUFFIX

_TIMEOUT_S = 30
_GOING = ("active", "activating", "deactivating", "reloading", "refreshing")


class _Unit(NamedTuple):
    is_going: bool = False
    run: str = markers.UNKNOWN_RUN
    pid: int = 0


def main() -> None:
    """Take over the markers of all instances that have none yet. What fails is told."""
    try:
        units = dict(_units())
        with contextlib.suppress(FileNotFoundError):
            for file in os.listdir(paths.CONTROL_DIR):
                name = file.removesuffix(".started")
                if name != file and _made_at(paths.CONTROL_DIR / file) is not None:
                    units.setdefault(name, _Unit())
        for name, unit in units.items():
            if markers.read_marker(MarkerKind.START, name) is None:
                _adopt(name, unit)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"brine: warning: marks of an older version: {error}", file=sys.stderr)


def _adopt(name: str, unit: _Unit) -> None:
    control = paths.CONTROL_DIR
    xen = control.parent / "xen"
    is_on_xen = (xen / f"{name}.cfg").exists()
    _take(MarkerKind.ASKED, name, unit.run, xen / f"{name}.asked")
    if not unit.is_going:
        # Who stops what runs may give that up; brine-kvmd looks at the old file, too.
        _take(MarkerKind.STOP, name, unit.run, control / f"{name}.stopping")
        _take(MarkerKind.SHUTDOWN, name, unit.run, control / f"{name}.shutdown")
    reboot = control.parent / "reboot" / name
    until = _made_at(reboot)
    if until is not None:
        markers.write_marker(MarkerKind.REBOOT, name, run=unit.run, until=until)
    came_up = not is_on_xen or _made_at(xen / f"{name}.up") is not None
    run = unit.run if came_up else markers.UNKNOWN_RUN
    _take(MarkerKind.STARTED, name, run, control / f"{name}.started")
    # Last: an upgrade that was killed before this does all of it again.
    markers.write_marker(MarkerKind.START, name, run=unit.run, pid=unit.pid, adopted=True)
    for file in (control / f"{name}.started", reboot, xen / f"{name}.asked", xen / f"{name}.up"):
        with contextlib.suppress(OSError):
            file.unlink()


def _take(kind: MarkerKind, name: str, run: str, old: Path) -> None:
    """Make a marker of a file, as old as that is."""
    made_at = _made_at(old)
    if made_at is not None:
        markers.write_marker(kind, name, run=run)
        os.utime(markers.file_of(kind, name), (made_at, made_at))


def _made_at(file: Path) -> float | None:
    """When a file was made; None if there is none, or others than root and brine-kvmd made it."""
    try:
        status = file.lstat()
    except OSError:
        return None
    ours = {os.geteuid()}
    with contextlib.suppress(KeyError):
        ours.add(pwd.getpwnam(KVMD_USER).pw_uid)
    return status.st_mtime if stat.S_ISREG(status.st_mode) and status.st_uid in ours else None


def _units() -> Iterator[tuple[str, _Unit]]:
    """The units of instances that systemd has loaded, by the instance's name."""
    show = ["systemctl", "show", "--property=Id,ActiveState,InvocationID,MainPID", "--"]
    command = [*show, f"{PREFIX}*{SUFFIX}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    for block in done.stdout.strip().split("\n\n"):
        values = dict(line.partition("=")[::2] for line in block.splitlines())
        name = values.get("Id", "").removeprefix(PREFIX).removesuffix(SUFFIX)
        if run := values.get("InvocationID"):
            is_going = values.get("ActiveState") in _GOING
            yield name, _Unit(is_going, run, int(values.get("MainPID") or 0))


if __name__ == "__main__":
    main()
