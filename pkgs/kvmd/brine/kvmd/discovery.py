"""Finding event sockets in the control directory, and connecting to them."""

from __future__ import annotations

import asyncio
import enum
import logging
import socket
import time
from dataclasses import dataclass
from typing import Protocol

from brine.common import paths
from brine.common.errors import printable
from brine.common.inotify import DirectoryWatch
from brine.common.journal import tell
from brine.common.message import Message
from brine.kvmd import messages
from brine.kvmd.control_dir import ControlDir, SocketIdentity

log = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.001
_LONGEST_RETRY_S = 0.5

MOST_FOREIGN = 500
"""The most sockets of others than root that are looked after at once. Members of the control group
may make any number, which must not take what the VMs of root need."""

_FOREIGN_PER_S = 1.0  # each costs some records; one user may make and remove them without end


class Effort(enum.Enum):
    """The daemon's effort for a socket file without a working connection."""

    TRIED = enum.auto()
    """There is a connection without a greeting yet, or another try soon."""
    RESTS = enum.auto()
    """It is tried once at each rescan."""
    REJECTED = enum.auto()
    """It is left alone until the file is another one."""


@dataclass(slots=True)
class Candidate:
    """A socket file without a working connection; *began* is on the event loop's clock."""

    name: str
    identity: SocketIdentity
    effort: Effort
    began: float = 0.0
    delay_s: float = _FIRST_RETRY_S
    timer: asyncio.TimerHandle | None = None
    has_rested: bool = False
    is_out_of_reach: bool = False


class _Allowance:
    """How many more sockets of others than root may be taken up by now: :data:`MOST_FOREIGN` at
    first, and then one a second."""

    def __init__(self) -> None:
        self._left = float(MOST_FOREIGN)
        self._at_s = time.monotonic()

    def take(self) -> bool:
        """Take one, if there is one."""
        now_s = time.monotonic()
        gained = (now_s - self._at_s) * _FOREIGN_PER_S
        self._left, self._at_s = min(self._left + gained, MOST_FOREIGN), now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True


class FinderOwner(Protocol):
    """What takes the connections that are found."""

    def knows(self, name: str, identity: SocketIdentity) -> bool:
        """Whether there is a connection to this socket file."""

    def foreign(self) -> int:
        """How many connections lead to processes of others than root."""

    def found(self, name: str, identity: SocketIdentity, peer: socket.socket) -> None:
        """Take a new connection."""

    def show_status(self) -> None:
        """Show a new status soon: :meth:`Finder.trouble` may have changed."""


