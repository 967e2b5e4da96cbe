"""The cluster's configuration on its way from the Salt master to its nodes, and its key."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lab.errors import LabError
from lab.fleet import Fleet
from lab.node import Node
from lab.waiting import wait_for
from node.fleet_on_node import fleet as bare_fleet
from node.instance_on_node import GUEST, info, wait_status

assert bare_fleet
CONFIG = "/var/lib/brine/config.data"
SSCONF = "/var/lib/brine/ssconf"
KEY_FILE = "/etc/brine/hmac.key"
KEYS = "/etc/brine/salt/keys.json"
PASSWORDS = "/etc/brine/vnc"
USERS = "/etc/brine/users"
SECRETS = {"web2": "Zs7qV-w2", "web3": "Zs7qV-w3"}  # VNC takes 8 bytes
IDS = [f"node{number}.example.com" for number in (1, 2, 3)]
# A load: one request after the other, to each candidate in turn, as long as the file is there.
LOAD = """\
touch /run/load; : >/run/failed
while [ -e /run/load ]; do
    for ip in 192.0.2.1 192.0.2.2; do
        brine confd query ping --peer $ip --json >/run/said 2>&1 || cat /run/said >>/run/failed
        echo >>/run/asked
    done
done
"""

# A brine whose exports lack the end of the configuration.
CUTTER = """\
#!/bin/sh
[ "$2" = export-node ] || exec /usr/bin/brine "$@"
/usr/bin/brine "$@" | python3 -c "
import json, sys
exported = json.load(sys.stdin)
exported['configuration'] = exported['configuration'][:-9]
print(json.dumps(exported))"
"""


def declared(
    *, candidates: int = 2, passwords: tuple[int, ...] = (2, 3), **web2: Any
) -> dict[str, Any]:
    """The cluster: three nodes, some of them candidates, and an instance on each but the first.

    :param passwords: which instances have a VNC password.
    """
    guest = {"kvm_flag": "disabled", "kernel_path": f"{GUEST}/kernel", "user_shutdown": True}
    guest |= {"initrd_path": f"{GUEST}/initramfs", "kernel_args": "panic=-1 quiet", "root_path": ""}
    guest |= {"vnc_bind_address": "127.0.0.1"}
    files = {number: f"{PASSWORDS}/web{number}" for number in passwords}
    instances = {
        f"web{number}": {
            "primary_node": IDS[number - 1],
            "admin_state": "up",
            "beparams": {"maxmem": 128, "minmem": 128, "vcpus": 1},
            "hvparams": guest | {"vnc_password_file": files.get(number, "")},
            **(web2 if number == 2 else {}),
        }
        for number in (2, 3)
    }
    nodes = {
        name: {"primary_ip": f"192.0.2.{number}", "master_candidate": number <= candidates}
        for number, name in enumerate(IDS, 1)
    }
    cluster = {"name": "lab.example.com", "master": IDS[0]}
    return {"cluster": cluster, "nodes": nodes, "instances": instances}


def give(fleet: Fleet, **changed: Any) -> None:
    """Declare the cluster on its writer, the master's host."""
    fleet.pillar({}, node1={"brine": {"config": {"apply": True}, **declared(**changed)}})


def redistribute(fleet: Fleet, *arguments: str) -> dict[str, Any]:
    """`salt-run brine.redistribute`."""
    told: dict[str, Any] = fleet.run("brine.redistribute", *arguments, check=False)
    return told


def rotate(fleet: Fleet) -> dict[str, Any]:
    """`salt-run brine.rotate_key`."""
    told: dict[str, Any] = fleet.run("brine.rotate_key", check=False)
    return told


@pytest.fixture(scope="module")
def fleet(bare_fleet: Fleet) -> Iterator[Fleet]:
    """A cluster, all of whose nodes have what they should, and all events of whose master are kept.

    Its key is the runner's.
    """
    master = bare_fleet.master
    options = bare_fleet.master.read("/etc/salt/master.d/lab.conf")
    with_files = json.loads(options) | {"ext_pillar": [{"brine": {"files": [USERS]}}]}
    master.write("/etc/salt/master.d/lab.conf", json.dumps(with_files))
    master.run(["systemctl", "restart", "salt-master"], timeout_s=300)
    bare_fleet.wait_answering()
    for name, secret in SECRETS.items():
        master.write(f"{PASSWORDS}/{name}", secret, mode=0o640)
    master.write(USERS, "alice\n")
    master.shell("systemd-run --unit=events sh -c 'exec salt-run state.event >/run/events'")
    give(bare_fleet)
    bare_fleet.apply("brine", nodes=[master])
    assert rotate(bare_fleet)["result"] is True
    told = redistribute(bare_fleet)
    assert told["result"] is True, json.dumps(told, indent=1)
    yield bare_fleet
    master.run(["systemctl", "stop", "events"])


