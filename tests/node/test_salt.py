"""The Salt states: what they set up, that they do it once, and that they undo it."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lab.command import run_command
from lab.errors import LabError
from lab.node import Node
from lab.repository import FOLDER, KEY
from lab.salt import PILLAR, STATES, apply_state, give_states
from lab.tree import copy_sources, source_files
from node.kvmd_on_node import kvmd_pid
from node.salt_on_node import EXTENSIONS, loaded, of_the_tree

GANETI = {
    "kvmd": {
        "root_only": True,
        "settings": {"control_dir": "/run/ganeti/kvm-hypervisor/ctrl", "suffix": ".qmp"},
    }
}
# Salt has apt read its repositories for the first such state of a run, and not for the next.
OTHER_STATE: dict[str, dict[str, list[Any]]] = {"dpkg": {"pkg.latest": []}}
HOSTILE: dict[str, Any] = {
    "version": 0.2,
    "repository": [1],
    "kvmd": {"enabled": "no", "settings": {"control_dir": 5, "suffix": {}}},
    "confd": {"key": " ", "settings": {"key_file": []}},
    "hotplug": {"enabled": {}, "scripts": {"a: b": "c", "60-x": ["d"]}},
    "instance": {"at_boot": "maybe", "instances": ["web1"]},
    "lifecycle": 5,
    "watcher": {"settings": "often"},
    "config": {"apply": [], "source": {}},
    "nodes": {"node1": 5},
}
HOSTILE_SAID = [
    "brine:version: must be a string, but is a number; put it in quotes",
    "brine:repository: must be a mapping, but is a list",
    "brine:kvmd:enabled: must be true or false, but is a string; false, without quotes, is meant",
    (
        "brine:kvmd:settings:control_dir: must be an absolute path, but is a whole number; "
        "put it in quotes"
    ),
    "brine:kvmd:settings:suffix: must be a string, but is a mapping",
    "brine:confd:settings:key_file: must be an absolute path, but is a list",
    "brine:hotplug:enabled: must be true or false, but is a mapping",
    "brine:hotplug:scripts:a: b: a name here is of letters, digits, - and _ only",
    "brine:hotplug:scripts:60-x: must be a string, but is a list",
    "brine:instance:at_boot: must be true or false, but is a string",
    "brine:instance:instances: must be a mapping, but is a list",
    "brine:lifecycle: must be a mapping, but is a whole number",
    "brine:watcher:settings: must be a mapping, but is a string",
    "brine:config:apply: must be true or false, but is a list",
    "brine:config:source: must be a string, but is a mapping",
    "brine:nodes:node1: must be a mapping, but is a whole number",
    "brine:confd:key: is blank; put the cluster's key there, or leave it out",
]
MISFIT = (
    "brine:hotplug:enabled: brine-instance, which this node has or is to have, needs brine-hotplug"
)
PATH_DROP_IN = "/etc/systemd/system/brine-kvmd.path.d/salt.conf"
SERVICE_DROP_IN = "/etc/systemd/system/brine-kvmd.service.d/salt.conf"
# Where Salt remembers for a while which files there are.
FILE_LISTS = "/var/cache/salt/minion/file_lists"


def give_pillar(node: Node, brine: Mapping[str, Any] | None) -> None:
    """Replace the node's pillar `brine:`."""
    give_states(node, {"brine": brine})


def changed(node: Node, state: str = "brine", *, test: bool = False) -> dict[str, Any]:
    """Apply a state, and return what it changed, or would: the state's name and the changes."""
    results = apply_state(node, state, test=test)
    return {one.name: one.changes for one in results if one.result is None or one.changes}


def unit_state(node: Node, *units: str) -> list[str]:
    """Each unit's state: active, inactive, failed."""
    return node.run(["systemctl", "is-active", *units], check=False).stdout.split()


def test_test_mode_says_what_it_would_do_and_does_nothing(node: Node) -> None:
    give_pillar(node, {"kvmd": {"settings": {"log_level": "debug"}}})
    assert changed(node, test=True)
    assert not node.path("/usr/sbin/brine-kvmd").exists()
    assert not node.path("/etc/brine").exists()


