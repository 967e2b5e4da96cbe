"""Real guests that stand still, and what kvmd notes of that."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pytest

from brine.vm.halt import Halt
from brine.vm.markers import MarkerKind, read_marker, write_marker
from component.kvmd_process import Kvmd
from lab.fake_qemu import FakeQemus
from lab.guest import Guest, start_guest
from lab.machine import Host
from lab.waiting import wait_for

RUN = "0" * 31 + "1"
_STORAGE_MIB = 24


@pytest.fixture
def small_storage(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for a few MiB."""
    options = f"size={_STORAGE_MIB}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", tmp_path], check=True)
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


def halt_of(kvmd: Kvmd, name: str) -> Halt | None:
    return Halt.of(read_marker(MarkerKind.HALTED, name, run=RUN, folder=kvmd.marks))


def wait_halted(kvmd: Kvmd, name: str, state: str) -> Halt:
    def halted() -> Halt | None:
        found = halt_of(kvmd, name)
        return found if found and found.state == state else None

    return wait_for(f"{name} to be noted as {state}", halted, timeout_s=60)


def wait_going(kvmd: Kvmd, name: str) -> None:
    wait_for(f"{name} to go on", lambda: halt_of(kvmd, name) is None, timeout_s=60)


def begin_run(kvmd: Kvmd, guest: Guest) -> None:
    """Have a guest be a run of an instance, as far as kvmd can see."""
    write_marker(MarkerKind.START, guest.name, run=RUN, folder=kvmd.marks, pid=guest.pid)


def test_a_full_disk_is_noted_with_its_reason_and_forgotten_when_the_guest_goes_on(
    kvmd: Kvmd, small_storage: Path
) -> None:
    disk = small_storage / "disk.raw"
    with disk.open("w") as file:
        file.truncate(64 * 2**20)
    ballast = small_storage / "ballast"
    ballast.write_bytes(bytes((_STORAGE_MIB - 4) * 2**20))
    drive = ["-drive", f"file={disk},format=raw,if=virtio"]
    with start_guest(Host(), "full", control_dir=kvmd.control, extra_args=drive) as guest:
        begin_run(kvmd, guest)
        guest.wait_ready()
        kvmd.watches("full")
        guest.run("dd if=/dev/zero of=/dev/vda bs=1M count=16 conv=fsync >/dev/null 2>&1 &")
        halt = wait_halted(kvmd, "full", "io-error")
        assert (halt.reason, halt.no_space) == ("No space left on device", True)
        assert halt.device
        assert "No space left" in kvmd.wait_logged("full: QEMU has stopped it: io-error")
        # A daemon that starts anew says it no second time.
        kvmd.stop(signal.SIGKILL)
        kvmd.start()
        assert halt_of(kvmd, "full") is not None
        ballast.unlink()
        guest.qmp("cont")
        wait_going(kvmd, "full")
        kvmd.wait_logged("full: goes on")
        assert len(kvmd.log("full: QEMU has stopped it")) == 1
        # And it has not been an administrator who paused it.
        guest.signal(signal.SIGKILL)
        assert kvmd.verdict("full") == "crash, eof"


def test_a_vm_that_is_killed_in_an_io_error_has_crashed(kvmd: Kvmd) -> None:
    with FakeQemus() as qemus:
        qemu = qemus.start(kvmd.control / "lost.kvmd")
        kvmd.watches("lost")
        qemu.emit("BLOCK_IO_ERROR", device="", action="stop", nospace=True, reason="full")
        qemu.emit("STOP")
        qemu.kill()
        assert kvmd.verdict("lost") == "crash, eof"


@pytest.mark.parametrize("paused_by_brine", [True, False])
def test_a_pause_is_noted_if_brine_has_not_made_it(kvmd: Kvmd, *, paused_by_brine: bool) -> None:
    with start_guest(Host(), "idle", control_dir=kvmd.control) as guest:
        begin_run(kvmd, guest)
        kvmd.watches("idle")
        if paused_by_brine:
            write_marker(MarkerKind.PAUSED, "idle", run=RUN, folder=kvmd.marks)
        guest.qmp("stop")
        if not paused_by_brine:
            wait_halted(kvmd, "idle", "paused")
        guest.qmp("cont")
        guest.wait_ready()
        wait_going(kvmd, "idle")
        assert bool(kvmd.log("idle: another program has paused it")) is not paused_by_brine


def test_a_guest_that_suspends_itself_is_noted_until_it_is_woken(kvmd: Kvmd) -> None:
    with start_guest(Host(), "asleep", control_dir=kvmd.control) as guest:
        begin_run(kvmd, guest)
        guest.wait_ready()
        kvmd.watches("asleep")
        guest.run("(sleep 1; echo mem >/sys/power/state) >/dev/null 2>&1 &")
        wait_halted(kvmd, "asleep", "suspended")
        kvmd.wait_logged("asleep: its guest has suspended itself")
        guest.qmp("system_wakeup")
        wait_going(kvmd, "asleep")


def test_a_vm_that_stood_still_before_the_daemon_came_is_found(kvmd: Kvmd) -> None:
    kvmd.stop()
    with start_guest(Host(), "early", control_dir=kvmd.control) as guest:
        begin_run(kvmd, guest)
        guest.qmp("stop")
        os.utime(guest.kvmd_socket, (0, 0))
        kvmd.start()
        wait_halted(kvmd, "early", "paused")


def test_a_reason_stays_that_a_daemon_noted_just_before_it_was_killed(kvmd: Kvmd) -> None:
    kvmd.stop()
    noted = Halt("io-error", "No space left on device", "disk-1", no_space=True)
    asked: list[str] = []

    def status() -> dict[str, str]:
        asked.append("status")
        return {"status": "io-error"}

    with FakeQemus() as qemus:
        qemus.start(kvmd.control / "full.kvmd", answers={"query-status": status})
        # The peer of its socket is this process.
        folder = kvmd.marks
        write_marker(MarkerKind.START, "full", run=RUN, folder=folder, pid=os.getpid())
        write_marker(MarkerKind.HALTED, "full", run=RUN, folder=folder, **noted.facts())
        os.utime(kvmd.control / "full.kvmd", (0, 0))
        kvmd.start()
        kvmd.watches("full")
        wait_for("kvmd to ask its state", lambda: asked, timeout_s=60)
        time.sleep(0.5)
        found = halt_of(kvmd, "full")
        assert found
        assert found._replace(since=0) == noted
        assert kvmd.log("full: QEMU has stopped it") == []


def test_the_states_of_a_restless_vm_are_bounded_in_the_journal(kvmd: Kvmd) -> None:
    states = cycle(["suspended", "running"])
    answers = {"query-status": lambda: {"status": next(states)}}
    with FakeQemus() as qemus:
        qemu = qemus.start(kvmd.control / "restless.kvmd", answers=answers)
        kvmd.watches("restless")
        for _ in range(30):
            qemu.emit("SUSPEND")
            time.sleep(0.15)  # longer than kvmd waits until it asks
        qemu.end()
        kvmd.verdict("restless")
    assert 2 <= len(kvmd.log("restless: its guest has suspended itself")) <= 10
