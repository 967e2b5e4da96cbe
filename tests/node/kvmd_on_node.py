"""kvmd on a node."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from lab.node import Node
from lab.waiting import wait_for

_HOLDS_BACK = "/run/kvmd-held-back"

CAN_BE_HELD_BACK = (
    "[Service]\n"
    f"ExecStartPre=/bin/sh -c 'while [ -e {_HOLDS_BACK} ]; do sleep 0.1; done'\n"
    "TimeoutStartSec=300\n"
)
"""The drop-in that the unit needs for `held_back`."""


def kvmd_pid(node: Node) -> str:
    """The daemon's process, as the node numbers it; "0" while there is none."""
    command = ["systemctl", "show", "--property=MainPID", "--value", "brine-kvmd.service"]
    return node.run(command).stdout.strip()


@contextmanager
def held_back(node: Node) -> Iterator[None]:
    """Have no daemon start meanwhile. One that runs does so until something ends it."""
    node.write(_HOLDS_BACK, "")
    try:
        yield
    finally:
        node.path(_HOLDS_BACK).unlink()


def verdicts(node: Node, name: str = "") -> list[tuple[str, str]]:
    """The verdicts on an instance, or on all, oldest first: who and cause."""
    command = ["brine", "kvmd", "verdicts", "--json", *([name] if name else [])]
    return [(line["verdict"], line["cause"]) for line in json.loads(node.run(command).stdout)]


def wait_verdict(node: Node, name: str, *, times: int = 1) -> tuple[str, str]:
    """Wait for a verdict on an instance, and return it."""
    return wait_for(
        f"a verdict on {name}",
        lambda: (given := verdicts(node, name))[times - 1 :] and given[times - 1],
        timeout_s=30,
        interval_s=0.1,
    )  # type: ignore[return-value]


def wait_watching(node: Node, name: str, *, times: int = 1, timeout_s: float = 30) -> None:
    """Wait until the daemon watches an instance, for the so-manieth time."""
    wait_for(
        f"{name} to be watched",
        lambda: node.journal("BRINE_EVENT=watching", f"BRINE_INSTANCE={name}")[times - 1 :],
        timeout_s=timeout_s,
        interval_s=0.1,
    )
