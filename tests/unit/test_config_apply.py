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
from brine.config.model import (
    MOVED_TAG,
    Cluster,
    ConfigDisk,
    ConfigNic,
    Configuration,
    Instance,
    Network,
    Node,
    NodeGroup,
)
from lab.ganeti_config import ganeti_config, instance_name, node_name, uuid_of

Json = dict[str, Any]

WEB = instance_name(1)
SITE = "web1.example.com"


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
                SITE: {
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
    """The faults of an input."""
    with pytest.raises(InputError) as caught:
        apply(current, data)
    return [str(mistake) for mistake in caught.value.mistakes]


def applied(current: Configuration, data: Json) -> Configuration:
    """The configuration after an input was applied twice."""
    new = apply(current, copy.deepcopy(data)).new
    assert apply(new, copy.deepcopy(data)).new == new
    return new


def lines(old: Configuration, data: Json) -> list[str]:
    """The changes that an input makes."""
    return [str(change) for change in changes(old, applied(old, data))]


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
    assert verify.find_mistakes(config) == []


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
    names = st.sampled_from([WEB, instance_name(2), uuid_of("instance", 10)])
    sections = {"instances": data.draw(st.dictionaries(names, st.none() | value))}
    prune = data.draw(st.booleans())
    try:
        once = apply(genuine(instances=10), copy.deepcopy(sections), prune=prune).new
    except InputError:  # such as less memory than the least
        reject()
    again = apply(once, copy.deepcopy(sections), prune=prune).new
    assert again == once
    assert Configuration.parse(once.format()) == once


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"beparams": {"vcpus": 4}}, "+ {}/beparams/vcpus: 4"),
        ({"beparams": {"maxmem": None}}, "- {}/beparams/maxmem: 1024"),
        ({"beparams": None}, "- {}/beparams/maxmem: 1024"),
        ({"colour": None}, '- {}/colour: "blue"'),
    ],
)
def test_a_key_that_is_absent_stays_and_null_resets_one(change: Json, expected: str) -> None:
    config = made()
    site = replace(config.instance(SITE), extra={"colour": "blue"})
    config = replace(config, instances={site.uuid: site})
    assert lines(config, {"instances": {SITE: change}}) == [expected.format(f"/instances/{SITE}")]


def test_only_prune_removes_what_is_not_named() -> None:
    config = genuine(nodes=3, instances=4)
    names: Json = {"instances": {WEB: {}}}
    assert apply(config, names).new == config
    pruned = apply(config, names, prune=True).new
    assert [instance.name for instance in pruned.instances.values()] == [WEB]
    assert list(pruned.disks) == [uuid_of("disk", 1)]
    assert pruned.nodes == config.nodes
    emptied = apply(config, {"instances": {}, "networks": None}, prune=True)
    assert emptied.new == config
    assert emptied.notes == ("nothing is removed: /instances is empty",)


def test_null_in_place_of_an_object_removes_it_with_its_disks() -> None:
    done = apply(made(), {"instances": {SITE: None, "never.was": None}})
    assert (done.new.instances, done.new.disks) == ({}, {})
    assert done.notes == ("nothing to remove: there is no /instances/never.was",)


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
    swap = {one: {"name": instance_name(2)}, two: {"name": WEB}}
    new = apply(config, {"instances": swap}).new
    assert new.instance("instance1").uuid == two
    assert new.instance("instance2").uuid == one


def test_nics_keep_their_identity() -> None:
    config = made()
    first, second = config.instance("web1").nics
    swapped = [{"mac": second.mac.upper()}, {"uuid": first.uuid}, {"ip": "10.0.0.9"}]
    data = {"instances": {SITE: {"nics": swapped}}}
    nics = apply(config, data).new.instance("web1").nics
    assert [nics[0].uuid, nics[1].uuid] == [second.uuid, first.uuid]
    assert nics[1] == first
    assert len({nic.mac.lower() for nic in nics}) == 3
    in_place = {"instances": {SITE: {"nics": [{"ip": "10.0.0.7"}]}}}
    assert apply(config, in_place).new.instance("web1").nics == (replace(first, ip="10.0.0.7"),)


