"""The changes that ``brine instance define --live`` makes to a running instance."""

from __future__ import annotations

from typing import Any

import pytest

from brine.instance.kvm.live_definition import in_words, steps_of
from brine.instance.kvm.runtime_devices import devices_now
from brine.instance.validate import completed
from brine.vm.address import DeviceKind
from brine.vm.runtime_file import change_file
from brine.vm.slots import pci_slot
from brine.vm.spec import Spec
from brine.vm.vif import Vif
from lab.runtime_file import write_runtime_file

pytestmark = pytest.mark.usefixtures("own_node")

ONE, TWO, BY_HAND = "52:54:00:00:00:01", "52:54:00:00:00:02", "52:54:00:00:00:09"
SCSI = ["-device", "virtio-scsi-pci,id=scsi0"]


def web1(*nics: str, disks: list[dict[str, Any]] | None = None, **keys: Any) -> Spec:
    rows = [{"link": "br0", "mac": mac, **keys} for mac in nics]
    return completed({"name": "web1", "nics": rows, "disks": disks or []})


def steps(spec: Spec, before: Spec | None = None) -> list[str]:
    """The steps in words; those that wait for a restart are in brackets."""
    found = []
    for step in steps_of(spec, before, devices_now("web1")):
        device = step.new or step.old
        assert device
        text = f"{step.verb} {in_words(device)}"
        found.append(text if step.is_live else f"({text})")
    return found


def test_what_is_as_declared_needs_nothing() -> None:
    spec = web1(ONE, disks=[{"path": "/a"}, {"path": "/i", "interface": "ide"}])
    write_runtime_file(spec)
    assert steps(spec, spec) == []


def test_what_frees_something_comes_first() -> None:
    write_runtime_file(web1(ONE, disks=[{"path": "/a"}]))
    after = web1(TWO, disks=[{"path": "/b"}])
    assert steps(after) == [
        "detach disk /a",
        f"detach NIC {ONE}",
        "attach disk /b",
        f"attach NIC {TWO}",
    ]


def test_a_nic_is_changed_in_its_place_and_a_disk_waits() -> None:
    write_runtime_file(web1(ONE, disks=[{"path": "/a"}]))
    after = web1(ONE, disks=[{"path": "/a", "cache": "writeback"}], queues=2)
    assert steps(after) == ["(modify disk /a)", f"modify NIC {ONE}"]


def test_what_was_plugged_by_hand_stays_until_a_spec_has_had_it() -> None:
    started, with_it = web1(ONE), web1(ONE, BY_HAND)
    file = write_runtime_file(started)
    entry = Vif.of(with_it, with_it.nics[1]).recorded(pci_slot(21))
    change_file(file, lambda runtime: runtime.with_device(DeviceKind.NIC, entry))
    assert steps(started, started) == []
    assert steps(web1(TWO), started) == [f"detach NIC {ONE}", f"attach NIC {TWO}"]
    assert steps(with_it, started) == []
    assert steps(started, with_it) == [f"detach NIC {BY_HAND}"]


def test_what_is_only_recorded_for_the_next_start_is_not_there() -> None:
    started, with_it = web1(ONE), web1(ONE, TWO, disks=[{"path": "/a"}])
    file = write_runtime_file(started)
    nic, disk = Vif.of(with_it, with_it.nics[1]), with_it.disks[0]
    change_file(file, lambda runtime: runtime.with_device(DeviceKind.NIC, nic.recorded()))
    change_file(file, lambda runtime: runtime.with_device(DeviceKind.DISK, disk.entry(10)))
    assert steps(started, started) == []
    assert steps(with_it, started) == ["attach disk /a", f"attach NIC {TWO}"]
    assert steps(started, with_it) == ["detach disk /a", f"detach NIC {TWO}"]


def test_what_was_taken_out_by_hand_is_plugged_in_again_if_the_spec_has_it() -> None:
    spec = web1(ONE)
    file = write_runtime_file(spec)
    change_file(file, lambda runtime: runtime.without_device(DeviceKind.NIC, spec.nics[0].uuid))
    assert steps(spec, spec) == [f"attach NIC {ONE}"]
    assert steps(web1(), spec) == []


@pytest.mark.parametrize(("command", "can_be"), [([], False), (SCSI, True)])
def test_scsi_needs_a_controller_and_ide_a_restart(command: list[str], *, can_be: bool) -> None:
    write_runtime_file(web1(), command=command)
    disks = [{"path": "/i", "interface": "ide"}, {"path": "/s", "interface": "scsi"}]
    scsi = "attach disk /s" if can_be else "(attach disk /s)"
    assert steps(web1(disks=disks)) == ["(attach disk /i)", scsi]
