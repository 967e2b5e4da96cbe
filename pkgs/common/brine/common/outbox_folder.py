"""Where :mod:`brine.common.outbox` keeps events, for who only wants to know whether there are any.

That takes a moment, and what it takes to read them takes longer to load.
"""

from __future__ import annotations

import os

from brine.common import paths


def any_events() -> bool:
    """Whether there may be events that nobody has acknowledged."""
    try:
        with os.scandir(paths.OUTBOX_DIR) as entries:
            return any(entry.name.endswith(".json") for entry in entries)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # who reads them says why that can't be done