@pytest.mark.parametrize("mac", ["auto", "", None])
def test_a_mac_address_that_is_left_to_us_is_given_once(mac: str | None) -> None:
    config = made()
    data: Json = {"instances": {SITE: {"nics": [{"mac": mac}, {}, {"mac": mac}]}}}
    once = apply(config, data).new
    assert once.instance("web1").nics[:2] == config.instance("web1").nics
    assert apply(once, data).new == once


def test_a_disk_that_is_not_listed_goes_and_one_that_moves_stays() -> None:
    config = genuine(instances=2)
    down = applied(config, {"instances": {WEB: {"admin_state": "down"}}})
    new = apply(down, {"instances": {WEB: {"primary_node": "node2"}}}).new
    assert new.disks[uuid_of("disk", 1)].nodes == [uuid_of("node", 2)]
    first, second = uuid_of("disk", 1), uuid_of("disk", 2)
    without: Json = {instance_name(2): {"disks": []}}
    moved = {WEB: {"disks": [first, second]}} | without
    assert set(apply(config, {"instances": moved}).new.disks) == {first, second}
    gone = apply(config, {"instances": without}).new
    assert set(gone.disks) == {first}


def test_an_instance_that_is_up_stays_on_its_node() -> None:
    config = genuine(instances=1)
    refused = (
        f"/instances/{WEB}/primary_node: can't change while the instance is up on {node_name(1)}, "
        f'which may run it: declare "primary_node": "{node_name(1)}", or move it by: '
        f'brine instance migrate {WEB} --to {node_name(2)}; or first apply "admin_state": "down"; '
        'or, if that node is dead, "offline": true for it'
    )
    move: Json = {"instances": {WEB: {"primary_node": "node2"}}}
    assert mistakes(config, move) == [refused]
    # The node may not have stopped it yet, and a node that is removed may be alive.
    at_once: Json = {"instances": {WEB: {"primary_node": "node2", "admin_state": "down"}}}
    assert mistakes(config, at_once) == [refused]
    assert refused in mistakes(config, {**move, "nodes": {node_name(1): None}})


def test_a_declaration_of_the_node_that_a_move_has_left_is_told() -> None:
    down: Json = {"instances": {WEB: {"admin_state": "down"}}}
    config = applied(genuine(instances=1), down)
    moved = replace(config.instance(WEB), tags=[f"{MOVED_TAG}{node_name(2)}"])
    config = replace(config, instances={moved.uuid: moved})
    (told,) = mistakes(config, {"instances": {WEB: {"primary_node": "node2"}}})
    assert f"moved from {node_name(2)} to {node_name(1)}" in told
    assert "brine instance migrate" in told
    for node in ("node1", "node3"):
        assert apply(config, {"instances": {WEB: {"primary_node": node}}}).new


@pytest.mark.parametrize(
    "first",
    [
        {"instances": {WEB: {"admin_state": "down"}}},
        {"instances": {WEB: {"admin_state": "down", "admin_state_source": "user"}}},
        {"instances": {WEB: {"admin_state": "offline"}}},
        {"instances": {WEB: {"forthcoming": True}}},
        {"nodes": {node_name(1): {"offline": True}}, "cluster": {"master": node_name(3)}},
    ],
)
def test_an_instance_that_runs_nowhere_moves(first: Json) -> None:
    config = applied(genuine(instances=1), first)
    move = {"instances": {WEB: {"primary_node": "node2", "admin_state": "up"}}}
    assert applied(config, move).instance(WEB).primary_node == uuid_of("node", 2)


def test_a_node_may_be_marked_offline_together_with_its_instances_moves() -> None:
    config = applied(genuine(instances=1), {"cluster": {"master": node_name(3)}})
    dead = {"nodes": {node_name(1): {"offline": True}}}
    move = {"instances": {WEB: {"primary_node": "node2"}}}
    assert applied(config, {**dead, **move}).instance(WEB).primary_node == uuid_of("node", 2)


def test_what_a_user_shut_down_stays_down_until_an_admin_says_otherwise() -> None:
    config = genuine(instances=1)
    key = uuid_of("instance", 1)
    stopped = replace(config.instances[key], admin_state="down", admin_state_source="user")
    config = replace(config, instances={key: stopped})
    kept = apply(config, {"instances": {WEB: {"admin_state": "up"}}})
    assert kept.new == config
    assert "stays down, as its user shut it down" in kept.notes[0]
    for said in ({"admin_state": None}, {"admin_state": "up", "admin_state_source": None}):
        assert applied(config, {"instances": {WEB: said}}) == config
    told = {"admin_state": "up", "admin_state_source": "admin"}
    overruled = apply(config, {"instances": {WEB: told}}).new
    assert overruled.instances[key].admin_state == "up"
    # Where there is no such will, null is the default.
    down = applied(genuine(instances=1), {"instances": {WEB: {"admin_state": "down"}}})
    up = applied(down, {"instances": {WEB: {"admin_state": None}}})
    assert up.instance(WEB).admin_state == "up"


