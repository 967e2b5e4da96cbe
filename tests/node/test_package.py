"""The Debian packages: what lintian says, and what install, upgrade, remove and purge do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from lab.command import run_command
from lab.guest import start_guest
from lab.node import Node, boot_node
from lab.repository import publish
from lab.waiting import wait_for
from node.kvmd_on_node import kvmd_pid, verdicts, wait_verdict, wait_watching

SERVICE = "brine-kvmd.service"
UNITS = ["brine-kvmd.path", SERVICE]
CONTROL_DIR = "/run/brine/ctrl"
EXAMPLES = "/usr/share/doc/brine-kvmd/examples"


@contextmanager
def node_with(packages: list[Path], release: str) -> Iterator[Node]:
    """A node with the packages installed by apt, and nothing else done."""
    with boot_node(release) as node:
        publish(node, packages)
        install(node)
        yield node


@pytest.fixture
def node(release: str, packages: list[Path]) -> Iterator[Node]:
    """A node for one test alone."""
    with node_with(packages, release) as node:
        yield node


@pytest.fixture(scope="module")
def installed_node(release: str, packages: list[Path]) -> Iterator[Node]:
    """A node for tests that change nothing which others see."""
    with node_with(packages, release) as node:
        yield node


@pytest.fixture(scope="session")
def next_packages(packages: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same packages with a higher version, as the next release would have."""
    return [_with_next_version(package, tmp_path_factory.mktemp("next")) for package in packages]


def _with_next_version(package: Path, folder: Path) -> Path:
    tree = folder / "tree"
    run_command(["dpkg-deb", "--raw-extract", package, tree])
    control = tree / "DEBIAN/control"
    version = run_command(["dpkg-deb", "--field", package, "Version"]).stdout.strip()
    control.write_text(re.sub(rf"\b{re.escape(version)}\b", f"{version}+next", control.read_text()))
    built = run_command(["dpkg-deb", "--root-owner-group", "--build", tree, folder]).stdout
    assert "+next" in built
    return next(folder.glob("*.deb"))


def install(node: Node) -> None:
    """Install what the node's repository has, or upgrade to it."""
    apt(node, "install", "brine-common", "brine-kvmd")


