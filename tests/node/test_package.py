"""The Debian packages: what lintian says, and what install, upgrade, remove and purge do."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from lab.guest import start_guest
from lab.guest_image import guest_image
from lab.node import CLONE, Node, boot_node, fresh_machine
from lab.packages import lintian_image
from lab.repository import publish
from lab.waiting import wait_for
from node.apt_on_node import apt
from node.confd_on_node import CONFIG, KEY, KEY_FILE, apply, declared
from node.instance_on_node import GUEST, boot_idle
from node.kvmd_on_node import (
    CAN_BE_HELD_BACK,
    held_back,
    kvmd_pid,
    verdicts,
    wait_verdict,
    wait_watching,
)
from node.watcher_on_node import changed_s, moment_of

PACKAGES = [
    "brine",
    "brine-cluster",
    "brine-common",
    "brine-confd",
    "brine-config",
    "brine-hotplug",
    "brine-instance",
    "brine-kvmd",
    "brine-lifecycle",
    "brine-moves",
    "brine-salt",
    "brine-storage",
    "brine-watcher",
]
BUILT = "/srv/built"
_BUILD_TIMEOUT_S = 1800.0
UNITS = ["brine-kvmd.path", "brine-kvmd.service"]
GC = "brine-tap-gc.service"
GC_TIMER = "brine-tap-gc.timer"
LOCKD = "brine-lockd.service"
WATCHER = "brine-watcher.service"
WATCHER_TIMER = "brine-watcher.timer"
NOUNS = {
    "config",
    "confd",
    "disk",
    "events",
    "instance",
    "kvmd",
    "lifecycle",
    "lock",
    "metrics",
    "move",
    "nic",
    "node",
    "operations",
    "outbox",
    "storage",
    "tap",
    "uidpool",
    "watcher",
}
CONTROL_DIR = "/run/brine/ctrl"
SCRIPTS_DIR = "/etc/brine/nic.d"
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


def install(node: Node) -> None:
    """Install what the node's repository has, or upgrade to it."""
    apt(node, "install", *PACKAGES)


def installed(node: Node) -> set[str]:
    """The packages of Brine that are installed."""
    query = ["dpkg-query", "--show", "--showformat=${db:Status-Status} ${Package}\\n", "brine*"]
    lines = node.run(query).stdout.splitlines()
    return {name for status, name in map(str.split, lines) if status == "installed"}


def unit_states(node: Node) -> list[str]:
    """Of the path unit and the service: active, inactive, failed."""
    return node.run(["systemctl", "is-active", *UNITS], check=False).stdout.split()


@pytest.mark.long
def test_two_builds_have_the_same_bytes(packages: list[Path], release_build: Path) -> None:
    def hashes(found: Iterable[Path]) -> dict[str, str]:
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in found}

    assert hashes(release_build.glob("*.deb")) == hashes(packages)


# What lintian of Debian 12 says of the policy of Debian 13, by which a unit needs no script beside
# it. Overrides of these tags would be errors on Debian 13.
OF_A_NEWER_POLICY = "newer-standards-version,package-supports-alternative-init-but-no-init.d-script"


def lintian(node: Node, release: str, folder: str) -> str:
    """The output of a release's lintian for the packages and their source in a node's folder."""
    options = ["--display-info", "--display-experimental", "--pedantic"]
    # Without this option, lintian prints a warning to root.
    options += ["--allow-root"]
    options += [f"--suppress-tags={OF_A_NEWER_POLICY}"] if release == "bookworm" else []
    (changes,) = node.path(folder).glob("*.changes")
    done = node.run(["lintian", *options, f"{folder}/{changes.name}"], check=False, timeout_s=900)
    return done.stdout + done.stderr


def test_lintian_finds_nothing(release: str, release_build: Path) -> None:
    """Each release's lintian, and its groff on manuals that this machine has built."""
    with boot_node(release, image=lintian_image) as node:
        node.put(release_build, BUILT)
        assert lintian(node, release, BUILT) == ""


@pytest.mark.long
@pytest.mark.both_releases
def test_each_release_builds_what_is_clean_there(release: str) -> None:
    """With the unit tests, where there is nothing but what debian/control asks for."""
    with fresh_machine(release) as machine:
        install = "DEBIAN_FRONTEND=noninteractive apt-get --yes --quiet=2"
        machine.shell(
            f"""
            {install} update
            {install} install build-essential lintian
            mkdir {BUILT}
            cp --archive {CLONE} {BUILT}/brine
            cd {BUILT}/brine
            {install} build-dep ./
            dpkg-buildpackage --no-sign --build=full 2>&1
            """,
            timeout_s=_BUILD_TIMEOUT_S,
        )
        assert lintian(machine, release, BUILT) == ""


