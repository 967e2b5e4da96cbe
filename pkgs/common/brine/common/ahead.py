"""What a verb of ``brine`` waits for, begun before the verb is loaded."""

from __future__ import annotations

from typing import Any

from brine.common.entry_points import entry_points


def begin_ahead(words: list[str]) -> Any:
    """Begin what a verb waits for: another program's answer is ready then when Python has loaded
    the verb. A part names a function of the command line's further words, in the group
    ``brine.ahead`` under ``NOUN-VERB``. The words are not checked yet: it may only look."""
    named = "-".join(words[:2])
    for entry in entry_points("brine.ahead"):
        if entry.name == named:
            return entry.load()(words[2:])
    return None
