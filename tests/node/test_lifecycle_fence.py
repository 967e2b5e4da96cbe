"""The fence, and reboots of a node with owned instances: a handler that is dead, deaf or idle."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.node import Node
from lab.waiting import wait_for
from node.instance_on_node import IDLE, UNITS, define, info, wait_ready, wait_status
from node.lifecycle_on_node import (
    HANDLER,
    leave_nothing,
    mounted,
    node_with_lifecycle,
    own,
    owned,
    verdict,
    wait_events,
)

FENCE = "brine-lifecycle-fence.service"
CLOCK = "/run/brine-lifecycle/clock"
LIMIT_S = 10  # the least that the settings allow
OWNER = {"watchdog_timeout": 600}
SOON = {"watchdog_timeout": 6}
REBOOTS = """
[Service]
ExecStart=
ExecStart=/usr/bin/python3 -I -m brine.lifecycle.fence --reboot
"""


@pytest.fixture(scope="module")
def node(release: str, packages: list[Path]) -> Iterator[Node]:
    with node_with_lifecycle(release, packages, keeps_files=True) as node:
        node.write("/etc/brine/lifecycle.toml", f"fence_after_s = {LIMIT_S}\n")
        yield node


@pytest.fixture(autouse=True)
def nothing_runs(node: Node) -> Iterator[None]:
    """Each story begins with a sound handler, without instances, and without a fence."""
    yield
    node.run(["systemctl", "stop", FENCE])
    node.run(["rm", "-rf", f"{UNITS}/{HANDLER}.d"])
    leave_nothing(node)
    node.run(["systemctl", "restart", "brine-lifecycle.path"])


def break_handler(node: Node, command: str) -> None:
    """Have *command* run in the handler's place from its next start on."""
    drop_in = f"[Service]\nExecStart=\nExecStart={command}\n"
    node.write(f"{UNITS}/{HANDLER}.d/broken.conf", drop_in)
    node.run(["systemctl", "daemon-reload"])


def said(node: Node) -> str:
    """The fence's messages since the node's boot."""
    records = node.journal(f"_SYSTEMD_UNIT={FENCE}")
    return "\n".join(str(one["MESSAGE"]) for one in records)


@pytest.mark.parametrize(
    ("signal", "successor"),
    [
        pytest.param("STOP", "/bin/sleep infinity", id="deaf"),
        pytest.param("KILL", "/bin/false", id="dead", marks=pytest.mark.long),
    ],
)
def test_a_vm_ends_whose_handler_stays_away(node: Node, signal: str, successor: str) -> None:
    define(node, "ci1", owner=OWNER, acpi=False, shutdown_timeout=2)
    own(node, "ci1", "--start")
    wait_status(node, "ci1", "running")
    wait_ready(node, "ci1")
    break_handler(node, successor)
    node.run(["systemctl", "start", FENCE])
    node.run(["systemctl", "kill", f"--signal={signal}", HANDLER])
    wait_status(node, "ci1", "ADMIN_down")
    assert verdict(node, "ci1") == ("admin", "owner-gone")
    # Its guest did not follow the power button.
    text = "ci1: was ended, as no handler looks after its owner"
    wait_for("the fence to say so", lambda: text in said(node))
    assert node.journal("BRINE_INSTANCE=ci1", "BRINE_EVENT=ended")


def test_nobody_ends_who_has_no_vm_or_a_handler_that_comes_back(node: Node) -> None:
    before = said(node)
    define(node, "ci1", owner=SOON, **IDLE)
    node.run(["systemctl", "stop", "brine-lifecycle.path", HANDLER])
    node.run(["systemctl", "start", FENCE])
    time.sleep(LIMIT_S + 4)  # it looks every two seconds
    assert node.run(["systemctl", "is-active", HANDLER], check=False).stdout == "inactive\n"
    node.run(["systemctl", "start", "brine-lifecycle.path"])
    own(node, "ci1", "--start")
    wait_status(node, "ci1", "running")
    node.run(["systemctl", "kill", "--signal=STOP", HANDLER])
    clock = node.read(CLOCK)
    wait_for("the fence to bring it back", lambda: node.read(CLOCK) != clock, timeout_s=60)
    node.run(["systemctl", "kill", "--signal=KILL", "own-ci1"])
    wait_status(node, "ci1", "ADMIN_down")
    wait_events(node, "ci1", "owner-gone")
    assert said(node) == before


@pytest.mark.parametrize("by", ["an administrator", "the fence"])
def test_after_a_reboot_a_vm_waits_for_its_owner(node: Node, by: str) -> None:
    define(node, "again1", owner={**OWNER, "restart_with_owner": True}, **IDLE)
    define(node, "once1", owner=OWNER, **IDLE)
    for name in ("again1", "once1"):
        own(node, name, "--start")
        wait_status(node, name, "running")
    if by == "the fence":
        node.write(f"/etc/systemd/system/{FENCE}.d/reboot.conf", REBOOTS)
        break_handler(node, "/bin/false")
        # systemd would wait for owners that wait for their instances.
        node.run(["systemctl", "kill", "--signal=KILL", HANDLER, "own-*"])
        node.reboot(by=["systemctl", "start", FENCE])
        node.run(["rm", "-r", f"/etc/systemd/system/{FENCE}.d"])
    else:
        node.reboot()
    for name in ("again1", "once1"):
        assert name in mounted(node)
        assert owned(node, name)["owner"] == "gone"
        # What an owner has asked for as the node went down counts, too.
        assert info(node, name)["status"] in ("ERROR_down", "ADMIN_down")
        own(node, name)
    wait_status(node, "again1", "running")
    assert info(node, "once1")["status"] in ("ERROR_down", "ADMIN_down")
    node.run(["brine", "instance", "start", "once1"])
    assert info(node, "once1")["status"] == "running"
