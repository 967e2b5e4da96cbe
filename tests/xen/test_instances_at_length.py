"""More of instances on real Xen, on the newest release: their memory, odd ends, domains of others,
many at once, and the timer."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from lab.command import CommandError
from lab.waiting import wait_for
from lab.xen_domain import (
    create,
    free_memory_mib,
    log,
    order,
    rows,
    state_of,
    wait_ready,
    wait_state,
)
from lab.xen_node import XenNode
from xen.instances_on_xen import (
    LONG_S,
    PVH_MEMORY_MIB,
    SLOW_NODE,
    forget_log,
    have,
    spec_of,
    start,
    states,
    unit_says,
    wait_status,
    watch,
)

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("no_instances"),
    # A command takes seconds there, and the other release's Xen has the same tests of all ends.
    pytest.mark.parametrize("release", ["trixie"], scope="session"),
]


def test_memory_comes_back_when_it_is_cleaned_up(node: XenNode) -> None:
    free = free_memory_mib(node)
    for name in ("off", "again", "crash"):
        have(node, name, user_shutdown="restart" if name == "again" else "stop")
    start(node)
    order(node, "off", "poweroff")
    order(node, "again", "poweroff")
    order(node, "crash", "crash")
    wait_status(node, ["off", "again"], "USER_down")
    wait_status(node, ["crash"], "ERROR_down")
    assert free_memory_mib(node) < free - 3 * 70
    assert {one["name"] for one in watch(node, "cleanup").values() if one["actions"]} == {
        *("off", "again", "crash"),
    }
    assert rows(node) == []
    assert free_memory_mib(node) == free
    # What they were is not lost with that.
    found = states(node)
    assert (found["off"]["status"], found["again"]["status"]) == ("USER_down", "USER_down")
    assert found["crash"]["why"] == "it should be up but is down: it crashed"
    # So does a start, of another one.
    start(node, "off")
    order(node, "off", "poweroff")
    wait_status(node, ["off"], "USER_down")
    have(node, "other")
    start(node, "other")
    assert [row.name for row in rows(node)] == ["other"]
    assert states(node)["off"]["admin_state_source"] == "user"
    done = {name: one["actions"] for name, one in watch(node).items()}
    assert done == {"off": [], "other": [], "again": ["start"], "crash": ["try"]}


NO_LAST_STEP = """[Service]
ExecStopPost=
ExecStopPost=-/bin/true
"""
HANGS = "#!/bin/sh\nexec sleep infinity\n"
VIF_BRIDGE = "/etc/xen/scripts/vif-bridge"


def break_start_off(node: XenNode, name: str) -> None:
    """Kill the start of an instance with a NIC while Xen connects that. Its unit clears nothing,
    as where xl does not answer."""
    folder = f"/run/systemd/system/brine-instance@{name}.service.d"
    node.write(f"{folder}/no-last-step.conf", NO_LAST_STEP)
    node.shell(f"systemctl daemon-reload; mv {VIF_BRIDGE} {VIF_BRIDGE}.away")
    node.write(VIF_BRIDGE, HANGS, mode=0o755)
    node.run(["systemctl", "start", "--no-block", f"brine-instance@{name}"])
    wait_state(node, name, "--p---")
    node.run(["systemctl", "kill", "--signal=KILL", f"brine-instance@{name}"])
    wait_for(
        "the unit's end",
        lambda: unit_says(node, name, "ActiveState") == "failed",
        timeout_s=LONG_S,
        interval_s=1,
    )
    node.shell(f"mv {VIF_BRIDGE}.away {VIF_BRIDGE}; rm -r {folder}; systemctl daemon-reload")


# A young one may be deaf to xl shutdown for minutes.
PVH: dict[str, Any] = {"hypervisor": "xen-pvh", "memory_mib": PVH_MEMORY_MIB}
PVH["shutdown_timeout"] = 400


def test_what_users_end_of_pvh_is_worked_on_and_what_is_not_ours_is_left(node: XenNode) -> None:
    free = free_memory_mib(node)
    for name in ("off", "crash"):
        have(node, name, **PVH)
    start(node)
    create(node, "theirs", "-p", kind="pvh", memory_mib=PVH_MEMORY_MIB)
    forget_log(node, "crash")
    order(node, "off", "poweroff")
    order(node, "crash", "crash")
    wait_status(node, ["off"], "USER_down")
    wait_status(node, ["crash"], "ERROR_down")
    done = {name: (one["ended_by"], one["actions"]) for name, one in watch(node).items()}
    assert done == {
        "off": ("user", ["set-down", "clean-up"]),
        "crash": ("crash", ["clean-up", "try"]),
        "theirs": (None, []),
    }
    wait_ready(node, "crash")
    done = {name: (one["ended_by"], one["actions"]) for name, one in watch(node).items()}
    assert done == {"off": ("user", []), "crash": (None, []), "theirs": (None, [])}
    assert state_of(node, "theirs") == "--p---"
    # The node goes down: what their users wanted is noted by a unit.
    order(node, "crash", "poweroff")
    wait_status(node, ["crash"], "USER_down")
    node.run(["systemctl", "stop", "brine-user-shutdowns"], timeout_s=LONG_S)
    assert states(node)["crash"]["admin_state_source"] == "user"
    assert watch(node, "cleanup")["crash"]["actions"] == ["clean-up"]
    assert [row.name for row in rows(node)] == ["theirs"]
    node.run(["xl", "destroy", "theirs"])
    assert free_memory_mib(node) == free


def test_a_pvh_domain_that_is_to_restart_does_and_one_that_an_admin_stops_does_not(
    node: XenNode,
) -> None:
    free = free_memory_mib(node)
    have(node, "again", **PVH, user_shutdown="restart")
    have(node, "admin", **PVH)
    # As at the node's boot.
    node.run(["systemctl", "start", "brine-instances.service"], timeout_s=2 * LONG_S)
    for name in ("again", "admin"):
        wait_ready(node, name)
    wait_status(node, ["again", "admin"], "running")
    forget_log(node, "again")
    order(node, "again", "poweroff")
    node.run(["brine", "instance", "stop", "admin"], timeout_s=LONG_S)
    wait_status(node, ["again"], "USER_down")
    done = {name: (one["ended_by"], one["actions"]) for name, one in watch(node).items()}
    assert done == {"again": ("user", ["clean-up", "start"]), "admin": ("admin", [])}
    wait_ready(node, "again")
    node.run(["systemctl", "stop", "brine-instance@again"], timeout_s=LONG_S)
    assert watch(node)["again"]["ended_by"] == "admin"
    assert rows(node) == []
    assert free_memory_mib(node) == free


def test_a_domain_that_was_made_by_half_is_removed_and_started_again(node: XenNode) -> None:
    free = free_memory_mib(node)
    node.shell("ip link add br0 type bridge; ip link set br0 up")
    have(node, "broken", **PVH, nics=[{"link": "br0"}])
    create(node, "theirs", "-p")
    break_start_off(node, "broken")
    found = states(node)["broken"]
    assert (found["status"], found["oper_state"]) == ("ERROR_down", "down")
    assert "its start was broken off" in found["why"]
    assert state_of(node, "broken") == "--p---"  # who only asks cleans nothing up
    # Xen gives its scripts some seconds, which may be too few for a busy emulated processor.
    have(node, "broken", **PVH)
    done = {name: (one["ended_by"], one["actions"]) for name, one in watch(node).items()}
    assert done == {"broken": ("failed", ["clean-up", "try"]), "theirs": (None, [])}
    wait_ready(node, "broken")
    assert state_of(node, "theirs") == "--p---"
    node.run(["brine", "instance", "stop", "--force", "broken"], timeout_s=LONG_S)
    # A start by hand removes one, too.
    have(node, "broken", **PVH, nics=[{"link": "br0"}])
    break_start_off(node, "broken")
    have(node, "broken", **PVH)
    start(node, "broken")
    node.shell("xl destroy broken; xl destroy theirs; ip link delete br0")
    wait_for("memory", lambda: free_memory_mib(node) == free, timeout_s=LONG_S, interval_s=1)


def test_stopping_one_that_hears_nothing(node: XenNode) -> None:
    have(node, "web1")
    start(node, "web1")
    order(node, "web1", "deaf")
    wait_for("deafness", lambda: "domain: deaf" in log(node, "web1"), timeout_s=LONG_S)
    stop = ["brine", "instance", "stop", "web1", "--timeout", "5"]
    with pytest.raises(CommandError, match="did not shut down within 5 s, and runs on"):
        node.run(stop, timeout_s=LONG_S)
    found = states(node)["web1"]
    assert (found["status"], found["oper_state"]) == ("ERROR_up", "running")
    # While somebody stops it, it is left alone.
    node.shell("setsid brine instance stop web1 --timeout 150 >/dev/null 2>&1 &")
    wait_status(node, ["web1"], "stopping")
    assert watch(node)["web1"]["actions"] == []
    wait_status(node, ["web1"], "ERROR_up")
    node.run([*stop, "--force"], timeout_s=LONG_S)
    assert states(node)["web1"]["status"] == "ADMIN_down"
    assert rows(node) == []


def test_other_ways_to_stop_one(node: XenNode) -> None:
    for name in ("unit", "off", "paused"):
        have(node, name)
    start(node)
    node.run(["systemctl", "stop", "brine-instance@unit"], timeout_s=LONG_S)
    assert state_of(node, "unit") == ""
    assert states(node)["unit"]["why"] == "it should be up but is down: it was stopped"
    order(node, "off", "poweroff")
    wait_status(node, ["off"], "USER_down")
    stopped = node.run(["brine", "instance", "stop", "off"], timeout_s=LONG_S).stdout
    assert stopped.startswith("cleaned up: off")
    assert states(node)["off"]["admin_state_source"] == "admin"
    node.run(["xl", "pause", "paused"])
    assert states(node)["paused"]["why"] == "it is paused"
    assert watch(node)["paused"]["actions"] == []
    node.run(["brine", "instance", "stop", "paused"], timeout_s=LONG_S)
    assert rows(node) == []


def test_a_domain_outlives_its_xl(node: XenNode) -> None:
    for name in ("web1", "web2", "web3"):
        have(node, name)
    start(node)
    node.run(["systemctl", "daemon-reexec"])
    assert {one["status"] for one in states(node).values()} == {"running"}
    node.run(["systemctl", "kill", "--signal=KILL", "brine-instance@*"])
    wait_for(
        "failed units",
        lambda: unit_says(node, "web3", "ActiveState") == "failed",
        timeout_s=LONG_S,
        interval_s=1,
    )
    found = wait_status(node, ["web1", "web2", "web3"], "running")
    assert "its xl was ended" in found["web1"]["why"]
    started = node.run(["brine", "instance", "start", "web1"], timeout_s=LONG_S)
    assert started.stdout.startswith("unchanged")
    assert {tuple(one["actions"]) for one in watch(node).values()} == {()}
    # systemd starts no second one.
    with pytest.raises(CommandError):
        node.run(["systemctl", "start", "brine-instance@web1"], timeout_s=LONG_S)
    assert len(rows(node)) == 3
    order(node, "web2", "poweroff")
    order(node, "web3", "crash")
    wait_state(node, "web2", "---s--")
    wait_state(node, "web3", "---sc-")
    assert {name: one["actions"] for name, one in watch(node).items()} == {
        "web1": [],
        "web2": ["set-down", "clean-up"],
        "web3": ["clean-up", "try"],
    }
    for name in ("web1", "web3"):
        node.run(["brine", "instance", "stop", name, "--force"], timeout_s=LONG_S)
    assert rows(node) == []
    assert {one["admin_state"] for one in states(node).values()} == {"down"}


def test_what_does_not_start_leaves_nothing(node: XenNode) -> None:
    node.write("/srv/junk", "no kernel\n")
    have(node, "junk", kernel="/srv/junk")
    have(node, "large", memory_mib=100_000)
    have(node, "bridge", nics=[{"link": "nobr"}])
    have(node, "foreign")
    have(node, "missing", kernel="/srv/nothing")
    create(node, "foreign")
    whys = {
        "junk": "did not start: ",
        "large": "memory",
        "bridge": "nobr",
        "foreign": "already exists",
        "missing": "/srv/nothing: is not there",
    }
    for name, why in whys.items():
        start_it = ["brine", "instance", "start", name]
        done = node.run(start_it, check=False, timeout_s=LONG_S)
        assert done.returncode == 1
        said = done.stderr.splitlines()
        first, *others = [
            line for line in said if not line.startswith(f"brine: {name}: waiting for ")
        ]
        assert re.match(rf"brine: error: {name}: .*{why}", first), first
        assert all(line.startswith("brine: hint: ") for line in others)
    assert [row.name for row in rows(node)] == ["foreign"]
    assert {one["status"] for one in states(node).values()} == {"ERROR_down"}


def test_domains_that_are_none_of_ours(node: XenNode) -> None:
    have(node, "ours", admin_state="down")
    create(node, "theirs")
    create(node, "ended", "-p")
    create(node, "ours-too", "-p")
    node.run(["xl", "unpause", "ended"])
    wait_ready(node, "ended")
    order(node, "ended", "poweroff")
    wait_state(node, "ended", "---s--")
    left = watch(node)
    assert {name: one["actions"] for name, one in left.items()} == {
        **{name: [] for name in ("ours", "theirs", "ended", "ours-too")},
    }
    assert 'manage = "all"' in left["ended"]["why"]
    node.write("/etc/brine/watcher.toml", f'{SLOW_NODE}manage = "all"\n')
    cleaned = watch(node)
    node.write("/etc/brine/watcher.toml", SLOW_NODE)
    assert {name for name, one in cleaned.items() if one["actions"]} == {"ended"}
    assert sorted(row.name for row in rows(node)) == ["ours-too", "theirs"]


def test_a_disk_and_a_nic_are_given_back_by_the_watchers_service_too(node: XenNode) -> None:
    node.shell(
        "modprobe loop; truncate --size=16M /srv/disk.img;"
        "ip link add br0 type bridge; ip link set br0 up"
    )
    have(node, "web1", disks=[{"path": "/srv/disk.img"}], nics=[{"link": "br0"}])
    start(node, "web1")
    (row,) = rows(node)
    assert node.run(["xl", "block-list", "web1"]).stdout.count("\n") == 2
    assert f"vif{row.number}.0" in node.run(["ls", "/sys/class/net/br0/brif"]).stdout
    assert "/srv/disk.img" in node.run(["losetup", "--list"]).stdout
    order(node, "web1", "poweroff")
    wait_status(node, ["web1"], "USER_down")
    node.run(["systemctl", "start", "brine-watcher.service"], timeout_s=LONG_S)
    assert rows(node) == []
    assert node.run(["ls", "/sys/class/net/br0/brif"]).stdout == ""
    assert node.run(["losetup", "--list"]).stdout == ""
    node.run(["ip", "link", "delete", "br0"])


def test_a_disk_by_its_size_is_made_and_grows_for_the_next_start(node: XenNode) -> None:
    unit = "/srv/vms"
    node.shell(f"mkdir {unit}; echo 'directories = [\"{unit}\"]' >/etc/brine/storage.toml")
    node.shell("modprobe loop")
    disk = {"name": "data", "size_mib": 16, "unit": unit}
    spec = spec_of("web1", disks=[disk], admin_state="down")
    node.run(["brine", "instance", "define", "-"], stdin=json.dumps(spec), timeout_s=LONG_S)
    start(node, "web1")
    (row,) = _disks(node)
    assert row["path"] in node.run(["losetup", "--list"]).stdout
    # Nothing plugs into a domain, and what it uses stays.
    refused = ["disk", "remove", "web1", "data", "--delete"], ["disk", "snapshot", "web1"]
    for words in refused:
        with pytest.raises(CommandError, match="brine: error: web1"):
            node.run(["brine", *words], timeout_s=LONG_S)
    assert _disks(node) == [row]
    # One that is added comes with the next start, and one that grows is larger then.
    node.run(["brine", "disk", "add", "web1", "--size", "8M", "--unit", unit], timeout_s=LONG_S)
    told = node.run(["brine", "disk", "grow", "web1", "data", "24M", "--json"], timeout_s=LONG_S)
    assert json.loads(told.stdout)["seen_by_guest"] is False
    forget_log(node, "web1")
    node.run(["brine", "instance", "reboot", "web1"], timeout_s=LONG_S)
    wait_ready(node, "web1")
    assert [(one["name"], one["made"] >> 20) for one in _disks(node)] == [
        ("data", 24),
        ("disk0", 8),
    ]
    assert node.run(["xl", "block-list", "web1"]).stdout.count("\n") == 3
    node.run(["brine", "instance", "stop", "--force", "web1"], timeout_s=LONG_S)
    node.run(["brine", "disk", "remove", "web1", "disk0", "--delete"], timeout_s=LONG_S)
    undefine = ["brine", "instance", "undefine", "web1", "--delete-volumes", "--yes"]
    node.run(undefine, timeout_s=LONG_S)
    assert node.run(["ls", unit]).stdout == ""
    node.shell(f"rm -r {unit} /etc/brine/storage.toml")


def _disks(node: XenNode) -> list[dict[str, Any]]:
    status = ["brine", "disk", "status", "web1", "--json"]
    found: list[dict[str, Any]] = json.loads(node.run(status, timeout_s=LONG_S).stdout)
    return found


def test_twenty_at_once(node: XenNode) -> None:
    free = free_memory_mib(node)
    uuids = {f"web{number}": have(node, f"web{number}").uuid for number in range(3)}
    start(node)
    # Units take most of the one processor: the others are as if their xl had been killed.
    for name in [f"web{number}" for number in range(3, 20)]:
        uuids[name] = have(node, name).uuid
        create(node, name, uuid=uuids[name])
    for name in uuids:
        wait_ready(node, name)
    wait_status(node, uuids, "running")
    assert free_memory_mib(node) < free - 20 * 70
    for name in uuids:
        order(node, name, "poweroff")
    wait_status(node, uuids, "USER_down")
    done = watch(node)
    assert {tuple(one["actions"]) for one in done.values()} == {("set-down", "clean-up")}
    assert len(done) == 20
    assert rows(node) == []
    assert free_memory_mib(node) == free


def test_the_timer_does_it_by_itself(node: XenNode) -> None:
    have(node, "off")
    have(node, "crash")
    start(node)
    folder = "/run/systemd/system/brine-watcher.timer.d"
    often = "OnCalendar=\nOnCalendar=*:*:0/15\nRandomizedDelaySec=0\nAccuracySec=1s\n"
    node.write(f"{folder}/often.conf", f"[Timer]\n{often}")
    node.shell("systemctl daemon-reload; systemctl start brine-watcher.timer")
    order(node, "off", "poweroff")
    forget_log(node, "crash")
    order(node, "crash", "crash")
    wait_state(node, "crash", "-b----|r-----|------")
    wait_for(
        "the user's will", lambda: states(node)["off"]["admin_state"] == "down", timeout_s=LONG_S
    )
    wait_status(node, ["crash"], "running")
    assert state_of(node, "off") == ""
    node.shell(f"systemctl stop brine-watcher.timer; rm -r {folder}; systemctl daemon-reload")
