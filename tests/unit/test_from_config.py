"""Instances out of the cluster's configuration, and those that are another node's by now."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from brine.common import outbox, paths
from brine.common.errors import BrineError
from brine.common.own_node import noted_node
from brine.config.model import MOVED_TAG, Configuration
from brine.config.store import ConfigStore
from brine.config.verify import find_mistakes
from brine.instance import store
from brine.instance.from_config import elsewhere, spec_of
from brine.instance.validate import completed
from brine.vm.claim import Claim
from brine.vm.spec import Spec
from lab.ganeti_config import ganeti_config, instance_name, node_name, uuid_of

pytestmark = pytest.mark.usefixtures("own_node")

HERE = node_name(1)
OURS, THEIRS = instance_name(1), instance_name(2)


@pytest.fixture
def configuration(own_node: Path) -> Configuration:
    """A cluster of three nodes, each with an instance, on the first of these nodes."""
    return Configuration.from_json(ganeti_config(nodes=3, instances=3))


def defined(name: str, **keys: Any) -> None:
    store.save(completed({"name": name, **keys}))


def test_what_has_moved_is_told_by_its_uuid(configuration: Configuration) -> None:
    for instance in configuration.instances.values():
        store.save(completed(spec_of(configuration, instance)[0]))
    defined("own")  # of this node only
    defined("renamed", uuid=uuid_of("instance", 3))
    store.remove(instance_name(3))
    (paths.SPECS_DIR / "damaged.json").write_text("{")
    here = configuration.names("nodes").get(HERE)
    found = [(spec.name, claim.node) for spec, claim in elsewhere(configuration, here)]
    assert found == [(THEIRS, node_name(2)), ("renamed", node_name(3))]


def test_a_move_adds_no_tag_to_the_spec(configuration: Configuration) -> None:
    """Otherwise the next highstate of the node that it came to would change something."""
    instance = configuration.instances[uuid_of("instance", 1)]
    moved = replace(instance, tags=["web", f"{MOVED_TAG}{node_name(2)}"])
    assert spec_of(configuration, moved)[0]["tags"] == ["web"]


@pytest.mark.parametrize("dry_run", [False, True])
def test_what_the_cluster_has_removed_leaves_nothing_that_no_node_would_start(
    configuration: Configuration,
    brine: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    *,
    dry_run: bool,
) -> None:
    monkeypatch.setattr(ConfigStore, "read", lambda _: configuration)
    here = {"node": os.uname().nodename, "claim_serial": 1}
    cases: dict[str, dict[str, Any]] = {
        "offline": {**here, "admin_state": "offline"},
        "moved": {"node": node_name(2), "claim_serial": 1},
        "down": {**here, "admin_state": "down"},
        "up": here,
        "own": {"admin_state": "offline"},
    }
    for name, keys in cases.items():
        claim = {key: keys[key] for key in ("node", "claim_serial") if key in keys}
        spec = completed({"name": name, **({} if name == "moved" else keys)})
        store.save(replace(spec, **claim))
    defined("of-cluster", uuid=uuid_of("instance", 3), admin_state="offline")
    more = ["--dry-run"] if dry_run else []
    status, out, _ = brine("define", "--from-config", "--node", HERE, "--json", *more)
    assert status == 0
    assert sorted(json.loads(out)["removed"]) == ["moved", "offline"]
    left = {spec.name for spec in store.load_all() if isinstance(spec, Spec)}
    kept = {"down", "up", "own", "of-cluster"} | ({"moved", "offline"} if dry_run else {OURS})
    assert left == kept


@pytest.mark.parametrize("claimed", [False, True])
@pytest.mark.parametrize("json_too", [False, True])
def test_define_names_them_and_sets_them_aside(
    configuration: Configuration,
    brine: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    *,
    json_too: bool,
    claimed: bool,
) -> None:
    their_claim = Claim()
    if claimed:
        # By the configuration before it moved.
        instance = configuration.instances[uuid_of("instance", 2)]
        instances = {**configuration.instances, instance.uuid: replace(instance, serial_no=2)}
        configuration = replace(configuration, instances=instances)
        spec = completed({"name": THEIRS, "uuid": instance.uuid})
        store.save(replace(spec, node=os.uname().nodename, claim_serial=1))
        their_claim = Claim(node_name(2), 2)
    else:
        defined(THEIRS, uuid=uuid_of("instance", 2))
    before = store.load(THEIRS)
    monkeypatch.setattr(ConfigStore, "read", lambda _: configuration)
    defined(OURS, uuid=uuid_of("instance", 1), admin_state_source="user")
    put_event("down", "user")
    more = ["--json"] if json_too else []
    status, out, err = brine("define", "--from-config", "--node", HERE, *more)
    assert status == 0
    if json_too:
        told = json.loads(out)
        assert told["elsewhere"] == [{"name": THEIRS, "node": node_name(2)}]
        assert [one["name"] for one in told["instances"]] == [OURS]
    else:
        assert out == f"defined: {OURS}\n"
        warning, hint = err.splitlines()[-2:]
        assert warning.startswith(f"brine: warning: {THEIRS}: is defined here, and is ")
        assert f"{node_name(2)}'s" in warning
        assert hint.startswith(f"brine: hint: brine instance undefine {THEIRS}")
    # It is started here no more, unless it is from before there were claims.
    assert store.load(THEIRS) == replace(
        before, node=their_claim.node, claim_serial=their_claim.serial
    )
    assert store.load(OURS).is_down_by_user()  # which the configuration does not know yet


@pytest.mark.parametrize(
    ("address", "is_noted"), [("primary_ip", True), ("secondary_ip", True), ("", False)]
)
def test_a_host_of_another_name_notes_its_node_by_an_address(
    configuration: Configuration,
    brine: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    address: str,
    *,
    is_noted: bool,
) -> None:
    """As Salt names the node, whose host may have another name; but a person may name any node."""
    monkeypatch.setattr(ConfigStore, "read", lambda _: configuration)
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename="kvm-a"))
    node = configuration.nodes[uuid_of("node", 1)]
    own = getattr(node, address) if address else "192.0.2.254"
    monkeypatch.setattr("brine.config.nodes.is_own_address", lambda ip: ip == own)
    assert brine("define", "--from-config", "--node", HERE)[0] == 0
    noted = noted_node()
    assert (noted.uuid if noted else None) == (node.uuid if is_noted else None)


def test_a_host_notes_its_node_by_its_name(
    configuration: Configuration,
    brine: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ConfigStore, "read", lambda _: configuration)
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename=HERE))
    monkeypatch.setattr("brine.config.nodes.is_own_address", lambda _: False)
    assert brine("define", "--from-config", "--node", HERE, "--dry-run")[0] == 0
    assert noted_node() is None
    assert brine("define", "--from-config", "--node", node_name(2))[0] == 0
    assert noted_node() is None
    assert brine("define", "--from-config", "--node", HERE)[0] == 0
    assert noted_node()


def put_event(admin_state: str, source: str) -> outbox.ClusterEvent:
    """Have the outbox tell the cluster of OURS."""
    data = {"admin_state": admin_state, "source": source}
    return outbox.put("admin-state", instance=uuid_of("instance", 1), name=OURS, data=data)


@pytest.mark.parametrize("state", ["up", "down", "offline"])
def test_a_user_whom_the_cluster_has_not_heard_is_overruled_by_offline_alone(
    brine: Callable[..., tuple[int, str, str]], state: str
) -> None:
    data = ganeti_config(nodes=1, instances=1)
    (instance,) = data["instances"].values()
    instance |= {"admin_state": state, "mtime": time.time() + 60}  # its NICs may have changed
    defined(OURS, uuid=uuid_of("instance", 1), admin_state_source="user")
    put_event("down", "user")
    for changed in (True, False):
        define_all = ["define", "--from-config", "--config", "-", "--node", HERE, "--json"]
        status, out, _ = brine(*define_all, stdin=data)
        (row,) = json.loads(out)["instances"]
        assert (status, row["changed"]) == (0, changed)
        expected = ("offline", "admin") if state == "offline" else ("down", "user")
        assert (row["spec"]["admin_state"], row["spec"]["admin_state_source"]) == expected


@pytest.mark.parametrize("state", ["up", "down"])
def test_the_configuration_counts_once_the_cluster_has_heard_of_the_user(
    brine: Callable[..., tuple[int, str, str]], state: str
) -> None:
    data = ganeti_config(nodes=1, instances=1)
    (instance,) = data["instances"].values()
    instance |= {"admin_state": state, "admin_state_source": "admin"}
    defined(OURS, uuid=uuid_of("instance", 1), admin_state_source="user")
    outbox.acknowledge(put_event("down", "user").id)
    assert brine("define", "--from-config", "--config", "-", "--node", HERE, stdin=data)[0] == 0
    spec = store.load(OURS)
    assert (spec.admin_state, spec.admin_state_source) == (state, "admin")


def test_a_configuration_does_not_undo_what_was_decided_here(
    brine: Callable[..., tuple[int, str, str]],
) -> None:
    data = ganeti_config(nodes=1, instances=1)
    (instance,) = data["instances"].values()
    instance |= {"admin_state": "down", "admin_state_source": "user"}
    defined(OURS, uuid=uuid_of("instance", 1), admin_state="up")
    event = put_event("up", "admin")
    define_all = ["define", "--from-config", "--config", "-", "--node", HERE]
    assert brine(*define_all, stdin=data)[0] == 0
    assert store.load(OURS).admin_state == "up"
    assert list(outbox.events()) == [event]
    assert outbox.acknowledge(event.id)
    assert brine(*define_all, stdin=data)[0] == 0
    assert store.load(OURS).is_down_by_user()


def test_a_node_is_found_by_its_whole_name_where_the_configuration_has_the_short_one(
    brine: Callable[..., tuple[int, str, str]],
) -> None:
    data = ganeti_config(nodes=1, instances=1)
    (node,) = data["nodes"].values()
    node["name"] = HERE.partition(".")[0]
    define_all = ["define", "--from-config", "--config", "-", "--node", HERE]
    assert brine(*define_all, stdin=data)[:2] == (0, f"defined: {OURS}\n")


def test_an_instance_that_can_not_be_converted_stops_no_other(
    brine: Callable[..., tuple[int, str, str]],
) -> None:
    data = ganeti_config(nodes=1, instances=4)
    first, second, third, _ = data["instances"].values()
    first["hvparams"] = {"kvm_extra": "-name 'web"}
    second["hvparams"] = {"vnc_bind_address": 5}
    for uuid in third["disks"]:
        data["disks"][uuid]["logical_id"] = []
    define_all = ["define", "--from-config", "--config", "-", "--node", HERE]
    status, out, err = brine(*define_all, stdin=data)
    assert (status, out) == (1, f"defined: {instance_name(4)}\n")
    errors = [line for line in err.splitlines() if ": error: " in line]
    assert len(errors) == 3
    assert errors[0].endswith("has something of it that can't be: No closing quotation")


def test_a_configuration_may_come_from_elsewhere_and_failures_are_in_the_json(
    own_node: Path, brine: Callable[..., tuple[int, str, str]]
) -> None:
    data = ganeti_config(nodes=1, instances=2)
    _, second = data["instances"].values()
    second["disk_template"] = "drbd"
    for uuid in second["disks"]:
        data["disks"][uuid]["dev_type"] = "drbd"
    file = own_node / "copy.data"
    file.write_text(json.dumps(data))
    define_here = ["define", "--from-config", "--node", HERE.partition(".")[0], "--json"]
    for source, dry_run in ((file, ["--dry-run"]), ("-", [])):
        status, out, err = brine(*define_here, *dry_run, "--config", source, stdin=data)
        told = json.loads(out)
        ours, refused = told["instances"]
        assert (status, told["elsewhere"], told["dry_run"]) == (1, [], bool(dry_run))
        assert (ours["name"], ours["changed"], ours["before"]) == (OURS, True, None)
        assert ours["spec"]["uuid"] == uuid_of("instance", 1)
        assert "is of the kind drbd" in refused["error"]
        assert refused["error"] in err
    assert store.load(OURS).uuid == uuid_of("instance", 1)
    status, _, err = brine(*define_here, "--config", "-", stdin=b"{")
    assert (status, err.count("\n")) == (1, 1)
    assert err.startswith("brine: error: standard input: not valid JSON")


# Domains of Xen's.


def configured(hypervisor: str = "xen-pvm", **hvparams: Any) -> dict[str, Any]:
    data = ganeti_config(nodes=1, instances=1)
    (instance,) = data["instances"].values()
    instance |= {"hypervisor": hypervisor, "hvparams": hvparams}
    return data


def imported(data: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    configuration = Configuration.from_json(data)
    (found,) = configuration.instances.values()
    return spec_of(configuration, found)


def spec(**hvparams: Any) -> Spec:
    return completed(imported(configured(**hvparams))[0])


def test_a_kernel_of_the_node() -> None:
    found = spec(kernel_path="/boot/k", initrd_path="/boot/i", kernel_args="ro quiet", cpu_cap=50)
    assert (found.hypervisor, found.kernel, found.initrd) == ("xen-pvm", "/boot/k", "/boot/i")
    assert found.append == "root=/dev/xvda1 ro quiet"
    assert (found.cpu_limit_percent, found.cpu_weight) == (50, 0)
    assert found.disks
    assert found.nics
    assert found.user_shutdown == "stop"


def test_a_users_shutdown_is_followed_by_what_the_configuration_says() -> None:
    kernel = {"kernel_path": "/boot/k", "initrd_path": "/boot/i"}
    assert spec(**kernel, user_shutdown=True).user_shutdown == "stop"
    assert spec(**kernel, user_shutdown=False).user_shutdown == "restart"
    assert imported(configured(**kernel, user_shutdown=False))[1] == []
    data = configured(**kernel)
    data["cluster"]["hvparams"]["xen-pvm"] = {"user_shutdown": False}
    faults = find_mistakes(Configuration.from_json(data))
    assert not [one for one in faults if "user_shutdown" in one.where]
    assert imported(data)[0]["user_shutdown"] == "restart"


def test_a_kernel_on_the_disk() -> None:
    found = spec(use_bootloader=True, bootloader_path="/usr/bin/pygrub", cpu_weight=512)
    assert (found.kernel, found.append, found.cpu_weight) == ("", "", 512)
    assert found.ignored == ()
    assert spec(kernel_path="/k", bootloader_path="pygrub").ignored == ("bootloader_path",)
    with pytest.raises(BrineError, match="only pygrub has a counterpart"):
        spec(use_bootloader=True, bootloader_path="/usr/bin/pvgrub")


def test_what_means_nothing_here_is_told() -> None:
    _, ignored = imported(configured(kernel_path="/k", vif_script="/etc/vif", xen_cmd="xm"))
    assert ignored == ["vif_script"]  # the other is no instance's to set


def test_a_wish_for_what_is_so_anyway_is_not_told_to_be_without_effect() -> None:
    wishes = {"disk_cache": "none", "disk_discard": "unmap", "kvm_flag": "enabled"}
    found, ignored = imported(configured("kvm", machine_version="pc", **wishes))
    assert ignored == []
    assert (found["machine"], found["accel"]) == ("pc", "kvm")
    assert [(one["cache"], one["discard"]) for one in found["disks"]] == [("none", True)]


def test_one_that_needs_a_machine_is_not_run_here() -> None:
    with pytest.raises(BrineError, match="its hypervisor is xen-hvm, and only kvm and xen-pvm"):
        imported(configured("xen-hvm"))


def test_a_host_with_another_name_keeps_its_instances(
    brine: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, own_node: Path
) -> None:
    (own_node / "machine-id").write_text("1" * 32)
    monkeypatch.setattr("brine.common.own_node.MACHINE_ID_FILE", own_node / "machine-id")
    define_all = ("define", "--from-config", "--config", "-")
    data = ganeti_config(nodes=2, instances=2)
    for host in (HERE, "alpha.example.com"):
        monkeypatch.setattr(os, "uname", lambda host=host: SimpleNamespace(nodename=host))
        status, out, err = brine(*define_all, stdin=data)
        assert (status, OURS in out) == (0, True)
        assert (f"brine config rename-node {HERE} alpha.example.com" in err) == (host != HERE)
    assert store.is_here(Spec(name="x", node=HERE))
    assert not store.is_here(Spec(name="x", node=node_name(2)))