@pytest.mark.parametrize("test", [True, False])
@pytest.mark.parametrize(
    ("brine", "said"),
    [
        ("text", ["brine: must be a mapping, but is a string"]),
        ({"kvmdd": None}, ["brine:kvmdd: there is no such key; the nearest is kvmd"]),
        (HOSTILE, HOSTILE_SAID),
        ({"hotplug": {"enabled": False}, "instance": {"enabled": True}}, [MISFIT]),
    ],
    ids=["text", "unknown", "hostile", "misfit"],
)
def test_pillar_with_a_fault_changes_nothing(
    node: Node, brine: Any, said: list[str], test: bool
) -> None:
    give_states(node, {"brine": brine})
    ours = "dpkg-query --list; find /etc /run /usr /var/lib -name '*brine*' | sort"
    before = node.shell(ours)
    with pytest.raises(LabError) as refused:
        apply_state(node, test=test)
    lines = str(refused.value).splitlines()[1:]
    lines = [line for line in lines if "requisite failed" not in line]
    assert [line.partition("| ")[2] or line for line in lines] == [
        f"brine-pillar: {said[0]}",
        *said[1:],
    ]
    assert node.shell(ours) == before


def test_pillar_of_any_shape_is_rendered(node: Node) -> None:
    shapes: list[Any] = ["text", HOSTILE, dict.fromkeys(HOSTILE, 5), {key: [] for key in HOSTILE}]
    for brine in shapes:
        give_states(node, {"brine": brine})
        show = ["salt-call", "--local", "--out=json", "state.show_sls", "brine,brine.clean"]
        shown = json.loads(node.run(show).stdout)["local"]
        assert {"brine-pillar", "brine-clean-packages"} <= set(shown)


def test_a_fault_in_one_instance_of_a_bare_node_is_that_instances(node: Node) -> None:
    instances = {"bad1": {"memory_mb": 512}, "good1": {"memory_mib": 512}}
    give_pillar(node, {"instance": {"instances": instances}})
    with pytest.raises(LabError) as refused:
        apply_state(node, test=True)
    lines = [line for line in str(refused.value).splitlines()[1:] if "bad1" in line]
    assert "bad1:memory_mb: there is no such key; the nearest is memory_mib" in lines[0]
    assert "good1" not in str(refused.value)
    assert not node.path("/etc/brine").exists()


def test_first_run_wires_a_node_and_the_second_changes_nothing(node: Node) -> None:
    give_pillar(node, {"kvmd": {"settings": {"log_level": "debug", "powerdown_stale_s": 1.5}}})
    apply_state(node)
    assert 'log_level = "debug"\npowerdown_stale_s = 1.5\n' in node.read("/etc/brine/kvmd.toml")
    units = ["brine-kvmd.path", "brine-kvmd.service"]
    assert unit_state(node, *units) == ["active", "inactive"]
    enabled = node.run(["systemctl", "is-enabled", *units], check=False).stdout.split()
    assert enabled == ["enabled", "disabled"]

    assert changed(node) == {}
    assert changed(node, test=True) == {}


@pytest.mark.parametrize("test", [False, True])
def test_a_mistake_in_pillar_changes_nothing(node: Node, test: bool) -> None:
    give_pillar(node, {})
    apply_state(node)
    give_pillar(node, {"kvmd": {"settings": {"log_leval": "debug"}}})
    with pytest.raises(LabError, match="the nearest is log_level"):
        apply_state(node, test=test)
    assert not node.path("/etc/brine/kvmd.toml").exists()
    assert unit_state(node, "brine-kvmd.path") == ["active"]


def test_new_settings_reload_a_running_daemon(node: Node) -> None:
    give_pillar(node, {"kvmd": {"on_demand": False}})
    apply_state(node)
    pid = kvmd_pid(node)
    assert pid != "0"
    assert changed(node) == {}

    give_pillar(node, {"kvmd": {"on_demand": False, "settings": {"rescan_interval_s": 5}}})
    apply_state(node)
    assert kvmd_pid(node) == pid
    assert node.journal("_SYSTEMD_UNIT=brine-kvmd.service", "--grep=reloaded")
    assert changed(node) == {}


