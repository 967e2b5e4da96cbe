"""The RPMs, on Debian trees with rpm and dnf: what install, upgrade and remove do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.guest import start_guest
from lab.guest_endings import ENDINGS
from lab.guest_image import guest_image
from lab.node import Node
from lab.repository import FOLDER
from lab.rpm_packages import add_to_repository, build_on, build_rpms
from lab.tree import TREE
from node.instance_on_node import GUEST, define, info, order, start
from node.kvmd_on_node import verdicts, wait_verdict, wait_watching
from node.rpm_on_node import dnf, installed, node_with_rpms, refused
from node.watcher_on_node import changed_s, moment_of

NEEDED = [
    "brine-common",
    "brine-config",
    "brine-hotplug",
    "brine-instance",
    "brine-kvmd",
    "brine-storage",
]
"""The packages that a running instance needs."""

RECOMMENDED = ["brine-confd", "brine-lifecycle", "brine-moves", "brine-watcher"]
PARTS = sorted([*NEEDED, *RECOMMENDED])

ENABLED = [
    "brine-claims.service",
    "brine-confd.service",
    "brine-events.path",
    "brine-instances.target",
    "brine-kvmd.path",
    "brine-lifecycle-executor.socket",
    "brine-lifecycle-folders.service",
    "brine-lifecycle.path",
    "brine-lockd.socket",
    "brine-metrics.path",
    "brine-moves.service",
    "brine-operations.service",
    "brine-stopper.socket",
    "brine-tap-gc.timer",
    "brine-watcher.timer",
]
DISABLED = ["brine-lifecycle-fence.service"]

MODES = {
    "/etc/brine": "root:root 755",
    "/run/brine": "root:root 755",
    "/run/brine/ctrl": "root:brine-ctrl 2770",
    "/run/brine/ended": "root:root 700",
    "/run/brine/lifecycle": "root:root 755",
    "/run/brine/marks": "root:brine-kvmd 2775",
    "/run/lock/brine": "root:root 755",
    "/var/lib/brine": "root:brine 755",
    "/var/lib/brine/claims": "root:brine 750",
    "/var/lib/brine/config.versions": "root:brine 750",
    "/var/lib/brine/instances": "root:brine 750",
    "/var/lib/brine/runtime": "root:root 700",
    "/var/lib/brine/ssconf": "root:root 755",
}


REFUSAL = (
    "brine: error: no package of Brine is removed while virtual machines run: web1\n",
    "brine: hint: stop them first: brine instance stop NAME\n",
)


@pytest.fixture(scope="module", params=["trixie", pytest.param("forky", marks=pytest.mark.long)])
def release(request: pytest.FixtureRequest) -> str:
    """The Debian releases whose rpm and dnf are those of a Fedora."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def rpms(release: str) -> Path:
    """The repository of RPMs that are built from this tree."""
    return build_rpms(release)


@pytest.fixture
def bare_node(release: str, rpms: Path) -> Iterator[Node]:
    """A node without Brine, for one test alone."""
    with node_with_rpms(release, rpms) as node:
        yield node


@pytest.fixture(scope="module")
def node(release: str, rpms: Path) -> Iterator[Node]:
    """A node with Brine, on which an instance runs when a test begins and when it ends."""
    with node_with_rpms(release, rpms) as node:
        dnf(node, "install", "brine")
        yield node


def pid_of(node: Node) -> int:
    """The QEMU of the instance."""
    pid: int = info(node, "web1")["pid"]
    return pid


def invocation(node: Node, unit: str) -> str:
    """Which run of a unit this is."""
    shown = node.run(["systemctl", "show", "--property=InvocationID", "--value", unit])
    return shown.stdout.strip()


@pytest.fixture
def running(node: Node) -> int:
    """The QEMU of an instance, web1, which runs on the node with all parts."""
    if [*installed(node)] != ["brine", *PARTS]:
        dnf(node, "install", "brine", *PARTS)
    node.run(["systemctl", "start", "brine-kvmd.path", "brine-stopper.socket"])
    if not node.path(GUEST).exists():
        node.put(guest_image().folder, GUEST)
        define(node, "web1")
    if info(node, "web1")["status"] != "running":
        start(node, "web1")
    return pid_of(node)


