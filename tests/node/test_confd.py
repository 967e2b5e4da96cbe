"""The configuration daemon of one node, under a real systemd."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lab.command import CommandError
from lab.ganeti_config import ganeti_config, instance_ip, node_ip
from lab.node import Node, boot_node
from lab.waiting import wait_for
from node.confd_on_node import (
    CONFIG,
    KEY,
    KEY_FILE,
    SERVICE,
    WEB1,
    apply,
    confd_pid,
    declared,
    home_of,
    install_confd,
    start_confd,
    status,
    wait_another,
    wait_serial,
    workers,
)

SELF = ("--peer", "127.0.0.1")
EXAMPLES = "/usr/share/doc/brine-confd/examples"
DROP_INS = f"/etc/systemd/system/{SERVICE}.d"
_SYS_RESOURCE = 1 << 24


@pytest.fixture(scope="module")
def installed(release: str, packages: list[Path]) -> Iterator[Node]:
    """A node with the daemon installed, and nothing else done."""
    with boot_node(release) as node:
        install_confd(node, packages)
        yield node


@pytest.fixture
def node(installed: Node) -> Node:
    """The same node with a key, a configuration, and the daemon answering from it."""
    apply(installed, declared())
    start_confd(installed)
    wait_serial(installed)
    return installed


@contextmanager
def drop_in(node: Node, text: str) -> Iterator[None]:
    """Other settings for the unit, as an administrator would make them."""
    path = f"/run/systemd/system/{SERVICE}.d/test.conf"
    node.write(path, text)
    node.run(["systemctl", "daemon-reload"])
    node.run(["systemctl", "restart", SERVICE])
    try:
        yield
    finally:
        node.path(path).unlink()
        node.run(["systemctl", "daemon-reload"])


@contextmanager
def settings(node: Node, text: str) -> Iterator[None]:
    """A settings file, which is not read yet."""
    node.write("/etc/brine/confd.toml", text)
    try:
        yield
    finally:
        node.path("/etc/brine/confd.toml").unlink()


def signal_main(node: Node, name: str) -> None:
    """Send a signal to the main process."""
    node.run(["systemctl", "kill", "--kill-whom=main", f"--signal={name}", SERVICE])


def has_ended(node: Node, pid: int) -> bool:
    return not node.path(f"/proc/{pid}").exists()


def test_without_a_key_it_quietly_does_not_run(installed: Node) -> None:
    node = installed
    assert not node.path(KEY_FILE).exists()
    node.run(["systemctl", "start", SERVICE])
    active = node.run(["systemctl", "is-active", SERVICE], check=False).stdout.strip()
    assert active == "inactive"
    assert node.run(["systemctl", "is-enabled", SERVICE]).stdout.strip() == "enabled"
    failed = node.run(["systemctl", "--failed", "--plain", "--no-legend"]).stdout
    assert failed == ""


def test_from_a_new_key_to_an_answer(installed: Node) -> None:
    """As brine-confd(8) says to set it up."""
    node = installed
    made = node.run(["brine", "confd", "new-key"]).stdout
    assert KEY_FILE in made
    node.run(["systemctl", "start", SERVICE])
    assert "TROUBLE: no configuration" in status(node)
    apply(node, declared())
    wait_serial(node)
    query = ["brine", "confd", "query", "node-ip-of-instance-ip", WEB1, *SELF]
    assert node.run(query).stdout == "192.0.2.1\n"
    node.path(KEY_FILE).unlink()


def test_it_sees_the_configuration_and_nothing_else_of_the_node(node: Node) -> None:
    """Its group may read specs, too, and see who runs: it may not."""
    node.write("/var/lib/brine/instances/web1.json", "{}")
    node.shell("chgrp brine /var/lib/brine/instances/web1.json")

    def reads(path: str, *, inside: bool) -> bool:
        user = ["setpriv", "--reuid=brine-confd", "--regid=brine", "--clear-groups"]
        place = ["nsenter", f"--target={confd_pid(node)}", "--mount"] if inside else []
        command = [*place, *user, "ls", "-R", path]
        return node.run(command, check=False).returncode == 0

    assert reads(CONFIG, inside=True)
    for path in ("/var/lib/brine/instances", "/run/brine/marks"):
        assert reads(path, inside=False)
        assert not reads(path, inside=True)


def test_the_key_is_roots_and_comes_as_a_credential(node: Node) -> None:
    owner = node.run(["stat", "--format=%U %a", KEY_FILE]).stdout.strip()
    assert owner == "root 600"
    process = node.read(f"/proc/{confd_pid(node)}/status")
    user = node.run(["id", "--user", "brine-confd"]).stdout.strip()
    assert f"Uid:\t{user}\t{user}\t{user}\t{user}\n" in process
    assert "CapEff:\t0000000000000000\n" in process
    loaded = node.journal(f"_PID={confd_pid(node)}", "BRINE_EVENT=keys-loaded")
    assert "/run/credentials/" in loaded[-1]["MESSAGE"]
    assert KEY.strip() not in json.dumps(node.journal(f"_SYSTEMD_UNIT={SERVICE}"))
    assert home_of(node, WEB1, *SELF) == "192.0.2.1"


def test_a_change_is_answered_from_at_once(node: Node) -> None:
    pid = confd_pid(node)
    apply(node, declared(web1="node2"))
    wait_serial(node)
    assert home_of(node, WEB1, *SELF) == "192.0.2.2"
    assert confd_pid(node) == pid


@pytest.mark.parametrize("damage", ["{", "", '{"version": 3000000}'])
def test_a_corrupt_configuration_is_told_and_not_used(node: Node, damage: str) -> None:
    good = node.read(CONFIG)
    node.path(CONFIG).write_text(damage)
    wait_for("the trouble to be told", lambda: "TROUBLE" in status(node))
    assert CONFIG in status(node)
    assert home_of(node, WEB1, *SELF) == "192.0.2.1"
    records = node.journal(f"_SYSTEMD_UNIT={SERVICE}", "BRINE_EVENT=config-refused")
    assert "the old one stays in use" in records[-1]["MESSAGE"]
    node.path(CONFIG).write_text(good)
    wait_for("the trouble to be over", lambda: "TROUBLE" not in status(node))


def test_a_worker_that_is_killed_is_replaced(node: Node) -> None:
    pid, (worker,) = confd_pid(node), workers(node)
    node.run(["kill", "-KILL", str(worker)])
    wait_for("another worker", lambda: (now := workers(node)) and worker not in now)
    assert home_of(node, WEB1, *SELF) == "192.0.2.1"
    assert confd_pid(node) == pid
    lost = node.journal(f"_SYSTEMD_UNIT={SERVICE}", "BRINE_EVENT=worker-lost")
    assert f"process {worker}" in lost[-1]["MESSAGE"]


def test_a_worker_that_hangs_is_replaced(node: Node) -> None:
    pid, (worker,) = confd_pid(node), workers(node)
    node.run(["kill", "-STOP", str(worker)])
    wait_for("its end", lambda: has_ended(node, worker), timeout_s=60)
    assert home_of(node, WEB1, *SELF) == "192.0.2.1"
    assert confd_pid(node) == pid


def test_a_daemon_that_is_killed_comes_back(node: Node) -> None:
    pid, (worker,) = confd_pid(node), workers(node)
    signal_main(node, "KILL")
    wait_another(node, pid)
    assert home_of(node, WEB1, *SELF) == "192.0.2.1"
    assert has_ended(node, worker)


def test_a_daemon_that_hangs_is_replaced_by_systemd(node: Node) -> None:
    with drop_in(node, "[Service]\nWatchdogSec=10s\n"):
        pid = confd_pid(node)
        signal_main(node, "STOP")
        # Its worker answers meanwhile.
        assert home_of(node, WEB1, *SELF) == "192.0.2.1"
        wait_another(node, pid)
        assert home_of(node, WEB1, *SELF) == "192.0.2.1"


def test_bad_settings_fail_the_reload_and_change_nothing(node: Node) -> None:
    pid = confd_pid(node)
    with settings(node, "prot = 1815\n"):
        with pytest.raises(CommandError):
            node.run(["systemctl", "reload", SERVICE])
        assert "did you mean port?" in str(
            [line["MESSAGE"] for line in node.journal(f"_SYSTEMD_UNIT={SERVICE}")]
        )
    assert confd_pid(node) == pid
    assert home_of(node, WEB1, *SELF) == "192.0.2.1"


def test_a_reload_takes_another_port_and_more_workers(node: Node) -> None:
    pid = confd_pid(node)
    with settings(node, "port = 11814\nworkers = 3\n"):
        node.run(["systemctl", "reload", SERVICE])
        wait_for("three workers", lambda: len(workers(node)) == 3)
        assert home_of(node, WEB1, *SELF) == "192.0.2.1"
        assert "11814" in status(node)
    node.run(["systemctl", "reload", SERVICE])
    wait_for("one worker", lambda: len(workers(node)) == 1)
    assert home_of(node, WEB1, *SELF) == "192.0.2.1"
    assert confd_pid(node) == pid


def test_a_port_that_another_has_is_tried_again(node: Node) -> None:
    node.run(["systemctl", "stop", SERVICE])
    socat = ["socat", "-u", "UDP6-RECV:1814", "OPEN:/dev/null"]
    node.run(["systemd-run", "--quiet", "--unit=taker", *socat])
    wait_for("the port to be taken", lambda: ":1814" in node.shell("ss -uln"))
    with pytest.raises(CommandError):
        node.run(["systemctl", "start", SERVICE])
    wait_for(
        "it to be told",
        lambda: node.journal(f"_SYSTEMD_UNIT={SERVICE}", "BRINE_EVENT=port-taken"),
    )
    node.run(["systemctl", "stop", "taker"])
    wait_for("the daemon", lambda: "serial" in status(node) and confd_pid(node))
    assert home_of(node, WEB1, *SELF) == "192.0.2.1"


def test_memory_is_locked_on_request(node: Node) -> None:
    # Where the lab itself may not raise limits, nor may the node: there the right to lock stands
    # in for the limit.
    may_raise = _capabilities(node) & _SYS_RESOURCE
    capability = "AmbientCapabilities=CAP_IPC_LOCK\nCapabilityBoundingSet=CAP_IPC_LOCK\n"
    instead = f"[Service]\n{capability}PrivateUsers=no\n"
    with settings(node, "memory_lock = true\n"), drop_in(node, "" if may_raise else instead):
        wait_for("a worker", lambda: workers(node))
        for pid in (confd_pid(node), *workers(node)):
            wait_for(f"{pid} to be locked", lambda pid=pid: _locked_kib(node, pid) > 1000)  # type: ignore[misc]
        assert home_of(node, WEB1, *SELF) == "192.0.2.1"


def _capabilities(node: Node) -> int:
    line = next(line for line in node.read("/proc/1/status").splitlines() if "CapEff" in line)
    return int(line.split()[1], 16)


def _locked_kib(node: Node, pid: int) -> int:
    return int(node.read(f"/proc/{pid}/status").split("VmLck:")[1].split()[0])


def test_in_the_place_of_ganetis_daemon(node: Node) -> None:
    """The examples that the package comes with, as brine-confd(8) says to use them."""
    # Only root may read Ganeti's files.
    ganeti = "/var/lib/ganeti"
    node.write(f"{ganeti}/config.data", json.dumps(ganeti_config()), mode=0o600)
    node.write(f"{ganeti}/hmac.key", "ganeti's own\n", mode=0o400)
    node.write(f"{ganeti}/server.pem", "a certificate's key\n", mode=0o400)
    node.path(KEY_FILE).unlink()
    try:
        node.shell(f"""
            chmod 0750 {ganeti}
            install -D -m 0644 {EXAMPLES}/ganeti.toml /etc/brine/confd.toml
            install -D -m 0644 {EXAMPLES}/ganeti.conf {DROP_INS}/ganeti.conf
            systemctl daemon-reload
            systemctl restart {SERVICE}
        """)
        wait_for("the configuration", lambda: "serial" in status(node))
        assert home_of(node, instance_ip(2), *SELF) == node_ip(2)
        # New keys reach it from there, too.
        node.write(f"{ganeti}/hmac.key", "ganeti's next\n", mode=0o400)
        node.run(["systemctl", "reload", SERVICE])
        assert home_of(node, instance_ip(2), *SELF) == node_ip(2)
        # As does a new configuration, which is another file.
        changed = json.dumps(ganeti_config()).replace(instance_ip(2), "10.9.9.9")
        node.write(f"{ganeti}/config.new", changed, mode=0o600)
        node.path(f"{ganeti}/config.new").rename(node.path(f"{ganeti}/config.data"))
        wait_for("the change", lambda: home_of(node, "10.9.9.9", *SELF) == node_ip(2))

        # No mode keeps a file from it, so it sees but few, and writes to its own directory only.
        inside = f"nsenter --target {confd_pid(node)} --mount"
        for hidden in ("/etc/shadow", "/var/lib/dpkg", "/var/log", "/run/dbus", "/run/brine"):
            node.shell(f"test -e {hidden}; ! {inside} test -e {hidden}")
        assert node.shell(f"{inside} cat {ganeti}/server.pem {ganeti}/hmac.key") == ""
        node.shell(f"! {inside} touch {ganeti}/mark; ! {inside} touch /etc/mark")
    finally:
        node.shell(f"rm -rf {DROP_INS} /etc/brine/confd.toml {ganeti}; systemctl daemon-reload")
