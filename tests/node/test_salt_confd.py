"""The Salt states of the configuration and its daemon."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from lab.errors import LabError
from lab.ganeti_config import ganeti_config, instance_ip, node_ip
from lab.node import Node, boot_node
from lab.repository import publish
from lab.salt import STATES, StateResult, apply_state, give_states
from lab.waiting import wait_for
from node.confd_on_node import (
    CONFIG,
    KEY_FILE,
    PREVIOUS_KEY_FILE,
    SERVICE,
    WEB1,
    confd_pid,
    declared,
    home_of,
    status,
)

SELF = ("--peer", "127.0.0.1")
SETTINGS = "/etc/brine/confd.toml"
DROP_IN = f"/etc/systemd/system/{SERVICE}.d/salt.conf"
SECRET = "00112233445566778899aabbccddeeff"
NEXT_SECRET = "ffeeddccbbaa99887766554433221100"


def pillar(**confd: Any) -> dict[str, Any]:
    """The pillar of the cluster's master, with its daemon."""
    return {"confd": {"key": SECRET, **confd}, "config": {"apply": True}, **declared()}


@pytest.fixture(scope="module")
def bare(release: str, packages: list[Path]) -> Iterator[Node]:
    """A node that knows where the packages are, and has none."""
    with boot_node(release) as node:
        publish(node, packages)
        yield node


@pytest.fixture
def node(bare: Node) -> Node:
    """The same node, wired as the master."""
    give_states(bare, {"brine": pillar()})
    apply_state(bare)
    return bare


def applied(node: Node, brine: Mapping[str, Any], *, test: bool = False) -> dict[str, StateResult]:
    """Apply another pillar, and return what was changed, or would be, by name."""
    give_states(node, {"brine": brine})
    results = apply_state(node, test=test)
    return {one.name: one for one in results if one.result is None or one.changes}


def test_test_mode_says_what_it_would_do_and_does_nothing(bare: Node) -> None:
    would = applied(bare, pillar(), test=True)
    assert {KEY_FILE, SERVICE, "brine-config-applied"} <= would.keys()
    assert not bare.path("/usr/sbin/brine-confd").exists()
    assert not bare.path("/var/lib/brine").exists()


def test_first_run_makes_a_node_answer_and_the_second_changes_nothing(bare: Node) -> None:
    done = applied(bare, pillar(settings={"workers": 2, "bind": "0.0.0.0"}))
    assert "/instances/web1.example.com" in done["brine-config-applied"].changes
    assert SECRET not in json.dumps([one.changes for one in done.values()])
    assert bare.read(KEY_FILE) == f"{SECRET}\n"
    assert bare.run(["stat", "--format=%U:%G %a", KEY_FILE]).stdout == "root:root 600\n"
    assert bare.run(["stat", "--format=%U:%G %a", CONFIG]).stdout == "root:brine 640\n"
    assert "2 workers on 0.0.0.0:1814" in status(bare)
    assert home_of(bare, WEB1, *SELF) == "192.0.2.1"
    candidates = bare.read("/var/lib/brine/ssconf/ssconf_master_candidates_ips")
    assert candidates.split() == ["192.0.2.1", "192.0.2.2"]

    serial = status(bare)
    again = pillar(settings={"workers": 2, "bind": "0.0.0.0"})
    assert applied(bare, again) == {}
    assert applied(bare, again, test=True) == {}
    assert status(bare).partition(":")[0] == serial.partition(":")[0]


@pytest.mark.parametrize("test", [False, True])
def test_a_moved_instance_is_answered_for(node: Node, test: bool) -> None:
    moved = {**pillar(), **declared(web1="node2")}
    done = applied(node, moved, test=test)
    pointer = "/instances/web1.example.com/primary_node"
    change = {"old": "node1.example.com", "new": "node2.example.com"}
    assert done["brine-config-applied"].changes[pointer] == change
    home = "192.0.2.1" if test else "192.0.2.2"
    wait_for("the answer", lambda: home_of(node, WEB1, *SELF) == home)


def test_what_pillar_no_longer_names_goes_with_prune_only(node: Node) -> None:
    without = pillar()
    del without["instances"]["db1.example.com"]
    assert applied(node, without) == {}
    without["config"] = {"apply": True, "prune": True}
    done = applied(node, without)
    assert done["brine-config-applied"].changes.keys() >= {"/instances/db1.example.com"}
    without["instances"] = {}
    assert applied(node, without) == {}


@pytest.mark.parametrize("test", [False, True])
def test_mistakes_in_pillar_change_nothing(node: Node, test: bool) -> None:
    before = node.read(CONFIG)
    mistaken = pillar()
    mistaken["instances"]["web1.example.com"]["nics"] = [{"ip": "198.51.100.700"}]
    with pytest.raises(LabError, match=r"198\.51\.100\.700"):
        applied(node, mistaken, test=test)
    with pytest.raises(LabError, match="the nearest is instances"):
        applied(node, {**pillar(), "instancs": {}}, test=test)
    with pytest.raises(LabError, match="the nearest is workers"):
        applied(node, pillar(settings={"worker": 2}), test=test)
    assert node.read(CONFIG) == before
    assert not node.path(SETTINGS).exists()
    assert home_of(node, WEB1, *SELF) == "192.0.2.1"