def test_rpmlint_finds_nothing_but_what_its_filter_explains(node: Node) -> None:
    node.put(TREE / "rpm/rpmlint.toml", "/srv/rpmlint.toml")
    node.put(TREE / "rpm/brine.spec", "/srv/brine.spec")
    said = node.shell(f"rpmlint --config /srv/rpmlint.toml /srv/brine.spec {FOLDER}/*.rpm")
    assert " 0 errors, 0 warnings" in said, said


@pytest.mark.long
def test_unit_tests_run_at_build(bare_node: Node) -> None:
    assert build_on(bare_node, with_tests=True)


def test_dnf_installs_all_parts_of_a_node(node: Node) -> None:
    assert [*installed(node)] == ["brine", *PARTS]
    assert node.run(["rpm", "--verify", "brine", *PARTS], check=False).stdout == ""
    for path, mode in MODES.items():
        assert node.run(["stat", "--format=%U:%G %a", path]).stdout.strip() == mode, path
    for user, group in {"confd": "brine", "kvmd": "brine-kvmd"}.items():
        groups = node.run(["id", "--name", "--groups", f"brine-{user}"]).stdout
        assert groups.split() == [group]
    assert "brine instance" in node.run(["brine", "instance", "--help"]).stdout
    catalog = node.run(["journalctl", "--no-pager", "--list-catalog"]).stdout
    assert "Brine:" in catalog
    for program in ("/usr/bin/brine", "/usr/sbin/brine-kvmd"):
        assert node.read(program).startswith("#!/usr/bin/python3 -I\n")


def test_presets_enable_units_and_nothing_starts_them(release: str, rpms: Path) -> None:
    with node_with_rpms(release, rpms) as node:
        dnf(node, "install", "brine", "brine-cluster")
        for state, units in (("enabled", ENABLED), ("disabled", DISABLED)):
            shown = node.run(["systemctl", "is-enabled", *units], check=False).stdout
            assert shown.split() == [state] * len(units)
        active = ["systemctl", "list-units", "--no-legend", "--state=active", "brine*"]
        assert node.run(active).stdout == ""


def test_a_user_who_powers_off_is_told_from_a_crash(node: Node, running: int) -> None:
    order(node, "web1", "poweroff")
    assert wait_verdict(node, "web1") == ("user", "guest-shutdown")
    start(node, "web1")
    node.run(["kill", "-KILL", str(pid_of(node))])
    assert wait_verdict(node, "web1", times=2)[0] == "crash"


@pytest.mark.parametrize("name", ENDINGS)
def test_each_end_of_a_real_guest_gets_its_verdict(node: Node, running: int, name: str) -> None:
    ending = ENDINGS[name]
    with start_guest(node, name, **ending.options) as guest:
        guest.wait_ready()
        wait_watching(node, name)
        ending.act(guest)
        assert wait_verdict(node, name) == ending.verdict
    by_user = ending.verdict[0] == "user"
    assert node.path(f"/run/brine/ctrl/{name}.shutdown").exists() == by_user


def test_upgrade_and_downgrade_end_no_instance_and_lose_no_verdict(
    node: Node, running: int
) -> None:
    before = invocation(node, "brine-kvmd.service")
    node.run(["systemctl", "start", "brine-watcher.timer"])
    add_to_repository(node, build_on(node, revision=2))
    for verb, release in (("upgrade", "2"), ("downgrade", "1")):
        dnf(node, verb, "--refresh", "brine*")
        assert {*installed(node).values()} == {release}
        assert pid_of(node) == running
        # No pass finds half of each version.
        stopped_s = moment_of(node, "InactiveEnterTimestamp")
        started_s = moment_of(node, "ActiveEnterTimestamp")
        changes = changed_s(node, "/usr/lib/python3*/site-packages")
        assert stopped_s < min(changes) < max(changes) < started_s
        after = invocation(node, "brine-kvmd.service")
        assert after != before
        before = after
    node.run(["systemctl", "stop", "brine-watcher.timer"])
    given = len(verdicts(node, "web1"))
    order(node, "web1", "poweroff")
    assert wait_verdict(node, "web1", times=given + 1) == ("user", "guest-shutdown")


