"""Capabilities that a process gives up."""

from __future__ import annotations

import os
import re
import subprocess
import sys

_SCRIPT = """
import subprocess
from brine.common.privileges import Capability, keep_only
keep_only(Capability.DAC_OVERRIDE, Capability.NET_ADMIN)
keep_only(Capability.NET_ADMIN, Capability.SYS_PTRACE)
print(open("/proc/self/status").read())
print(subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True).stdout)
"""


def test_a_process_keeps_what_it_named_and_had_and_its_programs_have_their_own() -> None:
    """Root keeps one capability here; anybody else has none to begin with."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        env={"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.defpath},
        capture_output=True,
        text=True,
        check=True,
    )
    ours, of_program = (int(found, 16) for found in re.findall(r"CapEff:\s*(\w+)", done.stdout))
    bounding = int(re.findall(r"CapBnd:\s*(\w+)", done.stdout)[0], 16)
    is_root = re.findall(r"Uid:\s+0\s", done.stdout) != []
    assert ours == (1 << 12 if is_root else 0) & bounding
    assert of_program == (bounding if is_root else 0)
