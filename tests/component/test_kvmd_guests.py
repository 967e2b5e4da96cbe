"""Real guests, each ended in its own way, and the verdict that kvmd gives."""

from __future__ import annotations

import signal
import time

import pytest

from component.kvmd_process import Kvmd
from lab.guest import start_guest
from lab.guest_endings import ENDINGS
from lab.machine import Host


@pytest.mark.parametrize("name", ENDINGS)
def test_each_end_of_a_real_guest_gets_its_verdict(kvmd: Kvmd, name: str) -> None:
    ending = ENDINGS[name]
    with start_guest(Host(), name, control_dir=kvmd.control, **ending.options) as guest:
        guest.wait_ready()
        kvmd.watches(name)
        ending.act(guest)
        who, cause = ending.verdict
        assert kvmd.verdict(name) == f"{who}, {cause}"
        assert kvmd.shut_down_by_user(name) == (who == "user")
        guest.wait()
        time.sleep(0.1)
        assert len(kvmd.log(f": {name}: ended")) == 1


def test_under_no_shutdown_the_verdict_does_not_wait_for_qemus_end(kvmd: Kvmd) -> None:
    with start_guest(Host(), "stay", control_dir=kvmd.control, no_shutdown=True) as guest:
        guest.wait_ready()
        guest.order("poweroff")
        assert kvmd.verdict("stay") == "user, guest-shutdown"
        assert guest.running()
        kvmd.wait_verdict_kept()
        # A daemon that starts anew does not forget it, nor give it again.
        kvmd.stop(signal.SIGKILL)
        kvmd.start()
        assert kvmd.shut_down_by_user("stay")
        assert len(kvmd.log("stay: ended")) == 1
        # Set going again, the guest has not been shut down by its user.
        guest.qmp("system_reset")
        guest.qmp("cont")
        kvmd.wait_logged("stay: runs again")
        assert not kvmd.shut_down_by_user("stay")
        guest.signal(signal.SIGKILL)
        assert kvmd.verdict("stay", times=2) == "crash, eof"


def test_under_no_shutdown_the_end_of_qemu_changes_nothing(kvmd: Kvmd) -> None:
    with start_guest(Host(), "stay", control_dir=kvmd.control, no_shutdown=True) as guest:
        guest.wait_ready()
        guest.order("poweroff")
        assert kvmd.verdict("stay") == "user, guest-shutdown"
        guest.qmp("quit")
        guest.wait()
        time.sleep(0.2)
        assert kvmd.shut_down_by_user("stay")
        assert len(kvmd.log("stay: ended")) == 1


def test_a_powerdown_that_the_guest_ignored_goes_stale(kvmd: Kvmd) -> None:
    kvmd.reload_whole(powerdown_stale_s=0.5)
    # It does not run yet, so that the guest can't hear what is asked of it.
    waits = ["-S"]
    with start_guest(Host(), "deaf", control_dir=kvmd.control, extra_args=waits) as guest:
        kvmd.watches("deaf")
        guest.powerdown()
        guest.qmp("cont")
        guest.wait_ready()
        time.sleep(0.6)
        guest.order("poweroff")
        assert kvmd.verdict("deaf") == "user, guest-shutdown"


def test_a_vm_with_only_one_qmp_socket_is_watched_when_told(kvmd: Kvmd) -> None:
    kvmd.reload_whole(suffix=".qmp")
    with start_guest(Host(), "single", control_dir=kvmd.control) as guest:
        kvmd.watches("single")
        guest.wait_ready()
        guest.order("poweroff")
        assert kvmd.verdict("single") == "user, guest-shutdown"


def test_guests_are_found_whether_they_start_before_or_after(kvmd: Kvmd) -> None:
    kvmd.stop()
    with start_guest(Host(), "early", control_dir=kvmd.control) as early:
        early.wait_ready()
        kvmd.start()
        kvmd.watches("early")
        early.order("poweroff")
        assert kvmd.verdict("early") == "user, guest-shutdown"


def test_a_name_may_be_used_again_at_once(kvmd: Kvmd) -> None:
    for number in range(1, 4):
        with start_guest(Host(), "again", control_dir=kvmd.control) as guest:
            kvmd.watches("again", times=number)
            assert not kvmd.shut_down_by_user("again")
            guest.wait_ready()
            guest.order("poweroff")
            assert kvmd.verdict("again", times=number) == "user, guest-shutdown"
            guest.wait()
