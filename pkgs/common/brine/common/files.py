"""Files: atomic replacement, reading of regular files only, and keeping damaged ones aside."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

_MOST_ASIDE = 100


def second_name(file: Path, aside: Path) -> Path:
    """Give *file* another name in its folder, so that its own can go to something else.

    :param aside: the new name. If another file has it, a number follows, as in ``-2``, up to 100.
    :returns: the name it got, which may be one that it had already.
    """
    for number in range(1, _MOST_ASIDE + 1):
        name = aside if number == 1 else aside.with_name(f"{aside.name}-{number}")
        try:
            os.link(file, name, follow_symlinks=False)
        except FileExistsError:
            if not os.path.samestat(file.lstat(), name.lstat()):
                continue
        return name
    raise FileExistsError(errno.EEXIST, "too many are kept aside", str(aside))


def put_aside(file: Path, aside: Path) -> Path:
    """Give *file* another name in place of its own; see :func:`second_name`."""
    name = second_name(file, aside)
    file.unlink()
    return name


def read_regular(file: Path) -> bytes:
    """The content of a regular file. Symbolic links are followed. Nothing can make this wait.

    :raises OSError: if it can't be read, or is something else: a FIFO, which would have us wait for
        a writer, a device, which may never end, or a socket.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "Is no regular file", str(file))
        with os.fdopen(descriptor, "rb", closefd=False) as opened:
            return opened.read()
    finally:
        os.close(descriptor)


def read_json(file: Path) -> Any:
    """The JSON of a regular file; None if the file is missing or damaged."""
    try:
        return json.loads(read_regular(file))
    except (OSError, ValueError, RecursionError):
        return None


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

    :param mode: permissions, whatever the umask is; *owner* and *group* are ids, or the system's
        choice.
    :param prefix: what the temporary file's name begins with. A process that is killed leaves it,
        and a writer that is alone can know by it what to clean up.
    :param alone: no other process writes *path* meanwhile: the temporary file is
        :func:`unfinished`, in the place of which comes the next one.
    :param durable: False leaves out both syncs, for files that need not survive a power cut.
    :param folder_later: the caller syncs the folder, once for all that it writes there.
    """
    temporary = unfinished(path) if alone else path.with_name(prefix + os.urandom(8).hex())
    # Never written through: an attacker could have put a link there.
    temporary.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            status = os.fstat(descriptor)
            new_owner = status.st_uid if owner is None else owner
            new_group = status.st_gid if group is None else group
            if (new_owner, new_group) != (status.st_uid, status.st_gid):
                # Last: once the file belongs to another user, its mode can't be changed any more.
                os.fchown(descriptor, new_owner, new_group)
            file.write(data)
            if durable:
                file.flush()
                os.fsync(descriptor)
        temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):  # the fault that brought us here is the one to tell
            temporary.unlink()
        raise
    if durable and not folder_later:
        sync_folder(path.parent)


def unfinished(path: Path) -> Path:
    """The temporary file that the only writer of *path* leaves behind when it is killed."""
    return path.with_name(f".{path.name}.new")


def sync_folder(folder: Path) -> None:
    """Make what was created, renamed or removed in *folder* survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
