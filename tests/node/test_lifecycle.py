"""Owners and their instances on real nodes: real guests, units, containers, and the handler."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from lab.command import run_command
from lab.node import Node
from lab.waiting import wait_for
from node.instance_on_node import (
    IDLE,
    define,
    define_copies,
    held_back,
    info,
    order,
    wait_ready,
    wait_status,
)
from node.lifecycle_on_node import (
    FOLDERS,
    HANDLER,
    events,
    leave_nothing,
    mounted,
    node_with_lifecycle,
    own,
    owned,
    refused,
    verdict,
    wait_events,
)

MARKS = "/run/brine/marks"
OWNER = {"watchdog_timeout": 10}
SOON = {"watchdog_timeout": 6}
RETRY = "brine-lifecycle-retry.timer"
RETRIED_SOON = "[Timer]\nOnActiveSec=\nOnUnitInactiveSec=\nOnActiveSec=2s\nOnUnitInactiveSec=2s\n"
OWNER_SCRIPT = Path("/usr/share/doc/brine-lifecycle/examples/owner.sh")


@pytest.fixture(scope="module")
def node(release: str, packages: list[Path]) -> Iterator[Node]:
    with node_with_lifecycle(release, packages) as node:
        yield node


@pytest.fixture(autouse=True)
def nothing_runs(node: Node) -> Iterator[None]:
    """Each story begins without instances, and without owners."""
    yield
    leave_nothing(node)


@contextmanager
def without_handler(node: Node) -> Iterator[None]:
    """Have nobody look after owners meanwhile."""
    node.run(["systemctl", "stop", "brine-lifecycle.path", HANDLER])
    try:
        yield
    finally:
        node.run(["systemctl", "start", "brine-lifecycle.path"])


@pytest.mark.both_releases
def test_a_vm_does_not_outlive_a_unit_that_is_killed(node: Node) -> None:
    define(node, "ci1", owner=OWNER)
    assert "its owner is not there" in refused(node, "brine", "instance", "start", "ci1")
    refused(node, "systemctl", "start", "brine-instance@ci1")
    assert info(node, "ci1")["admin_state"] == "down"

    unit = own(node, "ci1", "--start")
    wait_status(node, "ci1", "running")
    wait_ready(node, "ci1")
    row = owned(node, "ci1")
    assert (row["owner"], row["status"], len(row["owners"])) == ("alive", "running", 1)
    time.sleep(1.5 * OWNER["watchdog_timeout"])
    assert info(node, "ci1")["status"] == "running"

    node.run(["systemctl", "kill", "--signal=KILL", unit])
    wait_status(node, "ci1", "ADMIN_down")
    assert verdict(node, "ci1") == ("admin", "owner-gone")
    found = info(node, "ci1")
    assert (found["admin_state"], found["admin_state_source"]) == ("down", "owner")
    assert "owner-gone" in json.dumps(found)
    wait_events(node, "ci1", "owner-there", "owner-gone")
    assert not node.path(FOLDERS / "ci1/pid").exists()
    assert "its owner is not there" in refused(node, "brine", "instance", "start", "ci1")


def group_of(node: Node, unit: str) -> str:
    """The control group of a unit."""
    show = ["systemctl", "show", "--property=ControlGroup", "--value", unit]
    return node.run(show).stdout.strip()


@pytest.mark.both_releases
def test_a_vm_in_its_owners_slice_ends_with_the_slice(node: Node) -> None:
    unit = "brine-instance@ci1.service"
    place = f"/ci.slice/ci-job1.slice/{unit}"
    define(node, "ci1", slice="ci-job1.slice", owner={"watchdog_timeout": 600}, **IDLE)
    owner = ["systemd-run", "--unit=own-ci1", "--slice=ci-job1.slice"]
    node.run([*owner, "brine", "lifecycle", "own", "ci1", "--start"])
    wait_status(node, "ci1", "running")
    assert group_of(node, unit) == place
    # It stays there whatever systemd reads anew, and the limits of QEMU are still its own.
    node.run(["systemctl", "daemon-reload"])
    assert group_of(node, unit) == place
    pid = info(node, "ci1")["pid"]
    assert f":{place}\n" in node.run(["cat", f"/proc/{pid}/cgroup"]).stdout
    node.run(["systemctl", "stop", "ci-job1.slice"], timeout_s=90)
    wait_status(node, "ci1", "ADMIN_down")
    assert verdict(node, "ci1")[0] == "admin"

    # A unit that systemd knows by a failure moves, too, and systemctl alone puts it nowhere else.
    define(node, "ci1", slice="ci-job2.slice", **IDLE)
    assert "its spec says ci-job2.slice" in failed_start(node, unit)
    node.run(["brine", "instance", "start", "ci1"])
    assert group_of(node, unit) == f"/ci.slice/ci-job2.slice/{unit}"
    node.run(["systemctl", "kill", "--kill-whom=main", "--signal=KILL", unit])
    wait_status(node, "ci1", "ERROR_down")
    define(node, "ci1", slice="ci-job3.slice", **IDLE)
    node.run(["brine", "instance", "start", "ci1"])
    assert group_of(node, unit) == f"/ci.slice/ci-job3.slice/{unit}"
    node.run(["brine", "instance", "stop", "--force", "ci1"])
    node.run(["brine", "instance", "rename", "ci1", "ci2"])
    node.run(["brine", "instance", "start", "ci2"])
    assert group_of(node, "brine-instance@ci2.service").startswith("/ci.slice/ci-job3.slice/")
    node.run(["brine", "instance", "stop", "--force", "ci2"])
    node.run(["brine", "instance", "undefine", "ci2"])
    assert not list(node.path("/run/systemd/system").glob("brine-instance@*"))
    define(node, "ci1", **IDLE)
    node.run(["systemctl", "start", unit])
    assert group_of(node, unit) == f"/machine.slice/{unit}"


def failed_start(node: Node, unit: str) -> str:
    """What the journal has of a start by systemctl alone."""
    assert node.run(["systemctl", "start", unit], check=False).returncode != 0
    return "\n".join(str(one["MESSAGE"]) for one in node.journal(f"_SYSTEMD_UNIT={unit}"))


def test_the_list_says_why_an_owner_does_not_count(node: Node) -> None:
    define(node, "ci1", owner={"watchdog_timeout": 600}, **IDLE)
    folder = FOLDERS / "ci1"
    for make, why in (
        (f"mkdir {folder}/watchdog", "the watchdog is no regular file"),
        (f"rm -r {folder}/watchdog; touch -d 2100-01-01 {folder}/watchdog", "is in the future"),
        (f"touch {folder}/watchdog; mkdir {folder}/terminate", "the request is no regular file"),
    ):
        node.shell(make)
        listed = node.run(["brine", "lifecycle", "list"])
        assert why in listed.stdout
        assert not re.search(r"-\d", listed.stdout)
        assert listed.stderr == ""
    node.shell(f"rmdir {folder}/terminate")
    node.run(["systemctl", "mask", "--runtime", "--now", HANDLER])
    try:
        node.run(["rm", "/run/brine-lifecycle/clock"])
        for command in ("lifecycle list", "instance start ci1"):
            said = node.run(["brine", *command.split()]).stderr
            assert f"{HANDLER} is masked, and looks after no owner" in said
    finally:
        node.run(["systemctl", "unmask", "--runtime", HANDLER])
        node.run(["systemctl", "restart", "brine-lifecycle.path"])  # it has failed of that


def test_a_handler_that_was_masked_when_the_first_owner_came_starts_by_itself(node: Node) -> None:
    node.write(f"/run/systemd/system/{RETRY}.d/soon.conf", RETRIED_SOON)
    node.run(["systemctl", "mask", "--runtime", "--now", HANDLER])
    try:
        define(node, "ci1", owner=OWNER, **IDLE)
        node.shell("until systemctl is-failed --quiet brine-lifecycle.path; do sleep 0.1; done")
        # A try in vain is not the last one.
        tried = f"$(systemctl show --value -p LastTriggerUSecMonotonic {RETRY})"
        node.shell(f"while [ {tried} = 0 ]; do sleep 0.1; done")
    finally:
        node.run(["systemctl", "unmask", "--runtime", HANDLER])
        node.shell(f"until systemctl is-active --quiet {HANDLER}; do sleep 0.1; done")
        node.run(["rm", "-r", f"/run/systemd/system/{RETRY}.d"])
        node.run(["systemctl", "daemon-reload"])
    node.run(["systemctl", "is-active", "brine-lifecycle.path"])


def test_a_vm_that_starts_again_as_it_ends_outlives_no_owner(node: Node) -> None:
    """A command tries to start it again and again while its former run is being ended."""
    define(node, "ci1", owner=SOON, **{**IDLE, "shutdown_timeout": 5})
    touching = f"while touch {FOLDERS}/ci1/watchdog; do sleep 1; done"
    starting = "until brine instance start ci1; do :; done"
    stopping = node.path(f"{MARKS}/ci1.stop")

    def own_and_start(unit: str) -> None:
        node.run(["systemd-run", f"--unit={unit}", "sh", "-c", touching])
        node.run(["systemd-run", "--wait", "sh", "-c", starting], timeout_s=90)
        assert info(node, "ci1")["status"] == "running"

    own_and_start("own-ci1-first")
    node.run(["systemctl", "stop", "own-ci1-first"])
    wait_for("the handler to have it ended", stopping.exists)
    own_and_start("own-ci1-next")
    node.run(["systemctl", "stop", "own-ci1-next"])
    wait_status(node, "ci1", "ADMIN_down")
    # The same for an admin's stop: it returns when the former run has ended.
    own_and_start("own-ci1-last")
    node.run(["systemd-run", "sh", "-c", f"until [ -e {MARKS}/ci1.stop ]; do :; done; {starting}"])
    node.run(["brine", "instance", "stop", "--force", "ci1"], timeout_s=90)


@pytest.mark.both_releases
def test_a_unit_that_is_stopped_waits_for_its_vm(node: Node) -> None:
    define(node, "ci1", owner=OWNER)
    node.run(
        [
            "systemd-run",
            "--unit=own-ci1",
            "--property=ExecStop=brine lifecycle prestop ci1",
            *("brine", "lifecycle", "own", "ci1", "--start"),
        ]
    )
    wait_status(node, "ci1", "running")
    wait_ready(node, "ci1")
    node.run(["systemctl", "stop", "own-ci1"], timeout_s=90)
    assert not node.path(FOLDERS / "ci1/pid").exists()
    wait_status(node, "ci1", "ADMIN_down")
    assert verdict(node, "ci1") == ("admin", "owner-request")
    wait_events(node, "ci1", "owner-request", "request-confirmed")
    assert node.run(["ls", str(FOLDERS / "ci1")]).stdout == ""
    # Without a VM it returns at once.
    with without_handler(node):
        node.run(["brine", "lifecycle", "prestop", "ci1"], timeout_s=10)


def ended(node: Node, unit: str) -> str:
    """systemd's result of a unit that has ended."""
    show = ["systemctl", "show", "--property=ExecMainStatus,SubState", unit]
    wait_for(f"{unit} to end", lambda: "=running" not in node.run(show).stdout)
    return node.run(show).stdout


