"""Plugging into a VM whose monitor or guest misbehaves: all is done, or undone, or done later.

The peer is a scripted one (a real QEMU shows none of this on demand); taps and bridges are real.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from brine.common import operation, paths, privileges
from brine.common.entry_points import EntryPoint
from brine.common.errors import BrineError
from brine.common.files import unfinished, write_whole
from brine.common.locks import LockedError, locked
from brine.common.operation import OperationError
from brine.common.privileges import Capability
from brine.hotplug import plug_nic, session, transaction
from brine.hotplug.errors import RefusedByGuestError
from brine.hotplug.locked_vm import Vm
from brine.hotplug.net import records
from brine.hotplug.plug_disk import plug_disk_in
from brine.hotplug.plug_nic import plug_nic_in, replace_nic
from brine.hotplug.session import remove_device, settle_all, working_on
from brine.hotplug.timeouts import QMP_TIMEOUT_S
from brine.vm.address import DeviceKind
from brine.vm.disk import Disk
from brine.vm.runtime_file import Runtime, RuntimeFileError
from brine.vm.values import Mode
from brine.vm.vif import Vif
from component.namespaces import add_script, ip, new_namespace
from killing import each_step
from lab.faulty_qemu import Fault, FaultyQemu, Guest
from lab.traces import descriptor_links

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="networks take root")

UUID = "0b5bcb4e-8f2c-4f2e-9ab6-6f7b1b0a3b0d"
MAC = "52:54:00:12:34:56"
INSTANCE = f"fault{os.getpid()}"
WISH = Vif(instance=INSTANCE, uuid=UUID, mode=Mode.BRIDGED, link="br0", mac=MAC)
OTHER = replace(WISH, link="br1")
TAP = WISH.tap_name()

Step = Callable[["Node", float], None]


@dataclass(frozen=True)
class Node:
    """A VM and what a plug touches.

    :param qmp_timeout_s: how long its monitor may take; how long its guest may is each plug's own.
    """

    qemu: FaultyQemu
    disk: Disk
    runtime: Path
    qmp_timeout_s: float = QMP_TIMEOUT_S

    def recorded(self, kind: DeviceKind) -> list[str]:
        """The links of NICs, or the UUIDs of disks, that the runtime file has."""
        devices = Runtime.load(self.runtime).devices[kind]
        if kind is DeviceKind.NIC:
            return [device["nicparams"]["link"] for device in devices]
        return [device["uuid"] for device in devices]

    def state(self) -> dict[str, object]:
        """All that a plug leaves, anywhere."""
        return {
            "qemu": sorted(self.qemu.holds()),
            "taps": _taps(),
            "tap records": [name for name in records.load_all() if name == TAP],
            "begun": sorted(file.name for file in paths.VOLATILE_OPERATIONS_DIR.glob("*")),
            "NICs": self.recorded(DeviceKind.NIC),
            "disks": self.recorded(DeviceKind.DISK),
        }


@pytest.fixture
def node(own_files: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """A VM on a node with two bridges."""
    image = tmp_path / "disk"
    image.write_bytes(bytes(4096))
    runtime = tmp_path / "web1.json"
    runtime.write_text('{"nics": [], "disks": []}')
    with new_namespace(), FaultyQemu(tmp_path / f"{INSTANCE}.qmp") as qemu:
        for name in ("br0", "br1"):
            ip(f"link add {name} type bridge")
            ip(f"link set {name} up")
        yield Node(qemu, Disk(uuid=UUID, path=str(image)), runtime)


def working(node: Node, timeout_s: float) -> AbstractContextManager[Vm]:
    return working_on(
        node.qemu.path,
        runtime=node.runtime,
        timeout_s=timeout_s,
        qmp_timeout_s=node.qmp_timeout_s,
    )


def add_a_nic(node: Node, timeout_s: float = 10) -> None:
    with working(node, timeout_s) as vm:
        plug_nic_in(vm, WISH)


def change_the_nic(node: Node, timeout_s: float = 10) -> None:
    with working(node, timeout_s) as vm:
        found = vm.find(DeviceKind.NIC, MAC)
        assert found
        replace_nic(vm, found, OTHER)


def remove_the_nic(node: Node, timeout_s: float = 10) -> None:
    with working(node, timeout_s) as vm:
        if found := vm.find(DeviceKind.NIC, MAC):
            remove_device(vm, found)


def add_a_disk(node: Node, timeout_s: float = 10) -> None:
    with working(node, timeout_s) as vm:
        plug_disk_in(vm, node.disk)


def remove_the_disk(node: Node, timeout_s: float = 10) -> None:
    with working(node, timeout_s) as vm:
        if found := vm.find(DeviceKind.DISK, UUID):
            remove_device(vm, found)


def nothing(node: Node, timeout_s: float = 10) -> None:
    """The commands before the first step."""


OPERATIONS: dict[str, tuple[Step, Step, Step]] = {
    # before it, itself, and what undoes it all
    "add NIC": (nothing, add_a_nic, remove_the_nic),
    "change NIC": (add_a_nic, change_the_nic, remove_the_nic),
    "remove NIC": (add_a_nic, remove_the_nic, nothing),
    "add disk": (nothing, add_a_disk, remove_the_disk),
    "remove disk": (add_a_disk, remove_the_disk, nothing),
}


def _taps() -> dict[str, str | None]:
    """The taps of this network namespace, and the bridges that they are ports of."""
    links = json.loads(ip("-json link show"))
    return {
        link["ifname"]: link.get("master") for link in links if link["ifname"].startswith("vm-")
    }


def descriptors() -> list[str]:
    """This process's descriptors, as what they are."""
    gc.collect()
    return sorted(descriptor_links(os.getpid()))


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("fault", [fault for fault in Fault if fault is not Fault.DIES])
def test_a_fault_at_any_command_is_undone_or_the_same_request_ends_right(
    node: Node, operation: str, fault: Fault
) -> None:
    prepare, operate, undo = OPERATIONS[operation]
    clean = node.state()
    prepare(node, 10)
    before = node.state()
    operate(node, 10)
    done = node.state()
    assert done != before
    undo(node, 10)
    assert node.state() == clean

    open_before = descriptors()
    for number in range(100):
        prepare(node, 10)
        node.qemu.fail_at(number, fault)
        try:
            if fault is Fault.HANGS:
                operate(replace(node, qmp_timeout_s=0.3), 0.3)
            else:
                operate(node, 10)
        except BrineError:
            failed = True
        else:
            failed = False
        # On a slow machine it may fail before it comes so far.
        if not node.qemu.has_failed() and not failed:
            break
        if fault is Fault.REFUSED and failed and operation.startswith("add"):
            # Nothing was asked of the guest, so all is known.
            assert node.state() == before, (number, node.qemu.received)
        operate(node, 10)
        assert node.state() == done, (number, node.qemu.received)
        undo(node, 10)
        assert node.state() == clean, (number, node.qemu.received)
    else:
        raise AssertionError("the operation has no end")
    assert number > 5, "no command failed"
    undo(node, 10)
    assert node.state() == clean
    assert descriptors() == open_before


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_qemu_that_ends_at_any_command_leaves_nothing_on_the_node(
    tmp_path: Path, node: Node, operation: str
) -> None:
    prepare, operate, _ = OPERATIONS[operation]
    for number in range(100):
        folder = tmp_path / str(number)
        folder.mkdir()
        with FaultyQemu(folder / f"{INSTANCE}.qmp") as qemu:
            node.runtime.write_text('{"nics": [], "disks": []}')
            mortal = replace(node, qemu=qemu)
            prepare(mortal, 10)
            qemu.fail_at(number, Fault.DIES)
            with contextlib.suppress(BrineError):
                operate(mortal, 10)
            if not qemu.has_failed():
                break
            state = mortal.state()
            assert (state["qemu"], state["taps"], state["begun"]) == ([], {}, [])
    assert number > 5