def test_a_genuine_file_is_imported_as_it_is_and_merged_without_change() -> None:
    data = ganeti_config(nodes=5, instances=20)
    imported = apply(None, data).new
    assert json.loads(imported.format()) == data
    assert apply(imported, data).new == imported
    data["cluster"]["master_netmask"] = 24
    assert apply(imported, data).new == Configuration.from_json(data)


def test_of_a_whole_configuration_all_new_instances_with_values_that_brine_lacks_are_told() -> None:
    """Those that were there before stay as they are, whatever they have."""
    data = ganeti_config(nodes=3, instances=4)
    old, *others = data["instances"].values()
    old["hvparams"] = {"nic_type": "i82551"}
    imported = apply(None, data).new
    assert apply(imported, data).new == imported
    lacks: list[Json] = [{"nic_type": "i82551"}, {"disk_type": "pflash"}, {"nic_type": "e1000"}]
    for number, (other, hvparams) in enumerate(zip(others, lacks, strict=True)):
        new = other | {"uuid": uuid_of("new", number), "name": f"new{number}.example.com"}
        new |= {"hvparams": hvparams, "nics": [], "disks": []}
        data["instances"][new["uuid"]] = new
    with pytest.raises(InputError) as caught:
        apply(imported, data)
    assert [one.where for one in caught.value.mistakes] == [
        "/instances/new0.example.com/hvparams/nic_type",
        "/instances/new1.example.com/hvparams/disk_type",
    ]
    assert "nothing was changed" in (caught.value.hint or "")
    assert "with Ganeti's commands" in (caught.value.hint or "")


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
        "instances": {SITE: web},
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
            "/cluster/master_node: the node node1.example.com is being removed",
        ),
        ({"version": 3000000}, "/version: belongs to a whole configuration only"),
        ({"cluster": {"uuid": "x"}}, "/cluster/uuid: is another cluster's"),
        ({"cluster": {"uid_pool": "5-1"}}, "/cluster/uid_pool: [5, 1] is no range"),
        ({"cluster": {"hvparams": {"kvn": {}}}}, "/cluster/hvparams/kvn: there is no such group"),
        ({"instances": {SITE: {"nics": 5}}}, "/nics: must be a list, but is 5"),
        ({"instances": {SITE: {"disks": ["x"]}}}, "there is no disk 'x'"),
        ({"instances": {SITE: {"name": "x"}}}, "but the key says web1.example.com"),
        (
            {"instances": {"w": {"primary_node": "node1", "disks": [{"dev_type": "rbd"}]}}},
            "/instances/w/disks/0/logical_id: is needed for a disk of type rbd",
        ),
    ],
    ids=range(13),
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
            "instances": {WEB: {"primary_node": reference}},
        }
        mistake, _ = mistakes(config, moved)
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
    keeper = next(node.name for node in config.nodes.values() if node.uuid != other)
    found = mistakes(config, {"nodes": {name: None}, "cluster": {"tags": ["x"], "master": keeper}})
    assert any(
        mistake.endswith(f"the node {name} is being removed, and disk 0 of {owner.name} is on it")
        for mistake in found
    )
    assert other not in "\n".join(found)


def test_secrets_are_not_in_the_list_of_changes() -> None:
    config = genuine(instances=10)
    data = {"instances": {WEB: {"osparams_private": {"password": "hunter2"}}}}
    assert "hunter2" not in "\n".join(lines(config, data))


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
        st.dictionaries(KEYS | st.sampled_from([WEB, node_name(1), "default"]), ANYTHING),
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
        assert verify.find_mistakes(new) == []
        assert Configuration.parse(new.format()) == new


# What people write, and what must not come of it.