def test_an_owner_ends_with_its_vm_and_says_how(node: Node) -> None:
    for name, what, status in (("ci1", "poweroff", 0), ("ci2", "admin", 10), ("ci3", "crash", 11)):
        define(node, name, owner=OWNER)
        own(node, name, "--start")
        wait_status(node, name, "running")
        wait_ready(node, name)
        if what == "poweroff":
            order(node, name, "poweroff")
        elif what == "admin":
            node.run(["brine", "instance", "stop", name])
        else:
            node.run(["systemctl", "kill", "--signal=KILL", f"brine-instance@{name}"])
        # systemd forgets a unit that ended well, and shows 0 for it.
        assert f"ExecMainStatus={status}\n" in ended(node, f"own-{name}")


def test_with_the_handler_away_nobody_is_lost(node: Node) -> None:
    with without_handler(node):
        for name in ("ci1", "ci2"):
            define(node, name, owner=OWNER, **IDLE)
            own(node, name, "--start")
            wait_status(node, name, "running")
        node.run(["systemctl", "kill", "--signal=KILL", "own-ci1"])
        node.run(["systemctl", "stop", "--no-block", "own-ci2"])
        time.sleep(OWNER["watchdog_timeout"] + 2)
        assert info(node, "ci1")["status"] == info(node, "ci2")["status"] == "running"
    wait_status(node, "ci1", "ADMIN_down")
    wait_status(node, "ci2", "ADMIN_down")
    assert verdict(node, "ci1") == ("admin", "owner-gone")
    assert verdict(node, "ci2") == ("admin", "owner-request")


