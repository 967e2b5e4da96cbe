"""The slots of an instance's devices at its start."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brine.instance.kvm.layout import Layout, layout_of, on_pci, with_slots
from brine.vm.address import DeviceKind
from brine.vm.slots import NoSlotError, Slot
from brine.vm.spec import Spec, parse


def some_uuid(number: int) -> str:
    return str(uuid.UUID(int=number << 96 | 4))  # whose first eight digits are the number


def instance(*interfaces: str, nics: int = 0, cdroms: int = 0, **keys: Any) -> Spec:
    """An instance with disks of these interfaces; disk 1 has UUID 1, NIC 1 has UUID 1001."""
    disks = [
        {"path": f"/disk{number}", "interface": interface, "uuid": some_uuid(number)}
        for number, interface in enumerate(interfaces, 1)
    ]
    given = {
        "disks": disks,
        "nics": [{"uuid": some_uuid(1000 + number)} for number in range(1, nics + 1)],
        "cdroms": [f"/cd{number}" for number in range(cdroms)],
    }
    return parse(Spec, {"name": "web1", **given, **keys})


def ids(devices: dict[str, Slot], kind: DeviceKind = DeviceKind.DISK) -> list[str]:
    return [slot.device_id(kind, known) for known, slot in devices.items()]


def told(layout: Layout) -> str:
    """All devices, each with its place."""
    ide = [f"{device}@{at['bus']}.{at['unit']}" for device, at in layout.ide.items()]
    ports = [f"{port}@{slot}" for port, slot in layout.ports.items()]
    return " ".join([*ids(layout.disks), *ids(layout.nics, DeviceKind.NIC), *ide, *ports])


@pytest.mark.parametrize(
    ("spec", "places"),
    [
        (
            instance("virtio", "virtio", nics=1),
            "disk-00000001-pci-12 disk-00000002-pci-13 nic-000003e9-pci-14",
        ),
        (
            instance("scsi", "virtio", "scsi"),
            "disk-00000001-scsi-0 disk-00000002-pci-12 disk-00000003-scsi-1",
        ),
        (
            instance("ide", "virtio", "ide", cdroms=2),
            "disk-00000002-pci-12 ide0@ide.0.0 ide2@ide.0.1 cdrom0@ide.1.0 cdrom1@ide.1.1",
        ),
        (
            instance("ide", machine="q35", hotplug_ports=0, cdroms=3),
            "ide0@ide.0.0 cdrom0@ide.1.0 cdrom1@ide.2.0 cdrom2@ide.3.0",
        ),
        (
            instance("virtio", "scsi", nics=1, machine="pc-q35-7.2", hotplug_ports=1),
            "disk-00000001-pci-6 disk-00000002-scsi-0 nic-000003e9-pci-7 port0@6 port1@7 port2@8",
        ),
    ],
)
def test_each_bus_is_filled_in_the_order_of_the_spec(spec: Spec, places: str) -> None:
    assert told(layout_of(spec)) == places


def test_a_place_is_what_qemu_is_told() -> None:
    pc = layout_of(instance("virtio", "scsi"))
    express = layout_of(instance("virtio", machine="q35"))
    assert [slot.placement for slot in (*pc.disks.values(), *express.disks.values())] == [
        {"bus": "pci.0", "addr": "0xc"},
        {"bus": "scsi0.0", "channel": 0, "scsi-id": 0, "lun": 0},
        {"bus": "port0", "addr": "0x0"},
    ]


def test_what_was_plugged_in_leaves_less_room_for_more() -> None:
    layout = layout_of(instance(nics=20, machine="q35", hotplug_ports=8))
    assert list(layout.ports.values()) == list(range(6, 30))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (instance(*["virtio"] * 10, nics=11), "20 disks and NICs have slots 12 to 31 of pci.0"),
        (instance(*["ide"] * 3, cdroms=2), "4 disks and CD-ROMs have the interface ide"),
        (instance(cdroms=7, machine="q35"), "6 disks and CD-ROMs have the interface ide"),
        (
            instance(*["virtio"] * 5, nics=20, machine="q35", hotplug_ports=0),
            "25 disks and NICs want ports, and a q35 machine has 24",
        ),
    ],
)
def test_what_finds_no_place_says_how_many_there_are(spec: Spec, said: str) -> None:
    with pytest.raises(NoSlotError, match=said) as told:
        layout_of(spec)
    assert told.value.hint


@pytest.mark.parametrize(
    "spec",
    [
        instance(*["virtio"] * 10, *["scsi"] * 40, *["ide"] * 2, nics=10, cdroms=2),
        instance(*["virtio"] * 4, *["ide"] * 2, nics=20, cdroms=4, machine="q35"),
    ],
)
def test_as_many_as_there_are_find_one(spec: Spec) -> None:
    layout = layout_of(spec)
    assert len(layout.disks) + len(layout.ide) == len(spec.disks) + len(spec.cdroms)
    assert len(layout.nics) == len(spec.nics)


uuids = st.lists(st.uuids().map(str), max_size=40, unique_by=lambda text: text[:8])


@st.composite
def instances(draw: st.DrawFn) -> Spec:
    """Any instance whose devices are told from each other, with room for all or not."""
    disks = [
        {"path": f"/{one}", "uuid": one, "interface": draw(st.sampled_from(["virtio", "scsi"]))}
        for one in draw(uuids)
    ]
    ide = [{"path": f"/{one}", "uuid": one, "interface": "ide"} for one in draw(uuids)[:3]]
    data = {
        "name": "web1",
        "machine": draw(st.sampled_from(["pc", "q35"])),
        "hotplug_ports": draw(st.integers(0, 24)),
        "disks": draw(st.permutations(disks + ide)),
        "nics": [{"uuid": one} for one in draw(uuids)],
        "cdroms": ["/cd"] * draw(st.integers(0, 2)),
    }
    return parse(Spec, data)


def places(layout: Layout) -> list[tuple[Any, ...]]:
    """All places on the machine's own buses and behind its ports, each as often as it is taken."""
    placed = [*layout.disks.values(), *layout.nics.values()]
    found = [tuple(sorted(one.placement.items())) for one in placed]
    found += [tuple(sorted(place.items())) for place in layout.ide.values()]
    return found + [("pcie.0", slot) for slot in layout.ports.values()]


