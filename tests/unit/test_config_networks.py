"""Masters, candidates, networks and node addresses: what ``brine config apply`` makes of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from brine.config.apply import InputError, apply
from brine.config.diff import changes
from brine.config.model import ConfigNic, Configuration, Network, NodeGroup
from lab.ganeti_config import ganeti_config

Json = dict[str, Any]

WEB = "web1.example.com"


def declared() -> Json:
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
            WEB: {
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
def config() -> Configuration:
    """The configuration that comes of it."""
    new = apply(None, declared()).new
    assert apply(new, declared()).new == new
    return new


def applied(current: Configuration, data: Json) -> Configuration:
    """What comes of an input, twice."""
    new = apply(current, copy.deepcopy(data)).new
    assert apply(new, copy.deepcopy(data)).new == new
    return new


def mistakes(current: Configuration, data: Json) -> list[str]:
    """What is found wrong with an input."""
    with pytest.raises(InputError) as caught:
        apply(current, data)
    return [str(mistake) for mistake in caught.value.mistakes]


def network(config: Configuration, name: str) -> Network:
    return next(one for one in config.networks.values() if one.name == name)


def only_group(config: Configuration) -> NodeGroup:
    return next(iter(config.nodegroups.values()))


def nics(config: Configuration, *given: Json) -> tuple[ConfigNic, ...]:
    """The NICs of the instance after an input."""
    return applied(config, {"instances": {WEB: {"nics": [*given]}}}).instance(WEB).nics


def test_a_nic_gets_the_parameters_of_its_network(config: Configuration) -> None:
    lan, dmz, own = config.instance(WEB).nics
    assert lan.nicparams == {"mode": "bridged", "link": "br-lan"}
    assert dmz.nicparams == {}
    assert own.nicparams == {"mode": "bridged", "link": "br-own"}


def test_a_nic_that_changes_its_network_changes_its_link(config: Configuration) -> None:
    first, second, third = nics(config, {"network": "dmz"}, {"network": "lan"}, {"network": None})
    assert first.nicparams == {}
    assert second.nicparams == {"mode": "bridged", "link": "br-lan"}
    assert third.nicparams == {"link": "br-own"}


def test_null_gives_a_nic_the_parameters_of_its_network_back(config: Configuration) -> None:
    lan = config.instance(WEB).nics[0].nicparams
    assert nics(config, {}, {}, {"nicparams": None})[2].nicparams == lan
    assert nics(config, {}, {"nicparams": None}, {})[1].nicparams == {}


def test_a_nic_that_stays_keeps_its_parameters(config: Configuration) -> None:
    moved = {"nodegroups": {"default": {"networks": {"lan": {"link": "br-new"}}}}}
    again = {"instances": {WEB: {"nics": [{"network": "lan"}, {}, {}]}}}
    new = applied(applied(config, moved), again)
    assert new.instance(WEB).nics == config.instance(WEB).nics


def test_a_groups_networks_are_merged_by_name(config: Configuration) -> None:
    group = {"networks": {"lan": {"vlan": ".7"}, "dmz": {"link": "br-dmz"}}}
    new = applied(config, {"nodegroups": {"default": group}})
    assert only_group(new).networks == {
        network(config, "lan").uuid: {"mode": "bridged", "link": "br-lan", "vlan": ".7"},
        network(config, "dmz").uuid: {"link": "br-dmz"},
    }


def test_null_takes_a_network_from_a_group(config: Configuration) -> None:
    group = {"networks": {"lan": None, "never.was": None}}
    new = applied(config, {"nodegroups": {"default": group}})
    assert only_group(new).networks == {}
    assert [str(change) for change in changes(config, new)] == [
        '- /nodegroups/default/networks/lan: {"mode": "bridged", "link": "br-lan"}'
    ]


def test_a_network_goes_with_its_place_in_a_group(config: Configuration) -> None:
    data: Json = {
        "networks": {"lan": None},
        "nodegroups": {"default": {"networks": {"lan": None}}},
        "instances": {WEB: None},
    }
    new = applied(config, data)
    assert only_group(new).networks == {}
    assert list(new.networks.values()) == [network(config, "dmz")]


def test_a_network_that_is_none_is_a_mistake(config: Configuration) -> None:
    data: Json = {"nodegroups": {"default": {"networks": {"lam": {}}}}}
    assert mistakes(config, data) == [
        "/nodegroups/default/networks/lam: there is no network 'lam'; did you mean lan?"
    ]
    twice: Json = {"lan": {}, network(config, "lan").uuid.upper(): {}}
    assert "is there twice" in mistakes(config, {"nodegroups": {"default": {"networks": twice}}})[0]


def test_whoever_becomes_master_is_a_candidate() -> None:
    data = declared()
    data["nodes"]["node2.example.com"]["master_candidate"] = False
    config = apply(None, data).new
    assert not config.node("node2").master_candidate
    new = applied(config, {"cluster": {"master": "node2"}})
    assert new.node("node2").master_candidate


def test_the_address_of_the_cluster_goes_with_its_master(config: Configuration) -> None:
    assert config.cluster.master_ip == "192.0.2.1"
    assert applied(config, {"cluster": {"master": "node2"}}).cluster.master_ip == "192.0.2.2"
    moved = applied(config, {"nodes": {"node1.example.com": {"primary_ip": "192.0.2.9"}}})
    assert moved.cluster.master_ip == "192.0.2.9"
    own = applied(config, {"cluster": {"master_ip": "192.0.2.254"}})
    assert applied(own, {"cluster": {"master": "node2"}}).cluster.master_ip == "192.0.2.254"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"nodes": {"node1.example.com": {"offline": True}}}, "the master is offline"),
        ({"nodes": {"node1.example.com": {"drained": True}}}, "the master is drained"),
        (
            {"nodes": {"node1.example.com": {"master_candidate": False}}},
            "/nodes/node1.example.com/master_candidate: the master is always a master candidate",
        ),
        (
            {"nodes": {"node2.example.com": {"primary_ip": "192.0.2.1"}}},
            "/nodes/node2.example.com/primary_ip: 192.0.2.1 is also /nodes/node1.example.com's",
        ),
        (
            {"cluster": {"master_ip": "192.0.2.2"}},
            "/cluster/master_ip: 192.0.2.2 is also /nodes/node2.example.com's",
        ),
    ],
)
def test_a_mistake_with_masters_and_addresses_is_told(
    config: Configuration, data: Json, expected: str
) -> None:
    assert expected in "\n".join(mistakes(config, data))


def test_a_genuine_cluster_keeps_its_own_ways() -> None:
    data = ganeti_config(nodes=3)
    data["cluster"]["master_netmask"] = 24
    new = apply(Configuration.from_json(ganeti_config(nodes=3)), data).new
    assert new == Configuration.from_json(data)