ASK = f"""
cd {FOLDERS}/ci1
: >terminate
while [ -e terminate ]; do sleep 0.02; done
pgrep --full '[g]uest=ci1,' || :
"""
"""Asks for the end of ci1, and prints what runs of it when that is confirmed."""


@pytest.mark.parametrize("step", ["ExecStartPre", "ExecStartPost"])
def test_a_request_during_a_start_calls_it_off(node: Node, step: str) -> None:
    has_qemu = step == "ExecStartPost"
    define(node, "ci1", owner=OWNER, **IDLE)
    with held_back(node, "ci1", step):
        own(node, "ci1", "--start")
        wait_status(node, "ci1", "starting")
        started = node.path("/run/brine/marks/ci1.started")
        wait_for("its QEMU", lambda: started.exists() or not has_qemu)
        assert node.shell(ASK, timeout_s=90) == ""
        found = info(node, "ci1")
        assert (found["status"], found["admin_state_source"]) == ("ADMIN_down", "owner")
    if has_qemu:
        assert verdict(node, "ci1") == ("admin", "owner-request")
    wait_events(node, "ci1", "owner-request", "request-confirmed")
    own(node, "ci1", "--start", unit="own-again")
    wait_status(node, "ci1", "running")


def test_nobody_starts_what_was_asked_to_end(node: Node) -> None:
    define(node, "ci1", owner={**OWNER, "restart_with_owner": True}, admin_state="up", **IDLE)
    with without_handler(node):
        node.shell(f"cd {FOLDERS}/ci1; touch watchdog terminate")
        why = "its owner has asked for its end"
        assert why in refused(node, "brine", "instance", "start", "ci1")
        refused(node, "systemctl", "start", "brine-instance@ci1")
        node.run(["brine", "instance", "start", "--all"])
        assert why in info(node, "ci1")["why"]
    # The request is about an instance that has never started.
    asked = node.path(FOLDERS / "ci1/terminate")
    wait_for("the request to be confirmed", lambda: not asked.exists(), timeout_s=60)
    found = info(node, "ci1")
    assert (found["status"], found["admin_state_source"]) == ("ADMIN_down", "owner")
    node.run(["touch", str(FOLDERS / "ci1/watchdog")])
    node.run(["brine", "instance", "start", "ci1"])


