"""What people write for ``brine config apply``, and what must not come of it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from brine.config.apply import InputError, apply
from brine.config.diff import changes
from brine.config.model import Configuration
from brine.config.schema import ConfigError, parse_json
from lab.ganeti_config import ganeti_config, instance_name, node_name, uuid_of

Json = dict[str, Any]

WEB = instance_name(1)


def genuine(**size: int) -> Configuration:
    """A configuration of a Ganeti cluster."""
    return Configuration.from_json(ganeti_config(**size))


def mistakes(current: Configuration | None, data: Json) -> list[str]:
    """What is found wrong with an input."""
    with pytest.raises(InputError) as caught:
        apply(current, data)
    return [str(mistake) for mistake in caught.value.mistakes]


def applied(current: Configuration, data: Json) -> Configuration:
    """What comes of an input, twice."""
    new = apply(current, copy.deepcopy(data)).new
    assert apply(new, copy.deepcopy(data)).new == new
    return new


def lines(old: Configuration, data: Json) -> list[str]:
    """The changes that an input makes."""
    return [str(change) for change in changes(old, applied(old, data))]


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


def test_a_short_name_of_its_own_is_a_name() -> None:
    config = genuine(instances=1)
    new: Json = {"primary_node": "node1"}
    one = "5f0b7ae0-53c2-4c0f-9f0e-5c8f3b5a4f11"
    assert applied(config, {"instances": {"instance1": {**new, "uuid": one}}}).instance(one)
    renamed = {"instances": {"instance1": {"uuid": uuid_of("instance", 1)}}}
    assert applied(config, renamed).instance(uuid_of("instance", 1)).name == "instance1"
    instead = applied(config, {"instances": {instance_name(1): None, "instance1": new}})
    assert [each.name for each in instead.instances.values()] == ["instance1"]
    lan = applied(config, {"networks": {"lan.one": {}}})
    assert len(applied(lan, {"networks": {"lan": {}}}).networks) == 2


def test_a_short_name_of_several_is_told_with_all() -> None:
    both = {"web.a.example": {"primary_node": "node1"}, "web.b.example": {"primary_node": "node1"}}
    config = applied(genuine(), {"instances": both})
    assert mistakes(config, {"instances": {"web": None}}) == [
        "/instances/web: is short for web.a.example or web.b.example: give the whole name"
    ]


def test_a_key_that_is_there_twice_is_no_input() -> None:
    with pytest.raises(ConfigError, match="the key 'web1' is twice in one object"):
        parse_json(b'{"instances": {"web1": {}, "web1": null}}', unique_keys=True)
    assert parse_json(b'{"a": {"b": 1}, "c": {"b": 1}}', unique_keys=True)["c"] == {"b": 1}


def test_null_takes_an_unknown_key_away() -> None:
    data = ganeti_config(instances=1)
    data["instances"][uuid_of("instance", 1)]["colour"] = "blue"
    assert lines(Configuration.from_json(data), {"instances": {WEB: {"colour": None}}}) == [
        f'- /instances/{WEB}/colour: "blue"'
    ]


def test_null_does_not_start_what_its_user_shut_down() -> None:
    config = genuine(instances=1)
    key = uuid_of("instance", 1)
    stopped = replace(config.instances[key], admin_state="down", admin_state_source="user")
    config = replace(config, instances={key: stopped})
    for said in ({"admin_state": None}, {"admin_state": "up", "admin_state_source": None}):
        assert applied(config, {"instances": {WEB: said}}) == config
    # Where there is no such will, null is the default.
    down = applied(genuine(instances=1), {"instances": {WEB: {"admin_state": "down"}}})
    up = applied(down, {"instances": {WEB: {"admin_state": None}}})
    assert up.instance(WEB).admin_state == "up"


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
    config = two_disks()
    data: Json = {"instances": {WEB: {"disks": [{"size": 2048}]}}}
    where = f"/instances/{WEB}/disks/0"
    assert mistakes(config, data) == [
        f"{where}: there are 2 disks: say by uuid or name which of them this is"
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


def test_true_takes_the_place_of_one() -> None:
    data = ganeti_config(instances=1)
    data["instances"][uuid_of("instance", 1)]["beparams"]["auto_balance"] = 1
    config = Configuration.from_json(data)
    change = {"instances": {WEB: {"beparams": {"auto_balance": True}}}}
    assert lines(config, change) == [f"~ /instances/{WEB}/beparams/auto_balance: 1 -> true"]


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


def test_a_list_in_a_drbd_disks_identity_is_a_mistake() -> None:
    disk: Json = {"size": 1, "dev_type": "drbd", "logical_id": [["x"], {}, 1, 0, 0, "s"]}
    found = mistakes(genuine(instances=1), {"instances": {WEB: {"disks": [disk]}}})
    assert any("/logical_id/0: must name a node" in mistake for mistake in found)


def test_what_is_nested_without_end_is_an_error() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = {"x": deep}
    with pytest.raises(ConfigError, match="nested too deep"):
        apply(genuine(), {"cluster": {"ipolicy": deep}})
