"""The Salt states of instances: what pillar declares, and what it leaves to users and operators."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from lab.errors import LabError
from lab.guest_image import guest_image
from lab.node import Node
from lab.salt import STATES, StateResult, apply_state, give_states
from lab.tree import TREE
from node.instance_on_node import (
    GUEST,
    SMALLEST,
    info,
    left_of,
    order,
    start,
    wait_ready,
    wait_status,
)
from node.kvmd_on_node import wait_watching

SETTINGS = "/etc/brine/instance.toml"
UNIT = "/usr/lib/systemd/system/brine-instance@.service"
TARGET = "brine-instances.target"
UNITS = ["brine-kvmd.path", "brine-watcher.timer", "brine-tap-gc.timer"]
WEB1 = {**SMALLEST, "admin_state": "up", "nics": [{"link": "br0"}]}
DB1 = {"memory_mib": 256, "start_order": 10}
ABSENT = {"absent": True}
POOL = {"uid_pool": "4000-4009"}
STORAGE = {"storage": {"directories": ["/srv/vms", "/srv/ssd"], "default_unit": "/srv/vms"}}


@pytest.fixture(scope="module")
def node(node: Node) -> Node:
    """The same, with a bridge and a guest to boot."""
    node.put(guest_image().folder, GUEST)
    node.shell("ip link add br0 type bridge; ip link set br0 up")
    return node


def applied(
    node: Node,
    instances: Mapping[str, Any],
    *,
    test: bool = False,
    state: str = "brine",
    others: Mapping[str, Any] | None = None,
    **instance: Any,
) -> dict[str, StateResult]:
    """Apply another pillar, and return what was changed, or would be, by the state's name and what
    it is to make."""
    brine = {"instance": {"settings": POOL, **instance, "instances": instances}, **(others or {})}
    give_states(node, {"brine": brine})
    results = apply_state(node, state, test=test)
    return {one.name: one for one in results if one.result is None or one.changes}


def refused(node: Node, instances: Mapping[str, Any], **options: Any) -> str:
    """Salt's faults of a pillar that can't be applied, without the states that only follow."""
    with pytest.raises(LabError) as caught:
        applied(node, instances, **options)
    lines = str(caught.value).splitlines()[1:]
    return "\n".join(line for line in lines if "requisite failed" not in line)


def left_files(node: Node, folder: str) -> list[str]:
    """The files in a folder, and in those in it."""
    return node.run(["find", folder, "-type", "f"]).stdout.split()


def statuses(node: Node, *names: str) -> list[str]:
    """The states of instances, each with its desired state."""
    return [info(node, name)["status"] for name in names]


def test_test_mode_says_what_it_would_do_and_does_nothing(node: Node) -> None:
    # Of which some would be mistaken for the names of states.
    instances = {"web1": WEB1, "web1-running": None, "settings": None, "at-boot": None}
    instances["sized1"] = {"disks": [{"name": "data", "size_mib": 8}]}
    would = applied(node, instances, test=True, others=STORAGE)
    assert {SETTINGS, TARGET, "/srv/vms", "/srv/ssd", *instances} <= would.keys()
    assert not node.path(UNIT).exists()
    assert not node.path("/etc/brine").exists()


@pytest.mark.parametrize("state", ["brine", "brine.config"])
def test_no_instance_of_the_cluster_starts_before_what_it_needs(node: Node, state: str) -> None:
    given = {"node": "node1", "candidate": False, "instances": ["mail1"]}
    brine = {
        "distributed": {**given, "serial": 1, "configuration": "{}"},
        "hotplug": {"scripts": {"50-antispoof": "#!/bin/sh\n"}},
        "instance": {"settings": POOL, "instances": {"old1": ABSENT}},
    }
    give_states(node, {"brine": brine})
    names = [one.name for one in apply_state(node, state, test=True)]
    before = {*names[: names.index("brine-instances-from-config")]}
    needed = {SETTINGS, "/etc/brine/nic.d/50-antispoof", "brine-config-files", "brine-kvmd.path"}
    assert needed | ({"old1"} if state == "brine" else set()) <= before


def test_first_run_starts_what_should_be_up_and_the_second_changes_nothing(node: Node) -> None:
    instances = {"web1": WEB1, "db1": DB1, "plain1": None}
    done = applied(node, instances)
    assert done["db1"].changes == {"db1": {"old": None, "new": "defined"}}
    assert done["web1"].changes["web1"]["new"] == "running"
    wait_ready(node, "web1")
    assert statuses(node, "web1", "db1", "plain1") == ["running", "ADMIN_down", "ADMIN_down"]
    assert info(node, "db1")["memory_mib"] == 256
    assert 'uid_pool = "4000-4009"\n' in node.read(SETTINGS)
    assert node.run(["systemctl", "is-enabled", TARGET]).stdout == "enabled\n"

    assert applied(node, instances) == {}
    assert applied(node, instances, test=True) == {}


def test_one_process_finds_that_nothing_is_to_be_done(node: Node) -> None:
    calls, wrapper = node.path("/srv/calls"), "/usr/local/bin/brine"
    script = '#!/bin/sh\necho "$*" >>/srv/calls\nexec /usr/bin/brine "$@"\n'
    node.write(wrapper, script, mode=0o755)
    assert applied(node, {"web1": WEB1, "db1": DB1, "plain1": None}) == {}
    node.path(wrapper).unlink()
    (call,) = calls.read_text().splitlines()
    assert call.startswith("instance define - ")


def test_a_salt_master_can_ask_and_order(node: Node) -> None:
    def salt_call(*words: str, check: bool = True) -> str:
        call = ["salt-call", "--local", "--out=json", "--retcode-passthrough"]
        return node.run([*call, *words], check=check, timeout_s=300).stdout

    def said(*words: str) -> Any:
        return json.loads(salt_call(*words))["local"]

    rows = {row["name"]: row for row in said("brine.list")}
    assert (rows["web1"]["status"], rows["db1"]["spec"]["memory_mib"]) == ("running", 256)
    assert said("brine.define", "{name: db1, memory_mib: 64}", "test=True")["changed"] is True
    assert said("brine.outbox_list") == []
    refused = node.run(["salt-call", "--local", "brine.start", "nobody"], check=False)
    assert "nobody: there is no such instance" in refused.stdout + refused.stderr
    assert "Traceback" not in refused.stdout + refused.stderr
    grain = said("grains.get", "brine")
    assert grain["version"] == node.run(["brine", "--version"]).stdout.split()[1]
    assert {"instance", "kvmd", "hotplug", "watcher"} <= set(grain["parts"])
    # Salt's own Python has nothing of Brine: all goes through the command.
    done = node.run(["/opt/salt/bin/python3", "-c", "import brine"], check=False)
    assert "No module named 'brine'" in done.stderr


def test_nics_and_disks_in_pillar_are_plugged_in_and_taken_out(node: Node) -> None:
    node.shell("truncate --size=2M /srv/live.img")
    pid = info(node, "web1")["pid"]
    more: dict[str, Any] = {
        **WEB1,
        "nics": [{"link": "br0"}] * 2,
        "disks": [{"path": "/srv/live.img"}],
    }
    for instance, key in ((more, "attached"), (WEB1, "detached")):
        for test in (True, False):
            done = applied(node, {"web1": instance}, test=test)
            assert {one["kind"] for one in done["web1"].changes[key]} == {"nic", "disk"}
        assert applied(node, {"web1": instance}) == {}
        found = info(node, "web1")
        assert (found["pid"], found["restart_pending"]) == (pid, [])
        assert len(found["nics"]) == (2 if instance is more else 1)


def test_what_an_administrator_has_added_stays_and_is_no_change(node: Node) -> None:
    node.shell("truncate --size=2M /srv/hand.img")
    node.run(["brine", "disk", "add", "web1", "--path", "/srv/hand.img"])
    added = node.run(["brine", "nic", "add", "web1", "--link", "br0", "--json"]).stdout
    mac = json.loads(added)["mac"]
    for is_in_spec in (False, True):
        if is_in_spec:
            node.run(["brine", "instance", "reboot", "web1"])
            wait_ready(node, "web1")
        for test in (True, False):
            assert applied(node, {"web1": WEB1}, test=test) == {}
        found = info(node, "web1")
        assert [(one["path"], one["by_hand"]) for one in found["disks"]] == [
            ("/srv/hand.img", True)
        ]
        assert [one["mac"] for one in found["nics"] if one["by_hand"]] == [mac]
        assert len(found["nics"]) == 2
    node.run(["brine", "disk", "remove", "web1", "/srv/hand.img"])
    node.run(["brine", "nic", "remove", "web1", mac])
    for test in (True, False):  # its next start would do that, too
        assert applied(node, {"web1": WEB1}, test=test)["web1"].changes.keys() == {"disks", "nics"}
    assert applied(node, {"web1": WEB1}) == {}
    found = info(node, "web1")
    assert (len(found["disks"]), len(found["nics"])) == (0, 1)


def test_disks_by_size_in_pillar_are_made_and_grown_in_its_units(node: Node) -> None:
    def with_disk(mib: int) -> dict[str, Any]:
        return {"web1": {**WEB1, "disks": [{"name": "data", "size_mib": mib}]}}

    units = {"/srv/vms", "/srv/ssd"}
    would = applied(node, with_disk(8), test=True, others=STORAGE)
    assert units < would.keys() <= {*units, "web1"}
    assert not node.path("/srv/vms").exists()
    assert "no such folder" in refused(node, {}, others={"storage": {"directories": ["/srv/a/b"]}})
    assert "vg1" in refused(node, {"web1": WEB1}, others={"storage": {"default_unit": "vg1"}})
    assert applied(node, {"web1": WEB1}, others=STORAGE).keys() == units
    found = json.loads(node.run(["brine", "storage", "facts"]).stdout)
    assert found["default_unit"] == "/srv/vms"
    assert {one["name"] for one in found["units"] if one["status"] == "ok"} == units
    assert applied(node, {"web1": WEB1}, others=STORAGE) == {}

    for mib, key in ((8, "made"), (16, "grown")):
        before = left_files(node, "/srv/vms")
        would = applied(node, with_disk(mib), test=True)["web1"].changes["volumes"]
        assert [(one["name"], one["size_mib"]) for one in would[key]] == [("data", mib)]
        assert left_files(node, "/srv/vms") == before
        done = applied(node, with_disk(mib))["web1"].changes
        assert [one["name"] for one in done["volumes"][key]] == ["data"]
        assert applied(node, with_disk(mib)) == {}
        assert applied(node, with_disk(mib), test=True) == {}
    status = json.loads(node.run(["brine", "disk", "status", "web1", "--json"]).stdout)
    assert [(row["made"] >> 20, row["status"]) for row in status] == [(16, "ok")]
    for test in (True, False):
        assert "shrink" in refused(node, with_disk(4), test=test)
    assert json.loads(node.run(["brine", "disk", "status", "web1", "--json"]).stdout) == status
    # What pillar has no more stays, and is named.
    done = applied(node, {"web1": WEB1})["web1"].changes
    assert [one["path"] for one in done["volumes"]["kept"]] == [status[0]["path"]]
    node.run(["brine", "storage", "orphans", "--remove", "--yes"])


def test_a_changed_spec_needs_a_reboot(node: Node) -> None:
    pid = info(node, "web1")["pid"]
    changed = {**WEB1, "memory_mib": 160}
    for test in (True, False):
        done = applied(node, {"web1": changed}, test=test)
        assert done["web1"].changes == {"memory_mib": {"old": 128, "new": 160}}
        found = info(node, "web1")
        assert (found["memory_mib"], found["spec"]["memory_mib"]) == (128, 128 if test else 160)
        assert found["restart_pending"] == ([] if test else ["memory_mib"])
        assert "needs a reboot: memory_mib" in done["web1"].comment
    assert info(node, "web1")["pid"] == pid
    # Those that pillar no longer has are left alone.
    assert statuses(node, "db1") == ["ADMIN_down"]


def test_what_its_user_shuts_down_stays_off(node: Node) -> None:
    wait_watching(node, "web1")
    order(node, "web1", "poweroff")
    found = wait_status(node, "web1", "USER_down")
    instances = {"web1": {**WEB1, "memory_mib": found["memory_mib"]}}
    assert applied(node, instances) == {}
    assert statuses(node, "web1") == ["USER_down"]


def test_what_an_admin_stopped_stays_off_where_pillar_says_nothing(node: Node) -> None:
    left_out = {key: value for key, value in WEB1.items() if key != "admin_state"}
    start(node, "web1")
    node.run(["brine", "instance", "stop", "web1"])
    applied(node, {"web1": left_out})
    assert statuses(node, "web1") == ["ADMIN_down"]

    done = applied(node, {"web1": WEB1})
    assert done["web1"].changes == {"web1": {"old": "ERROR_down", "new": "running"}}
    wait_ready(node, "web1")


def test_the_watcher_is_not_overruled(node: Node) -> None:
    def has_tried(count: int, *, given_up: bool) -> str:
        tries = {"count": count, "last": time.time(), "given_up": given_up}
        text = json.dumps({"version": 1, "instances": {"web1": tries}})
        node.write("/var/lib/brine/watcher.json", text)
        return text

    node.run(["systemctl", "stop", "brine-instance@web1"])
    node.run(["brine", "watcher", "pause", "1h"])
    assert applied(node, {"web1": WEB1}) == {}
    node.run(["brine", "watcher", "resume"])
    before = has_tried(5, given_up=True)
    assert applied(node, {"web1": WEB1}) == {}
    assert node.read("/var/lib/brine/watcher.json") == before
    assert statuses(node, "web1") == ["ERROR_down"]
    before = has_tried(2, given_up=False)
    done = applied(node, {"web1": WEB1})
    assert done["web1"].changes == {"web1": {"old": "ERROR_down", "new": "running"}}
    assert node.read("/var/lib/brine/watcher.json") == before
    wait_ready(node, "web1")
    node.run(["brine", "watcher", "forget", "web1"])


def test_a_node_may_do_without_kvmd(node: Node) -> None:
    off = {"kvmd": {"enabled": False}}
    applied(node, {"web1": WEB1}, others=off)
    assert not node.path("/usr/sbin/brine-kvmd").exists()
    assert statuses(node, "web1") == ["running"]
    assert applied(node, {"web1": WEB1}, others=off) == {}
    order(node, "web1", "poweroff")
    # Whoever ended it: an end in order counts as its user's.
    wait_status(node, "web1", "USER_down")
    applied(node, {"web1": WEB1})
    assert node.path("/usr/sbin/brine-kvmd").exists()
    assert statuses(node, "web1") == ["USER_down"]
    start(node, "web1")


@pytest.mark.parametrize("test", [False, True])
def test_mistakes_in_pillar_change_nothing(node: Node, test: bool) -> None:
    def specs() -> list[str]:
        folder = node.path("/var/lib/brine/instances")
        return [file.read_text() for file in sorted(folder.iterdir())]

    before = specs()
    mistakes = {"web1": {**WEB1, "memory_mb": 512}, "new1": 5, "db1": "", "plain1": {"absent": 1}}
    said = refused(node, mistakes, test=test)
    assert "db1: its spec must be a mapping, but is ''; in pillar, absent: true" in said
    assert "/absent: there is no such key" in said
    assert "web1: brine: error: standard input: /memory_mb: there is no such key" in said
    assert "did you mean memory_mib?" in said
    assert "new1: its spec must be a mapping" in said
    said = refused(node, {"web1": WEB1}, test=test, others={"hotplug": {"enabled": False}})
    assert len(said.splitlines()) == 1
    assert "needs brine-hotplug" in said
    if not test:
        said = refused(node, {"web1": DB1}, settings={"uid_pool": "4000-x"})
        assert "uid_pool: " in said
        assert 'uid_pool = "4000-4009"\n' in node.read(SETTINGS)
    assert specs() == before
    assert statuses(node, "web1") == ["running"]


def test_nothing_is_removed_while_an_instance_runs(node: Node) -> None:
    for options in ({"enabled": False}, {"state": "brine.clean"}):
        for test in (True, False):
            said = refused(node, {"web1": WEB1}, test=test, **options)
            assert len(said.splitlines()) == 1
            assert "nothing is removed, as instances run: web1;" in said
            assert node.run(["systemctl", "is-active", *UNITS]).stdout == "active\n" * len(UNITS)
    assert "web1: is running" in refused(node, {"web1": ABSENT})
    assert statuses(node, "web1") == ["running"]


def test_one_pillar_may_be_that_of_many_nodes(node: Node) -> None:
    assert applied(node, {"web1": WEB1, "web2": {**WEB1, "node": "node2.example.com"}}) == {}
    assert not node.path("/var/lib/brine/instances/web2.json").exists()
    there = {"web1": {**WEB1, "node": "node2"}}
    assert "web1 is node2's, but is running here" in refused(node, there)
    node.run(["brine", "instance", "stop", "web1"])
    for test in (True, False):
        done = applied(node, there, test=test)
        assert done["web1"].changes == {"admin_state": {"old": "down", "new": "offline"}}
    assert applied(node, there) == {}
    assert statuses(node, "web1") == ["ADMIN_offline"]
    here = {**WEB1, "node": node.run(["uname", "-n"]).stdout.strip()}
    assert applied(node, {"web1": here})["web1"].changes["web1"]["new"] == "running"
    applied(node, {"web1": WEB1})


def test_a_rename_in_pillar_is_told_from_a_new_instance(node: Node) -> None:
    node.shell("truncate --size=1M /srv/data.img")
    disk = {"disks": [{"path": "/srv/data.img"}]}
    applied(node, {"web1": WEB1, "data1": {**disk, "absent": False}})
    said = refused(node, {"web1": WEB1, "data2": disk})
    assert "brine instance rename data1 data2" in said
    assert not node.path("/var/lib/brine/instances/data2.json").exists()
    applied(node, {"web1": WEB1, "data1": ABSENT})


def test_what_should_be_down_is_stopped_and_what_should_not_be_is_undefined(node: Node) -> None:
    instances = {"web1": {**WEB1, "admin_state": "down"}, "db1": {**DB1, **ABSENT}}
    applied(node, instances, test=True)
    assert statuses(node, "web1", "db1") == ["running", "ADMIN_down"]
    applied(node, instances)
    assert statuses(node, "web1") == ["ADMIN_down"]
    assert left_of(node, "web1") == {}
    assert not node.path("/var/lib/brine/instances/db1.json").exists()
    assert applied(node, instances) == {}


def test_a_node_that_has_it_keeps_it_until_pillar_says_no(node: Node) -> None:
    applied(node, {}, settings=None)
    assert node.path(UNIT).exists()
    assert not node.path(SETTINGS).exists()
    applied(node, {}, settings=None, at_boot=False)
    assert node.run(["systemctl", "is-enabled", TARGET], check=False).stdout == "disabled\n"
    applied(node, {}, enabled=False)
    assert not node.path(UNIT).exists()
    assert node.path("/usr/bin/brine").exists()
    assert applied(node, {}, enabled=False) == {}


def test_an_instance_of_the_cluster_needs_no_other_declaration(node: Node) -> None:
    """As on a node that is its own master: both at once, the configuration and its instances."""
    here = node.run(["uname", "-n"]).stdout.strip()
    hvparams = {"kvm_flag": "disabled", "kernel_path": SMALLEST["kernel"], "root_path": ""}
    hvparams |= {"initrd_path": SMALLEST["initrd"], "kernel_args": SMALLEST["append"]}
    guest = {"primary_node": here, "hvparams": hvparams, "beparams": {"maxmem": 128}}
    cluster: dict[str, Any] = {
        "config": {"apply": True},
        "cluster": {"name": "lab.example.com", "hvparams": {"kvm": {"user_shutdown": True}}},
        "nodes": {here: {"primary_ip": "192.0.2.1"}},
        "instances": {
            "mail1": {**guest, "admin_state": "up"},
            "mail2": {**guest, "admin_state": "down"},
        },
    }
    assert "brine-config-applied" in applied(node, {}, others=cluster, test=True)
    done = applied(node, {}, others=cluster)["brine-instances-from-config"]
    assert {name: [*one] for name, one in done.changes.items()} == {
        "mail1": ["spec", "status"],
        "mail2": ["spec"],
    }
    assert statuses(node, "mail1", "mail2") == ["running", "ADMIN_down"]
    uuids = json.loads(node.run(["brine", "config", "show", "/instances"]).stdout)
    assert {info(node, name)["uuid"] for name in ("mail1", "mail2")} == uuids.keys()
    assert applied(node, {}, others=cluster) == {}
    nics = {"nics": [{"nicparams": {"mode": "bridged", "link": "br0"}}]}
    cluster["instances"]["mail1"] |= nics
    would = applied(node, {}, others=cluster, test=True)["brine-instances-from-config"]
    assert "as the configuration says that is to come" in would.comment
    # One that is declared twice is left alone; what changes of the other one is done.
    for test in (False, True):
        said = refused(node, {"mail2": DB1}, others=cluster, test=test)
        assert said.count("mail2: declared both in brine:instance:instances and in") == 1
    assert len(info(node, "mail1")["nics"]) == 1
    assert info(node, "mail2")["memory_mib"] == 128
    assert applied(node, {}, others=cluster) == {}
    cluster["instances"]["mail1"]["admin_state"] = "down"
    wait_ready(node, "mail1")
    applied(node, {}, others=cluster)
    assert statuses(node, "mail1") == ["ADMIN_down"]
    node.shell("rm -r /var/lib/brine/config.* /var/lib/brine/ssconf; brine instance undefine mail1")
    node.run(["brine", "instance", "undefine", "mail2"])


def test_clean_undoes_all_but_what_instances_should_be(node: Node) -> None:
    applied(node, {"web1": {**WEB1, "admin_state": "down"}})
    apply_state(node, "brine.clean")
    assert all(not one.changes for one in apply_state(node, "brine.clean"))
    left = node.shell("find /etc /usr -xdev -name '*brine*' -not -name '*brine-lab*'")
    assert left == ""
    assert not node.path("/run/brine").exists()
    specs = left_files(node, "/var/lib/brine")
    assert {f"/var/lib/brine/instances/{name}.json" for name in ("web1", "plain1")} <= set(specs)


def test_the_example_is_applied(node: Node) -> None:
    """With a name, a guest and an image that this node has, where the example has others', and
    without the bridge: the node's network is not systemd-networkd's."""
    example = yaml.safe_load((TREE / "salt/pillar.example").read_text())["brine"]
    web1 = example["instance"]["instances"]["web1"]
    disk, _ = web1["disks"]
    del example["storage"]["allocatable"], example["network"]
    node.shell(f"mkdir -p {Path(disk['path']).parent}; truncate --size=1M {disk['path']}")
    node.write(f"{STATES}/network/antispoof.sh", "#!/bin/sh\n")
    node.shell("rm -rf /var/cache/salt/minion/file_lists")
    web1 |= {**SMALLEST, "node": node.run(["uname", "-n"]).stdout.strip()}
    example["config"]["apply"] = True
    give_states(node, {"brine": example})
    for state in (apply_state(node, test=True), apply_state(node)):
        assert any(one.name == "web1" for one in state)
    assert statuses(node, "web1") == ["running"]
    assert "prod.example.com" in node.read("/var/lib/brine/config.data")
    for test in (False, True):
        again = apply_state(node, test=test)
        assert [one for one in again if one.result is None or one.changes] == []