@pytest.mark.parametrize(("name", "first"), [("asks1", "owner-request"), ("gone1", "owner-gone")])
def test_a_prestop_as_the_watchdog_expires_is_one_end(node: Node, name: str, first: str) -> None:
    # Its guest does not hear, and so its end takes longer than the watchdog's.
    define(node, name, owner=SOON, **{**IDLE, "shutdown_timeout": 10})
    unit = own(node, name, "--start")
    wait_status(node, name, "running")
    node.run(["systemctl", "kill", "--signal=KILL", unit])
    if first == "owner-gone":
        wait_for("the expiry", lambda: first in events(node, name))
    node.run(["brine", "lifecycle", "prestop", name], timeout_s=90)
    wait_status(node, name, "ADMIN_down")
    assert verdict(node, name) == ("admin", first)
    wait_for("its records", lambda: "request-confirmed" in events(node, name))
    both = ["owner-request", "owner-gone"]
    assert events(node, name)[-3:] == [*sorted(both, key=first.__ne__), "request-confirmed"]
    assert not node.path(FOLDERS / name / "terminate").exists()
    of_end = ["BRINE_EVENT=stop-asked", "BRINE_EVENT=verdict"]
    ends = node.journal(f"BRINE_INSTANCE={name}", *of_end)
    assert sorted(one["BRINE_EVENT"] for one in ends) == ["stop-asked", "verdict"]


@pytest.mark.parametrize("handler", ["there", "away"])
def test_a_vm_whose_spec_goes_ends(node: Node, handler: str) -> None:
    define(node, "ci1", owner=OWNER)
    own(node, "ci1", "--start")
    wait_status(node, "ci1", "running")
    wait_ready(node, "ci1")
    with without_handler(node) if handler == "away" else nullcontext():
        node.run(["rm", "/var/lib/brine/instances/ci1.json"])
    active = ["systemctl", "is-active", "brine-instance@ci1"]
    wait_for("its end", lambda: node.run(active, check=False).stdout != "active\n", timeout_s=60)
    wait_for("a verdict", lambda: verdict(node, "ci1") == ("admin", "spec-gone"))
    wait_for("its folder to go", lambda: not node.path(FOLDERS / "ci1").exists())


def test_the_watcher_leaves_a_crashed_vm_without_owner_off(node: Node) -> None:
    node.run(["apt-get", "install", "--yes", "--quiet=2", "brine-watcher"], timeout_s=300)
    node.run(["systemctl", "disable", "--now", "brine-watcher.timer", "brine-watcher-ended.path"])
    define(node, "ci1", owner={"watchdog_timeout": 600}, **IDLE)
    own(node, "ci1", "--start")
    wait_status(node, "ci1", "running")
    node.run(["systemctl", "kill", "--signal=KILL", "own-ci1", "brine-instance@ci1"])
    wait_status(node, "ci1", "ERROR_down")
    node.run(["rm", str(FOLDERS / "ci1/watchdog")])
    run = ["brine", "watcher", "run", "--json"]
    (passed,) = json.loads(node.run(run).stdout)
    assert passed["actions"] == []
    assert "its owner is not there" in passed["why"]
    assert "its owner is not there" in info(node, "ci1")["why"]
    node.run(["touch", str(FOLDERS / "ci1/watchdog")])
    (passed,) = json.loads(node.run(run).stdout)
    assert passed["actions"] == ["try"]
    wait_status(node, "ci1", "running")


def test_an_owner_that_is_back_gets_its_vm_back(node: Node) -> None:
    define(node, "ci1", owner={**SOON, "restart_with_owner": True}, **IDLE)
    own(node, "ci1", "--start")
    wait_status(node, "ci1", "running")
    node.run(["systemctl", "kill", "--signal=KILL", "own-ci1"])
    wait_status(node, "ci1", "ADMIN_down")
    own(node, "ci1", unit="own-again")
    wait_status(node, "ci1", "running")
    # What an administrator has stopped stays off.
    node.run(["brine", "instance", "stop", "--force", "ci1"])
    own(node, "ci1", unit="own-third")
    time.sleep(4)
    wait_status(node, "ci1", "ADMIN_down")


