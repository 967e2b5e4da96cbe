"""A fleet under a Salt master: the cluster's configuration, from pillar to all nodes and back."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from lab.fleet import Fleet
from lab.node import Node
from lab.waiting import wait_for
from node.fleet_on_node import fleet as fleet
from node.instance_on_node import GUEST, info, order, wait_ready, wait_status
from node.watcher_on_node import outbox

CONFIG = "/var/lib/brine/config.data"
NODES = ("node1.example.com", "node2.example.com", "node3.example.com")
WEB1, WEB2, WEB3 = (f"web{number}.example.com" for number in (1, 2, 3))
# The outbox is sent again after 30 s, a minute, ...
LONG_S = 300


def declared(*tags: str) -> dict[str, Any]:
    """Three nodes, of which the last is no master candidate, with an instance each.

    :param tags: of the cluster.
    """
    guest = {"kvm_flag": "disabled", "kernel_path": f"{GUEST}/kernel", "user_shutdown": True}
    guest |= {"initrd_path": f"{GUEST}/initramfs", "root_path": "", "serial_console": True}
    guest |= {"kernel_args": "console=ttyS0 panic=-1 quiet"}
    memory = {"maxmem": 128, "minmem": 128, "vcpus": 1}
    return {
        "cluster": {"name": "lab.example.com", "master": NODES[0], "tags": [*tags]},
        "nodes": {
            name: {"primary_ip": f"192.0.2.{number}", "master_candidate": number < 3}
            for number, name in enumerate(NODES, 1)
        },
        "instances": {
            f"web{number}.example.com": {
                "primary_node": name,
                "hvparams": guest,
                "beparams": memory,
            }
            for number, name in enumerate(NODES, 1)
        },
    }


@pytest.fixture(scope="module")
def cluster(fleet: Fleet) -> Fleet:
    """The fleet with a cluster's configuration, which node1 writes, after one run of the states."""
    declare(fleet)
    fleet.apply("brine")
    return fleet


def declare(fleet: Fleet, *tags: str) -> None:
    """Have the pillar of node1 declare the cluster."""
    give(fleet, node1={"config": {"apply": True}, **declared(*tags)})


def give(fleet: Fleet, **of: dict[str, Any]) -> None:
    """Give nodes their part of pillar.

    A pass over all instances would correct an event that these tests put into an outbox: its
    instance's spec says something else. So there is one a day.
    """
    each = {"brine": {"watcher": {"settings": {"interval": 86400}}}}
    fleet.pillar(each, **{name: {"brine": part} for name, part in of.items()})


def in_config(fleet: Fleet, name: str) -> dict[str, Any]:
    """An instance in the cluster's configuration."""
    instances = json.loads(fleet.master.read(CONFIG))["instances"]
    found: dict[str, Any] = next(one for one in instances.values() if one["name"] == name)
    return found


def admin_state(fleet: Fleet, name: str) -> tuple[str, str]:
    one = in_config(fleet, name)
    return one["admin_state"], one["admin_state_source"]


def put_event(node: Node, one: dict[str, Any], **data: str) -> None:
    """Have a node's outbox tell of an instance, as if its user had shut it down."""
    event = {"admin_state": "down", "source": "user", **data}
    put = "import json, sys; from brine.common import outbox; outbox.put(**json.load(sys.stdin))"
    given = {"kind": "admin-state", "instance": one["uuid"], "name": one["name"], "data": event}
    node.run(["python3", "-c", put], stdin=json.dumps(given))


def set_up(fleet: Fleet, name: str) -> None:
    """Have an instance be up again in the configuration, and by its admin."""
    up = {"instances": {name: {"admin_state": "up", "admin_state_source": "admin"}}}
    fleet.master.run(["brine", "config", "apply", "-"], stdin=json.dumps(up))
    assert admin_state(fleet, name) == ("up", "admin")