@pytest.mark.parametrize("around", ["salt-call", "salt-call pillar.items", "a file"])
def test_pillar_is_taken_as_salt_prints_it(around: str) -> None:
    data: Json = {"cluster": {"tags": ["blue"]}}
    data = {
        "salt-call": {"local": data},
        "salt-call pillar.items": {"local": {"brine": data}},
        "a file": {"brine": data},
    }[around]
    assert lines(genuine(), data) == ['~ /cluster/tags: [] -> ["blue"]']


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("**********", "/: is **********: that hides"),
        ({"brine": "**********"}, "/brine: is **********: that hides"),
        ({"cluster": {"tags": ["a", "**********"]}}, "/cluster/tags/1: is **********: that hides"),
        (
            {"nodes": {"n": {"primary_ip": "**********", "group": "**********"}}},
            "/nodes/n/primary_ip: is **********, one of 2 such values: that hides",
        ),
    ],
    ids=range(4),
)
def test_what_salt_hides_on_its_command_line_is_no_input(data: Any, said: str) -> None:
    none: Any
    for none in ([], 5, None):
        with pytest.raises(InputError, match="must be an object"):
            apply(None, none)
    assert mistakes(None, {}) == [
        "/cluster: is needed: there is no configuration yet",
        "/cluster/master: is needed: the master node's name",
    ]
    for current in (None, genuine()):
        with pytest.raises(InputError) as caught:
            apply(current, {"local": data})
        assert str(caught.value).startswith(said)
        assert caught.value.hint
        assert "the state brine.config (brine_config.applied)" in caught.value.hint


@pytest.mark.parametrize("value", [None, {}, {"primary_node": "node1"}, {"admin_state": "down"}])
def test_a_short_name_is_no_name_for_something_new(value: Json | None) -> None:
    config = genuine(instances=2)
    assert mistakes(config, {"instances": {"instance2": value}}) == [
        f"/instances/instance2: is short for {instance_name(2)}: give the whole name"
    ]
    (mistake,) = mistakes(config, {"nodes": {"node2": {"primary_ip": "192.0.2.99"}}})
    assert mistake == f"/nodes/node2: is short for {node_name(2)}: give the whole name"
    other = {"instance2.example.org": {"primary_node": "node1"}}
    (mistake,) = mistakes(
        applied(config, {"instances": other}), {"instances": {"instance2": value}}
    )
    assert mistake.endswith(
        "is short for instance2.example.com or instance2.example.org: give the whole name"
    )


def test_a_short_name_of_its_own_is_a_name() -> None:
    config = genuine(instances=1)
    new: Json = {"primary_node": "node1"}
    one = "5f0b7ae0-53c2-4c0f-9f0e-5c8f3b5a4f11"
    assert applied(config, {"instances": {"instance1": {**new, "uuid": one}}}).instance(one)
    renamed = {"instances": {"instance1": {"uuid": uuid_of("instance", 1)}}}
    assert applied(config, renamed).instance(uuid_of("instance", 1)).name == "instance1"
    instead = applied(config, {"instances": {WEB: None, "instance1": new}})
    assert [each.name for each in instead.instances.values()] == ["instance1"]
    lan = applied(config, {"networks": {"lan.one": {}}})
    assert len(applied(lan, {"networks": {"lan": {}}}).networks) == 2


def test_uuids_are_the_same_in_capitals() -> None:
    config = genuine(nodes=2, instances=1)
    web = config.instance(WEB)
    data = {
        "instances": {
            web.uuid.upper(): {
                "uuid": web.uuid.upper(),
                "primary_node": web.primary_node.upper(),
                "disks": [web.disks[0].upper()],
                "nics": [{"uuid": web.nics[0].uuid.upper()}],
            }
        },
        "nodes": {node_name(2): {"uuid": uuid_of("node", 2).upper()}},
    }
    assert lines(config, data) == []
    one = "5F0B7AE0-53C2-4C0F-9F0E-5C8F3B5A4F11"
    new = applied(config, {"nodes": {one: {"name": "n", "primary_ip": "192.0.2.99"}}})
    assert new.node("n").uuid == one.lower()


def two_disks() -> Configuration:
    """An instance with two disks."""
    disks: Json = {"disks": [uuid_of("disk", 1), {"size": 2048, "name": "data"}]}
    return apply(genuine(instances=1), {"instances": {WEB: disks}}).new


