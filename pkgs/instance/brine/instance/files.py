"""The files of an instance beside its spec: removing, renaming and resetting them. A failure is an
:class:`InstanceError`, or an OSError in the last two functions.

They are made before the spec and removed after it. So a command that is killed half-way may leave
files without an instance, but never an instance without its files.
"""

from __future__ import annotations

import grp
import os
from contextlib import suppress
from pathlib import Path

from brine.common import paths
from brine.common.markers import (
    MarkerKind,
    clear_way,
    file_of,
    remove_marker,
    this_run,
    write_marker,
)
from brine.common.paths import InstanceFiles
from brine.instance import store
from brine.instance.store import InstanceError


def forget(name: str) -> None:
    """Remove all files of an instance that does not run, except its spec."""
    control = InstanceFiles(name)
    try:
        # Other programs may have put something in the place of the first two, which are for them.
        for file in (control.shutdown, control.stopping, control.console_pipe, *_files(name)):
            clear_way(file)
    except OSError as error:
        text = f"{error.filename}: can't be removed: {error.strerror}"
        raise InstanceError(name, text) from error


def share(name: str, new_name: str) -> None:
    """Link the files of an instance to another name, and remove other files of that name."""
    forget(new_name)  # of one that had this name before
    for file, renamed in zip(_files(name), _files(new_name), strict=True):
        with store.telling(name, f"{file}: can't be renamed"), suppress(FileNotFoundError):
            os.link(file, renamed, follow_symlinks=False)


def settle(name: str) -> None:
    """Finish an interrupted rename, if there was one. The caller holds the instance's lock."""
    old_name = store.name_inside(name)
    if old_name is None or old_name == name or store.spec_file_of(old_name).exists():
        return
    forget(old_name)
    store.save(store.load(name))


def clear_last_run(name: str) -> None:
    """Remove the leftovers of an instance's last run, and mark the beginning of the next by this
    process, which becomes QEMU."""
    control = InstanceFiles(name)
    folder = paths.CONTROL_DIR
    if not folder.is_dir():
        folder.mkdir(parents=True)
        # As systemd-tmpfiles makes it: files in it belong to the group.
        with suppress(KeyError):
            os.chown(folder, -1, grp.getgrnam(paths.CONTROL_GROUP).gr_gid)
        folder.chmod(0o2770)
    control.unit.parent.mkdir(mode=0o700, exist_ok=True)
    for file in (*control.sockets(), control.stopping, control.shutdown):
        clear_way(file)
    # The domain file of the last run must not survive, even if this start fails.
    control.domain.unlink(missing_ok=True)
    write_marker(MarkerKind.START, name, run=this_run(), pid=os.getpid())
    for kind in (MarkerKind.SHUTDOWN, MarkerKind.REBOOT, MarkerKind.ASKED, MarkerKind.FAILURE):
        remove_marker(kind, name)


def _files(name: str) -> list[Path]:
    """The files that a rename keeps."""
    files = InstanceFiles(name)
    markers = [file_of(kind, name) for kind in MarkerKind]
    logs = [files.console_log, files.previous_console_log]
    return [*markers, files.runtime, files.domain, files.uefi_variables, *logs]
