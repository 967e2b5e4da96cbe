"""Live moves between real QEMUs: the way, and each fault of it. Whatever fails, one of them has the
guest, and never both."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from brine.common.errors import BrineError
from brine.common.qmp.wire import QmpTimeoutError
from brine.hotplug import block_jobs
from brine.hotplug.block_graph import top_node
from brine.hotplug.errors import HotplugError
from brine.hotplug.qemu import Machine
from brine.moves import channel, outgoing
from brine.moves.channel import MEMORY
from brine.moves.migration import (
    CopyPhase,
    MigrationState,
    MoveError,
    MoveOptions,
    MoveProgress,
    QemuGoneError,
)
from cluster_key import new_key
from component.move_pair import DISK_MIB, HERE, MIB, WAIT_S, Pair, is_counting, qemu_of
from lab.debian import RELEASES
from lab.waiting import wait_for

STEPS = (
    "prepare",
    "serve_disks",
    "mirror",
    "await_mirrors",
    "receive",
    "send",
    "await_standstill",
    "leave_mirrors",
    "switch_over",
    "await_received",
    "claim",
    "go",
    "quit",
)
SLOW = MoveOptions(rate=400_000, max_downtime_ms=50, patience=2, patience_s=1)
"""With this the guest changes its memory faster than that is sent."""


@pytest.fixture(params=["own", *(pytest.param(one, marks=pytest.mark.long) for one in RELEASES)])
def make(tmp_path: Path, own_node: None, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Makes a pair of QEMUs, of this host or of a release."""
    release = request.param
    qemus = ("", "") if release == "own" else (qemu_of(release),) * 2
    with contextlib.ExitStack() as stack:

        def made(**keys: Any) -> Pair:
            keys.setdefault("qemus", qemus)
            folder = tmp_path / str(len(list(tmp_path.iterdir())))
            folder.mkdir()
            pair = Pair(folder, **keys)
            stack.callback(pair.close)
            return pair

        yield made


def ends_on_the_target(pair: Pair) -> None:
    assert pair.running() == [pair.b]
    assert is_counting(pair.b)
    pair.never_two()


def runs_on_here(pair: Pair) -> None:
    assert pair.running() == [pair.a]
    assert is_counting(pair.a)
    pair.never_two()


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("is_shared", [False, True], ids=["copied", "shared"])
def test_a_guest_goes_to_another_qemu(make: Any, is_shared: bool, encrypted: bool) -> None:
    pair = make(is_shared=is_shared, encrypted=encrypted)
    names = [name for name, _ in pair.steps()]
    assert names == [name for name in STEPS if name in names]
    for name, step in pair.steps():
        step()
        if name in ("prepare", "await_mirrors"):
            pair.write(pair.a, len(name))
    assert pair.a.end() == 0
    ends_on_the_target(pair)
    assert pair.reads(pair.b, len("prepare" if is_shared else "await_mirrors"))
    pair.write(pair.b, 3)


def test_each_step_may_be_done_twice(make: Any) -> None:
    pair = make(encrypted=True)
    again = {"serve_disks", "mirror", "receive", "leave_mirrors", "go", "send"}
    for name, step in pair.steps():
        step()
        if name in ("prepare", "await_mirrors", "await_standstill", "switch_over"):
            step()
        elif name == "await_received":
            assert step() == "paused"
        elif name == "serve_disks":
            assert pair.target.serve_disks(pair.listener, pair.mirrored) is False
        elif name in ("leave_mirrors", "go"):
            assert step() is False
        elif name == "mirror":
            assert pair.source.mirror(pair.disk, pair.listener) is False
        elif name == "receive":
            assert pair.target.receive(socket.socketpair()[0]) is False
        elif name == "send":
            assert pair.source.send(pair.memory, pair.target.facts(), pair.mirrored) is False
        again.discard(name)
    pair.source.quit()
    assert not again
    ends_on_the_target(pair)


