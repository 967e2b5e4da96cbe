"""State across restarts of the daemon: connections in systemd, event histories in files.

systemd keeps the connections in its file-descriptor store, but not the consumed events. So whatever
bears on a verdict is recorded before its event is consumed: the VM's run, and its event history. A
VM that has any gets a small file in the unit's runtime directory.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from brine.common.files import write_whole
from brine.common.systemd import ServiceManager
from brine.kvmd.connection import Connection
from brine.kvmd.control_dir import SocketIdentity
from brine.kvmd.verdict import NOTHING, EventHistory, Shutdown, Verdict, Who

log = logging.getLogger(__name__)

_LONGEST_NAME = 190  # a key is also a descriptor's name in systemd's store: 255 characters
_SUFFIX = ".json"


@dataclass(frozen=True)
class VmRecord:
    """The state of a VM that survives a restart.

    :param verdict: the verdict, if it was given.
    :param written: whether the control directory has the verdict.
    :param replaced: whether a newer VM has its name.
    :param run: of the instance's unit; None if Brine did not start it.
    """

    seen: EventHistory = NOTHING
    verdict: Verdict | None = None
    written: bool = True
    replaced: bool = False
    run: str | None = None


def key_of(name: str, identity: SocketIdentity) -> str | None:
    """The name of a VM's record and stored connection.

    :returns: printable ASCII without ``:`` and ``/``; None for a name that would be too long: its
        VM is watched, but its state does not survive a restart.
    """
    quoted = quote(name, safe="", errors="surrogateescape")
    return f"{quoted}@{identity}" if len(quoted) <= _LONGEST_NAME else None


def parse_key(key: str) -> tuple[str, SocketIdentity]:
    """The name and identity of a key.

    :raises ValueError: if it is not one.
    """
    quoted, _, identity = key.partition("@")
    return unquote(quoted, errors="surrogateescape"), SocketIdentity.parse(identity)


class RecordStore:
    """Records in a directory, by :func:`key_of`.

    :param directory: None if systemd gave no runtime directory; then nothing is kept.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    def load(self) -> dict[str, VmRecord]:
        """All records. One that can't be read is reported and kept aside."""
        if not self._directory:
            return {}
        for unfinished in self._directory.glob(".*"):  # of a daemon that was killed
            with contextlib.suppress(OSError):
                unfinished.unlink()
        records = {}
        for file in sorted(self._directory.glob(f"*{_SUFFIX}")):
            key = file.name.removesuffix(_SUFFIX)
            try:
                parse_key(key)
                records[key] = _parse(json.loads(file.read_bytes()))
            except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
                log.warning("%s: not usable, kept as %s.bad: %s", file, file.name, error)
                with contextlib.suppress(OSError):
                    file.rename(f"{file}.bad")
        return records

    def save(self, key: str, record: VmRecord) -> None:
        """Write *record*.

        :raises OSError: if it can't be written.
        """
        if self._directory:
            # It is in RAM, and need not survive a power cut, as the VM does not.
            data = json.dumps(asdict(record)).encode()
            write_whole(self._directory / f"{key}{_SUFFIX}", data, mode=0o600, durable=False)

    def drop(self, key: str) -> None:
        """Remove its record."""
        if self._directory:
            with contextlib.suppress(OSError):
                (self._directory / f"{key}{_SUFFIX}").unlink()


def _parse(table: Any) -> VmRecord:
    table = _checked(table, dict)
    seen = _checked(table["seen"], dict)
    verdict = _checked(table["verdict"], dict, type(None))
    return VmRecord(
        seen=_parse_seen(seen),
        verdict=_parse_verdict(verdict) if verdict else None,
        written=_checked(table["written"], bool),
        replaced=_checked(table["replaced"], bool),
        run=_checked(table.get("run"), str, type(None)),  # an older daemon did not know it
    )


def _parse_seen(table: dict[str, Any]) -> EventHistory:
    shutdown = _checked(table["shutdown"], dict, type(None))
    return EventHistory(
        powerdown_usec=_checked(table["powerdown_usec"], int, type(None)),
        paused=_checked(table["paused"], bool),
        panicked=_checked(table["panicked"], bool),
        shutdown=_parse_shutdown(shutdown) if shutdown else None,
    )


def _parse_shutdown(table: dict[str, Any]) -> Shutdown:
    return Shutdown(
        guest=_checked(table["guest"], bool, type(None)),
        reason=_checked(table["reason"], str, type(None)),
        time_usec=_checked(table["time_usec"], int, type(None)),
    )


def _parse_verdict(table: dict[str, Any]) -> Verdict:
    return Verdict(
        who=Who(table["who"]),
        cause=_checked(table["cause"], str),
        time_usec=_checked(table["time_usec"], int, type(None)),
        given_usec=_checked(table.get("given_usec", 0), int),  # an older daemon did not note it
    )


def _checked(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:
        raise TypeError(f"{value!r:.40} is not what belongs here")
    return value


# The state that outlives the process, so that a restart, an upgrade or a kill loses nothing.


@dataclass(frozen=True)
class Restored:
    """A connection of an earlier daemon."""

    name: str
    identity: SocketIdentity
    peer: socket.socket


class Keeper:
    """Keeps connections and records for the daemon's next start."""

    def __init__(self, service: ServiceManager) -> None:
        self._service = service
        self._store = RecordStore(service.runtime_dir)
        self._records: dict[str, VmRecord] = {}  # of the daemon before us, until asked for

    def restore(self) -> list[Restored]:
        """The connections of an earlier daemon, in no order."""
        self._records = self._store.load()
        restored = []
        for descriptor, key in self._service.stored().items():
            try:
                name, identity = parse_key(key)
                peer = socket.socket(fileno=descriptor)
            except (ValueError, OSError):  # not ours, or of a version that we do not know
                self._service.discard(key)
                with contextlib.suppress(OSError):
                    os.close(descriptor)
                continue
            peer.setblocking(False)
            restored.append(Restored(name, identity, peer))
        return restored

    def recall(self, name: str, identity: SocketIdentity) -> VmRecord | None:
        """The record of a VM by an earlier daemon; it is handed out once."""
        key = key_of(name, identity)
        return self._records.pop(key, None) if key else None

    def leftovers(self) -> Iterator[tuple[str, SocketIdentity, VmRecord]]:
        """The remaining records, of VMs that are gone: removed, except for unwritten verdicts."""
        for key, record in self._records.items():
            if record.written:
                self._store.drop(key)
            else:
                yield *parse_key(key), record
        self._records = {}

    def keep_connection(self, connection: Connection) -> None:
        """Store a connection in systemd."""
        if key := key_of(connection.name, connection.identity):
            self._service.store(key, connection.fileno())

    def keep_record(self, connection: Connection, *, written: bool) -> None:
        """Record the state of a connection.

        :param written: whether the control directory has its verdict, if there is one.
        :raises OSError: if it can't be written.
        """
        key = key_of(connection.name, connection.identity)
        if not key:
            return
        record = VmRecord(
            connection.seen, connection.verdict, written, connection.replaced, connection.run
        )
        if record == VmRecord(NOTHING):
            self._store.drop(key)
        else:
            self._store.save(key, record)

    def forget(self, connection: Connection, *, written: bool) -> None:
        """Forget a connection that has ended.

        :param written: False keeps the record, because of its verdict.
        """
        if key := key_of(connection.name, connection.identity):
            self._service.discard(key)
            if written:
                self._store.drop(key)

    def forget_record(self, name: str, identity: SocketIdentity) -> None:
        """Forget a VM that is gone: its verdict was written."""
        if key := key_of(name, identity):
            self._store.drop(key)
