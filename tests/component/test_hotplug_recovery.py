"""What whoever comes next makes of something that was begun and not ended."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from brine.common import privileges
from brine.common.errors import BrineError
from brine.common.files import unfinished
from brine.common.privileges import Capability
from brine.hotplug import plug_nic, session, transaction
from brine.hotplug.address import DeviceKind
from brine.hotplug.net import records
from brine.hotplug.net.wiring import unwire
from brine.hotplug.plug_nic import add_nic, modify_nic
from brine.hotplug.runtime_file import RuntimeFileError
from brine.hotplug.session import settle_all, working_on
from component.test_hotplug_faults import (
    MAC,
    OTHER,
    TAP,
    WISH,
    Node,
    add_a_disk,
    add_a_nic,
    change_the_nic,
    node,
    remove_the_nic,
)
from lab.faulty_qemu import Fault, Guest

__all__ = ["node"]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="networks take root")


@pytest.fixture(autouse=True)
def _clean_up() -> Iterator[None]:
    yield
    unwire(TAP)


def test_a_removal_that_the_guest_came_round_to_is_ended_by_the_garbage_collector(
    node: Node,
) -> None:
    clean = node.state()
    add_a_nic(node)
    node.qemu.guest = Guest.IGNORES
    with pytest.raises(BrineError, match="refused by the guest"):
        remove_the_nic(node, 0.3)
    plugged = node.state()
    settle_all()
    assert node.state() == plugged  # the guest has it still
    node.qemu.let_go()
    settle_all()
    assert node.state() == clean


def test_whoever_may_not_change_networks_leaves_nics_to_others(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_a_nic(node)
    before = node.state()
    interrupted_change(node, monkeypatch)
    begun = node.state()["begun"]
    assert begun

    def without_networks(capability: Capability) -> bool:
        return capability is not Capability.NET_ADMIN

    monkeypatch.setattr(session, "may", without_networks)
    add_a_disk(node)
    assert node.state()["begun"] == begun
    monkeypatch.setattr(session, "may", privileges.may)
    settle_all()
    assert {**node.state(), "qemu": [], "disks": []} == {**before, "qemu": [], "disks": []}


def interrupted_change(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old NIC is out, and then QEMU's connection ends for good."""
    with monkeypatch.context() as patch:

        def never(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(plug_nic, "put_in", never)
        with pytest.raises(KeyboardInterrupt):
            change_the_nic(node)


def test_what_the_guest_keeps_is_not_taken_half_when_a_later_step_fails(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:

        def full(*_: object, **__: object) -> None:
            raise RuntimeFileError(node.runtime, "can't be written: No space left on device")

        patch.setattr(transaction.Pending, "record", full)
        node.qemu.guest = Guest.IGNORES
        with pytest.raises(RuntimeFileError):
            add_a_nic(node, 0.3)
    held = node.state()
    assert [one.split()[0] for one in node.qemu.holds()] == ["device", "netdev"]
    assert held["taps"] == {TAP: "br0"}
    assert held["NICs"] == []
    settle_all()
    assert {**held, "begun": [], "NICs": ["br0"]} == node.state()


def test_threads_of_one_process_take_turns_on_a_vm(node: Node) -> None:
    def add(number: int) -> str:
        uuid = f"{number:08x}-8f2c-4f2e-9ab6-6f7b1b0a3b0d"
        mac = f"52:54:00:00:00:{number:02x}"
        wish = replace(WISH, uuid=uuid, mac=mac)
        with working_on(node.qemu.path) as vm:
            done = add_nic(vm, wish)
            assert done.tap
            return done.tap

    with ThreadPoolExecutor(4) as threads:
        taps = list(threads.map(add, range(1, 5)))
    assert len([one for one in node.qemu.holds() if one.startswith("device")]) == 4
    for tap in taps:
        unwire(tap)


def test_a_record_that_is_damaged_is_told_and_kept_aside(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    add_a_nic(node)
    node.qemu.guest = Guest.IGNORES
    with pytest.raises(BrineError):
        change_the_nic(node, 0.3)
    (file,) = transaction.STATE_DIR.glob("*.json")
    (begun,) = json.loads(file.read_bytes())
    kept = []
    for damaged in ({**begun, "before": {}}, {**begun, "of a later version": 1}, 5):
        file.write_text(json.dumps([damaged]))
        caplog.clear()
        node.qemu.guest = Guest.OBEYS
        settle_all()
        assert "can't be read" in caplog.text
        kept.append(json.dumps([damaged]))
        assert sorted(one.read_text() for one in transaction.STATE_DIR.iterdir()) == sorted(kept)
        assert list(transaction.STATE_DIR.glob("*.json")) == []
    remove_the_nic(node)


def test_a_nic_of_another_network_namespace_is_not_taken_for_this_ones(
    node: Node, tmp_path: Path
) -> None:
    add_a_nic(node)
    record = records.load(TAP)
    assert record
    records.save(record, namespace=1)

    with working_on(node.qemu.path) as vm:
        found = vm.find(DeviceKind.NIC, MAC)
        assert found
        assert found.tap is None
        with pytest.raises(BrineError, match="nothing is known of its tap"):
            modify_nic(vm, found, OTHER)
    records.save(record)


def test_a_vm_that_ended_is_forgotten(node: Node) -> None:
    add_a_nic(node)
    node.qemu.fail_at(0, Fault.UNHEARD)
    node.qemu.has_failed()
    ended = transaction.STATE_DIR / "4194304-1-1.json"  # above the highest PID
    namespace = os.stat("/proc/self/ns/pid").st_ino
    ours = transaction.STATE_DIR / f"4194304-1-{namespace}.json"
    transaction.STATE_DIR.mkdir(exist_ok=True)
    half_written = unfinished(ours)
    for file in (ended, ours, half_written):
        file.write_text("[]")
    transaction.forget_ended()
    assert ended.exists()  # of PIDs that can't be seen from here
    assert not ours.exists()
    assert not half_written.exists()
    remove_the_nic(node)


def test_a_disk_is_known_by_its_files_name_in_this_folder(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_a_disk(node)
    monkeypatch.chdir(node.disk.path.parent)
    with working_on(node.qemu.path) as vm:
        found = vm.find(DeviceKind.DISK, node.disk.path.name)
        assert found
        assert found.uuid == node.disk.uuid
        assert vm.find(DeviceKind.DISK, "no-such-file") is None
