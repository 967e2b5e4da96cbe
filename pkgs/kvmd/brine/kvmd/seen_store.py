"""What was seen of each VM, kept for the daemon's next start.

systemd keeps the connections (its file-descriptor store); events that were consumed are not in
them any more. So whatever bears on a verdict is written down before its event is consumed: one
small file a VM, only for VMs that have something to remember, in the unit's runtime directory.
"""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from brine.common.wholefile import write_whole
from brine.kvmd.verdict import NOTHING, Seen, Shutdown, Verdict, Who

log = logging.getLogger(__name__)

_LONGEST_KEY = 200  # a descriptor's name in systemd's store has at most 255 characters
_SUFFIX = ".json"


@dataclass(frozen=True)
class Record:
    """What is remembered of one VM.

    :param identity: of its event socket; what is remembered holds for no other.
    :param verdict: the verdict, if it was given.
    :param written: whether the verdict reached the control directory.
    """

    identity: str
    seen: Seen = NOTHING
    verdict: Verdict | None = None
    written: bool = True


def key(name: str) -> str | None:
    """An instance's name in characters that files and stored descriptors can have.

    :returns: None for the rare name whose form is too long; it is watched, but not carried over
        a restart.
    """
    quoted = quote(name, safe="", errors="surrogateescape")
    return quoted if len(quoted) <= _LONGEST_KEY else None


def descriptor_name(name: str, identity: str) -> str | None:
    """The name under which a VM's connection is stored."""
    quoted = key(name)
    return f"{quoted}@{identity}" if quoted else None


def parse_descriptor_name(stored: str) -> tuple[str, str] | None:
    """The name and identity that :func:`descriptor_name` was given; None for another's."""
    quoted, at, identity = stored.partition("@")
    return (unquote(quoted, errors="surrogateescape"), identity) if at else None


class SeenStore:
    """Records in a directory.

    :param directory: None to remember nothing, where systemd gave us no runtime directory.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    def load(self) -> dict[str, Record]:
        """All records, by instance name. What can't be read is set aside, and said."""
        records = {}
        for file in sorted(self._directory.glob(f"*{_SUFFIX}")) if self._directory else []:
            try:
                record = _parse(json.loads(file.read_bytes()))
            except (OSError, ValueError, TypeError, KeyError) as error:
                log.warning("%s: not usable, kept as %s.bad: %s", file, file.name, error)
                with contextlib.suppress(OSError):
                    file.rename(f"{file}.bad")
                continue
            records[unquote(file.name.removesuffix(_SUFFIX), errors="surrogateescape")] = record
        return records

    def save(self, name: str, record: Record) -> None:
        """Remember *record* of *name*.

        :raises OSError: if it can't be written.
        """
        if file := self._file(name):
            # It lies in RAM and need not survive a power cut: the VM would not either.
            write_whole(file, json.dumps(asdict(record)).encode(), mode=0o600, durable=False)

    def drop(self, name: str) -> None:
        """Remember nothing of *name*."""
        if file := self._file(name):
            with contextlib.suppress(OSError):
                file.unlink()

    def _file(self, name: str) -> Path | None:
        quoted = key(name)
        return self._directory / f"{quoted}{_SUFFIX}" if self._directory and quoted else None


def _parse(table: dict[str, Any]) -> Record:
    seen, verdict = table["seen"], table["verdict"]
    shutdown = seen.pop("shutdown")
    return Record(
        identity=table["identity"],
        seen=Seen(**seen, shutdown=Shutdown(**shutdown) if shutdown else None),
        verdict=Verdict(Who(verdict.pop("who")), **verdict) if verdict else None,
        written=table["written"],
    )