def health(fleet: Fleet) -> dict[str, Any]:
    """`salt-run brine.health`."""
    told: dict[str, Any] = fleet.run("brine.health", check=False)
    return told


def config_of(node: Node) -> str | None:
    """A node's configuration; None if it has none."""
    return node.read(CONFIG) if node.path(CONFIG).exists() else None


def test_each_node_has_its_own_and_no_more(fleet: Fleet) -> None:
    first, second, third = fleet.nodes
    assert config_of(second) == config_of(first) != None  # noqa: E711
    assert config_of(third) is None
    assert second.run(["stat", "--format=%U:%G %a", CONFIG]).stdout == "root:brine 640\n"
    dump = ["sh", "-c", f"cd {SSCONF} && head --lines=-0 --verbose *"]
    assert len({node.run(dump).stdout for node in fleet.nodes}) == 1
    assert third.read(f"{SSCONF}/ssconf_master_candidates") == f"{IDS[0]}\n{IDS[1]}\n"
    for node, name, other in ((second, "web2", "web3"), (third, "web3", "web2")):
        assert node.read(f"{PASSWORDS}/{name}") == SECRETS[name]
        assert node.run(["stat", "--format=%a", f"{PASSWORDS}/{name}"]).stdout == "640\n"
        assert not node.path(f"{PASSWORDS}/{other}").exists()
        assert node.read(USERS) == "alice\n"
        assert info(node, name)["status"] == "running"
        assert not node.path(f"/var/lib/brine/instances/{other}.json").exists()
    assert not first.path("/var/lib/brine/instances/web2.json").exists()
    active = [
        node.run(["systemctl", "is-active", "brine-confd"], check=False).stdout.strip()
        for node in fleet.nodes
    ]
    assert active == ["active", "active", "inactive"]


def test_the_same_again_changes_nothing(fleet: Fleet) -> None:
    told = redistribute(fleet)
    assert [node["changed"] for node in told["nodes"].values()] == [[], [], []]
    for results in fleet.apply("brine").values():
        assert [one for one in results if one.changes] == []


def test_instances_follow_the_configuration(fleet: Fleet) -> None:
    master, second, third = fleet.nodes
    before = config_of(master)
    give(fleet, primary_node=IDS[2])
    with pytest.raises(LabError, match="can't change while the instance is up on"):
        fleet.apply("brine.config", nodes=[master])
    assert config_of(master) == before
    give(fleet, admin_state="down")
    told = redistribute(fleet, "test=True")
    assert told["result"] is True
    give(fleet, admin_state="offline")
    assert "brine-instances-from-config" in redistribute(fleet)["nodes"][IDS[1]]["changed"]
    wait_status(second, "web2", "ADMIN_offline")
    give(fleet, primary_node=IDS[2])
    assert redistribute(fleet)["result"] is True
    wait_status(third, "web2", "running")
    assert info(second, "web2")["status"] == "ADMIN_offline"
    give(fleet, primary_node=IDS[2], admin_state="down")
    assert redistribute(fleet)["result"] is True
    give(fleet)
    assert redistribute(fleet)["result"] is True
    wait_status(second, "web2", "running")
    assert info(third, "web2")["status"] == "ADMIN_offline"


def test_a_node_that_is_not_the_master_makes_no_configuration(fleet: Fleet) -> None:
    master, second, _ = fleet.nodes
    writer = {"brine": {"config": {"apply": True}, **declared()}}
    fleet.pillar({}, node1=writer, node2=writer)
    for state in ("brine.config", "brine"):
        with pytest.raises(LabError, match="only the master's host makes the configuration"):
            fleet.apply(state, nodes=[second])
    assert config_of(second) == config_of(master)
    give(fleet)


