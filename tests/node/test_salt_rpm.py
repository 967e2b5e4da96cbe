"""The Salt states through dnf: what they install, pin, start and undo."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lab.errors import LabError
from lab.node import Node
from lab.repository import FOLDER, KEY
from lab.rpm_packages import add_to_repository, build_on, build_rpms
from lab.salt import apply_state, give_states
from lab.salt_series import add_newest_salt
from lab.version import versions
from node.instance_on_node import IDLE, info
from node.rpm_on_node import installed, node_with_rpms

RELEASE = "trixie"
VERSION = versions()[0]

REPOSITORY_FILE = "/etc/yum.repos.d/brine-salt.repo"
KEY_FILE = "/etc/pki/rpm-gpg/RPM-GPG-KEY-brine-salt"

WEB1 = {"accel": "tcg", "memory_mib": 64, "admin_state": "up", **IDLE}
OWNED = {"accel": "tcg", "owner": {"watchdog_timeout": 30}}

PARTS = [
    *("common", "confd", "config", "hotplug", "instance"),
    *("kvmd", "lifecycle", "storage", "watcher"),
]
ACTIVE = [
    "brine-confd.service",
    "brine-kvmd.path",
    "brine-lifecycle.path",
    "brine-stopper.socket",
    "brine-tap-gc.timer",
    "brine-watcher.timer",
]


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """A node with Salt, whose dnf knows no repository; there is one of two releases of Brine.

    Salt takes it for one of the Red Hat family.
    """
    with node_with_rpms(RELEASE, build_rpms(RELEASE)) as node:
        add_to_repository(node, build_on(node, revision=2))
        add_newest_salt(node, RELEASE)
        node.write("/etc/salt/grains", "os_family: RedHat\n")
        node.path("/etc/yum.repos.d/brine.repo").rename(node.path("/srv/brine.repo"))
        yield node


def changed(
    node: Node, version: str = "", state: str = "brine", *, test: bool = False, **parts: Any
) -> dict[str, Any]:
    """Apply a state, and return what it changed, or would: the state's name and the changes."""
    line = node.read("/srv/brine.repo").replace(f"{FOLDER}/{KEY}", KEY_FILE)
    brine = {
        "version": version,
        "repository": {"line": line, "key": node.read(f"{FOLDER}/{KEY}")},
        "kvmd": {"settings": {"log_level": "debug"}},
        "confd": {"key": "0123456789abcdef" * 4},
        "hotplug": {"scripts": {"60-site": "#!/bin/sh\n"}},
        "instance": {"instances": {"ci1": OWNED, "web1": WEB1}},
        **parts,
    }
    give_states(node, {"brine": brine})
    results = apply_state(node, state, test=test)
    return {str(one.name): one.changes for one in results if one.result is None or one.changes}


def releases(node: Node) -> set[str]:
    """The releases of all parts, which the node has."""
    found = installed(node)
    assert [*found] == [f"brine-{part}" for part in PARTS]
    return {*found.values()}


def test_test_mode_says_what_it_would_do_and_does_nothing(node: Node) -> None:
    assert {REPOSITORY_FILE, "brine-packages", "web1"} <= changed(node, test=True).keys()
    assert installed(node) == {}
    assert not node.path("/etc/brine").exists()
    assert not node.path(REPOSITORY_FILE).exists()


def test_the_first_run_installs_a_pinned_version_and_starts_all_and_the_second_changes_nothing(
    node: Node,
) -> None:
    changed(node, f"{VERSION}-1")
    assert releases(node) == {"1"}
    shown = node.run(["systemctl", "is-active", *ACTIVE], check=False).stdout
    assert shown.split() == ["active"] * len(ACTIVE)
    assert info(node, "web1")["status"] == "running"
    for test in (True, False):
        assert changed(node, f"{VERSION}-1", test=test) == {}


def test_another_version_comes_under_a_running_instance(node: Node) -> None:
    before = info(node, "web1")["pid"]
    # No version leaves what is there, and one without a release is any of that version.
    for version, release in (
        ("", "1"),
        ("latest", "2"),
        (VERSION, "2"),
        (f"{VERSION}-1", "1"),
        (VERSION, "1"),
    ):
        changed(node, version)
        assert releases(node) == {release}
    with pytest.raises(LabError, match=r"brine-common-0\.1\.0"):
        changed(node, "0.1.0")
    assert releases(node) == {"1"}
    assert info(node, "web1")["pid"] == before


def test_a_part_that_pillar_does_not_want_goes_alone(node: Node) -> None:
    changed(node, confd={"enabled": False})
    assert [*installed(node)] == [f"brine-{part}" for part in PARTS if part != "confd"]
    assert changed(node, confd={"enabled": False}) == {}
    changed(node)
    assert releases(node) == {"1"}


def test_clean_undoes_all_but_what_instances_should_be(node: Node) -> None:
    with pytest.raises(LabError, match="nothing is removed, as instances run: web1"):
        changed(node, state="brine.clean")
    assert releases(node) == {"1"}
    node.run(["brine", "instance", "stop", "--force", "web1"])
    node.run(["brine", "watcher", "pause", "1h"])
    assert changed(node, state="brine.clean", test=True)
    assert changed(node, state="brine.clean")
    assert changed(node, state="brine.clean") == {}
    assert installed(node) == {}
    left = node.shell("""
        find /etc /usr /var/lib /var/log '(' -path '*brine/*' -o -name '*brine*' ')' \\
            -not -name '*brine-lab' -not -path '/var/lib/dnf/*'
    """)
    assert sorted(left.split()) == [
        "/var/lib/brine",
        "/var/lib/brine/instances",
        "/var/lib/brine/instances/ci1.json",
        "/var/lib/brine/instances/web1.json",
    ]


def test_a_part_that_pillar_does_not_want_does_not_come_as_another_ones_recommendation(
    node: Node,
) -> None:
    pillar: dict[str, Any] = {"kvmd": {"enabled": False}, "confd": {}, "hotplug": {}}
    pillar["instance"] = {"enabled": True}
    changed(node, **pillar)
    assert [*installed(node)] == [
        f"brine-{part}" for part in PARTS if part not in ("confd", "kvmd", "lifecycle")
    ]
    assert changed(node, **pillar) == {}
