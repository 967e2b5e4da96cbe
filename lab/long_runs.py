"""Which tests only ``./dev test --long`` runs.

A test on both Debian releases runs on the newest one, unless its marker says that the releases
differ in what it shows. What is named by hand or chosen with ``-k`` or ``-m`` runs in any case.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

MARKERS = [
    "long: takes minutes, and shows nothing that a shorter test does not show too",
    "both_releases: what it shows differs between the Debian releases",
]

_NEWEST, _OLDER = "trixie", "bookworm"


def for_long_runs(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """The tests of a collection that a run without ``--long`` leaves out."""
    names = {item.nodeid for item in items}
    return {item for item in items if _is_long(item) or _is_a_twin(item, names)}


def _is_long(item: pytest.Item) -> bool:
    return item.get_closest_marker("long") is not None and not _was_chosen(item)


def _was_chosen(item: pytest.Item) -> bool:
    """Whether the command line names this very test, or chooses by a keyword or marker."""
    options = item.config.option
    named = item.nodeid.partition("[")[0]
    return bool(options.keyword or options.markexpr) or any(
        named.endswith(arg.partition("[")[0]) and "::" in arg for arg in item.config.args
    )


def _is_a_twin(item: pytest.Item, names: set[str]) -> bool:
    """Whether the same test runs on the newest release, which shows the same."""
    if item.get_closest_marker("both_releases"):
        return False
    twin = item.nodeid.replace(_OLDER, _NEWEST)
    return twin != item.nodeid and twin in names