def test_always_or_on_demand(node: Node) -> None:
    units = ["brine-kvmd.path", "brine-kvmd.service"]
    give_pillar(node, {"kvmd": {"on_demand": False}})
    apply_state(node)
    assert unit_state(node, *units) == ["inactive", "active"]
    give_pillar(node, {})
    apply_state(node)
    # What runs is left running: it may watch VMs.
    assert unit_state(node, *units) == ["active", "active"]
    enabled = node.run(["systemctl", "is-enabled", *units], check=False).stdout.split()
    assert enabled == ["enabled", "disabled"]
    assert changed(node) == {}


def test_another_control_directory_comes_with_drop_ins(node: Node) -> None:
    give_pillar(node, GANETI)
    apply_state(node)
    assert "PathExistsGlob=/run/ganeti/kvm-hypervisor/ctrl/*.qmp\n" in node.read(PATH_DROP_IN)
    shown = node.run(["systemctl", "show", "--property=Paths", "brine-kvmd.path"]).stdout
    assert "/run/ganeti/kvm-hypervisor/ctrl/*.qmp (PathExistsGlob)" in shown
    assert "/run/brine/ctrl" not in shown
    capabilities = ["systemctl", "show", "--property=AmbientCapabilities", "brine-kvmd.service"]
    assert "cap_dac_override" in node.run(capabilities).stdout
    assert changed(node) == {}
    # It runs with what the state gave it, and sees not much more than its directory.
    node.shell("mkdir -p -m 0700 /run/ganeti/kvm-hypervisor/ctrl; systemctl start brine-kvmd")
    node.shell(f"test -e /etc/shadow; ! nsenter -t {kvmd_pid(node)} -m test -e /etc/shadow")
    node.shell("systemctl stop brine-kvmd; rm -r /run/ganeti")

    give_pillar(node, {})
    apply_state(node)
    assert not node.path(PATH_DROP_IN).exists()
    assert not node.path(SERVICE_DROP_IN).exists()
    assert "cap_dac_override" not in node.run(capabilities).stdout


def test_unusual_characters_reach_the_daemon_and_its_units(node: Node) -> None:
    control_dir = "/srv/brine 𝄞/ctrl"
    pillar = {"kvmd": {"settings": {"control_dir": control_dir, "log_level": None}}}
    give_pillar(node, {})
    # As an administrator writes it: JSON would have escapes, which YAML takes for two characters.
    node.write(f"{PILLAR}/brine.sls", json.dumps({"brine": pillar}, ensure_ascii=False))
    apply_state(node)
    assert tomllib.loads(node.read("/etc/brine/kvmd.toml")) == {"control_dir": control_dir}
    shown = node.run(["systemctl", "show", "--property=ReadWritePaths", "brine-kvmd.service"])
    assert f"-{control_dir}" in shown.stdout
    shown = node.run(["systemctl", "show", "--property=Paths", "brine-kvmd.path"])
    assert f"{control_dir}/*.kvmd (PathExistsGlob)" in shown.stdout


def test_a_node_that_is_to_have_no_kvm_daemon_loses_it(node: Node) -> None:
    give_pillar(node, GANETI)
    apply_state(node)
    give_pillar(node, {"kvmd": {"enabled": False, **GANETI["kvmd"]}})
    apply_state(node)
    assert unit_state(node, "brine-kvmd.path", "brine-kvmd.service") == ["inactive", "inactive"]
    assert node.shell("find /usr -xdev -name '*brine-kvmd*'") == ""
    assert node.path("/usr/bin/brine").exists()
    assert changed(node) == {}


def test_a_node_that_is_to_have_no_kvm_daemon_gets_none_with_its_instances(node: Node) -> None:
    """Although brine-instance recommends it."""
    node.run(["apt-get", "--yes", "--quiet=2", "remove", "brine-instance", "brine-kvmd"])
    options = "/etc/apt/apt.conf.d/99-as-debian-has-it"
    node.write(options, 'APT::Install-Recommends "true";\n')
    try:
        simulated = node.run(["apt-get", "--simulate", "install", "brine-instance"]).stdout
        assert "Inst brine-kvmd " in simulated
        give_pillar(node, {"kvmd": {"enabled": False}, "instance": {"enabled": True}})
        apply_state(node)
    finally:
        node.path(options).unlink()
    assert node.path("/usr/lib/systemd/system/brine-instance@.service").exists()
    assert node.shell("find /usr -xdev -name '*brine-kvmd*'") == ""
    assert changed(node) == {}


