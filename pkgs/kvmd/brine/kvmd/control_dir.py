"""The control directory: event sockets, and the files that stand beside them."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ControlDir:
    """A directory with ``<name><suffix>`` (event socket), ``<name>.stopping`` (the admin means
    to stop it) and ``<name>.shutdown`` (its user did).

    Names are as the file system gave them: undecodable bytes are surrogate-escaped.
    """

    path: Path
    suffix: str

    def names(self) -> Iterator[str]:
        """The instances that have an event socket, or something of that name.

        :raises OSError: if the directory is not there or can't be read.
        """
        with os.scandir(self.path) as entries:
            for entry in entries:
                name = self.name_of(entry.name)
                if name is not None:
                    yield name

    def name_of(self, file_name: str) -> str | None:
        """The instance whose event socket has this file name; None for any other file."""
        name = file_name.removesuffix(self.suffix)
        return name if name and name != file_name else None

    def identity(self, name: str) -> str | None:
        """What tells an event socket from an earlier one of the same name; None if there is none.

        The inode number alone would not do: some file systems give it out again at once. A
        socket's modification time is that of its bind(); neither chmod nor connecting changes it.
        """
        try:
            status = os.lstat(self._file(name, self.suffix))
        except OSError:
            return None
        if not stat.S_ISSOCK(status.st_mode):
            return f"{status.st_ino}-{stat.S_IFMT(status.st_mode):o}"
        return f"{status.st_ino}-{status.st_mtime_ns}"

    def is_socket(self, name: str) -> bool:
        """Whether the event socket is one; a link to one is not."""
        try:
            return stat.S_ISSOCK(os.lstat(self._file(name, self.suffix)).st_mode)
        except OSError:
            return False

    def connect(self, name: str) -> socket.socket:
        """A non-blocking connection to the event socket.

        :raises OSError: such as ConnectionRefusedError while nobody listens, BlockingIOError while
            too many others wait, PermissionError if we may not.
        """
        connection = socket.socket(
            socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        try:
            connection.connect(self._file(name, self.suffix))
        except BaseException:
            connection.close()
            raise
        return connection

    def is_stopping(self, name: str) -> bool:
        """Whether the admin means to stop the instance."""
        return os.path.lexists(self._file(name, ".stopping"))

    def mark_shutdown(self, name: str) -> None:
        """Say that the instance was shut down by its user.

        :raises OSError: if the file can't be made.
        """
        # No truncation and no links followed: others may write to this directory too.
        flags = os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        os.close(os.open(self._file(name, ".shutdown"), flags, 0o644))

    def clear_shutdown(self, name: str) -> None:
        """Say that the instance was not shut down by its user, or runs again.

        :raises OSError: if the file is there and can't be removed.
        """
        Path(self._file(name, ".shutdown")).unlink(missing_ok=True)

    def _file(self, name: str, suffix: str) -> str:
        return f"{self.path}/{name}{suffix}"


def same_inode(identity: str, other: str) -> bool:
    """Whether two identities name one inode, which was merely touched in between."""
    return identity.split("-")[0] == other.split("-")[0]