def test_its_devices_in_all_places_are_there(make: Any, tmp_path: Path) -> None:
    more = []
    for number, interface in enumerate(("virtio", "scsi", "ide"), 1):
        path = tmp_path / f"disk-{interface}"
        path.write_bytes(bytes(MIB))
        uuid = f"{number}b000000-0000-4000-8000-00000000000b"
        more.append(
            {"path": str(path), "uuid": uuid, "interface": interface, "cache": "writeback"}
            | {"format": "raw"}
        )
    boot = {"path": str(tmp_path / "boot"), "uuid": "0a000000-0000-4000-8000-00000000000a"}
    boot |= {"format": "raw", "cache": "writeback"}
    (tmp_path / "boot").write_bytes(bytes(510) + b"\x55\xaa" + bytes(MIB - 512))
    pair = make(is_shared=True, machine="pc-q35-7.2", disks=[boot, *more], usb_tablet=True, vcpus=2)
    assert pair.source.facts() == pair.target.facts()
    places = pair.source.facts().devices
    assert len(places) >= 4 + 5 + 3  # disks, ports, controllers
    assert len(set(places.values())) == len(places)
    pair.run()
    assert pair.running() == [pair.b]
    pair.never_two()


@pytest.mark.parametrize(("source", "target"), [("", "trixie"), ("trixie", "")])
def test_between_releases_there_and_back(make: Any, source: str, target: str) -> None:
    qemus = [qemu_of(release) if release else "" for release in (source, target)]
    pair = make(encrypted=True, qemus=tuple(qemus))
    for name, step in pair.steps():
        step()
        if name == "await_mirrors":
            pair.write(pair.a, 9)
    ends_on_the_target(pair)
    assert pair.reads(pair.b, 9)


def test_a_dirty_bitmap_moves(make: Any) -> None:
    pair = make()
    pair.a.execute("block-dirty-bitmap-add", node=pair.disk, name="since-monday")
    pair.write(pair.a, 4)
    pair.run()
    (node,) = [
        one
        for one in pair.b.execute("query-named-block-nodes", flat=True)
        if one["node-name"] == pair.disk
    ]
    (bitmap,) = node["dirty-bitmaps"]
    assert (bitmap["name"], bitmap["count"]) == ("since-monday", 64 << 10)


def test_progress_has_a_rate_and_a_rest(make: Any) -> None:
    pair = make(options=MoveOptions(rate=1_000_000, max_downtime_ms=10_000))
    told: list[MoveProgress] = []
    pair.run(until="await_mirrors")
    pair.source.await_mirrors(pair.mirrored, timeout_s=WAIT_S, tell=told.append)
    pair.receive()
    pair.send()
    pair.source.await_standstill(pair.options, timeout_s=WAIT_S, tell=told.append)
    assert {one.phase for one in told} == {CopyPhase.DISKS, CopyPhase.MEMORY}
    for one in told:
        assert 0 <= one.done <= one.total
    assert [one.done for one in told if one.phase is CopyPhase.DISKS][-1] >= 2 * MIB
    memory = [one for one in told if one.phase is CopyPhase.MEMORY]
    assert memory[-1].total >= 32 * MIB


# A guest that changes its memory faster than that is sent.


def test_a_guest_that_is_too_fast_stays_and_the_choices_are_told(make: Any) -> None:
    pair = make(options=SLOW)
    assert is_counting(pair.a)
    pair.run(until="await_standstill")
    with pytest.raises(MoveError, match="as fast as it works") as caught:
        pair.await_standstill()
    assert "\n" not in str(caught.value)
    for word in ("--auto-converge", "--max-downtime", "--cold"):
        assert word in (caught.value.hint or "")
    assert pair.source.cancel(pair.mirrored)
    pair.settle()
    runs_on_here(pair)


def test_it_may_stand_still_for_longer(make: Any) -> None:
    pair = make(options=MoveOptions(rate=400_000, max_downtime_ms=20_000))
    pair.run()
    ends_on_the_target(pair)


def test_it_may_be_slowed_down(make: Any) -> None:
    pair = make(options=MoveOptions(rate=2_000_000, max_downtime_ms=150, auto_converge=True))
    pair.run(until="await_standstill")
    assert {"capability": "auto-converge", "state": True} in pair.a.execute(
        "query-migrate-capabilities"
    )


# Each fault of the table.


