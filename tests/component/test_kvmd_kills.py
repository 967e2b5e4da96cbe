"""kvmd killed at the worst moments: nothing is lost, nothing is taken for another's."""

from __future__ import annotations

import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from component.kvmd_process import Kvmd
from component.peers import peer, poweroff, two_of_one_name, user_ends, watched
from lab.fake_qemu import GREETING, event_line
from lab.waiting import wait_for


@pytest.mark.parametrize("stays", [False, True], ids=["QEMU ends", "QEMU stays"])
def test_a_verdict_that_is_not_written_yet_survives(kvmd: Kvmd, stays: bool) -> None:
    with watched(kvmd, "web") as web:
        shutil.move(kvmd.control, kvmd.control.with_name("away"))
        user_ends(kvmd, web)
        kvmd.wait_logged("web: its shutdown file can't be made")
        kvmd.wait_verdict_kept()
        kvmd.stop(signal.SIGKILL)
        if not stays:
            web.end(leave_file=True)
        kvmd.start()
        shutil.move(kvmd.control.with_name("away"), kvmd.control)
        wait_for("the file", lambda: kvmd.shut_down_by_user("web"))
        assert len(kvmd.log("web: ended")) == 1
        if not stays:
            wait_for("the record to be dropped", lambda: not list(kvmd.state.glob("*.json")))


@pytest.fixture
def full(kvmd: Kvmd) -> Iterator[None]:
    """A runtime directory in which nothing can be written, but the control directory is fine."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k,nr_inodes=2", "tmpfs", str(kvmd.state)]
    subprocess.run(mount, check=True)
    (kvmd.state / "filler").touch()
    yield
    subprocess.run(["umount", "--lazy", str(kvmd.state)], check=True)


@pytest.mark.usefixtures("full")
def test_a_verdict_that_can_not_be_remembered_is_given_again_after_a_kill(kvmd: Kvmd) -> None:
    with watched(kvmd, "web") as web:
        user_ends(kvmd, web)
        kvmd.wait_logged("web: its record can't be kept for a restart yet: No space left")
        kvmd.stop(signal.SIGKILL)
        web.end()
        kvmd.start()
        assert kvmd.verdict("web", times=2) == "user, guest-shutdown"
        assert kvmd.shut_down_by_user("web")
        (kvmd.state / "filler").unlink()
        time.sleep(1.5)
        assert len(kvmd.log("web: ended")) == 2
        assert kvmd.shut_down_by_user("web")


def test_of_two_with_one_name_each_keeps_its_own(kvmd: Kvmd) -> None:
    """An old QEMU lingers behind a newer one of its name, and kvmd is killed again and again."""
    with two_of_one_name(kvmd) as (old, new):
        new.say(event_line("POWERDOWN"))
        old.say(event_line("STOP"))
        wait_for("both to be remembered", lambda: len(list(kvmd.state.glob("*.json"))) == 2)
        kvmd.stop(signal.SIGKILL)
        kvmd.start()
        old.end(leave_file=True)
        assert kvmd.verdict("web") == "admin, paused"
        wait_for("its descriptor to be discarded", lambda: len(kvmd.manager.stored) == 1)
        kvmd.stop(signal.SIGKILL)
        kvmd.start()
        new.say(poweroff())
        assert kvmd.verdict("web", times=2) == "admin, powerdown"
        assert len(kvmd.log("runs on behind another's socket")) == 1


def test_the_end_of_an_older_vm_leaves_the_newer_ones_verdict_alone(kvmd: Kvmd) -> None:
    with two_of_one_name(kvmd) as (old, new):
        user_ends(kvmd, new)
        kvmd.wait_verdict_kept()
        new.end()
        kvmd.stop(signal.SIGKILL)
        kvmd.start()
        old.end(leave_file=True)
        assert kvmd.verdict("web", times=2) == "crash, eof"
        time.sleep(0.1)
        assert kvmd.shut_down_by_user("web")


def test_both_may_end_while_the_daemon_is_away(kvmd: Kvmd) -> None:
    with two_of_one_name(kvmd) as (old, new):
        kvmd.stop(signal.SIGKILL)
        old.end(leave_file=True)
        new.say(poweroff())
        new.end()
        kvmd.start()
        kvmd.verdict("web", times=2)
        verdicts = {line.split("ended: ")[1] for line in kvmd.log("web: ended")}
        assert verdicts == {"crash, eof", "user, guest-shutdown"}
        assert kvmd.shut_down_by_user("web")


def test_an_end_in_the_middle_of_the_negotiation_is_seen(kvmd: Kvmd) -> None:
    with peer(kvmd, "web") as web:
        connection = web.accept()
        connection.sendall(GREETING)
        assert b"qmp_capabilities" in connection.recv(4096)
        # QEMU has heard it and sends events from now on; the daemon has not heard of that yet.
        kvmd.stop(signal.SIGKILL)
        connection.sendall(b'{"return": {}}\r\n' + poweroff())
        web.end()
        kvmd.start()
        assert kvmd.verdict("web") == "user, guest-shutdown"


def test_a_negotiation_that_was_never_sent_is_made_up_for(kvmd: Kvmd) -> None:
    with peer(kvmd, "web") as web:
        connection = web.negotiate()
        kvmd.watches("web")
        kvmd.stop(signal.SIGKILL)
        kvmd.start()
        assert b"qmp_capabilities" in connection.recv(4096)
        connection.sendall(b'{"error": {"class": "CommandNotFound", "desc": "done already"}}\r\n')
        user_ends(kvmd, web)


def test_half_an_event_at_a_restart_is_not_lost(kvmd: Kvmd) -> None:
    with watched(kvmd, "web") as web:
        kvmd.stop(signal.SIGKILL)
        line = poweroff()
        web.say(line[:50])
        kvmd.start()
        web.say(line[50:])
        assert kvmd.verdict("web") == "user, guest-shutdown"


def test_descriptors_are_kept_for_vms_and_for_nothing_else(kvmd: Kvmd) -> None:
    for number in range(1, 6):
        with watched(kvmd, "web", times=number) as web:
            wait_for("its descriptor", lambda: len(kvmd.manager.stored) == 1)
            web.say(poweroff())
            kvmd.verdict("web", times=number)
        wait_for("it to be discarded", lambda: not kvmd.manager.stored)


def test_a_strangers_descriptor_is_given_back(kvmd: Kvmd) -> None:
    kvmd.stop()
    with kvmd.settings.open() as file:
        kvmd.manager.adopt("something-else", file.fileno())
    kvmd.start()
    wait_for("it to be discarded", lambda: not kvmd.manager.stored)
    with watched(kvmd, "web"):
        pass


def test_when_descriptors_run_out_the_watchdog_is_still_fed(kvmd: Kvmd) -> None:
    kvmd.stop()
    kvmd.start(WATCHDOG_USEC="600000")
    _, hard = resource.prlimit(kvmd.pid, resource.RLIMIT_NOFILE)

    def none_left() -> bool:
        # Among those that are counted may be the one with which it feeds the watchdog.
        resource.prlimit(kvmd.pid, resource.RLIMIT_NOFILE, (kvmd.descriptors(), hard))
        return bool(kvmd.log("systemd can't be told: Too many open files"))

    wait_for("its descriptors to run out", none_left)
    resource.prlimit(kvmd.pid, resource.RLIMIT_NOFILE, (hard, hard))
    fed = kvmd.manager.heard("WATCHDOG")
    wait_for("the watchdog to be fed", lambda: kvmd.manager.heard("WATCHDOG") > fed)