def test_the_last_of_several_owners_counts_and_may_come_late(node: Node) -> None:
    define(node, "ci1", owner=SOON, **IDLE)
    own(node, "ci1", "--start")
    wait_status(node, "ci1", "running")
    pid = info(node, "ci1")["pid"]
    second = own(node, "ci1", unit="own-second")
    wait_for("two owners", lambda: len(owned(node, "ci1")["owners"]) == 2)
    assert "2 owners, of whom process" in node.run(["brine", "lifecycle", "list"]).stdout
    # Another one takes its place in time.
    node.run(["systemctl", "kill", "--signal=KILL", second])
    third = own(node, "ci1", unit="own-third")
    time.sleep(1.5 * SOON["watchdog_timeout"])
    assert info(node, "ci1")["pid"] == pid
    node.run(["systemctl", "kill", "--signal=KILL", third])
    wait_status(node, "ci1", "ADMIN_down")
    assert verdict(node, "ci1") == ("admin", "owner-gone")


def test_a_folder_that_is_made_anew_has_all_of_a_vm_that_runs(node: Node) -> None:
    define(node, "ci1", owner=OWNER, **IDLE)
    folder = FOLDERS / "ci1"
    node.run(["touch", str(folder / "watchdog")])
    node.run(["brine", "instance", "start", "ci1"])
    process = node.read(folder / "pid")
    node.shell(f"umount --lazy {folder} 2>&1 || true; rm -rf {folder}")
    node.run(["brine", "lifecycle", "prepare", "ci1"])
    assert node.read(folder / "pid") == process
    node.run(["touch", str(folder / "watchdog")])
    node.run(["brine", "lifecycle", "prestop", "ci1"], timeout_s=90)
    wait_status(node, "ci1", "ADMIN_down")
    assert verdict(node, "ci1") == ("admin", "owner-request")
    assert not (node.path(folder) / "pid").exists()


def test_prestop_waits_for_a_vm_whose_folder_is_away(node: Node) -> None:
    define(node, "ci1", owner={"watchdog_timeout": 600}, **IDLE)
    folder = FOLDERS / "ci1"
    node.run(["touch", str(folder / "watchdog")])
    node.run(["brine", "instance", "start", "ci1"])
    node.shell(f"umount --lazy {folder}; rmdir {folder}")
    node.run(["systemd-run", "--unit=own-ci1", "brine", "lifecycle", "prestop", "ci1"])
    time.sleep(2)
    assert node.run(["systemctl", "is-active", "own-ci1"]).stdout == "active\n"
    node.run(["brine", "lifecycle", "prepare", "ci1"])
    assert "ExecMainStatus=0" in ended(node, "own-ci1")
    assert verdict(node, "ci1") == ("admin", "owner-request")


def test_a_vm_that_runs_may_get_another_owner_or_none(node: Node) -> None:
    define(node, "ci1", owner={"watchdog_timeout": 60}, **IDLE)
    node.run(["touch", str(FOLDERS / "ci1/watchdog")])
    node.run(["brine", "instance", "start", "ci1"])
    # Its owner still goes by the old one.
    define(node, "ci1", owner={"watchdog_timeout": 2}, **IDLE)
    time.sleep(6)
    assert info(node, "ci1")["status"] == "running"
    define(node, "ci1", **IDLE)
    assert not node.path(FOLDERS / "ci1").exists()
    assert info(node, "ci1")["status"] == "running"
    assert "its spec has no owner" in refused(node, "brine", "lifecycle", "prestop", "ci1")


def test_a_request_about_a_vm_that_is_down_changes_nobodys_will(node: Node) -> None:
    define(node, "ci1", owner={"watchdog_timeout": 600, "restart_with_owner": True}, **IDLE)
    node.run(["touch", str(FOLDERS / "ci1/watchdog")])
    node.run(["brine", "instance", "start", "ci1"])
    node.run(["brine", "instance", "stop", "--force", "ci1"])
    node.run(["touch", str(FOLDERS / "ci1/terminate")])
    wait_for("a confirmation", lambda: not node.path(FOLDERS / "ci1/terminate").exists())
    assert info(node, "ci1")["admin_state_source"] == "admin"


def run_apart(node: Node, unit: str) -> str:
    """Have a user without privileges own ci1 in namespaces of its own, by a shell alone; returns
    the command that runs others in there."""
    script = f"mount --rbind {FOLDERS}/ci1 /mnt && exec sh {OWNER_SCRIPT} /mnt"
    apart = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork"]
    node.run(["systemd-run", f"--unit={unit}", "--uid=runner", *apart, "sh", "-c", script])
    watchdog = node.path(FOLDERS / "ci1/watchdog")
    wait_for("the owner", watchdog.exists)
    (pid,) = node.shell(f"pgrep --parent $(systemctl show -P MainPID {unit})").split()
    namespaces = "--user --preserve-credentials --mount --pid"
    return f"runuser -u runner -- nsenter --target={pid} {namespaces} --"