@pytest.mark.parametrize("package", NEEDED)
def test_what_a_running_instance_needs_is_not_removed(
    node: Node, running: int, package: str
) -> None:
    """And nothing goes that would go with it. The scriptlets say why once, whatever dnf adds."""
    said = refused(node, "remove", package)
    assert [said.count(line) for line in REFUSAL] == [1, 1]
    assert [*installed(node)] == ["brine", *PARTS]
    assert node.run(["rpm", "--verify", "brine", *PARTS], check=False).stdout == ""
    assert pid_of(node) == running


def test_what_ends_owned_instances_is_not_removed(node: Node, running: int) -> None:
    folder = "/run/brine/lifecycle/web1"
    node.run(["mkdir", folder])  # an instance with such a folder has an owner
    try:
        said = refused(node, "remove", "brine-lifecycle", "brine-watcher")
    finally:
        node.run(["rmdir", folder])
    assert [said.count(line) for line in REFUSAL] == [1, 1]
    assert [*installed(node)] == ["brine", *PARTS]


@pytest.mark.parametrize("package", RECOMMENDED)
def test_another_part_goes_alone(node: Node, running: int, package: str) -> None:
    dnf(node, "remove", package)
    # A node that moves instances asks brine-confd, whose client it needs.
    needs_it = {"brine-moves"} if package == "brine-confd" else set()
    assert {*installed(node)} == {"brine", *PARTS} - {package} - needs_it
    assert pid_of(node) == running


def test_removal_leaves_what_was_made_since(node: Node, running: int) -> None:
    node.write("/etc/brine/kvmd.toml", 'log_level = "debug"\n')
    node.run(["brine", "instance", "stop", "--force", "web1"])
    dnf(node, "remove", "brine-common")
    assert installed(node) == {}
    # A console that has much to say has an older log, too.
    left = node.shell("""
        find /etc/brine /usr /var/lib /var/log -path '*brine*' -not -path '/var/lib/dnf/*' \\
            -not -name '*.log.1' -type f
    """).split()
    assert sorted(left) == [
        "/etc/brine/kvmd.toml",
        "/var/lib/brine/instances/web1.json",
        "/var/lib/brine/runtime/web1.json",
        "/var/log/brine/console/web1.log",
    ]
    loaded = ["systemctl", "list-units", "--no-legend", "--all", "brine*"]
    assert node.run(loaded).stdout == ""
    assert "brine" not in node.shell("find /etc/systemd/system")


def test_a_missing_dependency_is_named_and_nothing_is_installed(bare_node: Node) -> None:
    node = bare_node
    # dnf knows no more of what the tree has.
    node.run(["rpm", "--erase", "debian-tree"])
    said = refused(node, "install", "brine-hotplug")
    assert re.search(
        r"^ .*nothing provides python3\.\d+dist\(pyroute2\) needed by brine-hotplug-",
        said,
        re.MULTILINE,
    )
    assert installed(node) == {}


def test_what_nobody_known_has_signed_is_not_installed(bare_node: Node) -> None:
    node = bare_node
    index = f"{FOLDER}/repodata/repomd.xml"
    text = node.read(index)
    node.write(index, text.replace("<revision>", "<revision>1"))
    assert "Bad" in refused(node, "install", "brine")
    node.write(index, text)

    package = next(node.path(FOLDER).glob("brine-common-*.rpm"))
    content = package.read_bytes()
    package.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "checksum" in refused(node, "install", "brine")
    package.write_bytes(content)

    # The packages have a stranger's signature, and nobody vouches for the index.
    node.shell(f"""
        gpg --batch --quiet --passphrase '' --quick-generate-key stranger ed25519 sign never
        rpmsign --addsign --define '_gpg_name stranger' \\
            --define '_openpgp_sign_id stranger' {FOLDER}/*.rpm
        createrepo_c --quiet {FOLDER}
        sed -i s/repo_gpgcheck=1/repo_gpgcheck=0/ /etc/yum.repos.d/brine.repo
    """)
    assert "brine-common" in refused(node, "--refresh", "install", "brine")
    assert installed(node) == {}
