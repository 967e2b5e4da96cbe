"""``brine config verify``: nothing is found in a genuine file, and each fault is where it is."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from brine.config.model import Configuration
from brine.config.verify import find_mistakes
from lab.ganeti_config import ganeti_config, instance_name, uuid_of

Json = dict[str, Any]


def instance(data: Json, number: int = 1) -> Json:
    found: Json = data["instances"][uuid_of("instance", number)]
    return found


def disk(data: Json, number: int = 1) -> Json:
    found: Json = data["disks"][uuid_of("disk", number)]
    return found


def test_a_genuine_file_is_clean() -> None:
    data = ganeti_config(nodes=6, instances=40)
    found = find_mistakes(Configuration.from_json(data))
    # Brine itself does not set up DRBD's disks.
    assert {(fault.kind, fault.text.partition(" is of ")[2]) for fault in found} == {
        ("unsupported", "the kind drbd, which is not set up here")
    }


WEB = f"/instances/{instance_name(1)}"
NIC = "/instances/instance1/nics/0"
FAULTS: list[tuple[str, Any, str, str | None]] = [
    ("/cluster/master_node", "x", "dangling", None),
    ("/cluster/colour", "x", "unknown-key", None),
    ("/cluster/uid_pool", [[5, 9], [9, 10]], "value", None),
    ("/cluster/hvparams/kvm/acpy", True, "unknown-parameter", None),
    ("/cluster/ndparams/cpu_speed", math.inf, "parameter", None),
    ("/cluster/master_ip", "192.0.2.3", "duplicate-ip", None),
    ("/colour", 1, "unknown-key", None),
    ("/nodes/node1/group", "x", "dangling", None),
    ("/nodes/node1/primary_ip", "x", "ip", None),
    ("/nodes/node2/secondary_ip", "192.0.2.3", "duplicate-ip", "/nodes/node3/primary_ip"),
    ("/nodes/node1/offline", True, "master", "/cluster/master_node"),
    ("/nodes/node1/drained", True, "master", "/cluster/master_node"),
    ("/nodes/node1/master_candidate", False, "master", "/cluster/master_node"),
    ("/instances/instance1/primary_node", "x", "dangling", None),
    ("/instances/instance1/hypervisor", "vmx", "value", None),
    ("/instances/instance1/admin_state", "on", "value", None),
    ("/instances/instance1/beparams/minmem", 999, "value", "/instances/instance1/beparams"),
    ("/instances/instance1/name", "x" * 64, "name", "/instances/" + "x" * 64 + "/name"),
    (
        "/instances/instance1/secondary_nodes",
        [uuid_of("node", 1)],
        "duplicate-node",
        "/instances/instance1/secondary_nodes/0",
    ),
    ("/instances/instance1/disks", [], "orphan", "/disks/disk1"),
    (f"{NIC}/mac", "x", "mac", None),
    (f"{NIC}/ip", "10.0.0.0/8", "ip", None),
    (f"{NIC}/network", "x", "dangling", None),
    (f"{NIC}/nicparams", {"link": ""}, "nic", NIC),
    ("/instances/instance1/nics", [{"nicparams": {"mode": "routed"}}], "nic", NIC),
    (f"{NIC}/uuid", uuid_of("node", 1), "duplicate-uuid", NIC),
    ("/instances/instance2/nics/0/mac", "AA:00:00:00:00:02", "duplicate-mac", None),
    ("/instances/instance2/nics/0/ip", "10.0.0.1", "duplicate-ip", None),
    ("/instances/instance2/name", instance_name(1), "duplicate-name", "/instances/UUID2/name"),
    (
        "/instances/instance2/name",
        "INSTANCE1.example.com",
        "duplicate-name",
        "/instances/UUID2/name",
    ),
    ("/disks/disk1/params", {"stripe": 2}, "unknown-parameter", "/disks/disk1/params/stripe"),
    ("/disks/disk1/params", {"stripes": "2"}, "parameter", "/disks/disk1/params/stripes"),
    (
        "/disks/disk1/children",
        [{"dev_type": "plain", "params": {"protocol": "C"}}],
        "unknown-parameter",
        "/disks/disk1/children/0/params/protocol",
    ),
    ("/disks/disk1/mode", "w", "value", None),
    ("/disks/disk1/nodes", ["x"], "dangling", "/disks/disk1/nodes/0"),
]
"""The place of a value that is changed, the value, and the fault that is found, and where."""


def put(data: Json, place: str, value: Any) -> None:
    """Change a value of a configuration's JSON, whose objects are named as ``node1`` and so on."""
    *parts, last = place.split("/")[1:]
    inner: Any = data
    for part in parts:
        kind, number = part.rstrip("0123456789"), part.lstrip("abcdefghijklmnopqrstuvwxyz")
        named = kind in ("node", "instance", "disk") and number
        inner = inner[
            int(part) if part.isdigit() else uuid_of(kind, int(number)) if named else part
        ]
    inner[last] = value


