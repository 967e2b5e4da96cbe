"""Instances that can't be told apart: by their UUID, or on the network by a NIC's MAC address."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from brine.common.regular_file import read_regular
from brine.instance import spec_files
from brine.instance.schema import SpecError
from brine.instance.spec import AdminState, Spec

_HINT = 'leave out "uuid" and "mac" for new ones, or undefine {name}'


@dataclass(frozen=True, slots=True)
class _Names:
    """By what an instance is known, beside its name."""

    uuid: str = ""
    macs: frozenset[str] = frozenset()


def refuse_twin(spec: Spec) -> None:
    """Refuse a spec that has the UUID or a MAC address of another instance, which is not offline.

    :raises SpecError: which, and whose it is.
    """
    for name in spec_files.names():
        if name == spec.name:
            continue
        other = _names_of(name)
        if spec.uuid == other.uuid:
            raise SpecError(f"is the UUID of {name}", where="/uuid", hint=_HINT.format(name=name))
        for index, nic in enumerate(spec.nics):
            if nic.mac.lower() in other.macs:
                where = f"/nics/{index}/mac"
                text = f"is the MAC address of {name}"
                raise SpecError(text, where=where, hint=_HINT.format(name=name))


def _names_of(name: str) -> _Names:
    file = spec_files.file_of(name)
    try:
        status = file.stat()
    except OSError:
        return _Names()
    return _in_spec(file, status.st_ino, status.st_mtime_ns)


@lru_cache(maxsize=4096)
def _in_spec(file: Path, _inode: int, _written_ns: int) -> _Names:
    # Who defines a node's hundreds of instances reads each of them once.
    try:
        data: Any = json.loads(read_regular(file))
        if data["admin_state"] == AdminState.OFFLINE:
            return _Names()
        return _Names(data["uuid"], frozenset(nic["mac"].lower() for nic in data["nics"]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return _Names()  # others tell of it