def test_an_owner_in_other_namespaces(node: Node) -> None:
    node.shell("groupadd ci; useradd --groups=ci runner")
    define(node, "ci1", owner={**SOON, "group": "ci"}, **IDLE)
    run_apart(node, "own-ci1")
    node.run(["brine", "instance", "start", "ci1"])
    time.sleep(1.5 * SOON["watchdog_timeout"])
    assert info(node, "ci1")["status"] == "running"
    node.run(["systemctl", "kill", "--signal=KILL", "own-ci1"])
    wait_status(node, "ci1", "ADMIN_down")
    assert verdict(node, "ci1") == ("admin", "owner-gone")
    node.run(["rm", str(FOLDERS / "ci1/watchdog")])
    within = run_apart(node, "own-again")
    node.run(["brine", "instance", "start", "ci1"])
    # The owner ends with its VM. If it does so first, the kernel kills all of its PID namespace.
    node.shell(f"{within} brine lifecycle prestop ci1 || [ $? = 137 ]")
    wait_status(node, "ci1", "ADMIN_down")
    assert verdict(node, "ci1") == ("admin", "owner-request")


def test_an_owner_that_sees_no_process_of_the_nodes_ends_with_its_vm(node: Node) -> None:
    define(node, "ci1", owner=OWNER, **IDLE)
    apart = ["unshare", "--pid", "--fork", "--mount-proc"]
    own_it = ["brine", "lifecycle", "own", "ci1"]
    node.run(["systemd-run", "--unit=own-ci1", *apart, *own_it])
    wait_for("the owner", node.path(FOLDERS / "ci1/watchdog").exists)
    node.run(["brine", "instance", "start", "ci1"])
    node.run(["systemctl", "kill", "--signal=KILL", "brine-instance@ci1"])
    assert "ExecMainStatus=11\n" in ended(node, "own-ci1")


def test_a_hostile_owner_gets_no_vm_and_costs_no_other(node: Node) -> None:
    define(node, "good1", owner=OWNER, **IDLE)
    own(node, "good1", "--start")
    define(node, "bad1", owner=OWNER, **IDLE)
    start, here = ("brine", "instance", "start", "bad1"), f"cd {FOLDERS}/bad1; rm -rf *"
    for make, why in {
        "ln --symbolic /etc/passwd watchdog": "the watchdog is no regular file",
        "mkfifo watchdog": "the watchdog is no regular file",
        "mkdir watchdog": "the watchdog is no regular file",
        "touch --date=tomorrow watchdog": "in the future",
        "touch --date=yesterday watchdog": "10 s are its limit",
        "touch watchdog; mkdir pid": "pid: can't be written",
    }.items():
        node.shell(f"{here}; {make}")
        assert why in refused(node, *start), make
        assert "pid" in make or why in owned(node, "bad1")["why"]
    node.shell(f"{here}; touch watchdog; mkfifo terminate; ln --symbolic /etc/passwd pid")
    assert owned(node, "bad1")["request"] is False
    node.run(start)
    assert node.read("/etc/passwd").startswith("root:")
    said = refused(node, "brine", "lifecycle", "prestop", "--timeout=1", "bad1")
    assert "has not ended within 1 s" in said
    assert info(node, "good1")["status"] == "running"
    assert events(node, "good1")[-1] == "owner-there"


def test_a_group_without_a_name_may_own(node: Node) -> None:
    define(node, "ci1", owner={**OWNER, "group": "100000"})
    user = ["setpriv", "--reuid=nobody", "--regid=100000", "--clear-groups"]
    node.run([*user, "touch", str(FOLDERS / "ci1/watchdog")])
    wait_for("its owner", lambda: owned(node, "ci1")["owner"] == "alive")


def test_the_package_stays_while_a_vm_with_an_owner_runs(node: Node) -> None:
    define(node, "ci1", owner=OWNER, **IDLE)
    define(node, "ci2", owner=OWNER, **IDLE)
    own(node, "ci1", "--start")
    wait_status(node, "ci1", "running")
    said = node.run(["apt-get", "remove", "--yes", "brine-lifecycle"], check=False).stdout
    assert "brine-lifecycle: error: virtual machines with an owner run: ci1" in said.splitlines()
    node.run(["systemctl", "kill", "--signal=KILL", "own-ci1"])
    wait_status(node, "ci1", "ADMIN_down")
    assert verdict(node, "ci1") == ("admin", "owner-gone")


@pytest.mark.both_releases
def test_an_owner_that_fills_its_folder_costs_its_own_vm_at_most(node: Node) -> None:
    define(node, "bad1", owner=SOON, **IDLE)
    bad = own(node, "bad1", "--start")
    wait_status(node, "bad1", "running")
    before = room(node)
    fills = "head -c 64M /dev/zero >full; for i in $(seq 5000); do : >f$i || exit; done"
    assert "No space left on device" in refused(node, "sh", "-c", f"cd {FOLDERS}/bad1; {fills}")
    assert node.path(FOLDERS / "bad1/full").stat().st_size > 0
    assert not node.path(FOLDERS / "bad1/f5000").exists()
    # Others write to /run, too, but not as much.
    size, files = room(node)
    assert size > before[0] - (32 << 20)
    assert files > before[1] - 1000

    define(node, "good1", owner=OWNER, **IDLE)
    own(node, "good1", "--start")
    wait_status(node, "good1", "running")
    node.run(["systemctl", "kill", "--signal=KILL", bad])
    wait_status(node, "bad1", "ADMIN_down")
    assert verdict(node, "bad1") == ("admin", "owner-gone")
    assert (info(node, "good1")["status"], owned(node, "good1")["owner"]) == ("running", "alive")


