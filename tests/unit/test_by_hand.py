"""Devices that were added by hand, and the declarations that leave them where they are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from brine.instance import store
from brine.instance.kvm.live_definition import steps_of
from brine.instance.kvm.runtime_devices import devices_now, dropped, with_last_run
from brine.instance.registry import Defined, define_instance
from brine.instance.validate import completed
from brine.vm.address import DeviceKind, uuid_of_mac
from brine.vm.disk import Disk
from brine.vm.files import InstanceFiles
from brine.vm.nic import Nic
from brine.vm.runtime_file import change_file
from brine.vm.slots import pci_slot
from brine.vm.spec import Spec, SpecError, to_json
from brine.vm.vif import Vif
from lab.runtime_file import write_runtime_file

pytestmark = pytest.mark.usefixtures("own_node")

DECLARED: dict[str, Any] = {
    "name": "web1",
    "disks": [{"path": "/root.raw"}],
    "nics": [{"link": "br0"}],
}
MAC, UUID = "52:54:00:00:00:09", "0c000000-0000-4000-8000-00000000000c"
DISK = Disk(uuid=UUID, path="/hand.raw", slot=21, by_hand=True)
NIC = Nic(uuid=uuid_of_mac(MAC), mac=MAC, link="br1", slot=22, by_hand=True)
TWO_NICS = {**DECLARED, "nics": [{"link": "br0"}, {"link": "br0"}]}


def declare(data: dict[str, Any] = DECLARED, *, dry_run: bool = False) -> Defined:
    """As Salt's states and ``--from-config`` do it."""
    return define_instance(data, keeps_by_hand=True, dry_run=dry_run)


@pytest.fixture
def spec() -> Spec:
    """That of a declared instance to which a disk and a NIC were added by hand."""
    declare()
    plain = store.load("web1")
    made = replace(plain, disks=(*plain.disks, DISK), nics=(*plain.nics, NIC))
    store.save(made)
    return made


def start(spec: Spec) -> Path:
    """It runs from now on."""
    return write_runtime_file(spec)


def plug_nic(nic: Nic = NIC) -> None:
    """``brine nic add``, or ``modify``."""
    before = store.load("web1")
    others = tuple(one for one in before.nics if one.uuid != nic.uuid)
    vif = Vif.of(replace(before, nics=(*others, nic)), nic)
    entry = vif.recorded(pci_slot(22))
    file = InstanceFiles("web1").runtime
    change_file(file, lambda runtime: runtime.with_device(DeviceKind.NIC, entry))


def unplug(kind: DeviceKind, uuid: str) -> None:
    file = InstanceFiles("web1").runtime
    assert change_file(file, lambda runtime: runtime.without_device(kind, uuid))


@pytest.mark.parametrize("runs", [False, True])
def test_a_declaration_that_lacks_them_changes_nothing(spec: Spec, runs: bool) -> None:
    if runs:
        start(spec)
    for dry_run in (True, False):
        done = declare(dry_run=dry_run)
        assert (done.changed, done.spec) == (False, spec)
    if runs:
        assert steps_of(done.spec, spec, devices_now("web1")) == []


def test_a_declaration_that_grows_leaves_them_as_they_are(spec: Spec) -> None:
    start(spec)
    grown = {**TWO_NICS, "disks": [*DECLARED["disks"], {"path": "/data.raw"}]}
    after = declare(grown).spec
    assert [one.path for one in after.disks] == ["/root.raw", "/data.raw", "/hand.raw"]
    assert (after.disks[2], after.nics[2]) == (DISK, NIC)
    assert after.nics[0] == spec.nics[0]
    assert after.nics[1].mac not in (spec.nics[0].mac, MAC)
    for devices in (after.disks, after.nics):
        assert [one.by_hand for one in devices] == [False, False, True]
    attached = [(one.verb, one.uuid) for one in steps_of(after, spec, devices_now("web1"))]
    assert attached == [("attach", after.disks[1].uuid), ("attach", after.nics[1].uuid)]
    assert not declare(grown).changed
    assert declare().spec == spec  # the NIC of each index is the one that it was


