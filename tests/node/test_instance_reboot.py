"""Instances and their node's own reboot and shutdown, which are real ones of the whole node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.node import Node
from node.instance_on_node import (
    define,
    info,
    node_with_instances,
    order,
    start,
    started_between,
    wait_ready,
    wait_status,
)
from node.kvmd_on_node import wait_watching

DEAF_S = 15
"""How long two guests have that do not hear of the power button."""

ORDER = {"first": 100, "deaf1": 200, "deaf2": 200, "middle": 200, "last": 300}


@pytest.fixture(scope="module")
def node(release: str, packages: list[Path]) -> Iterator[Node]:
    with node_with_instances(release, packages, keeps_files=True) as node:
        node.write("/etc/brine/instance.toml", "parallel_starts = 2\n")
        # The journal of before the reboot is read after it.
        node.shell("mkdir -p /var/log/journal; systemctl restart systemd-journald")
        for name, place in ORDER.items():
            deaf = {"acpi": False, "shutdown_timeout": DEAF_S} if "deaf" in name else {}
            define(node, name, start_order=place, **deaf)
        yield node


def start_all(node: Node) -> None:
    """Start those that should run, and wait until each hears of the power button."""
    for name in ORDER:
        node.run(["brine", "instance", "start", name])
    for name in ORDER:
        wait_ready(node, name)
        wait_watching(node, name)


def times(node: Node, event: str) -> list[int]:
    """When something was told of those that the reboot ended, in microseconds."""
    found = node.journal("--boot=-1", f"BRINE_EVENT={event}")
    return [int(one["__REALTIME_TIMESTAMP"]) for one in found if one["BRINE_INSTANCE"] in ORDER]


def test_after_a_reboot_all_is_as_it_should_be(node: Node) -> None:
    define(node, "never")
    define(node, "again", user_shutdown="restart")
    define(node, "user")
    for name in ("user", "again"):
        start(node, name)
        wait_watching(node, name)
        order(node, name, "poweroff")
        wait_status(node, name, "USER_down")
    start_all(node)

    assert node.reboot(timeout_s=300) >= DEAF_S

    # All are asked at the same time, the slow ones too.
    asked, ended = times(node, "stop-asked"), times(node, "ended")
    assert len(ended) == 2
    assert len([time for time in asked if time < min(ended)]) == len(ORDER)
    for name in ORDER:
        assert info(node, name)["status"] == "running", name
    assert info(node, "never")["status"] == "ADMIN_down"
    assert info(node, "again")["status"] == "running"
    found = info(node, "user")
    assert (found["status"], found["admin_state"]) == ("USER_down", "down")
    assert found["admin_state_source"] == "user"
    judged = node.journal("--boot=-1", "BRINE_EVENT=verdict")
    given = {one["BRINE_INSTANCE"]: one["BRINE_VERDICT"] for one in judged}
    assert given == {**dict.fromkeys(ORDER, "admin"), "user": "user", "again": "user"}

    begun_ended = {name: started_between(node, name) for name in ORDER}
    for before, after in (("first", "middle"), ("middle", "last")):
        assert begun_ended[before][1] <= begun_ended[after][0], begun_ended
    moments = [begun for begun, _ in begun_ended.values()]
    at_once = [sum(a <= moment < b for a, b in begun_ended.values()) for moment in moments]
    assert max(at_once) == 2, begun_ended
    node.run(["brine", "instance", "start", "user"])
    assert info(node, "user")["status"] == "running"
    node.run(["brine", "instance", "stop", "--force", "--timeout", "1", "user"])
