"""Finding event sockets in the control directory, and connecting to them."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass

from brine.common import paths
from brine.common.inotify import DirectoryWatch
from brine.common.journal import tell
from brine.common.message import Message
from brine.kvmd import messages
from brine.kvmd.control_dir import ControlDir, SocketIdentity

log = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.001
_LONGEST_RETRY_S = 0.5


@dataclass(slots=True)
class Attempt:
    """The attempts to connect to one socket file.

    :param began: on the event loop's clock, seconds.
    :param delay_s: until the next try.
    """

    name: str
    identity: SocketIdentity
    began: float
    delay_s: float = _FIRST_RETRY_S
    timer: asyncio.TimerHandle | None = None


class Finder:
    """Connects to each event socket that stands in the control directory.

    QEMU binds a socket, which makes the file appear, some time before it listens. A connection that
    is refused in between is tried again. The socket file of a killed QEMU refuses for ever: it is
    tried once at each rescan.

    :param retry_s: how long a refused connection is tried in quick succession, seconds.
    :param known: whether there is a connection to this name and identity.
    :param found: takes a new connection, with the name and the socket file's identity.
    :param changed: called when :meth:`trouble` may have changed.
    """

    def __init__(
        self,
        directory: ControlDir,
        *,
        retry_s: float,
        known: Callable[[str, SocketIdentity], bool],
        found: Callable[[str, SocketIdentity, socket.socket], None],
        changed: Callable[[], None],
    ) -> None:
        self.directory = directory
        self.retry_s = retry_s
        self._known = known
        self._found = found
        self._loop = asyncio.get_running_loop()
        self._watch = DirectoryWatch(
            directory.path, appeared=self._appeared, rescan=self._look_at_all
        )
        self._attempts: dict[str, Attempt] = {}
        self._resting: dict[str, SocketIdentity] = {}  # tried again at rescans; name to identity
        self._rejected: dict[str, SocketIdentity] = {}  # left alone until the file is another one
        self._changed = changed
        self._out_of_reach: set[str] = set()
        self._unreadable = ""

    def start(self) -> None:
        """Find the present sockets, and watch for new ones."""
        self._watch.start()

    def close(self) -> None:
        """Stop finding sockets."""
        self._watch.close()
        for attempt in list(self._attempts.values()):
            self._give_up(attempt)

    def trouble(self) -> str:
        """Why VMs are out of reach, in a few words; empty if none is."""
        if self._unreadable:
            return f"which can't be read: {self._unreadable}"
        count = len(self._out_of_reach)
        return f"{count} out of reach, see the journal" if count else ""

    def rescan(self) -> None:
        """Read the whole directory, in case an event was missed."""
        if not self._watch.refresh():
            self._look_at_all()

    def settled(self, name: str) -> None:
        """The connection for *name* works."""
        self._attempts.pop(name, None)
        self._resting.pop(name, None)
        self._out_of_reach.discard(name)

    def failed(self, name: str, identity: SocketIdentity) -> None:
        """The connection ended before it was ready: treat it as refused."""
        attempt = self._attempts.get(name)
        if attempt and attempt.identity == identity:
            self._retry(attempt, "closes every connection")
        else:
            self._resting[name] = identity

    def ended(self, name: str, identity: SocketIdentity) -> None:
        """A ready connection ended. Its file is dead, or belongs to a new VM."""
        self._resting[name] = identity
        self._consider(name)

    def reject(self, name: str, identity: SocketIdentity) -> None:
        """Ignore this file from now on."""
        self._attempts.pop(name, None)
        self._rejected[name] = identity

    def _appeared(self, file_name: str) -> None:
        name = self.directory.name_of(file_name)
        if name is not None:
            self._consider(name, again=True)

    def _look_at_all(self) -> None:
        try:
            names = set(self.directory.names())
        except FileNotFoundError:
            names = set()
        except OSError as error:
            if not self._unreadable:
                log.warning("%s can't be read: %s", self.directory.path, error.strerror)
            self._unreadable = error.strerror or str(error)
            self._changed()
            return
        self._unreadable = ""
        self._out_of_reach &= names
        self._changed()
        for left in (self._resting, self._rejected):
            for gone in left.keys() - names:
                del left[gone]
        for name in names:
            self._consider(name, again=True)

    def _consider(self, name: str, *, again: bool = False) -> None:
        """Connect to *name*'s socket, unless that is done, in progress, or useless.

        :param again: whether to try a dead socket once more.
        """
        identity = self.directory.identity(name)
        attempt = self._attempts.get(name)
        if attempt and attempt.identity == identity:
            return
        if attempt:
            self._give_up(attempt)
        if identity is None or self._known(name, identity):
            return
        if self._rejected.get(name) == identity:
            return
        if self._resting.get(name) == identity and not again:
            return
        if not identity.is_socket:
            self._rejected[name] = identity
            tell(log, messages.NOT_A_SOCKET, "not a socket; left alone", instance=name)
            return
        attempt = self._attempts[name] = Attempt(name, identity, self._loop.time())
        self._try(attempt)

    def _try(self, attempt: Attempt) -> None:
        name = attempt.name
        attempt.timer = None
        try:
            connection = self.directory.connect(name)
        except ConnectionRefusedError:
            self._retry(attempt, "nobody listens on it")
        except BlockingIOError:
            self._retry(attempt, "too many others wait for it")
        except FileNotFoundError:
            self._give_up(attempt)
        except PermissionError:
            hint = (
                f"its group needs write permission ({paths.CONTROL_GROUP} in {paths.CONTROL_DIR})"
            )
            self._rest(attempt, messages.FORBIDDEN, f"no permission to connect; {hint}")
        except OSError as error:
            reason = error.strerror or str(error)
            self._rest(attempt, messages.FORBIDDEN, f"can't be connected to: {reason}")
        else:
            self._connected(attempt, connection)

    def _connected(self, attempt: Attempt, connection: socket.socket) -> None:
        name = attempt.name
        if self.directory.identity(name) != attempt.identity:
            # It was replaced between the stat and the connection.
            connection.close()
            self._give_up(attempt)
            self._consider(name)
        else:
            self._found(name, attempt.identity, connection)

    def _retry(self, attempt: Attempt, trouble: str) -> None:
        if self.directory.identity(attempt.name) != attempt.identity:
            self._give_up(attempt)
            self._consider(attempt.name)
            return
        # A file that was left alone before gets one try, not a series.
        rested = self._resting.get(attempt.name) == attempt.identity
        if rested or self._loop.time() - attempt.began >= self.retry_s:
            self._rest(attempt, messages.NOBODY_LISTENS, f"{trouble}; left alone")
            return
        attempt.timer = self._loop.call_later(attempt.delay_s, self._try, attempt)
        attempt.delay_s = min(attempt.delay_s * 2, _LONGEST_RETRY_S)

    def _rest(self, attempt: Attempt, message: Message, text: str) -> None:
        """Stop trying until something changes; report that once for each file."""
        self._give_up(attempt)
        if self._resting.get(attempt.name) != attempt.identity:
            self._resting[attempt.name] = attempt.identity
            tell(log, message, text, instance=attempt.name)
        if message is messages.FORBIDDEN:
            self._out_of_reach.add(attempt.name)
        else:
            self._out_of_reach.discard(attempt.name)
        self._changed()

    def _give_up(self, attempt: Attempt) -> None:
        if attempt.timer:
            attempt.timer.cancel()
        if self._attempts.get(attempt.name) is attempt:
            del self._attempts[attempt.name]
