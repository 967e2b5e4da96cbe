"""Nodes that have the watcher, and what tests ask of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.node import Node
from node.instance_on_node import node_with_instances, wait_status

RECORD = Path("/var/lib/brine/watcher.json")
TIMER = "brine-watcher.timer"


@contextmanager
def node_with_watcher(
    release: str, packages: Iterable[Path], *, keeps_files: bool = False
) -> Iterator[Node]:
    """A node that runs instances and has the watcher, which makes passes when it is told to."""
    with node_with_instances(release, packages, keeps_files=keeps_files) as node:
        node.run(["apt-get", "install", "--yes", "--quiet=2", "brine-watcher"], timeout_s=300)
        node.run(["systemctl", "disable", "--now", TIMER])
        yield node


def passed(node: Node, *options: str, status: int = 0) -> dict[str, dict[str, Any]]:
    """Make a pass, and return what became of each instance."""
    done = node.run(["brine", "watcher", "run", "--json", *options], check=False, timeout_s=120)
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return {one["name"]: one for one in json.loads(done.stdout)}


def tries(node: Node) -> dict[str, Any]:
    """The tries, by instance."""
    shown = node.run(["brine", "watcher", "status", "--json"]).stdout
    found: dict[str, Any] = json.loads(shown)["tries"]
    return found


def let_pass(node: Node, seconds: float) -> None:
    """Have all tries be so much longer ago."""
    record = json.loads(node.read(RECORD))
    for one in record["instances"].values():
        one["last"] -= seconds
    node.write(RECORD, json.dumps(record))


def outbox(node: Node) -> list[dict[str, Any]]:
    """The events that the cluster does not know yet."""
    found: list[dict[str, Any]] = json.loads(node.run(["brine", "outbox", "list", "--json"]).stdout)
    return found


def told(node: Node, name: str, **fields: str) -> list[str]:
    """The events that the watcher has told of an instance, the oldest first."""
    matches = [f"{key}={value}" for key, value in fields.items()]
    records = node.journal("SYSLOG_IDENTIFIER=brine-watcher", f"BRINE_INSTANCE={name}", *matches)
    return [one["BRINE_EVENT"] for one in records if "BRINE_EVENT" in one]


def invocation(node: Node, name: str) -> str:
    """Which start of its unit an instance runs by, or has run by last."""
    show = ["systemctl", "show", "--property=InvocationID", "--value", f"brine-instance@{name}"]
    return node.run(show).stdout.strip()


def mark_user_shutdown(node: Node, name: str) -> None:
    """Have it be said that an instance's user has shut down its last run."""
    node.shell(f"cp /run/brine/marks/{name}.start /run/brine/marks/{name}.shutdown")


def kill(node: Node, *names: str) -> None:
    """Kill the QEMUs of instances, and wait until that is known."""
    units = " ".join(f"brine-instance@{name}" for name in names)
    node.shell(f"systemctl kill --kill-whom=main --signal=KILL {units}")
    for name in names:
        wait_status(node, name, "ERROR_down")


def moment_of(node: Node, stamp: str) -> float:
    """When the timer of the watcher got into a state last, in seconds since 1970."""
    show = f"systemctl show --timestamp=us+utc --property={stamp} --value {TIMER}"
    return float(node.shell(f'date --date="$({show})" +%s.%N'))


def changed_s(node: Node, folder: str) -> list[float]:
    """When the Python files in a folder that the watcher loads were changed last, in seconds since
    1970."""
    parts = " ".join(
        f"{folder}/brine/{part}"
        for part in ("common", "vm", "config", "hotplug", "storage", "instance", "watcher")
    )
    found = node.shell(f"find {parts} -name '*.py' -printf '%C@\\n'")
    return [float(line) for line in found.split()]
