"""Configuration daemons of several nodes, asked over a real network."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from lab.network import bridge, give_addresses
from lab.node import Node, boot_nodes
from lab.repository import publish
from node.confd_on_node import (
    CONFIG,
    KEY,
    KEY_FILE,
    NODES,
    OTHER_KEY,
    PREVIOUS_KEY_FILE,
    SERVICE,
    WEB1,
    apply,
    ask,
    declared,
    home_of,
    install_confd,
    start_confd,
    status,
    upgrade_confd,
    wait_serial,
)


@pytest.fixture(scope="module")
def cluster(release: str, packages: list[Path]) -> Iterator[list[Node]]:
    """Three nodes with the daemon installed: the master, another candidate, and one more.

    The last one has no configuration; what it knows of the cluster are ssconf's values.
    """
    with ExitStack() as stack:
        network = stack.enter_context(bridge())
        nodes = stack.enter_context(boot_nodes(release, NODES, network_bridge=network))
        for number, (node, address) in enumerate(zip(nodes, NODES.values(), strict=True), start=1):
            give_addresses(node, f"{address}/24", f"2001:db8::{number}/64")
        with ThreadPoolExecutor(len(nodes)) as pool:
            list(pool.map(lambda node: install_confd(node, packages), nodes))
        yield nodes


@pytest.fixture
def fresh(cluster: list[Node]) -> list[Node]:
    """The same with one key, one configuration on both candidates, and daemons answering."""
    master, candidate, other = cluster
    apply(master, declared())
    copy_config(master, candidate)
    shutil.copytree(
        master.path("/var/lib/brine/ssconf"),
        other.path("/var/lib/brine/ssconf"),
        dirs_exist_ok=True,
    )
    for node in (master, candidate):
        start_confd(node)
        wait_serial(node)
    other.write(KEY_FILE, KEY, mode=0o600)
    other.path(PREVIOUS_KEY_FILE).unlink(missing_ok=True)
    return cluster


def copy_config(source: Node, target: Node) -> None:
    """Copy the configuration whole, as rsync(1) or Salt do."""
    new = target.path(f"{CONFIG}.copied")
    new.write_bytes(source.path(CONFIG).read_bytes())
    target.shell(f"chown root:brine {CONFIG}.copied; chmod 0640 {CONFIG}.copied")
    target.run(["mv", f"{CONFIG}.copied", CONFIG])


def test_any_node_is_told_where_an_instance_is(fresh: list[Node]) -> None:
    for node in fresh:
        said = ask(node, "node-ip-of-instance-ip", WEB1)
        assert (said["answer"], said["exit"], said["enough"]) == ("192.0.2.1", 0, True)
        assert {reply["peer"] for reply in said["replies"]} == {"192.0.2.1", "192.0.2.2"}


@pytest.mark.parametrize("peer", ["192.0.2.1", "2001:db8::1", "[2001:db8::2]:1814"])
def test_over_ipv4_and_ipv6(fresh: list[Node], peer: str) -> None:
    *_, other = fresh
    assert home_of(other, WEB1, "--peer", peer) == "192.0.2.1"


def test_a_stale_candidate_is_outvoted_until_it_has_the_news(fresh: list[Node]) -> None:
    master, candidate, other = fresh
    apply(master, declared(web1="node2"))
    wait_serial(master)
    said = ask(other, "node-ip-of-instance-ip", WEB1, "--coverage", "all")
    assert said["answer"] == "192.0.2.2"
    assert {reply["peer"]: reply["standing"] for reply in said["replies"]} == {
        "192.0.2.1": "newest",
        "192.0.2.2": "stale",
    }
    copy_config(master, candidate)
    wait_serial(candidate)
    said = ask(other, "node-ip-of-instance-ip", WEB1, "--coverage", "all")
    assert [reply["answer"] for reply in said["replies"]] == ["192.0.2.2", "192.0.2.2"]
    assert {reply["serial"] for reply in said["replies"]} == {said["serial"]}


def test_a_copy_from_before_is_refused(fresh: list[Node]) -> None:
    master, candidate, other = fresh
    apply(master, declared(web1="node2"))
    wait_serial(master)
    newest = json.loads(master.read(CONFIG))["cluster"]["serial_no"]
    copy_config(candidate, master)
    said = ask(other, "cluster-master", "--peer", "192.0.2.1")
    assert said["serial"] == newest


def test_the_others_answer_for_a_node_that_is_down(fresh: list[Node]) -> None:
    master, _, other = fresh
    master.run(["systemctl", "stop", SERVICE])
    said = ask(other, "node-ip-of-instance-ip", WEB1, "--timeout", "2")
    assert said["answer"] == "192.0.2.1"
    # One of two is fewer than are needed to be sure that it is the newest.
    assert (said["enough"], said["exit"]) == (False, 4)


def ask_everywhere(nodes: list[Node]) -> None:
    """Every node is answered by both candidates."""
    for node in nodes:
        said = ask(node, "node-ip-of-instance-ip", WEB1, "--coverage", "all")
        assert (said["answer"], said["exit"], len(said["replies"])) == ("192.0.2.1", 0, 2)


def test_a_key_is_replaced_while_everybody_asks(fresh: list[Node]) -> None:
    """The steps of brine-confd(8): not one question is without its answer."""
    first, *others = fresh
    first.run(["brine", "confd", "new-key", "--replace"])
    _reload(first)
    ask_everywhere(fresh)
    for node in others:
        for file in (KEY_FILE, PREVIOUS_KEY_FILE):
            node.write(file, first.read(file), mode=0o600)
        _reload(node)
        ask_everywhere(fresh)
    for node in fresh:
        node.path(PREVIOUS_KEY_FILE).unlink()
        _reload(node)
        ask_everywhere(fresh)

    # Nor does a restart bring the old key back.
    for restarted in (False, True):
        for node in fresh[:2] if restarted else ():
            node.run(["systemctl", "restart", SERVICE])
        other = fresh[-1]
        other.write("/run/old.key", KEY, mode=0o600)
        said = ask(other, "cluster-master", "--key", "/run/old.key", "--timeout", "1")
        assert (said["exit"], said["replies"]) == (3, [])
        ask_everywhere(fresh)


def test_a_key_is_replaced_for_clients_that_have_one(fresh: list[Node]) -> None:
    """With the step before: first all nodes accept the next key, then the first one uses it."""
    for node in fresh:
        node.write(PREVIOUS_KEY_FILE, OTHER_KEY, mode=0o600)
        _reload(node)
    asker = fresh[-1]
    for number, key in enumerate([KEY, OTHER_KEY]):
        asker.write(f"/run/{number}.key", key, mode=0o600)
    for node in fresh:
        node.write(KEY_FILE, OTHER_KEY, mode=0o600)
        node.write(PREVIOUS_KEY_FILE, KEY, mode=0o600)
        _reload(node)
        for file in ("/run/0.key", "/run/1.key"):
            said = ask(asker, "cluster-master", "--coverage", "all", "--key", file)
            assert (said["exit"], len(said["replies"])) == (0, 2)


def _reload(node: Node) -> None:
    """A node without a configuration has no daemon that runs."""
    if "serial" in status(node):
        node.run(["systemctl", "reload", SERVICE])


def test_an_upgrade_under_questions(fresh: list[Node], next_packages: list[Path]) -> None:
    master, _, other = fresh
    publish(master, next_packages)
    with ThreadPoolExecutor(1) as pool:
        upgrade = pool.submit(upgrade_confd, master)
        answers = []
        while not upgrade.done():
            # Where the daemon is restarted, the other candidate's answers.
            answers.append(home_of(other, WEB1))
        upgrade.result()
    answers.append(home_of(other, WEB1, "--peer", "192.0.2.1"))
    assert set(answers) == {"192.0.2.1"}
    shown = master.run(["dpkg-query", "--show", "--showformat=${Version}", "brine-confd"])
    assert shown.stdout.endswith("+next")