def apt(node: Node, *args: str) -> None:
    """Have apt do something without questions."""
    node.run(["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "--yes", "--quiet=2", *args])


def unit_states(node: Node) -> list[str]:
    """Of the path unit and the service: active, inactive, failed."""
    return node.run(["systemctl", "is-active", *UNITS], check=False).stdout.split()


def test_lintian_finds_no_error_and_no_warning(packages: list[Path]) -> None:
    # lintian would rather not be root, and says so where nobody asked.
    options = ["--allow-root", "--fail-on=error,warning"]
    assert run_command(["lintian", *options, *packages], timeout_s=300).stdout == ""


def test_installed_and_waiting_for_the_first_vm(installed_node: Node) -> None:
    node = installed_node
    assert unit_states(node) == ["active", "inactive"]
    modes = node.run(["stat", "--format=%U:%G %a %n", "/run/brine", CONTROL_DIR, "/run/lock/brine"])
    assert modes.stdout.splitlines() == [
        "root:root 755 /run/brine",
        f"root:brine 2770 {CONTROL_DIR}",
        "root:root 755 /run/lock/brine",
    ]
    assert node.shell("id --name --groups brine-kvmd").split() == ["brine"]
    assert "brine kvmd" in node.run(["brine", "kvmd", "--help"]).stdout


def test_units_are_sound_and_hardened(installed_node: Node) -> None:
    node = installed_node
    units = [*UNITS, "brine-kvmd-retry.timer"]
    checked = node.run(["systemd-analyze", "verify", "--man=no", *units])
    assert checked.stdout + checked.stderr == ""
    security = ["systemd-analyze", "security", "--no-pager", SERVICE]
    exposure = re.search(r"exposure level for .*: ([0-9.]+)", node.run(security).stdout)
    assert exposure
    assert float(exposure[1]) <= 1.5


def test_every_message_has_its_entry_in_the_catalog(installed_node: Node) -> None:
    module = "import brine.kvmd.messages as m; print(open(m.__file__).read())"
    source = installed_node.run(["python3", "-c", module]).stdout
    ids = set(re.findall(r'"([0-9a-f]{32})"', source))
    listed = installed_node.run(["journalctl", "--no-pager", "--list-catalog"]).stdout
    assert ids
    assert ids == {line.split()[0] for line in listed.splitlines() if "Brine:" in line}


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("brine ", {"kvmd"}),
        ("brine kvmd ", {"verdicts"}),
        ("brine kvmd verdicts --s", {"--since"}),
        ("brine-kvmd --ch", {"--check"}),
    ],
)
def test_completion(installed_node: Node, typed: str, completed: set[str]) -> None:
    words = typed.split(" ")
    command = words[0]
    function = f"_{command.replace('-', '_')}"
    script = f"""
        set +eu
        . /usr/share/bash-completion/bash_completion
        . /usr/share/bash-completion/completions/{command}
        COMP_WORDS=({" ".join(f"'{word}'" for word in words)})
        COMP_CWORD={len(words) - 1} COMP_LINE='{typed}' COMP_POINT={len(typed)}
        {function} {command} '{words[-1]}' '{words[-2]}'
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    assert set(installed_node.shell(script).split()) == completed


def test_bad_settings_fail_and_are_tried_again(node: Node) -> None:
    short = "[Timer]\nOnActiveSec=\nOnUnitInactiveSec=\nOnActiveSec=12s\nOnUnitInactiveSec=12s\n"
    node.write("/etc/systemd/system/brine-kvmd-retry.timer.d/test.conf", short)
    node.run(["systemctl", "daemon-reload"])
    node.write("/etc/brine/kvmd.toml", "sufix = '.kvmd'\n")
    with start_guest(node, "web1") as guest:
        node.shell("until systemctl is-failed --quiet brine-kvmd.path; do sleep 0.1; done")
        records = node.journal("_SYSTEMD_UNIT=brine-kvmd.service", "--grep=did you mean suffix")
        # A handful of attempts, not a busy loop.
        assert 0 < len(records) <= 10
        node.write("/etc/brine/kvmd.toml", "")
        wait_watching(node, "web1")
        assert unit_states(node) == ["active", "active"]
        guest.wait_ready()
        guest.order("poweroff")
        assert wait_verdict(node, "web1") == ("user", "guest-shutdown")


def test_upgrade_ends_no_guest_and_loses_no_event(node: Node, next_packages: list[Path]) -> None:
    with (
        start_guest(node, "runs") as runs,
        start_guest(node, "poweroff") as poweroff,
        start_guest(node, "powerdown") as powerdown,
    ):
        for guest in (runs, poweroff, powerdown):
            guest.wait_ready()
            wait_watching(node, guest.name)
        # A pause in the upgrade, long enough for guests to end in it.
        node.write(
            "/run/systemd/system/brine-kvmd.service.d/test.conf",
            "[Service]\nExecStartPre=/bin/sleep 6\nTimeoutStartSec=60\n",
        )
        publish(node, next_packages)
        # Paused, this guest hears of the powerdown only when the daemon is away.
        powerdown.qmp("stop")
        powerdown.powerdown()
        with ThreadPoolExecutor(1) as pool:
            upgrade = pool.submit(install, node)
            wait_for("the daemon to be down", lambda: kvmd_pid(node) == "0", timeout_s=60)
            powerdown.qmp("cont")
            poweroff.order("poweroff")
            powerdown.wait()
            poweroff.wait()
            assert kvmd_pid(node) == "0"
            upgrade.result()
        installed = node.run(["dpkg-query", "--show", "--showformat=${Version}", "brine-kvmd"])
        assert installed.stdout.endswith("+next")

        assert wait_verdict(node, "poweroff") == ("user", "guest-shutdown")
        assert wait_verdict(node, "powerdown") == ("admin", "powerdown")
        assert runs.running()
        assert verdicts(node, "runs") == []
        runs.order("poweroff")
        assert wait_verdict(node, "runs") == ("user", "guest-shutdown")


def test_remove_and_purge_leave_what_belongs_to_others(node: Node) -> None:
    node.write("/etc/brine/kvmd.toml", 'log_level = "debug"\n')
    with start_guest(node, "runs") as runs, start_guest(node, "ended") as ended:
        wait_watching(node, "runs")
        ended.wait_ready()
        ended.order("poweroff")
        wait_verdict(node, "ended")

        apt(node, "remove", "brine-kvmd")
        assert unit_states(node) == ["inactive", "inactive"]
        assert runs.running()
        assert node.path("/etc/brine/kvmd.toml").exists()

        apt(node, "purge", "brine-kvmd", "brine-common")
        assert runs.running()
        assert not node.path("/etc/brine").exists()
        assert not node.path("/run/brine-kvmd").exists()
        assert not node.path("/run/lock/brine").exists()
        left = {path.name for path in node.path(CONTROL_DIR).iterdir()}
        assert left == {"runs.kvmd", "runs.qmp", "ended.shutdown"}
        files = node.shell("find /etc /usr /var/lib/systemd -name '*brine*' -not -name '*-lab*'")
        assert files == ""


def test_control_directory_of_ganeti(node: Node) -> None:
    """The examples that the package comes with, as brine-kvmd(8) says to use them."""
    control_dir = "/run/ganeti/kvm-hypervisor/ctrl"
    # A directory that only root may enter, with sockets that only their owner may use.
    node.run(["install", "--directory", "--mode=0700", control_dir])
    node.shell(f"""
        install -D -m 0644 {EXAMPLES}/ganeti.toml /etc/brine/kvmd.toml
        cd /etc/systemd/system
        install -D -m 0644 {EXAMPLES}/ganeti-path.conf brine-kvmd.path.d/ganeti.conf
        install -D -m 0644 {EXAMPLES}/root-only.conf brine-kvmd.service.d/root-only.conf
        systemctl daemon-reload
        systemctl restart brine-kvmd.path
    """)
    assert unit_states(node) == ["active", "inactive"]
    with start_guest(node, "web1", control_dir=control_dir) as guest:
        wait_watching(node, "web1")
        guest.wait_ready()
        guest.order("poweroff")
        assert wait_verdict(node, "web1") == ("user", "guest-shutdown")
    assert node.path(f"{control_dir}/web1.shutdown").exists()