def wait_recorded(fleet: Fleet, name: str, node: Node) -> float:
    """Wait until an instance is down by its user's will in the configuration, and its node knows
    that this is on record. Returns how long the first of these took, in seconds."""
    begun = time.monotonic()
    wait_for(
        f"{name} to be recorded",
        lambda: admin_state(fleet, name) == ("down", "user"),
        timeout_s=LONG_S,
    )
    took_s = time.monotonic() - begun
    wait_for("the acknowledgement", lambda: not outbox(node), timeout_s=LONG_S, interval_s=0.5)
    return took_s


def master_log(fleet: Fleet) -> str:
    return fleet.master.read("/var/log/salt/master")


def serial_of(node: Node) -> int:
    """The serial of the configuration that a node has; 0 if it has none."""
    if not node.path(CONFIG).exists():
        return 0
    serial: int = json.loads(node.read(CONFIG))["cluster"]["serial_no"]
    return serial


def wait_well(fleet: Fleet) -> dict[str, Any]:
    """Wait until all nodes are as they should be; what the runner says of them."""

    def found() -> dict[str, Any] | None:
        told: dict[str, Any] = fleet.run("brine.health", check=False)
        return told if told["result"] else None

    return wait_for("all nodes to be well", found, timeout_s=LONG_S, interval_s=1)


def jobs(fleet: Fleet, function: str) -> int:
    """How often the master had a function run."""
    return sum(one["Function"] == function for one in fleet.run("jobs.list_jobs").values())


def test_one_run_of_the_states_sets_up_the_whole_cluster(cluster: Fleet) -> None:
    told = wait_well(cluster)["nodes"]
    for number, (node, name) in enumerate(zip(cluster.nodes, NODES, strict=True), 1):
        wait_status(node, f"web{number}.example.com", "running")
        assert node.path("/etc/salt/minion.d/brine-beacon.conf").exists()
        assert told[name]["serial"] == (serial_of(cluster.master) if number < 3 else None)
    for results in cluster.apply("brine").values():
        assert [one for one in results if one.changes] == []


def test_a_change_that_is_applied_on_its_writer_alone_reaches_the_others(cluster: Fleet) -> None:
    before = serial_of(cluster.master)
    declare(cluster, "changed")
    cluster.apply("brine.config", nodes=[cluster.master])
    assert serial_of(cluster.master) > before
    wait_for(
        "the other candidate",
        lambda: serial_of(cluster.nodes[1]) == serial_of(cluster.master),
        timeout_s=LONG_S,
    )
    assert serial_of(cluster.nodes[2]) == 0
    wait_well(cluster)


def test_a_node_that_was_away_is_named_and_gets_it_by_its_next_run(cluster: Fleet) -> None:
    away = cluster.nodes[1]
    declare(cluster, "away")
    with cluster.silent(away):
        said = master_log(cluster)
        told_of = f"{NODES[1]} is not as the configuration says"
        cluster.apply("brine.config", nodes=[cluster.master])
        wait_for(
            "the runner to give up",
            lambda: told_of in master_log(cluster)[len(said) :],
            timeout_s=LONG_S,
        )
    told = cluster.run("brine.health", check=False)
    assert [*told["stale"]] == [NODES[1]]
    cluster.apply("brine", nodes=[away])
    assert serial_of(away) == serial_of(cluster.master)
    wait_well(cluster)


def test_many_bells_are_one_redistribution_and_forged_ones_are_none(cluster: Fleet) -> None:
    """Any minion may ring, with any data."""
    count = 8
    bells = [{"tag": "brine/config/changed", "data": {}}] * (count - 1)
    bells += [{"tag": "brine/config/changed", "data": {"if_changed": False, "test": "{{ 1/0 }}"}}]

    def ring() -> None:
        """Ring all of them. Salt may lose an event when it has much to do."""
        before = jobs(cluster, "runner.brine.redistribute")
        forge(cluster.nodes[2], bells)
        wait_for(
            "most bells to be heard",
            lambda: jobs(cluster, "runner.brine.redistribute") > before + count // 2,
            timeout_s=LONG_S,
            interval_s=0.5,
        )

    applied = jobs(cluster, "state.apply")
    ring()
    assert jobs(cluster, "state.apply") == applied
    declare(cluster, "by hand")
    change = {"cluster": {"tags": ["by hand"]}}
    cluster.master.run(["brine", "config", "apply", "-"], stdin=json.dumps(change))
    ring()
    wait_for(
        "the other candidate",
        lambda: serial_of(cluster.nodes[1]) == serial_of(cluster.master),
        timeout_s=LONG_S,
    )
    ring()
    assert jobs(cluster, "state.apply") == applied + 1