def room(node: Node) -> tuple[int, int]:
    """How many bytes and files the node's /run has room for."""
    free = os.statvfs(node.path("/run"))
    return free.f_bavail * free.f_bsize, free.f_favail


@pytest.mark.both_releases
def test_a_folder_goes_with_its_instance(node: Node) -> None:
    define(node, "ci1", owner=OWNER)
    assert mounted(node) == ["ci1"]
    node.run(["brine", "instance", "rename", "ci1", "ci2"])
    assert mounted(node) == ["ci2"]
    assert not node.path(FOLDERS / "ci1").exists()
    node.run(["touch", *(f"{FOLDERS}/ci2/{name}" for name in ("watchdog", ".pid.1", "notes"))])
    # What an owner has put there stays.
    node.run(["brine", "instance", "undefine", "ci2"])
    assert node.run(["ls", "-A", f"{FOLDERS}/ci2"]).stdout == "notes\n"
    node.run(["rm", f"{FOLDERS}/ci2/notes"])
    for _ in range(5):
        define(node, "ci2", owner=OWNER)
        node.run(["brine", "instance", "undefine", "ci2"])
        assert mounted(node) == []
        assert not node.path(FOLDERS / "ci2").exists()


def test_a_unit_makes_the_folders_of_all_owners_at_a_boot(node: Node) -> None:
    node.run(["groupadd", "--force", "ci"])
    define(node, "ci1", owner={**OWNER, "group": "ci"})
    folder = FOLDERS / "ci1"
    for undo in (f"umount {folder}; rmdir {folder}", f"chown root:root {folder}"):
        node.shell(undo)
        node.run(["systemctl", "start", "brine-lifecycle-folders"])
        assert mounted(node) == ["ci1"]
        shown = node.run(["stat", "--format=%U:%G %a", str(folder)]).stdout
        assert shown == "brine-lifecycle:ci 2770\n"


def test_the_handler_is_confined(node: Node) -> None:
    said = node.run(["systemd-analyze", "security", HANDLER]).stdout
    exposure = float(said.rpartition("Overall exposure level")[2].split(":")[1].split()[0])
    assert exposure <= 1.5
    define(node, "ci1", owner=OWNER)
    active = ["systemctl", "is-active", HANDLER]
    wait_for("the handler", lambda: node.run(active, check=False).stdout == "active\n")
    status = node.shell(f"cat /proc/$(systemctl show -P MainPID {HANDLER})/status")
    assert "CapEff:\t0000000000000000" in status
    # What has no owner is none of its business, whoever asks.
    define(node, "web1", **IDLE)
    node.run(["brine", "instance", "start", "web1"])
    ask = (
        "import socket; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET);"
        "s.connect('/run/brine/lifecycle-executor'); s.send(b'web1 end owner-gone');"
        "print(s.recv(4096).decode())"
    )
    answer = node.run(
        ["setpriv", "--reuid=brine-lifecycle", "--clear-groups", "python3", "-c", ask]
    )
    assert answer.stdout == "web1 end failed web1: has no owner\n"
    assert "PermissionError" in refused(
        node, "setpriv", "--reuid=nobody", "--clear-groups", "python3", "-c", ask
    )
    assert info(node, "web1")["status"] == "running"


CONTAINER = (
    "podman --root=/srv/podman/root --runroot=/run/podman-test --storage-driver=vfs "
    "--cgroup-manager=cgroupfs --events-backend=file"
)
RUN = (
    f"{CONTAINER} run --rm --replace --name=owner --network=none --cgroups=disabled "
    "--security-opt=seccomp=unconfined --stop-timeout=60 "
    f"--volume={OWNER_SCRIPT}:/owner.sh:ro "
    f"--volume={FOLDERS}/ci1:/owner tiny sh"
)
"""A container in the control group of its unit: a node of the lab can't make any below its own."""


@pytest.fixture(scope="module")
def containers(node: Node) -> Node:
    """The node, with a container's image that has a shell and little else."""
    node.shell(
        "mkdir -p /srv/tiny/bin; cd /srv/tiny; cp /bin/busybox bin;"
        "for name in sh touch sleep rm cat dd tail; do ln -s busybox bin/$name; done;"
        f"tar -c . | {CONTAINER} import - tiny"
    )
    return node


def run_container(
    node: Node, *properties: str, script: Sequence[str] = ("/owner.sh", "/owner")
) -> None:
    """Have a container own ci1, start ci1, and wait until its guest runs."""
    define(node, "ci1", owner=OWNER)
    options = [f"--property={one}" for one in properties]
    run = ["systemd-run", "--unit=own-ci1", *options, *RUN.split(), *script]
    node.run(run)
    watchdog = node.path(FOLDERS / "ci1/watchdog")
    wait_for("the container", lambda: watchdog.exists(), timeout_s=60)
    node.run(["brine", "instance", "start", "ci1"])
    wait_ready(node, "ci1")


