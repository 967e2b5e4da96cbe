"""An instance that belongs to a CI job, and does not outlive it."""

from __future__ import annotations

import json

from demo.guest import Guest
from demo.report import Score
from demo.terminal import Terminal
from lab.guest_image import KERNEL_OPTIONS
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
    "append": f"console=ttyS0 {KERNEL_OPTIONS}",
    "owner": {"watchdog_timeout": 5},
}


def begin(terminal: Terminal) -> None:
    """Have a job own an instance."""
    terminal.node.write(f"/srv/{_NAME}.json", json.dumps(_SPEC))
    terminal.type(f"brine instance define /srv/{_NAME}.json")
    terminal.type(f"systemd-run --quiet --unit={_JOB} brine lifecycle own {_NAME} --start")


def lose(terminal: Terminal) -> None:
    """Kill the job, when its instance runs."""
    _wait_status(terminal.node, "running")
    Guest(terminal.node, _NAME).wait_ready()
    terminal.type("brine lifecycle list")
    terminal.type(f"systemctl kill --signal=SIGKILL {_JOB}")


def wait_ended(terminal: Terminal) -> Score:
    """Wait for the end of the instance whose job is gone."""
    _wait_status(terminal.node, "ADMIN_down")
    terminal.type("brine lifecycle list")
    said = terminal.type(f"brine kvmd verdicts {_NAME}")
    return Score(int("owner-gone" in said), 1, "instance ended with its owner")


def _wait_status(node: Node, status: str) -> None:
    def reached() -> bool:
        shown = node.run(["brine", "instance", "info", _NAME, "--json"]).stdout
        return bool(json.loads(shown)["status"] == status)

    wait_for(f"{_NAME} to be {status}", reached, timeout_s=60, interval_s=0.5)
