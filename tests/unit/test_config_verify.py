"""``brine config verify``: nothing is found in a genuine file, and each fault is where it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from brine.config.model import Configuration
from brine.config.verify import find
from lab.ganeti_config import ganeti_config, instance_name, uuid_of

Json = dict[str, Any]


def instance(data: Json, number: int = 1) -> Json:
    found: Json = data["instances"][uuid_of("instance", number)]
    return found


def node(data: Json, number: int = 1) -> Json:
    found: Json = data["nodes"][uuid_of("node", number)]
    return found


def disk(data: Json, number: int = 1) -> Json:
    found: Json = data["disks"][uuid_of("disk", number)]
    return found


def test_a_genuine_file_is_clean() -> None:
    data = ganeti_config(nodes=6, instances=40)
    assert find(Configuration.from_json(data)) == []


WEB = f"/instances/{instance_name(1)}"
FAULTS: list[tuple[Callable[[Json], object], str, str]] = [
    (lambda d: d["cluster"].update(master_node="x"), "dangling", "/cluster/master_node"),
    (lambda d: d["cluster"].update(colour="x"), "unknown-key", "/cluster/colour"),
    (lambda d: d["cluster"].update(uid_pool=[[5, 9], [9, 10]]), "value", "/cluster/uid_pool"),
    (
        lambda d: d["cluster"]["hvparams"]["kvm"].update(acpy=True),
        "unknown-parameter",
        "/cluster/hvparams/kvm/acpy",
    ),
    (lambda d: d.update(colour=1), "unknown-key", "/colour"),
    (lambda d: node(d).update(group="x"), "dangling", "/nodes/node1.example.com/group"),
    (lambda d: node(d).update(primary_ip="x"), "ip", "/nodes/node1.example.com/primary_ip"),
    (lambda d: instance(d).update(primary_node="x"), "dangling", f"{WEB}/primary_node"),
    (lambda d: instance(d).update(hypervisor="vmx"), "value", f"{WEB}/hypervisor"),
    (lambda d: instance(d).update(admin_state="on"), "value", f"{WEB}/admin_state"),
    (lambda d: instance(d)["nics"][0].update(mac="x"), "mac", f"{WEB}/nics/0/mac"),
    (lambda d: instance(d)["nics"][0].update(ip="10.0.0.0/8"), "ip", f"{WEB}/nics/0/ip"),
    (lambda d: instance(d)["nics"][0].update(network="x"), "dangling", f"{WEB}/nics/0/network"),
    (
        lambda d: instance(d)["nics"][0].update(ip=None, nicparams={"mode": "routed"}),
        "nic",
        f"{WEB}/nics/0",
    ),
    (lambda d: instance(d)["nics"][0].update(nicparams={"link": ""}), "nic", f"{WEB}/nics/0"),
    (lambda d: instance(d)["beparams"].update(minmem=999), "value", f"{WEB}/beparams"),
    (
        lambda d: disk(d).update(params={"stripe": 2}),
        "unknown-parameter",
        f"/disks/{uuid_of('disk', 1)}/params/stripe",
    ),
    (
        lambda d: disk(d).update(params={"stripes": "2"}),
        "parameter",
        f"/disks/{uuid_of('disk', 1)}/params/stripes",
    ),
    (
        lambda d: disk(d).update(children=[{"dev_type": "plain", "params": {"protocol": "C"}}]),
        "unknown-parameter",
        f"/disks/{uuid_of('disk', 1)}/children/0/params/protocol",
    ),
    (lambda d: disk(d).update(mode="w"), "value", f"/disks/{uuid_of('disk', 1)}/mode"),
    (lambda d: disk(d).update(nodes=["x"]), "dangling", f"/disks/{uuid_of('disk', 1)}/nodes/0"),
    (lambda d: instance(d).update(disks=[]), "orphan", f"/disks/{uuid_of('disk', 1)}"),
    (
        lambda d: instance(d, 2)["nics"][0].update(mac=instance(d)["nics"][0]["mac"].upper()),
        "duplicate-mac",
        "/instances/instance2.example.com/nics/0/mac",
    ),
    (
        lambda d: instance(d, 2)["nics"][0].update(ip=instance(d)["nics"][0]["ip"]),
        "duplicate-ip",
        "/instances/instance2.example.com/nics/0/ip",
    ),
    (
        lambda d: instance(d, 2).update(name=instance_name(1)),
        "duplicate-name",
        f"/instances/{uuid_of('instance', 2)}/name",
    ),
    (
        lambda d: d["nodes"].update(x=d["nodes"].pop(uuid_of("node", 2))),
        "key-mismatch",
        "/nodes/node2.example.com",
    ),
    (
        lambda d: instance(d)["nics"][0].update(uuid=uuid_of("node", 1)),
        "duplicate-uuid",
        f"{WEB}/nics/0",
    ),
    (
        lambda d: instance(d, 2).update(name=instance_name(1).upper()),
        "duplicate-name",
        f"/instances/{uuid_of('instance', 2)}/name",
    ),
    (
        lambda d: node(d, 2).update(secondary_ip=node(d, 3)["primary_ip"]),
        "duplicate-ip",
        "/nodes/node3.example.com/primary_ip",
    ),
    (
        lambda d: d["cluster"].update(master_ip=node(d, 3)["primary_ip"]),
        "duplicate-ip",
        "/cluster/master_ip",
    ),
    (lambda d: node(d).update(offline=True), "master", "/cluster/master_node"),
    (lambda d: node(d).update(drained=True), "master", "/cluster/master_node"),
    (lambda d: node(d).update(master_candidate=False), "master", "/cluster/master_node"),
    (
        lambda d: d["cluster"]["ndparams"].update(cpu_speed=math.inf),
        "parameter",
        "/cluster/ndparams/cpu_speed",
    ),
]


@pytest.mark.parametrize(("damage", "kind", "where"), FAULTS, ids=[f[2] for f in FAULTS])
def test_a_fault_is_found(damage: Callable[[Json], object], kind: str, where: str) -> None:
    data = ganeti_config(nodes=3, instances=4)
    damage(data)
    config = Configuration.from_json(data)
    found = [(fault.kind, fault.where) for fault in find(config)]
    assert found == [(kind, where)]
    assert [fault.kind for fault in find(config, by_uuid=True)] == [kind]


def test_a_cluster_without_master_candidates_is_at_fault() -> None:
    data = ganeti_config(nodes=2)
    for each in data["nodes"].values():
        each["master_candidate"] = False
    data["cluster"]["master_node"] = ""
    assert [str(fault) for fault in find(Configuration.from_json(data))] == [
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
    assert find(Configuration.from_json(data)) == []


def test_a_secret_is_not_in_a_fault() -> None:
    data = ganeti_config(nodes=3, instances=10)
    one = disk(data, 10)
    one["logical_id"] = list(reversed(one["logical_id"]))
    secret = one["logical_id"][0]
    found = find(Configuration.from_json(data))
    assert [fault.kind for fault in found] == ["dangling", "dangling"]
    assert secret not in str(found)


def test_the_same_ip_on_another_link_is_no_fault() -> None:
    data = ganeti_config(instances=2)
    other = instance(data, 2)["nics"][0]
    other.update(ip=instance(data)["nics"][0]["ip"], nicparams={"link": "br7"})
    assert find(Configuration.from_json(data)) == []


def test_a_global_parameter_on_an_instance_is_found_in_the_file() -> None:
    data = ganeti_config(instances=1)
    instance(data)["hvparams"] = {"migration_port": 1}
    assert [fault.where for fault in find(Configuration.from_json(data))] == [
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
    assert not [one for one in find(Configuration.from_json(data)) if "/params" in one.where]