def test_a_vm_does_not_outlive_a_container_that_is_killed(containers: Node) -> None:
    run_container(containers)
    assert owned(containers, "ci1")["owner"] == "alive"
    containers.shell(f"{CONTAINER} kill owner")
    wait_status(containers, "ci1", "ADMIN_down")
    assert verdict(containers, "ci1") == ("admin", "owner-gone")


def test_a_container_that_is_stopped_waits_for_its_vm(containers: Node) -> None:
    run_container(containers)
    containers.run([*CONTAINER.split(), "stop", "owner"], timeout_s=90)
    wait_status(containers, "ci1", "ADMIN_down")
    assert verdict(containers, "ci1") == ("admin", "owner-request")


def test_a_vm_does_not_outlive_a_container_that_runs_out_of_memory(containers: Node) -> None:
    eats = "sh /owner.sh /owner & until [ -e /eat ]; do sleep 1; done; exec tail /dev/zero"
    run_container(containers, script=["-c", eats])
    with limited_memory("sh", "-c", eats) as process:
        containers.run([*CONTAINER.split(), "exec", "owner", "touch", "/eat"])
        # The container's first process is killed, and all others with it.
        wait_for("an OOM kill", lambda: not process.exists())
    wait_status(containers, "ci1", "ADMIN_down")
    assert verdict(containers, "ci1") == ("admin", "owner-gone")


@contextmanager
def limited_memory(*arguments: str) -> Iterator[Path]:
    """Have the kernel kill the process with this command line when it takes more than 64 MiB.

    No node can limit memory where this machine has control groups of version 1. Yields the process,
    in /proc.
    """
    words = re.escape(" ".join(arguments))
    (pid,) = run_command(["pgrep", "--full", "--exact", "--oldest", words]).stdout.split()
    process = Path("/proc", pid)
    root = Path("/sys/fs/cgroup/memory")
    limit = "memory.limit_in_bytes" if root.is_dir() else "memory.max"
    group = (root if root.is_dir() else root.parent) / f"brine-test-{process.name}"
    group.mkdir()
    try:
        (group / limit).write_text("67108864")
        (group / "cgroup.procs").write_text(process.name)
        yield process
    finally:
        wait_for("the control group to be empty", lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


def test_a_pods_prestop_hook_holds_its_container(containers: Node) -> None:
    """As a kubelet does: it runs the hook of the example's pod in the container, and waits."""
    pod = containers.read("/usr/share/doc/brine-lifecycle/examples/pod.yaml")
    hook = pod.partition("preStop:")[2].partition('"-c", "')[2].partition('"]')[0]
    touches = "while :; do touch /owner/watchdog; sleep 2; done"
    run_container(containers, script=["-c", touches])
    containers.run([*CONTAINER.split(), "exec", "owner", "sh", "-c", hook], timeout_s=90)
    wait_status(containers, "ci1", "ADMIN_down")
    assert verdict(containers, "ci1") == ("admin", "owner-request")
    containers.shell(f"{CONTAINER} kill owner")


@pytest.mark.long
def test_no_vm_outlives_its_owner_whoever_dies(node: Node) -> None:
    timeout_s, vms, seconds = 10, 200, 300
    owner = {"watchdog_timeout": timeout_s}
    define(node, "chaos000", owner=owner, admin_state="up", **IDLE)
    define_copies(node, "chaos000", [f"chaos{number:03}" for number in range(1, vms)])
    node.run(["brine", "lifecycle", "prepare", "--all"])
    node.put(Path(__file__).with_name("lifecycle_chaos.py"), "/srv/lifecycle_chaos.py")
    command = ["python3", "/srv/lifecycle_chaos.py", str(vms), str(seconds), str(timeout_s)]
    seen = json.loads(node.run(command, timeout_s=4 * seconds).stdout)
    assert seen["owners_killed"] > 20
    assert seen["handler_killed"] > 10
    assert seen["ended_though_owned"] == []
    assert seen["not_started"] == 0
    assert seen["longest"][-1][0] <= 5, seen


def test_a_fence_with_bad_settings_watches_by_the_defaults(node: Node) -> None:
    node.write("/etc/brine/lifecycle.toml", "fence_afer_s = 20\n")
    fence = "brine-lifecycle-fence"
    try:
        node.run(["systemctl", "start", fence])
        assert "60 s without" in node.run(["systemctl", "show", "-P", "StatusText", fence]).stdout
        said = [one["MESSAGE"] for one in node.journal(f"SYSLOG_IDENTIFIER={fence}")]
        assert any("the defaults are in use" in one and "fence_afer_s" in one for one in said)
    finally:
        node.run(["systemctl", "stop", fence])
        node.run(["rm", "/etc/brine/lifecycle.toml"])