def test_which_disk_goes_is_not_guessed() -> None:
    assert mistakes(two_disks(), {"instances": {WEB: {"disks": [{"size": 2048}]}}}) == [
        f"/instances/{WEB}/disks/0: there are 2 disks: say by uuid or name which of them this is"
    ]


@pytest.mark.parametrize("by", ["name", "uuid", "string", "none stays"])
def test_a_disk_goes_when_it_is_said_which_stays(by: str) -> None:
    config = two_disks()
    first, second = config.instance(WEB).disks
    ways: dict[str, list[Any]] = {
        "name": [{"name": "data", "size": 2048}],
        "uuid": [{"uuid": second, "size": 2048}],
        "string": [second],
        "none stays": [],
    }
    stays = ways[by]
    new = applied(config, {"instances": {WEB: {"disks": stays}}})
    assert set(new.disks) == ({second} if stays else set())
    assert first not in new.disks


@pytest.mark.parametrize("by", ["a new name", "another place"])
def test_an_old_fault_does_not_become_a_new_one_by(by: str) -> None:
    data = ganeti_config(instances=1)
    web = data["instances"][uuid_of("instance", 1)]
    nic = web["nics"][0]
    nic["ip"] = "10.0.0.300"
    config = Configuration.from_json(data)
    change: Json = {"name": "other.example.com"}
    if by == "another place":
        change = {"nics": [{"mac": "aa:00:00:99:99:99"}, {"uuid": nic["uuid"]}]}
    new = applied(config, {"instances": {web["uuid"]: change}})
    assert "10.0.0.300" in [nic.ip for nic in new.instances[web["uuid"]].nics]


def test_an_old_fault_does_not_hide_a_new_one() -> None:
    data = ganeti_config(instances=2)
    data["instances"][uuid_of("instance", 1)]["nics"][0]["ip"] = "10.0.0.300"
    change = {"instances": {WEB: {"nics": [{"ip": "10.0.0.400"}]}}}
    (mistake,) = mistakes(Configuration.from_json(data), change)
    assert "'10.0.0.400' is no IP address" in mistake


def test_addresses_are_kept_in_one_spelling() -> None:
    data: Json = {
        "cluster": {"name": "c"},
        "nodes": {"n": {"primary_ip": "2001:DB8::0001", "secondary_ip": "2001:db8:0::2"}},
        "instances": {"w": {"primary_node": "n", "nics": [{"ip": "2001:0db8::A"}]}},
    }
    config = apply(None, data).new
    node = config.node("n")
    assert (node.primary_ip, node.secondary_ip) == ("2001:db8::1", "2001:db8::2")
    assert config.cluster.master_ip == "2001:db8::1"
    assert config.instance("w").nics[0].ip == "2001:db8::a"
    assert lines(config, data) == []


@pytest.mark.parametrize(
    "change",
    [
        {"osparams_private": "hunter2"},
        {"disks": [{"size": 1, "dev_type": "drbd", "logical_id": "hunter2"}]},
        {"disks": [{"size": 1, "dev_type": "drbd", "logical_id": ["hunter2", "hunter2"]}]},
        {"disks": {"logical_id": ["hunter2"]}},
        {"nics": [["hunter2"]]},
    ],
)
def test_a_mistake_does_not_give_a_secret_away(change: Json) -> None:
    found = mistakes(genuine(instances=1), {"instances": {WEB: change}})
    assert found
    assert "hunter2" not in "\n".join(found)


# Masters, candidates, networks and node addresses.


def networked() -> Json:
    """Two nodes, two networks of which the group has one, and an instance with a NIC in each."""
    return {
        "cluster": {"name": "c", "volume_group_name": "vg0", "master": "node1"},
        "nodes": {
            "node1.example.com": {"primary_ip": "192.0.2.1"},
            "node2.example.com": {"primary_ip": "192.0.2.2"},
        },
        "nodegroups": {"default": {"networks": {"lan": {"mode": "bridged", "link": "br-lan"}}}},
        "networks": {"lan": {"network": "10.0.0.0/24"}, "dmz": {"network": "10.1.0.0/24"}},
        "instances": {
            SITE: {
                "primary_node": "node1",
                "nics": [
                    {"ip": "10.0.0.1", "network": "lan"},
                    {"ip": "10.1.0.1", "network": "dmz"},
                    {"network": "lan", "nicparams": {"link": "br-own"}},
                ],
            }
        },
    }


