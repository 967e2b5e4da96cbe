"""What plugged devices are called."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brine.hotplug.address import Bus, DeviceKind, DeviceName

UUID = "9fb0b0f9-1d2c-4b3a-8a5e-0c1d2e3f4a5b"


def test_an_id_says_what_whose_and_where() -> None:
    assert str(DeviceName.of(DeviceKind.NIC, UUID, Bus.PCI, 13)) == "nic-9fb0b0f9-pci-13"
    assert str(DeviceName.of(DeviceKind.DISK, UUID, Bus.SCSI, 0)) == "disk-9fb0b0f9-scsi-0"


@given(st.sampled_from(DeviceKind), st.uuids(), st.sampled_from(Bus), st.integers(0, 255))
def test_any_id_is_one_that_qemu_takes_and_can_be_read_back(
    kind: DeviceKind, uuid: object, bus: Bus, slot: int
) -> None:
    name = DeviceName.of(kind, str(uuid), bus, slot)
    assert re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]*", str(name))
    assert len(str(name)) <= 31  # as a node of QEMU's block layer is named after it
    assert DeviceName.parse(str(name)) == name
    assert name.is_of(str(uuid))


@pytest.mark.parametrize("device_id", ["", "net0", "nic-9fb0b0f9-pci-", "nic-9FB0B0F9-pci-1", "x"])
def test_another_id_is_not_ours(device_id: str) -> None:
    assert DeviceName.parse(device_id) is None


def test_no_uuid_no_name() -> None:
    with pytest.raises(ValueError, match="badly formed"):
        DeviceName.of(DeviceKind.NIC, "web1", Bus.PCI, 1)
