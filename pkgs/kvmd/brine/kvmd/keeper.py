"""What outlives the daemon's process, so that a restart, an upgrade or a kill loses nothing.

Connections are in systemd's file-descriptor store, and records of what was seen on them are in
the unit's runtime directory; both under one key, the VM's name and its socket's identity.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from brine.common.service import ServiceManager
from brine.kvmd.connection import Connection
from brine.kvmd.control_dir import Identity
from brine.kvmd.records import Record, RecordStore, key_of, parse_key
from brine.kvmd.verdict import NOTHING


@dataclass(frozen=True)
class Restored:
    """A connection of the daemon before us."""

    name: str
    identity: Identity
    peer: socket.socket


class Keeper:
    """Keeps connections and records for the daemon's next start."""

    def __init__(self, service: ServiceManager) -> None:
        self._service = service
        self._store = RecordStore(service.runtime_dir)
        self._records: dict[str, Record] = {}  # of the daemon before us, until asked for

    def restore(self) -> list[Restored]:
        """What the daemon before us left: its connections, in no order."""
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

    def recall(self, name: str, identity: Identity) -> Record | None:
        """What the daemon before us remembered of a VM; asked once."""
        key = key_of(name, identity)
        return self._records.pop(key, None) if key else None

    def leftovers(self) -> Iterator[tuple[str, Identity, Record]]:
        """What nobody recalled, of VMs that are gone: dropped, but for verdicts not written yet."""
        for key, record in self._records.items():
            if record.written:
                self._store.drop(key)
            else:
                yield *parse_key(key), record
        self._records = {}

    def keep_connection(self, connection: Connection) -> None:
        """Have systemd keep a connection."""
        if key := key_of(connection.name, connection.identity):
            self._service.store(key, connection.fileno())

    def keep_record(self, connection: Connection, *, written: bool) -> None:
        """Remember what was seen on a connection.

        :param written: whether its verdict, if there is one, is in the control directory.
        :raises OSError: if it can't be written down.
        """
        key = key_of(connection.name, connection.identity)
        if not key:
            return
        record = Record(
            connection.seen, connection.verdict, written, connection.replaced, connection.run
        )
        if record == Record(NOTHING):
            self._store.drop(key)
        else:
            self._store.save(key, record)

    def forget(self, connection: Connection, *, written: bool) -> None:
        """A connection is over.

        :param written: False keeps the record, for its verdict's sake.
        """
        if key := key_of(connection.name, connection.identity):
            self._service.discard(key)
            if written:
                self._store.drop(key)

    def forget_record(self, name: str, identity: Identity) -> None:
        """The verdict of a VM that is gone was written at last."""
        if key := key_of(name, identity):
            self._store.drop(key)