@given(spec=instances())
def test_all_have_a_place_of_their_own_in_their_order(spec: Spec) -> None:
    try:
        layout = layout_of(spec)
    except NoSlotError:
        assert len(on_pci(spec)) > 20 or len(spec.cdroms) + 3 > 4
        return
    found = places(layout)
    assert len(found) == len(set(found))
    assert all(6 <= taken <= 29 for taken in layout.ports.values())
    assert list(layout.nics) == [nic.uuid for nic in spec.nics]
    assert list(layout.disks) == [one.uuid for one in spec.disks if one.interface != "ide"]
    numbers = [slot.number for slot in layout.nics.values()]
    assert numbers == sorted(numbers)


@pytest.mark.parametrize("machine", ["pc", "q35"])
def test_what_is_plugged_later_moves_nothing(machine: str) -> None:
    before = instance("virtio", "scsi", nics=1, machine=machine)
    started = with_slots(before, layout_of(before))
    more = instance("virtio", "scsi", "virtio", "scsi", nics=2, machine=machine)
    plugged = replace(
        more,
        disks=(*started.disks, *more.disks[2:]),
        nics=(started.nics[0], more.nics[1]),
    )
    first, then = layout_of(started), layout_of(plugged)
    for uuid_, place in {**first.disks, **first.nics}.items():
        assert {**then.disks, **then.nics}[uuid_] == place
    places = [*then.disks.values(), *then.nics.values()]
    assert len({(one.bus, one.number) for one in places}) == len(places)
    assert layout_of(with_slots(plugged, then)) == then


def test_a_port_that_a_device_was_plugged_into_is_there_again() -> None:
    spec = instance("virtio", machine="q35", hotplug_ports=0)
    moved = replace(spec, disks=(replace(spec.disks[0], slot=20),))
    assert layout_of(moved).disks[some_uuid(1)].number == 20


def test_a_slot_that_is_no_more_to_be_had_is_another() -> None:
    spec = instance("virtio", "virtio")
    twice = replace(spec, disks=tuple(replace(disk, slot=13) for disk in spec.disks))
    assert [one.number for one in layout_of(twice).disks.values()] == [13, 12]
    low = replace(spec, disks=tuple(replace(disk, slot=3) for disk in spec.disks))
    assert [one.number for one in layout_of(low).disks.values()] == [12, 13]
