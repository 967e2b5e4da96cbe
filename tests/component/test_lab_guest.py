"""A guest of the lab, and orders that its serial line damaged."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from lab.guest import Guest, run_order, start_guest
from lab.machine import Host
from lab.waiting import wait_for


def test_a_misheard_command_is_not_run_and_one_ordered_twice_runs_once() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="guest-") as folder,
        start_guest(Host(), "web", control_dir=Path(folder)) as guest,
    ):
        guest.wait_ready()
        order = run_order("command", "echo once >>/run/runs; cat /run/runs 2>/dev/null")
        _tell(guest, order.replace("2>", ">"), lambda: "guest: misheard" in guest.output())
        _tell(guest, order, lambda: _told(guest) >= 2)
        assert guest.run("cat /run/runs") == "once\n"


def _tell(guest: Guest, order: str, is_heard: Callable[[], bool]) -> None:
    """Say something to a guest again and again, as its line may spoil that, too."""

    def heard() -> bool:
        guest.tell(order)
        return is_heard()

    wait_for(order, heard, interval_s=1)


def _told(guest: Guest) -> int:
    return guest.output().count("guest: command ended with 0")