class Finder:
    """Connects to each event socket that stands in the control directory.

    QEMU binds a socket, which makes the file appear, some time before it listens. A connection that
    is refused in between is tried again. The socket file of a killed QEMU refuses for ever: it is
    tried once at each rescan.

    :param retry_s: how long a refused connection is tried in quick succession, seconds.
    """

    def __init__(self, directory: ControlDir, retry_s: float, owner: FinderOwner) -> None:
        self.directory = directory
        self.retry_s = retry_s
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._watch = DirectoryWatch(
            directory.path, appeared=self._appeared, rescan=self._look_at_all
        )
        self._candidates: dict[str, Candidate] = {}  # by name
        self._foreign: set[str] = set()  # the candidates of others than root
        self._allowance = _Allowance()
        self._left_out = 0  # since the last rescan began
        self._has_told = False
        self._unreadable = ""

    def start(self) -> None:
        """Find the present sockets, and watch for new ones."""
        self._watch.start()

    def close(self) -> None:
        """Stop finding sockets."""
        self._watch.close()
        for candidate in list(self._candidates.values()):
            self._give_up(candidate)

    def out_of_reach(self) -> int:
        """How many VMs are out of reach, whose sockets are there."""
        return sum(candidate.is_out_of_reach for candidate in self._candidates.values())

    def left_out(self) -> int:
        """How many VMs are left out, as others than root run them, and there are too many."""
        return self._left_out

    def trouble(self) -> str:
        """Why VMs are out of reach, in a few words; empty if none is."""
        if self._unreadable:
            return f"which can't be read: {self._unreadable}"
        count = self.out_of_reach()
        troubles = [f"{count} out of reach, see the journal"] if count else []
        if self._left_out:
            troubles.append(f"{self._left_out} of others than root left out")
        return ", ".join(troubles)

    def rescan(self) -> None:
        """Read the whole directory, in case an event was missed."""
        if not self._watch.refresh():
            self._look_at_all()

    def settled(self, name: str) -> None:
        """The connection for *name* works."""
        self._drop(name)

    def failed(self, name: str, identity: SocketIdentity) -> None:
        """The connection ended before it was ready: treat it as refused."""
        candidate = self._candidates.get(name)
        if candidate and candidate.identity == identity and candidate.effort is Effort.TRIED:
            self._retry(candidate, "closes every connection")
        else:
            self._set(name, identity, Effort.RESTS)

    def ended(self, name: str, identity: SocketIdentity) -> None:
        """A ready connection ended. Its file is dead, or belongs to a new VM."""
        self._set(name, identity, Effort.RESTS)
        self._consider(name)

    def reject(self, name: str, identity: SocketIdentity) -> None:
        """Ignore this file from now on."""
        self._set(name, identity, Effort.REJECTED)

    def _set(self, name: str, identity: SocketIdentity, effort: Effort) -> None:
        has_rested = effort is Effort.RESTS
        if earlier := self._candidates.get(name):
            self._give_up(earlier)
        self._add(Candidate(name, identity, effort, has_rested=has_rested))

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
            self._owner.show_status()
            return
        self._unreadable = ""
        for gone in self._candidates.keys() - names:
            if self._candidates[gone].effort is not Effort.TRIED:
                self._drop(gone)
        self._has_told, self._left_out = self._left_out > 0, 0
        self._owner.show_status()
        for name in sorted(names, key=self._is_foreign):  # those of root first
            self._consider(name, again=True)

    def _is_foreign(self, name: str) -> bool:
        identity = self.directory.identity(name)
        return identity is not None and not identity.is_roots

    def _consider(self, name: str, *, again: bool = False) -> None:
        """Connect to *name*'s socket, unless that is done, in progress, or useless. A dead one is
        tried *again* only if told so."""
        identity = self.directory.identity(name)
        candidate = self._candidates.get(name)
        if candidate and candidate.identity != identity:
            self._give_up(candidate)
            candidate = None
        if candidate and not (again and candidate.effort is Effort.RESTS):
            return
        if identity is None or self._owner.knows(name, identity):
            return
        if candidate is None and not identity.is_roots and not self._may_take_up(name):
            return
        if not identity.is_socket:
            self.reject(name, identity)
            tell(log, messages.NOT_A_SOCKET, "not a socket; left alone", instance=name)
            return
        if candidate is None:
            candidate = Candidate(name, identity, Effort.TRIED, self._loop.time())
            self._add(candidate)
        candidate.effort = Effort.TRIED
        self._try(candidate)

    def _may_take_up(self, name: str) -> bool:
        """Whether one more socket of others than root can be looked after. What is left out is
        found again at a rescan; the first one is reported."""
        at_once = max(len(self._foreign), self._owner.foreign())
        if at_once < MOST_FOREIGN and self._allowance.take():
            return True
        if not self._has_told:
            text = "more sockets of others than root than are looked after; the rest is left out"
            log.warning("%s: %s, from %s on", self.directory.path, text, printable(name))
        self._has_told = True
        self._left_out += 1
        self._owner.show_status()
        return False

    def _try(self, candidate: Candidate) -> None:
        name = candidate.name
        candidate.timer = None
        try:
            connection = self.directory.connect(name)
        except ConnectionRefusedError:
            self._retry(candidate, "no process listens on it")
        except BlockingIOError:
            self._retry(candidate, "too many others wait for it")
        except FileNotFoundError:
            self._give_up(candidate)
        except PermissionError:
            group = f"({paths.CONTROL_GROUP} in {paths.CONTROL_DIR})"
            text = f"no permission to connect; its group needs write permission {group}"
            self._rest(candidate, messages.FORBIDDEN, text)
        except OSError as error:
            reason = error.strerror or str(error)
            self._rest(candidate, messages.FORBIDDEN, f"can't be connected to: {reason}")
        else:
            if self.directory.identity(name) == candidate.identity:
                self._owner.found(name, candidate.identity, connection)
            else:  # it was replaced between the stat and the connection
                connection.close()
                self._consider(name)

    def _retry(self, candidate: Candidate, trouble: str) -> None:
        if self.directory.identity(candidate.name) != candidate.identity:
            self._consider(candidate.name)
            return
        # A file that was left alone before gets one try, not a series.
        if candidate.has_rested or self._loop.time() - candidate.began >= self.retry_s:
            self._rest(candidate, messages.NOBODY_LISTENS, f"{trouble}; left alone")
            return
        candidate.timer = self._loop.call_later(candidate.delay_s, self._try, candidate)
        candidate.delay_s = min(candidate.delay_s * 2, _LONGEST_RETRY_S)

    def _rest(self, candidate: Candidate, message: Message, text: str) -> None:
        """Stop trying until something changes; report that once for each file."""
        if not candidate.has_rested:
            tell(log, message, text, instance=candidate.name)
        candidate.effort = Effort.RESTS
        candidate.has_rested = True
        candidate.is_out_of_reach = message is messages.FORBIDDEN
        self._owner.show_status()

    def _give_up(self, candidate: Candidate) -> None:
        if candidate.timer:
            candidate.timer.cancel()
        if self._candidates.get(candidate.name) is candidate:
            self._drop(candidate.name)

    def _add(self, candidate: Candidate) -> None:
        self._candidates[candidate.name] = candidate
        if not candidate.identity.is_roots:
            self._foreign.add(candidate.name)

    def _drop(self, name: str) -> None:
        self._candidates.pop(name, None)
        self._foreign.discard(name)
