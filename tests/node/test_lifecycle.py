"""Owners and their instances on real nodes: real guests, units, containers, and the handler."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from lab.command import CommandError, run_command
from lab.node import Node
from lab.waiting import wait_for
from node.instance_on_node import IDLE, define, define_copies, info, order, wait_ready, wait_status
from node.lifecycle_on_node import (
    FOLDERS,
    HANDLER,
    events,
    node_with_lifecycle,
    own,
    owned,
    verdict,
)

OWNER = {"watchdog_timeout": 10}
SOON = {"watchdog_timeout": 6}


@pytest.fixture(scope="module")
def node(release: str, packages: list[Path]) -> Iterator[Node]:
    with node_with_lifecycle(release, packages) as node:
        yield node


@pytest.fixture(autouse=True)
def nothing_runs(node: Node) -> Iterator[None]:
    """Each story begins without instances, and without owners."""
    yield
    node.shell("systemctl stop 'own-*' 'brine-instance@*' brine-lifecycle; systemctl reset-failed")
    node.shell("rm -rf /var/lib/brine/instances/* /run/brine/lifecycle/* /run/brine/marks/*")


def refused(node: Node, *command: str) -> str:
    """The error of a command that fails."""
    with pytest.raises(CommandError) as error:
        node.run(command)
    return error.value.stderr


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
    assert events(node, "ci1") == ["owner-there", "owner-gone"]
    assert not node.path(FOLDERS / "ci1/pid").exists()
    assert "its owner is not there" in refused(node, "brine", "instance", "start", "ci1")


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
    assert info(node, "ci1")["status"] == "ADMIN_down"
    assert verdict(node, "ci1") == ("admin", "owner-request")
    assert events(node, "ci1")[-2:] == ["owner-request", "request-confirmed"]
    assert node.run(["ls", str(FOLDERS / "ci1")]).stdout == ""
    # Without a VM it returns at once.
    node.run(["systemctl", "stop", HANDLER, "brine-lifecycle.path"])
    node.run(["brine", "lifecycle", "prestop", "ci1"], timeout_s=10)
    node.run(["systemctl", "start", "brine-lifecycle.path"])


def ended(node: Node, unit: str) -> str:
    """What systemd says of a unit that has ended."""
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
    for name in ("ci1", "ci2"):
        define(node, name, owner=OWNER, **IDLE)
        own(node, name, "--start")
        wait_status(node, name, "running")
    stop = ["systemctl", "stop", "brine-lifecycle.path", HANDLER]
    node.run(stop)
    node.run(["systemctl", "kill", "--signal=KILL", "own-ci1"])
    node.run(["systemctl", "stop", "--no-block", "own-ci2"])
    time.sleep(OWNER["watchdog_timeout"] + 2)
    assert info(node, "ci1")["status"] == info(node, "ci2")["status"] == "running"
    node.run(["systemctl", "start", "brine-lifecycle.path"])
    wait_status(node, "ci1", "ADMIN_down")
    wait_status(node, "ci2", "ADMIN_down")
    assert verdict(node, "ci1") == ("admin", "owner-gone")
    assert verdict(node, "ci2") == ("admin", "owner-request")


def test_a_vm_whose_spec_goes_ends(node: Node) -> None:
    define(node, "ci1", owner=OWNER)
    own(node, "ci1", "--start")
    wait_status(node, "ci1", "running")
    wait_ready(node, "ci1")
    node.run(["rm", "/var/lib/brine/instances/ci1.json"])
    active = ["systemctl", "is-active", "brine-instance@ci1"]
    wait_for("its end", lambda: node.run(active, check=False).stdout != "active\n", timeout_s=60)
    wait_for("a verdict", lambda: verdict(node, "ci1") == ("admin", "spec-gone"))
    wait_for("its files to go", lambda: not node.path(FOLDERS / "ci1/pid").exists())


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
    assert info(node, "ci1")["status"] == "ADMIN_down"


def test_the_node_boots_without_its_owners(node: Node) -> None:
    define(node, "ci1", owner=OWNER, admin_state="up", **IDLE)
    node.run(["rmdir", str(FOLDERS / "ci1")])
    node.run(["systemctl", "start", "brine-lifecycle-folders"])
    assert node.path(FOLDERS / "ci1").is_dir()
    # As the node's boot does.
    node.run(["brine", "instance", "start", "--all"])
    found = info(node, "ci1")
    assert found["status"] == "ERROR_down"
    assert "its owner is not there" in found["why"]


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


def test_the_handler_is_confined(node: Node) -> None:
    said = node.run(["systemd-analyze", "security", HANDLER]).stdout
    exposure = float(said.rpartition("Overall exposure level")[2].split(":")[1].split()[0])
    assert exposure <= 1.5
    define(node, "ci1", owner=OWNER)
    wait_for(
        "the handler", lambda: "active" in node.run(["systemctl", "is-active", HANDLER]).stdout
    )
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


def test_the_fence_ends_what_nobody_looks_after(node: Node) -> None:
    node.write("/etc/brine/lifecycle.toml", "fence_after_s = 10\n")
    define(node, "ci1", owner={"watchdog_timeout": 600}, **IDLE)
    own(node, "ci1", "--start")
    wait_status(node, "ci1", "running")
    # The handler can't be brought back.
    drop_in = f"/run/systemd/system/{HANDLER}.d/broken.conf"
    node.write(drop_in, "[Service]\nExecStart=\nExecStart=/bin/false\n")
    node.run(["systemctl", "daemon-reload"])
    node.run(["systemctl", "kill", "--signal=KILL", HANDLER])
    try:
        node.run(["systemctl", "start", "brine-lifecycle-fence"])
        wait_status(node, "ci1", "ADMIN_down")
        assert verdict(node, "ci1") == ("admin", "owner-gone")
    finally:
        node.run(["systemctl", "stop", "brine-lifecycle-fence", HANDLER])
        node.run(["rm", drop_in, "/etc/brine/lifecycle.toml"])
        node.run(["systemctl", "daemon-reload"])
        node.run(["systemctl", "reset-failed"])
        node.run(["systemctl", "restart", "brine-lifecycle.path"])


CONTAINER = (
    "podman --root=/srv/podman/root --runroot=/run/podman-test --storage-driver=vfs "
    "--cgroup-manager=cgroupfs --events-backend=file"
)
RUN = (
    f"{CONTAINER} run --rm --replace --name=owner --network=none --cgroups=disabled "
    "--security-opt=seccomp=unconfined --stop-timeout=60 "
    "--volume=/usr/share/doc/brine-lifecycle/examples/owner.sh:/owner.sh:ro "
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
    assert info(containers, "ci1")["status"] == "ADMIN_down"
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
    (pid,) = run_command(["pgrep", "--full", "--exact", words]).stdout.split()
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
    assert info(containers, "ci1")["status"] == "ADMIN_down"
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
    assert seen["longest_s"] <= 5, seen


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
