"""Configurations from JSON and back: what is kept, upgraded, found and refused."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brine.config.apply import apply
from brine.config.model import Configuration
from brine.config.schema import ConfigError, parse_json, same
from lab.ganeti_config import ganeti_config, instance_name, node_name, uuid_of

Json = dict[str, Any]

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


def parse(data: Json) -> Configuration:
    return Configuration.parse(json.dumps(data).encode())


def first(data: Json, section: str) -> Json:
    """The first object of a section."""
    found: Json = next(iter(data[section].values()))
    return found


def test_what_was_read_is_what_is_written() -> None:
    data = ganeti_config(nodes=5, instances=20)
    again = json.loads(parse(data).format())
    assert again == data
    assert list(again) == list(data)
    assert list(first(again, "instances")) == list(first(data, "instances"))


@given(key=st.text(min_size=1, max_size=12).map("x-".__add__), value=JSON_VALUES)
def test_unknown_keys_survive_anywhere(key: str, value: Any) -> None:
    data = ganeti_config(nodes=2, instances=10)
    instance = first(data, "instances")
    disk = data["disks"][uuid_of("disk", 10)]
    for place in (data, data["cluster"], first(data, "nodes"), instance, instance["nics"][0]):
        place[key] = value
    disk["children"][0][key] = value
    assert json.loads(parse(data).format()) == data


def test_an_object_without_uuid_gets_one_that_stays() -> None:
    data = ganeti_config(instances=1)
    instance = first(data, "instances")
    del instance["nics"][0]["uuid"], data["cluster"]["uuid"], instance["uuid"]
    one, two = parse(data), parse(data)
    assert one == two
    assert one.cluster.uuid
    assert one.instance("instance1").uuid == uuid_of("instance", 1)
    written = Configuration.parse(one.format())
    assert written.instance("instance1").nics[0].uuid == one.instance("instance1").nics[0].uuid


def test_global_hypervisor_parameters_are_dropped_from_instances_and_kept_on_the_cluster() -> None:
    data = ganeti_config(instances=1)
    first(data, "instances")["hvparams"] = {"migration_port": 1, "acpi": False}
    config = parse(data)
    assert config.instance("instance1").hvparams == {"acpi": False}
    assert config.cluster.hvparams["kvm"]["migration_port"] == 8102


def test_an_old_file_lacks_much_and_loads() -> None:
    data = ganeti_config(instances=1)
    for key in ("filters", "disks", "networks"):
        del data[key]
    node = first(data, "nodes")
    for key in ("serial_no", "ctime", "mtime", "powered", "tags"):
        del node[key]
    first(data, "instances")["disks"] = []
    config = parse(data)
    assert config.node("node1").serial_no == 1
    assert config.disks == {}
    assert "serial_no" not in first(json.loads(config.format()), "nodes")


def test_objects_are_found_by_uuid_name_and_short_name() -> None:
    data = ganeti_config(nodes=3, instances=3)
    data["instances"][uuid_of("instance", 3)]["name"] = "instance1.example.org"
    config = parse(data)
    wanted = config.instances[uuid_of("instance", 2)]
    for reference in (wanted.uuid, instance_name(2), "instance2", "instance2.example"):
        assert config.instance(reference) is wanted
    with pytest.raises(ConfigError, match="2 instances are named instance1"):
        config.instance("instance1")
    assert config.instance("instance1.example.org").uuid == uuid_of("instance", 3)
    with pytest.raises(ConfigError, match="there is no node 'nod2.example.com'") as caught:
        config.names("nodes").get("nod2.example.com")
    assert caught.value.hint == f"did you mean {node_name(2)}?"


def test_levels_of_parameters() -> None:
    data = ganeti_config(nodes=1, instances=10)
    data["cluster"]["os_hvp"] = {"noop": {"kvm": {"acpi": False, "vga": "std"}}}
    first(data, "nodegroups")["ndparams"] = {"ssh_port": 23}
    first(data, "instances")["hvparams"] = {"vga": "cirrus"}
    config = parse(data)
    instance = config.instance("instance1")
    kvm = config.hv_params(instance)
    assert (kvm["boot_order"], kvm["user_shutdown"], kvm["acpi"], kvm["vga"]) == (
        "disk",
        True,
        False,
        "cirrus",
    )
    assert config.be_params(instance) | {"maxmem": 512, "vcpus": 1} == config.be_params(instance)
    nic = {"link": "br0", "mode": "bridged", "vlan": "", "filter": False}
    assert config.nic_params(instance.nics[0]) == nic
    assert config.nd_params(config.node("node1"))["ssh_port"] == 23


@pytest.mark.parametrize(
    ("pointer", "value", "message"),
    [
        ("/cluster/cluster_name", 5, "/cluster/cluster_name: must be a string, but is 5"),
        ("/cluster/serial_no", True, "/cluster/serial_no: must be a whole number, but is true"),
        ("/cluster/beparams", {"default": []}, "/cluster/beparams/default: must be an object"),
        ("/cluster/uid_pool", [[1, "2"]], "/cluster/uid_pool/0/1: must be a whole number"),
        ("/nodes", [], "/nodes: must be an object, but is"),
        ("/serial_no", "1", "/serial_no: must be a whole number"),
    ],
)
def test_a_wrong_type_is_told_with_its_place(pointer: str, value: Any, message: str) -> None:
    data = copy.deepcopy(ganeti_config(nodes=1, instances=0))
    parts = pointer.split("/")[1:]
    place = data
    for part in parts[:-1]:
        place = place[part]
    place[parts[-1]] = value
    with pytest.raises(ConfigError) as caught:
        parse(data)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not valid JSON at byte 0"),
        (b'{"cluster": {', "not valid JSON at byte 13"),
        (b'{"cluster": "\xff"}', "not valid UTF-8 at byte 13"),
        (b'{"x": NaN}', "NaN is no JSON number"),
        (b"[]", "this is no configuration"),
        (b'{"cluster": {}}', "/cluster: has no cluster_name"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"x": ' + b"9" * 5000 + b"}", "not usable JSON"),
        (b'{"x": 1e400}', "the number '1e400' is too large"),
        (b'{"x": -Infinity}', "-Infinity is no JSON number"),
        (b'{"x": "\\ud800"}', "half of a surrogate pair"),
        (b'{"\\uDFFF": 1}', "half of a surrogate pair"),
    ],
    ids=range(12),
)
def test_what_is_no_configuration_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Configuration.parse(data)


@pytest.mark.parametrize(
    ("data", "hint"),
    [
        (b'{"a": 1, # mine\n"b": 2}', "no comments"),
        (b"// mine\n{}", "no comments"),
        (b'{"a": 1 /* mine */}', "no comments"),
        (b'{"a": 1,}', "no comma after the last"),
        (b"[1, 2,\n]", "no comma after the last"),
        (b"{'a': 1}", "double quotes"),
        (b"", "is empty"),
    ],
)
def test_what_is_usual_elsewhere_is_named(data: bytes, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Configuration.parse(data)
    assert hint in (caught.value.hint or "")


@given(st.binary(max_size=200) | JSON_VALUES.map(lambda value: json.dumps(value).encode()))
def test_no_bytes_do_worse_than_an_error(data: bytes) -> None:
    with pytest.raises(ConfigError):
        Configuration.parse(data)


def test_a_whole_surrogate_pair_is_a_character() -> None:
    assert parse_json(b'["\\ud83d\\ude00", "\\\\ud800"]') == ["\U0001f600", "\\ud800"]


def test_disks_in_disks_without_end_are_refused() -> None:
    data = ganeti_config(instances=1)
    disk = first(data, "disks")
    for _ in range(300):
        disk["children"] = [{"dev_type": "plain"}]
        (disk,) = disk["children"]
    with pytest.raises(ConfigError, match="nested too deep"):
        parse(data)


def test_what_is_nested_without_end_is_an_error() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = {"x": deep}
    with pytest.raises(ConfigError, match="nested too deep"):
        apply(parse(ganeti_config()), {"cluster": {"ipolicy": deep}})


def test_what_is_written_is_never_infinite() -> None:
    config = replace(parse(ganeti_config()), extra={"x": math.inf})
    with pytest.raises(ValueError, match="not JSON compliant"):
        config.format()


@pytest.mark.parametrize(
    ("one", "other"), [(1, True), (0, False), (1, 1.0), ([1], [True]), ({"a": 0}, {"a": False})]
)
def test_what_python_calls_equal_is_not_the_same(one: Any, other: Any) -> None:
    assert one == other
    assert not same(one, other)
    assert same(one, copy.deepcopy(one))


def test_a_wrong_type_does_not_give_a_secret_away() -> None:
    damages: list[Callable[[Json], object]] = [
        lambda d: first(d, "instances").update(osparams_private="hunter2"),
        lambda d: d["cluster"].update(osparams_private_cluster={"debian": "hunter2"}),
        lambda d: first(d, "disks").update(logical_id="hunter2"),
        lambda d: first(d, "disks").update(children={"logical_id": [1, "hunter2"]}),
        lambda d: d.update(instances=[{"osparams_private": {"password": "hunter2"}}]),
    ]
    for damage in damages:
        data = ganeti_config(instances=1)
        damage(data)
        with pytest.raises(ConfigError, match=r"must be .*, but is a") as caught:
            parse(data)
        assert "hunter2" not in str(caught.value)