@pytest.mark.parametrize("keys", [{"key": " "}, {"previous_key": " "}], ids=["key", "previous"])
def test_a_blank_key_is_refused_and_the_old_one_stays(node: Node, keys: dict[str, str]) -> None:
    pid = confd_pid(node)
    for test in (True, False):
        with pytest.raises(LabError, match="is blank"):
            applied(node, pillar(**keys), test=test)
    assert node.read(KEY_FILE) == f"{SECRET}\n"
    assert not node.path(PREVIOUS_KEY_FILE).exists()
    assert home_of(node, WEB1, *SELF) == "192.0.2.1"
    assert confd_pid(node) == pid


def test_a_reload_with_a_blank_key_fails_and_the_daemon_keeps_its_own(node: Node) -> None:
    pid = confd_pid(node)
    node.write(KEY_FILE, " \n", mode=0o600)
    assert node.run(["systemctl", "reload", SERVICE], check=False).returncode != 0
    node.write(KEY_FILE, f"{SECRET}\n", mode=0o600)
    assert home_of(node, WEB1, *SELF) == "192.0.2.1"
    assert confd_pid(node) == pid


def test_the_key_is_replaced_by_reloads(node: Node) -> None:
    pid = confd_pid(node)
    for keys in (
        {"key": SECRET, "previous_key": NEXT_SECRET},
        {"key": NEXT_SECRET, "previous_key": SECRET},
        {"key": NEXT_SECRET},
    ):
        done = applied(node, pillar(**keys))
        assert not any(
            secret in json.dumps(one.changes)
            for one in done.values()
            for secret in (SECRET, NEXT_SECRET)
        )
        assert confd_pid(node) == pid
        assert home_of(node, WEB1, *SELF) == "192.0.2.1"
    assert node.read(KEY_FILE) == f"{NEXT_SECRET}\n"
    assert not node.path(PREVIOUS_KEY_FILE).exists()


def test_a_reload_that_failed_is_tried_again(node: Node) -> None:
    drop_in = f"/run/systemd/system/{SERVICE}.d"
    node.write(f"{drop_in}/fails.conf", "[Service]\nExecReload=\nExecReload=/bin/false\n")
    node.run(["systemctl", "daemon-reload"])
    more = pillar(settings={"workers": 2})
    with pytest.raises(LabError, match="try-reload-or-restart"):
        applied(node, more)
    node.shell(f"rm -r {drop_in}; systemctl daemon-reload")
    assert applied(node, more).keys()
    wait_for("2 workers", lambda: "2 workers" in status(node))
    assert applied(node, more) == {}

    # Nor is one forgotten that the run did not get to.
    mistaken = pillar(key=NEXT_SECRET, settings={"workers": 2, "bind": "everywhere"})
    with pytest.raises(LabError, match="must be IP addresses"):
        applied(node, mistaken)
    applied(node, pillar(key=NEXT_SECRET, settings={"workers": 2}))
    assert home_of(node, WEB1, *SELF) == "192.0.2.1"


def test_other_candidates_and_other_nodes_get_copies(node: Node) -> None:
    """From wherever the site puts them; here, from the minion's own file roots."""
    applied(node, pillar())
    node.shell(f"""
        mkdir -p {STATES}/cluster
        cp {CONFIG} {STATES}/cluster/config.data
        cp -r /var/lib/brine/ssconf {STATES}/cluster/ssconf
        rm -rf {CONFIG} /var/lib/brine/config.versions/* /var/lib/brine/ssconf
        # Where Salt remembers for a while which files there are.
        rm -rf /var/cache/salt/minion/file_lists
    """)
    confd = {"key": SECRET}
    candidate = {"confd": confd, "config": {"source": "salt://cluster/config.data"}}
    applied(node, candidate)
    assert node.run(["stat", "--format=%U:%G %a", CONFIG]).stdout == "root:brine 640\n"
    wait_for("the answer", lambda: home_of(node, WEB1, *SELF) == "192.0.2.1")
    assert node.path("/var/lib/brine/ssconf/ssconf_master_node").exists()
    assert applied(node, candidate) == {}

    copy, now = node.read(f"{STATES}/cluster/config.data"), node.read(CONFIG)
    older = json.loads(copy)
    older["cluster"]["serial_no"] -= 1
    for text, said in ((json.dumps(older), "is older than"), (copy[:-20], "not valid JSON")):
        node.write(f"{STATES}/cluster/config.data", text)
        with pytest.raises(LabError, match=said):
            applied(node, candidate)
        assert node.read(CONFIG) == now
    both = {"source": "salt://cluster/config.data", "apply": True}
    with pytest.raises(LabError, match="brine:config has both apply and source"):
        applied(node, {**candidate, "config": both}, test=True)

    node.shell(f"rm -rf {CONFIG} /var/lib/brine/config.versions/* /var/lib/brine/ssconf")
    other = {
        "confd": {"key": SECRET, "daemon": False},
        "config": {"ssconf_source": "salt://cluster/ssconf"},
    }
    applied(node, other)
    assert node.read("/var/lib/brine/ssconf/ssconf_master_node") == "node1.example.com\n"
    assert not node.path(CONFIG).exists()
    assert confd_pid(node) == 0
    enabled = node.run(["systemctl", "is-enabled", SERVICE], check=False).stdout.strip()
    assert enabled == "disabled"
    assert node.read(KEY_FILE) == f"{SECRET}\n"
    assert applied(node, other) == {}


