"""The six ways in which the demo ends an instance, and what should be said of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from demo.guest import Guest
from lab.node import Node
from lab.waiting import wait_for


@dataclass(frozen=True)
class Ending:
    """One instance's end: what is done to it, and what is right to say of it.

    `verdict` and `cause` are empty for what is no end. `why` is in the sentence beside the status,
    and `then` is the status once the watcher has looked after it.
    """

    instance: str
    done: str
    act: Callable[[Node, str], None]
    verdict: str
    cause: str
    status: str
    why: str
    then: str = "running"


def user_reboots(node: Node, name: str) -> None:
    Guest(node, name).reboot()


def admin_stops(node: Node, name: str) -> None:
    node.run(["brine", "instance", "stop", name])


def unit_is_stopped(node: Node, name: str) -> None:
    node.run(["systemctl", "stop", f"brine-instance@{name}.service"])


def kill(node: Node, name: str) -> None:
    unit = f"brine-instance@{name}.service"
    node.run(["systemctl", "kill", "--kill-whom=main", "--signal=SIGKILL", unit])


def kernel_panics(node: Node, name: str) -> None:
    Guest(node, name).panic()


def user_powers_off_during_restart(node: Node, name: str) -> None:
    # A restart is over before a guest is off: this one takes longer.
    folder = "/run/systemd/system/brine-kvmd.service.d"
    node.write(f"{folder}/slow.conf", "[Service]\nExecStartPre=/bin/sleep 2\n")
    node.run(["systemctl", "daemon-reload"])
    node.run(["systemctl", "restart", "--no-block", "brine-kvmd.service"])
    wait_for("kvmd to be down", lambda: not _kvmd_runs(node), timeout_s=10)
    Guest(node, name).power_off()


def _kvmd_runs(node: Node) -> bool:
    show = ["systemctl", "show", "--property=MainPID", "--value", "brine-kvmd.service"]
    return node.run(show).stdout.strip() != "0"


KILLED = "db2"
"""The instance that something is plugged into, also after its end."""

ENDINGS = [
    Ending("web1", "its user reboots it", user_reboots, "", "", "running", ""),
    Ending(
        "web2",
        "brine instance stop web2",
        admin_stops,
        "admin",
        "stopping",
        "ADMIN_down",
        "",
        "ADMIN_down",
    ),
    Ending(
        "db1",
        "systemctl stop brine-instance@db1",
        unit_is_stopped,
        "admin",
        "stopping",
        "ERROR_down",
        "it was stopped",
        "ERROR_down",
    ),
    Ending(KILLED, "SIGKILL to its QEMU", kill, "crash", "eof", "ERROR_down", "ended by signal 9"),
    Ending(
        "mail1",
        "its kernel panics",
        kernel_panics,
        "crash",
        "guest-panic",
        "ERROR_down",
        "it crashed",
    ),
    Ending(
        "mail2",
        "its user powers it off, while kvmd restarts",
        user_powers_off_during_restart,
        "user",
        "guest-shutdown",
        "USER_down",
        "it should be up but was shut down by its user",
        "USER_down",
    ),
]