@pytest.mark.parametrize(("place", "value", "kind", "where"), FAULTS, ids=[f[0] for f in FAULTS])
def test_a_fault_is_found(place: str, value: Any, kind: str, where: str | None) -> None:
    data = ganeti_config(nodes=3, instances=4)
    put(data, place, value)
    config = Configuration.from_json(data)
    expected = re.sub(r"\b(node|instance)(\d)", r"\1\2.example.com", where or place)
    expected = expected.replace("UUID2", uuid_of("instance", 2))
    expected = expected.replace("disk1", uuid_of("disk", 1))
    assert [(fault.kind, fault.where) for fault in find_mistakes(config)] == [(kind, expected)]
    assert [fault.kind for fault in find_mistakes(config, by_uuid=True)] == [kind]


def test_a_key_that_is_not_the_uuid_is_found() -> None:
    data = ganeti_config(nodes=3)
    data["nodes"]["x"] = data["nodes"].pop(uuid_of("node", 2))
    found = [(fault.kind, fault.where) for fault in find_mistakes(Configuration.from_json(data))]
    assert found == [("key-mismatch", "/nodes/node2.example.com")]


def test_a_cluster_without_master_candidates_is_at_fault() -> None:
    data = ganeti_config(nodes=2)
    for each in data["nodes"].values():
        each["master_candidate"] = False
    data["cluster"]["master_node"] = ""
    assert [str(fault) for fault in find_mistakes(Configuration.from_json(data))] == [
        "/cluster/master_node: no node is a master candidate"
    ]


def test_what_upgraded_and_newer_ganetis_have_is_no_fault() -> None:
    data = ganeti_config(nodes=2)
    data["cluster"]["hvparams"]["kvm"]["debug_threads"] = True  # 3.1
    data["cluster"]["hvparams"]["lxc"] = {"lxc_tty": 6, "lxc_startup_wait": 30}  # before 2.16
    network = uuid_of("network", 1)
    data["networks"] = {network: {"uuid": network, "name": "a network, 3rd floor / left"}}
    nic = instance(data)["nics"][0]
    nic.update(ip=None, network=network, nicparams={"mode": "routed"})
    found = find_mistakes(Configuration.from_json(data))
    assert [fault.kind for fault in found] == ["unsupported"]  # its node needs to know an address


def test_a_secret_is_not_in_a_fault() -> None:
    data = ganeti_config(nodes=3, instances=10)
    one = disk(data, 10)
    one["logical_id"] = list(reversed(one["logical_id"]))
    secret = one["logical_id"][0]
    found = find_mistakes(Configuration.from_json(data))
    assert [fault.kind for fault in found] == ["unsupported", "dangling", "dangling"]
    assert secret not in str(found)


def test_the_same_ip_on_another_link_is_no_fault() -> None:
    data = ganeti_config(instances=2)
    other = instance(data, 2)["nics"][0]
    other.update(ip=instance(data)["nics"][0]["ip"], nicparams={"link": "br7"})
    assert find_mistakes(Configuration.from_json(data)) == []


def test_a_global_parameter_on_an_instance_is_found_in_the_file() -> None:
    data = ganeti_config(instances=1)
    instance(data)["hvparams"] = {"migration_port": 1}
    assert [fault.where for fault in find_mistakes(Configuration.from_json(data))] == [
        f"{WEB}/hvparams/migration_port"
    ]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("plain", {"stripes": 2}),
        ("drbd", {"resync-rate": 1024, "default-metavg": "vg", "protocol": "A"}),
        ("drbd8", {"c-max-rate": 100}),
        ("ext", {"access": "userspace", "what-the-provider-wants": "x"}),
        ("rbd", {"pool": "vms"}),
    ],
)
def test_a_disks_own_parameters_are_no_fault(kind: str, values: Json) -> None:
    data = ganeti_config()
    disk(data).update(dev_type=kind, params=values)
    assert not [
        one for one in find_mistakes(Configuration.from_json(data)) if "/params" in one.where
    ]
