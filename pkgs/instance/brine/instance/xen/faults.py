"""What xl says when something fails: many lines, of which one says why."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PLACE = re.compile(r"^(?:libxl|xc|xl): (?:error|panic): (?:panic: )?(?:\w+\.c:\d+:\s?)?(?:\w+: )?")
_DOMAIN = re.compile(r"^Domain \d+:")
_ERROR = re.compile(r"^(?:libxl|xc): (?:error|panic): |\berror\b|^Failed |^xl: ")
_CHILD = "libxl_report_child_exitstatus"
"""Says only that a script failed; what the script said comes after it."""


def fault_in(lines: Iterable[str]) -> str | None:
    """Why xl failed, without the place in its source; None if it did not say.

    The first of its lines is the cause, and the others tell what followed from it.
    """
    faults = [line.strip() for line in lines if _ERROR.search(line.strip())]
    told = [line for line in faults if _CHILD not in line]
    return next((plain(line) for line in (*told, *faults)), None)


def plain(line: str) -> str:
    """A line of xl's without the place in its source."""
    text = _DOMAIN.sub("", _PLACE.sub("", line.strip(), count=1), count=1)
    return text.removesuffix(": Internal error")
