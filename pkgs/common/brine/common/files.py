"""Files: atomic replacement, reading of regular files only, keeping damaged ones aside, and folders
that other users may write."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_MOST_ASIDE = 100
_MOST_LINKS = 40  # as the kernel's own limit
_AT_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
# File systems without unnamed files, and kernels whose overlayfs has none.
_NO_UNNAMED = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL})


class Place(NamedTuple):
    """Where a path leads, after all symbolic links.

    :param folder: a descriptor of its folder.
    :param name: the name there; empty for the root folder.
    :param file: a descriptor of the file (O_PATH); None if there is none.
    """

    folder: int
    name: str
    file: int | None

    def opened(self, flags: int) -> int:
        """Open the file. Another file that has its name by now is not opened.

        :raises OSError: if it can't be opened.
        """
        if self.file is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return os.open(f"/proc/self/fd/{self.file}", flags | os.O_CLOEXEC)


@contextlib.contextmanager
def place_of(path: str | Path) -> Iterator[Place]:
    """Find a file in a folder that other users may write, where no user can lead us astray.

    A symbolic link counts if it belongs to root, to this process's user, or to the owner of the
    file that the whole path leads to: a link of another user could lead to a file that this user
    may not touch. (The kernel's ``protected_symlinks`` does so in sticky folders only.)

    :param path: absolute, or from the current folder.
    :raises OSError: ELOOP for a link that does not count; and if a folder is missing.
    """
    whole = os.fspath(path) if os.path.isabs(path) else f"{os.getcwd()}/{path}"
    _mount_all_of(whole)
    names = whole.split("/")[::-1]
    with contextlib.ExitStack() as stack:

        def held(descriptor: int) -> int:
            stack.callback(os.close, descriptor)
            return descriptor

        folder = file = held(os.open("/", _AT_FOLDER))
        last, makers, links = "", set[int](), 0
        while names:
            if (name := names.pop()) in ("", "."):
                continue
            folder, last = file, name
            try:
                file = held(os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder))
            except FileNotFoundError:
                if any(one not in ("", ".") for one in names):
                    raise
                _refuse_strangers(path, makers, os.fstat(folder).st_uid)
                yield Place(folder, last, None)
                return
            status = os.fstat(file)
            if stat.S_ISLNK(status.st_mode):
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
                makers.add(status.st_uid)
                leads_to = os.readlink("", dir_fd=file)
                names += reversed(leads_to.split("/"))
                file = held(os.open("/", _AT_FOLDER)) if leads_to.startswith("/") else folder
        _refuse_strangers(path, makers, os.fstat(file).st_uid)
        yield Place(folder, last, file)


def _mount_all_of(path: str | Path) -> None:
    """Have systemd or autofs mount the file systems of a path: a step that looks at one name only
    does not (O_PATH of :manpage:`open(2)`, :manpage:`lstat(2)`)."""
    with contextlib.suppress(OSError, ValueError):
        os.stat(f"{path}/")  # a folder of that name, too


def _refuse_strangers(path: str | Path, makers: set[int], owner: int) -> None:
    """Refuse a path with links of users who are neither root nor this process's, nor *owner*."""
    if strangers := makers - {0, os.geteuid(), owner}:
        text = f"A symbolic link of the user {min(strangers)} leads to a file of the user {owner}"
        raise OSError(errno.ELOOP, text, str(path))


def open_safely(path: str | Path, flags: int) -> int:
    """Open a file that is there; see :func:`place_of`.

    :raises OSError: if it can't be opened.
    """
    with place_of(path) as place:
        return place.opened(flags)


@contextlib.contextmanager
def new_file(path: Path, *, temporary: str = "") -> Iterator[int]:
    """Make a file in a folder that other users may write. It has no name while the block writes its
    content, and gets *path* at the end of the block; so a fault or a kill leaves nothing.

    Yields a descriptor for writing; the file's mode is 0600. (Where a file system has no unnamed
    files, the file has another name meanwhile, which a kill leaves behind.)

    :param temporary: that name, which no other file may have; empty is a random one.
    :raises FileExistsError: if there is something at *path* by then.
    """
    with place_of(path.parent) as place:
        folder = place.opened(os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, folder)
        descriptor = _unnamed(folder, stack, temporary)
        yield descriptor
        os.fsync(descriptor)
        # The file itself, even if another file has its temporary name by now.
        os.link(f"/proc/self/fd/{descriptor}", path.name, dst_dir_fd=folder)
        os.fsync(folder)


def _unnamed(folder: int, stack: contextlib.ExitStack, temporary: str = "") -> int:
    """A new file without a name, or with one that *stack* removes. It closes the file, too."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        descriptor = os.open(".", flags | os.O_TMPFILE, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno not in _NO_UNNAMED:
            raise
        name = temporary or f".{os.urandom(8).hex()}.new"
        descriptor = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
        stack.callback(_remove, name, folder)
    stack.callback(os.close, descriptor)
    return descriptor


def _remove(name: str | Path, folder: int | None) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


class FileMark(NamedTuple):
    """What tells a file from others that get its name or its inode later, also after a reboot."""

    inode: int
    changed_ns: int
    size: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileMark:
        return cls(status.st_ino, status.st_mtime_ns, status.st_size)


def remove_same(path: Path, mark: FileMark | None) -> None:
    """Remove a file that Brine has made, if it is still there.

    :param mark: of the file, as it was made. Another file that has the name by now stays. None
        removes whichever has the name.
    """
    with contextlib.suppress(FileNotFoundError), place_of(path.parent) as place:
        folder = place.opened(os.O_RDONLY | os.O_DIRECTORY)
        try:
            there = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
            if mark in (None, FileMark.of(there)):
                os.unlink(path.name, dir_fd=folder)
        finally:
            os.close(folder)


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


def open_regular(file: str | Path, *, safely: bool = False) -> int:
    """Open a regular file for reading. Symbolic links are followed. Nothing can make this wait.

    :param safely: other users may write the folder; see :func:`place_of`.
    :raises OSError: if it can't be opened, or is something else: a FIFO, which would have us wait
        for a writer, a device, which may never end, or a socket.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
    descriptor = open_safely(file, flags) if safely else os.open(file, flags | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "Is no regular file", str(file))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(file: Path, *, safely: bool = False) -> bytes:
    """The content of a regular file; see :func:`open_regular`."""
    with os.fdopen(open_regular(file, safely=safely), "rb") as opened:
        return opened.read()


def text_of(file: str | Path) -> str:
    """The text of a small file, such as a setting of the kernel's, without space around it; empty
    if it can't be read."""
    try:
        return Path(file).read_text(errors="replace").strip()
    except OSError:
        return ""


def read_json(file: Path) -> Any:
    """The JSON of a regular file; None if the file is missing or damaged."""
    try:
        return json.loads(read_regular(file))
    except (OSError, ValueError, RecursionError):
        return None


def fault_of_writers(path: str | Path) -> str | None:
    """Why users other than root may change what an absolute path leads to; None if they may not.

    Each folder of the path counts, and each link on it: the owner of any of them can put another
    file there. A process that does not run as root trusts its own user, too.
    """
    _mount_all_of(path)
    trusted = {0, os.geteuid()}
    here, links = "/", 0
    ahead = str(path).split("/")[::-1]
    while True:
        try:
            status = os.lstat(here)
        except (FileNotFoundError, NotADirectoryError):
            return None  # there is nothing that could be run
        except OSError as error:
            return f"{here}: {error.strerror}"
        if status.st_uid not in trusted:
            return f"{here} belongs to user {status.st_uid}, not to root"
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > _MOST_LINKS:
                return f"{here}: {os.strerror(errno.ELOOP)}"
            target = os.readlink(here)
            ahead += target.split("/")[::-1]
            here = "/" if target.startswith("/") else os.path.dirname(here)
        elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX:
            return f"others than root may write {here} (chmod go-w)"
        while ahead and ahead[-1] in ("", "."):
            ahead.pop()
        if not ahead:
            return None
        part = ahead.pop()
        here = os.path.dirname(here) if part == ".." else os.path.join(here, part)


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
    folder: int | None = None,
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
    :param folder: a descriptor of the folder, such as :attr:`Place.folder`, if other users may
        write it; *path* is the name there.
    """
    temporary = unfinished(path) if alone else path.with_name(prefix + os.urandom(8).hex())
    # Never written through: an attacker could have put a link there.
    _remove(temporary, folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600, dir_fd=folder)
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
        os.rename(temporary, path, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):  # the fault that brought us here is the one to tell
            os.unlink(temporary, dir_fd=folder)
        raise
    if durable and not folder_later:
        sync_folder(path.parent, within=folder)


def try_to_write(folder: Path, size: int) -> None:
    """Write a file of that many bytes and drop it, to see that *folder* has room for one; if it
    is missing, the folder that it would be made in.

    :raises OSError: as a write would, with the folder as its file.
    """
    while not folder.is_dir():
        folder = folder.parent
    try:
        with contextlib.ExitStack() as stack:
            within = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, within)
            descriptor = _unnamed(within, stack)
            left = memoryview(os.urandom(size))
            while left:
                left = left[os.write(descriptor, left) :]
            os.fsync(descriptor)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(folder)) from error


def unfinished(path: Path) -> Path:
    """The temporary file that the only writer of *path* leaves behind when it is killed."""
    return path.with_name(f".{path.name}.new")


def sync_folder(folder: Path, *, within: int | None = None) -> None:
    """Make what was created, renamed or removed in *folder* survive a power cut.

    :param within: a descriptor of the folder that a relative path begins at.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    descriptor = os.open(folder, flags, dir_fd=within)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