@pytest.mark.both_releases
def test_installed_and_waiting_for_the_first_vm(installed_node: Node) -> None:
    node = installed_node
    assert unit_states(node) == ["active", "inactive"]
    modes = {
        "/run/brine": "root:root 755",
        CONTROL_DIR: "root:brine-ctrl 2770",
        "/run/brine/lifecycle": "root:root 755",
        "/run/brine/marks": "root:brine-kvmd 2775",
        "/run/lock/brine": "root:root 755",
        "/var/lib/brine": "root:brine 755",
        "/var/lib/brine/config.versions": "root:brine 750",
        "/var/lib/brine/ssconf": "root:root 755",
        "/var/lib/brine/instances": "root:brine 750",
        "/var/lib/brine/runtime": "root:root 700",
    }
    for path, mode in modes.items():
        assert node.run(["stat", "--format=%U:%G %a", path]).stdout.strip() == mode, path
    groups = {
        "brine-confd": "brine",
        "brine-kvmd": "brine-kvmd",
        "brine-lifecycle": "brine-lifecycle",
    }
    for user, group in groups.items():
        assert node.run(["id", "--name", "--groups", user]).stdout.split() == [group]
    for noun in NOUNS:
        assert f"brine {noun}" in node.run(["brine", noun, "--help"]).stdout
    for verb, state in (("is-active", "active"), ("is-enabled", "enabled")):
        timers = node.run(["systemctl", verb, GC_TIMER, WATCHER_TIMER]).stdout
        assert timers.split() == [state, state]
    target = ["systemctl", "is-enabled", "brine-instances.target"]
    assert node.run(target).stdout == "enabled\n"
    assert [path.name for path in node.path(SCRIPTS_DIR).iterdir()] == ["README.txt"]


EXPOSURES = {
    "brine-confd.service": 1.3,
    "brine-lockd.service": 1.3,
    "brine-kvmd.service": 1.5,
    "brine-lifecycle.service": 1.5,
    "brine-console-log.service": 1.6,
    # They act as root on specs, markers and domains.
    "brine-watcher.service": 3.1,
    "brine-watcher-ended.service": 3.1,
    "brine-claims.service": 3.1,
    "brine-moves.service": 2.0,
    "brine-instances.service": 3.0,
    "brine-user-shutdowns.service": 3.0,
    "brine-instance-failed@web1.service": 2.0,
    "brine-operations.service": 3.1,
    "brine-events.service": 1.6,
    # It may use the network.
    "brine-event@web1.service": 1.6,
    # It reads what all parts keep for themselves, and asks LVM and Xen.
    "brine-metrics.service": 2.7,
    # It may become another user, to have no rights where it reads what QEMUs say.
    GC: 3.1,
    # They end QEMUs and domains, or mount folders for the whole node.
    "brine-stopper.service": 3.2,
    "brine-lifecycle-fence.service": 3.2,
    "brine-lifecycle-folders.service": 3.2,
    "brine-lifecycle-executor.service": 3.6,
    # It begins as root, and runs operators' scripts, QEMU and xl.
    "brine-instance@web1.service": 4.5,
    # It makes and removes volumes anywhere, and talks with another node.
    "brine-move@web1.service": 4.3,
}
"""The most exposure of each service, as systemd-analyze(1) counts it: 10 is that of none at all."""


@pytest.mark.both_releases
def test_no_unit_is_exposed_more_than_it_has_to_be(installed_node: Node) -> None:
    node = installed_node
    files = node.shell("ls /usr/lib/systemd/system/ | grep '^brine-.*[.]service$'").split()
    assert {one.replace("@.", "@web1.") for one in files} == EXPOSURES.keys()
    found = {}
    for service in EXPOSURES:
        said = node.run(["systemd-analyze", "security", "--no-pager", service]).stdout
        exposure = re.search(r"exposure level for .*: ([0-9.]+)", said)
        assert exposure, said
        found[service] = float(exposure[1])
    exposed = {name: level for name, level in found.items() if level > EXPOSURES[name]}
    assert not exposed, found


@pytest.mark.both_releases
def test_units_are_sound(installed_node: Node) -> None:
    node = installed_node
    units = node.shell("ls /usr/lib/systemd/system/ | grep ^brine- | grep -v [.]d$").split()
    units = [one.replace("@.", "@web1.") for one in units]
    assert set(EXPOSURES) < set(units)
    checked = node.run(["systemd-analyze", "verify", "--man=no", *units])
    assert checked.stdout + checked.stderr == ""


