"""LVM as a program: its environment, and the report that a command begins to ask for before it is
loaded. So this module loads little itself."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

from brine.common.process import begin_program

PROGRAM = "lvm"
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
AS_JSON = ("--reportformat", "json", "--units", "b", "--nosuffix", "--binary")

_REPORTED = {
    "vg": (
        "vg_name,vg_uuid,vg_size,vg_free,vg_extent_size,vg_partial,vg_exported,vg_missing_pv_count"
    ),
    "pv": "pv_name,pv_uuid,pv_size,pv_free,pv_allocatable,pv_missing,pv_exported,vg_uuid,vg_name",
    # What the report would otherwise have of all that it knows.
    "lv": "lv_uuid",
    "pvseg": "pvseg_start",
    "seg": "segtype",
}
FULL_REPORT = (
    "fullreport",
    *AS_JSON,
    *(word for kind, names in _REPORTED.items() for word in ("--configreport", kind, "-o", names)),
)
"""The arguments of the report of all volume groups and physical volumes."""

running: dict[tuple[str, ...], Callable[[float], Any]] = {}
"""Commands of LVM's that run already, by their arguments: what waits for their end."""


def environment() -> dict[str, str]:
    """The environment of LVM's commands."""
    found = {"PATH": PATH, "LC_ALL": "C", "LVM_SUPPRESS_FD_WARNINGS": "1"}
    if folder := os.environ.get("LVM_SYSTEM_DIR"):  # an admin's own configuration of LVM
        found["LVM_SYSTEM_DIR"] = folder
    return found


def begin_report(words: Sequence[str]) -> None:
    """Begin to ask LVM, while a command loads; see :func:`brine.common.ahead.begin_ahead`."""
    if os.geteuid() or {"file", "--type=file", "-h", "--help"} & {*words}:
        return
    with contextlib.suppress(OSError):  # LVM is not installed
        running[FULL_REPORT] = begin_program([PROGRAM, *FULL_REPORT], environment=environment())