def test_a_runner_that_fails_says_so_by_its_exit_status(cluster: Fleet) -> None:
    for command, status in ((["brine.find", "web2"], 0), (["brine.find", "nosuch"], 1)):
        done = cluster.master.run(["salt-run", *command], check=False, timeout_s=LONG_S)
        assert done.returncode == status


def test_a_poweroff_is_recorded_in_the_configuration(cluster: Fleet) -> None:
    node = cluster.nodes[1]
    wait_ready(node, WEB2)
    order(node, WEB2, "poweroff")
    print(f"recorded {wait_recorded(cluster, WEB2, node):.1f} s after the poweroff")
    serial = json.loads(cluster.master.read(CONFIG))["cluster"]["serial_no"]
    # The same again changes nothing.
    put_event(node, in_config(cluster, WEB2))
    wait_recorded(cluster, WEB2, node)
    assert json.loads(cluster.master.read(CONFIG))["cluster"]["serial_no"] == serial


def test_a_highstate_changes_nothing_of_what_is_set_up(cluster: Fleet) -> None:
    for results in cluster.apply("brine").values():
        assert [one for one in results if one.changes] == []


def test_what_somebody_stops_on_its_node_stays_so_while_others_are_recorded(cluster: Fleet) -> None:
    node, other = cluster.nodes[0], cluster.nodes[2]
    node.run(["brine", "instance", "stop", "--force", WEB1])
    put_event(other, in_config(cluster, WEB3))
    wait_recorded(cluster, WEB3, other)
    assert info(node, WEB1)["status"] == "ADMIN_down"
    set_up(cluster, WEB3)
    node.run(["brine", "instance", "start", WEB1])
    wait_for("the acknowledgement", lambda: not outbox(node), timeout_s=LONG_S, interval_s=0.5)


def test_a_minion_that_was_not_told_of_its_beacon_is_told_by_the_next_run(cluster: Fleet) -> None:
    """As after a run that was killed between the file and the telling."""
    node, due = cluster.nodes[1], "/run/brine-beacon.due"

    def beacons() -> str:
        return str(cluster.call("beacons.list", nodes=[node]))

    cluster.call("event.fire", "{func: delete, name: brine}", "manage_beacons", nodes=[node])
    wait_for("the minion to have no beacon", lambda: "brine" not in beacons())
    node.write(due, "")
    cluster.apply("brine.watcher", nodes=[node])
    wait_for("the minion to have its beacon", lambda: "brine" in beacons())
    assert not node.path(due).exists()


def test_a_master_that_was_away_hears_of_it(cluster: Fleet) -> None:
    set_up(cluster, WEB3)
    node = cluster.nodes[2]
    cluster.master.run(["systemctl", "stop", "salt-master"])
    try:
        put_event(node, in_config(cluster, WEB3))
    finally:
        cluster.master.run(["systemctl", "start", "salt-master"], timeout_s=LONG_S)
    wait_recorded(cluster, WEB3, node)


def test_it_is_recorded_while_the_minion_of_the_masters_host_is_away(cluster: Fleet) -> None:
    set_up(cluster, WEB3)
    node = cluster.nodes[2]
    with cluster.silent(cluster.master):
        put_event(node, in_config(cluster, WEB3))
        wait_recorded(cluster, WEB3, node)


