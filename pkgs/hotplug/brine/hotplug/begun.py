"""Plugging, as ``brine operations`` lists and settles it; a record ends with its VM."""

from __future__ import annotations

from dataclasses import replace

from brine.hotplug.session import settling
from brine.hotplug.transaction import PLUGGING

SETTLED = replace(PLUGGING, alone=settling)
