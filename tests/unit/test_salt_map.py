"""The facts that the Salt states go by, for a pillar and a node."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from unit.salt_loader import load_map

UNITS = "/usr/lib/systemd/system"


def brine(
    in_pillar: Any,
    *,
    node: str = "kvm1.example.com",
    family: str = "Debian",
    installed: Collection[str] = (),
    files: Collection[str] = (),
) -> Any:
    """The mapping that the states use as ``brine``.

    :param in_pillar: pillar ``brine:``.
    :param installed: the units that are on the node, and packages that have none.
    :param files: other files that are there.
    """
    there = {*(f"{UNITS}/{unit}" for unit in installed), *files}
    version = "0.3.0" if "brine-storage" in installed else ""
    formula = load_map(
        __grains__={"nodename": node, "os_family": family},
        __opts__={"conf_file": "/etc/salt/minion"},
        __salt__={
            "pillar.get": {"brine": in_pillar}.get,
            "file.file_exists": there.__contains__,
            "pkg.version": {"brine-storage": version}.__getitem__,
        },
    )
    return formula.run()


def parts(in_pillar: Any, *installed: str) -> set[str]:
    """The parts that a node is to have that has units already."""
    found = brine(in_pillar, installed=installed)["parts"]
    assert {type(enabled) for enabled in found.values()} == {bool}
    return {part for part, enabled in found.items() if enabled}


def of_instances(**instances: Any) -> dict[str, Any]:
    """Pillar that declares instances."""
    return {"instance": {"instances": instances}}


# ---- pillar in place of defaults


@pytest.mark.parametrize(
    "empty",
    [
        None,
        "",
        "text",
        [],
        {"version": None, "repository": None, "kvmd": None, "instance": None},
        {"repository": {"line": None}, "kvmd": {"enabled": None, "settings": {"suffix": None}}},
        {"instance": {"enabled": None, "settings": None, "instances": None}},
        {"distributed": None, "cluster": {"name": "lab"}, "nodes": None},
    ],
)
def test_what_is_empty_has_its_default(empty: Any) -> None:
    assert brine(empty) == brine({})


@pytest.mark.parametrize(
    "misshapen",
    [
        dict.fromkeys(("version", "kvmd", "confd", "instance", "watcher", "config", "x"), 5),
        {"version": 0.2, "repository": [1], "kvmd": {"enabled": "no"}, "lifecycle": "text"},
        {"confd": {"enabled": 1, "daemon": {}, "key": ["k"], "settings": "often"}},
        {"instance": ["web1"], "hotplug": {"scripts": True}},
        {"instance": {"instances": ["web1"]}, "distributed": ["node1"]},
        {"config": {"apply": []}, "instances": 5, "nodes": "text"},
        {"storage": {"directories": "/srv/vms", "default_unit": [1], "allocatable": ["/dev/sdb"]}},
        {"storage": {"directories": 5, "enabled": "yes"}},
    ],
)
def test_what_has_another_shape_than_its_default_is_left_out(misshapen: Any) -> None:
    assert brine(misshapen) == brine({})


def test_pillar_replaces_defaults_key_by_key() -> None:
    settings = {"log_level": "debug", "verdict": {"inner": None, "other": 1}, "odd": [None]}
    said = {"version": "0.2", "kvmd": {"root_only": True, "settings": settings, "unknown": 5}}
    found = brine(said)
    assert (found["version"], found["kvmd"]["root_only"]) == ("0.2", True)
    assert found["kvmd"]["on_demand"] is True
    assert found["kvmd"]["settings"] == {**settings, "verdict": {"other": 1}}
    assert brine({})["kvmd"]["settings"] == {}


def test_settings_move_the_places_that_the_states_know() -> None:
    default = brine({})
    assert default["kvmd"]["control_dir"] == "/run/brine/ctrl"
    assert default["confd"]["key_file"] == "/etc/brine/hmac.key"
    assert default["watcher"]["beacon_file"] == "/etc/salt/minion.d/brine-beacon.conf"
    kvmd = {"settings": {"control_dir": "/srv/ctrl", "suffix": 5}}
    moved = brine({"kvmd": kvmd, "confd": {"settings": {"key_file": "/srv/key"}}})
    assert (moved["kvmd"]["control_dir"], moved["kvmd"]["suffix"]) == ("/srv/ctrl", ".kvmd")
    assert moved["confd"]["key_file"] == "/srv/key"
    assert moved["confd"]["previous_key_file"] == "/etc/brine/hmac.key.previous"


def test_each_family_has_its_own_files_of_a_repository() -> None:
    assert brine({}, family="Debian")["repository"]["file"].endswith(".list")
    redhat = brine({"repository": {"line": "[brine]"}}, family="RedHat")
    assert redhat["repository"]["file"] == "/etc/yum.repos.d/brine-salt.repo"
    assert redhat["repository"]["line"] == "[brine]"
    unknown = brine({}, family="Slackware")
    assert (unknown["family_known"], unknown["families"]) == (False, ["Debian", "RedHat"])


# ---- instances


@pytest.mark.parametrize("node", [None, "", "kvm1", "KVM1", "kvm1.example.com", "kvm1.example.org"])
def test_an_instance_of_this_node_or_of_none_is_its_own(node: str | None) -> None:
    # A node that has only a short name has any of that name.
    name = "kvm1" if node == "kvm1.example.org" else "kvm1.Example.com"
    found = brine(of_instances(web1={"node": node}), node=name)
    assert (list(found["specs"]), found["elsewhere"]) == (["web1"], {})


@pytest.mark.parametrize("node", ["kvm2", "KVM2.example.com", "kvm1.example.org", "kvm11", 7])
def test_an_instance_of_another_node_is_elsewhere(node: Any) -> None:
    found = brine(of_instances(web1={"node": node}))
    assert (found["specs"], found["elsewhere"]) == ({}, {"web1": str(node).lower()})


def test_specs_lack_what_is_empty_and_those_of_another_shape_are_left_to_be_refused() -> None:
    nic = {"link": None}
    declared = of_instances(
        web1=None,
        web2={},
        web3={"memory_mib": None, "kvm": {"cpu": None}, "nics": [nic], "absent": False},
        web4="text",
    )
    expected = {"web1": {}, "web2": {}, "web3": {"kvm": {}, "nics": [nic]}, "web4": "text"}
    assert brine(declared)["specs"] == expected


def test_names_and_keys_that_yaml_has_made_numbers_are_texts() -> None:
    instances = {7: {8: 9}, 6: {"node": "kvm2"}}
    found = brine({"instance": {"instances": instances}})
    assert (found["specs"], found["elsewhere"]) == ({"7": {"8": 9}}, {"6": "kvm2"})


def test_those_that_go_come_first_and_then_it_is_the_order_of_starts() -> None:
    declared = of_instances(
        a={},
        b={"start_order": 200},
        c={"start_order": 5},
        d={"absent": True, "start_order": 300},
        e={"start_order": "soon"},
        f="text",
        g={"start_order": True},
        h={"absent": "yes"},
    )
    assert "".join(brine(declared)["specs"]) == "dcaefghb"


# ---- the cluster


def test_a_node_without_a_cluster_has_no_configuration() -> None:
    found = brine({"nodes": {"kvm1": {}}, "instances": {"web1": {"primary_node": "kvm1"}}})
    assert (found["has_configuration"], found["of_cluster"], found["node_name"]) == (False, [], "")


@pytest.mark.parametrize(
    ("nodes", "node_name", "has_configuration"),
    [
        ({"kvm1": {}, "kvm2": None}, "kvm1", True),
        ({"kvm2": {}, "kvm1.example.com": None}, "kvm1.example.com", True),
        ({"kvm2": {}}, "", False),
        (None, "", True),
        ({}, "", True),
    ],
)
def test_the_writer_goes_by_what_it_declares(
    nodes: Any, node_name: str, has_configuration: bool
) -> None:
    instances = {"web1": {"primary_node": "kvm1"}, "web2": {"primary_node": "kvm2"}, "web3": None}
    found = brine({"config": {"apply": True}, "nodes": nodes, "instances": instances})
    assert found["of_cluster"] == ["web1"]
    assert (found["node_name"], found["has_configuration"]) == (node_name, has_configuration)
    assert found["parts"]["instance"] is True


@pytest.mark.parametrize(
    ("master", "nodes", "other_master"),
    [
        ("kvm1", ["kvm1", "kvm2"], ""),
        ("kvm1.example.com", ["kvm1.example.com", "kvm2.example.com"], ""),
        ("kvm2", ["kvm1", "kvm2"], "kvm2"),
        ("kvm2", ["kvm1", "kvm2.example.com"], "kvm2.example.com"),
        # A host that is no node of the cluster may make the configuration.
        ("kvm2", ["kvm2", "kvm3"], ""),
        # "brine config apply" refuses a master that is no node.
        ("kvm9", ["kvm1", "kvm2"], ""),
        (None, ["kvm1"], ""),
    ],
)
def test_a_node_that_is_not_the_master_makes_no_configuration(
    master: str | None, nodes: list[str], other_master: str
) -> None:
    declared: dict[str, Any] = {"cluster": {"master": master}, "nodes": dict.fromkeys(nodes)}
    assert brine({"config": {"apply": True}, **declared})["other_master"] == other_master
    assert brine(declared)["other_master"] == ""
    declared["cluster"] = {"master_node": master}
    assert brine({"config": {"apply": True}, **declared})["other_master"] == other_master


def test_the_master_may_have_a_uuid_or_another_host_name() -> None:
    one, two = ("5f0b7ae0-53c2-4c0f-9f0e-5c8f3b5a4f11", "6f0b7ae0-53c2-4c0f-9f0e-5c8f3b5a4f11")
    nodes = {"kvm1": {"uuid": one}, "kvm2": {"uuid": two}}
    for uuid, other in ((one, ""), (two, "kvm2")):
        said = {"cluster": {"master": uuid}, "nodes": nodes, "config": {"apply": True}}
        assert brine(said)["other_master"] == other
    renamed = {"nodes": {"node1": {}, "node2": {}}, "distributed": {"node": "node1"}}
    for master, other in (("node1", ""), ("node2", "node2")):
        said = {"cluster": {"master": master}, "config": {"apply": True}, **renamed}
        assert brine(said)["other_master"] == other


def test_a_node_of_the_cluster_goes_by_what_the_external_pillar_gives() -> None:
    given = {"node": "node1", "instances": ["web1"], "candidate": False}
    found = brine({"distributed": given})
    assert (found["node_name"], found["of_cluster"]) == ("node1", ["web1"])
    assert (found["is_distributed"], found["has_configuration"]) == (True, True)
    assert (found["confd"]["daemon"], found["parts"]["instance"]) == (False, True)
    assert brine({"distributed": given, "confd": {"daemon": True}})["confd"]["daemon"] is True
    assert brine({})["confd"]["daemon"] is True


@pytest.mark.parametrize(
    ("in_pillar", "files", "in_cluster"),
    [
        ({}, [], False),
        ({}, ["/var/lib/brine/config.data"], True),
        ({"config": {"apply": True}}, [], True),
        ({"config": {"source": "salt://config.data"}}, [], True),
        ({"config": {"ssconf_source": "salt://ssconf"}}, [], True),
        ({"distributed": {"node": "node1"}}, [], True),
        ({"cluster": {"name": "lab"}}, [], False),
    ],
)
def test_a_node_is_in_a_cluster_if_it_makes_copies_or_has_its_configuration(
    in_pillar: Any, files: list[str], in_cluster: bool
) -> None:
    assert brine(in_pillar, files=files)["in_cluster"] is in_cluster


# ---- the parts


BARE = {"kvmd", "hotplug"}
WITH_INSTANCES = {*BARE, "storage", "instance", "watcher"}
WITH_MOVES = {*WITH_INSTANCES, "confd", "moves"}


@pytest.mark.parametrize(
    ("in_pillar", "expected"),
    [
        ({}, BARE),
        ({"kvmd": {"enabled": False}, "hotplug": {"enabled": False}}, set()),
        ({"confd": {"key": "k"}}, {*BARE, "confd"}),
        ({"confd": {"key": "k", "enabled": False}}, BARE),
        ({"confd": {"enabled": True}}, {*BARE, "confd"}),
        (of_instances(web1=None), WITH_INSTANCES),
        (of_instances(web1={"node": "kvm2"}), BARE),
        ({"instance": {"settings": {"x": 1}}}, WITH_INSTANCES),
        ({"instance": {"enabled": False, "settings": {"x": 1}}}, BARE),
        (
            {"instance": {"enabled": True}, "watcher": {"enabled": False}},
            {*BARE, "storage", "instance"},
        ),
        ({"storage": {"enabled": True}}, {*BARE, "storage"}),
        ({"storage": {"directories": ["/srv/vms"]}}, {*BARE, "storage"}),
        ({"storage": {"default_unit": "vg1"}}, {*BARE, "storage"}),
        ({"storage": {"allocatable": {"/dev/sdb": False}}}, {*BARE, "storage"}),
        ({"storage": {"enabled": False, "directories": ["/srv/vms"]}}, BARE),
        (of_instances(web1={"owner": {}}), {*WITH_INSTANCES, "lifecycle"}),
        (of_instances(web1={"owner": {}, "absent": True}), WITH_INSTANCES),
        (
            {"instance": {"enabled": True}, "lifecycle": {"fence": True}},
            {*WITH_INSTANCES, "lifecycle"},
        ),
        ({"lifecycle": {"fence": True, "settings": {"x": 1}}}, BARE),
        ({"moves": {"settings": {"x": 1}}}, BARE),
        (of_instances(web1=None) | {"moves": {"settings": {"x": 1}}}, WITH_MOVES),
        (
            of_instances(web1=None) | {"moves": {"enabled": True}, "config": {"apply": True}},
            {*WITH_MOVES, "master"},
        ),
        ({"master": {"enabled": True}}, {*BARE, "master"}),
    ],
)
def test_parts_follow_from_what_pillar_has(in_pillar: Any, expected: set[str]) -> None:
    assert parts(in_pillar) == expected


def test_a_part_that_pillar_does_not_mention_stays() -> None:
    assert parts({}, "brine-confd.service") == {*BARE, "confd"}
    assert parts({}, "brine-storage") == {*BARE, "storage"}
    assert parts({}, "brine-instance@.service") == WITH_INSTANCES
    both = ("brine-instance@.service", "brine-lifecycle.path")
    assert parts({}, *both) == {*WITH_INSTANCES, "lifecycle"}
    assert parts({"instance": {"enabled": False}}, *both) == BARE


@pytest.mark.parametrize(
    ("in_pillar", "is_fit"),
    [
        ({}, True),
        (of_instances(web1=None), True),
        ({**of_instances(web1=None), "hotplug": {"enabled": False}}, False),
        ({**of_instances(web1=None), "storage": {"enabled": False}}, False),
        ({"storage": {"enabled": False}}, True),
        ({"watcher": {"enabled": True}}, False),
        ({"lifecycle": {"enabled": True}, "instance": {"enabled": False}}, False),
        ({"moves": {"enabled": True}}, True),  # a node that has no instance yet gets some
        ({"moves": {"enabled": True}, "instance": {"enabled": False}}, False),
        (of_instances(web1=None) | {"moves": {"enabled": True}}, True),
        (
            of_instances(web1=None) | {"moves": {"enabled": True}, "confd": {"enabled": False}},
            False,
        ),
    ],
)
def test_parts_need_each_other(in_pillar: Any, is_fit: bool) -> None:
    assert brine(in_pillar)["parts_fit"] is is_fit


def test_packages_are_those_of_the_parts() -> None:
    expected = ["brine-common", "brine-config", "brine-kvmd", "brine-hotplug"]
    assert brine({})["packages"] == expected
    found = brine(of_instances(web1=None))
    assert {"brine-instance", "brine-storage", "brine-watcher"} <= {*found["packages"]}
    assert "brine-storage" not in found["other_packages"]
    assert {"brine-moves", "brine-cluster"} <= {*found["other_packages"]}
    assert "brine-cluster" in brine({"master": {"enabled": True}})["packages"]


@pytest.mark.parametrize(
    ("in_pillar", "installed", "is_there"),
    [
        ({}, [], False),
        ({"storage": {"enabled": None, "directories": []}}, [], False),
        ({"storage": {"directories": ["/srv/vms"]}}, [], True),
        ({"storage": {"default_unit": "vg1"}}, [], True),
        ({"storage": {"allocatable": {"/dev/sdb": False}}}, [], True),
        ({"storage": {"enabled": True}}, [], True),
        ({"version": "latest"}, [], True),
        ({"version": "0.3.0"}, [], True),
        ({}, ["brine-storage"], True),
    ],
)
def test_an_older_instance_gets_no_storage_that_pillar_does_not_ask_for(
    in_pillar: Any, installed: list[str], is_there: bool
) -> None:
    found = brine(in_pillar, installed=["brine-instance@.service", *installed])
    assert ("brine-storage" in found["packages"]) is is_there
    assert "brine-storage" not in found["other_packages"]
    assert found["parts_fit"]


@pytest.mark.parametrize(
    ("part", "said", "file"),
    [
        ("kvmd", {}, f"{UNITS}/brine-kvmd.service"),
        ("kvmd", {}, "/etc/brine/kvmd.toml"),
        ("kvmd", {}, "/etc/systemd/system/brine-kvmd.path.d/salt.conf"),
        ("confd", {"key": "k"}, "/etc/brine/hmac.key"),
        ("hotplug", {}, f"{UNITS}/brine-tap-gc.timer"),
        ("hotplug", {"scripts": {"60-x": "y"}}, "/etc/brine/nic.d/60-x"),
        ("instance", {}, f"{UNITS}/brine-instance@.service"),
        ("lifecycle", {}, "/etc/brine/lifecycle.toml"),
        ("storage", {}, "/etc/brine/storage.toml"),
        ("watcher", {}, "/etc/salt/minion.d/brine-beacon.conf"),
    ],
)
def test_what_a_node_is_not_to_have_is_undone_where_something_of_it_is_there(
    part: str, said: dict[str, Any], file: str
) -> None:
    without = {part: {"enabled": False, **said}}
    assert brine(without)["unwanted"] == []
    assert brine(without, files=[file])["unwanted"] == [part]
    assert part not in brine({part: {**said, "enabled": True}}, files=[file])["unwanted"]


def test_others_keys_are_nothing_of_a_part() -> None:
    found = brine({"confd": {"enabled": False}}, files=["/etc/brine/hmac.key"])
    assert found["unwanted"] == []


def test_nothing_is_undone_for_parts_that_do_not_fit() -> None:
    misfit = {"watcher": {"enabled": True}, "kvmd": {"enabled": False}}
    assert brine(misfit, installed=["brine-kvmd.service"])["unwanted"] == []
