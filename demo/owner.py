"""An instance that belongs to a CI job, and does not outlive it."""

from __future__ import annotations

import json

from demo.guest import Guest
from demo.report import Score
from demo.terminal import Terminal
from lab.node import Node
from lab.waiting import wait_for

_NAME = "ci1"
_JOB = "ci-job"
_SPEC = {
    "name": _NAME,
    "accel": "tcg",
    "memory_mib": 128,
    "kernel": "/srv/guest/kernel",
    "initrd": "/srv/guest/initramfs",
    "append": "console=ttyS0 panic=-1 quiet",
    "owner": {"watchdog_timeout": 5},
}


def lose(terminal: Terminal) -> Score:
    """Have a job own an instance, kill the job, and wait for the instance's end."""
    node = terminal.node
    node.write(f"/srv/{_NAME}.json", json.dumps(_SPEC))
    terminal.type(f"brine instance define /srv/{_NAME}.json")
    terminal.type(f"systemd-run --quiet --unit={_JOB} brine lifecycle own {_NAME} --start")
    wait_for("the job's instance", lambda: _status(node) == "running", timeout_s=60)
    Guest(node, _NAME).wait_ready()
    terminal.type("brine lifecycle list")
    terminal.type(f"systemctl kill --signal=SIGKILL {_JOB}")
    wait_for("the instance's end", lambda: _status(node) == "ADMIN_down", timeout_s=60)
    terminal.type("brine lifecycle list")
    said = terminal.type(f"brine kvmd verdicts {_NAME}")
    return Score(int("owner-gone" in said), 1, "instance ended with its owner")


def _status(node: Node) -> str:
    shown = node.run(["brine", "instance", "info", _NAME, "--json"]).stdout
    return str(json.loads(shown)["status"])