def test_the_target_is_killed_while_memory_is_sent(make: Any) -> None:
    pair = make(options=replace(SLOW, patience=1000))
    assert is_counting(pair.a)
    pair.run(until="await_standstill")
    wait_for("passes", lambda: pair.source.migration().passes > 0, timeout_s=WAIT_S)
    assert pair.source.migration().state is MigrationState.ACTIVE
    pair.b.kill()
    with pytest.raises(MoveError, match="has not taken it.*here it is running"):
        pair.await_standstill()
    pair.settle()
    runs_on_here(pair)


@pytest.mark.parametrize("is_shared", [False, True], ids=["copied", "shared"])
def test_the_target_is_killed_when_the_guest_stands_still(make: Any, is_shared: bool) -> None:
    pair = make(is_shared=is_shared)
    pair.run(until="switch_over")
    pair.b.kill()
    with pytest.raises(MoveError, match="has not taken it.*here it is running"):
        pair.source.switch_over()
    runs_on_here(pair)
    pair.write(pair.a, 5)


def test_the_target_is_killed_before_the_mirrors_are_left(make: Any) -> None:
    pair = make()
    pair.run(until="leave_mirrors")
    pair.b.kill()
    with contextlib.suppress(BrineError):  # nothing may have been left to write
        pair.source.leave_mirrors(pair.mirrored)
        pair.source.switch_over()
    pair.settle()
    runs_on_here(pair)
    pair.write(pair.a, 5)


def test_the_target_hangs_while_a_disk_is_copied(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing, "STALLED_S", 1.0)
    pair = make()
    pair.run(until="mirror")
    channel.connect_bare(pair.reserved, *pair.listener.getsockname())
    pair.source.mirror(pair.disk, pair.reserved, rate=64 << 10)
    pair.b.process.send_signal(signal.SIGSTOP)
    # The source's QEMU itself may wait for the target.
    with pytest.raises((MoveError, QmpTimeoutError), match="has taken nothing|does not answer"):
        pair.await_mirrors()
    pair.b.kill()
    assert pair.source.cancel(pair.mirrored)
    runs_on_here(pair)
    pair.write(pair.a, 5)


def test_the_target_hangs_while_the_guest_writes(make: Any) -> None:
    """The write waits for the target until the move is cancelled."""
    pair = make()
    pair.run(until="receive")
    pair.b.process.send_signal(signal.SIGSTOP)
    pair.a.human(f'qemu-io -d {pair.device} "aio_write -P 6 {MIB} 64k"')
    assert pair.source.cancel(pair.mirrored)
    assert pair.running() == [pair.a]
    assert pair.reads(pair.a, 6)


def test_the_target_hangs_while_memory_is_sent(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing, "STALLED_S", 1.0)
    options = MoveOptions(rate=3_000_000, max_downtime_ms=1, patience_s=1000)
    pair = make(options=options, is_shared=True)
    assert is_counting(pair.a)
    pair.run(until="await_standstill")
    pair.b.process.send_signal(signal.SIGSTOP)
    with pytest.raises(MoveError, match="has taken nothing"):
        pair.await_standstill()
    assert pair.source.cancel(pair.mirrored)
    runs_on_here(pair)


def test_the_target_hangs_when_the_guest_is_to_stand_still(make: Any) -> None:
    """QEMU waits for its disk and answers no one, until the target's QEMU is killed."""
    pair = make()
    pair.run(until="await_standstill")
    pair.b.process.send_signal(signal.SIGSTOP)
    killer = threading.Timer(1, pair.b.kill)
    killer.start()
    with pytest.raises(BrineError):
        pair.run_from("await_standstill")
    killer.join()
    pair.settle()
    runs_on_here(pair)


def test_cancelled_when_the_guest_stands_still(make: Any) -> None:
    pair = make()
    pair.run(until="leave_mirrors")
    assert pair.source.run_state() != "running"
    assert pair.source.cancel(pair.mirrored) is True
    assert pair.source.cancel(pair.mirrored) is False
    assert pair.b.end() == 1
    with pytest.raises(QemuGoneError):
        pair.target.go()
    runs_on_here(pair)
    assert [one["node-name"] for one in pair.a.execute("query-named-block-nodes", flat=True)] == [
        pair.disk
    ]


