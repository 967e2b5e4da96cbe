"""Instances on real Xen: what runs, how it ends, what is left of it, and what the watcher does."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from lab.waiting import wait_for
from lab.xen_domain import (
    free_memory_mib,
    log,
    order,
    rows,
    wait_ready,
    wait_state,
)
from lab.xen_node import XenNode
from xen.instances_on_xen import (
    LONG_S,
    PVH_MEMORY_MIB,
    forget_log,
    have,
    spec_of,
    start,
    states,
    unit_says,
    wait_status,
    watch,
)

pytestmark = pytest.mark.usefixtures("no_instances")

KINDS: dict[str, dict[str, Any]] = {
    "xen-pvm": {},
    # A young one may be deaf to xl shutdown for minutes.
    "xen-pvh": {"memory_mib": PVH_MEMORY_MIB, "shutdown_timeout": 400},
}
SLOW = {"xen-pvh"}

CONSOLE = """
rm -f /run/typed /run/said
mkfifo /run/typed
command='brine instance console web1'
timeout 300 script --quiet --flush --return --command "$command" /run/said </run/typed >/dev/null &
exec 3>/run/typed
until grep -q 'Ctrl-] leaves' /run/said; do sleep 1; done
until grep -q 'domain: ready' /run/said; do echo hello >&3; sleep 2; done
printf '\\035' >&3
wait $!
cat /run/said
"""
"""Says hello to web1 on its console until it is heard, leaves, and prints what was seen."""


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.long] if kind in SLOW else []) for kind in KINDS],
)
def test_from_definition_to_stop(node: XenNode, kind: str) -> None:
    free = free_memory_mib(node)
    spec = spec_of("web1", hypervisor=kind, admin_state="down", **KINDS[kind])
    node.run(["brine", "instance", "define", "-"], stdin=json.dumps(spec))
    assert states(node)["web1"]["status"] == "ADMIN_down"
    start(node, "web1")
    assert node.run(["brine", "instance", "start", "web1"]).stdout.startswith("unchanged")
    (row,) = rows(node)
    found = json.loads(node.run(["brine", "instance", "info", "web1", "--json"]).stdout)
    assert (found["status"], found["domain"], found["why"]) == ("running", row.number, "")
    assert (found["qmp"], found["qemu"], found["vnc"]) == (None, None, None)
    # The unit's main process is xl itself.
    assert found["pid"] == int(unit_says(node, "web1", "MainPID"))
    command = node.read(f"/proc/{found['pid']}/cmdline").split("\0")
    assert command[1:4] == ["create", "-F", "/run/brine/xen/web1.cfg"]
    assert node.run(["stat", "--format=%a", "/run/brine/xen/web1.cfg"]).stdout == "600\n"
    said = node.shell(CONSOLE, timeout_s=LONG_S)
    assert "Ctrl-] leaves" in said
    assert "domain: ready" in said
    # Nothing plugs into it, and it has no reset button.
    for refused in (["nic", "add", "web1"], ["instance", "reboot", "web1", "--reset"]):
        assert node.run(["brine", *refused], check=False).returncode != 0
    forget_log(node, "web1")
    node.run(["brine", "instance", "reboot", "web1"], timeout_s=LONG_S)
    wait_ready(node, "web1")
    (again,) = rows(node)
    assert again.number > row.number
    assert node.run(["brine", "instance", "stop", "web1"], timeout_s=LONG_S).stdout == (
        "stopped: web1\n"
    )
    assert states(node)["web1"]["status"] == "ADMIN_down"
    assert rows(node) == []
    assert free_memory_mib(node) == free


ENDS = {
    "off": ("poweroff", "USER_down", ["set-down", "clean-up"]),
    "again": ("poweroff", "USER_down", ["clean-up", "start"]),
    "crash": ("crash", "ERROR_down", ["clean-up", "try"]),
    "ends": ("reboot", "ERROR_down", ["clean-up", "try"]),
    "boot": ("reboot", "running", []),
    "gone": ("", "ERROR_down", []),
}
"""Domains by name: what their users order, what becomes of them, what a pass does about it."""


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["off", "crash", "gone"], id="three"),
        pytest.param(list(ENDS), id="every end", marks=pytest.mark.long),
    ],
)
def test_a_pass_over_ends(node: XenNode, names: list[str]) -> None:
    free = free_memory_mib(node)
    for name in names:
        have(
            node,
            name,
            user_shutdown="restart" if name == "again" else "stop",
            reboot_behavior="exit" if name == "ends" else "reboot",
        )
    start(node)
    numbers = {row.name: row.number for row in rows(node)}
    for name in names:
        if ordered := ENDS[name][0]:
            forget_log(node, name)
            order(node, name, ordered)
    node.run(["xl", "destroy", "gone"])
    for status in ("USER_down", "ERROR_down"):
        wait_status(node, [name for name in names if ENDS[name][1] == status], status)
    if "boot" in names:
        wait_for(
            "the reboot",
            lambda: (states(node)["boot"]["domain"] or 0) > numbers["boot"],
            timeout_s=LONG_S,
            interval_s=1,
        )
        wait_status(node, ["boot"], "running")
    found = states(node)
    assert found["off"]["oper_state"] == "S"
    memory = "what is left of it takes memory"
    assert found["off"]["why"] == f"it should be up but was shut down by its user; {memory}"
    assert found["crash"]["why"] == f"it should be up but is down: it crashed; {memory}"
    assert found["gone"]["why"] == "it should be up but is down: its domain was destroyed"
    # A crash is a failure to systemd, too.
    assert unit_says(node, "crash", "ActiveState") == "failed"
    assert unit_says(node, "off", "ActiveState") == "inactive"
    # Who only asks cleans nothing up.
    node.run(["brine", "watcher", "run", "--dry-run"], check=False)
    assert len(rows(node)) == len(names) - 1

    done = {name: one["actions"] for name, one in watch(node).items()}
    expected = {name: [*ENDS[name][2]] for name in names}
    if "again" in names:
        # Its start runs beside theirs, and also removes what is left of them. Whoever comes first
        # does; that nothing is left is looked at below.
        for name in ("crash", "ends"):
            expected[name].remove("clean-up")
            done[name] = [action for action in done[name] if action != "clean-up"]
    assert done == expected
    found = states(node)
    assert (found["off"]["admin_state"], found["off"]["admin_state_source"]) == ("down", "user")
    assert found["gone"]["status"] == "ERROR_down"
    running = set(names) - {"off", "gone"}
    for name in running:
        assert found[name]["status"] == "running", (found[name]["why"], log(node, name))
    assert {row.name for row in rows(node)} == running
    events = node.run(["brine", "outbox", "list", "--json"]).stdout
    assert [one["name"] for one in json.loads(events)] == ["off"]
    # The second pass has nothing to do.
    assert [one["actions"] for one in watch(node).values()] == [[]] * len(names)
    for name in running:
        node.run(["xl", "destroy", name])
    wait_for("memory", lambda: free_memory_mib(node) == free, timeout_s=LONG_S, interval_s=1)


def test_a_domain_does_not_outlive_its_owner(node: XenNode) -> None:
    node.run(["systemctl", "start", "brine-lifecycle-executor.socket", "brine-lifecycle.path"])
    have(node, "ci1", owner={"watchdog_timeout": 60})
    node.run(["brine", "lifecycle", "prepare", "ci1"])
    touches = "while :; do touch /run/brine/lifecycle/ci1/watchdog; sleep 5; done"
    node.run(["systemd-run", "--unit=own-ci1", "sh", "-c", touches])
    start(node, "ci1")
    node.run(["systemctl", "kill", "--signal=KILL", "own-ci1"])
    stopped = ["test", "-e", "/run/brine/marks/ci1.stop"]
    wait_for(
        "its end to begin",
        lambda: node.run(stopped, check=False).returncode == 0,
        timeout_s=LONG_S,
        interval_s=1,
    )
    found = wait_status(node, ["ci1"], "ADMIN_down")["ci1"]
    assert found["admin_state_source"] == "owner"
    assert rows(node) == []
    # kvmd, which gives a QEMU's verdict, hears nothing of a domain.
    assert json.loads(node.read("/run/brine/marks/ci1.stop"))["cause"] == "owner-gone"
    journal = ["journalctl", "--output=cat", "BRINE_INSTANCE=ci1", "BRINE_EVENT=owner-gone"]
    assert "its owner is gone" in node.run(journal).stdout


@pytest.mark.long
def test_what_is_saved_has_not_crashed(node: XenNode) -> None:
    """Xen 4.17's xl ends at the suspend, and 4.20's when the domain has gone."""
    saved = "/srv/web1.saved"
    have(node, "web1")
    start(node, "web1")
    (before,) = rows(node)
    node.run(["xl", "save", "-c", "web1", saved], timeout_s=LONG_S)
    wait_state(node, "web1", "-b----|r-----|------")
    wait_status(node, ["web1"], "running")
    assert watch(node)["web1"]["actions"] == []
    # systemd starts no second one, nor does that end this one.
    node.run(["systemctl", "start", "brine-instance@web1"], check=False, timeout_s=LONG_S)
    (after,) = rows(node)
    assert (after.number, states(node)["web1"]["status"]) == (before.number, "running")
    node.run(["brine", "instance", "stop", "web1", "--force"], timeout_s=LONG_S)
    start(node, "web1")
    node.run(["xl", "save", "web1", saved], timeout_s=LONG_S)
    node.run(["rm", saved])
    found = wait_status(node, ["web1"], "ERROR_down")
    # Its xl may have seen it suspended, or already gone.
    assert re.search("down: (it was stopped|its domain was destroyed)$", found["web1"]["why"])
    wait_for(
        "the unit's end",
        lambda: unit_says(node, "web1", "ActiveState") == "inactive",
        timeout_s=LONG_S,
    )
    done = watch(node)["web1"]
    assert (done["ended_by"], done["actions"]) == ("admin", [])
    assert rows(node) == []
