"""The specs of a node's other instances, for who looks for what must be of one of them only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from brine.common.regular_file import read_regular
from brine.instance import spec_files
from brine.instance.spec import AdminState


def other_specs(name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """All specs but that of *name*, as JSON, by their instances. One that is offline does not
    count: it does not run. Nor does a damaged one, which others tell."""
    for other in spec_files.names():
        if other == name:
            continue
        file = spec_files.file_of(other)
        try:
            status = file.stat()
        except OSError:
            continue
        data = _content(file, status.st_ino, status.st_mtime_ns)
        if isinstance(data, Mapping) and data.get("admin_state") != AdminState.OFFLINE:
            yield other, data


@lru_cache(maxsize=4096)
def _content(file: Path, _inode: int, _written_ns: int) -> Any:
    # Who defines a node's hundreds of instances reads each of them once.
    try:
        return json.loads(read_regular(file))
    except (OSError, ValueError, RecursionError):
        return None