def test_a_cancelled_move_can_be_tried_again(make: Any) -> None:
    pair = make(encrypted=True)
    pair.run(until="switch_over")
    pair.source.cancel(pair.mirrored)
    pair.b.end()
    pair.forget_connections()
    pair.restart_target()
    pair.run()
    ends_on_the_target(pair)


def test_the_source_is_killed_when_the_guest_stands_still(make: Any) -> None:
    pair = make()
    pair.run(until="switch_over")
    pair.a.kill()
    with pytest.raises(QemuGoneError):
        pair.source.switch_over()
    assert pair.b.end() == 1
    with pytest.raises(QemuGoneError):
        pair.target.await_received(timeout_s=WAIT_S)
    assert pair.running() == []


def test_the_target_is_killed_when_it_has_all(make: Any) -> None:
    pair = make()
    pair.run(until="await_received")
    assert pair.source.look().has_left()
    assert pair.running() == []
    pair.b.kill()
    with pytest.raises(MoveError, match="has left"):
        pair.source.cancel(pair.mirrored)
    with pytest.raises(MoveError, match="has left"):
        pair.source.prepare(pair.options, [pair.disk])
    assert pair.running() == []  # nothing but this lets it go on
    assert pair.source.take_back(pair.mirrored)
    assert pair.source.take_back(pair.mirrored) is False
    runs_on_here(pair)


def test_what_the_target_lacks_is_told_before_anything_is_sent(make: Any) -> None:
    pair = make(usb_tablet=True)
    pair.run(until="send")
    facts = pair.target.facts()
    lacking = {path: place for path, place in facts.devices.items() if "usb-tablet" not in place}
    with pytest.raises(MoveError, match=r"another machine.*usb-tablet.*nothing there"):
        pair.source.send(pair.memory, facts._replace(devices=lacking), pair.mirrored)
    for change in ({"machine": "pc-i440fx-7.1"}, {"memory": 1}, {"vcpus": 9}):
        with pytest.raises(MoveError, match="another machine"):
            pair.source.send(pair.memory, facts._replace(**change), pair.mirrored)
    assert pair.source.migration().state is MigrationState.NONE
    pair.settle()
    runs_on_here(pair)


def test_a_device_that_the_target_lacks_nevertheless(make: Any) -> None:
    """QEMU tells when it comes to that device; the source hears it on the return path."""
    pair = make()
    pair.a.execute("device_add", driver="virtio-rng-pci", id="more", addr="0x1d")
    pair.run(until="send")
    pair.source.send(pair.memory, pair.source.facts(), pair.mirrored)
    pair.forget_connections()
    with pytest.raises(MoveError, match="has not taken it"):
        pair.await_standstill()
        pair.source.leave_mirrors(pair.mirrored)
        pair.source.switch_over()
    assert pair.b.end() == 1
    pair.settle()
    runs_on_here(pair)


def test_without_what_makes_it_safe_nothing_is_sent(make: Any) -> None:
    pair = make(is_shared=True)
    pair.run(until="send")
    off = [{"capability": "return-path", "state": False}]
    pair.a.execute("migrate-set-capabilities", capabilities=off)
    with pytest.raises(MoveError, match="return-path"):
        pair.send()
    runs_on_here(pair)


@pytest.mark.parametrize("more", [["-device", "virtio-rng-pci"], ["-m", "64M"], ["-smp", "2"]])
def test_a_target_that_is_another_machine(make: Any, more: list[str]) -> None:
    """QEMU would not notice a further device."""
    pair = make(is_shared=True)
    pair.target.quit()
    pair.restart_target(*more)
    pair.run(until="send")
    with pytest.raises(MoveError, match="another machine"):
        pair.send()
    pair.settle()
    runs_on_here(pair)


def test_what_is_plugged_while_disks_are_copied_is_noticed(make: Any) -> None:
    pair = make()
    pair.run(until="send")
    pair.a.execute("device_add", driver="virtio-rng-pci", id="late", addr="0x1d")
    with pytest.raises(MoveError, match="late"):
        pair.send()
    pair.settle()
    runs_on_here(pair)