def test_what_pillar_leaves_empty_has_its_default(node: Node) -> None:
    def shown(brine: Mapping[str, Any] | None) -> Any:
        give_pillar(node, brine)
        return json.loads(
            node.run(["salt-call", "--local", "--out=json", "state.show_sls", "brine"]).stdout
        )

    kvmd = {"enabled": None, "settings": {"control_dir": None}}
    defaults = shown({})
    assert "brine-kvmd-running" in defaults["local"]
    assert shown(None) == defaults
    empty = {"version": None, "repository": None, "kvmd": None, "instance": None}
    assert shown(empty) == defaults
    assert shown({"repository": {"line": None, "key": None}, "kvmd": kvmd}) == defaults
    instance = {"enabled": None, "settings": None, "instances": None}
    assert shown({"kvmd": {"settings": None}, "instance": instance}) == defaults


def test_other_modules_of_the_minion_stay_and_ours_come_from_the_states_environment(
    node: Node,
) -> None:
    give_pillar(node, {"kvmd": {"enabled": False}})
    folder = f"{EXTENSIONS}/states"
    node.write(f"{folder}/theirs.py", "def there(name):\n    return {}\n")
    apply_state(node, "brine.loaded")
    assert node.path(f"{folder}/theirs.py").exists()
    ours = node.read(f"{folder}/brine_config.py")
    assert apply_state(node, "brine.loaded", test=True)

    dev = "/srv/salt/dev"
    node.shell(f"cp -r {STATES} {dev}; echo '# of dev' >>{dev}/_states/brine_config.py")
    minion = json.loads(node.read("/etc/salt/minion.d/local.conf"))
    minion["file_roots"]["dev"] = [dev]
    node.write("/etc/salt/minion.d/local.conf", json.dumps(minion))
    for saltenv, text in (("dev", f"{ours}# of dev\n"), ("base", ours)):
        node.run(["salt-call", "--local", "state.apply", "brine.loaded", f"saltenv={saltenv}"])
        assert node.read(f"{folder}/brine_config.py") == text
    assert node.path(f"{folder}/theirs.py").exists()
    node.path(f"{folder}/theirs.py").unlink()


def test_the_states_may_lie_in_any_folder_of_the_file_roots(node: Node) -> None:
    pillar: dict[str, Any] = {"kvmd": {"enabled": False, "settings": {"suffix": ".qmp"}}}
    give_pillar(node, {**pillar, "instance": {"instances": {"web1": {}}}})
    other = f"{STATES}/site/virtual"
    copy = f"{EXTENSIONS}/states/brine_config.py"
    node.shell(f"""
        mkdir -p {other}
        cp -r {STATES}/brine {other}/machines
        mv {STATES}/_states {other}/
        rm -rf {copy} {FILE_LISTS}
    """)
    try:
        there = apply_state(node, "site.virtual.machines", test=True)
        assert node.path(copy).exists()
        there += apply_state(node, "site.virtual.machines.clean", test=True)
    finally:
        node.shell(f"""
            mv {other}/_states {STATES}/
            rm -r {STATES}/site {FILE_LISTS}
        """)
    here = [*apply_state(node, test=True), *apply_state(node, "brine.clean", test=True)]
    assert [one.name for one in there] == [one.name for one in here]


@pytest.mark.both_releases
def test_salts_loader_finds_what_pip_installed(node: Node, tmp_path: Path) -> None:
    copy_sources(source_files("salt"), tmp_path)
    pip = [sys.executable, "-m", "pip", "--quiet", "wheel", "--no-index", "--no-build-isolation"]
    run_command([*pip, "--no-deps", "--wheel-dir", tmp_path, tmp_path / "salt"])
    (wheel,) = tmp_path.glob("*.whl")
    node.put(wheel, f"/srv/{wheel.name}")
    node.shell(f"""
        rm -rf {EXTENSIONS}
        /opt/salt/bin/pip install --quiet --no-index --no-deps /srv/{wheel.name}
    """)
    try:
        assert loaded(node, "minion") == of_the_tree()
    finally:
        node.run(["/opt/salt/bin/pip", "uninstall", "--yes", "saltext-brine"])


