"""Nodes that have the lifecycle handler, and what tests ask of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.node import Node
from lab.waiting import wait_for
from node.instance_on_node import UNITS, node_with_instances

FOLDERS = Path("/run/brine/lifecycle")
HANDLER = "brine-lifecycle.service"


@contextmanager
def node_with_lifecycle(
    release: str, packages: Iterable[Path], *, keeps_files: bool = False
) -> Iterator[Node]:
    """A node that runs instances and has the handler. With `keeps_files` it can reboot."""
    with node_with_instances(release, packages, keeps_files=keeps_files) as node:
        node.run(["apt-get", "install", "--yes", "--quiet=2", "brine-lifecycle"], timeout_s=300)
        yield node


def leave_nothing(node: Node) -> None:
    """Have there be no instance, and no owner."""
    # What a test has begun in a unit of its own may start an instance anew, in place of its stop.
    node.shell("systemctl stop 'run-*.service' 'own-*'")
    stop = "systemctl stop 'brine-instance@*' brine-lifecycle"
    node.shell(f"{stop} || {stop} || {stop}; systemctl reset-failed")
    node.shell(f"umount --lazy {FOLDERS}/* 2>&1 || true")
    node.shell("rm -rf /var/lib/brine/instances/* /run/brine/lifecycle/* /run/brine/marks/*")
    node.shell(f"rm -rf {UNITS}/brine-instance@*; systemctl daemon-reload")


def mounted(node: Node) -> list[str]:
    """The folders of owners that are mounted."""
    found = node.run(["findmnt", "--noheadings", "--list", "--output=TARGET"]).stdout.split()
    return sorted(Path(one).name for one in found if Path(one).parent == FOLDERS)


def refused(node: Node, *command: str) -> str:
    """The error of a command that fails."""
    done = node.run(command, check=False)
    assert done.returncode != 0, done
    return done.stderr


def owned(node: Node, name: str) -> dict[str, Any]:
    """The row of an instance in `brine lifecycle list`."""
    found = json.loads(node.run(["brine", "lifecycle", "list", "--json"]).stdout)
    row: dict[str, Any] = next(one for one in found if one["name"] == name)
    return row


def own(node: Node, name: str, *options: str, unit: str = "") -> str:
    """Start an owner as a unit; returns the unit's name."""
    unit = unit or f"own-{name}"
    node.run(["systemd-run", f"--unit={unit}", "brine", "lifecycle", "own", name, *options])
    return unit


def verdict(node: Node, name: str) -> tuple[str, str]:
    """The last verdict on an instance, and its cause; waits for the daemon to note it."""
    start, end = (node.path(f"/run/brine/marks/{name}.{kind}") for kind in ("start", "verdict"))

    def given() -> dict[str, Any] | None:
        if not end.exists():
            return None
        mark: dict[str, Any] = json.loads(end.read_text())
        is_last = not start.exists() or json.loads(start.read_text())["run"] == mark["run"]
        return mark if is_last else None

    mark = wait_for(f"a verdict on {name}", given)
    assert mark
    return mark["who"], mark["cause"]


def wait_events(node: Node, name: str, *last: str) -> None:
    """Wait until these are the last that the handler has told of an instance."""
    wait_for(f"{last} of {name}", lambda: tuple(events(node, name)[-len(last) :]) == last)


def events(node: Node, name: str) -> list[str]:
    """The handler's messages about an instance, the oldest first."""
    records = node.journal("SYSLOG_IDENTIFIER=brine-lifecycle", f"BRINE_INSTANCE={name}")
    return [one["BRINE_EVENT"] for one in records if "BRINE_EVENT" in one]
