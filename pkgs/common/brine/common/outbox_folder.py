"""Whether the outbox has events. Reading them, with :mod:`brine.common.outbox`, takes modules that
every start of an instance would have to load."""

from __future__ import annotations

import os

from brine.common import paths


def any_events() -> bool:
    """Whether there may be events that are not acknowledged."""
    try:
        with os.scandir(paths.OUTBOX_DIR) as entries:
            return any(entry.name.endswith(".json") for entry in entries)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # reading them then says why that fails
