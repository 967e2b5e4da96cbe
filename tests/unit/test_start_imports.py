"""What `brine instance start` loads before QEMU runs: a start waits for each of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_SLOW = {"asyncio", "ssl", "tomllib", "uuid", "platform", "brine.common.qmp.client"}
_OF_NICS = {"brine.hotplug.nic", "brine.hotplug.net.tap", "hashlib"}
_OF_CHANGES = {"brine.instance.validate", "brine.instance.shutdown", "brine.instance.history"}


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        ("brine.instance.cli, brine.instance.start", _SLOW | _OF_NICS | _OF_CHANGES),
        # Nearly every instance has a NIC.
        ("brine.instance.service.run", _SLOW | _OF_CHANGES | {"subprocess", "logging"}),
        ("brine.hotplug.net.tap, brine.hotplug.net.wiring", _SLOW | {"subprocess", "shutil"}),
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
