"""Running a part of the bench in a node, where what is measured is installed."""

import json
import subprocess
from dataclasses import asdict
from typing import Any

from bench.errors import BenchError
from lab.machine import Machine

CODE = "/srv/brine"
"""Where a node has the folder of the bench."""


def measure(node: Machine, module: str, plan: Any) -> dict[str, Any]:
    """Run a module of the bench in a node; returns what it writes, which is JSON.

    :param plan: a dataclass; the module's one argument, as JSON.
    :raises BenchError: if it fails.
    """
    # -P: the tree's own code stays out of what is measured, which is installed.
    python = ["env", f"PYTHONPATH={CODE}", "/usr/bin/python3", "-P", "-m", module]
    done = subprocess.run(
        node.command([*python, json.dumps(asdict(plan))]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise BenchError(
            f"the measuring process ended with {done.returncode}", hint="its message is above"
        )
    found: dict[str, Any] = json.loads(done.stdout)
    return found