def test_a_password_that_a_node_needs_no_more_is_removed_there(fleet: Fleet) -> None:
    first, second, _ = fleet.nodes
    give(fleet, passwords=(3,))
    redistribute(fleet)
    assert not second.path(f"{PASSWORDS}/web2").exists()
    assert first.path(f"{PASSWORDS}/web2").exists()
    give(fleet)
    redistribute(fleet)
    assert second.read(f"{PASSWORDS}/web2") == SECRETS["web2"]


def test_an_offline_node_is_named_and_catches_up(fleet: Fleet) -> None:
    first, second, _ = fleet.nodes
    give(fleet, tags=["away"])
    with fleet.silent(second):
        told = redistribute(fleet, "timeout=10")
        assert (told["result"], told["not_answered"]) == (False, [IDS[1]])
        assert config_of(second) != config_of(first)
    assert redistribute(fleet)["result"] is True
    assert config_of(second) == config_of(first)


def test_a_new_candidate_gets_all_and_a_former_one_loses_it(fleet: Fleet) -> None:
    first, _, third = fleet.nodes
    give(fleet, candidates=3)
    assert redistribute(fleet)["result"] is True
    assert config_of(third) == config_of(first)
    assert third.run(["systemctl", "is-active", "brine-confd"]).stdout == "active\n"
    give(fleet)
    assert redistribute(fleet)["result"] is True
    assert config_of(third) is None
    assert len(list(third.path("/var/lib/brine").glob("config.data.former-*"))) == 1
    shown = third.run(["systemctl", "is-active", "brine-confd"], check=False).stdout
    assert shown == "inactive\n"
    third.shell("rm /var/lib/brine/config.data.former-*")


def test_a_transfer_cut_short_replaces_nothing(fleet: Fleet) -> None:
    first, second, _ = fleet.nodes
    before = config_of(second)
    give(fleet, tags=["cut"])
    wrapper = "/usr/local/bin/brine"
    first.write(wrapper, CUTTER, mode=0o755)
    told = redistribute(fleet)
    assert told["result"] is False
    (failed, *_) = told["nodes"][IDS[1]]["failed"]
    assert "the master's configuration is refused" in failed
    assert config_of(second) == before
    assert second.shell("find /var/lib/brine -name '*.salt-new'") == ""
    first.path(wrapper).unlink()
    assert redistribute(fleet)["result"] is True
    assert config_of(second) == config_of(first)


@contextmanager
def load(node: Node) -> Iterator[None]:
    """Have a node ask the daemons meanwhile; none of its requests may fail."""
    node.write("/run/load.sh", LOAD)
    node.run(["systemd-run", "--unit=load", "sh", "/run/load.sh"])
    wait_for("requests", node.path("/run/asked").exists, timeout_s=60)
    yield
    node.path("/run/load").unlink()
    wait_for(
        "the load to end",
        lambda: node.run(["systemctl", "is-active", "load"], check=False).stdout != "active\n",
        timeout_s=60,
    )
    assert node.read("/run/failed") == ""


def keys_of(fleet: Fleet) -> set[str]:
    """The keys that nodes have; with a word on those that have a previous one, too."""
    previous = [node for node in fleet.nodes if node.path(f"{KEY_FILE}.previous").exists()]
    return {node.read(KEY_FILE) for node in fleet.nodes} | {f"{node} has two" for node in previous}


def test_a_rotation_under_load_loses_no_request(fleet: Fleet) -> None:
    (old,) = keys_of(fleet)
    with load(fleet.nodes[2]), load(fleet.nodes[1]):
        told = rotate(fleet)
    assert told["result"] is True, told
    (new,) = keys_of(fleet)
    assert new != old
    assert fleet.master.run(["stat", "--format=%U %a", KEYS]).stdout == "root 600\n"


def test_a_rotation_stops_where_a_node_is_away_and_continues_also_after_a_kill(
    fleet: Fleet,
) -> None:
    (old,) = keys_of(fleet)
    with fleet.silent(fleet.nodes[2]):
        told = fleet.run("brine.rotate_key", "timeout=10", check=False)
        assert [*told["not_confirmed"]] == [IDS[2]]
        assert fleet.master.read(KEY_FILE) == old
    master = fleet.master
    master.run(["systemd-run", "--unit=rotation", "salt-run", "brine.rotate_key"])
    wait_for(
        "the next step",
        lambda: json.loads(master.read(KEYS))["step"] != "accept",
        timeout_s=300,
    )
    master.run(["systemctl", "kill", "--signal=KILL", "rotation"])
    wait_for("all runs to end", lambda: rotate(fleet)["result"] is True, timeout_s=300)
    (new,) = keys_of(fleet)
    assert new != old