def test_with_the_same_disk_two_can_not_run(make: Any) -> None:
    pair = make(is_shared=True)
    pair.run(until="quit")
    with pytest.raises(MoveError, match=r"can't go on here.*lock"):
        pair.source.take_back([])
    assert pair.running() == [pair.b]
    pair.never_two()


def test_a_guest_that_is_not_whole_does_not_go(make: Any) -> None:
    """QEMU would remember to run it as soon as it can."""
    pair = make()
    for name, step in pair.steps():
        if name == "await_received":
            break
        with pytest.raises(MoveError, match="is not here"):
            pair.target.go()
        step()
    pair.target.await_received(timeout_s=WAIT_S)
    assert pair.running() == []
    assert pair.target.go()
    pair.never_two()


def test_a_paused_guest_stays_paused(make: Any) -> None:
    pair = make(qemus=(qemu_of("trixie"),) * 2)
    pair.a.execute("stop")
    pair.run(until="switch_over")
    pair.source.cancel(pair.mirrored)
    assert pair.a.state() == "paused"
    pair.b.end()
    pair.restart_target()
    pair.run(until="go")
    assert pair.b.state() == "paused"
    assert pair.running() == []


def test_a_paused_guest_that_qemu_would_forget_to_be_paused(make: Any) -> None:
    pair = make(qemus=(qemu_of("bookworm"),) * 2)
    pair.a.execute("stop")
    with pytest.raises(MoveError, match="is paused"):
        pair.prepare()
    assert pair.a.state() == "paused"


def test_steps_out_of_order_are_refused(make: Any) -> None:
    pair = make()
    pair.run(until="await_mirrors")
    for step in (pair.source.switch_over, pair.source.take_back):
        with contextlib.suppress(MoveError):
            assert not (step([]) if step == pair.source.take_back else step())
    with pytest.raises(MoveError, match="does not stand still"):
        pair.source.switch_over()
    with pytest.raises(MoveError, match="does not stand still"):
        pair.source.leave_mirrors(pair.mirrored)
    pair.await_mirrors()
    pair.receive()
    pair.send()
    pair.await_standstill()
    with pytest.raises(MoveError, match="still copies"):
        pair.source.switch_over()
    pair.source.leave_mirrors(pair.mirrored)
    pair.run_from("switch_over")
    ends_on_the_target(pair)


# Keys, and strangers.


def test_another_key_is_refused_before_qemu_sees_it(make: Any) -> None:
    pair = make(encrypted=True)
    listener = channel.listen(HERE)
    with listener, pytest.raises(MoveError, match="has not connected.*1 strangers"):
        refused: list[str] = []

        def call() -> None:
            try:
                channel.connect(*listener.getsockname(), key=new_key())
            except MoveError as error:
                refused.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        try:
            channel.accept_call(listener, key=pair.key, purposes=[MEMORY], timeout_s=2)
        finally:
            thread.join()
            assert "refused the key" in refused[0]
    runs_on_here(pair)


def test_another_key_in_qemus_file(make: Any) -> None:
    pair = make(encrypted=True, is_shared=True)
    pair.source_key.write(new_key())
    pair.run(until="await_standstill")
    with pytest.raises(MoveError, match="has not taken it"):
        pair.await_standstill()
    pair.settle()
    runs_on_here(pair)


def test_a_disk_is_not_given_to_another_key(make: Any) -> None:
    pair = make(encrypted=True)
    pair.source_key.write(new_key())
    pair.run(until="mirror")
    with pytest.raises(MoveError, match="does not take"):
        pair.mirror()
    pair.settle()
    runs_on_here(pair)


def test_a_target_that_does_not_answer_holds_no_one_up(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing, "CONNECT_S", 0.5)
    pair = make(encrypted=True)
    pair.run(until="mirror")
    reserved = channel.reserve(HERE)
    with channel.listen(HERE) as silent:
        channel.connect_bare(reserved, *silent.getsockname())
        with pytest.raises(MoveError, match="does not take"):
            pair.source.mirror(pair.disk, reserved)
    pair.mirror()
    pair.await_mirrors()
    pair.settle()
    runs_on_here(pair)