def test_the_examples_of_the_package_set_up_a_minion_and_a_master(node: Node) -> None:
    give_pillar(node, {"instance": {"instances": {"web1": {}}}})
    expected = apply_state(node, test=True)
    examples = "/usr/share/doc/brine-salt/examples"
    node.shell(f"""
        apt-get install --yes --quiet=2 brine-salt
        cp -r {PILLAR} /srv/pillar
        mkdir /etc/salt/master.d
        mv /etc/salt/minion.d /etc/salt/away
        mkdir /etc/salt/minion.d
        cp {examples}/masterless.conf /etc/salt/minion.d/brine.conf
        cp {examples}/master.conf /etc/salt/master.d/brine.conf
        rm -rf {EXTENSIONS} {FILE_LISTS}
    """)
    try:
        assert [one.name for one in apply_state(node, test=True)] == [one.name for one in expected]
        of_a_master = {
            (kind, name) for kind, name in of_the_tree() if kind in ("runners", "pillar")
        }
        assert loaded(node, "master") == of_a_master
    finally:
        node.shell(f"""
            apt-get purge --yes --quiet=2 brine-salt
            rm -r /etc/salt/minion.d /etc/salt/master.d /srv/pillar
            mv /etc/salt/away /etc/salt/minion.d
            rm -rf {EXTENSIONS} {FILE_LISTS}
        """)


@pytest.mark.parametrize("state", ["brine", "brine.clean"])
def test_an_unknown_family_of_distributions_is_refused(node: Node, state: str) -> None:
    grains = node.path("/etc/salt/grains")
    grains.write_text("os_family: Slackware\n")
    try:
        with pytest.raises(LabError) as refused:
            apply_state(node, state)
    finally:
        grains.unlink()
    _, *said = str(refused.value).splitlines()
    assert len(said) == 1
    assert "do not know the os_family Slackware, only Debian and RedHat" in said[0]


def test_repository_of_pillar_and_clean(node: Node) -> None:
    lab_source = node.path("/etc/apt/sources.list.d/brine-lab.list")
    ours = [
        node.path("/etc/apt/sources.list.d/brine-salt.list"),
        node.path("/etc/apt/keyrings/brine-salt.asc"),
    ]
    others = [
        node.path("/etc/apt/sources.list.d/brine.list"),
        node.path("/etc/apt/keyrings/brine.asc"),
    ]
    apply_state(node, "brine.clean")
    lab_source.unlink()
    node.run(["apt-get", "update", "--quiet=2"])
    for file in others:
        file.write_text("# somebody else's\n")
    node.write(f"{STATES}/other.sls", json.dumps(OTHER_STATE))

    line = f"deb [signed-by=/etc/apt/keyrings/brine-salt.asc] file:{FOLDER} ./"
    give_pillar(node, {"repository": {"line": line.removesuffix(" ./")}})
    with pytest.raises(LabError, match="Malformed entry 1 in list file"):
        apply_state(node)
    assert not ours[0].exists()
    repository = {"line": line, "key": node.read(f"{FOLDER}/{KEY}")}
    give_pillar(node, {"repository": repository, **GANETI})
    results = apply_state(node, "other,brine")
    assert results[0].name == "dpkg"
    assert ours[0].read_text() == f"{line}\n"
    assert ours[1].exists()
    assert changed(node) == {}

    give_pillar(node, {**GANETI})
    apply_state(node)
    assert not any(file.exists() for file in ours)
    give_pillar(node, {"repository": repository, **GANETI})
    apply_state(node)

    results = apply_state(node, "other,brine.clean", test=True)
    # What needs the others goes first, and so does what could start the service again.
    stopped = ["brine-kvmd-retry.timer", "brine-kvmd.path", "brine-kvmd.service"]
    names = [one.name for one in results]
    assert names[0] == "dpkg"
    assert [name for name in names if name in stopped] == stopped
    assert any(one.result is None for one in results)
    apply_state(node, "brine.clean")
    assert changed(node, "brine.clean") == {}
    assert all(file.exists() for file in others)
    for file in others:
        file.unlink()
    left = node.shell("find /etc /usr /var/lib/systemd -name '*brine*' -not -name '*brine-lab*'")
    assert left == ""
    assert node.run(["dpkg-query", "--list", "brine-*"], check=False).returncode == 1
    assert unit_state(node, "brine-kvmd.path", "brine-kvmd.service") == ["inactive", "inactive"]
