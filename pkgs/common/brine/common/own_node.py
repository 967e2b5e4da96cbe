"""The node that this host is in its cluster: a note that outlives a new host name.

A host finds its node by its name. The note has the node's UUID, so that a host that was renamed is
not taken for a stranger. A copy of a host has another machine id, and is not that node.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from brine.common import paths
from brine.common.files import read_json, write_whole

MACHINE_ID_FILE = Path("/etc/machine-id")


class OwnNode(NamedTuple):
    """A node: its *uuid*, its *name* in the configuration, and the machine-id(5) of its host."""

    uuid: str
    name: str
    machine_id: str


def noted_node() -> OwnNode | None:
    """The node that this host was when it last found itself; None if that is not known."""
    data = read_json(paths.NODE_FILE)
    keys = ("uuid", "name", "machine_id")
    if not isinstance(data, dict) or not all(isinstance(data.get(key), str) for key in keys):
        return None
    noted = OwnNode(*(data[key] for key in keys))
    return noted if noted.machine_id and noted.machine_id == _machine_id() else None


def own_name() -> str:
    """The name of this node: by the note, or else of its host."""
    noted = noted_node()
    return noted.name if noted else os.uname().nodename


def note_node(uuid: str, name: str) -> None:
    """Note the node that this host is; raises OSError."""
    node = OwnNode(uuid, name, _machine_id())
    if node.machine_id and node != noted_node():
        write_whole(paths.NODE_FILE, json.dumps(node._asdict()).encode() + b"\n", mode=0o644)


def _machine_id() -> str:
    try:
        return MACHINE_ID_FILE.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
