"""Upgrades from each released version, and the way back, while VMs run."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lab.guest_image import guest_image
from lab.node import Node, boot_node
from lab.packages import NoHistoryError, released_packages
from lab.repository import publish
from lab.version import RELEASED, versions
from lab.waiting import wait_for
from node.apt_on_node import apt
from node.confd_on_node import (
    CONFIG,
    KEY_FILE,
    NODES,
    WEB1,
    apply,
    declared,
    home_of,
    start_confd,
    wait_serial,
    workers,
)
from node.instance_on_node import DISKS, GUEST, boot, boot_idle, info, order, start, wait_status
from node.kvmd_on_node import CAN_BE_HELD_BACK, held_back, kvmd_pid, wait_verdict
from node.watcher_on_node import kill, outbox, tries

SETTINGS = {
    "confd.toml": "workers = 2\nmax_clock_skew_s = 301\n",
    "instance.toml": 'parallel_starts = 3\nuid_pool = "4000-4099"\n',
    "kvmd.toml": "rescan_interval_s = 50\nconnect_retry_s = 11\n",
    "watcher.toml": "tries = 4\nslow_interval = 28000\n",
}
INSTANCES = ("crash1", "db1", "db2", "idle1", "web1", "web2")
HERE = ("--peer", "127.0.0.1")


@pytest.fixture
def older(version: str) -> list[Path]:
    """The packages of a released version."""
    try:
        return released_packages(version)
    except NoHistoryError as error:
        pytest.skip(str(error))


def set_up(node: Node) -> None:
    """Have the old version write one of all that the new one reads."""
    node.put(guest_image().folder, GUEST)
    node.shell(f"""
        ip link add br0 type bridge
        mkdir {DISKS}
        truncate --size=8M {DISKS}/first.raw {DISKS}/second.raw
    """)
    for file, text in SETTINGS.items():
        node.write(f"/etc/brine/{file}", text)
    apply(node, declared())
    start_confd(node)
    devices = {"disks": [{"path": f"{DISKS}/first.raw"}], "nics": [{"link": "br0"}]}
    boot(node, "web1", security_model="pool", **devices)
    node.run(["brine", "nic", "add", "web1", "--link", "br0"])
    node.run(["brine", "disk", "add", "web1", "--path", f"{DISKS}/second.raw"])
    boot(node, "db1")
    boot(node, "db2")
    for name in ("web2", "crash1", "idle1"):
        boot_idle(node, name, nics=[{"link": "br0"}])
    node.run(["kill", "-KILL", str(info(node, "crash1")["pid"])])
    wait_for("the watcher to start it again", lambda: tries(node))
    wait_status(node, "crash1", "running")
    node.run(["brine", "instance", "stop", "--force", "web2"])
    # What a user shuts down is not noted yet.
    node.run(["brine", "watcher", "pause", "1d"])
    order(node, "db2", "poweroff")
    wait_status(node, "db2", "USER_down")


def said(node: Node) -> dict[str, Any]:
    """Brine's JSON about everything on the node, and the active units."""
    commands = (
        *("instance list", "nic list web1", "disk list web1", "tap list", "kvmd verdicts"),
        *("watcher status", "outbox list", "uidpool show"),
    )
    answers = {
        command: json.loads(node.run(["brine", *command.split(), "--json"]).stdout)
        for command in commands
    }
    listed = node.run(
        ["systemctl", "list-units", "--plain", "--no-legend", "--state=active", "brine*"]
    )
    units = {line.split()[0] for line in listed.stdout.splitlines()}
    units.discard("brine-stopper.service")  # it ends half a minute after the last stop
    return {**answers, "units": sorted(units), "home": home_of(node, WEB1, *HERE)}


def without(name: str, what: Any) -> Any:
    """The output, without the lines about one instance."""
    if isinstance(what, dict):
        return {key: without(name, value) for key, value in what.items()}
    if isinstance(what, list):
        return [one for one in what if not re.search(rf"\b{name}\b", json.dumps(one))]
    return what