TERMINAL = """
import os, pty
master, slave = pty.openpty()
with open("/srv/heard", "wb", 0) as heard:
    os.symlink(os.ttyname(slave), "/srv/terminal")
    while True:
        heard.write(os.read(master, 4096))
"""


@pytest.mark.both_releases
def test_what_the_journal_does_not_take_goes_to_the_console(installed_node: Node) -> None:
    """As the units are shipped: their daemons are nobody, and see no other device."""
    node = installed_node
    node.write("/srv/terminal.py", TERMINAL)
    node.write(KEY_FILE, KEY, mode=0o600)
    node.run(["systemd-run", "--unit=terminal", "python3", "/srv/terminal.py"])
    wait_for("a terminal", lambda: node.shell("test -L /srv/terminal && echo yes || :"))
    node.shell("""
        touch /dev/console
        mount --bind "$(readlink /srv/terminal)" /dev/console
        chmod 0600 /dev/console
        systemd-tmpfiles --create --prefix=/dev/console
        systemctl restart brine-confd brine-kvmd
        mv /run/systemd/journal/socket /run/systemd/journal/away
        systemctl reload brine-confd brine-kvmd
    """)
    try:
        for said in ("brine-confd: 1 of 2 possible keys", "brine-kvmd: settings reloaded"):
            wait_for(said, lambda said=said: said in node.read("/srv/heard"))  # type: ignore[misc]
    finally:
        node.shell(f"""
            mv /run/systemd/journal/away /run/systemd/journal/socket
            umount /dev/console
            systemctl stop brine-confd brine-kvmd terminal
            rm -r {KEY_FILE} /srv/terminal* /srv/heard
        """)


def test_every_message_has_its_entry_in_the_catalog(installed_node: Node) -> None:
    ids = set()
    for part in ("common", "confd", "hotplug", "instance", "kvmd", "lifecycle", "moves", "watcher"):
        module = f"import brine.{part}.messages as m; print(open(m.__file__).read())"
        source = installed_node.run(["python3", "-c", module]).stdout
        ids |= set(re.findall(r'"([0-9a-f]{32})"', source))
    listed = installed_node.run(["journalctl", "--no-pager", "--list-catalog"]).stdout
    assert ids
    assert ids == {line.split()[0] for line in listed.splitlines() if "Brine:" in line}


def _locks(node: Node) -> list[tuple[str, int, list[str]]]:
    """The commands that hold locks: their purpose, process and locks."""
    rows = json.loads(node.run(["brine", "lock", "list", "--json"]).stdout)
    return [(row["purpose"], row["pid"], row["holds"]) for row in rows if row["holds"]]


def _main_process(node: Node, unit: str) -> int:
    return int(node.run(["systemctl", "show", "--property=MainPID", "--value", unit]).stdout)


def test_the_socket_starts_the_service_of_locks_also_after_its_kill(installed_node: Node) -> None:
    node, take = installed_node, ["brine", "lock", "run", "--instance", "web1"]
    move = [*take, "--purpose", "move web1", "--", "sleep", "infinity"]
    node.run(["systemd-run", "--unit=moves", *move])
    try:
        wait_for("the lock to be held", lambda: bool(_locks(node)))
        assert _locks(node) == [("move web1", _main_process(node, "moves"), ["instance/web1"])]
        refused = node.run([*take, "--timeout", "0", "--", "true"], check=False)
        assert refused.returncode == 1
        assert "waiting for instance/web1, which is held by: move web1" in refused.stderr
        before = _main_process(node, LOCKD)
        node.run(["kill", "-KILL", str(before)])
        node.run([*take, "--", "true"])
        assert _main_process(node, LOCKD) not in (0, before)
        said = "the locks of this command, which goes on"
        wait_for("the command to say so", lambda: said in node.shell("journalctl --unit=moves"))
    finally:
        node.run(["systemctl", "stop", "moves"])
    assert _locks(node) == []


@pytest.mark.parametrize(
    "program", ["/usr/bin/brine", "/usr/sbin/brine-kvmd", "/usr/sbin/brine-confd"]
)
def test_a_callers_python_environment_has_no_say(installed_node: Node, program: str) -> None:
    """Not by variables, not by the home folder, not by the folder that it is called in."""
    node, trace = installed_node, "/srv/ran"
    version = node.shell("python3 -c 'import sys; print(*sys.version_info[:2], sep=\".\")'").strip()
    user_site = f"/srv/home/.local/lib/python{version}/site-packages"
    harm = f"open({trace!r}, 'a').write(__file__)\nraise SystemExit('not isolated')\n"
    for folder in ("/srv/evil", user_site):
        for module in ("sitecustomize", "usercustomize", "argparse", "startup"):
            node.write(f"{folder}/{module}.py", harm)
    node.write(f"{user_site}/harm.pth", f"import os; os.mkdir('{trace}')\n")
    try:
        said = node.shell(f"""
            cd /srv/evil
            export HOME=/srv/home PYTHONPATH=/srv/evil PYTHONUSERBASE=/srv/home/.local
            export PYTHONSTARTUP=/srv/evil/startup.py PYTHONINSPECT=
            {program} --version
        """)
        assert said.startswith(program.rpartition("/")[2])
        assert not node.path(trace).exists()
    finally:
        node.shell(f"rm -rf /srv/evil /srv/home {trace}")


