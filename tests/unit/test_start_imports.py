"""What `brine instance start` loads before QEMU runs: a start waits for each of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_SLOW = {"asyncio", "ssl", "tomllib", "uuid", "platform", "pyroute2", "brine.common.qmp_blocking"}
_OF_NICS = {"brine.hotplug.wanted", "brine.hotplug.taps", "hashlib"}
_OF_CHANGES = {"brine.instance.definition", "brine.instance.stopping", "brine.instance.journal"}


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        ("brine.instance.command, brine.instance.starting", _SLOW | _OF_NICS | _OF_CHANGES),
        ("brine.instance.runner", _SLOW | _OF_NICS | _OF_CHANGES | {"subprocess", "logging"}),
        ("brine.hotplug.taps, brine.hotplug.wiring", _SLOW | {"subprocess", "shutil"}),
    ],
)
def test_what_takes_long_to_load_is_loaded_where_it_is_used(
    modules: str, unwanted: set[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, {modules}; print(*sys.modules)"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert not set(done.stdout.split()) & unwanted
