"""What a node offers of an instance that is as the cluster's configuration has it."""

from __future__ import annotations

import json
from typing import Any

from brine.config.privileges import privileges_of
from brine.config.store import ConfigStore


def offer_of(store: ConfigStore, name: str, *, live: bool, copies: bool) -> dict[str, Any]:
    """The part of an offer that the master looks at."""
    found = store.read()
    spec = {"hypervisor": "kvm", **privileges_of(found.hv_params(found.instance(name)))}
    runtime = {"nics": [], "disks": [], "spec": spec}
    return {
        "runs": True,
        "live": live,
        "copies": copies,
        "spec": spec,
        "runtime": json.dumps(runtime) if live else None,
    }