COMPLETED = {
    "brine ": NOUNS,
    "brine instance re": {"reboot", "rename", "resume"},
    "brine instance start --a": {"--all"},
    "brine instance stop web1 ": {"db1"},
    "brine instance define --l": {"--live"},
    "brine instance import x --accel ": {"kvm", "tcg"},
    "brine kvmd ": {"verdicts"},
    "brine kvmd verdicts --s": {"--since"},
    "brine-kvmd --ch": {"--check"},
    "brine config e": {"export-node", "export-ssconf", "extra-files"},
    "brine config export-node n": {"node1.example.com"},
    "brine config record --node n": {"node1.example.com"},
    "brine config apply --p": {"--prune"},
    "brine config apply /etc/machine": {"/etc/machine-id"},
    "brine config restore ": {"41"},
    "brine uidpool ": {"show", "add", "remove", "set"},
    "brine uidpool add --d": {"--dry-run"},
    "brine uidpool remove 40": {"4000-4099"},
    "brine confd ": {"query", "ping", "new-key", "check-key"},
    "brine confd query node-ip": {"node-ips", "node-ip-of-instance-ip"},
    "brine confd query node-role n": {"node1.example.com"},
    "brine confd query --json instance-disks ": {"web1.example.com"},
    "brine confd query ping --pe": {"--peer"},
    "brine confd ping --peer ": {"192.0.2.1"},
    "brine-confd --ch": {"--check"},
    "brine nic ": {"add", "list", "modify", "remove"},
    "brine nic add --qmp ": {f"{CONTROL_DIR}/web1.qmp"},
    "brine nic add --mode ": {"bridged", "routed", "openvswitch"},
    "brine nic add --mode routed --re": {"--reserved-slots"},
    "brine disk add --cache write": {"writeback", "writethrough"},
    "brine tap up --link ": {"br0"},
    "brine tap down vm-": {"vm-web1-6zt2qk"},
    "brine tap gc --i": {"--idle-for"},
    "brine watcher r": {"run", "resume"},
    "brine watcher run --d": {"--dry-run"},
    "brine watcher pause ": {"30m", "2h", "1d"},
    "brine watcher forget ": {"db1"},
    "brine storage c": {"check", "create"},
    "brine storage list --type lvm": {"lvm-pv", "lvm-vg"},
    "brine storage modify lvm-pv /dev/sda --allocatable ": {"yes", "no"},
    "brine storage create ": {"file"},
    "brine storage remove file ": {"/srv/vms"},
    "brine storage default ": {"/srv/vms"},
    "brine storage evacuate file /srv/vms --to ": {"/srv/vms"},
    "brine disk add db1 --size 1G --unit ": {"/srv/vms"},
    "brine disk add db1 --wipe f": {"full"},
    "brine disk add db1 --size 1G --format ": {"raw", "qcow2"},
    "brine disk grow ": {"db1"},
    "brine disk grow db1 ": {"data", "root"},
    "brine disk remove db1 --delete d": {"data"},
    "brine disk move db1 data --to ": {"/srv/vms"},
    "brine disk status ": {"db1"},
    "brine disk snapshot db1 --r": {"--remove"},
    "brine disk snapshot db1 --remove ": {"before-upgrade", "monday"},
    "brine disk rollback db1 m": {"monday"},
    "brine lock ": {"list", "run"},
    "brine lock run --s": {"--shared", "--storage"},
    "brine lock run --purpose move --instance w": {"web1.example.com"},
    "brine lock run --node n": {"node1.example.com"},
    "brine lock run --group d": {"default"},
    "brine operations settle ": {"01700000000000000000-0123abcd"},
    "brine outbox acknowledge ": {"01700000000000000000-0123abcd"},
}


@pytest.fixture
def without_timers(installed_node: Node) -> Iterator[None]:
    """What a timer starts removes files that are there for nothing but their names."""
    timers = ["brine-tap-gc.timer", "brine-watcher.timer"]
    installed_node.run(["systemctl", "stop", *timers])
    yield
    installed_node.run(["systemctl", "start", *timers])


