"""What keeps an instance from moving. The processors are real answers of QEMU 7.2 and 10.0 on one
host."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from brine.common.schema import SchemaError
from brine.instance.kvm.processor import Model, Processor
from brine.instance.movable import (
    Movee,
    Obstacle,
    disks_on_network,
    obstacles,
    obstacles_at,
)
from brine.instance.node_facts import NodeFacts, UnitFacts
from brine.vm.spec import Spec, parse

ANSWERS = Path(__file__).parent / "processors"
MODEL = "Skylake-Server-v4"
DISK = {"uuid": "0c000000-0000-4000-8000-00000000000c", "path": "/srv/x.raw"}
OTHER_UUID = "0d000000-0000-4000-8000-00000000000d"
IN_UNIT = {**DISK, "unit": "/srv", "size_mib": 1000}
NIC = {"mac": "52:54:00:00:00:0a", "link": "br0"}


def web1(**keys: Any) -> Spec:
    usual = {"name": "web1", "cpu": MODEL, "machine": "pc-q35-7.2", "disks": [IN_UNIT]}
    return parse(Spec, {**usual, "nics": [NIC], **keys})


def processor(name: str) -> Processor:
    return Processor.from_json(json.loads((ANSWERS / f"{name}.json").read_text()))


def like(model: str, qemu: str = "kvm-7.2") -> Processor:
    """A processor that is exactly that model of QEMU's."""
    found = processor(qemu)
    flags = found.models[model].flags

    def missing(name: str, one: Model) -> tuple[str, ...]:
        first = found.models.get(f"{name}-v1", one)  # which an alias stands for
        return tuple(sorted(set(first.flags) - set(flags)))

    models = {name: replace(one, missing=missing(name, one)) for name, one in found.models.items()}
    return replace(found, flags=flags, models=models)


def node(name: str = "n2", **changes: Any) -> NodeFacts:
    """A node that could have :func:`web1`."""
    facts = NodeFacts(
        node=name,
        version="0.3.0",
        cpu=like(MODEL),
        memory_mib=8000,
        memory_available_mib=4000,
        links={"br0": "bridge", "ovs0": "openvswitch"},
        units={"/srv": UnitFacts(free_mib=1000)},
    )
    return replace(facts, **changes)


def ids(found: list[Obstacle]) -> list[tuple[str, bool]]:
    return [(one.id.value, one.cold) for one in found]


def test_an_instance_without_ties_moves() -> None:
    assert obstacles(Movee(web1())) == []
    assert obstacles_at(Movee(web1()), node("n1"), node()) == []


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"cpu": ""}, [("cpu", False)]),
        ({"cpu": "host,-svm"}, [("cpu", False)]),
        ({"cpu": "max"}, [("cpu", False)]),
        ({"cpu": "", "accel": "tcg"}, [("cpu", False)]),
        ({"extra_arguments": ["-device", "edu"]}, [("extra_arguments", False)]),
        ({"extra_arguments": ["-device", "vfio-pci,host=01:00.0"]}, [("host_device", True)]),
        ({"extra_arguments": ["-device", "usb-host,hostbus=1"]}, [("host_device", True)]),
        ({"owner": {}}, [("owner", True)]),
        ({"disks": [DISK]}, [("disk", True)]),
        ({"hypervisor": "xen-pvh"}, [("xen", False)]),
        (
            {"hypervisor": "xen-pvh", "extra_arguments": ["pci = ['01:00.0']"]},
            [("xen", False), ("host_device", True)],
        ),
    ],
)
def test_what_ties_an_instance_to_its_node(
    keys: dict[str, Any], found: list[tuple[str, bool]]
) -> None:
    assert ids(obstacles(Movee(web1(**keys)))) == found


@pytest.mark.parametrize(("unit", "cold"), [("/srv", False), ("vg1", True)])
def test_snapshots_do_not_move_live_nor_those_of_lvm_at_all(unit: str, cold: bool) -> None:
    root = {**IN_UNIT, "name": "root", "unit": unit}
    data = {"uuid": OTHER_UUID, "path": "/srv/y.raw", "unit": unit, "name": "data"}
    movee = Movee(web1(disks=[root, data]), snapshots={"root": ["before", "after"], "data": []})
    (one,) = obstacles(movee)
    assert (one.id, one.cold) == ("snapshots", cold)
    assert "disk root" in one.why
    assert "before, after" in one.why