@pytest.fixture
def connected() -> Configuration:
    """The configuration that comes of it."""
    new = apply(None, networked()).new
    assert apply(new, networked()).new == new
    return new


def network(config: Configuration, name: str) -> Network:
    return next(one for one in config.networks.values() if one.name == name)


def only_group(config: Configuration) -> NodeGroup:
    return next(iter(config.nodegroups.values()))


def nics(connected: Configuration, *given: Json) -> tuple[ConfigNic, ...]:
    """The NICs of the instance after an input."""
    return applied(connected, {"instances": {SITE: {"nics": [*given]}}}).instance(SITE).nics


def test_a_nic_gets_the_parameters_of_its_network(connected: Configuration) -> None:
    lan, dmz, own = connected.instance(SITE).nics
    assert lan.nicparams == {"mode": "bridged", "link": "br-lan"}
    assert dmz.nicparams == {}
    assert own.nicparams == {"mode": "bridged", "link": "br-own"}


def test_a_nic_that_changes_its_network_changes_its_link(connected: Configuration) -> None:
    first, second, third = nics(
        connected, {"network": "dmz"}, {"network": "lan"}, {"network": None}
    )
    assert first.nicparams == {}
    assert second.nicparams == {"mode": "bridged", "link": "br-lan"}
    assert third.nicparams == {"link": "br-own"}


def test_null_gives_a_nic_the_parameters_of_its_network_back(connected: Configuration) -> None:
    lan = connected.instance(SITE).nics[0].nicparams
    assert nics(connected, {}, {}, {"nicparams": None})[2].nicparams == lan
    assert nics(connected, {}, {"nicparams": None}, {})[1].nicparams == {}


def test_a_nic_that_stays_keeps_its_parameters(connected: Configuration) -> None:
    moved = {"nodegroups": {"default": {"networks": {"lan": {"link": "br-new"}}}}}
    again = {"instances": {SITE: {"nics": [{"network": "lan"}, {}, {}]}}}
    new = applied(applied(connected, moved), again)
    assert new.instance(SITE).nics == connected.instance(SITE).nics


def test_a_groups_networks_are_merged_by_name(connected: Configuration) -> None:
    group = {"networks": {"lan": {"vlan": ".7"}, "dmz": {"link": "br-dmz"}}}
    new = applied(connected, {"nodegroups": {"default": group}})
    assert only_group(new).networks == {
        network(connected, "lan").uuid: {"mode": "bridged", "link": "br-lan", "vlan": ".7"},
        network(connected, "dmz").uuid: {"link": "br-dmz"},
    }


def test_null_takes_a_network_from_a_group(connected: Configuration) -> None:
    group = {"networks": {"lan": None, "never.was": None}}
    new = applied(connected, {"nodegroups": {"default": group}})
    assert only_group(new).networks == {}
    assert [str(change) for change in changes(connected, new)] == [
        '- /nodegroups/default/networks/lan: {"mode": "bridged", "link": "br-lan"}'
    ]


def test_a_network_goes_with_its_place_in_a_group(connected: Configuration) -> None:
    group = {"default": {"networks": {"lan": None}}}
    data: Json = {"networks": {"lan": None}, "nodegroups": group, "instances": {SITE: None}}
    new = applied(connected, data)
    assert only_group(new).networks == {}
    assert list(new.networks.values()) == [network(connected, "dmz")]


def test_a_network_that_is_none_is_a_mistake(connected: Configuration) -> None:
    data: Json = {"nodegroups": {"default": {"networks": {"lam": {}}}}}
    assert mistakes(connected, data) == [
        "/nodegroups/default/networks/lam: there is no network 'lam'; did you mean lan?"
    ]
    twice: Json = {"lan": {}, network(connected, "lan").uuid.upper(): {}}
    assert (
        "is there twice" in mistakes(connected, {"nodegroups": {"default": {"networks": twice}}})[0]
    )


def test_whoever_becomes_master_is_a_candidate() -> None:
    data = networked()
    data["nodes"]["node2.example.com"]["master_candidate"] = False
    connected = apply(None, data).new
    assert not connected.node("node2").master_candidate
    new = applied(connected, {"cluster": {"master": "node2"}})
    assert new.node("node2").master_candidate