@pytest.mark.usefixtures("without_timers")
def test_completion(installed_node: Node) -> None:
    for key, value in {
        "node_list": "node1.example.com",
        "instance_list": "web1.example.com",
        "master_candidates_ips": "192.0.2.1",
        "nodegroups": "8e4f35b5-9a4a-4cf4-9c5d-0c6c9a2d3c11 default",
        "uid_pool": "4000-4099\n5000",
    }.items():
        installed_node.write(f"/var/lib/brine/ssconf/ssconf_{key}", f"{value}\n")
    installed_node.write("/var/lib/brine/config.versions/41", "{}")
    installed_node.write(f"{CONTROL_DIR}/web1.qmp", "")
    installed_node.write("/run/brine/taps/vm-web1-6zt2qk.json", "{}")
    _define_with_snapshots(installed_node, "db1")
    installed_node.write("/var/lib/brine/operations/01700000000000000000-0123abcd.json", "{}")
    installed_node.write("/var/lib/brine/outbox/01700000000000000000-0123abcd.json", "{}")
    installed_node.run(["ip", "link", "add", "br0", "type", "bridge"], check=False)
    said = installed_node.shell("\n".join([_COMPLETING, *map(_completing, COMPLETED)]))
    found = dict(zip(COMPLETED, said.split("completed:\n")[1:], strict=True))
    assert {typed: set(words.split()) for typed, words in found.items()} == COMPLETED


_COMPLETING = """
set +eu
. /usr/share/bash-completion/bash_completion
"""


def _completing(typed: str) -> str:
    """Bash that completes what is typed, in a shell of its own."""
    words = typed.split(" ")
    command = words[0]
    return f"""(
        . /usr/share/bash-completion/completions/{command}
        COMP_WORDS=({" ".join(f"'{word}'" for word in words)})
        COMP_CWORD={len(words) - 1} COMP_LINE='{typed}' COMP_POINT={len(typed)}
        _{command.replace("-", "_")} {command} '{words[-1]}' '{words[-2]}'
        echo completed:
        printf '%s\\n' "${{COMPREPLY[@]}}"
    )"""


def _define_with_snapshots(node: Node, name: str) -> None:
    """Define an instance that has disks and snapshots, unless it is there."""
    if node.path(f"/var/lib/brine/instances/{name}.json").exists():
        return
    node.shell("brine storage create file /srv/vms && brine storage default /srv/vms")
    spec = {"name": name, "disks": [{"name": one, "size_mib": 1} for one in ("root", "data")]}
    node.run(["brine", "instance", "define", "-"], stdin=json.dumps(spec))
    for snapshot in ("before-upgrade", "monday"):
        node.run(["brine", "disk", "snapshot", name, "--name", snapshot])


def test_bad_settings_fail_and_are_tried_again(node: Node) -> None:
    short = "[Timer]\nOnActiveSec=\nOnUnitInactiveSec=\nOnActiveSec=12s\nOnUnitInactiveSec=12s\n"
    node.write("/etc/systemd/system/brine-kvmd-retry.timer.d/test.conf", short)
    # On a slow machine, too, so many attempts are to be made in that time as make the path fail.
    slow = "/etc/systemd/system/brine-kvmd.path.d/test.conf"
    node.write(slow, "[Path]\nTriggerLimitIntervalSec=120s\nTriggerLimitBurst=15\n")
    node.run(["systemctl", "daemon-reload"])
    node.write("/etc/brine/kvmd.toml", "sufix = '.kvmd'\n")
    with start_guest(node, "web1") as guest:
        failed = "until systemctl is-failed --quiet brine-kvmd.path; do sleep 0.1; done"
        node.shell(failed, timeout_s=300)
        records = node.journal("_SYSTEMD_UNIT=brine-kvmd.service", "--grep=did you mean suffix")
        # Some attempts, not a busy loop.
        assert 0 < len(records) <= 20
        node.write("/etc/brine/kvmd.toml", "")
        node.path(slow).unlink()
        node.run(["systemctl", "daemon-reload"])
        # The path counts its starts of 30 s: up to three of the timer's may come too early.
        wait_watching(node, "web1", timeout_s=120)
        assert unit_states(node) == ["active", "active"]
        guest.wait_ready()
        guest.order("poweroff")
        assert wait_verdict(node, "web1") == ("user", "guest-shutdown")