def test_a_node_may_speak_of_its_own_instances_only(cluster: Fleet) -> None:
    set_up(cluster, WEB3)
    node = cluster.nodes[2]
    put_event(node, in_config(cluster, WEB1))
    put_event(node, {"uuid": "no-such-instance", "name": "web9"})
    put_event(node, in_config(cluster, WEB3))
    wait_for("its own", lambda: admin_state(cluster, WEB3) == ("down", "user"), timeout_s=LONG_S)
    assert admin_state(cluster, WEB1) == ("up", "admin")
    wait_for("the acknowledgement", lambda: len(outbox(node)) == 2, timeout_s=LONG_S)
    assert "web1.example.com is not an instance of node3.example.com" in master_log(cluster)
    found = cluster.run("brine.health", check=False)
    assert found["nodes"][NODES[2]]["not_recorded"] == 2
    node.run(["brine", "outbox", "acknowledge", *(one["id"] for one in outbox(node))])


FORGE = """
import json, sys
import salt.channel.client, salt.config, salt.crypt
opts = salt.config.minion_config("/etc/salt/minion")
opts["master_uri"] = f"tcp://{opts['master']}:{opts['master_port']}"
load = {"cmd": "_minion_event", "id": opts["id"], "events": json.load(sys.stdin)}
load["tok"] = salt.crypt.SAuth(opts).gen_token(b"salt")
with salt.channel.client.ReqChannel.factory(opts) as channel:
    channel.send(load)
"""


def forge(node: Node, events: list[dict[str, Any]]) -> None:
    """Have a node's minion send events. A master takes any tag and any data."""
    node.run(["/opt/salt/bin/python", "-c", FORGE], stdin=json.dumps(events))


def test_an_event_that_another_minion_forges_says_nothing(cluster: Fleet) -> None:
    liar = cluster.nodes[2]
    web1 = in_config(cluster, WEB1)
    event = {"id": "01764000000000000000-0123abcd", "time": 1.0, "kind": "admin-state"}
    event |= {"instance": web1["uuid"], "name": web1["name"]}
    event |= {"data": {"admin_state": "down", "source": "user"}}
    forged = [
        {"tag": f"salt/beacon/{minion}/brine/", "data": {"outbox": told}}
        for minion, told in (
            (NODES[0], [event]),
            (NODES[0], "text"),
            ("*", [event]),
            ("..", [event]),
            ('"}}{{ 1/0 }}', [event]),
            ("node9.example.com", [event]),
        )
    ]
    forge(liar, forged)
    wait_for(
        "the master to hear of it",
        lambda: "node9.example.com is no node of the cluster" in master_log(cluster),
        timeout_s=LONG_S,
    )
    # What comes after it still works.
    set_up(cluster, WEB3)
    put_event(liar, in_config(cluster, WEB3))
    wait_recorded(cluster, WEB3, liar)
    assert admin_state(cluster, WEB1) == ("up", "admin")


@pytest.mark.parametrize("said", ['{"a": 1}', '[5, "x", {"id": [], "instance": {}}]', "no JSON"])
def test_a_node_whose_brine_lies_is_refused(cluster: Fleet, said: str) -> None:
    node = cluster.nodes[2]
    brine = "/usr/local/bin/brine"
    node.write(brine, f"#!/bin/sh\ncat <<'END'\n{said}\nEND\n", mode=0o755)
    try:
        told = cluster.run("brine.record", NODES[2], check=False)
    finally:
        node.path(brine).unlink()
    assert told["nodes"][NODES[2]]["recorded"] == 0
    assert told["nodes"][NODES[2]]["refused"]


def test_the_runner_shows_the_whole_cluster(cluster: Fleet) -> None:
    wait_status(cluster.nodes[0], WEB1, "running")
    found = cluster.run("brine.list")
    assert {node: list(instances) for node, instances in found.items()} == {
        NODES[0]: [WEB1],
        NODES[1]: [WEB2],
        NODES[2]: [WEB3],
    }
    assert found[NODES[0]][WEB1] == "running"
    for name in ("web1", WEB1, in_config(cluster, WEB1)["uuid"]):
        assert list(cluster.run("brine.find", name)["nodes"]) == [NODES[0]]
    assert not cluster.run("brine.find", "web9", check=False)["result"]


