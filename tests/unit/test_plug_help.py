"""What `brine nic --help` and `brine disk --help` load: people and completion wait for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_SCRIPT = """
import sys
from brine.hotplug.cli import {noun} as COMMAND
from brine.common.cli import Parser
COMMAND.configure(Parser())
print(*sys.modules)
"""


@pytest.mark.parametrize("noun", ["NIC", "DISK", "TAP"])
def test_what_takes_long_to_load_is_loaded_where_it_is_used(noun: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(noun=noun)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    loaded = set(done.stdout.split())
    assert "brine.hotplug.cli" in loaded
    assert not loaded & {"asyncio", "ssl", "tomllib", "logging", "ctypes"}
