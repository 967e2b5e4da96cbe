"""Files that another process reads are written whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def write_whole(
    path: Path,
    data: bytes,
    *,
    mode: int = 0o644,
    group: int | None = None,
    prefix: str = ".",
    durable: bool = True,
    folder_later: bool = False,
) -> None:
    """Put *data* at *path* so that a reader sees the old content or the new, never a part.

    A temporary file in the same folder is written, synced and renamed over *path*, then the
    folder is synced. A fault at any step leaves the old file as it was and nothing beside it, but
    for the last one: then the new file is there, and might not survive a power cut.

    :param mode: permissions of the new file, not subject to the umask.
    :param group: id of the group that the new file belongs to; None leaves it to the system.
    :param prefix: what the temporary file's name begins with. A process that is killed leaves it,
        and a writer that is alone can know by it what to clean up.
    :param durable: False leaves out both syncs, for files that need not survive a power cut.
    :param folder_later: the caller syncs the folder, once for all that it writes there.
    :raises OSError: with the errno of the step that failed (ENOSPC, EACCES, ...).
    """
    descriptor, name = tempfile.mkstemp(prefix=prefix, dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if group is not None:
                os.fchown(file.fileno(), -1, group)
            os.fchmod(file.fileno(), mode)
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):  # the fault that brought us here is the one to tell
            temporary.unlink()
        raise
    if durable and not folder_later:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make what was created, renamed or removed in *folder* survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