def test_devices_that_the_runtime_file_does_not_have_as_qemu_does() -> None:
    """QEMU does not notice that the other side has another device: the guest would."""
    there, missing, extra = "disk-0c000000-pci-20", "nic-1-pci-13", "nic-1-pci-14"
    assert obstacles(Movee(web1(), recorded=[there, extra], present=[extra, there])) == []
    found = obstacles(Movee(web1(), recorded=[there, missing], present=[there, extra]))
    assert ids(found) == [("slots", False)] * 2
    assert extra in found[0].why
    assert missing in found[1].why
    assert ids(obstacles(Movee(web1(), file_fault="is damaged"))) == [("runtime_file", False)]


@pytest.mark.parametrize(
    ("path", "is_shared"),
    [
        ("/srv/nfs/x.raw", True),
        ("/srv/nfs/local/x.raw", False),
        ("/srv/with space/x.raw", True),
        ("/srv/nfs", False),
        ("/srv/x.raw", False),
    ],
)
def test_a_disk_that_other_nodes_have_is_not_copied(path: str, is_shared: bool) -> None:
    mounts = (
        "25 1 0:25 / / rw - ext4 /dev/vda1 rw\n"
        "30 25 0:30 / /srv/nfs rw,relatime shared:5 - nfs4 n0:/x rw\n"
        "31 30 0:31 / /srv/nfs/local rw - ext4 /dev/vdb rw\n"
        "32 25 0:32 / /srv/with\\040space rw - fuse.glusterfs n0:/x rw\n"
    )
    spec = web1(disks=[{**DISK, "path": path}])
    shared = disks_on_network(spec.disks, mounts)
    assert (shared == {DISK["uuid"]}) is is_shared
    assert ids(obstacles(Movee(spec, on_network=shared))) == [("disk", True)] * (not is_shared)


@pytest.mark.parametrize(
    ("keys", "changes", "found"),
    [
        ({"machine": "pc-q35-10.0"}, {}, ("machine", True)),
        ({}, {"links": {}}, ("link", True)),
        ({}, {"links": {"br0": "openvswitch"}}, ("link", True)),
        ({}, {"memory_available_mib": 1024}, ("memory", True)),
        ({"huge_pages": "/dev/hugepages"}, {"huge_pages_free_mib": 1023}, ("memory", True)),
        ({}, {"units": {}}, ("unit", True)),
        ({}, {"units": {"/srv": UnitFacts(free_mib=999)}}, ("space", True)),
        (
            {},
            {"units": {"/srv": UnitFacts(free_mib=9999, allocatable=False, why="is full")}},
            ("unit", True),
        ),
        ({}, {"unfit": ("/x: there is no such image",)}, ("unfit", True)),
        ({}, {"cpu": None, "cpu_fault": "no such program"}, ("qemu", True)),
        ({"qemu": "/opt/qemu"}, {}, ("qemu", True)),
        ({"accel": "kvm"}, {"cpu": replace(like(MODEL), accel="tcg")}, ("accel", True)),
        ({"cpu": "Icelake-Server-v7"}, {}, ("cpu", True)),
    ],
)
def test_what_the_other_node_lacks(
    keys: dict[str, Any], changes: dict[str, Any], found: tuple[str, bool]
) -> None:
    (one,) = obstacles_at(Movee(web1(**keys)), node("n1"), node(**changes))
    assert (one.id, one.cold) == found
    assert one.why.isprintable()
    assert "n2" in one.why


def test_a_domain_needs_a_node_with_xen_and_no_qemu() -> None:
    movee = Movee(web1(hypervisor="xen-pvh"))
    faults: dict[str, Any] = {"cpu": None, "cpu_fault": "no such program"}
    assert ids(obstacles_at(movee, node("n1"), node(**faults))) == [("xen", False)]
    found = obstacles_at(movee, node("n1"), node(**faults, unfit=("Xen does not run",)))
    assert ids(found) == [("xen", False), ("unfit", True)]
    assert found[1].why == "on n2: Xen does not run"


