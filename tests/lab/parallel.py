"""Tests in several processes."""

from __future__ import annotations

import re

from xdist.scheduler import LoadScopeScheduling

_RELEASES = re.compile(r"[\[-](bookworm|trixie)[\]-]")


class ByMachine(LoadScopeScheduling):  # type: ignore[misc]
    """Gives each process what shares a node or guests: a file's tests on one release, and all that
    is done on Debian's kernel."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.endswith("[Debian's kernel]"):
            return "Debian's kernel"
        file, _, name = nodeid.partition("::")
        release = _RELEASES.search(name)
        return f"{file} {release[1]}" if release else file
