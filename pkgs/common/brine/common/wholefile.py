"""Files that another process reads are written whole, or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_whole(
    path: Path,
    data: bytes,
    *,
    mode: int = 0o644,
    owner: int | None = None,
    group: int | None = None,
    prefix: str = ".",
    alone: bool = False,
    durable: bool = True,
    folder_later: bool = False,
) -> None:
    """Put *data* at *path* so that a reader sees the old content or the new, never a part.

    A temporary file in the same folder is written, synced and renamed over *path*, then the
    folder is synced. A fault at any step leaves the old file as it was and nothing beside it, but
    for the last one: then the new file is there, and might not survive a power cut.

    :param mode: permissions of the new file, not subject to the umask.
    :param owner: id of the user that the new file belongs to, and *group* of the group; None leaves
        it to the system.
    :param prefix: what the temporary file's name begins with. A process that is killed leaves it,
        and a writer that is alone can know by it what to clean up.
    :param alone: nobody else writes *path* meanwhile: the temporary file is :func:`unfinished`, in
        the place of which comes the next one.
    :param durable: False leaves out both syncs, for files that need not survive a power cut.
    :param folder_later: the caller syncs the folder, once for all that it writes there.
    :raises OSError: with the errno of the step that failed (ENOSPC, EACCES, ...).
    """
    descriptor, temporary = _only(path) if alone else _one_of_many(path.parent, prefix)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            # Last: whoever gives a file away has no say in it any more.
            _give(file.fileno(), owner, group)
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


def unfinished(path: Path) -> Path:
    """What a writer of *path* that is alone leaves when it is killed."""
    return path.with_name(f".{path.name}.new")


def _only(path: Path) -> tuple[int, Path]:
    temporary = unfinished(path)
    # Never written through: it could be a link that somebody has put there.
    temporary.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return os.open(temporary, flags, 0o600), temporary


def _one_of_many(folder: Path, prefix: str) -> tuple[int, Path]:
    import tempfile  # takes long to load, and who only reads has no need of it

    descriptor, name = tempfile.mkstemp(prefix=prefix, dir=folder)
    return descriptor, Path(name)


def _give(descriptor: int, owner: int | None, group: int | None) -> None:
    status = os.fstat(descriptor)
    wanted = (status.st_uid if owner is None else owner, status.st_gid if group is None else group)
    if wanted != (status.st_uid, status.st_gid):
        os.fchown(descriptor, *wanted)


def sync_folder(folder: Path) -> None:
    """Make what was created, renamed or removed in *folder* survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
