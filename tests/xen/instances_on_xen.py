"""Instances of Brine's on a Xen node, and what tests ask of these."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from brine.common import paths
from brine.instance.validate import completed
from brine.vm.spec import Spec, to_json
from lab.command import CommandError
from lab.waiting import wait_for
from lab.xen_domain import MEMORY_MIB, wait_ready
from lab.xen_image import DOMAIN_FOLDER, DOMAIN_LOGS
from lab.xen_node import LONGEST_S, XenNode

# A PVH domain takes more to boot from.
PVH_MEMORY_MIB = 128

LONG_S = LONGEST_S
"""Enough for anything, also where each command takes seconds, and other tests run beside."""

SLOW_NODE = f"parallel = 1\ninstance_timeout = {LONG_S:.0f}\n"
"""Settings of the watcher's: starts that it waits for one after another, however long they take."""

_SMALLEST: dict[str, Any] = {
    "hypervisor": "xen-pvm",
    "kernel": f"{DOMAIN_FOLDER}/kernel",
    "initrd": f"{DOMAIN_FOLDER}/initramfs",
    "append": "console=hvc0 quiet mitigations=off",
    "memory_mib": MEMORY_MIB,
    "start_timeout": int(LONG_S),
    "shutdown_timeout": 120,
    "admin_state": "up",
}

_LEAVE_NOTHING = """
systemctl stop brine-watcher.timer
# So that no xl makes another one of what reboots.
systemctl kill --signal=KILL 'brine-instance@*' || true
systemctl stop 'brine-instance@*'
systemctl reset-failed
xl list | awk 'NR > 1 && $2 > 0 { print $2 }' | xargs -r -n 1 xl destroy || true
rm -rf /var/lib/brine/instances/* /var/lib/brine/outbox/* /var/lib/brine/watcher.json
rm -rf /run/brine/ctrl/* /run/brine/marks/* /run/brine/xen/*
"""


def leave_nothing(node: XenNode) -> None:
    """Have there be no domain and no instance."""
    node.shell(_LEAVE_NOTHING, timeout_s=LONG_S)


def spec_of(name: str, **keys: Any) -> dict[str, Any]:
    """The spec of an instance that boots in seconds, and obeys orders on its console."""
    return {"name": name, **_SMALLEST, **keys}


def have(node: XenNode, name: str, **keys: Any) -> Spec:
    """Have there be such an instance, as ``brine instance define`` makes it; that takes longer."""
    spec = completed(spec_of(name, **keys))
    node.write(f"{paths.SPECS_DIR}/{name}.json", json.dumps(to_json(spec)))
    return spec


def start(node: XenNode, name: str = "") -> None:
    """Start this instance, or all if none is named, and wait until they obey orders."""
    every = [name] if name else list(states(node))
    for each in every:
        forget_log(node, each)
    node.run(["brine", "instance", "start", name or "--all"], timeout_s=2 * LONG_S)
    for each in every:
        wait_ready(node, each)


def forget_log(node: XenNode, name: str) -> None:
    """Have nothing be said on a domain's console so far."""
    node.run(["rm", "-f", f"{DOMAIN_LOGS}/guest-{name}.log"])


def states(node: XenNode) -> dict[str, dict[str, Any]]:
    """The rows of `brine instance list` by name, as soon as it has an answer."""
    listed = wait_for("a list of instances", lambda: _listed(node), timeout_s=LONG_S, interval_s=1)
    return {one["name"]: one for one in json.loads(listed)}


def _listed(node: XenNode) -> str | None:
    try:
        return node.run(["brine", "instance", "list", "--json"]).stdout
    except CommandError as error:
        # Where many end at once, systemd and xl are slow to answer.
        if not re.search("systemd does not answer|xl .*: no answer within", error.stderr):
            raise
        return None


def wait_status(node: XenNode, names: Iterable[str], status: str) -> dict[str, dict[str, Any]]:
    """Wait until all of these instances have a status; returns the states of all."""
    wanted = list(names)

    def have_it() -> dict[str, dict[str, Any]] | None:
        found = states(node)
        return found if all(found[name]["status"] == status for name in wanted) else None

    return wait_for(f"{', '.join(wanted)}: {status}", have_it, timeout_s=LONG_S, interval_s=1)


def watch(node: XenNode, verb: str = "run") -> dict[str, dict[str, Any]]:
    """Make a pass of the watcher; returns its report by name."""
    done = node.run(["brine", "watcher", verb, "--json"], check=False, timeout_s=LONG_S)
    assert done.returncode in (0, 3), done
    return {one["name"]: one for one in json.loads(done.stdout)}


def unit_says(node: XenNode, name: str, key: str) -> str:
    """A property of an instance's unit."""
    args = ["systemctl", "show", "--value", f"--property={key}", f"brine-instance@{name}"]
    return node.run(args).stdout.strip()