def changes(now: Any, before: Any, at: str = "") -> Iterator[str]:
    """Where something else is said now than before; a newer version may say more."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key, value in before.items():
            yield from changes(now.get(key), value, f"{at}/{key}")
    elif isinstance(before, list) and isinstance(now, list) and len(now) == len(before):
        for number, (one, other) in enumerate(zip(now, before, strict=True)):
            yield from changes(one, other, f"{at}/{number}")
    elif now != before:
        yield f"{at}: {before} -> {now}"


def upgrade_while_one_ends(node: Node, name: str) -> None:
    """Have apt upgrade all, and the user of an instance end it while no daemon hears of it."""
    node.write("/run/systemd/system/brine-kvmd.service.d/test.conf", CAN_BE_HELD_BACK)
    with ThreadPoolExecutor(1) as pool:
        with held_back(node):
            upgrade = pool.submit(apt, node, "full-upgrade")
            wait_for("the daemon to be down", lambda: kvmd_pid(node) == "0", timeout_s=200)
            order(node, name, "poweroff")
            assert kvmd_pid(node) == "0"
        upgrade.result()
    shutil.rmtree(node.path("/run/systemd/system/brine-kvmd.service.d"))
    node.run(["systemctl", "daemon-reload"])


def assert_is(node: Node, version: str) -> None:
    """Have a node's packages be of a version, and no unit have failed."""
    query = ["dpkg-query", "--show", "--showformat=${db:Status-Status} ${Version}\\n", "brine*"]
    lines = set(node.run(query).stdout.splitlines())
    assert lines - {"not-installed ", "unknown "} == {f"installed {version}"}
    assert node.run(["brine", "--version"]).stdout == f"brine {version}\n"
    assert node.run(["systemctl", "--failed", "--no-legend"]).stdout == ""


@pytest.mark.long
@pytest.mark.both_releases
@pytest.mark.parametrize("version", RELEASED)
def test_an_upgrade_ends_no_vm_and_loses_nothing(
    release: str, version: str, older: list[Path], packages: list[Path]
) -> None:
    with boot_node(release) as node:
        parts = [package.name.partition("_")[0] for package in older]
        publish(node, older)
        apt(node, "install", *parts)
        assert_is(node, version)
        set_up(node)
        before = said(node)

        publish(node, packages)
        upgrade_while_one_ends(node, "db1")
        assert_is(node, versions()[0])
        assert wait_verdict(node, "db1") == ("user", "guest-shutdown")
        wait_status(node, "db1", "USER_down")
        now = without("db1", said(node))
        assert list(changes(now, without("db1", before))) == []

        # The new version changes what the old one has written, and knows its instances' ends.
        assert len(workers(node)) == 2
        apply(node, declared(web1="node2"))
        wait_serial(node)
        assert home_of(node, WEB1, *HERE) == NODES["node2"]
        for kind in ("nic", "disk"):
            (_, plugged) = now[f"{kind} list web1"]
            node.run(["brine", kind, "remove", "web1", plugged["device_id"]])
        order(node, "web1", "poweroff")
        assert wait_verdict(node, "web1") == ("user", "guest-shutdown")
        node.run(["brine", "instance", "stop", "--force", "idle1"])
        assert wait_verdict(node, "idle1")[0] == "admin"
        kill(node, "crash1")
        assert wait_verdict(node, "crash1", times=2)[0] == "crash"
        node.run(["brine", "watcher", "resume"])
        note_user_shutdowns(node)
        assert info(node, "db2")["uuid"] in {event["instance"] for event in outbox(node)}
        start(node, "web1")
        for kind in ("nic", "disk"):
            listed = node.run(["brine", kind, "list", "web1", "--json"]).stdout
            assert len(json.loads(listed)) == 1

        # The way back, and forth again.
        node.run(["systemctl", "reset-failed"])
        pid = info(node, "web1")["pid"]
        apt(node, "install", "--allow-downgrades", *(f"{part}={version}" for part in parts))
        assert_is(node, version)
        assert (info(node, "web1")["status"], info(node, "web1")["pid"]) == ("running", pid)
        order(node, "web1", "poweroff")
        assert wait_verdict(node, "web1", times=2) == ("user", "guest-shutdown")
        # Only its own version's watcher knows the end of a run that a newer version began.
        note_user_shutdowns(node)
        apt(node, "full-upgrade")
        assert_is(node, versions()[0])
        assert info(node, "web1")["status"] == "USER_down"

        note_user_shutdowns(node)
        node.run(["brine", "instance", "stop", "--force", "crash1"])
        every = [package.name.partition("_")[0] for package in packages]
        apt(node, "remove", *every)
        apt(node, "purge", *every)
        assert left(node) == {
            *("/etc/brine", KEY_FILE, "/var/lib/brine", CONFIG, "/var/lib/brine/instances"),
            *(f"/var/lib/brine/instances/{name}.json" for name in INSTANCES),
        }


def note_user_shutdowns(node: Node) -> None:
    """Have the watcher set down what users have shut down. Its timer may be at it already."""
    node.run(["brine", "watcher", "run"], check=False)
    shutdowns = node.path("/run/brine/ctrl")
    wait_for("users' shutdowns to be noted", lambda: not list(shutdowns.glob("*.shutdown")))


def left(node: Node) -> set[str]:
    """The files that a purge has left."""
    found = node.shell("""
        find /etc /run /usr /var/lib /var/log -xdev -path '*brine*' \\
            -not -name '*-lab*' -not -path '/run/systemd/units/*' -not -path '/var/lib/apt/*'
    """)
    return set(found.splitlines())
