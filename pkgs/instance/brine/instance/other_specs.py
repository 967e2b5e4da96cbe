"""The specs of a node's other instances, for who looks for what must be of one of them only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from brine.common.instance_specs import specs_but
from brine.instance import spec_files
from brine.instance.spec import AdminState


def other_specs(name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """All specs but that of *name*, as JSON, by their instances. One that is offline does not
    count: it does not run. Nor does a damaged one, which others tell."""
    for other, data in specs_but(name, spec_files.FOLDER):
        if data.get("admin_state") != AdminState.OFFLINE:
            yield other, data
