"""The six ways in which the demo ends a guest, and who should be found to have done it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from lab.guest import Guest
from lab.node import Node
from lab.waiting import wait_for

CONTROL_DIR = "/run/brine/ctrl"


@dataclass(frozen=True)
class Ending:
    """One guest's end: what is done to it, and the verdict and the cause that are right."""

    instance: str
    done: str
    act: Callable[[Node, Guest], None]
    verdict: str
    cause: str


def user_powers_off(_node: Node, guest: Guest) -> None:
    guest.order("poweroff")


def admin_stops(node: Node, guest: Guest) -> None:
    # The admin's intent comes first; then the guest is asked to end, like a server by its button.
    node.run(["touch", f"{CONTROL_DIR}/{guest.name}.stopping"])
    guest.powerdown()


def terminate(_node: Node, guest: Guest) -> None:
    guest.signal(signal.SIGTERM)


def kill(_node: Node, guest: Guest) -> None:
    guest.signal(signal.SIGKILL)


def pause_resume_and_power_off(_node: Node, guest: Guest) -> None:
    guest.qmp("stop")
    time.sleep(0.5)
    guest.qmp("cont")
    guest.order("poweroff")


def power_off_during_restart(node: Node, guest: Guest) -> None:
    # A restart is over before a guest is off: this one takes longer.
    folder = "/run/systemd/system/brine-kvmd.service.d"
    node.write(f"{folder}/slow.conf", "[Service]\nExecStartPre=/bin/sleep 3\n")
    node.run(["systemctl", "daemon-reload"])
    node.run(["systemctl", "restart", "--no-block", "brine-kvmd.service"])
    wait_for("kvmd to be down", lambda: not _kvmd_runs(node), timeout_s=10)
    guest.order("poweroff")
    guest.wait()


def _kvmd_runs(node: Node) -> bool:
    show = ["systemctl", "show", "--property=MainPID", "--value", "brine-kvmd.service"]
    return node.run(show).stdout.strip() != "0"


ENDINGS = [
    Ending("web1", "the user powers it off", user_powers_off, "user", "guest-shutdown"),
    Ending("web2", "the admin stops it", admin_stops, "admin", "stopping"),
    Ending("db1", "SIGTERM to its QEMU", terminate, "admin", "host-signal"),
    Ending("db2", "SIGKILL to its QEMU", kill, "crash", "eof"),
    Ending(
        "mail1",
        "paused, resumed, then the user powers it off",
        pause_resume_and_power_off,
        "user",
        "guest-shutdown",
    ),
    # Last, so that the restart does not touch the times of the others.
    Ending(
        "mail2",
        "the user powers it off while kvmd restarts",
        power_off_during_restart,
        "user",
        "guest-shutdown",
    ),
]