def test_a_target_that_does_not_answer_for_memory(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guest runs on, and so does QEMU."""
    monkeypatch.setattr(outgoing, "CONNECT_S", 0.5)
    pair = make(encrypted=True, is_shared=True)
    pair.run(until="receive")
    with channel.listen(HERE) as silent:
        ours, theirs = pair.connected(silent)
        with theirs:
            with pytest.raises(MoveError, match="does not answer"):
                pair.source.send(ours, pair.target.facts())
            assert is_counting(pair.a)
            pair.source.cancel([])
    pair.settle()
    runs_on_here(pair)


def test_strangers_at_its_ports_are_no_hindrance(make: Any) -> None:
    pair = make(encrypted=True)
    pair.run(until="mirror")
    for _ in range(2):  # to QEMU's own listener, none of them comes
        with pytest.raises(TimeoutError):
            socket.create_connection(pair.listener.getsockname(), timeout=0.5)
    strangers = []
    pair.mirror()
    pair.await_mirrors()
    listener = channel.listen(HERE)
    for data in (b"", b"x", b"QEVM\0\0\0\3" * 100, bytes(48)):
        strangers.append(socket.create_connection(listener.getsockname()))
        strangers[-1].sendall(data)
    pair.memory, theirs = pair.connected(listener)
    pair.target.receive(theirs)
    listener.close()
    pair.run_from("send")
    ends_on_the_target(pair)
    for one in strangers:
        one.close()


@pytest.mark.parametrize("address", [HERE, "::1"])
def test_only_admitted_callers_are_heard(address: str) -> None:
    with contextlib.ExitStack() as stack:
        known, other = (stack.enter_context(channel.reserve(address)) for _ in range(2))
        name = known.getsockname()[:2]
        listener = stack.enter_context(channel.listen(address, callers=[("192.0.2.1", 9), name]))
        where = listener.getsockname()[:2]
        with pytest.raises(MoveError, match="does not answer"):
            channel.connect_bare(other, *where, timeout_s=0.3)
        channel.connect_bare(known, *where)
        ours = stack.enter_context(listener.accept()[0])
        known.sendall(bytes(100_000))
        assert len(ours.recv(100_000, socket.MSG_WAITALL)) == 100_000
        late = stack.enter_context(channel.reserve(address))
        channel.admit(listener, [late.getsockname()[:2]])
        channel.connect_bare(late, *where)
        known.sendall(b"still")
        assert ours.recv(5) == b"still"


def test_the_job_of_other_work_on_a_disk_is_no_mirror_of_a_move(make: Any) -> None:
    """A disk may have one that was left by a kill: the move neither takes it for its own nor ends
    it; and other work does neither with that of a move."""
    pair = make()
    pair.prepare()
    pair.serve()
    other = {"driver": "null-co", "node-name": "other", "size": DISK_MIB * MIB}
    with pair.a.connect() as qmp:
        machine = Machine(qmp)
        qmp.execute("blockdev-add", other)
        top = top_node(machine, pair.disk)
        block_jobs.begin_mirror(machine, pair.disk, top, "other")
    with pytest.raises(HotplugError, match="is being copied"):
        pair.mirror()
    assert pair.source.look(pair.mirrored).mirrors == {}
    pair.source.cancel(pair.mirrored)
    with pair.a.connect() as qmp:
        machine = Machine(qmp)
        assert block_jobs.find_job(machine, pair.disk)
        block_jobs.cancel_job(machine, pair.disk)
        qmp.execute("blockdev-del", {"node-name": "other"})
    pair.forget_connections()
    pair.prepare()
    pair.target.stop_serving()
    pair.serve()
    pair.mirror()
    pair.await_mirrors()
    with pair.a.connect() as qmp:
        machine = Machine(qmp)
        with pytest.raises(HotplugError, match="is being copied"):
            block_jobs.refuse_busy(machine, pair.disk)
        block_jobs.cancel_job(machine, pair.disk)
    assert pair.source.look(pair.mirrored).mirrors
    pair.run_from("receive")
    assert pair.running() == [pair.b]


def test_a_caller_without_a_key_is_told_of_no_disk(make: Any) -> None:
    """What has the port of the source nevertheless has to have the key."""
    pair = make(encrypted=True)
    pair.run(until="mirror")
    with pair.reserved as client:
        channel.connect_bare(client, *pair.listener.getsockname())
        assert client.recv(18, socket.MSG_WAITALL).startswith(b"NBDMAGIC")
        export = pair.disk.encode()
        request = len(export).to_bytes(4, "big") + export + b"\0\0"
        option = b"IHAVEOPT" + (7).to_bytes(4, "big") + len(request).to_bytes(4, "big")
        client.sendall((3).to_bytes(4, "big") + option + request)
        reply = client.recv(20, socket.MSG_WAITALL)
    assert int.from_bytes(reply[12:16], "big") == 0x8000_0005  # NBD_REP_ERR_TLS_REQD


def test_connections_end_soon_after_the_other_node() -> None:
    key = new_key()
    with channel.listen(HERE) as listener:
        found: list[socket.socket] = []

        def accept() -> None:
            call = channel.accept_call(listener, key=key, purposes=[MEMORY], timeout_s=WAIT_S)
            found.append(call.connection)

        thread = threading.Thread(target=accept)
        thread.start()
        with channel.connect(*listener.getsockname(), key=key) as ours:
            thread.join()
            for one in (ours, *found):
                user_timeout = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                assert 0 < user_timeout <= 60_000
                assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            ours.sendall(b"whole")
            assert found[0].recv(5) == b"whole"
            found[0].close()


# Kills.


@pytest.mark.parametrize("victim", ["source", "target", "driver"])
@pytest.mark.parametrize("step", STEPS)
def test_a_kill_before_each_step(
    make: Any, step: str, victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (step, victim) == ("mirror", "target"):  # its port is still open, and no one is there
        monkeypatch.setattr(outgoing, "CONNECT_S", 0.5)
    pair = make()
    pair.run(until=step)
    if pair.a.state() == "running":
        pair.write(pair.a, 7)
    if victim == "driver":
        pair.settle()
    else:
        (pair.a if victim == "source" else pair.b).kill()
        with contextlib.suppress(MoveError, BrineError):
            pair.run_from(step)
        pair.settle()
    judge(pair)


def judge(pair: Pair) -> None:
    """The guest is where the claim says, if that QEMU is there, and nowhere else."""
    holder = pair.b if pair.is_claimed else pair.a
    assert pair.running() == ([holder] if holder.is_alive() else [])
    pair.never_two()
    if holder.is_alive():
        assert is_counting(holder)
        pair.write(holder, 8)
        assert pair.reads(holder, 8)


def one_random_kill(pair: Pair, moment: random.Random) -> None:
    """A process drives the move; it, or a QEMU, is killed at any moment. Then the move is settled
    by what the QEMUs say, and by whether the claim was written."""
    claim = pair.a.folder / "claimed"
    child = os.fork()
    if child == 0:
        try:
            pair.claim = claim.touch  # type: ignore[method-assign]
            pair.run()
        except BaseException:
            os._exit(1)
        os._exit(0)
    time.sleep(moment.uniform(0, 0.5))
    victim = moment.choice(["source", "target", "driver", "all"])
    if victim in ("driver", "all"):
        os.kill(child, signal.SIGKILL)
    if victim in ("source", "all"):
        pair.a.kill()
    if victim == "target":
        pair.b.kill()
    os.waitpid(child, 0)
    pair.is_claimed = claim.exists()
    pair.settle()
    judge(pair)


def test_kills_at_any_moment(make: Any) -> None:
    seed = random.randrange(1 << 32)
    for number in range(8):
        print(f"seed {seed}, {number}")
        moment = random.Random(f"{seed}-{number}")
        with contextlib.closing(make(is_shared=moment.random() < 0.3)) as pair:
            one_random_kill(pair, moment)


@pytest.mark.long
def test_a_thousand_kills(make: Any) -> None:
    seed = random.randrange(1 << 32)
    for number in range(1000 // (1 + len(RELEASES))):
        print(f"seed {seed}, {number}")
        moment = random.Random(f"{seed}-{number}")
        encrypted = moment.random() < 0.2
        with contextlib.closing(make(is_shared=moment.random() < 0.3, encrypted=encrypted)) as pair:
            one_random_kill(pair, moment)
