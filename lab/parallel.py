"""Tests in several processes."""

from __future__ import annotations

import re

from xdist.scheduler import LoadScopeScheduling

_RELEASES = re.compile(r"[\[-](bookworm|trixie|forky)[\]-]")

_ON_DEBIANS_KERNEL = "[Debian's kernel]"

_LONGEST_FIRST = (
    "tests/xen/test_instances_at_length.py",
    "tests/xen/",
    "tests/component/test_lifecycle_handler.py",  # it mostly waits
)


def turn_of(nodeid: str) -> int:
    """When it is a test's turn; those that have the same are left in their order.

    What is done on Debian's kernel is done at once, by one process. It comes last, when others
    leave it a processor: beside three other tests guests in an emulated machine boot too late.
    """
    if nodeid.endswith(_ON_DEBIANS_KERNEL):
        return len(_LONGEST_FIRST) + 1
    matches = (turn for turn, start in enumerate(_LONGEST_FIRST) if nodeid.startswith(start))
    return next(matches, len(_LONGEST_FIRST))


class ByMachine(LoadScopeScheduling):  # type: ignore[misc]
    """Gives each process what shares a node or guests: a file's tests on one release, and all that
    is done on Debian's kernel."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.endswith(_ON_DEBIANS_KERNEL):
            return "Debian's kernel"
        file, _, name = nodeid.partition("::")
        release = _RELEASES.search(name)
        return f"{file} {release[1]}" if release else file