@pytest.mark.parametrize(
    "guest", [one for one in Guest if one not in (Guest.REFUSES, Guest.IGNORES)]
)
def test_a_removal_ends_however_it_is_told(node: Node, guest: Guest) -> None:
    clean = node.state()
    add_a_nic(node)
    add_a_disk(node)
    node.qemu.guest = guest
    remove_the_nic(node, 5)
    remove_the_disk(node, 5)
    assert node.state() == clean


@pytest.mark.parametrize("guest", [Guest.REFUSES, Guest.IGNORES])
def test_what_a_guest_keeps_is_still_plugged_in_whole_and_can_be_removed_later(
    node: Node, guest: Guest
) -> None:
    clean = node.state()
    add_a_nic(node)
    add_a_disk(node)
    plugged = node.state()
    node.qemu.guest = guest
    for operate in (remove_the_nic, remove_the_disk, change_the_nic):
        with pytest.raises(RefusedByGuestError, match="refused by the guest"):
            operate(node, 0.5)
        assert {**node.state(), "begun": []} == plugged
    node.qemu.guest = Guest.OBEYS
    remove_the_nic(node)
    remove_the_disk(node)
    assert node.state() == clean


def test_a_device_that_the_guest_gives_up_late_is_cleaned_up_by_whoever_comes_next(
    node: Node,
) -> None:
    clean = node.state()
    add_a_nic(node)
    add_a_disk(node)
    node.qemu.guest = Guest.IGNORES
    for operate in (remove_the_nic, remove_the_disk):
        with pytest.raises(RefusedByGuestError):
            operate(node, 0.3)
    node.qemu.let_go()

    with working_on(node.qemu.path) as vm:
        assert vm.devices(DeviceKind.NIC) == []
    assert node.state() == clean