def test_filters_are_there_after_nftables_has_done_anything(node: Node) -> None:
    mac, own = "52:54:00:12:34:56", "table inet own {\n}\n"
    node.run(["ip", "link", "add", "filtered0", "type", "bridge"])
    options = ["--link", "filtered0", "--mac", mac, "--filter"]
    tap = node.run(["brine", "tap", "up", "web3", *options]).stdout.split()[1].rstrip(",")
    node.write("/etc/nftables.conf", f"#!/usr/sbin/nft -f\nflush ruleset\n{own}")
    for verb in ("start", "reload", "restart", "stop"):
        node.run(["systemctl", verb, "nftables"])
        assert mac in node.run(["nft", "list", "table", "netdev", f"brine-{tap}"]).stdout
    assert "own" not in node.run(["nft", "list", "tables"]).stdout
    said = [row["MESSAGE"] for row in node.journal("_SYSTEMD_UNIT=nftables.service")]
    assert any(f"{tap}: its filter was gone" in line for line in said)
    node.run(["nft", "flush", "ruleset"])
    (row,) = node.shell("brine tap list --wide").splitlines()[1:]
    assert row.split()[-2:] == ["missing", "-"]
    assert tap in node.run(["brine", "tap", "filter"]).stdout
    (row,) = node.shell("brine tap list --wide").splitlines()[1:]
    assert row.split()[-2:] == ["on", "0"]
    node.run(["brine", "tap", "down", tap])
    node.run(["ip", "link", "delete", "filtered0"])
    assert node.run(["nft", "list", "ruleset"]).stdout == ""


def test_reloads_of_systemd_do_not_fail_the_path(node: Node) -> None:
    with start_guest(node, "web1"):
        wait_watching(node, "web1")
        node.shell("for i in $(seq 35); do systemctl daemon-reload; done")
        assert unit_states(node) == ["active", "active"]


def start_gc(node: Node) -> None:
    """Have the timer's service look for leftovers once, as if nobody had opened a tap for long."""
    for file in node.path("/run/brine/taps").glob("*"):
        text = re.sub(r'"since": [0-9.]+', '"since": 0', file.read_text())
        file.write_text(re.sub(r'"since_s": [0-9.]+', '"since_s": -1000', text))
    node.run(["systemctl", "start", GC])


def test_what_dead_vms_leave_is_removed_by_the_timers_service(node: Node) -> None:
    condition = ["systemctl", "show", "--property=ConditionResult", "--value", GC]
    node.run(["systemctl", "start", GC])
    assert node.run(condition).stdout == "no\n"  # there is nothing, so nothing is started

    script = """#!/bin/sh -e
        # What scripts do to networks.
        ip address add 192.0.2.99/32 dev lo
        ip address delete 192.0.2.99/32 dev lo
        echo "$1 $INTERFACE" >>/run/calls
        echo "$1" >>/var/lib/calls
    """
    node.write(f"{SCRIPTS_DIR}/50-test", script, mode=0o755)
    node.run(["ip", "link", "add", "br0", "type", "bridge"])
    bridged = ["--instance", "web1", "--link", "br0"]
    routed = ["--instance", "web2", "--mode", "routed", "--ip", "198.51.100.7", "--link", "100"]
    for wiring in (bridged, routed):
        node.run(["brine", "tap", "up", *wiring])
    # A VM whose tap ended with it, as if by kill -9: only its record tells of the rule.
    names = node.shell("ip -o link | grep -o 'vm-web[0-9]-[a-z0-9]*'").split()
    node.run(["ip", "link", "delete", names[1]])
    assert "lookup 100" in node.run(["ip", "rule"]).stdout

    start_gc(node)
    assert "lookup 100" not in node.run(["ip", "rule"]).stdout
    assert names[0] in node.run(["brine", "tap", "list"]).stdout  # may be being restarted
    start_gc(node)
    assert node.run(["brine", "tap", "list"]).stdout == "no taps\n"
    assert node.run(["systemctl", "show", "--property=Result", GC]).stdout == "Result=success\n"
    calls = node.read("/run/calls").splitlines()
    assert calls[-2:] == [f"pre-down {names[0]}", f"down {names[0]}"]
    assert f"down {names[1]}" in calls
    told = node.journal("BRINE_EVENT=leftover-removed", f"_SYSTEMD_UNIT={GC}")
    assert [one["BRINE_TAP"] for one in told] == [names[1], names[0]]
    warnings = node.journal(f"_SYSTEMD_UNIT={GC}", "--priority=warning")
    assert warnings == []