def test_an_operators_own_spec_lacks_what_its_file_lacks(spec: Spec) -> None:
    after = define_instance(DECLARED).spec
    assert (after.disks, after.nics) == (spec.disks[:1], spec.nics[:1])


def test_the_file_of_a_spec_can_be_defined(spec: Spec) -> None:
    """As from a backup."""
    data = json.loads(InstanceFiles("web1").spec.read_text())
    assert data["version"] > spec.version
    assert define_instance(data).spec == spec


def test_an_edit_keeps_them(spec: Spec) -> None:
    after = define_instance({**to_json(spec), "memory_mib": 256}, over=spec).spec
    assert after == replace(spec, memory_mib=256)


@pytest.mark.parametrize("row", [{"path": "/hand.raw"}, {"path": "/hand.raw", "uuid": UUID}])
def test_a_disk_that_is_declared_is_no_more_by_hand(spec: Spec, row: dict[str, Any]) -> None:
    declared = {**DECLARED, "disks": [*DECLARED["disks"], row]}
    start(spec)
    done = declare(declared)
    assert (done.changed, done.spec.disks[1]) == (True, replace(DISK, by_hand=False))
    assert steps_of(done.spec, spec, devices_now("web1")) == []
    assert not declare(declared).changed
    assert declare().spec.disks == spec.disks[:1]  # as any other that is declared no more


@pytest.mark.parametrize("row", [{"mac": MAC.upper()}, {"uuid": NIC.uuid}])
def test_a_nic_that_is_declared_is_no_more_by_hand(spec: Spec, row: dict[str, Any]) -> None:
    declared = {**DECLARED, "nics": [*DECLARED["nics"], {"link": "br1", **row}]}
    assert declare(declared).spec.nics[1] == replace(NIC, by_hand=False)
    assert not declare(declared).changed


def test_a_declared_device_gets_no_slot_of_theirs(spec: Spec) -> None:
    rows: list[dict[str, Any]] = [{"path": "/root.raw"}, {"path": "/data.raw", "slot": NIC.slot}]
    with pytest.raises(SpecError, match=f"/disks/1/slot: 22 is that of the NIC {MAC}"):
        declare({**DECLARED, "disks": rows})
    rows[1] |= {"interface": "scsi"}  # on another bus
    assert declare({**DECLARED, "disks": rows}).changed
    assert store.load("web1").nics == spec.nics


def test_a_former_slot_that_one_of_them_has_by_now_is_none(spec: Spec) -> None:
    """A declared disk was unplugged by hand, and one that was plugged then has its slot."""
    both = {**DECLARED, "disks": [{"path": "/root.raw"}, {"path": "/data.raw"}]}
    declare(both)
    root, data, hand = store.load("web1").disks
    store.save(
        replace(spec, disks=(root, replace(data, slot=4), replace(hand, slot=4, by_hand=True)))
    )
    grown = {**both, "disks": [*both["disks"], {"path": "/more.raw"}]}
    slots = {one.path: one.slot for one in declare(grown).spec.disks}
    assert (slots["/data.raw"], slots["/hand.raw"]) == (-1, 4)
    both["disks"][1]["slot"] = 4
    with pytest.raises(SpecError, match="/disks/1/slot: 4 is that of the disk /hand.raw"):
        declare(both)


def test_a_new_nic_is_not_one_that_was_taken_out_by_hand(spec: Spec) -> None:
    start(spec)
    unplug(DeviceKind.NIC, NIC.uuid)
    new = {**DECLARED, "nics": [{"link": "br0"}, {"link": "br2"}]}
    _, second = declare(new).spec.nics
    assert second.link == "br2"
    assert MAC not in (second.mac, second.uuid)
    assert second.uuid != NIC.uuid