@pytest.mark.parametrize(
    ("add", "remove"), [(add_a_nic, remove_the_nic), (add_a_disk, remove_the_disk)]
)
def test_a_device_may_go_between_any_two_questions_of_a_second_removal(
    node: Node, add: Step, remove: Step
) -> None:
    clean = node.state()
    for number in range(100):
        add(node, 10)
        node.qemu.guest = Guest.IGNORES
        with pytest.raises(RefusedByGuestError):
            remove(node, 0.3)
        node.qemu.guest = Guest.OBEYS
        node.qemu.let_go_at(number)
        remove(node, 10)
        if not node.qemu.has_let_go():
            break
        assert node.state() == clean, (number, node.qemu.received)
    assert number > 5


def test_a_change_whose_new_nic_fails_gives_the_guest_the_old_one_back(node: Node) -> None:
    add_a_nic(node)
    before = node.state()
    add_script("no-br1", '[ "$LINK" != br1 ] || { echo "not this one" >&2; exit 1; }')
    with pytest.raises(BrineError, match="no-br1"):
        change_the_nic(node)
    assert node.state() == before


def test_a_script_that_fails_leaves_no_tap_and_nothing_in_qemu(node: Node) -> None:
    clean = node.state()
    add_script("never", "exit 3")
    with pytest.raises(BrineError, match="never"):
        add_a_nic(node)
    assert node.state() == clean
    assert "getfd" not in node.qemu.received