@pytest.mark.both_releases
def test_upgrade_ends_no_guest_and_loses_no_event(node: Node, next_packages: list[Path]) -> None:
    with (
        start_guest(node, "runs") as runs,
        start_guest(node, "poweroff") as poweroff,
        start_guest(node, "powerdown") as powerdown,
    ):
        for guest in (runs, poweroff, powerdown):
            guest.wait_ready()
            wait_watching(node, guest.name)
        node.write(f"{SCRIPTS_DIR}/50-mine", "#!/bin/sh\n", mode=0o755)
        node.write("/run/systemd/system/brine-kvmd.service.d/test.conf", CAN_BE_HELD_BACK)
        publish(node, next_packages)
        long_pass = begin_long_pass(node)
        # Paused, this guest hears of the powerdown only when the daemon is away.
        powerdown.qmp("stop")
        powerdown.powerdown()
        with ThreadPoolExecutor(1) as pool:
            # Guests end in the middle of the upgrade.
            with held_back(node):
                upgrade = pool.submit(install, node)
                wait_for("the daemon to be down", lambda: kvmd_pid(node) == "0", timeout_s=200)
                powerdown.qmp("cont")
                poweroff.order("poweroff")
                powerdown.wait()
                poweroff.wait()
                assert kvmd_pid(node) == "0"
            upgrade.result()
        installed = node.run(["dpkg-query", "--show", "--showformat=${Version}", "brine-kvmd"])
        assert installed.stdout.endswith("+next")
        # No pass finds half of each version.
        assert not long_pass.exists()
        changes = changed_s(node, "/usr/lib/python3/dist-packages")
        assert moment_of(node, "InactiveEnterTimestamp") < min(changes)
        assert max(changes) < moment_of(node, "ActiveEnterTimestamp")

        assert wait_verdict(node, "poweroff") == ("user", "guest-shutdown")
        assert wait_verdict(node, "powerdown") == ("admin", "powerdown")
        assert runs.running()
        assert verdicts(node, "runs") == []
        for timer in (GC_TIMER, WATCHER_TIMER):
            assert node.run(["systemctl", "is-active", timer]).stdout == "active\n"
        assert node.read(f"{SCRIPTS_DIR}/50-mine") == "#!/bin/sh\n"
        runs.order("poweroff")
        assert wait_verdict(node, "runs") == ("user", "guest-shutdown")


def begin_long_pass(node: Node) -> Path:
    """Begin a pass of the watcher that takes very long; returns its process's folder in /proc."""
    slow = "/run/systemd/system/brine-watcher-ended.service.d/slow.conf"
    node.write(slow, "[Service]\nExecStartPre=/bin/sleep 600\n")
    node.run(["systemctl", "daemon-reload"])
    node.run(["systemctl", "start", "--no-block", "brine-watcher-ended.service"])
    # The next pass is a usual one.
    node.run(["rm", slow])
    show = ["systemctl", "show", "--property=ControlPID", "--value", "brine-watcher-ended.service"]
    pid = wait_for("a pass", lambda: node.run(show).stdout.strip().removeprefix("0"))
    return node.path(f"/proc/{pid}")


def test_remove_and_purge_leave_what_belongs_to_others(node: Node) -> None:
    node.write("/etc/brine/kvmd.toml", 'log_level = "debug"\n')
    with start_guest(node, "runs") as runs, start_guest(node, "ended") as ended:
        wait_watching(node, "runs")
        ended.wait_ready()
        ended.order("poweroff")
        wait_verdict(node, "ended")

        node.run(["ip", "link", "add", "br0", "type", "bridge"])
        up = ["brine", "tap", "up", "runs-tap", "--instance", "runs", "--link", "br0"]
        node.run(up)

        apt(node, "remove", "brine-kvmd", "brine-hotplug")
        assert unit_states(node) == ["inactive", "inactive"]
        for timer in (GC_TIMER, WATCHER_TIMER):
            shown = ["systemctl", "is-active", timer]
            assert node.run(shown, check=False).stdout.strip() == "inactive"
        assert runs.running()
        assert node.path("/etc/brine/kvmd.toml").exists()

        apt(node, "purge", *PACKAGES)
        assert runs.running()
        assert not node.path("/etc/brine").exists()
        assert not node.path("/run/brine-kvmd").exists()
        assert not node.path("/run/lock/brine").exists()
        assert node.run(["ip", "-o", "link", "show", "runs-tap"]).stdout != ""
        assert {path.name for path in node.path("/run/brine").iterdir()} == {"ctrl"}
        left = {path.name for path in node.path(CONTROL_DIR).iterdir()}
        assert left == {"runs.kvmd", "runs.qmp", "ended.shutdown"}
        files = node.shell("find /etc /usr /var/lib/systemd -name '*brine*' -not -name '*-lab*'")
        assert files == ""


