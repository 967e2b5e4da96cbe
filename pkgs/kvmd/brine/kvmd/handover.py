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
from typing import Any
from urllib.parse import quote, unquote

from brine.common.files import write_whole
from brine.common.schema import SchemaError, parse
from brine.common.systemd import ServiceManager
from brine.kvmd.control_dir import SocketIdentity
from brine.kvmd.verdict import NOTHING, EventHistory, Verdict

log = logging.getLogger(__name__)

_LONGEST_NAME = 190  # a key is also a descriptor's name in systemd's store: 255 characters


@dataclass(slots=True)
class VmRecord:
    """The state of a VM that survives a restart.

    :param verdict: on its end, if it was given.
    :param written: whether the control directory has the verdict.
    :param replaced: whether a newer VM has the name: then the verdict goes to the journal only.
    :param run: of the instance's unit; None if Brine did not start the VM.
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
    """The name and identity of a key, or a ValueError."""
    quoted, _, identity = key.partition("@")
    return unquote(quoted, errors="surrogateescape"), SocketIdentity.parse(identity)


def _said(record: VmRecord) -> dict[str, Any]:
    """A record as JSON. Unseen facts are left out, as the daemon of an older version, which may
    come next, does not know all of it."""
    said = asdict(record)
    said["seen"] = {
        key: value
        for key, value in said["seen"].items()
        if value is not None and value is not False and value != ""
    }
    return said


class Keeper:
    """Keeps connections and records for the daemon's next start, by :func:`key_of`.

    Without a runtime directory of systemd's there are no records.
    """

    def __init__(self, service: ServiceManager) -> None:
        self._service = service
        self._folder = service.runtime_dir
        self._records: dict[str, VmRecord] = {}  # of the daemon before us, until asked for

    def restore(self) -> list[tuple[str, SocketIdentity, socket.socket]]:
        """The connections of an earlier daemon, in no order: name, identity, and our end."""
        self._records = self._load()
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
            restored.append((name, identity, peer))
        return restored

    def recall(self, key: str | None) -> VmRecord | None:
        """The record of a VM by an earlier daemon; it is handed out once."""
        return self._records.pop(key, None) if key else None

    def leftovers(self) -> Iterator[tuple[str, VmRecord]]:
        """The remaining records, of VMs that are gone: removed, except for unwritten verdicts."""
        for key, record in self._records.items():
            if record.written:
                self.drop(key)
            else:
                yield key, record
        self._records = {}

    def keep_connection(self, key: str | None, descriptor: int) -> None:
        """Store a connection in systemd."""
        if key:
            self._service.store(key, descriptor)

    def keep_record(self, key: str | None, record: VmRecord) -> None:
        """Record the state of a VM."""
        if record == VmRecord():
            self.drop(key)
        elif self._folder and key:
            # It is in RAM, and need not survive a power cut, as the VM does not.
            data = json.dumps(_said(record)).encode()
            write_whole(self._folder / f"{key}.json", data, mode=0o600, durable=False)

    def discard_connection(self, key: str | None) -> None:
        """Remove a connection that has ended from systemd's store."""
        if key:
            self._service.discard(key)

    def drop(self, key: str | None) -> None:
        """Remove a VM's record."""
        if self._folder and key:
            with contextlib.suppress(OSError):
                (self._folder / f"{key}.json").unlink()

    def _load(self) -> dict[str, VmRecord]:
        """All records. One that can't be read is reported and kept aside."""
        if not self._folder:
            return {}
        for unfinished in self._folder.glob(".*"):  # of a daemon that was killed
            with contextlib.suppress(OSError):
                unfinished.unlink()
        records = {}
        for file in sorted(self._folder.glob("*.json")):
            key = file.name.removesuffix(".json")
            try:
                parse_key(key)
                records[key] = parse(VmRecord, json.loads(file.read_bytes()))
            except (OSError, ValueError, SchemaError, RecursionError) as error:
                log.warning("%s: not usable, kept as %s.bad: %s", file, file.name, error)
                with contextlib.suppress(OSError):
                    file.rename(f"{file}.bad")
        return records