def test_what_was_taken_out_by_hand_does_not_come_back(spec: Spec) -> None:
    start(spec)
    unplug(DeviceKind.DISK, DISK.uuid)
    done = declare()
    assert (done.changed, done.spec) == (True, replace(spec, disks=spec.disks[:1]))
    assert steps_of(done.spec, spec, devices_now("web1")) == []
    assert not declare().changed


def test_what_was_changed_by_hand_stays_so(spec: Spec) -> None:
    start(spec)
    plug_nic(changed := replace(NIC, link="br7"))
    after = declare().spec
    assert after == replace(spec, nics=(spec.nics[0], changed))
    assert steps_of(after, spec, devices_now("web1")) == []
    assert not declare().changed


def test_an_edit_of_a_nic_that_was_added_by_hand_stays(spec: Spec) -> None:
    start(spec)
    store.save(edited := replace(spec, nics=(spec.nics[0], replace(NIC, link="br7"))))
    done = declare()
    assert (done.changed, done.spec) == (False, edited)


def test_what_only_qemu_has_stays_through_a_restart_and_a_declaration(spec: Spec) -> None:
    store.save(plain := replace(spec, disks=spec.disks[:1], nics=spec.nics[:1]))
    start(plain)
    plug_nic()
    assert not declare().changed  # it is none of the spec's business as yet
    store.save(started := with_last_run(store.load("web1")))
    assert started.nics[1] == NIC
    start(started)
    done = declare()
    assert (done.changed, done.spec) == (False, started)


def test_a_declaration_of_other_devices_drops_nothing_that_is_plugged_in(spec: Spec) -> None:
    """The next start takes what is plugged from the spec alone, if that has other devices."""
    store.save(plain := replace(spec, disks=spec.disks[:1], nics=spec.nics[:1]))
    start(plain)
    plug_nic()
    after = declare(TWO_NICS).spec
    assert [one.link for one in after.nics] == ["br0", "br0", "br1"]
    assert after.nics[2] == NIC
    assert dropped(after) == []
    assert not declare(TWO_NICS).changed


def test_in_the_place_of_a_damaged_spec_they_stay(spec: Spec) -> None:
    start(spec)
    InstanceFiles("web1").spec.write_text("{")
    after = declare().spec
    assert [one.uuid for one in after.disks] == [one.uuid for one in spec.disks]
    assert (after.disks[1], after.nics[1]) == (DISK, NIC)


def test_limits_of_a_declaration_are_about_what_it_declares() -> None:
    tight = {**DECLARED, "memory_max_mib": completed(DECLARED).least_memory_max_mib()}
    plain = declare(tight).spec
    store.save(with_disk := replace(plain, disks=(*plain.disks, DISK)))
    done = declare(tight)
    assert (done.changed, done.spec) == (False, with_disk)
    with pytest.raises(SpecError, match="/memory_max_mib"):
        declare({**tight, "disks": [*DECLARED["disks"], {"path": "/data.raw"}]})
    with pytest.raises(SpecError, match="/memory_max_mib"):
        declare({**tight, "disks": [*DECLARED["disks"], {"path": DISK.path}]})
    with pytest.raises(SpecError, match="/memory_max_mib"):
        define_instance({**to_json(with_disk), "vcpus": 2})


def test_on_another_machine_they_get_other_slots(spec: Spec) -> None:
    after = declare({**DECLARED, "machine": "q35"}).spec
    assert (after.disks[1].slot, after.nics[1].slot) == (-1, -1)
    assert not declare({**DECLARED, "machine": "q35"}).changed


def test_a_domain_keeps_its_disks() -> None:
    xen = {"name": "web1", "hypervisor": "xen-pvh", "kernel": "/k", "disks": [{"path": "/r"}]}
    plain = declare(xen).spec
    added = replace(DISK, slot=-1, aio=plain.disks[0].aio, cache=plain.disks[0].cache)
    store.save(with_disk := replace(plain, disks=(*plain.disks, added)))
    done = declare(xen)
    assert (done.changed, done.spec) == (False, with_disk)