def test_snapshots_that_move_along_need_space() -> None:
    movee = Movee(web1(), overlays_mib={DISK["uuid"]: 24})
    there = node(units={"/srv": UnitFacts(free_mib=1023)})
    (one,) = obstacles_at(movee, node("n1"), there)
    assert one.id == "space"
    assert "1024 are needed" in one.why
    enough = node(units={"/srv": UnitFacts(free_mib=1024)})
    assert obstacles_at(movee, node("n1"), enough) == []


def test_other_modes_need_other_links() -> None:
    ovs = {**NIC, "mode": "openvswitch", "link": "ovs0"}
    routed = {**NIC, "mode": "routed", "link": "", "ips": ["192.0.2.7"]}
    assert obstacles_at(Movee(web1(nics=[ovs, routed])), node("n1"), node()) == []


@pytest.mark.parametrize("accel", ["kvm", "tcg"])
def test_the_whole_processor_is_another_one_under_another_qemu(accel: str) -> None:
    """One and the same host: QEMU 10.0 tells the guest of flags that 7.2 does not know."""
    old, new = processor(f"{accel}-7.2"), processor(f"{accel}-10.0")
    movee = Movee(web1(cpu="", accel=accel))
    there, back = (
        obstacles_at(movee, node("n1", cpu=one), node(cpu=other))
        for one, other in ((old, new), (new, old))
    )
    unlike = {*old.flags} ^ {*new.flags}
    for (one,) in (there, back):
        assert (one.id, one.cold) == ("cpu", False)
        assert {*one.flags} == unlike
        assert all(flag in one.why for flag in unlike)
    assert obstacles_at(movee, node("n1", cpu=old), node(cpu=old)) == []


def test_a_flag_that_is_switched_off_makes_no_difference() -> None:
    old, new = like("Skylake-Server-v4"), like("Skylake-Server-v5")
    (one,) = obstacles_at(Movee(web1(cpu="host")), node("n1", cpu=old), node(cpu=new))
    assert one.flags == ("xsaves",)
    assert "has also xsaves" in one.why
    for off in ("host,-xsaves", "host,xsaves=off"):
        assert obstacles_at(Movee(web1(cpu=off)), node("n1", cpu=old), node(cpu=new)) == []


def test_one_model_number_apart_is_another_processor() -> None:
    here, there = like(MODEL), replace(like(MODEL), model=85, stepping=9)
    (one,) = obstacles_at(Movee(web1(cpu="host")), node("n1", cpu=here), node(cpu=there))
    assert "model 85, stepping 9" in one.why
    assert obstacles_at(Movee(web1()), node("n1", cpu=here), node(cpu=there)) == []


@pytest.mark.parametrize(
    ("cpu", "flags"),
    [
        ("Icelake-Server-v5", {"avx512vnni", "vaes"}),
        ("Icelake-Server", {"avx512vnni", "vaes"}),
        (f"{MODEL},+avx512vnni,+kvm_pv_eoi,hv-relaxed=on,enforce", {"avx512vnni"}),
        (f"{MODEL},+pku,-vaes", set()),
    ],
)
def test_a_model_loses_the_flags_that_the_other_node_lacks(cpu: str, flags: set[str]) -> None:
    here, there = node("n1", cpu=like("Icelake-Server-v5")), node(cpu=like(MODEL))
    found = obstacles_at(Movee(web1(cpu=cpu)), here, there)
    assert ids(found) == [("cpu", False)] * bool(flags)
    assert flags <= {flag for one in found for flag in one.flags}
    # What it lacks on both nodes, it never had.
    assert obstacles_at(Movee(web1(cpu=cpu)), there, there) == []


def test_facts_of_another_version_are_read() -> None:
    facts = node(cpu=processor("kvm-10.0"))
    data = json.loads(json.dumps(facts.to_json()))
    assert NodeFacts.from_json(data) == facts
    data["newer"] = data["cpu"]["newer"] = data["units"]["/srv"]["newer"] = 1
    data["cpu"]["models"][MODEL]["newer"] = 1
    assert NodeFacts.from_json(data) == facts


@pytest.mark.parametrize("data", [[], {}, {"node": 1}, {"cpu": {}}, {"units": {"/srv": 1}}])
def test_what_are_no_facts_is_refused(data: Any) -> None:
    whole = json.loads(json.dumps(node().to_json()))
    with pytest.raises(SchemaError):
        NodeFacts.from_json({**whole, **data} if data else data)