def test_the_processor_that_all_nodes_have_becomes_the_default(cluster: Fleet) -> None:
    """A guest that starts with it is tied to its node no more."""
    node = cluster.nodes[0]
    wait_status(node, WEB1, "running")
    assert "cpu" in {one["id"] for one in info(node, WEB1)["obstacles"]}

    def comment() -> str:
        told: str = cluster.run("brine.cpu_baseline", check=False)["comment"]
        return told

    wait_for("all to answer", lambda: "brine-cluster" in comment(), timeout_s=LONG_S)
    cluster.master.shell("apt-get install --yes --quiet brine-cluster")
    told = cluster.run("brine.cpu_baseline", "test=True")
    cpu_type, serial = told["cpu_type"], serial_of(cluster.master)
    assert "before" not in told
    told = cluster.run("brine.cpu_baseline")
    assert (told["result"], told["cpu_type"]) == (True, cpu_type)
    assert serial_of(cluster.master) > serial
    for each in cluster.nodes:
        assert f"cpu_type={cpu_type}\n" in each.read("/var/lib/brine/ssconf/ssconf_hvparams_kvm")
    assert info(node, WEB1)["restart_pending"] == ["cpu"]
    node.run(["brine", "instance", "reboot", "--force", WEB1], timeout_s=LONG_S)
    wait_ready(node, WEB1)
    found = info(node, WEB1)
    assert (found["spec"]["cpu"], found["movable"], found["obstacles"]) == (cpu_type, True, [])
    assert "already" in cluster.run("brine.cpu_baseline")["comment"]


def test_health_names_who_does_not_answer(cluster: Fleet) -> None:
    with cluster.silent(cluster.nodes[2]):
        found = cluster.run("brine.health", check=False)
        assert found["not_answered"] == [NODES[2]]
        assert found["nodes"].keys() == {*NODES[:2]}
        serial = json.loads(cluster.master.read(CONFIG))["cluster"]["serial_no"]
        assert found["nodes"][NODES[0]]["serial"] == serial
        assert found["nodes"][NODES[1]]["instances"] == {"USER_down": 1}
        assert cluster.run("brine.list")[NODES[2]] == "has not answered"


def test_a_job_of_several_functions_holds_a_redistribution_up_and_no_more(cluster: Fleet) -> None:
    """Salt itself applies no states meanwhile, and says that its own argument is wrong."""
    node = cluster.nodes[1]
    target, functions = cluster.id_of(node), "test.sleep,test.ping"
    cluster.master.run(["salt", "--async", target, functions, "20", ","])
    wait_for("the job", lambda: "test.sleep" in str(cluster.call("saltutil.running", nodes=[node])))
    told = cluster.run("brine.redistribute")
    # What an event changes meanwhile goes to the other nodes once more.
    assert {*told["nodes"]} >= {*NODES[1:]}
    assert told["result"] is True


def test_a_node_that_is_to_have_no_beacon_loses_it_without_a_restart(cluster: Fleet) -> None:
    node = cluster.nodes[2]
    pid = node.run(["systemctl", "show", "--property=MainPID", "salt-minion"]).stdout
    writer = {"config": {"apply": True}, **declared()}
    give(cluster, node1=writer, node3={"watcher": {"beacon": False}})
    for results in cluster.apply("brine.watcher", nodes=[node]).values():
        assert [one.name for one in results if one.changes]
    beacons = cluster.call("beacons.list", "return_yaml=False", nodes=[node])
    assert beacons == {NODES[2]: {}}
    assert node.run(["systemctl", "show", "--property=MainPID", "salt-minion"]).stdout == pid