def test_a_runtime_file_that_cannot_be_written_undoes_the_plug(node: Node) -> None:
    node.runtime.write_text("{")
    for operate in (add_a_nic, add_a_disk):
        with pytest.raises(BrineError, match="not valid JSON"):
            operate(node)
    node.runtime.write_text('{"nics": [], "disks": []}')
    assert node.qemu.holds() == []
    assert node.state()["begun"] == []


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_full_disk_at_any_record_leaves_nothing_half_done(
    node: Node, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    prepare, operate, undo = OPERATIONS[operation]
    prepare(node, 10)
    before = node.state()
    for number in range(10):
        left = number

        def full(path: Path, data: bytes, **options: Any) -> None:
            nonlocal left
            left -= 1
            if left == -1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write_whole(path, data, **options)

        with monkeypatch.context() as patch:
            patch.setattr("brine.common.operation.write_whole", full)
            try:
                operate(node, 10)
            except BrineError as error:
                assert "can't be written: No space left on device" in str(error)
                assert node.state() == before
            else:
                break
    assert number > 0
    undo(node, 10)


def test_a_qemu_without_add_fd_is_given_no_disk(tmp_path: Path, node: Node) -> None:
    with FaultyQemu(tmp_path / "old.qmp", lacks=frozenset({"add-fd"})) as old:
        with pytest.raises(BrineError, match="no add-fd") as caught:
            add_a_disk(replace(node, qemu=old))
        assert caught.value.hint
        assert old.holds() == []
    assert "blockdev-add" not in old.received


def test_a_monitor_in_use_is_waited_for_and_its_client_is_named(node: Node) -> None:
    client = f"""
import socket, sys, time
with socket.socket(socket.AF_UNIX) as monitor:
    monitor.connect({str(node.qemu.path)!r})
    print(flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", client], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        assert process.stdin
        process.stdout.readline()
        with pytest.raises(BrineError, match=f"in use.*process {process.pid} "):
            add_a_disk(replace(node, qmp_timeout_s=0.3))
        # Now it lets go, and whoever waits is served.
        threading.Timer(0.3, process.stdin.close).start()
        add_a_disk(node)
    remove_the_disk(node)


def test_a_monitor_that_nobody_has_and_that_does_not_answer_is_told_apart(tmp_path: Path) -> None:
    silent = tmp_path / "silent.qmp"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(silent))
        listener.listen()

        def work() -> None:
            with working_on(silent, qmp_timeout_s=0.2):
                pass

        with pytest.raises(BrineError, match="does not answer"):
            work()


def test_two_of_us_take_turns_by_whatever_monitor_and_do_not_wait_for_ever(node: Node) -> None:
    add_a_disk(node)
    (lock,) = paths.LOCK_DIR.glob("vm-*.lock")

    def work() -> None:
        with working_on(node.qemu.path, lock_timeout_s=0.2):
            pass

    with locked(lock, timeout_s=1), pytest.raises(LockedError, match=f"process {os.getpid()}"):
        work()
    work()


# Interrupted work: the next command completes or undoes it.


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


def next_command(node: Node) -> None:
    with working(node, 10):
        pass


def settle_recorded(_node: Node) -> None:
    for record in operation.pending():
        assert operation.settle_one(record)


def collect(_node: Node) -> None:
    settle_all()


@pytest.mark.parametrize("settle", [next_command, settle_recorded, collect])
@pytest.mark.parametrize("name", OPERATIONS)
def test_killed_at_any_step_it_ends_whole_or_undone(
    node: Node, monkeypatch: pytest.MonkeyPatch, name: str, settle: Callable[[Node], None]
) -> None:
    """As the operations of tests/unit/test_operations_killed.py do."""
    entry = EntryPoint("hotplug", "brine.hotplug.session:SETTLED")
    monkeypatch.setattr(operation, "entry_points", lambda _group: [entry])
    prepare, operate, undo = OPERATIONS[name]
    prepare(node, 10)
    before = node.state()
    operate(node, 10)
    done = node.state()

    def again() -> None:
        undo(node, 10)
        prepare(node, 10)
        assert node.state() == before

    def work() -> None:
        # This is a copy of the fake QEMU's process, too; only that one keeps its taps.
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{number}") == "/dev/net/tun":
                    os.close(int(number))
        operate(node, 10)

    ends, waited = [], 0
    for number in each_step(work, again):
        waited += len(operation.pending())
        settle(node)
        operation.remove_unfinished()
        ends.append(node.state())
        assert ends[-1] in (before, done), (number, ends[-1])
    assert (ends[0], ends[-1]) == (before, done)
    assert waited > 1
    undo(node, 10)


def test_what_the_guest_keeps_is_a_pending_operation_until_it_is_settled(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = EntryPoint("hotplug", "brine.hotplug.session:SETTLED")
    monkeypatch.setattr(operation, "entry_points", lambda _group: [entry])
    clean = node.state()
    add_a_disk(node)
    assert operation.pending() == []
    node.qemu.guest = Guest.IGNORES
    with pytest.raises(BrineError, match="refused by the guest"):
        remove_the_disk(node, 0.3)
    (record,) = operation.pending()
    assert record.kind == "hotplug"
    assert INSTANCE in record.key
    assert "the guest releases" in record.waits_for
    assert record.is_interrupted()
    with pytest.raises(OperationError, match="the guest releases"):
        operation.settle_one(record)
    with working(node, 1):
        assert not record.is_interrupted()
        assert not operation.settle_one(record)
    node.qemu.let_go()
    assert operation.settle_one(record)
    assert (node.state(), operation.pending()) == (clean, [])


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
    def add(number: int) -> None:
        uuid = f"{number:08x}-8f2c-4f2e-9ab6-6f7b1b0a3b0d"
        mac = f"52:54:00:00:00:{number:02x}"
        wish = replace(WISH, uuid=uuid, mac=mac)
        with working_on(node.qemu.path) as vm:
            assert plug_nic_in(vm, wish).tap

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(add, range(1, 5)))
    assert len([one for one in node.qemu.holds() if one.startswith("device")]) == 4


def refused_change(node: Node) -> tuple[Path, dict[str, Any]]:
    """The record of a change whose NIC the guest has not released."""
    add_a_nic(node)
    node.qemu.guest = Guest.IGNORES
    with pytest.raises(BrineError):
        change_the_nic(node, 0.3)
    node.qemu.guest = Guest.OBEYS
    (file,) = paths.VOLATILE_OPERATIONS_DIR.glob("*.json")
    return file, json.loads(file.read_bytes())


def test_a_record_that_is_damaged_is_told_and_kept(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    file, begun = refused_change(node)
    damages: tuple[dict[str, Any], ...] = ({"before": {}}, {"of a later version": 1})
    for damage in damages:
        data = json.dumps({**begun, "facts": {**begun["facts"], **damage}})
        file.write_text(data)
        caplog.clear()
        settle_all()
        with working(node, 1):
            pass
        assert "can't be read" in caplog.text
        assert file.read_text() == data
    (found,) = operation.pending()
    assert found.id == file.stem


@pytest.mark.parametrize("has_let_go", [False, True])
def test_what_0_2_0_has_begun_is_ended_once(
    node: Node, caplog: pytest.LogCaptureFixture, *, has_let_go: bool
) -> None:
    """Its record is one file for each VM."""
    file, begun = refused_change(node)
    before = {**node.state(), "begun": []}
    file.unlink()
    former = paths.HOTPLUG_DIR / f"{begun['lock'].removeprefix('vm-')}.json"
    former.parent.mkdir()
    former.write_text(json.dumps([begun["facts"]]))
    if has_let_go:
        node.qemu.let_go()
    settle_all()
    assert not former.exists()
    if not has_let_go:
        (found,) = operation.pending()
        assert "the guest releases" in found.waits_for
        node.qemu.let_go()
        settle_all()
    assert node.state() == before  # the old NIC is back
    settle_all()
    assert node.state() == before
    former.write_text("5")
    with working(node, 1):
        pass
    assert "can't be read" in caplog.text
    assert former.with_suffix(".damaged").read_text() == "5"


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
            replace_nic(vm, found, OTHER)
    records.save(record)


def test_a_vm_that_ended_is_forgotten(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("hotplug", "brine.hotplug.session:SETTLED")
    monkeypatch.setattr(operation, "entry_points", lambda _group: [entry])
    file, begun = refused_change(node)
    namespace = os.stat("/proc/self/ns/pid").st_ino

    def record(number: int, identity: str) -> Path:
        other = file.with_name(f"run-{number}.json")
        keys = {"also": [f"qemu/{identity}"], "lock": f"vm-{identity}"}
        other.write_text(json.dumps({**begun, "id": other.stem, **keys}))
        return other

    hidden = record(1, "4194304-1-1")  # above the highest PID, and not to be seen from here
    ended = record(2, f"4194304-1-{namespace}")
    settled = operation.find(record(3, f"4194304-1-{namespace}").stem)
    assert settled
    assert operation.settle_one(settled)
    assert not operation.find(settled.id)
    former = paths.HOTPLUG_DIR / f"4194304-1-{namespace}.json"
    former.parent.mkdir()
    half_written = [unfinished(ended), unfinished(former)]
    for one in (former, *half_written):
        one.write_text("[]")
    transaction.forget_ended()
    assert hidden.exists()
    assert not any(one.exists() for one in (ended, former, *half_written))
    hidden.unlink()
    node.qemu.let_go()
    settle_all()
    remove_the_nic(node)


def test_a_disk_is_known_by_its_files_name_in_this_folder(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_a_disk(node)
    monkeypatch.chdir(Path(node.disk.path).parent)
    with working_on(node.qemu.path) as vm:
        found = vm.find(DeviceKind.DISK, Path(node.disk.path).name)
        assert found
        assert found.uuid == node.disk.uuid
        assert vm.find(DeviceKind.DISK, "no-such-file") is None
