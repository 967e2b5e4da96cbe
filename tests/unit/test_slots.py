"""Which place is free."""

from __future__ import annotations

from typing import Any

import pytest

from brine.hotplug.address import NoSlotError, free_lun, free_pci_slot, free_root_port


def query_pci(*slots: int) -> Any:
    """What QEMU says of a ``pc`` machine with devices in these slots, and some behind a bridge."""
    devices = [{"bus": 0, "slot": slot, "function": 0, "qdev_id": ""} for slot in slots]
    behind = [{"bus": 1, "slot": slot, "function": 0, "qdev_id": ""} for slot in (12, 13)]
    return [{"bus": 0, "devices": devices}, {"bus": 1, "devices": behind}]


def test_the_first_free_slot_above_the_reserved_ones() -> None:
    assert free_pci_slot(query_pci(0, 1, 2)).number == 12
    assert free_pci_slot(query_pci(0, 1, 2, 12, 13, 15)).number == 14
    assert free_pci_slot(query_pci(0, 1, 2), reserved=2).number == 3
    assert free_pci_slot(query_pci(*range(31))).number == 31


def test_where_qemu_puts_it() -> None:
    assert free_pci_slot(query_pci()).placement == {"bus": "pci.0", "addr": "0xc"}


def test_no_slot_left_names_the_limit() -> None:
    with pytest.raises(NoSlotError, match="20 devices have slots 12 to 31 of pci.0") as told:
        free_pci_slot(query_pci(*range(32)))
    assert told.value.hint


def test_a_free_root_port() -> None:
    slot = free_root_port({"b": (4, False), "a": (3, True), "c": (2, True)})
    assert (slot.bus, slot.number, slot.placement) == ("b", 4, {"bus": "b", "addr": "0x0"})


@pytest.mark.parametrize(
    ("ports", "said"),
    [({}, "has no pcie-root-port"), ({"a": (1, True)}, "all 1 pcie-root-ports")],
)
def test_no_root_port_left(ports: dict[str, tuple[int, bool]], said: str) -> None:
    with pytest.raises(NoSlotError, match=said) as told:
        free_root_port(ports)
    assert told.value.hint


def test_a_free_lun() -> None:
    slot = free_lun("scsi0.0", [0, 1, 3])
    assert slot.number == 2
    assert slot.placement == {"bus": "scsi0.0", "channel": 0, "scsi-id": 0, "lun": 2}
    with pytest.raises(NoSlotError, match="all 256 LUNs of scsi0.0"):
        free_lun("scsi0.0", range(256))
