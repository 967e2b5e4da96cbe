"""The names of plugged devices, and their slots."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brine.vm.address import DeviceKind, DeviceName
from brine.vm.slots import (
    NoSlotError,
    Slot,
    free_lun,
    free_pci_slot,
    free_root_port,
    lun_slot,
    pci_slot,
)

UUID = "9fb0b0f9-1d2c-4b3a-8a5e-0c1d2e3f4a5b"


def test_an_id_says_what_whose_and_where() -> None:
    assert pci_slot(13).device_id(DeviceKind.NIC, UUID) == "nic-9fb0b0f9-pci-13"
    assert lun_slot("scsi0.0", 0).device_id(DeviceKind.DISK, UUID) == "disk-9fb0b0f9-scsi-0"
    with pytest.raises(ValueError, match="badly formed"):
        pci_slot(13).device_id(DeviceKind.NIC, "web1")


SLOTS = st.integers(0, 255).flatmap(
    lambda number: st.sampled_from([pci_slot(number), lun_slot("scsi0.0", number)])
)


@given(st.sampled_from(DeviceKind), st.uuids(), SLOTS)
def test_any_id_is_one_that_qemu_takes_and_can_be_read_back(
    kind: DeviceKind, uuid: object, slot: Slot
) -> None:
    device_id = slot.device_id(kind, str(uuid))
    assert re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]*", device_id)
    assert len(device_id) <= 31  # as a node of QEMU's block layer is named after it
    name = DeviceName.parse(device_id)
    assert name
    assert (name.kind, name.bus, name.slot) == (kind, slot.kind(), slot.number)
    assert str(uuid).startswith(name.part)


@pytest.mark.parametrize("device_id", ["", "net0", "nic-9fb0b0f9-pci-", "nic-9FB0B0F9-pci-1", "x"])
def test_another_id_is_not_ours(device_id: str) -> None:
    assert DeviceName.parse(device_id) is None


def query_pci(*slots: int) -> Any:
    """QEMU's answer for a ``pc`` machine with devices in these slots, and some behind a bridge."""
    devices = [{"bus": 0, "slot": slot, "function": 0, "qdev_id": ""} for slot in slots]
    behind = [{"bus": 1, "slot": slot, "function": 0, "qdev_id": ""} for slot in (12, 13)]
    return [{"bus": 0, "devices": devices}, {"bus": 1, "devices": behind}]


def test_the_first_free_slot_above_the_reserved_ones() -> None:
    assert free_pci_slot(query_pci()).placement == {"bus": "pci.0", "addr": "0xc"}
    assert free_pci_slot(query_pci(0, 1, 2, 12, 13, 15)).number == 14
    assert free_pci_slot(query_pci(0, 1, 2), reserved=2).number == 3
    assert free_pci_slot(query_pci(*range(31))).number == 31
    with pytest.raises(NoSlotError, match="20 devices have slots 12 to 31 of pci.0"):
        free_pci_slot(query_pci(*range(32)))


def test_a_free_root_port() -> None:
    slot = free_root_port({"b": (4, False), "a": (3, True), "c": (2, True)})
    assert (slot.bus, slot.number, slot.placement) == ("b", 4, {"bus": "b", "addr": "0x0"})
    with pytest.raises(NoSlotError, match="has no pcie-root-port"):
        free_root_port({})
    with pytest.raises(NoSlotError, match="all 1 pcie-root-ports"):
        free_root_port({"a": (1, True)})


def test_a_free_lun() -> None:
    slot = free_lun("scsi0.0", [0, 1, 3])
    assert slot.number == 2
    assert slot.placement == {"bus": "scsi0.0", "channel": 0, "scsi-id": 0, "lun": 2}
    with pytest.raises(NoSlotError, match="all 256 LUNs of scsi0.0"):
        free_lun("scsi0.0", range(256))