def test_purge_leaves_the_key_and_the_configuration_and_says_so(node: Node) -> None:
    node.write(KEY_FILE, KEY, mode=0o600)
    node.write("/etc/brine/confd.toml", "workers = 2\n")
    # As Salt's state notes what it has brought.
    node.write("/var/lib/brine/salt-files", "/etc/brine/vnc/web1\0")
    node.write("/etc/brine/vnc/web1", "sesame")
    apply(node, declared())
    apply(node, declared(web1="node2"))
    # What a start in an owner's slice leaves, also beside a file of an admin's.
    drop_ins = "/run/systemd/system/brine-instance@{}.service.d"
    for name in ("web1", "web2"):
        node.write(f"{drop_ins.format(name)}/50-brine-slice.conf", "[Service]\nSlice=ci.slice\n")
    node.write(f"{drop_ins.format('web2')}/admin.conf", "")
    node.run(["systemctl", "start", "brine-confd.service"])
    node.run(["systemctl", "reload", "brine-confd.service"])

    apt(node, "remove", "brine-confd")
    shown = ["systemctl", "is-active", "brine-confd.service"]
    assert node.run(shown, check=False).stdout.strip() == "inactive"
    assert not node.path("/run/brine-confd").exists()
    assert node.path("/etc/brine/confd.toml").exists()

    said = apt(node, "purge", *PACKAGES)
    assert f"{KEY_FILE} is left" in said
    assert f"{CONFIG}, the cluster's configuration, is left" in said
    left = node.shell("find /etc /usr /var/lib /run -xdev -path '*brine*' -not -path '*brine-*'")
    assert set(left.split()) == {"/etc/brine", KEY_FILE, "/var/lib/brine", CONFIG}
    files = node.shell("find /etc /usr /run -xdev -name '*brine-*' -not -name '*-lab*'")
    assert files.split() == [drop_ins.format("web2")]


# What dpkg and apt keep of any package, and accounts: they stay, or others could get their ids.
NOT_OF_PACKAGES = [
    "/etc/group*",
    "/etc/gshadow*",
    "/etc/passwd*",
    "/etc/shadow*",
    "/var/cache/*",
    "/var/lib/apt/*",
    "/var/lib/dpkg/*",
    "/var/log/*",
]


def files_of(node: Node) -> set[str]:
    """The files of a node, with their owners, modes and, of /etc, contents."""
    others = " ".join(f"-not -path '{pattern}'" for pattern in NOT_OF_PACKAGES)
    found = node.shell(f"""
        find /etc /opt /usr /var -xdev {others} -printf '%p %u:%g %m %l\n'
        find /etc -xdev -type f {others} -exec sha256sum {{}} +
    """)
    return set(found.splitlines())


@pytest.mark.both_releases
def test_purge_leaves_the_system_as_it_was(release: str, packages: list[Path]) -> None:
    with boot_node(release) as node:
        publish(node, packages)
        before = files_of(node)
        install(node)
        node.shell("brine instance list; brine watcher run; python3 -m brine.kvmd.main --check")
        apt(node, "reinstall", *PACKAGES)
        apt(node, "remove", *PACKAGES)
        install(node)
        apt(node, "purge", *PACKAGES)
        assert files_of(node) ^ before == set()


def test_a_refused_removal_names_all_that_is_gone(node: Node) -> None:
    node.put(guest_image().folder, GUEST)
    boot_idle(node, "web1")
    remove = ["apt-get", "remove", "--yes", "brine-common"]
    done = node.run(remove, check=False, timeout_s=300)
    assert done.returncode != 0
    assert "brine-instance: error: virtual machines run: web1\n" in done.stdout
    assert "brine-instance: hint: stop them first: brine instance stop NAME\n" in done.stdout
    said = re.search(r"to have them back: (apt install .*)", done.stdout)
    assert said
    gone = set(PACKAGES) - installed(node)
    assert "brine-watcher" in gone
    assert set(said[1].split()[2:]) == gone
    node.shell(f"DEBIAN_FRONTEND=noninteractive {said[1].replace('apt', 'apt-get --yes')}")
    assert installed(node) == set(PACKAGES)
    node.run(["brine", "instance", "stop", "--force", "web1"])
    assert wait_verdict(node, "web1")[0] == "admin"


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

    # No mode keeps a file from it, so it sees but few, and writes to what is its own.
    node.run(["systemctl", "reload", "brine-kvmd.service"])
    inside = f"nsenter --target {kvmd_pid(node)} --mount"
    for hidden in ("/etc/shadow", "/var/lib/brine", "/var/log", "/run/dbus", "/run/ganeti/other"):
        node.shell(f"test -e {hidden} || mkdir {hidden}; ! {inside} test -e {hidden}")
    node.shell(f"{inside} touch /run/mark {control_dir}/mark; ! {inside} touch /usr/mark")
    assert node.path(f"{control_dir}/mark").exists()
    assert not node.path("/run/mark").exists()
