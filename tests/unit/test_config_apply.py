"""``brine config apply``: what is declared becomes the configuration, and nothing else changes."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from brine.common.schema import shape_of
from brine.config import verify
from brine.config.apply import InputError, apply
from brine.config.diff import changes
from brine.config.model import Cluster, ConfigDisk, ConfigNic, Configuration, Instance, Node
from lab.ganeti_config import ganeti_config, instance_name, node_name, uuid_of

Json = dict[str, Any]


def declared() -> Json:
    """A small cluster, as pillar has it."""
    return {
        "brine": {
            "version": "0.1.0",
            "kvmd": {"enabled": True},
            "cluster": {
                "name": "prod.example.com",
                "uid_pool": "4000-4099,5000",
                "volume_group_name": "vg0",
                "nicparams": {"link": "br0"},
            },
            "nodes": {"node1.example.com": {"primary_ip": "192.0.2.1"}},
            "networks": {"lan": {"network": "10.0.0.0/24", "mac_prefix": "aa:00:07"}},
            "instances": {
                "web1.example.com": {
                    "primary_node": "node1",
                    "beparams": {"maxmem": 1024},
                    "nics": [{"ip": "10.0.0.5"}, {"ip": "10.0.0.6", "network": "lan"}],
                    "disks": [{"size": 1024}],
                }
            },
        }
    }


def made(data: Json | None = None) -> Configuration:
    """The configuration that comes of what is declared where there was none."""
    return apply(None, data or declared()).new


def genuine(**size: int) -> Configuration:
    """A configuration of a Ganeti cluster."""
    return Configuration.from_json(ganeti_config(**size))


def mistakes(current: Configuration | None, data: Json) -> list[str]:
    """What is found wrong with an input."""
    with pytest.raises(InputError) as caught:
        apply(current, data)
    return [str(mistake) for mistake in caught.value.mistakes]


def lines(old: Configuration, data: Json, **options: bool) -> list[str]:
    """The changes that an input makes."""
    return [str(change) for change in changes(old, apply(old, data, **options).new)]


def test_a_cluster_out_of_nothing() -> None:
    config = made()
    web = config.instance("web1")
    node = config.node("node1")
    assert (config.cluster.name, config.cluster.master_node) == ("prod.example.com", node.uuid)
    assert (config.cluster.master_ip, node.secondary_ip) == ("192.0.2.1", "192.0.2.1")
    assert config.cluster.uid_pool == [[4000, 4099], [5000, 5000]]
    assert node.master_candidate
    assert [group.uuid for group in config.nodegroups.values()] == [node.group]
    assert (web.primary_node, web.hypervisor, web.admin_state) == (node.uuid, "kvm", "up")
    assert config.nic_params(web.nics[0])["link"] == "br0"
    assert web.nics[0].mac.startswith("aa:00:00:")
    assert web.nics[1].mac.startswith("aa:00:07:")
    (disk,) = (config.disks[key] for key in web.disks)
    assert disk.logical_id == ["vg0", f"{disk.uuid}.disk0"]
    assert (disk.iv_name, disk.nodes, disk.size) == ("disk/0", [node.uuid], 1024)
    assert verify.find(config) == []


def test_the_same_twice_changes_nothing() -> None:
    config = made()
    assert apply(config, declared()).new == config
    assert lines(config, declared()) == []


@given(st.data())
def test_any_input_twice_changes_nothing_the_second_time(data: st.DataObject) -> None:
    value = st.fixed_dictionaries(
        {},
        optional={
            "beparams": st.dictionaries(
                st.sampled_from(["maxmem", "vcpus"]), st.none() | st.integers(512, 9999)
            ),
            "hvparams": st.dictionaries(
                st.sampled_from(["vga", "kernel_path"]), st.none() | st.text(max_size=4)
            ),
            "tags": st.lists(st.text(max_size=4), max_size=3),
            "admin_state": st.sampled_from(["up", "down", "offline", None]),
            "nics": st.lists(
                st.fixed_dictionaries({}, optional={"name": st.text(max_size=3)}), max_size=3
            ),
            "disks": st.lists(st.fixed_dictionaries({"size": st.integers(1, 999)}), max_size=3),
        },
    )
    names = st.sampled_from([instance_name(1), instance_name(2), uuid_of("instance", 10)])
    sections = {"instances": data.draw(st.dictionaries(names, st.none() | value))}
    prune = data.draw(st.booleans())
    try:
        once = apply(genuine(instances=10), copy.deepcopy(sections), prune=prune).new
    except InputError:  # such as less memory than the least
        reject()
    again = apply(once, copy.deepcopy(sections), prune=prune).new
    assert again == once
    assert Configuration.parse(once.format()) == once


def test_a_key_that_is_absent_stays_and_null_resets_one() -> None:
    config = made()
    web = "web1.example.com"
    assert lines(config, {"instances": {web: {"beparams": {"vcpus": 4}}}}) == [
        f"+ /instances/{web}/beparams/vcpus: 4"
    ]
    assert lines(config, {"instances": {web: {"beparams": {"maxmem": None}}}}) == [
        f"- /instances/{web}/beparams/maxmem: 1024"
    ]
    assert lines(config, {"instances": {web: {"beparams": None}}}) == [
        f"- /instances/{web}/beparams/maxmem: 1024"
    ]


def test_null_in_place_of_an_object_removes_it_with_its_disks() -> None:
    done = apply(made(), {"instances": {"web1.example.com": None, "never.was": None}})
    assert (done.new.instances, done.new.disks) == ({}, {})
    assert done.notes == ("nothing to remove: there is no /instances/never.was",)


def test_only_prune_removes_what_is_not_named() -> None:
    config = genuine(nodes=3, instances=4)
    names: Json = {"instances": {instance_name(1): {}}}
    assert apply(config, names).new == config
    pruned = apply(config, names, prune=True).new
    assert [instance.name for instance in pruned.instances.values()] == [instance_name(1)]
    assert list(pruned.disks) == [uuid_of("disk", 1)]
    assert pruned.nodes == config.nodes


@pytest.mark.parametrize("by", ["uuid as key", "uuid inside"])
def test_a_rename_loses_nothing(by: str) -> None:
    config = genuine(nodes=2, instances=2)
    old = config.node("node2")
    named = {old.uuid: {"name": "other"}} if by == "uuid as key" else {"other": {"uuid": old.uuid}}
    new = apply(config, {"nodes": named}).new
    assert new.node("other") == replace(old, name="other")
    assert new.instances == config.instances
    assert [str(change) for change in changes(config, new)] == [
        f'~ /nodes/other/name: "{node_name(2)}" -> "other"'
    ]


def test_two_names_are_swapped() -> None:
    config = genuine(instances=2)
    one, two = uuid_of("instance", 1), uuid_of("instance", 2)
    swap = {one: {"name": instance_name(2)}, two: {"name": instance_name(1)}}
    new = apply(config, {"instances": swap}).new
    assert new.instance("instance1").uuid == two
    assert new.instance("instance2").uuid == one


def test_nics_keep_their_identity() -> None:
    config = made()
    first, second = config.instance("web1").nics
    swapped = [{"mac": second.mac.upper()}, {"uuid": first.uuid}, {"ip": "10.0.0.9"}]
    data = {"instances": {"web1.example.com": {"nics": swapped}}}
    nics = apply(config, data).new.instance("web1").nics
    assert [nics[0].uuid, nics[1].uuid] == [second.uuid, first.uuid]
    assert nics[1] == first
    assert len({nic.mac.lower() for nic in nics}) == 3


def test_a_nic_in_the_same_place_keeps_its_mac() -> None:
    config = made()
    before = config.instance("web1").nics
    data = {"instances": {"web1.example.com": {"nics": [{"ip": "10.0.0.7"}]}}}
    assert apply(config, data).new.instance("web1").nics == (replace(before[0], ip="10.0.0.7"),)


@pytest.mark.parametrize("mac", ["auto", "", None])
def test_a_mac_address_that_is_left_to_us_is_given_once(mac: str | None) -> None:
    config = made()
    data: Json = {"instances": {"web1.example.com": {"nics": [{"mac": mac}, {}, {"mac": mac}]}}}
    once = apply(config, data).new
    assert once.instance("web1").nics[:2] == config.instance("web1").nics
    assert apply(once, data).new == once


def test_disks_follow_their_instance_to_another_node() -> None:
    config = genuine(nodes=2, instances=1)
    new = apply(config, {"instances": {instance_name(1): {"primary_node": "node2"}}}).new
    assert new.disks[uuid_of("disk", 1)].nodes == [uuid_of("node", 2)]


def test_a_disk_that_is_not_listed_goes_and_one_that_moves_stays() -> None:
    config = genuine(instances=2)
    first, second = uuid_of("disk", 1), uuid_of("disk", 2)
    without: Json = {instance_name(2): {"disks": []}}
    moved = {instance_name(1): {"disks": [first, second]}} | without
    assert set(apply(config, {"instances": moved}).new.disks) == {first, second}
    gone = apply(config, {"instances": without}).new
    assert set(gone.disks) == {first}


def test_what_a_user_shut_down_stays_down_until_an_admin_says_otherwise() -> None:
    config = genuine(instances=1)
    key = uuid_of("instance", 1)
    stopped = replace(config.instances[key], admin_state="down", admin_state_source="user")
    config = replace(config, instances={key: stopped})
    kept = apply(config, {"instances": {instance_name(1): {"admin_state": "up"}}})
    assert kept.new == config
    assert "stays down, as its user shut it down" in kept.notes[0]
    told = {"admin_state": "up", "admin_state_source": "admin"}
    overruled = apply(config, {"instances": {instance_name(1): told}}).new
    assert overruled.instances[key].admin_state == "up"


def test_a_genuine_file_is_imported_as_it_is_and_merged_without_change() -> None:
    data = ganeti_config(nodes=5, instances=20)
    imported = apply(None, data).new
    assert json.loads(imported.format()) == data
    assert apply(imported, data).new == imported


def test_candidates_are_as_many_as_the_cluster_wants_and_the_master_is_one() -> None:
    data = declared()["brine"]
    nodes: Json = {f"n{number}": {"primary_ip": f"192.0.2.{number}"} for number in range(1, 6)}
    nodes["n1"]["offline"] = True
    data |= {"nodes": nodes, "instances": {}}
    data["cluster"] |= {"candidate_pool_size": 2, "master": "n5"}
    candidates = [n.name for n in made(data).nodes.values() if n.master_candidate]
    assert candidates == ["n2", "n5"]


def test_all_mistakes_are_told_at_once() -> None:
    web: Json = {
        "primary_node": "nod1.example.com",
        "admin_stat": "up",
        "beparams": {"maxmme": 1, "minmem": "1G"},
        "hvparams": {"xen_cmd": "xl"},
        "nics": [{"ip": "10.0.0.300"}, {"mac": "zz", "nicparams": {"mode": "routed"}}],
        "network_port": "x",
    }
    data = {
        "node": {},
        "nodes": {"a b": {"primary_ip": "1.2.3.4"}},
        "instances": {"web1.example.com": web},
    }
    found = "\n".join(mistakes(made(), data))
    for expected in (
        "/node: is not known; did you mean nodes?",
        "/nodes/a b/name: 'a b' is no name",
        "/primary_node: there is no node 'nod1.example.com'; did you mean node1.example.com?",
        "/admin_stat: is not known; did you mean admin_state?",
        "/beparams/maxmme: there is no such parameter; did you mean maxmem?",
        "/beparams/minmem: must be a size in MiB",
        "/hvparams/xen_cmd: is a parameter of the whole cluster",
        "/nics/0/ip: '10.0.0.300' is no IP address",
        "/nics/1/mac: 'zz' is no MAC address",
        "/network_port: must be a whole number or null, but is 'x'",
    ):
        assert expected in found


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"instances": []}, "/instances: must be an object, by name or UUID, but is a list"),
        ({"instances": {"x": 5}}, "/instances/x: must be an object or null, but is 5"),
        ({"instances": {"x": {}}}, "/instances/x/primary_node: is needed"),
        ({"nodes": {"x": {}}}, "/nodes/x/primary_ip: is needed"),
        (
            {"nodes": {"node1.example.com": None}},
            "/cluster/master: the node node1.example.com is being removed",
        ),
        ({"version": 3000000}, "/version: belongs to a whole configuration only"),
        ({"cluster": {"uuid": "x"}}, "/cluster/uuid: is another cluster's"),
        ({"cluster": {"uid_pool": "5-1"}}, "/cluster/uid_pool: [5, 1] is no range"),
        ({"cluster": {"hvparams": {"kvn": {}}}}, "/cluster/hvparams/kvn: there is no such group"),
        ({"instances": {"web1.example.com": {"nics": 5}}}, "/nics: must be a list, but is 5"),
        ({"instances": {"web1.example.com": {"disks": ["x"]}}}, "there is no disk 'x'"),
        ({"instances": {"web1.example.com": {"name": "x"}}}, "but the key says web1.example.com"),
        (
            {"instances": {"w": {"primary_node": "node1", "nics": [{"ip": "10.0.0.5"}]}}},
            "10.0.0.5 is also /instances/web1.example.com/nics/0's",
        ),
        (
            {"instances": {"w": {"primary_node": "node1", "disks": [{"dev_type": "rbd"}]}}},
            "/instances/w/disks/0/logical_id: is needed for a disk of type rbd",
        ),
    ],
    ids=range(14),
)
def test_a_mistake_is_told_with_its_place(data: Json, expected: str) -> None:
    assert expected in "\n".join(mistakes(made(), data))


def test_what_is_removed_and_still_used_is_told_by_name() -> None:
    config = genuine(nodes=3, instances=2)
    name = node_name(2)
    assert mistakes(config, {"nodes": {name: None}}) == [
        f"/instances/{instance_name(2)}/primary_node: the node {name} is being removed"
    ]
    for reference in (name, "node2", uuid_of("node", 2)):
        moved = {
            "nodes": {name: None},
            "instances": {instance_name(1): {"primary_node": reference}},
        }
        (mistake,) = mistakes(config, moved)
        assert mistake.endswith(f"/primary_node: the node {name} is being removed")
    lan = apply(
        config, {"networks": {"lan": {}}, "nodegroups": {"default": {"networks": {"lan": {}}}}}
    )
    assert mistakes(lan.new, {"networks": {"lan": None}}) == [
        "/nodegroups/default/networks/lan: the network lan is being removed"
    ]


def test_a_removed_node_with_a_mirror_is_told_by_the_disks_owner() -> None:
    data = ganeti_config(nodes=3, instances=10)
    config = Configuration.from_json(data)
    (disk, *_) = (disk for disk in config.disks.values() if disk.dev_type == "drbd")
    (owner,) = (one for one in config.instances.values() if disk.uuid in one.disks)
    (other,) = {*disk.logical_id[:2]} - {owner.primary_node}
    name = config.nodes[other].name
    found = mistakes(config, {"nodes": {name: None}, "cluster": {"master": name}})
    assert found == [f"/cluster/master: the node {name} is being removed"]
    keeper = next(node.name for node in config.nodes.values() if node.uuid != other)
    found = mistakes(config, {"nodes": {name: None}, "cluster": {"tags": ["x"], "master": keeper}})
    assert any(
        mistake.endswith(f"the node {name} is being removed, and disk 0 of {owner.name} is on it")
        for mistake in found
    )
    assert other not in "\n".join(found)


def test_a_fault_that_was_there_before_hinders_nobody() -> None:
    data = ganeti_config(instances=2)
    for instance in data["instances"].values():
        instance["nics"][0]["mac"] = "aa:00:00:00:00:01"
    config = Configuration.from_json(data)
    assert lines(config, {"cluster": {"maintain_node_health": True}}) == [
        "~ /cluster/maintain_node_health: false -> true"
    ]


def test_what_is_no_input_is_refused() -> None:
    data: Any
    for data in ([], 5, None):
        with pytest.raises(InputError, match="must be an object"):
            apply(None, data)
    assert mistakes(None, {}) == [
        "/cluster: is needed: there is no configuration yet",
        "/cluster/master: is needed: the master node's name",
    ]


KEYS = st.sampled_from(
    sorted(
        {*shape_of(Cluster).by_key, *shape_of(Node).by_key, *shape_of(Instance).by_key}
        | {
            *shape_of(ConfigNic).by_key,
            *shape_of(ConfigDisk).by_key,
            "master",
            "default",
            "kvm",
            "networks",
        }
    )
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**40) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from(["cluster", "nodes", "nodegroups", "networks", "instances", "disks"]),
        st.dictionaries(
            KEYS | st.sampled_from([instance_name(1), node_name(1), "default"]), ANYTHING
        ),
    ),
    st.booleans(),
)
def test_no_input_does_worse_than_an_error(data: Json, from_nothing: bool) -> None:
    current = None if from_nothing else genuine(instances=1)
    try:
        new = apply(current, data).new
    except InputError as error:
        assert error.mistakes
    else:
        assert verify.find(new) == []
        assert Configuration.parse(new.format()) == new


def test_secrets_are_not_in_the_list_of_changes() -> None:
    config = genuine(instances=10)
    data = {"instances": {instance_name(1): {"osparams_private": {"password": "hunter2"}}}}
    assert "hunter2" not in "\n".join(lines(config, data))