def test_in_the_place_of_ganetis_daemon(node: Node) -> None:
    ganeti = "/var/lib/ganeti"
    node.write(f"{ganeti}/config.data", json.dumps(ganeti_config()), mode=0o600)
    node.write(f"{ganeti}/hmac.key", "ganeti's own\n", mode=0o400)
    files = {"config_file": f"{ganeti}/config.data", "key_file": f"{ganeti}/hmac.key"}
    brine = {"confd": {"enabled": True, "root_only": True, "settings": files}}
    applied(node, brine)
    wait_for("the answer", lambda: home_of(node, instance_ip(2), *SELF) == node_ip(2))
    assert node.read(f"{ganeti}/hmac.key") == "ganeti's own\n"
    assert applied(node, brine) == {}
    node.run(["systemctl", "reload", SERVICE])
    node.shell(f"test -e /etc/shadow; ! nsenter -t {confd_pid(node)} -m test -e /etc/shadow")

    applied(node, {"confd": {"enabled": True}})
    assert not node.path(DROP_IN).exists()
    assert not node.path(SETTINGS).exists()
    assert node.read(KEY_FILE) == f"{SECRET}\n"


def test_a_node_that_is_to_have_no_daemon_loses_it(node: Node) -> None:
    brine = pillar(enabled=False)
    applied(node, brine)
    assert not node.path("/usr/sbin/brine-confd").exists()
    assert not node.path(KEY_FILE).exists()
    assert node.path(CONFIG).exists()
    assert applied(node, brine) == {}


def test_a_key_that_pillar_does_not_have_is_left(node: Node) -> None:
    applied(node, {"confd": {"enabled": True}})
    applied(node, {"confd": {"enabled": False}})
    assert node.read(KEY_FILE) == f"{SECRET}\n"
    assert node.shell("find /usr -xdev -name '*brine-confd*'") == ""


def test_a_daemon_without_a_key_is_told_how_to_get_one(node: Node) -> None:
    node.path(KEY_FILE).unlink()
    for test in (True, False):
        with pytest.raises(LabError) as refused:
            applied(node, {"confd": {"enabled": True}}, test=test)
        lines = str(refused.value).splitlines()[1:]
        (said,) = [line for line in lines if "requisite failed" not in line]
        assert "brine-confd is enabled and has no key" in said
        assert '"openssl rand -hex 32" makes the key of a new cluster' in said
    done = applied(node, {"confd": {"enabled": True, "daemon": False}})
    assert SERVICE in done


def test_one_that_was_installed_by_hand_is_left_as_it_is(node: Node) -> None:
    node.run(["systemctl", "disable", "--now", SERVICE])
    node.write(SETTINGS, "workers = 2\n")
    assert applied(node, {"hotplug": {"gc": True}}) == {}
    assert node.read(SETTINGS) == "workers = 2\n"
    enabled = node.run(["systemctl", "is-enabled", SERVICE], check=False).stdout
    assert enabled == "disabled\n"

    # But on a node that is no master candidate any more.
    node.run(["systemctl", "enable", "--now", SERVICE])
    former = {"candidate": False, "serial": 1, "configuration": ""}
    assert applied(node, {"distributed": former}).keys() == {CONFIG, SERVICE}
    assert confd_pid(node) == 0
    assert (node.read(SETTINGS), node.read(KEY_FILE)) == ("workers = 2\n", f"{SECRET}\n")
    assert applied(node, {"distributed": former}) == {}
    node.shell(f"mv {CONFIG}.former-* {CONFIG}")


def test_clean_undoes_it(node: Node) -> None:
    apply_state(node, "brine.clean")
    assert all(not one.changes for one in apply_state(node, "brine.clean"))
    left = node.shell("find /etc /usr /run -xdev -name '*brine*' -not -name '*brine-lab*'")
    assert left == ""
    assert {path.name for path in node.path("/var/lib/brine").iterdir()} == {"config.data"}
