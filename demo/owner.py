"""An instance that belongs to a CI job, and does not outlive it; nor does its disk."""

from __future__ import annotations

import json

from demo.cluster import UNIT
from demo.guest import Guest
from demo.report import Score
from demo.terminal import Terminal
from lab.errors import LabError
from lab.guest_image import KERNEL_OPTIONS
from lab.node import Node
from lab.progress import say
from lab.waiting import wait_for

_NAME = "ci1"
_JOB = "ci-job"
_DISK = "scratch"
_MADE_MIB, _GROWN_MIB = 64, 128
_SPEC = {
    "name": _NAME,
    "accel": "tcg",
    "memory_mib": 128,
    "kernel": "/srv/guest/kernel",
    "initrd": "/srv/guest/initramfs",
    "append": f"console=ttyS0 {KERNEL_OPTIONS}",
    "disks": [{"name": _DISK, "size_mib": _MADE_MIB}],
    "owner": {"watchdog_timeout": 5},
}


def begin(terminal: Terminal) -> None:
    """Have a job own an instance, whose disk is made by its size."""
    terminal.node.write(f"/srv/{_NAME}.json", json.dumps(_SPEC))
    print(flush=True)
    say(f"a CI job gets an instance, {_NAME}; Brine makes its disk, of {_MADE_MIB} MiB")
    terminal.type(f"brine instance define /srv/{_NAME}.json")
    terminal.type(f"brine storage list --type file; brine disk status {_NAME}")
    terminal.type(f"systemd-run --quiet --unit={_JOB} brine lifecycle own {_NAME} --start")


def grow(terminal: Terminal) -> Score:
    """Have its disk grow when its guest runs; return whether the guest sees that."""
    _wait_status(terminal.node, "running")
    guest = Guest(terminal.node, _NAME)
    guest.wait_ready()
    terminal.type(f"brine disk grow {_NAME} {_DISK} {_GROWN_MIB}M")

    def sees() -> bool:
        return int(guest.run("cat /sys/block/vda/size")) * 512 == _GROWN_MIB << 20

    what = "disk has grown while the VM runs"
    try:
        wait_for(f"{_NAME} to see {_GROWN_MIB} MiB", sees, timeout_s=60, interval_s=0.5)
    except LabError as error:
        print(error, flush=True)
        return Score(0, 1, what)
    print(f"{_NAME} sees a disk, vda, of {_GROWN_MIB} MiB", flush=True)
    return Score(1, 1, what)


def lose(terminal: Terminal) -> None:
    """Kill the job."""
    terminal.type("brine lifecycle list")
    terminal.type(f"systemctl kill --signal=SIGKILL {_JOB}")


def wait_ended(terminal: Terminal) -> Score:
    """Wait for the end of the instance whose job is gone."""
    _wait_status(terminal.node, "ADMIN_down")
    terminal.type("brine lifecycle list")
    said = terminal.type(f"brine kvmd verdicts {_NAME}")
    terminal.type(f"brine instance undefine {_NAME} --delete-volumes --yes")
    left = terminal.node.run(["find", UNIT, "-type", "f"]).stdout
    is_right = "owner-gone" in said and not left
    return Score(int(is_right), 1, "instance ended with its owner")


def _wait_status(node: Node, status: str) -> None:
    def reached() -> bool:
        shown = node.run(["brine", "instance", "info", _NAME, "--json"]).stdout
        return bool(json.loads(shown)["status"] == status)

    wait_for(f"{_NAME} to be {status}", reached, timeout_s=60, interval_s=0.5)
