"""kvmd under a real systemd loses nothing, however its process ends.

Each time two real guests end while no daemon runs: one whose user powers it off, which nobody has
seen begin, and one that the admin has asked to power down, which the daemon saw before it ended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from lab.guest import start_guest
from lab.node import Node
from lab.waiting import wait_for
from node.kvmd_on_node import (
    CAN_BE_HELD_BACK,
    held_back,
    kvmd_pid,
    verdicts,
    wait_verdict,
    wait_watching,
)


@contextmanager
def drop_in(node: Node, text: str) -> Iterator[None]:
    """Other settings for the unit, as an administrator would make them."""
    path = "/run/systemd/system/brine-kvmd.service.d/test.conf"
    node.write(path, text)
    node.run(["systemctl", "daemon-reload"])
    try:
        yield
    finally:
        node.path(path).unlink()
        node.run(["systemctl", "daemon-reload"])


def _restart(node: Node) -> None:
    node.run(["systemctl", "restart", "--no-block", "brine-kvmd.service"])


def _kill(node: Node) -> None:
    _signal(node, "KILL")


def _crash(node: Node) -> None:
    _signal(node, "SEGV")


def _hang(node: Node) -> None:
    """Stopped, the daemon does not feed its watchdog, and systemd kills it."""
    _signal(node, "STOP")


def _signal(node: Node, name: str) -> None:
    node.run(["systemctl", "kill", "--kill-whom=main", f"--signal={name}", "brine-kvmd.service"])


@pytest.mark.both_releases
@pytest.mark.parametrize("end", [_restart, _kill, _crash, _hang], ids=lambda end: end.__name__)
def test_what_happens_while_the_daemon_is_away_is_judged_afterwards(
    wired_node: Node, end: Callable[[Node], None]
) -> None:
    node = wired_node
    user, admin = f"user{end.__name__}", f"admin{end.__name__}"
    with start_guest(node, user) as poweroff, start_guest(node, admin) as powerdown:
        poweroff.wait_ready()
        powerdown.wait_ready()
        wait_watching(node, user)
        wait_watching(node, admin)
        with drop_in(node, CAN_BE_HELD_BACK + "WatchdogSec=5s\n"):
            node.run(["systemctl", "restart", "brine-kvmd.service"])
            # Paused, the guest hears of the powerdown only when the daemon is away.
            powerdown.qmp("stop")
            powerdown.powerdown()
            wait_for("POWERDOWN to be seen", lambda: _remembers_powerdown(node, admin))
            with held_back(node):
                end(node)
                wait_for("the daemon to end", lambda: kvmd_pid(node) == "0", timeout_s=60)
                powerdown.qmp("cont")
                poweroff.order("poweroff")
                poweroff.wait()
                powerdown.wait()
                assert kvmd_pid(node) == "0"
            assert wait_verdict(node, user) == ("user", "guest-shutdown")
            assert wait_verdict(node, admin) == ("admin", "powerdown")
        assert node.path(f"/run/brine/ctrl/{user}.shutdown").exists()
        assert not node.path(f"/run/brine/ctrl/{admin}.shutdown").exists()
        time.sleep(0.5)
        assert len(verdicts(node, user)) == len(verdicts(node, admin)) == 1


def _remembers_powerdown(node: Node, name: str) -> bool:
    records = node.path("/run/brine-kvmd").glob(f"{name}@*.json")
    seen = (json.loads(file.read_text())["seen"] for file in records)
    return any(one.get("powerdown_usec") for one in seen)


def test_it_is_started_by_the_first_vm_and_shows_how_many_it_watches(wired_node: Node) -> None:
    node = wired_node
    node.run(["systemctl", "stop", "brine-kvmd.path", "brine-kvmd.service"])
    node.run(["systemctl", "start", "brine-kvmd.path"])
    state = node.run(["systemctl", "is-active", "brine-kvmd.service"], check=False)
    assert state.stdout.strip() == "inactive"
    with start_guest(node, "first") as guest:
        wait_for("the daemon to be started", lambda: kvmd_pid(node) != "0", timeout_s=20)
        wait_watching(node, "first")
        wait_for(
            "its status",
            lambda: "watching 1 instance in /run/brine/ctrl" in _status(node),
            timeout_s=10,
        )
        guest.wait_ready()
        guest.order("poweroff")
        assert wait_verdict(node, "first") == ("user", "guest-shutdown")


def _status(node: Node) -> str:
    command = ["systemctl", "show", "--property=StatusText", "--value", "brine-kvmd.service"]
    return node.run(command).stdout.strip()