def test_health_sees_a_daemon_that_was_stopped(fleet: Fleet) -> None:
    redistribute(fleet)
    assert fleet.run("brine.health")["result"] is True
    fleet.nodes[1].run(["systemctl", "stop", "brine-confd"])
    told = fleet.run("brine.health", check=False)
    assert (told["result"], told["stale"]) == (False, {IDS[1]: ["brine-confd.service"]})
    figures = fleet.run("brine.metrics").splitlines()
    assert f"brine_cluster_nodes {len(IDS)}" in figures
    assert "brine_cluster_nodes_away 0" in figures
    assert "brine_cluster_serials_apart 0" in figures
    assert figures[-1] == "# EOF"
    redistribute(fleet)
    assert fleet.run("brine.health")["result"] is True


def test_secrets_are_nowhere_but_in_the_masters_pillar_cache(fleet: Fleet) -> None:
    redistribute(fleet, "test=True")
    master = fleet.master
    keys = [one for one in json.loads(master.read(KEYS)).values() if len(one) > 32]
    secrets = [*SECRETS.values(), *keys, *(one.strip() for one in keys_of(fleet))]
    # As they are in pillar, but for the last bytes.
    secrets += [base64.b64encode(one.encode()).decode()[:-4] for one in SECRETS.values()]
    patterns = "\n".join(secrets)
    for node in fleet.nodes:
        node.write("/run/secrets", patterns, mode=0o600)
        places = "/var/cache/salt /var/log /run/salt /etc/salt /tmp /var/tmp /run/log /srv"
        places += " /run/events" if node is master else ""
        search = f"grep -rlaF -f /run/secrets {places} 2>/dev/null || true"
        found = [Path(one) for one in node.shell(search).split()]
        found += [Path("journal")] * int(
            node.shell("journalctl --no-pager -o export | grep -caF -f /run/secrets || true")
        )
        cache = Path("/var/cache/salt/master/pillar")
        others = [one for one in found if not (node is master and cache in one.parents)]
        assert others == []
    assert "salt/job/" in master.read("/run/events")


def cleaned(fleet: Fleet) -> None:
    """Have no node have anything of Brine's but what its guests need to come back."""
    for node, name in ((fleet.nodes[1], "web2"), (fleet.nodes[2], "web3")):
        node.run(["brine", "instance", "stop", "--force", name], timeout_s=300)
    fleet.apply("brine.clean")


def runs(node: Node, name: str) -> bool:
    """Whether an instance runs; the node may have no command to tell."""
    said = node.run(["brine", "instance", "info", name, "--json"], check=False).stdout
    return bool(json.loads(said or "{}").get("status") == "running")


@pytest.mark.parametrize(
    "reinstalled",
    [
        pytest.param(False, id="cleaned"),
        pytest.param(True, id="master reinstalled", marks=pytest.mark.long),
    ],
)
def test_after_a_clean_one_run_on_all_nodes_brings_all_back(
    fleet: Fleet, reinstalled: bool
) -> None:
    master, second, third = fleet.nodes
    give(fleet)
    redistribute(fleet)
    before = config_of(master)
    cleaned(fleet)
    for node, name in ((second, "web2"), (third, "web3")):
        assert not node.path(f"{PASSWORDS}/{name}").exists()
        assert not node.path(PASSWORDS).exists()
    assert master.read(f"{PASSWORDS}/web2") == SECRETS["web2"]  # the master's own
    assert config_of(master) == before
    if reinstalled:
        master.shell(f"find /var/lib/brine -mindepth 1 ! -path {CONFIG} -delete")
        master.shell("rm -r /var/cache/salt/master/brine")
    # All at once: the other nodes' pillar is rendered while the master's host has no brine.
    fleet.apply("brine")
    for node, name in ((second, "web2"), (third, "web3")):
        wait_for(f"{name} to run", partial(runs, node, name), timeout_s=600)
        assert node.read(f"{PASSWORDS}/{name}") == SECRETS[name]
    wait_for("all to be well", lambda: health(fleet)["result"] is True, timeout_s=600)