def test_the_address_of_the_cluster_goes_with_its_master(connected: Configuration) -> None:
    assert connected.cluster.master_ip == "192.0.2.1"
    assert applied(connected, {"cluster": {"master": "node2"}}).cluster.master_ip == "192.0.2.2"
    moved = applied(connected, {"nodes": {"node1.example.com": {"primary_ip": "192.0.2.9"}}})
    assert moved.cluster.master_ip == "192.0.2.9"
    own = applied(connected, {"cluster": {"master_ip": "192.0.2.254"}})
    assert applied(own, {"cluster": {"master": "node2"}}).cluster.master_ip == "192.0.2.254"


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ({"offline": True}, "/cluster/master_node: the master is offline"),
        (
            {"master_candidate": False},
            "/nodes/node1.example.com/master_candidate: the master is always a master candidate",
        ),
    ],
)
def test_a_master_must_be_able_to_be_one(
    connected: Configuration, node: Json, expected: str
) -> None:
    assert expected in mistakes(connected, {"nodes": {"node1.example.com": node}})


SIX = {"primary_ip": "2001:db8::1"}
OF_V4, OF_V6 = (2, 32), (10, 128)


@pytest.mark.parametrize(
    ("cluster", "node", "expected"),
    [
        ({}, {"primary_ip": "192.0.2.1"}, OF_V4),
        ({}, SIX, OF_V6),
        ({"primary_ip_family": 10, "master_ip": "2001:db8::9"}, SIX, OF_V6),
        ({"master_netmask": 64}, SIX, (10, 64)),
        ({"primary_ip_family": None, "master_netmask": None}, SIX, OF_V6),
        ({"master_ip": "192.0.2.9"}, SIX, OF_V4),
    ],
)
def test_a_new_cluster_has_the_family_of_its_address(
    cluster: Json, node: Json, expected: tuple[int, int]
) -> None:
    given = {"cluster": {"name": "c.example.com", **cluster}, "nodes": {"n1.example.com": node}}
    made = apply(None, given).new
    assert (made.cluster.primary_ip_family, made.cluster.master_netmask) == expected
    assert verify.find_mistakes(made) == []
    reset = {"cluster": {"primary_ip_family": None, "master_netmask": None}}
    again = apply(made, {"cluster": {"tags": ["x"]}}).new
    assert (again.cluster.primary_ip_family, again.cluster.master_netmask) == expected
    back = apply(made, reset).new.cluster
    assert (back.primary_ip_family, back.master_netmask) == (OF_V6 if expected[0] == 10 else OF_V4)


@pytest.mark.parametrize(
    ("cluster", "where"),
    [
        ({"primary_ip_family": 2}, "/cluster/primary_ip_family"),
        ({"primary_ip_family": 10, "master_ip": "192.0.2.9"}, "/cluster/primary_ip_family"),
        ({"master_ip": "192.0.2.9", "master_netmask": 64}, "/cluster/master_netmask"),
    ],
)
def test_an_address_of_the_other_family_is_refused(cluster: Json, where: str) -> None:
    given = {"cluster": {"name": "c.example.com", **cluster}, "nodes": {"n1.example.com": SIX}}
    with pytest.raises(InputError) as raised:
        apply(None, given)
    assert [mistake.where for mistake in raised.value.mistakes] == [where]


def test_a_drained_node_gets_no_instances() -> None:
    drained = {"nodes": {node_name(2): {"drained": True}}}
    config = applied(genuine(instances=2), drained)
    assert not config.node("node2").master_candidate
    new = {"instances": {"new1.example.com": {"primary_node": "node2"}}}
    with pytest.raises(InputError, match="/instances/new1.example.com/primary_node: .*drained"):
        apply(config, new)
    down = applied(config, {"instances": {WEB: {"admin_state": "down"}}})
    with pytest.raises(InputError, match="drained"):
        apply(down, {"instances": {WEB: {"primary_node": "node2"}}})
    # What is there may change, and pillar that says what it was before is no mistake.
    there = next(one for one in config.instances.values() if one.primary_node == uuid_of("node", 2))
    assert applied(config, {"instances": {there.name: {"tags": ["changed"]}}})
    kept = apply(config, {"nodes": {node_name(2): {"master_candidate": True}}})
    assert not kept.new.node("node2").master_candidate
    assert "node2" in kept.notes[0]
