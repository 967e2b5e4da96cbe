"""The control directory: event sockets, and the files beside them."""

from __future__ import annotations

import errno
import os
import resource
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from brine.vm.markers import clear_way

_SPARE_DESCRIPTORS = 32  # for writing verdicts, and for telling systemd


@dataclass(frozen=True, slots=True)
class SocketIdentity:
    """The identity of a file, which tells it from an earlier one of the same name.

    An inode number is not enough: some file systems reuse it at once. A socket's modification time
    is that of its bind(); neither chmod nor connecting changes it.

    :param modified_ns: nanoseconds since the epoch; 0 for anything but a socket, since a
        directory's changes with its content.
    :param is_roots: whether root made it, as root's QEMU does before it becomes another user.
    """

    device: int
    inode: int
    modified_ns: int
    is_socket: bool = True
    is_roots: bool = field(default=True, compare=False)

    def same_file(self, other: SocketIdentity) -> bool:
        """Whether both are the same file, perhaps touched in between."""
        return (self.device, self.inode) == (other.device, other.inode)

    def __str__(self) -> str:
        return f"{self.device}-{self.inode}-{self.modified_ns}"

    @classmethod
    def parse(cls, text: str) -> SocketIdentity:
        """The identity of a socket that :meth:`__str__` wrote, or a ValueError."""
        device, inode, modified_ns = map(int, text.split("-"))
        return cls(device, inode, modified_ns)


@dataclass(frozen=True)
class ControlDir:
    """A directory with ``<name><suffix>`` (event socket), ``<name>.stopping`` (an admin stops the
    VM) and ``<name>.shutdown`` (the user has shut it down).

    Names are as the file system gave them: undecodable bytes are surrogate-escaped.
    """

    path: Path
    suffix: str

    def names(self) -> Iterator[str]:
        """The instances with an event socket, or something of that name."""
        with os.scandir(self.path) as entries:
            for entry in entries:
                name = self.name_of(entry.name)
                if name is not None:
                    yield name

    def name_of(self, file_name: str) -> str | None:
        """The instance whose event socket has this file name; None for any other file."""
        name = file_name.removesuffix(self.suffix)
        return name if name and name != file_name else None

    def identity(self, name: str) -> SocketIdentity | None:
        """The identity of the event socket, or of what has its name; None if there is nothing."""
        try:
            status = os.lstat(self._file(name, self.suffix))
        except OSError:
            return None
        is_socket = stat.S_ISSOCK(status.st_mode)
        modified_ns = status.st_mtime_ns if is_socket else 0
        is_roots = status.st_uid == 0
        return SocketIdentity(status.st_dev, status.st_ino, modified_ns, is_socket, is_roots)

    def connect(self, name: str) -> socket.socket:
        """A non-blocking connection to the event socket.

        :raises OSError: ConnectionRefusedError if no QEMU listens, BlockingIOError while too many
            others wait; EMFILE already when only a few descriptors are left.
        """
        connection = socket.socket(
            socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        try:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            if connection.fileno() >= limit - _SPARE_DESCRIPTORS:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            connection.connect(self._file(name, self.suffix))
        except BaseException:
            connection.close()
            raise
        return connection

    def is_stopping(self, name: str) -> bool:
        """Whether the file says that an admin stops the instance."""
        return os.access(self._file(name, ".stopping"), os.F_OK)

    def mark_shutdown(self, name: str) -> None:
        """Make the file of a user's shutdown."""
        # Anything of that name says the same; other programs may write to this directory, too.
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        try:
            descriptor = os.open(self._file(name, ".shutdown"), flags, 0o644)
        except FileExistsError:
            return
        os.close(descriptor)

    def clear_shutdown(self, name: str) -> None:
        """Remove the file of a user's shutdown."""
        clear_way(Path(self._file(name, ".shutdown")))

    def _file(self, name: str, suffix: str) -> str:
        return f"{self.path}/{name}{suffix}"
